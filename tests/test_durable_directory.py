"""The durable tier on a directory: whole or not at all, checked, and never fooled by what lies in the folder (R31)."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from memstore.core.durable_marker import decode_marker, encode_marker
from memstore.core.durable_part import HEADER_BYTES, PartHeader, decode_header
from memstore.errors import (
    CapacityError,
    ConfigError,
    DigestMismatch,
    IntegrityError,
    InternalError,
    MemstoreError,
    PeerTimeout,
    TransportError,
)
from memstore.shell import durable_directory, durable_file
from memstore.shell.durable_directory import DirectoryTier, tier_from_url
from recovery.inventory import DurableMarker, ShardId, ShardSpec, StepId

JOB = "llama3-8b"
CHUNK = 4096
MANIFEST = b"manifest of "


def never() -> bool:
    return False


def shard_of(step: int, rank: int = 0, attempt: int = 1) -> ShardId:
    return ShardId(JOB, attempt, step, rank)


def payload_of(shard: ShardId, nbytes: int) -> bytes:
    return random.Random(repr(shard)).randbytes(nbytes)


def manifest_of(shard: ShardId) -> bytes:
    return MANIFEST + repr(shard).encode()


def chunks_of(payload: bytes) -> list[memoryview]:
    return [memoryview(payload)[at : at + CHUNK] for at in range(0, len(payload), CHUNK)]


def spec_of(shard: ShardId, nbytes: int, world_size: int) -> ShardSpec:
    digest = xxhash.xxh3_128_hexdigest(manifest_of(shard))
    return ShardSpec(digest, nbytes, CHUNK, -(-nbytes // CHUNK), world_size)


def lineage_of(attempt: int) -> dict[str, int | None]:
    return {"attempt": attempt, "parent_attempt": None, "parent_step": None}


def write_part(tier: DirectoryTier, shard: ShardId, nbytes: int = 3 * CHUNK + 7) -> None:
    assert tier.write_part(shard, manifest_of(shard), chunks_of(payload_of(shard, nbytes)), should_stop=never)


def write_step(tier: DirectoryTier, step: int, *, ranks: int = 2, nbytes: int = 3 * CHUNK + 7) -> DurableMarker:
    specs = {}
    for rank in range(ranks):
        write_part(tier, shard_of(step, rank), nbytes)
        specs[rank] = spec_of(shard_of(step, rank), nbytes, ranks)
    marker = DurableMarker(StepId(1, step), ranks, specs)
    tier.write_marker(JOB, marker, lineage_of(1))
    return marker


def read_payload(tier: DirectoryTier, shard: ShardId, spec: ShardSpec) -> bytes:
    out = bytearray(spec.nbytes)
    for index in range(spec.chunks_count):
        start = index * spec.chunk_bytes
        tier.read_chunk_into(shard, index, memoryview(out)[start : start + spec.chunk_nbytes(index)])
    return bytes(out)


def files_under(root: str) -> set[str]:
    return {str((Path(folder) / name).relative_to(root)) for folder, _, names in os.walk(root) for name in names}


@pytest.fixture
def tier(tmp_path: Path) -> DirectoryTier:
    (tmp_path / "durable").mkdir()
    return DirectoryTier(tmp_path / "durable")


@pytest.mark.parametrize("nbytes", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK])
def test_step_round_trips(tier: DirectoryTier, nbytes: int) -> None:
    """What was written comes back bit for bit, for empty, short, exact and ragged payloads."""
    marker = write_step(tier, 10, nbytes=nbytes)
    assert tier.markers(JOB) == ([marker], [])
    assert tier.jobs() == [JOB]
    for rank, spec in marker.specs.items():
        shard = shard_of(10, rank)
        assert tier.read_manifest(shard, spec.digest) == manifest_of(shard)
        assert read_payload(tier, shard, spec) == payload_of(shard, nbytes)
    assert files_under(tier.root) == {f"{JOB}/1/10/{name}" for name in ("marker", "rank-0", "rank-1")}


def test_large_part_is_flushed_on_the_way(tier: DirectoryTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written pages are handed to storage every so often, and the bytes are the same."""
    flushed: list[int] = []
    real = os.fdatasync
    monkeypatch.setattr(durable_file, "_FLUSH_BYTES", 2 * CHUNK)
    monkeypatch.setattr(os, "fdatasync", lambda fd: (flushed.append(fd), real(fd))[1])
    write_part(tier, shard_of(1), 9 * CHUNK)
    assert len(flushed) == 4
    assert read_payload(tier, shard_of(1), spec_of(shard_of(1), 9 * CHUNK, 1)) == payload_of(shard_of(1), 9 * CHUNK)


def test_markers_come_oldest_first_with_lineage(tier: DirectoryTier) -> None:
    """Attempts and steps are ordered as numbers, and each record carries its parent (R22)."""
    for attempt, step in ((2, 9), (10, 100), (2, 10)):
        write_part(tier, shard_of(step, 0, attempt))
        spec = spec_of(shard_of(step, 0, attempt), 3 * CHUNK + 7, 1)
        lineage = {"attempt": attempt, "parent_attempt": attempt - 1, "parent_step": 8, "chain": [[1, 8]]}
        tier.write_marker(JOB, DurableMarker(StepId(attempt, step), 1, {0: spec}), lineage)
    records, problems = tier.marker_records(JOB)
    assert [record.marker.step for record in records] == [StepId(2, 9), StepId(2, 10), StepId(10, 100)]
    assert records[-1].lineage == {"attempt": 10, "parent_attempt": 9, "parent_step": 8, "chain": [[1, 8]]}
    assert problems == []


def test_part_without_marker_is_invisible(tier: DirectoryTier) -> None:
    """A crash before the marker leaves a step that nobody is offered."""
    write_part(tier, shard_of(5))
    assert tier.markers(JOB) == ([], [])


def test_marker_is_refused_before_its_parts(tier: DirectoryTier) -> None:
    """The marker is last: with a part missing or different it is not written."""
    write_part(tier, shard_of(5, 0))
    specs = {rank: spec_of(shard_of(5, rank), 3 * CHUNK + 7, 2) for rank in range(2)}
    with pytest.raises(IntegrityError, match="rank-1"):
        tier.write_marker(JOB, DurableMarker(StepId(1, 5), 2, specs), lineage_of(1))
    write_part(tier, shard_of(5, 1), CHUNK)
    with pytest.raises(IntegrityError, match="would promise"):
        tier.write_marker(JOB, DurableMarker(StepId(1, 5), 2, specs), lineage_of(1))
    assert tier.markers(JOB) == ([], [])


def test_same_part_again_is_fine_but_other_bytes_are_not(tier: DirectoryTier) -> None:
    """Once a marker promises a part, only the same shard may take its place."""
    marker = write_step(tier, 5)
    write_part(tier, shard_of(5))
    with pytest.raises(IntegrityError, match="remove the step first"):
        tier.write_part(shard_of(5), b"other", [], should_stop=never)
    with pytest.raises(IntegrityError, match="no part"):
        write_part(tier, shard_of(5, rank=2))
    assert tier.read_manifest(shard_of(5), marker.specs[0].digest) == manifest_of(shard_of(5))


def test_every_torn_marker_is_reported_and_skipped(tier: DirectoryTier) -> None:
    """No prefix of a marker, and no marker with one byte changed, is trusted; sound ones are still listed."""
    sound = write_step(tier, 1)
    write_step(tier, 2)
    path = Path(tier.root, JOB, "1", "2", "marker")
    whole = path.read_bytes()
    damaged = [whole[:length] for length in range(0, len(whole), 7)]
    damaged += [whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :] for at in range(0, len(whole), 7)]
    for data in damaged:
        path.write_bytes(data)
        markers, problems = tier.markers(JOB)
        assert markers == [sound]
        assert len(problems) == 1
        assert "step 2" in problems[0]


def test_marker_of_another_step_is_not_trusted(tier: DirectoryTier) -> None:
    """A sound marker copied into another step's folder names the wrong bytes and is reported."""
    write_step(tier, 1)
    write_part(tier, shard_of(2))
    step = Path(tier.root, JOB, "1")
    (step / "2" / "marker").write_bytes((step / "1" / "marker").read_bytes())
    markers, problems = tier.markers(JOB)
    assert [marker.step.step for marker in markers] == [1]
    assert "belongs to" in problems[0]


def test_oversized_marker_is_refused_before_it_is_read(tier: DirectoryTier) -> None:
    """A sparse file of a terabyte in the marker's place costs no memory."""
    write_step(tier, 1)
    os.truncate(Path(tier.root, JOB, "1", "1", "marker"), 1 << 40)
    assert "the limit is" in tier.markers(JOB)[1][0]


@pytest.mark.parametrize("cut", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 5, HEADER_BYTES + 3000, -1])
def test_truncated_part_is_refused(tier: DirectoryTier, cut: int) -> None:
    """A part cut anywhere is an IntegrityError for the manifest and for each chunk."""
    marker = write_step(tier, 1)
    path = Path(tier.root, JOB, "1", "1", "rank-0")
    os.truncate(path, cut if cut >= 0 else path.stat().st_size + cut)
    with pytest.raises(IntegrityError, match="rank-0"):
        tier.read_manifest(shard_of(1), marker.specs[0].digest)
    with pytest.raises(IntegrityError):
        tier.read_chunk_into(shard_of(1), 0, memoryview(bytearray(CHUNK)))


def test_altered_header_or_manifest_is_refused(tier: DirectoryTier) -> None:
    """Any changed byte of the header or the manifest is found; a wrong digest is a DigestMismatch with both."""
    marker = write_step(tier, 1)
    path = Path(tier.root, JOB, "1", "1", "rank-0")
    whole = path.read_bytes()
    for at in range(HEADER_BYTES + len(manifest_of(shard_of(1)))):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(IntegrityError):
            tier.read_manifest(shard_of(1), marker.specs[0].digest)
    path.write_bytes(whole)
    with pytest.raises(DigestMismatch) as caught:
        tier.read_manifest(shard_of(1), marker.specs[1].digest)
    assert vars(caught.value)["expected"] == marker.specs[1].digest


@pytest.mark.parametrize(("index", "nbytes"), [(0, CHUNK - 1), (3, CHUNK), (4, 7), (-1, CHUNK)])
def test_chunk_of_another_size_or_place_is_refused(tier: DirectoryTier, index: int, nbytes: int) -> None:
    """A view that is not the chunk's size, or an index out of range, is never filled in part."""
    write_step(tier, 1)
    with pytest.raises(IntegrityError):
        tier.read_chunk_into(shard_of(1), index, memoryview(bytearray(nbytes)))


def test_stop_in_the_middle_leaves_nothing(tier: DirectoryTier) -> None:
    """An abandoned write returns False, and neither the part nor a temporary file is left (R31)."""
    asked: list[bool] = []

    def stop_at_third() -> bool:
        asked.append(True)
        return len(asked) >= 3

    shard = shard_of(1)
    chunks = chunks_of(payload_of(shard, 9 * CHUNK))
    assert not tier.write_part(shard, manifest_of(shard), chunks, should_stop=stop_at_third)
    assert len(asked) == 3
    assert files_under(tier.root) == set()


def test_stop_after_the_last_chunk_is_heard(tier: DirectoryTier) -> None:
    """A write is abandoned even when only the sync is left."""
    answers = iter([False, True])
    assert not tier.write_part(
        shard_of(1), b"m", chunks_of(payload_of(shard_of(1), CHUNK)), should_stop=lambda: next(answers)
    )
    assert files_under(tier.root) == set()


def test_failing_source_leaves_nothing_and_its_error_passes(tier: DirectoryTier) -> None:
    """When the chunks cannot be read any more the caller's error comes out unchanged and no temporary file stays."""

    def expired() -> Iterator[memoryview]:
        yield memoryview(bytes(CHUNK))
        raise PeerTimeout("the pin expired")

    with pytest.raises(PeerTimeout, match="the pin expired"):
        tier.write_part(shard_of(1), b"m", expired(), should_stop=never)
    assert files_under(tier.root) == set()


@pytest.mark.parametrize("sizes", [(CHUNK, 7, CHUNK), (7, CHUNK), (CHUNK, 0), (0,), (CHUNK, 7, 7)])
def test_uneven_chunks_are_our_bug(tier: DirectoryTier, sizes: tuple[int, ...]) -> None:
    """Chunks that could not be found again by their index are refused, not written."""
    with pytest.raises(InternalError, match="all but the last"):
        tier.write_part(shard_of(1), b"m", [memoryview(bytes(size)) for size in sizes], should_stop=never)
    assert files_under(tier.root) == set()


def test_concurrent_writers_of_one_part(tier: DirectoryTier) -> None:
    """Two writers of the same shard, in step chunk by chunk, both succeed and leave one whole part."""
    shard, turn = shard_of(1), threading.Barrier(2, timeout=20)
    results: list[bool] = []

    def paced() -> Iterator[memoryview]:
        for chunk in chunks_of(payload_of(shard, 8 * CHUNK)):
            turn.wait()
            yield chunk

    def write() -> None:
        results.append(tier.write_part(shard, manifest_of(shard), paced(), should_stop=never))

    writers = [threading.Thread(target=write) for _ in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(30)
    assert results == [True, True]
    assert files_under(tier.root) == {f"{JOB}/1/1/rank-0"}
    assert read_payload(tier, shard, spec_of(shard, 8 * CHUNK, 1)) == payload_of(shard, 8 * CHUNK)


def test_everything_is_synced_before_it_is_named(tier: DirectoryTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is synced before the rename and the folder after it, for parts and markers alike."""
    calls: list[str] = []
    real_sync, real_rename = os.fsync, os.rename

    def sync(fd: int) -> None:
        calls.append("folder" if os.path.isdir(f"/proc/self/fd/{fd}") else "file")
        real_sync(fd)

    def rename(old: str, new: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        calls.append(new)
        real_rename(old, new, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "rename", rename)
    write_step(tier, 1, ranks=1)
    assert calls == ["folder"] * 3 + ["file", "rank-0", "folder", "file", "marker", "folder"]


def test_marker_goes_first_and_durably(tier: DirectoryTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Retention unlinks the marker and syncs the folder before it touches a part, so no crash leaves a hollow step."""
    write_step(tier, 1)
    kept = write_step(tier, 2)
    calls: list[str] = []
    real_unlink, real_sync = os.unlink, os.fsync
    monkeypatch.setattr(os, "unlink", lambda name, *, dir_fd: (calls.append(name), real_unlink(name, dir_fd=dir_fd)))
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append("sync"), real_sync(fd)))
    tier.remove_step(JOB, StepId(1, 1))
    assert calls[:2] == ["marker", "sync"]
    assert sorted(calls[2:]) == ["rank-0", "rank-1"]
    tier.remove_step(JOB, StepId(1, 1))
    assert tier.markers(JOB) == ([kept], [])
    assert not Path(tier.root, JOB, "1", "1").exists()


def test_remove_job_leaves_strangers_alone(tier: DirectoryTier) -> None:
    """All of a job goes; a file somebody else put there stays, with the folders above it."""
    write_step(tier, 1)
    write_step(tier, 2)
    stranger = Path(tier.root, JOB, "1", "2", "notes.txt")
    stranger.write_text("mine")
    tier.remove_job(JOB)
    assert files_under(tier.root) == {f"{JOB}/1/2/notes.txt"}
    stranger.unlink()
    tier.remove_job(JOB)
    assert tier.jobs() == []
    tier.remove_job(JOB)


def test_sweep_removes_what_crashes_left(tier: DirectoryTier) -> None:
    """Temporary files and unmarked steps go, unless a live write may own them."""
    marker = write_step(tier, 1)
    for step in (2, 3, 4):
        write_part(tier, shard_of(step))
    for step in (1, 2, 3):
        Path(tier.root, JOB, "1", str(step), ".tmp-rank-0-00").write_bytes(b"half")
    assert tier.sweep(JOB, {StepId(1, 3)}) == (StepId(1, 2),)
    left = {f"{JOB}/1/{name}" for name in ("1/marker", "1/rank-0", "1/rank-1", "3/rank-0", "3/.tmp-rank-0-00")}
    assert files_under(tier.root) == left | {f"{JOB}/1/4/rank-0"}
    assert tier.sweep(JOB, ()) == (StepId(1, 3), StepId(1, 4))
    assert tier.markers(JOB) == ([marker], [])


def test_sweep_leaves_a_damaged_marker_to_a_person(tier: DirectoryTier) -> None:
    """A step whose marker cannot be read is not deleted by a housekeeper."""
    write_step(tier, 1)
    Path(tier.root, JOB, "1", "1", "marker").write_bytes(b"torn")
    assert tier.sweep(JOB, ()) == ()
    assert len(files_under(tier.root)) == 3


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_symbolic_links_below_the_root_are_not_followed(tier: DirectoryTier, tmp_path: Path, depth: int) -> None:
    """Job, attempt or step as a link to a folder elsewhere: nothing is written, read, listed or removed through it."""
    write_step(tier, 1, ranks=1)
    names = [JOB, "1", "1"][:depth]
    inside, outside = Path(tier.root, *names), tmp_path / "outside"
    inside.rename(outside)
    inside.symlink_to(outside)
    before = files_under(str(outside))
    with pytest.raises(IntegrityError):
        write_part(tier, shard_of(1))
    with pytest.raises(IntegrityError):
        tier.read_manifest(shard_of(1), spec_of(shard_of(1), 0, 1).digest)
    with pytest.raises(IntegrityError):
        tier.remove_step(JOB, StepId(1, 1))
    if depth == 1:
        assert tier.jobs() == []
        with pytest.raises(IntegrityError):
            tier.markers(JOB)
    else:
        markers, problems = tier.markers(JOB)
        assert markers == []
        assert "symbolic link" in problems[0]
    assert files_under(str(outside)) == before


@pytest.mark.parametrize("name", ["rank-0", "marker"])
@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_files_of_another_kind_are_refused(tier: DirectoryTier, tmp_path: Path, name: str, kind: str) -> None:
    """A link, a pipe or a folder in the place of a part or marker is refused at once and never waited for."""
    digest = write_step(tier, 1, ranks=1).specs[0].digest
    path = Path(tier.root, JOB, "1", "1", name)
    path.rename(tmp_path / "elsewhere")
    if kind == "link":
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    if name == "marker":
        assert len(tier.markers(JOB)[1]) == 1
        assert tier.markers(JOB)[0] == []
    else:
        with pytest.raises(IntegrityError):
            tier.read_manifest(shard_of(1), digest)


@pytest.mark.parametrize("job", ["", ".", "..", "a/b", "../x", ".hidden", "a" * 65, "a\n", "a\0b", "ä"])
def test_job_names_cannot_leave_the_root(tier: DirectoryTier, job: str) -> None:
    """A name that is no plain folder name is a ConfigError in every call that takes one."""
    calls: list[Callable[[], object]] = [
        lambda: tier.write_part(ShardId(job, 1, 1, 0), b"m", [], should_stop=never),
        lambda: tier.read_manifest(ShardId(job, 1, 1, 0), ""),
        lambda: tier.markers(job),
        lambda: tier.remove_step(job, StepId(1, 1)),
        lambda: tier.remove_job(job),
        lambda: tier.sweep(job, ()),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match="no folder name"):
            call()


@pytest.mark.parametrize("shard", [ShardId(JOB, -1, 1, 0), ShardId(JOB, 1, -1, 0), ShardId(JOB, 1, 1, -1)])
def test_negative_numbers_are_refused(tier: DirectoryTier, shard: ShardId) -> None:
    """Attempt, step and rank become file names only as whole numbers from 0."""
    with pytest.raises(ConfigError, match="whole number"):
        tier.write_part(shard, b"m", [], should_stop=never)


def test_missing_root_is_never_an_empty_history(tmp_path: Path) -> None:
    """An unmounted share is an error that says so, not a job that nobody knows (R23)."""
    tier = DirectoryTier(tmp_path / "unmounted")
    for call in (tier.jobs, lambda: tier.markers(JOB), lambda: tier.sweep(JOB, ())):
        with pytest.raises(ConfigError, match="mount or create it"):
            call()
    (tmp_path / "unmounted").mkdir()
    assert tier.markers(JOB) == ([], [])


def test_probe_creates_the_last_folder_and_leaves_no_file(tmp_path: Path) -> None:
    """Probing a new folder below an existing one succeeds, as often as asked; a missing parent is refused."""
    tier = DirectoryTier(tmp_path / "new")
    tier.probe()
    tier.probe()
    assert list((tmp_path / "new").iterdir()) == []
    with pytest.raises(ConfigError, match="ENOENT") as caught:
        DirectoryTier(tmp_path / "not-mounted" / "new").probe()
    assert "mount" in str(caught.value)


def test_probe_of_a_folder_without_write_access_says_what_to_do() -> None:
    """The message names the path, the errno and the remedy."""
    with tempfile.TemporaryDirectory() as root:
        os.chmod(root, 0o555)
        if os.geteuid() == 0:
            os.seteuid(65534)  # root may write anywhere
            try:
                error = probe_error(DirectoryTier(root))
            finally:
                os.seteuid(0)
        else:
            error = probe_error(DirectoryTier(root))
    assert root in error
    assert "EACCES" in error
    assert "write access" in error


def probe_error(tier: DirectoryTier) -> str:
    with pytest.raises(ConfigError) as caught:
        tier.probe()
    return str(caught.value)


@pytest.fixture
def small_disk() -> Iterator[str]:
    """A file system of 256 KiB."""
    root = tempfile.mkdtemp()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "none", root]
    try:
        if os.geteuid() != 0 or subprocess.run(command, capture_output=True, timeout=20).returncode != 0:
            pytest.skip("needs the right to mount a small tmpfs")
        try:
            yield root
        finally:
            subprocess.run(["umount", root], check=True, timeout=20)
    finally:
        os.rmdir(root)


def test_full_disk_is_a_capacity_error_and_gives_the_room_back(small_disk: str) -> None:
    """A part that does not fit leaves nothing, the steps before it stay readable, and smaller ones still fit."""
    tier = DirectoryTier(small_disk)
    tier.probe()
    first = write_step(tier, 1, ranks=1)
    before = os.statvfs(small_disk).f_bavail
    with pytest.raises(CapacityError, match="ENOSPC"):
        write_part(tier, shard_of(2), 200 * CHUNK)
    assert os.statvfs(small_disk).f_bavail == before
    second = write_step(tier, 2, ranks=1)
    assert tier.markers(JOB) == ([first, second], [])


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (errno.EIO, TransportError),
        (errno.ESTALE, TransportError),
        (errno.ETIMEDOUT, TransportError),
        (errno.EDQUOT, CapacityError),
        (errno.EROFS, ConfigError),
        (errno.ENOENT, IntegrityError),
    ],
)
def test_errors_say_what_they_prove(
    tier: DirectoryTier, monkeypatch: pytest.MonkeyPatch, code: int, expected: type[MemstoreError]
) -> None:
    """An I/O error or a stale handle is no evidence about the bytes (R25); every error names the path."""
    digest = write_step(tier, 1, ranks=1).specs[0].digest

    def fail(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(expected, match=errno.errorcode[code]) as caught:
        tier.read_manifest(shard_of(1), digest)
    assert "rank-0" in str(caught.value)
    assert isinstance(caught.value, IntegrityError) == (expected is IntegrityError)


def test_folders_that_cannot_be_synced_are_tolerated(tier: DirectoryTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some network file systems refuse to sync a folder; only that refusal is passed over."""
    real = os.fsync

    def sync(fd: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EINVAL, "not on folders")
        real(fd)

    monkeypatch.setattr(os, "fsync", sync)
    marker = write_step(tier, 1)
    assert tier.markers(JOB) == ([marker], [])


def test_no_descriptor_is_leaked(tier: DirectoryTier) -> None:
    """Reads, writes, refusals and listings leave no file open."""
    digest = write_step(tier, 1, ranks=1).specs[0].digest
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        write_part(tier, shard_of(2))
        tier.read_manifest(shard_of(1), digest)
        with pytest.raises(IntegrityError):
            tier.read_manifest(shard_of(9), digest)
        tier.markers(JOB)
        tier.sweep(JOB, ())
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("url", ["/mnt/ckpt", "file:///mnt/ckpt", "file://localhost/mnt/ckpt", "file:///mnt/%63kpt"])
def test_paths_and_file_urls_are_directories(url: str) -> None:
    """A plain absolute path and file:// name the same tier."""
    tier = tier_from_url(url)
    assert isinstance(tier, durable_directory.DirectoryTier)
    assert tier.root == "/mnt/ckpt"


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("s3://bucket/key", "not supported yet"),
        ("gs://bucket", "not supported yet"),
        ("s3://[", "not supported yet"),
        ("file://elsewhere/x", "without host"),
        ("file:///x?y=1", "without host"),
        ("relative/path", "not an absolute path"),
        ("~/ckpt", "not an absolute path"),
        ("", "not an absolute path"),
        ("/a\0b", "NUL"),
        ("file:///a%00b", "NUL"),
    ],
)
def test_other_urls_are_refused_with_the_way_out(url: str, reason: str) -> None:
    """Object stores, other hosts and relative paths are ConfigErrors that say what is supported."""
    with pytest.raises(ConfigError, match=reason):
        tier_from_url(url)


HEX = st.binary(min_size=16, max_size=16).map(bytes.hex)


@st.composite
def marker_values(draw: st.DrawFn) -> DurableMarker:
    world_size = draw(st.integers(1, 6))
    specs = {}
    for rank in range(world_size):
        nbytes, chunk_bytes = draw(st.integers(0, 1 << 40)), draw(st.integers(1, 1 << 30))
        specs[rank] = ShardSpec(draw(HEX), nbytes, chunk_bytes, -(-nbytes // chunk_bytes), world_size)
    return DurableMarker(StepId(draw(st.integers(0, 1 << 40)), draw(st.integers(0, 1 << 40))), world_size, specs)


@given(marker=marker_values(), cut=st.integers(0, 10**6), flip=st.integers(0, 10**6))
def test_marker_records_round_trip_and_no_damage_passes(marker: DurableMarker, cut: int, flip: int) -> None:
    """Any marker comes back equal; any prefix and any flipped bit is an IntegrityError."""
    data = encode_marker(JOB, marker, lineage_of(marker.step.attempt))
    assert decode_marker(data).marker == marker
    at = flip % (8 * len(data))
    flipped = bytearray(data)
    flipped[at // 8] ^= 1 << at % 8
    for bad in (data[: cut % len(data)], bytes(flipped), data + b"\n"):
        with pytest.raises(IntegrityError):
            decode_marker(bad)


GOOD = (
    '{"job": "j", "attempt": 1, "step": 2, "world_size": 1, '
    '"lineage": {"attempt": 1, "parent_attempt": null, "parent_step": null}, "parts": [["'
    + "0" * 32
    + '", 9, 4, 3, 1]]}'
)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"step": 2', '"step": -2'),
        ('"step": 2', '"step": 2.0'),
        ('"step": 2', '"step": true'),
        ('"step": 2', '"stop": 2'),
        ('"step": 2', '"step": 1' + "0" * 30),
        ('"world_size": 1', '"world_size": 0'),
        ('"world_size": 1', '"world_size": 1000000000'),
        ('"job": "j"', '"job": 1'),
        ('{"attempt": 1, "par', '{"attempt": 2, "par'),
        ('"parent_step": null', '"parent_step": "x"'),
        ("9, 4, 3, 1", "9, 4, 2, 1"),
        ("9, 4, 3, 1", "9, 0, 3, 1"),
        ("9, 4, 3, 1", "9, 4, 3, 2"),
        ("9, 4, 3, 1", "9, 4, 3"),
        ("0" * 32, "0" * 31 + "g"),
        (GOOD, "[1]"),
        (GOOD, "[" * 100000),
        (GOOD, "\udcff"),
    ],
)
def test_marker_with_a_sound_digest_and_bad_fields_is_refused(old: str, new: str) -> None:
    """The digest is not trusted to vouch for the contents: every field is checked."""

    def sealed(text: str) -> bytes:
        record = b"memstore-marker 1\n" + text.encode(errors="surrogateescape") + b"\n"
        return record + xxhash.xxh3_128_hexdigest(record).encode() + b"\n"

    assert decode_marker(sealed(GOOD)).marker.step == StepId(1, 2)
    assert old in GOOD
    with pytest.raises(IntegrityError, match="bad contents"):
        decode_marker(sealed(GOOD.replace(old, new)))


@pytest.mark.parametrize(
    ("ranks", "lineage"),
    [
        ([0, 2], lineage_of(1)),
        ([0], lineage_of(1)),
        ([], lineage_of(1)),
        ([0, 1], lineage_of(2)),
        ([0, 1], {}),
        ([0, 1], {**lineage_of(1), "extra": b"bytes"}),
        ([0, 1], {**lineage_of(1), "extra": float("nan")}),
    ],
)
def test_incomplete_marker_is_not_encoded(ranks: list[int], lineage: dict[str, object]) -> None:
    """A marker lists every rank's part and its lineage, or is refused before it reaches the disk (R31)."""
    specs = {rank: ShardSpec("0" * 32, 9, 4, 3, 2) for rank in ranks}
    with pytest.raises(ConfigError, match="marker of"):
        encode_marker(JOB, DurableMarker(StepId(1, 2), 2, specs), lineage)


@given(st.integers(0, 1 << 20), st.integers(1, 1 << 30), st.integers(0, 1 << 50), HEX)
def test_part_headers_round_trip_and_tile_the_file(
    manifest_nbytes: int, chunk_bytes: int, payload_nbytes: int, digest: str
) -> None:
    """A header comes back equal, and its first and last chunk end where the file says."""
    header = PartHeader(manifest_nbytes, chunk_bytes, payload_nbytes, digest)
    file_nbytes = HEADER_BYTES + manifest_nbytes + payload_nbytes
    assert decode_header(header.encode(), file_nbytes=file_nbytes) == header
    if header.chunks_count:
        assert header.chunk_range(0)[0] == HEADER_BYTES + manifest_nbytes
        assert sum(header.chunk_range(header.chunks_count - 1)) == file_nbytes
    with pytest.raises(IntegrityError):
        decode_header(header.encode(), file_nbytes=file_nbytes + 1)


def test_headers_of_other_formats_say_so() -> None:
    """Another magic, another version, an absurd manifest and chunks of nothing each get their own words."""

    def refusal(fields: bytes, file_nbytes: int) -> str:
        sealed = fields + xxhash.xxh3_64_intdigest(fields).to_bytes(8, "little")
        with pytest.raises(IntegrityError) as caught:
            decode_header(sealed, file_nbytes=file_nbytes)
        return str(caught.value)

    fields = PartHeader(1 << 30, 4, 0, "0" * 32).encode()[:-8]
    assert "not a memstore part" in refusal(b"X" + fields[1:], 0)
    assert "part format 9" in refusal(fields[:8] + b"\x09" + fields[9:], 0)
    assert "the limit is" in refusal(fields, HEADER_BYTES + (1 << 30))
    assert "chunks of 0" in refusal(PartHeader(0, 0, 5, "0" * 32).encode()[:-8], HEADER_BYTES + 5)

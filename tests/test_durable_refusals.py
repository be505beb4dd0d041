"""The durable tier is never fooled by what lies in the folder, and its errors say what to do (R31)."""

from __future__ import annotations

import errno
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from memstore.core.durable_part import HEADER_BYTES
from memstore.errors import (
    CapacityError,
    ConfigError,
    DigestMismatch,
    IntegrityError,
    MemstoreError,
    TransportError,
)
from memstore.shell import durable_directory
from memstore.shell.durable_directory import DirectoryTier, tier_from_url
from memstore.testing.durable_steps import (
    CHUNK,
    JOB,
    files_under,
    manifest_of,
    never,
    shard_of,
    spec_of,
    write_part,
    write_step,
)
from recovery.inventory import ShardId, StepId


@pytest.fixture
def tier(tmp_path: Path) -> DirectoryTier:
    (tmp_path / "durable").mkdir()
    return DirectoryTier(tmp_path / "durable")


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

"""The durable tier on a directory: whole or not at all, marker last, marker first to go (R31)."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from memstore.errors import (
    IntegrityError,
    InternalError,
    PeerTimeout,
)
from memstore.shell import durable_file
from memstore.shell.durable_directory import DirectoryTier
from memstore.testing.durable_steps import (
    CHUNK,
    JOB,
    chunks_of,
    files_under,
    lineage_of,
    manifest_of,
    never,
    payload_of,
    read_payload,
    shard_of,
    spec_of,
    write_part,
    write_step,
)
from recovery.inventory import DurableMarker, StepId


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

    def flush(fd: int) -> None:
        flushed.append(fd)
        real(fd)

    monkeypatch.setattr(durable_file, "_FLUSH_BYTES", 2 * CHUNK)
    monkeypatch.setattr(os, "fdatasync", flush)
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
    with pytest.raises(IntegrityError, match=r"lacks 1 of 2 parts, first ranks \[1\]"):
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

    def unlink(name: str, *, dir_fd: int) -> None:
        calls.append(name)
        real_unlink(name, dir_fd=dir_fd)

    def sync(fd: int) -> None:
        calls.append("sync")
        real_sync(fd)

    monkeypatch.setattr(os, "unlink", unlink)
    monkeypatch.setattr(os, "fsync", sync)
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

"""The durable tier on a directory: whole or not at all, marker last, marker first to go (R31)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from memstore.shell.durable.directory import DirectoryFiles
from memstore.shell.durable.tier import PartsTier
from memstore.testing.data.durable_steps import (
    JOB,
    files_under,
    names_of,
    shard_of,
    write_part,
    write_step,
)
from recovery.inventory import StepId


@pytest.fixture
def tier(tmp_path: Path) -> PartsTier:
    (tmp_path / "durable").mkdir()
    return PartsTier(DirectoryFiles(tmp_path / "durable"))


def test_everything_is_synced_before_it_is_named(tier: PartsTier, monkeypatch: pytest.MonkeyPatch) -> None:
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
    first, second = names_of(shard_of(1))
    made = ["folder"] * 3
    assert calls == [
        *made, "file", first, "folder", *made, "file", second, "folder", *made, "file", "marker", "folder"
    ]  # fmt: skip


def test_marker_goes_first_and_durably(tier: PartsTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Retention unlinks the marker and syncs the folder before it touches a part, so no crash leaves a marked step
    without parts.
    """
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
    assert sorted(calls[2:]) == sorted(names_of(shard_of(1)) + names_of(shard_of(1, 1)))
    tier.remove_step(JOB, StepId(1, 1))
    assert tier.markers(JOB) == ([kept], [])
    assert not Path(tier.files.where, JOB, "1", "1").exists()


def test_remove_job_leaves_strangers_alone(tier: PartsTier) -> None:
    """All of a job goes; a file another process put there stays, with the folders above it."""
    write_step(tier, 1)
    write_step(tier, 2)
    stranger = Path(tier.files.where, JOB, "1", "2", "notes.txt")
    stranger.write_text("mine")
    tier.remove_job(JOB)
    assert files_under(tier.files.where) == {f"{JOB}/1/2/notes.txt"}
    stranger.unlink()
    tier.remove_job(JOB)
    assert tier.jobs() == []
    tier.remove_job(JOB)


def test_sweep_removes_what_crashes_left(tier: PartsTier) -> None:
    """Temporary files and unmarked steps go, unless a live write may own them."""
    marker = write_step(tier, 1)
    for step in (2, 3, 4):
        write_part(tier, shard_of(step))
    for step in (1, 2, 3):
        Path(tier.files.where, JOB, "1", str(step), ".tmp-rank-0.0-00").write_bytes(b"half")
    assert tier.sweep(JOB, {StepId(1, 3)}) == (StepId(1, 2),)
    whole = ["marker", *names_of(shard_of(1)), *names_of(shard_of(1, 1))]
    left = {*(f"1/{name}" for name in whole), *(f"3/{name}" for name in names_of(shard_of(3))), "3/.tmp-rank-0.0-00"}
    left |= {f"4/{name}" for name in names_of(shard_of(4))}
    assert files_under(tier.files.where) == {f"{JOB}/1/{name}" for name in left}
    assert tier.sweep(JOB, ()) == (StepId(1, 3), StepId(1, 4))
    assert tier.markers(JOB) == ([marker], [])

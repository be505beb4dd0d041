"""Drills of memory and storage that run short: the faults themselves, where they can be played, and real plays."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from click.testing import CliRunner

import memstore.drills.run.suite as suite_module
from memstore.config import MIB
from memstore.drills.cli import drill as drill_command
from memstore.drills.model.catalogue import DRILLS, EMBEDDED, GOES_ON, NAMESPACES, TIGHT, Options, find
from memstore.drills.model.report import PASS, PHASES, Report
from memstore.drills.run.runner import SCENES, run_drill
from memstore.drills.run.suite import Play, Suite
from memstore.drills.sites import site_options
from memstore.drills.sites.site_tight import TightSite, environment, low_threshold, tight_site
from memstore.errors import DrillError
from memstore.testing.clusters.processes import wait_for
from memstore.testing.faults import mounts
from memstore.testing.faults.kept_up import FITHAW, FullFileSystem, KeptUp, SlowFileSystem
from memstore.testing.faults.mounts import make_ext4, mount, mount_tmpfs, unmount

GIB = 1 << 30
TIGHT_DRILLS = [name for name, drill in DRILLS.items() if drill.runs_on == (TIGHT,)]
NO_MOUNT = "mounting a file system needs root"
needs_mounts = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.skipif(mounts.mount_problem() is not None, reason=str(mounts.mount_problem())),
]


def with_mounts(test: Any) -> Any:
    """Mark a test that mounts file systems."""
    for mark in needs_mounts:
        test = mark(test)
    return test


# -- the faults -------------------------------------------------------------------------------


@with_mounts
def test_a_full_file_system_stays_full_and_gives_everything_back(tmp_path: Path) -> None:
    """No page is left, also after another process removed files; after `end` all of it is free again."""
    mount_tmpfs(tmp_path, MIB)
    try:
        others = [tmp_path / f"other-{i}" for i in range(50)]
        for other in others:
            other.write_bytes(bytes(8192))
        before = os.statvfs(tmp_path).f_bfree
        full = FullFileSystem(tmp_path)
        full.start()
        assert os.statvfs(tmp_path).f_bfree == 0
        for other in others:  # each time the room is taken for good, not for a moment that a larger try lasts
            other.unlink()
            wait_for(lambda: not os.statvfs(tmp_path).f_bfree, "the room to be taken again")
            with pytest.raises(OSError, match="No space left") as caught:
                other.write_bytes(b"?")
            assert caught.value.errno == errno.ENOSPC
        full.end()
        full.end()
        assert os.statvfs(tmp_path).f_bfree == before + 2 * len(others)
        assert sorted(tmp_path.iterdir()) == sorted(others)
    finally:
        unmount(tmp_path)


@with_mounts
def test_a_slow_file_system_holds_writes_up_and_ends_thawed(tmp_path: Path) -> None:
    """A write during a freeze waits for the thaw; after `end`, also in the middle of a freeze, none waits."""
    image, folder = tmp_path / "image", tmp_path / "folder"
    folder.mkdir()
    make_ext4(image, 16 * MIB)
    mount(["-o", "loop"], str(image), folder)
    try:
        slow = SlowFileSystem(folder, frozen_s=0.3, thawed_s=0.01)
        slow.start()
        longest_s, deadline_s = 0.0, time.monotonic() + 10
        while longest_s < 0.1 and time.monotonic() < deadline_s:
            started_s = time.monotonic()
            (folder / "probe").write_bytes(b"?")
            longest_s = max(longest_s, time.monotonic() - started_s)
        assert longest_s >= 0.1
        slow.end()
        assert not slow._thread.is_alive(), "it is still frozen in turns"
        with (folder / "probe").open("wb") as probe, pytest.raises(OSError, match="Invalid argument"):
            fcntl.ioctl(probe, FITHAW, 0)  # there is nothing to thaw
        (folder / "probe").write_bytes(b"!")
    finally:
        unmount(folder)
    assert not os.path.ismount(folder)


def test_a_fault_that_cannot_be_kept_up_is_undone_and_reported() -> None:
    """An error in a round ends the fault, undoes it once, and is raised by `end`."""
    unapplied: list[str] = []

    class Broken(KeptUp):
        def work(self) -> None:
            raise OSError(errno.EOPNOTSUPP, "no freezing here")

        def undo(self) -> None:
            unapplied.append("")

    fault = Broken()
    fault.end()  # never begun: nothing to undo
    assert unapplied == []
    fault = Broken()
    fault.start()
    with pytest.raises(DrillError, match="no freezing here"):
        fault.end()
    assert unapplied == [""]


@with_mounts
def test_what_cannot_be_mounted_is_reported_in_the_words_of_mount(tmp_path: Path) -> None:
    """No file system in the file, no file at all: a DrillError that names the folder."""
    (tmp_path / "image").write_bytes(bytes(8192))
    for source in ("image", "absent"):
        with pytest.raises(DrillError, match=f"cannot mount a file system over {tmp_path}"):
            mount(["-o", "loop"], str(tmp_path / source), tmp_path)


# -- the place --------------------------------------------------------------------------------


def test_the_limit_leaves_room_for_the_hosts_and_no_more_than_a_few_gib() -> None:
    """The limit is above what is in use, far below what there is; without room for that, nothing is started."""
    limit = low_threshold(4 * GIB, 64 * GIB, 4) * 64 * GIB
    assert 5.5 * GIB <= limit <= 8 * GIB
    with pytest.raises(DrillError, match="there is no room for 4 hosts"):
        low_threshold(30 * GIB, 32 * GIB, 4)


def test_variables_are_set_only_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was there comes back, also after an error."""
    monkeypatch.setenv("MEMSTORE_TEST_A", "before")
    monkeypatch.delenv("MEMSTORE_TEST_B", raising=False)
    names = ("MEMSTORE_TEST_A", "MEMSTORE_TEST_B")
    with contextlib.suppress(KeyError), environment(dict.fromkeys(names, "now")):
        assert [os.environ[name] for name in names] == ["now", "now"]
        raise KeyError
    assert [os.environ.get(name) for name in names] == ["before", None]


def test_where_nothing_can_be_mounted_they_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 1 with the drill and the reason, a suite that skips them with it; on a running cluster exit code 2."""
    monkeypatch.setattr(mounts, "mount_problem", lambda: NO_MOUNT)
    alone = CliRunner().invoke(drill_command, ["memory-pressure", "--embedded"])
    assert alone.exit_code == 1
    assert "memory-pressure" in alone.stderr
    assert NO_MOUNT in alone.stderr
    problems = {TIGHT: str(site_options.place_problem(TIGHT))}
    suite = Suite({}, Options(seed=7), durable=None, timeout_s=60.0, print_line=lambda line: None, problems=problems)
    result = suite.run([Play(DRILLS[name]) for name in TIGHT_DRILLS])
    assert [row["drill"] for row in result.skipped] == TIGHT_DRILLS
    assert all(NO_MOUNT in row["why"] for row in result.skipped)
    running = CliRunner().invoke(drill_command, ["memory-pressure", "--yes"])
    assert running.exit_code == 2
    assert "--embedded only" in running.stderr


def test_a_suite_has_one_ray_cluster_at_a_time_and_measures_memory_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are closed before one is opened, but that of the network; one with little memory serves one drill."""
    log: list[str] = []

    def opener(place: str) -> Any:
        @contextlib.contextmanager
        def opened() -> Iterator[Any]:
            log.append(f"open {place}")
            yield type("FakeSite", (), {"config": Options().config})()
            log.append(f"close {place}")

        return opened

    def reported(name: str, *others: Any) -> Report:
        return Report(name, 7, "", outcome=PASS)

    monkeypatch.setattr(suite_module, "run_drill", reported)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    openers = {place: opener(place) for place in (EMBEDDED, NAMESPACES, TIGHT)}
    suite = Suite(openers, Options(seed=7), durable=None, timeout_s=60.0, print_line=lambda line: None)
    names = ("slow-link", "kill-rank", "tmpfs-full", "memory-pressure", "kill-rank")
    result = suite.run([Play(find(name)) for name in names])
    assert [row["outcome"] for row in result.drills] == [PASS] * 5
    assert log == [
        "open namespaces",
        "open embedded",
        "close embedded",
        "open tight",
        "close tight",
        "open tight",
        "close tight",
        "open embedded",
        "close namespaces",
        "close embedded",
    ]


# -- real plays -------------------------------------------------------------------------------


@pytest.fixture(scope="class")
def site() -> Iterator[TightSite]:
    """Three hosts in two racks, the last of them with little memory left."""
    with tight_site(3, arena_bytes=64 * MIB) as site:
        yield site


class TestOnATightCluster:
    """Each drill for real; the one of a slow durable directory needs no more than any cluster has."""

    pytestmark: ClassVar[list[Any]] = [
        *needs_mounts,
        pytest.mark.ray,
        pytest.mark.drill,
        pytest.mark.long,
        pytest.mark.alone,
        pytest.mark.timeout(600),
    ]

    @pytest.mark.parametrize("name", [*TIGHT_DRILLS, "durable-slow"])
    def test_training_goes_on_through_it(self, site: TightSite, name: str, tmp_path: Path) -> None:
        """No put raises nor stalls beyond its budget, nothing is lost, no process of the store is replaced (1.5)."""
        fields = {"durable": str(tmp_path)} if DRILLS[name].needs_durable else {}
        config = site.config.with_fields(fields)
        report = run_drill(name, site, Options(seed=7, ranks_count=2, nbytes=2 * MIB, config=config))
        assert report.outcome == PASS, report.words
        assert (report.verdict, report.is_verified, report.rpo_steps) == (GOES_ON, True, 0)
        assert [phase.name for phase in report.phases] == list(PHASES)
        noticed = {"detected"} if SCENES[name].is_noticed else set()
        labels = {line.label for line in report.timeline}
        assert {"effect", "training", "resumed", "redundant", "compared"} | noticed <= labels
        assert "cleanup" not in labels
        assert report.stall_s is not None
        assert report.stall_s <= site.config.stall_budget_s + 1
        assert not list(site.arenas.glob(".drill*"))
        assert not list(tmp_path.iterdir())

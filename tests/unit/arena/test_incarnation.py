"""A holder's incarnation only grows, also if its clock goes back or its folder is lost (R3)."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TextIO

import pytest

from memstore.core.cluster.hosts import HostTable
from memstore.core.wire.ids import Endpoint
from memstore.core.wire.messages import HostInfo
from memstore.core.wire.orders import TakeIncarnation
from memstore.shell.arena.folder import INCARNATION_NAME, next_incarnation
from memstore.testing.clusters.processes import ProcessCluster, wait_for
from memstore.testing.clusters.stepped_clock import stepped_clock
from memstore.testing.controller.trained import trained
from memstore.testing.controller.world import ControllerWorld
from memstore.testing.ranks.fleet import Fleet
from memstore.testing.ranks.rank_process import RankNursery, together

HOUR_S = 3600.0


def open_private(path: Path) -> TextIO:
    """Make a file that no other process may read."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w")


def test_a_folder_counts_its_lives(tmp_path: Path) -> None:
    """Each life is the next one; a controller that knows a higher one is gone beyond."""
    first = next_incarnation(tmp_path)
    assert [next_incarnation(tmp_path) for _ in range(2)] == [first + 1, first + 2]
    assert next_incarnation(tmp_path, above=first + 100) == first + 101
    assert next_incarnation(tmp_path) == first + 102
    assert next_incarnation(tmp_path, above=5) == first + 103


def test_the_kits_holder_counts_its_lives_as_a_folder_does(tmp_path: Path) -> None:
    """Ordered above a life that it is past already, it does not go back; else a test would miss such an order."""
    world = ControllerWorld(1)
    holder = world.holders["h0"]
    above = [100, 5, 300]
    first = next_incarnation(tmp_path, above=holder.info.incarnation)
    folder = [next_incarnation(tmp_path, above=first + each) - first for each in above]
    first, kit = holder.info.incarnation, list[int]()
    for each in above:
        holder.obey(TakeIncarnation(above=first + each))
        kit.append(holder.info.incarnation - first)
    assert kit == folder == [101, 102, 301]


def test_a_folder_that_was_lost_repeats_no_number(tmp_path: Path) -> None:
    """Lives before and after are never taken for one; a torn file is no number."""
    numbers = set()
    for _ in range(20):
        numbers.add(next_incarnation(tmp_path))
        (tmp_path / INCARNATION_NAME).write_text("12")
    assert len(numbers) == 20


def test_the_table_names_the_later_life() -> None:
    """An older life of a host is distinguished from the next one, and from a new session of the same."""
    table = HostTable(suspect_after_s=1.5, dead_after_s=5.0, failure_domains=())
    lives = [HostInfo("a", n, (Endpoint("10.0.0.1", 7000),)) for n in (6, 7, 8)]
    table.up(0.0, lives[1])
    assert [table.later_life(info) for info in lives] == [lives[1], None, None]


def is_back(world: ControllerWorld) -> bool:
    """The controller counts the present life of h2 live."""
    machine = world.machine
    state = machine.hosts.states.get("h2") if machine is not None and machine.is_settled else None
    return state is not None and state.status == "live" and state.info == world.holders["h2"].info


@pytest.mark.parametrize("is_taken_over", [False, True])
def test_a_host_whose_folder_was_lost_is_back_at_once(is_taken_over: bool) -> None:
    """Its holder begins with a lower number: the controller refuses it aloud, it takes the next, and commits go on."""
    world, ranks = trained(3, last=2)
    holder = world.holders["h2"]
    for _ in range(3):
        world.kill_host("h2", keep_memory=True)
        holder.restart(keep_memory=True)
        assert world.run_until(lambda: is_back(world), 5.0)
    before = holder.info.incarnation
    world.kill_host("h2", keep_memory=True)
    holder.restart(keep_memory=True)
    holder.info = replace(holder.info, incarnation=1)
    if is_taken_over:  # the host shows itself twice while the new controller gathers: the later life counts
        world.crash_controller()
    assert world.run_until(lambda: is_back(world), 10.0)
    if not is_taken_over:
        assert holder.info.incarnation == before + 1
        assert any("incarnation 1" in note and "higher" in note for note in world.notes)
    ranks = world.launch(3)
    world.get(ranks)
    assert world.put_all(ranks, 3)


def test_a_clock_set_back_between_two_lives(tmp_path: Path, nursery: RankNursery) -> None:
    """An hour back, then a day ahead: the host is back in seconds each time, and steps commit with all copies."""
    with ProcessCluster(tmp_path / "cluster", {"h0": {}, "h1": {}}) as cluster:
        fleet = Fleet(cluster, nursery)
        ranks = fleet.begin(["h0", "h1"], last_step=2)
        for n, step_s in enumerate((-HOUR_S, 24 * HOUR_S, -HOUR_S)):
            cluster.kill_holder("h1")
            cluster.environ["h1"] = stepped_clock(tmp_path / "clock", step_s)
            cluster.start_holder("h1")
            cluster.wait_live("h0", "h1")
            together(ranks, "train", first=3 + 3 * n, last=5 + 3 * n)
            wait_for(lambda: (cluster.job("train") or {}).get("copies") == 2, "both copies")
        assert cluster.job("train")["committed_step"] == 11  # type: ignore[index]


def test_a_lost_number_is_refused_and_taken_above(tmp_path: Path, nursery: RankNursery) -> None:
    """The folder is lost and the new one has a lower number: both sides log it, and the host is back in seconds."""
    with ProcessCluster(tmp_path / "cluster", {"h0": {}, "h1": {}}) as cluster:
        fleet = Fleet(cluster, nursery)
        ranks = fleet.begin(["h0", "h1"], last_step=2)
        cluster.kill_holder("h1")
        number = int((cluster.arena("h1") / INCARNATION_NAME).read_text())
        ranks[1].kill()
        shutil.rmtree(cluster.arena("h1"))
        cluster.arena("h1").mkdir(mode=0o700)
        with open_private(cluster.arena("h1") / INCARNATION_NAME) as file:
            file.write(f"{1:020d}")
        cluster.start_holder("h1")
        cluster.wait_live("h0", "h1")
        assert int((cluster.arena("h1") / INCARNATION_NAME).read_text()) == number + 1
        assert "ordered to take a higher one" in cluster.logs()
        assert "the controller refused incarnation 2" in cluster.logs()
        ranks[0].kill()
        ranks, got = fleet.resume(["h0", "h1"])
        assert got["step"] == 2
        together(ranks, "train", first=3, last=5)

"""A host with notice of its end loses nothing: its copies are elsewhere before it goes (R29)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from memstore.core.durable.departures import Remains
from memstore.core.report.problems import drain_text
from memstore.core.targets.drain import OVERDUE_S
from memstore.core.wire.ids import WireCopy
from memstore.core.wire.messages import DrainsSeen, Received
from memstore.core.wire.orders import ListMarkers
from memstore.core.wire.reports import Sealed
from memstore.testing.controller.holder import DirectedRank
from memstore.testing.controller.world import ControllerWorld, trained
from recovery.inventory import StepId


def ask(world: ControllerWorld, rank: DirectedRank, verb: str, **body: Any) -> dict[str, Any]:
    """A question to the controller, through a rank's host."""
    before = len(rank.answers.get(verb, ()))
    world.call(rank, verb, **body)
    assert world.run_until(lambda: len(rank.answers.get(verb, ())) > before or bool(rank.errors.get(verb)))
    assert not rank.errors.get(verb), rank.errors[verb]
    return dict(rank.answers[verb][-1])


def row(world: ControllerWorld, rank: DirectedRank, host: str) -> dict[str, Any]:
    """The host's row of status."""
    return next(row for row in ask(world, rank, "status")["hosts"] if row["host"] == host)


def staying(world: ControllerWorld, step: int, rank: int, leaving: str) -> list[str]:
    """Return the hosts that hold the shard, without the one that leaves."""
    return [h for h in world.holders_of(StepId(1, step), rank) if h != leaving]


def test_all_that_a_leaving_host_holds_gets_its_copies_elsewhere() -> None:
    """Own shards and peers alike; then it can be killed and the step is whole with all its copies."""
    world, ranks = trained(4, 3)
    ask(world, ranks[0], "drain", host="h1", within_s=60.0)
    world.run(5.0)
    assert row(world, ranks[0], "h1")["drain_left"] == 0
    assert all(len(staying(world, 1, rank, "h1")) >= 2 for rank in range(3))
    assert "h1" in world.holders_of(StepId(1, 1), 1), "a rank that restarts in time still finds its shard at home"
    world.kill_host("h1")
    assert ask(world, ranks[0], "status")["jobs"][0]["copies"] == 2


def test_ranks_of_a_leaving_host_go_on_putting_and_their_copies_stay_behind() -> None:
    """A step put after the notice commits, and is on two hosts that stay."""
    world, ranks = trained(4, 3)
    ask(world, ranks[0], "drain", host="h1", within_s=60.0)
    assert world.put_all(ranks, 2)
    world.run(2.0)
    assert all(len(staying(world, 2, rank, "h1")) >= 2 for rank in range(3))
    assert row(world, ranks[0], "h1")["drain_left"] == 0


@pytest.mark.parametrize("is_drained_first", [True, False])
@pytest.mark.parametrize("victim", ["h0", "h1", "h2"])
def test_the_only_holder_of_a_dead_hosts_shard_is_evacuated_too(victim: str, is_drained_first: bool) -> None:
    """A host dies while the only other one with its shard has notice: what is left follows a substitute."""
    world, ranks = trained(5, 3)
    number = int(victim[1])
    [holder] = [h for h in world.holders_of(StepId(1, 1), number) if h != victim]
    asking = next(r for r in ranks if r.host_id != victim)
    if is_drained_first:
        world.call(asking, "drain", host=holder, within_s=60.0)
        world.run(0.05)
    world.kill_host(victim)
    if not is_drained_first:
        ask(world, asking, "drain", host=holder, within_s=60.0)
    world.run(40.0)
    assert len(staying(world, 1, number, holder)) == 2
    assert row(world, asking, holder)["drain_left"] == 0


def test_if_all_are_to_go_nothing_moves() -> None:
    """Copies drawn together on a few hosts that go as well would only need room."""
    world, ranks = trained(4)
    for host in world.holders:
        ask(world, ranks[0], "drain", host=host, within_s=300.0)
    world.run(5.0)
    placement = world.job().placement
    assert placement is not None
    assert len(placement.targets) == 4
    assert world.put_all(ranks, 2)


def test_hosts_without_room_for_a_leaving_ones_copies_do_not_stop_commits() -> None:
    """A refusal costs one step its time; those after it commit degraded at once and say why (R18)."""
    world, ranks = trained(3)
    for holder in world.holders.values():
        holder.refuses_copies, holder.refuses_room = "peer share full", "no room"
    ask(world, ranks[0], "drain", host="h1", within_s=300.0)
    assert world.put_all(ranks, 2, limit_s=30.0)
    world.work_s = (10.0, 10.0)  # as long as a push waits for room before its refusal is final
    began_s = world.now
    assert world.put_all(ranks, 3)
    assert world.now - began_s < 2.0


def test_status_counts_what_is_left_and_says_when() -> None:
    """With pushes stopped the shards that only the leaving host makes whole are counted, and a problem says so."""
    world, ranks = trained(3, 3)
    for holder in world.holders.values():
        holder.refuses_copies = "the network is slow"
    ask(world, ranks[0], "drain", host="h1", within_s=30.0)
    world.run(1.0)
    found = row(world, ranks[0], "h1")
    assert found["drain_left"] > 0
    assert 25.0 < found["drains_s"] <= 30.0
    assert any("is to go in" in problem["cause"] for problem in ask(world, ranks[0], "status")["problems"])


def test_too_few_hosts_that_stay_are_made_up_with_those_that_go() -> None:
    """Two hosts, two copies: notice to one of them must not make a commit poorer before it is gone."""
    world, ranks = trained(2, 2)
    ask(world, ranks[0], "drain", host="h1", within_s=60.0)
    assert world.put_all(ranks, 2)
    assert all(len(world.holders_of(StepId(1, 2), rank)) == 2 for rank in range(2))
    world.run(1.0)
    found = row(world, ranks[0], "h1")
    assert [(r["copies"], r["replicas"]) for r in found["drain_short"]] == [(1, 2)]
    assert not found["drain_may_come"], "one host stays: one copy there is all that can be had"


@pytest.mark.parametrize("replicas", [1, 2])
def test_hosts_that_all_go_are_never_said_to_be_dispensable(replicas: int) -> None:
    """One after another to the last: a kept step that is nowhere else is counted."""
    world, ranks = trained(3, 3, replicas=replicas)
    for host in sorted(world.holders):
        ask(world, ranks[0], "drain", host=host, within_s=300.0)
        world.run(5.0)
    rows = [row(world, ranks[0], host) for host in sorted(world.holders)]
    assert all(found["drain_left"] > 0 and not found["drain_may_come"] for found in rows)
    assert {r["copies"] for found in rows for r in found["drain_short"]} == {0}
    reported = [dict(e) for e in ask(world, ranks[0], "events")["events"] if e["event"] == "drained"]
    assert {e["host"] for e in reported if e["short"]} == set(world.holders)
    assert len(reported) <= 6, "one line when it can go or cannot, one more when that changes"


def test_a_copy_on_a_silent_host_is_not_elsewhere() -> None:
    """A suspect host may be dead: a host with notice must not go on its word."""
    world, ranks = trained(3, 3)
    ask(world, ranks[0], "drain", host="h1", within_s=300.0)
    world.run(5.0)
    assert row(world, ranks[0], "h1")["drain_left"] == 0
    world.silence("h2")
    world.run_until(lambda: not world.served.hosts.is_answering("h2"), 10.0)
    assert row(world, ranks[0], "h1")["drain_left"] > 0


@pytest.mark.parametrize("flaw", ["chunks are missing", "other bytes"])
def test_a_copy_that_is_not_whole_is_not_elsewhere(flaw: str) -> None:
    """A host with notice must not go on the word of copies that no restore could use."""
    world, ranks = trained(3, 3)
    ask(world, ranks[0], "drain", host="h1", within_s=300.0)
    world.run(5.0)
    departures = world.served.parts.departures
    assert departures.remains("h1").shards_count == 0
    for copies in world.job().copies[StepId(1, 1)].values():
        for host in set(copies) - {"h1"}:
            bad = {"missing": frozenset({0})} if flaw == "chunks are missing" else {}
            spec = copies[host].spec if bad else copies[host].spec._replace(digest="0" * 32)
            copies[host] = copies[host]._replace(spec=spec, **bad)
    held = sum("h1" in copies for copies in world.job().copies[StepId(1, 1)].values())
    assert departures.remains("h1").shards_count == held > 0


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_a_host_that_stays_after_all_is_one_like_the_others(is_cancelled: bool) -> None:
    """The notice is taken back, or its moment passes and the host is still there."""
    world, ranks = trained(3, 3)
    ask(world, ranks[0], "drain", host="h1", within_s=10.0)
    world.run(3.0)
    if is_cancelled:
        ask(world, ranks[0], "drain", host="h1", within_s=None)
        world.run(1.0)  # the word spreads
    else:
        world.run(10.0 + OVERDUE_S)
    assert row(world, ranks[0], "h1")["drains_s"] is None
    assert world.put_all(ranks, 2)
    placement = world.job().placement
    assert placement is not None
    assert "h1" in placement.targets
    assert len(world.holders_of(StepId(1, 2), 1)) == 2, "its own copy counts again"


def test_a_new_machine_of_the_same_name_has_no_notice() -> None:
    """A host that died and returns empty is another one; a holder that returns with its memory is the same."""
    world, ranks = trained(4, 3)
    for keep_memory in (True, False):
        ask(world, ranks[0], "drain", host="h1", within_s=300.0)
        world.kill_host("h1", keep_memory=keep_memory)
        world.run(1.0)
        world.return_host("h1")
        world.run(3.0)
        assert (row(world, ranks[0], "h1")["drains_s"] is not None) == keep_memory


def test_rays_word_after_a_cancel_is_no_news() -> None:
    """What Ray repeats every second does not undo what a person took back; a nearer moment is news."""
    world, ranks = trained(4, 3)
    moment_s = world.served.state.wall_s + 60.0
    world._handle(DrainsSeen({"h1": moment_s}))
    world.run(1.0)
    ask(world, ranks[0], "drain", host="h1", within_s=None)
    world._handle(DrainsSeen({"h1": moment_s}))
    world.run(1.0)
    assert row(world, ranks[0], "h1")["drains_s"] is None
    world._handle(DrainsSeen({"h1": moment_s - 30.0}))
    world.run(1.0)
    assert row(world, ranks[0], "h1")["drains_s"] < 30.0


def test_a_notice_that_cannot_spread_is_not_recorded_again_and_again() -> None:
    """Without a lease facts wait; one of them is enough."""
    world, _ = trained(4, 3)
    world.has_lease = False
    world.silence("h3")
    world.run(4.0)
    for _ in range(10):
        world._handle(DrainsSeen({"h1": world.served.state.wall_s + 60.0 - world.now}))
    assert sum(type(fact).__name__ == "HostDraining" for fact in world.served.parts.journal.log.unapplied()) <= 1


def test_a_replacement_is_not_drained_by_a_successor_of_the_controller() -> None:
    """The end of a notice is a fact too."""
    world, ranks = trained(4, 3)
    ask(world, ranks[0], "drain", host="h1", within_s=10.0)
    world.run(9.0)
    world.kill_host("h1")
    world.run(5.0)
    world.return_host("h1")
    world.run(6.0)
    world.crash_controller()
    world.run(6.0)
    assert row(world, ranks[0], "h1")["drains_s"] is None


@pytest.mark.parametrize("within_s", [float("nan"), float("inf"), -1.0, 0.0])
def test_a_notice_of_no_sensible_length_is_refused(within_s: float) -> None:
    """It would never end."""
    world, ranks = trained(2)
    world.call(ranks[0], "drain", host="h1", within_s=within_s)
    assert world.run_until(lambda: bool(ranks[0].errors.get("drain")))
    assert "a notice must leave some time" in str(ranks[0].errors["drain"])


def test_the_word_outlives_the_controller() -> None:
    """It is a fact: a successor knows it."""
    world, ranks = trained(4, 3)
    ask(world, ranks[0], "drain", host="h1", within_s=300.0)
    world.run(1.0)
    world.crash_controller()
    world.run(5.0)
    assert row(world, ranks[0], "h1")["drains_s"] is not None


def test_what_the_cluster_manager_says_is_recorded_once() -> None:
    """Ray names its draining nodes again and again: one fact, unless the moment moves."""
    world, ranks = trained(4, 3)
    moment_s = world.served.state.wall_s + 60.0
    for _ in range(3):
        world._handle(DrainsSeen({"h1": moment_s, "nobody": moment_s}))
        world.run(1.0)
    assert sum(type(entry.fact).__name__ == "HostDraining" for entry in world.served.parts.journal.log.entries) == 1
    assert row(world, ranks[0], "h1")["drain_left"] == 0


def test_notice_to_a_stranger_is_refused_with_the_names_known() -> None:
    """A misspelt host is not silently drained."""
    world, ranks = trained(2, 2)
    world.call(ranks[0], "drain", host="h9", within_s=5.0)
    assert world.run_until(lambda: bool(ranks[0].errors.get("drain")))
    assert "no live host 'h9' in the store: it has h0, h1" in str(ranks[0].errors["drain"])


@pytest.mark.parametrize("skew_s", [3600.0, -3600.0])
def test_a_controller_whose_clock_is_wrong_ends_no_notice_early(skew_s: float) -> None:
    """The successor's clock is an hour off: the notice lasts for its length again, and ends then."""
    world, ranks = trained(4, 3)
    ask(world, ranks[0], "drain", host="h1", within_s=600.0)
    world.run(2.0)
    world.skew_s = skew_s
    world.crash_controller()
    world.run(100.0)
    assert world.served.state.is_draining("h1")
    world.run(600.0 + OVERDUE_S)
    assert not world.served.state.is_draining("h1")


@pytest.mark.parametrize("skew_s", [3600.0, -3600.0])
def test_rays_word_counts_while_it_is_said_with_any_clocks(skew_s: float) -> None:
    """The head's clock and the controller's are an hour apart: noticed at once, over when Ray says no more of it."""
    world, _ = trained(4, 3)
    moment_s = world.served.state.wall_s + 120.0 - skew_s
    for _ in range(300):
        world._handle(DrainsSeen({"h1": moment_s}))
        world.run(1.0)
        assert world.served.state.is_draining("h1")
    world.run(max(0.0, -skew_s) + 120.0 + OVERDUE_S)
    assert not world.served.state.is_draining("h1")


def test_a_notice_after_a_cancel_that_is_still_under_way_counts() -> None:
    """Given, taken back and given again in one second, while facts wait for the lease: the last word stands."""
    world, ranks = trained(4, 3)
    world.has_lease = False
    world.silence("h3")
    world.run(4.0)
    for within_s in (60.0, None, 60.0):
        world.call(ranks[0], "drain", host="h1", within_s=within_s)
        world.run(0.1)
    for _ in range(3):
        world._handle(DrainsSeen({"h1": world.served.parts.journal.log.unapplied()[0].until_s}))  # type: ignore[union-attr]
    assert [type(fact).__name__ for fact in world.served.parts.journal.log.unapplied()] == ["HostDraining"] * 3
    world.has_lease = True
    world.thaw("h3")
    world.run(5.0)
    assert world.served.state.is_draining("h1")


def beside_one_machine(world: ControllerWorld) -> DirectedRank:
    """Put h1 and h2 into one machine; return the one rank of a job, on h0."""
    for name in ("h1", "h2"):
        holder = world.holders[name]
        holder.state.info = replace(holder.info, machine="m-shared")
        world.kill_host(name, keep_memory=True)
        world.return_host(name)
    world.run(3.0)
    rank = world.join(0, 1, "launch", host="h0")
    world.run(3.0)
    world.get([rank])
    return rank


def test_two_copies_on_one_machine_are_one_elsewhere() -> None:
    """Both other hosts hold the shard and lie in one machine: losing that is losing both, so h0 must not go."""
    world = ControllerWorld(3)
    rank = beside_one_machine(world)
    assert world.put_all([rank], 1)
    [copy] = [copy for host, copy in world.job().copies[StepId(1, 1)][0].items() if host == "h0"]
    for name in ("h1", "h2"):
        world._handle(Received(name, Sealed(copy=WireCopy.of(copy), put=None)))
    departures = world.served.parts.departures
    ask(world, rank, "drain", host="h0", within_s=300.0)
    world.run(1.0)
    [short] = departures.remains("h0").short
    assert (short.copies, short.replicas, short.may_come) == (1, 2, False)


# -- drain of the last copies -------------------------------------------------------------------------
# Hosts that are to go and leave too few behind: what is kept is made durable meanwhile, by itself (R29, R31).


DURABLE = {"durable": "/durable", "durable_every": "1h"}


def drain(world: ControllerWorld, rank: DirectedRank, *hosts: str, within_s: float = 600.0) -> None:
    """Give notice to the hosts."""
    for host in hosts:
        world.call(rank, "drain", host=host, within_s=within_s)
    world.run(0.5)


def remains(world: ControllerWorld, host: str) -> Remains:
    """What a host that is to go would take along."""
    return world.served.parts.departures.remains(host)


def markers(world: ControllerWorld) -> list[int]:
    """The steps that are on durable storage."""
    return sorted(step for _, _, step in world.durable.markers)


@pytest.mark.parametrize("by_ray", [True, False])
def test_if_all_hosts_of_a_job_are_to_go_its_newest_step_is_made_durable(by_ray: bool) -> None:
    """The schedule has step 1 alone; each host can go once the storage was seen to have step 6."""
    world, ranks = trained(3, 3, last=6, **DURABLE)
    assert markers(world) == [1]
    if by_ray:
        world._handle(DrainsSeen(dict.fromkeys(world.holders, world.served.state.wall_s + 60.0)))
        world.run(0.5)
    else:
        drain(world, ranks[0], *world.holders)
    assert world.run_until(lambda: not any(remains(world, host).may_come for host in world.holders), 20.0)
    assert markers(world) == [1, 6]
    assert [(row.step, row.copies) for row in remains(world, "h1").durable] == [(6, 0)]
    assert not remains(world, "h1").short


def test_one_of_two_hosts_goes_for_a_durable_step() -> None:
    """The other alone cannot hold two copies, so that it would be waited for in vain; every kept step counts."""
    world, ranks = trained(2, 2, last=4, keep_steps=2, **DURABLE)
    drain(world, ranks[0], "h1")
    assert world.run_until(lambda: not remains(world, "h1").short, 20.0)
    assert markers(world) == [1, 3, 4]


def test_what_is_committed_after_the_notice_is_made_durable_as_well() -> None:
    """Training goes on until the end."""
    world, ranks = trained(2, 2, last=2, **DURABLE)
    drain(world, ranks[0], "h0", "h1")
    world.run(5.0)
    assert world.put_all(ranks, 3)
    assert world.run_until(lambda: not remains(world, "h1").short, 20.0)
    assert 3 in markers(world)


def test_hosts_that_stay_take_the_copies_and_one_step_is_written() -> None:
    """A precaution where enough others are there; none without durable=, nor once the notice is taken back."""
    world, ranks = trained(4, 3, last=3, **DURABLE)
    drain(world, ranks[0], "h1")
    world.run(10.0)
    assert markers(world) == [1, 3]
    world.run(60.0)
    assert markers(world) == [1, 3]
    world, ranks = trained(2, 2, last=3)
    drain(world, ranks[0], "h0", "h1")
    world.run(10.0)
    assert not markers(world)
    world, ranks = trained(2, 2, last=3, **DURABLE)
    world.durable.problem = "not mounted"
    drain(world, ranks[0], "h0", "h1")
    for host in world.holders:
        world.call(ranks[0], "drain", host=host, within_s=None)
    world.run(5.0)
    world.durable.problem = ""
    world.run(10.0)
    assert markers(world) == [1]


def test_storage_that_fails_is_tried_again_and_the_host_says_why_it_cannot_go() -> None:
    """A new controller goes on with it: the notice is a fact."""
    world, ranks = trained(2, 2, last=2, **DURABLE)
    world.durable.problem = "no space left"
    drain(world, ranks[0], "h0", "h1")
    world.run(5.0)
    [short] = remains(world, "h1").short
    assert drain_text([short], []) == "train step 2: 0 of 2 copies elsewhere, not durable yet: no space left"
    world.crash_controller()
    world.run(5.0)
    world.durable.problem = ""
    assert world.run_until(lambda: not remains(world, "h1").short, 20.0)
    assert 2 in markers(world)


def test_hosts_of_one_machine_that_stay_are_too_few() -> None:
    """Two hosts stay and can hold no two copies apart: the kept step is written, and then h0 can go."""
    world = ControllerWorld(3, **DURABLE)
    rank = beside_one_machine(world)
    for step in (1, 2):
        assert world.put_all([rank], step)
        world.run(2.0)
    assert markers(world) == [1]
    drain(world, rank, "h0")
    assert world.run_until(lambda: not remains(world, "h0").short, 20.0)
    assert markers(world) == [1, 2]


def test_a_job_that_was_removed_during_a_look_is_looked_for_once_it_is_back() -> None:
    """No host had answered whether storage has its step; restored from there, it must not keep the host for ever."""
    world, ranks = trained(2, 2, last=1, **DURABLE)
    for holder in world.holders.values():
        holder.instead[ListMarkers] = lambda order: None
    drain(world, ranks[0], "h1")
    for rank in ranks:
        world.kill_rank(rank)
    world.call(ranks[0], "rm", job="train", force=True)
    assert world.run_until(lambda: "train" not in world.served.jobs, 5.0)
    for holder in world.holders.values():
        holder.instead.clear()
    assert world.get(world.launch(2))[0]["step"] == 1
    world.run(1.0)
    assert not remains(world, "h1").short
    assert [row.step for row in remains(world, "h1").durable] == [1]

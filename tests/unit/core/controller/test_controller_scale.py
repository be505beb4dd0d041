"""What a step costs the controller grows with its ranks, not with their square: counted in looks, not in seconds."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from memstore.core.attempts import join
from memstore.core.cluster.facts import ByRank, HostsJoined, StepCommitted
from memstore.core.cluster.hosts import HostTable
from memstore.core.commits import CommitRule
from memstore.core.durable.states import DurableStates
from memstore.core.history.job_removal import Orphans
from memstore.core.journal.fact_log import FactLog
from memstore.core.repair import LOOKS_MAX, Repair, Substitutes
from memstore.core.report import redundancy
from memstore.core.targets.targets import ClusterView
from memstore.core.wire.calls import AskRollCall, AskStatus, Called
from memstore.core.wire.ids import Endpoint
from memstore.core.wire.messages import (
    DrainsSeen,
    Event,
    HostBeat,
    HostInfo,
    HostLost,
    HostUp,
    Received,
    SendOrder,
    Tick,
)
from memstore.core.wire.orders import WriteJournal
from memstore.testing.controller.fleet import JOB, ControllerFleet
from memstore.testing.requests import request_of
from recovery.inventory import ShardId, StepId


def counted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[int]:
    """Count the calls of a method from now on."""
    real, calls = getattr(owner, name), [0]

    def method(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, method)
    return calls


@pytest.mark.parametrize("is_shuffled", [False, True], ids=["in order", "shuffled"])
@pytest.mark.parametrize("hosts_count", [8, 64])
def test_the_seals_of_a_step_look_at_each_rank_a_few_times(
    hosts_count: int, is_shuffled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every seal may bring the commit, and all of them together ask the rule at most four times a rank."""
    fleet = ControllerFleet(hosts_count)
    order = list(range(fleet.world_size))
    if is_shuffled:
        random.Random(1).shuffle(order)
    looks = counted(monkeypatch, CommitRule, "held")
    fleet.put(1, order)
    assert fleet.committed == {1}
    assert looks[0] <= 4 * fleet.world_size


def test_a_step_that_lacks_one_copy_is_not_committed_and_the_last_copy_commits_it() -> None:
    """Looking only at the rank that was short forgets none of the others."""
    fleet = ControllerFleet(4, ranks_per_host=2)
    for rank in range(fleet.world_size):
        fleet.seal(fleet.host_of(rank), rank, 1, is_own=True)
    for rank in reversed(range(1, fleet.world_size)):
        fleet.seal(fleet.targets[fleet.host_of(rank)][0], rank, 1, is_own=False)
    assert not fleet.committed
    fleet.seal(fleet.targets[fleet.host_of(0)][0], 0, 1, is_own=False)
    assert fleet.committed == {1}


@pytest.mark.parametrize("harm", ["none", "a copy goes", "a chunk lacks", "other bytes come", "a host dies"])
def test_what_was_found_whole_is_not_committed_once_it_is_not(harm: str) -> None:
    """No rank is looked at again at the last seal, unless something has become of its copies meanwhile."""
    fleet = ControllerFleet(4)
    for rank in range(fleet.world_size):
        fleet.seal(fleet.host_of(rank), rank, 1, is_own=True)
    for rank in range(fleet.world_size - 1):
        fleet.seal(fleet.targets[fleet.host_of(rank)][0], rank, 1, is_own=False)
    job = fleet.machine.jobs[JOB]
    step = next(iter(job.copies))
    host = fleet.targets[fleet.host_of(0)][0]
    copy = job.copies[step][0][host]
    assert 0 in job.held[step].ranks
    if harm == "a copy goes":
        job.drop_copy(copy.shard, host)
    elif harm == "a chunk lacks":
        job.add_copy(copy._replace(missing=frozenset({1})))
    elif harm == "other bytes come":
        job.add_copy(copy._replace(spec=copy.spec._replace(digest="0" * 32)))
    elif harm == "a host dies":
        fleet.handle(HostLost(host, "it closed the connection"))
    last = fleet.world_size - 1
    fleet.seal(fleet.targets[fleet.host_of(last)][0], last, 1, is_own=False)
    assert fleet.committed == ({1} if harm == "none" else set())


class HarmedFleet(ControllerFleet):
    """Something happens after a step was found whole, and before the fact that it is committed has reached a host."""

    harm: Callable[[], object] = staticmethod(lambda: None)

    def _obey(self, action: SendOrder) -> Iterable[Event]:
        """Let it happen before the host writes."""
        if isinstance(action.order, WriteJournal):
            harm, self.harm = self.harm, lambda: None
            harm()
        return super()._obey(action)


@pytest.mark.parametrize(
    "harm",
    [
        "none",
        "a copy goes",
        "a copy comes",
        "a chunk lacks",
        "a host comes",
        "a host is to go",
        "a host flaps",
        "more of 0",
        "harmed of 0",
        "harmed of 1",
    ],
)
def test_what_a_commit_found_in_place_is_looked_at_again_only_if_something_happened(harm: str) -> None:
    """Repair takes over what the commit has just seen, of thousands of ranks, unless it is not so any more."""
    fleet = HarmedFleet(4)
    host, target = fleet.host_of(0), fleet.targets[fleet.host_of(0)][0]
    machine, job = fleet.machine, fleet.machine.jobs[JOB]
    other = next(each for each in fleet.hosts if each not in (host, target))

    def happens() -> None:
        copy = job.copies[StepId(1, 1)][0][target]
        if harm == "a copy goes":
            job.drop_copy(copy.shard, target)
        elif harm == "a copy comes":
            job.add_copy(copy._replace(host=other))
        elif harm == "a chunk lacks":
            job.add_copy(copy._replace(missing=frozenset({1})))
        elif harm == "a host comes":
            fleet.handle(HostUp(HostInfo("h-new", 1, (Endpoint("10.9.9.9", 7000),), "m-new", labels={"rack": "r9"})))
        elif harm == "a host is to go":
            fleet.handle(DrainsSeen({target: machine.state.wall_s + 100.0}))
        elif harm == "a host flaps":
            machine.hosts.states[target].deaths_s = [fleet.now] * 3

    for rank in range(fleet.world_size):
        fleet.seal(fleet.host_of(rank), rank, 1, is_own=True)
        if harm in (f"more of {rank}", f"harmed of {rank}"):  # than placement asks for, from the beginning
            copy, is_harmed = job.copies[StepId(1, 1)][rank][host], harm.startswith("harmed")
            job.add_copy(copy._replace(host=other, missing=frozenset({1} if is_harmed else ())))
    for rank in reversed(range(fleet.world_size)):  # the last seal makes the rule look at all of them
        if rank == 0:
            fleet.harm = happens
        fleet.seal(fleet.targets[fleet.host_of(rank)][0], rank, 1, is_own=False)
    [step] = job.commits
    assert (job.settled.get(step) == job.changes[step]) == (harm == "none")


def test_a_whole_step_costs_ticks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repair looks at a host's shards again only when something has changed since the commit."""
    fleet = ControllerFleet(16)
    fleet.put(1)
    fleet.handle(Tick())
    looks = counted(monkeypatch, Repair, "_consider_shard")
    for _ in range(10):
        fleet.handle(Tick())
    assert looks[0] == 0
    job = fleet.machine.jobs[JOB]
    step = next(iter(job.commits))
    gone = job.copies[step][3][fleet.hosts[0]]
    job.drop_copy(gone.shard, gone.host)
    fleet.handle(Tick())
    assert looks[0] == 16 + 1  # one of each host, and the one that lacks a copy
    assert (gone.shard, gone.host) in fleet.machine.parts.repair.pushes.under_way


def test_a_tick_in_which_nothing_changed_looks_at_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten of them come every second: whose rank is dead, and which hosts a job names, is asked only for a reason."""
    fleet = ControllerFleet(16)
    fleet.put(1)
    fleet.handle(Tick())
    looks = [counted(monkeypatch, Repair, "_is_ended"), counted(monkeypatch, Orphans, "_named")]
    for _ in range(10):
        fleet.handle(Tick())
    assert looks == [[0], [0]]


def test_a_status_looks_at_places_and_not_at_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of a host have their copies on the same hosts: one look for all of them at each of two levels."""
    fleet = ControllerFleet(16, ranks_per_host=8)
    fleet.put(1)
    looks = [counted(monkeypatch, redundancy, "_domains_by_chunk"), counted(monkeypatch, HostTable, "domains")]
    [job] = fleet.ask(AskStatus()).jobs
    assert job.newest is not None
    assert (job.newest.copies, [row.tolerated for row in job.newest.survives]) == (2, [0, 1])
    assert looks[0][0] <= 2 * 16
    assert looks[1][0] <= 2 * 16  # for the row of the step, and for the attempt's


def test_a_look_at_a_step_asks_once_whether_its_attempt_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once for every copy that is missing: that would be the square of the ranks."""
    fleet = ControllerFleet(16)
    fleet.put(1)
    job = fleet.machine.jobs[JOB]
    for member in job.attempts[1].members.values():
        member.is_gone = True
    for rank in range(fleet.world_size):
        fleet.seal(fleet.host_of(rank), rank, 2, is_own=True)
        step = next(iter(job.commits))
        gone = job.copies[step][rank][fleet.targets[fleet.host_of(rank)][0]]
        job.drop_copy(gone.shard, gone.host)
    fleet.machine.parts.repair.look_again(job)
    asked = counted(monkeypatch, Repair, "_is_ended")
    fleet.machine.parts.repair.consider(fleet.now, job)
    assert asked == [1]


def test_a_tick_looks_at_no_more_shards_than_its_limit_and_comes_to_all_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A job of more ranks is looked at over several ticks, so that no tick holds up the seals."""
    fleet = ControllerFleet(LOOKS_MAX + 16, ranks_per_host=1)
    fleet.put(1)
    fleet.machine.parts.repair.look_again(fleet.machine.jobs[JOB])
    looks = counted(monkeypatch, Repair, "_consider_shard")
    fleet.handle(Tick())
    assert looks[0] == LOOKS_MAX
    fleet.handle(Tick())
    assert looks[0] == fleet.world_size
    fleet.handle(Tick())
    assert looks[0] == fleet.world_size


@pytest.mark.parametrize("harm", ["none", "a chunk", "other bytes", "a copy", "a copy more"])
def test_of_ranks_with_copies_on_the_same_hosts_one_is_looked_at_closely_and_any_other_that_lacks_something(
    monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    """What is missing is missing of one rank, so no other rank's verdict may be taken for it."""
    fleet = ControllerFleet(4)
    fleet.put(1)
    machine, job = fleet.machine, fleet.machine.jobs[JOB]
    step, host = next(iter(job.commits)), fleet.hosts[0]
    copy, there = job.copies[step][3][host], {*job.copies[step][3]}
    if harm != "none":
        job.drop_copy(copy.shard, host)
    if harm in ("a chunk", "other bytes"):
        spec = copy.spec._replace(digest="0" * 32) if harm == "other bytes" else copy.spec
        job.add_copy(copy._replace(spec=spec, missing=frozenset({1} if harm == "a chunk" else ())))
    if harm == "a copy more":
        job.add_copy(copy)
        job.add_copy(copy._replace(host=next(h for h in fleet.hosts if h not in there)))
    machine.parts.repair.look_again(job)
    looks = counted(monkeypatch, Repair, "_consider_shard")
    fleet.handle(Tick())
    assert harm in ("a copy", "other bytes") or {*job.copies[step][3]} == there
    pushed = (copy.shard, host) in machine.parts.repair.pushes.under_way
    assert pushed == (harm in ("a chunk", "other bytes", "a copy"))
    assert looks[0] == (4 if harm == "none" else 5)


def test_a_seal_that_comes_while_all_shards_are_looked_at_is_looked_at_too() -> None:
    """A step counts as settled only if none of its copies changed since the look began."""
    fleet = ControllerFleet(LOOKS_MAX // 8 + 16)
    fleet.put(1)
    machine = fleet.machine
    job = machine.jobs[JOB]
    machine.parts.repair.look_again(job)
    fleet.handle(Tick())
    step = next(iter(job.commits))
    gone = job.copies[step][0][fleet.hosts[0]]
    job.drop_copy(gone.shard, gone.host)
    for _ in range(4):
        fleet.handle(Tick())
    assert (gone.shard, gone.host) in machine.parts.repair.pushes.under_way


def test_ranks_that_wait_for_their_launch_ask_all_at_once_and_are_looked_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each asks after the same seconds: to look at all of them for each of them is the square of the ranks."""
    fleet = ControllerFleet(4)
    question = {
        "job": "next",
        "world_size": 17,
        "key": "k",
        "launcher": "l",
        "pid": 1,
        "fresh": False,
        "takeover": False,
        "config": fleet.config,
    }
    asked: list[Any] = []
    looks = counted(monkeypatch, join, "_gathering")
    for rank in range(16):
        fleet.handle(
            Received(
                fleet.hosts[0],
                Called(id=1000 + rank, call=request_of("join", {**question, "rank": rank, "nonce": f"m{rank}"})),
            )
        )
    for rank in range(16):
        asked += fleet.machine.handle(
            fleet.now, Received(fleet.hosts[0], Called(id=2000 + rank, call=AskRollCall(job="next", of="join")))
        )
    assert {answer.reply.awaited for answer in asked} == {"rank 16"}
    assert looks == [1]
    fleet.handle(Tick())
    fleet.handle(Received(fleet.hosts[0], Called(id=3000, call=AskRollCall(job="next", of="join"))))
    assert looks == [2]


def test_a_heartbeat_of_a_live_host_orders_nothing() -> None:
    """Four thousand of them come every second from two thousand hosts."""
    fleet = ControllerFleet(4)
    assert fleet.machine.handle(fleet.now, HostBeat(fleet.hosts[0])) == []


def test_journals_are_rewritten_also_where_hundreds_of_hosts_are_facts_themselves() -> None:
    """What counts is how many bytes of them are needed: or two hundred joins would keep every old commit there."""

    def commit(step: int) -> StepCommitted:
        return StepCommitted("train", 1, step, 1, ByRank.of(("d",), (("a", "b"),)), "host", False, "", 0.0)

    log = FactLog(term=1)
    for number in range(200):
        log.append(HostsJoined({f"h{number}": {}}))
    rewrites, longest = 0, 0
    for step in range(1000):
        log.append(commit(step))
        log.applied_seq = log.last_seq
        longest = max(longest, log.journal_nbytes)
        rewrites += log.compact(lambda fact, step=step: isinstance(fact, HostsJoined) or fact.step == step)
    assert 3 <= rewrites <= 20
    assert longest <= 2 * log.journal_nbytes


def test_a_committed_step_that_is_not_due_costs_ticks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a step is whole is asked for when it is to be written, not ten times a second until then (R31)."""
    fleet = ControllerFleet(16, durable="/durable", durable_every="1h")
    for step in (1, 2):
        fleet.put(step)
        fleet.handle(Tick())
    assert fleet.machine.parts.durable_states.of(JOB).active is not None
    looks = counted(monkeypatch, DurableStates, "writers")
    for _ in range(10):
        fleet.handle(Tick())
    assert looks[0] == 0


def flapping_fleet(hosts_count: int, every: int) -> tuple[ControllerFleet, list[str]]:
    """Every so many hosts, one dies often and lacks the copies of step 1 that others have; return these hosts too."""
    fleet = ControllerFleet(hosts_count)
    fleet.put(1)
    fleet.handle(Tick())
    job = fleet.machine.jobs[JOB]
    (step,) = job.commits
    flapping = fleet.hosts[::every]
    for host in flapping:
        fleet.machine.hosts.states[host].deaths_s += [fleet.now] * 3
        for rank in list(job.on_host[host][step]):
            if len(job.copies[step][rank]) > 1:
                job.drop_copy(ShardId(JOB, 1, 1, rank), host)
    fleet.machine.parts.repair.look_again(job)
    return fleet, flapping


def test_copies_that_no_host_can_take_keep_others_from_no_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """No host has room for the first ranks, more of them than one look seeks hosts for: the next looks seek others."""
    fleet, flapping = flapping_fleet(16, 2)
    takes, push = Substitutes._takes, Repair._push
    monkeypatch.setattr(  # else those copies go to the hosts that flap first, and what sends them sends no others
        Repair, "_push", lambda self, now, shard, to, *more: to not in flapping and push(self, now, shard, to, *more)
    )
    monkeypatch.setattr(
        Substitutes, "_takes", lambda self, shard, host, **more: shard.rank > 64 and takes(self, shard, host, **more)
    )
    for _ in range(3):
        fleet.handle(Tick())
    assert {shard.rank > 64 for shard, _ in fleet.machine.parts.repair.pushes.under_way} == {True}


@pytest.mark.parametrize("hosts_count", [16, 64])
def test_what_stands_in_for_a_flapping_host_is_found_once_a_look(
    hosts_count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quarter of the hosts dies often and lacks its copies: a look asks of a host a few times, not for each copy."""
    fleet, flapping = flapping_fleet(hosts_count, 4)
    fleet.handle(Tick())  # asks hosts for room
    looks = [counted(monkeypatch, ClusterView, "wanted"), counted(monkeypatch, HostTable, "is_on_probation")]
    fleet.handle(Tick())
    assert len(fleet.machine.parts.repair.pushes.under_way) >= len(flapping) / 2
    assert looks[0][0] <= 8 * fleet.world_size
    assert looks[1][0] <= 4 * fleet.world_size

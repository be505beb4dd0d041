"""Which hosts are sent copies, and what they are told of it: scattered placements, orders, shared shards."""

from __future__ import annotations

from typing import Any, TypeVar

import pytest

from memstore.core import capacity
from memstore.core.cluster.facts import HostsJoined
from memstore.core.journal import records
from memstore.core.journal.records import entries_of
from memstore.core.wire.ids import WireShard
from memstore.core.wire.orders import Bring, Fence, HostNews, PushTargets, Reserve, WriteJournal
from memstore.testing.controller.holder import DirectedRank
from memstore.testing.controller.world import JOB, ControllerWorld
from recovery.inventory import StepId

# -- scatter ------------------------------------------------------------------------------------------
# The ranks of one host take several placements by turns: who holds their copies, before and after losses (R18).


HOSTS = {f"h{n}": {"rack": f"r{n % 2}"} for n in range(6)}
RANKS = 4 * len(HOSTS)


def world_of(scatter: int, **config: object) -> ControllerWorld:
    return ControllerWorld(list(HOSTS), labels=HOSTS, scatter=scatter, **config)


def launch(world: ControllerWorld, key: str, moved_to: str = "") -> list[DirectedRank]:
    """Start four ranks on each host; those of a host that is down start on another one."""
    names = list(HOSTS)
    places = [names[rank // 4] for rank in range(RANKS)]
    ranks = [
        world.join(rank, RANKS, key, host=place if world.holders[place].is_up else moved_to)
        for rank, place in enumerate(places)
    ]
    assert world.run_until(lambda: all(rank.answers.get("join") for rank in ranks), 15.0)
    return ranks


def others(world: ControllerWorld, step: int, rank: DirectedRank) -> set[str]:
    return {*world.holders_of(StepId(rank.attempt, step), rank.rank)} - {rank.host_id}


@pytest.mark.parametrize("scatter", [1, 2, 3])
def test_the_copies_of_a_hosts_ranks_are_on_as_many_hosts(scatter: int) -> None:
    """Each of them in the other rack; every rank's step is committed with two copies."""
    world = world_of(scatter)
    ranks = launch(world, "k")
    world.get(ranks)
    assert world.put_all(ranks, 1)
    for first in range(0, RANKS, 4):
        mine = ranks[first : first + 4]
        held = [others(world, 1, rank) for rank in mine]
        assert all(len(hosts) == 1 for hosts in held)
        assert len(set.union(*held)) == scatter
        rack = HOSTS[mine[0].host_id]["rack"]
        assert all(HOSTS[host]["rack"] != rack for hosts in held for host in hosts)
        targets = world.status()["jobs"][0]["newest"]["targets"][mine[0].host_id]
        assert {*targets} == set.union(*held)


def test_a_lost_hosts_ranks_are_restored_from_several_hosts() -> None:
    """No byte is lost with any one host, and repair gives every rank its second copy again, in the other rack."""
    world = world_of(2)
    ranks = launch(world, "k")
    world.get(ranks)
    assert world.put_all(ranks, 1)
    sources = set.union(*(others(world, 1, rank) for rank in ranks[4:8]))
    assert len(sources) == 2
    for rank in ranks:
        world.kill_rank(rank)
    world.kill_host("h1")
    again = launch(world, "k2", moved_to=next(host for host in sorted(HOSTS) if host not in {"h1", *sources}))
    answers = world.get(again)
    assert {answer["step"] for answer in answers} == {1}
    world.check_restored(answers)
    assert world.put_all(again, 2)
    assert world.run_until(lambda: all(len(world.holders_of(StepId(2, 2), rank)) == 2 for rank in range(RANKS)), 60.0)
    for rank in range(RANKS):
        assert {HOSTS[host]["rack"] for host in world.holders_of(StepId(2, 2), rank)} == {"r0", "r1"}


def test_another_controller_orders_the_same_targets() -> None:
    """Nothing of a placement is journalled: it follows from the hosts."""
    world = world_of(3)
    ranks = launch(world, "k")
    world.get(ranks)
    assert world.put_all(ranks, 1)
    before = [others(world, 1, rank) for rank in ranks]
    world.crash_controller()
    assert world.run_until(lambda: world.machine is not None and world.machine.is_settled, 30.0)
    assert world.put_all(ranks, 2)
    assert [others(world, 2, rank) for rank in ranks] == before


def test_ranks_with_equal_state_keep_to_their_writers() -> None:
    """Writers of one shard are one another's targets; scatter says only where placement has to help out."""
    world = world_of(2)
    ranks = [world.join(rank, 6, "k", host=f"h{rank}", shard=0, shards=1) for rank in range(6)]
    assert world.run_until(lambda: all(rank.answers.get("join") for rank in ranks), 15.0)
    world.get(ranks)
    assert world.put_all(ranks, 1)
    writers = world.job(JOB).newest.writers  # type: ignore[union-attr]
    for rank in (ranks[number] for number in writers):
        assert others(world, 1, rank) <= {ranks[number].host_id for number in writers}


# -- sent orders --------------------------------------------------------------------------------------
# What all hosts are sent, and no more: views as changes, journals as what they lack, fences by host (R3, R16, R28).


OneOrder = TypeVar("OneOrder")


def sent_to(world: ControllerWorld, host: str, kind: type[OneOrder]) -> list[OneOrder]:
    """The orders of a kind that a host was given since the last look."""
    found = world.holders[host].received(kind)
    world.holders[host].orders.clear()
    return found


def known(world: ControllerWorld, host: str) -> set[str]:
    """The hosts whose addresses a host has, by all views that it was ever given."""
    peers: set[str] = set()
    for order in world.holders[host].orders:
        if isinstance(order, HostNews):
            kept = set() if order.gone is None else peers.difference(order.gone)
            peers = kept | {row.host for row in order.hosts}
    return peers


def test_a_host_that_is_suspected_for_a_moment_is_no_news() -> None:
    """No host's address has changed: none is sent, nor of other targets (R28)."""
    world = ControllerWorld(4)
    world.launch(4)
    world.run(2.0)
    for holder in world.holders.values():
        holder.orders.clear()
    world.silence("h1")
    assert world.run_until(lambda: not world.served.hosts.is_answering("h1"), 5.0)
    world.thaw("h1")
    assert world.run_until(lambda: world.served.hosts.is_answering("h1"), 5.0)
    world.run(1.0)
    news = HostNews | PushTargets | Reserve
    assert not [order for holder in world.holders.values() for order in holder.orders if isinstance(order, news)]


@pytest.mark.parametrize("has_job", [False, True])
def test_views_say_who_came_and_who_went_and_a_newcomer_learns_of_all(has_job: bool) -> None:
    """After any series of changes, every host ends with the addresses of all live hosts but the dead (R3)."""
    world = ControllerWorld(4)
    if has_job:
        world.launch(4)
    world.run(2.0)
    world.kill_host("h1")
    world.run(0.1)  # within a message's way: no host waits for a tick to learn of a death
    assert known(world, "h0") == {"h0", "h2", "h3"}
    world.add_host("h4", {})
    world.return_host("h1")
    world.run(2.0)
    assert all(known(world, host) == set(world.holders) for host in ("h0", "h2", "h3", "h4"))
    sizes = [len(order.hosts) for order in sent_to(world, "h0", HostNews) if order.gone is not None]
    assert sizes
    assert max(sizes) <= 2


def test_hosts_that_join_together_are_one_word_to_the_others() -> None:
    """Their facts and their addresses go out once a tick, not once a host (R16)."""
    world = ControllerWorld(2)
    world.run(2.0)
    sent_to(world, "h0", HostNews)
    for number in range(2, 12):
        world.add_host(f"h{number}", {})
    world.run(2.0)
    holder = world.holders["h0"]
    facts = [[entry.fact for entry in entries_of("", order.records)] for order in holder.received(WriteJournal)]
    joined = [fact for group in facts for fact in group if isinstance(fact, HostsJoined)]
    assert sorted(host for fact in joined for host in fact.labels) == sorted(f"h{number}" for number in range(2, 12))
    assert len(facts) <= 2
    assert len(holder.received(HostNews)) <= 2


def world_with_a_commit() -> ControllerWorld:
    world = ControllerWorld(3)
    ranks = world.launch(3)
    world.get(ranks)
    assert world.put_all(ranks, 1)
    world.run(1.0)
    return world


def test_a_successor_sends_no_process_what_his_journal_has() -> None:
    """All journals are whole: no record travels back; and one that lacks its end is given that end alone (R16)."""
    world = world_with_a_commit()
    for holder in world.holders.values():
        holder.orders.clear()
    del world.holders["h2"].journal[-2:]  # the last commit, and what it keeps of it
    world.crash_controller()
    world.run(6.0)
    orders = {host: [o for o in h.orders if isinstance(o, WriteJournal)] for host, h in world.holders.items()}
    assert all(found[0].keep is None for found in orders.values())
    assert {host: len(orders[host][0].records) for host in orders} == {"h0": 0, "h1": 0, "h2": 1}
    assert all(holder.journal == world.journal_of(host) for host, holder in world.holders.items())


def test_a_journal_with_other_facts_between_is_written_again() -> None:
    """What is not the first part of the log is not added to: facts of a lower term never follow those of a higher."""
    world = world_with_a_commit()
    del world.holders["h2"].journal[1:3]
    world.crash_controller()
    world.run(6.0)
    assert any(order.keep == () for order in sent_to(world, "h2", WriteJournal))
    assert world.holders["h2"].journal == world.journal_of("h2")


def test_journals_shrink_without_being_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Holders are ordered what to keep; what is left is the controller's log, in its order, on every host (R16)."""
    monkeypatch.setattr(capacity, "JOURNAL_NBYTES_MIN", 4 << 10)
    world = ControllerWorld(3)
    ranks = world.launch(3)
    world.get(ranks)
    for step in range(1, 40):
        assert world.put_all(ranks, step)
    world.run(1.0)
    assert sum(bool(order.keep) for order in world.holders["h1"].received(WriteJournal)) >= 2
    assert sum(map(len, world.holders["h1"].journal)) <= 3 * (4 << 10)
    newest = {entry.seq for entry in entries_of("h1", world.holders["h1"].journal)}
    assert {entry.seq for entry in world.served.parts.journal.log.entries} <= newest
    world.crash_controller()
    world.run(6.0)
    world.check_restored(world.get(world.launch(3)))


def test_a_fence_names_the_processes_of_the_host_alone() -> None:
    """A process talks to its own host's holder: of the others it need not know (R4, R21)."""
    world = ControllerWorld(3)
    ranks = world.launch(6)
    for host in world.holders:
        order = sent_to(world, host, Fence)[-1]
        assert order.job == JOB
        assert sorted(order.members) == sorted(rank.nonce for rank in ranks if rank.host_id == host)


def test_journals_are_written_again_as_a_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A late host's facts go to all in pages; the controller dies after the first of them: no host lost any (R16)."""
    world = world_with_a_commit()
    world.kill_host("h2", keep_memory=True)
    for host in ("h0", "h1"):
        del world.holders[host].journal[1:3]  # what only the late host has kept: then all are written again
    world.crash_controller()
    world.run(6.0)
    before = {host: list(world.holders[host].journal) for host in ("h0", "h1")}
    monkeypatch.setattr(records, "PAGE_BYTES", 1)
    for holder in world.holders.values():
        holder.orders.clear()
    world.return_host("h2")

    def pages() -> list[WriteJournal]:
        found = [order for host in ("h0", "h1") for order in world.holders[host].received(WriteJournal)]
        return [order for order in found if order.has_more]

    assert world.run_until(lambda: len(pages()) >= 2, 5.0)
    world.crash_controller(restart_after_s=None)
    assert {host: world.holders[host].journal for host in before} == before
    monkeypatch.undo()
    world.kill_host("h2")
    world.start_controller()
    world.run(8.0)
    assert StepId(1, 1) in world.job().commits


def test_pages_of_an_order_that_had_no_end_are_nothing_to_the_next_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Journals that come in pages are whole in the end, also if a controller began others before (R16)."""
    monkeypatch.setattr(records, "PAGE_BYTES", 1)
    world = world_with_a_commit()
    world.holders["h1"].carry_out(WriteJournal(None, (b"of a controller that is gone",), seq=99, has_more=True))
    world.holders["h1"].journal.clear()
    world.crash_controller()
    world.run(6.0)
    assert all(holder.journal == world.journal_of(host) for host, holder in world.holders.items())


# -- shared shards ------------------------------------------------------------------------------------
# Ranks that name one shard: which of them copies it, where to, what is refused, what a loss leaves (R16, R18, R34).


def launch_shards(world: ControllerWorld, shards_of: list[int], key: str = "k", **more: Any) -> list[DirectedRank]:
    """Rank n on host n, naming shards_of[n]."""
    count = max(shards_of) + 1
    hosts = sorted(h for h, x in world.holders.items() if x.is_up)
    ranks = [
        world.join(n, len(shards_of), key, host=hosts[n % len(hosts)], **{"shard": shard, "shards": count, **more})
        for n, shard in enumerate(shards_of)
    ]
    world.run_until(lambda: all(r.answers.get("join") or r.errors.get("join") for r in ranks), 15.0)
    return ranks


def writers(rank: DirectedRank) -> list[int]:
    """The ranks that copy this rank's shard, as it was sent last."""
    found: list[int] = rank.answers["join"][-1]["shared_shard"][2]
    return found


def test_writers_keep_one_anothers_copies_and_the_rest_go_where_placement_says() -> None:
    """Two of four hold the shared state, on two racks; what the other two put is replicated as always."""
    labels = {"h0": {"rack": "a"}, "h1": {"rack": "a"}, "h2": {"rack": "b"}, "h3": {"rack": "b"}}
    world = ControllerWorld(4, labels=labels)
    ranks = launch_shards(world, [0, 0, 0, 0])
    assert [writers(rank) for rank in ranks] == [[0, 2]] * 4
    assert ranks[0].answers["join"][-1]["shared_shard"][3] == [[0, 2]]
    world.get(ranks)
    assert world.put_all(ranks, 1)
    step = StepId(1, 1)
    assert world.holders_of(step, 0) == world.holders_of(step, 2) == ["h0", "h2"]
    assert all(len(world.holders_of(step, rank)) == 2 for rank in (1, 3))
    assert world.status()["jobs"][0]["writers"] == [0, 2]


def test_a_lost_writers_host_leaves_the_shared_state_and_others_copy_next() -> None:
    """replicas - 1 domains may go: the next launch restores all shards, and copies on hosts that are there."""
    world = ControllerWorld(4)
    ranks = launch_shards(world, [0, 0, 0, 0])
    world.get(ranks)
    assert world.put_all(ranks, 1)
    world.kill_host("h0")
    for rank in ranks:
        world.kill_rank(rank)
    again = launch_shards(world, [0, 0, 0, 0], "again")
    got = world.get(again)
    world.check_restored(got)
    assert {answer["step"] for answer in got} == {1}
    assert world.put_all(again, 2)
    chosen = writers(again[0])
    assert {again[rank].host_id for rank in chosen} == set(world.holders_of(StepId(2, 2), chosen[0]))
    assert "h0" not in world.holders_of(StepId(2, 2), chosen[0])


def test_a_shared_part_is_read_from_a_writer_without_a_barrier() -> None:
    """As a rank that did not copy gets it: the writer's shard of the restored step, on its own host."""
    world = ControllerWorld(4)
    ranks = launch_shards(world, [0, 0, 0, 0])
    world.get(ranks)
    assert world.put_all(ranks, 1)
    for rank in ranks:
        world.kill_rank(rank)
    ranks = launch_shards(world, [0, 0, 0, 0], "again")
    world.get(ranks)
    world.call(ranks[3], "read_step", rank=0, step=1, of_attempt=1)
    assert world.run_until(lambda: bool(ranks[3].answers.get("read_step")), 10.0), ranks[3].errors
    [order] = [order for order in world.holders["h3"].received(Bring) if order.use == "read"]
    assert order.shard == WireShard(JOB, 1, 1, 0)


def test_a_new_controller_and_a_replaced_rank_are_sent_the_same_writers() -> None:
    """They stand in the attempt's fact; a process that takes a rank's place must hold the same shard."""
    world = ControllerWorld(4)
    ranks = launch_shards(world, [0, 1, 0, 1])
    before = [writers(rank) for rank in ranks]
    assert before == [[0, 2], [1, 3], [0, 2], [1, 3]]
    world.crash_controller()
    world.run(5.0)
    wrong = world.join(1, 4, "k", host="h1", shard=0, shards=2)
    world.run_until(lambda: bool(wrong.errors.get("join")), 5.0)
    assert "rank 1 named shard 1 of 2" in wrong.error("join")
    right = world.join(1, 4, "k", host="h1", shard=1, shards=2)
    assert world.run_until(lambda: bool(right.answers.get("join")), 15.0)
    assert writers(right) == [1, 3]
    ranks[1] = right
    world.get(ranks)
    assert world.put_all(ranks, 1)


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ([(0, 2), (1, 2), (0, 2), (0, 4)], "ranks 0, 1, 2 name shard_count=2; rank 3 names shard_count=4"),
        ([(0, 1), (0, 1), (0, 1), (None, None)], "ranks 0, 1, 2 name shard_count=1; rank 3 names none"),
        ([(0, 3), (1, 3), (0, 3), (1, 3)], "no rank names shard_rank 2 of shard_count=3"),
        ([(0, 2), (1, 2), (2, 2), (1, 2)], "shards are numbered 0 to 1, but rank 2 names shard_rank=2"),
        ([(0, 1), (3, 1), (0, 1), (1, 1)], "the only shard is 0, but rank 1 names shard_rank=3, rank 3"),
        ([(0, 5), (1, 5), (2, 5), (3, 5)], "shard_count=5, but 4 ranks can hold at most 4 shards"),
    ],
)
def test_ranks_that_do_not_agree_are_all_refused(named: list[tuple[int | None, int | None]], message: str) -> None:
    """Every rank learns what each rank said; nothing is opened."""
    world = ControllerWorld(4)
    ranks = [world.join(n, 4, "k", shard=i, shards=count) for n, (i, count) in enumerate(named)]
    world.run_until(lambda: all(r.errors.get("join") for r in ranks), 5.0)
    assert all(message in rank.error("join") for rank in ranks), ranks[0].error("join")
    assert JOB not in world.served.jobs


def test_a_shard_without_a_count_is_no_shard() -> None:
    """What some ranks of a foreign client name without a count is ignored on all ranks; nothing of it is recorded."""
    world = ControllerWorld(4)
    ranks = [world.join(n, 4, "k", shard=0 if n < 2 else None, shards=None) for n in range(4)]
    assert world.run_until(lambda: all(r.answers.get("join") for r in ranks), 5.0)
    assert world.served.jobs[JOB].newest.shard_of == ()
    assert world.put_all(ranks, 1)


def test_ranks_that_rewind_keep_their_shards() -> None:
    """A rank's number says which shard it holds, independently of its process; writers are chosen again (R22)."""
    world = ControllerWorld(4, placement="ring")
    ranks = launch_shards(world, [0, 1, 0, 1])
    world.get(ranks)
    assert world.put_all(ranks, 1)
    assert world.put_all(ranks, 2)
    for rank in ranks:
        body = {"nonce": rank.nonce, "key": rank.key, "step": 2, "of_attempt": None}
        world.call(rank, "rewind", **body)
    assert world.run_until(lambda: all(rank.answers.get("rewind") for rank in ranks), 20.0), ranks[0].errors
    assert [rank.answers["rewind"][-1]["shared_shard"][:2] for rank in ranks] == [[0, 2], [1, 2], [0, 2], [1, 2]]
    newest = world.job().newest
    assert newest is not None
    assert (newest.attempt_number, newest.shard_of, newest.writers) == (2, (0, 1, 0, 1), (0, 1, 2, 3))


def test_what_differs_is_reported_once_until_it_is_equal_again() -> None:
    """One event and one row of status for a pair of ranks, from the first step that differed."""
    world = ControllerWorld(3)
    ranks = launch_shards(world, [0, 0, 0])
    world.get(ranks)
    report = {"job": JOB, "attempt": 1, "ranks": [0, 1], "chunks": 3, "names": ["model.weight"]}
    for step in (5, 6):
        world.call(ranks[0], "report_differing", **report, step=step)
    world.run(1.0)
    happened = [h for h in world.served.parts.recorder.recent_events.since(0) if h.event.startswith("replicas_")]
    assert [(h.event, h.step, h.fields["names"]) for h in happened] == [("replicas_differ", 5, ["model.weight"])]
    status = world.status()["jobs"][0]["replicas_differ"]
    assert [(row["ranks"], row["step"], row["names"]) for row in status] == [([0, 1], 5, ["model.weight"])]
    world.call(ranks[0], "report_differing", **{**report, "step": 7, "chunks": 0, "names": []})
    world.run(1.0)
    happened = [h for h in world.served.parts.recorder.recent_events.since(0) if h.event.startswith("replicas_")]
    assert [h.event for h in happened] == ["replicas_differ", "replicas_agree"]
    assert not world.status()["jobs"][0]["replicas_differ"]

"""What all hosts are sent, and no more: views as changes, journals as what they lack, fences by host (R3, R16, R28)."""

from __future__ import annotations

from typing import TypeVar

import pytest

from memstore.core import capacity
from memstore.core.cluster.facts import HostsJoined
from memstore.core.journal import records
from memstore.core.journal.records import entry_from_record
from memstore.core.wire.orders import Fence, HostNews, PushTargets, Reserve, WriteJournal
from memstore.testing.controller.world import JOB, ControllerWorld
from recovery.inventory import StepId

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
    facts = [[entry_from_record(record).fact for record in order.records] for order in holder.received(WriteJournal)]
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
    del world.holders["h2"].journal[-2:]
    world.crash_controller()
    world.run(6.0)
    orders = {host: [o for o in h.orders if isinstance(o, WriteJournal)] for host, h in world.holders.items()}
    assert all(found[0].keep is None for found in orders.values())
    assert {host: len(orders[host][0].records) for host in orders} == {"h0": 0, "h1": 0, "h2": 2}
    entries = [entry.record for entry in world.served.parts.journal.log.entries]
    assert all(holder.journal == entries for holder in world.holders.values())


def test_a_journal_with_other_facts_between_is_written_again() -> None:
    """What is not the first part of the log is not added to: facts of a lower term never follow those of a higher."""
    world = world_with_a_commit()
    del world.holders["h2"].journal[2]
    world.crash_controller()
    world.run(6.0)
    assert any(order.keep == () for order in sent_to(world, "h2", WriteJournal))
    assert world.holders["h2"].journal == [entry.record for entry in world.served.parts.journal.log.entries]


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
    newest = {entry_from_record(record).seq for record in world.holders["h1"].journal}
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
        del world.holders[host].journal[1]  # what only the late host has kept: then all are written again
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
    entries = [entry.record for entry in world.served.parts.journal.log.entries]
    assert all(holder.journal == entries for holder in world.holders.values())

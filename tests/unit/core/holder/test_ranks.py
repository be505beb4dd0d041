"""What a holder does with the links of one process, effect by effect: two that come at once, one that ends (R4, R8)."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from memstore.core.arena.replica_index import ReplicaIndex
from memstore.core.arena.share import PeerShare
from memstore.core.arena.slot_table import Owner, SlotTable
from memstore.core.holder import effects, ranks
from memstore.core.holder.effects import Effect
from memstore.core.holder.state import HolderState, Limits
from memstore.core.wire.messages import HostInfo
from memstore.core.wire.rank_messages import RankHello
from memstore.core.wire.reports import RankArrived, RankGone, Report

OWNER = Owner(1, 1, 1)
HELLO = RankHello(nonce="n", life=0, pid=1, job="job", rank=0, attempt=1, held=(), arena="arena")


@dataclass(eq=False)
class Link:
    """One connection of the same rank."""

    nonce: str = "n"
    owner: Owner = OWNER
    job: str = "job"
    rank: int = 0
    attempt: int = 1
    pins: dict[int, Callable[[], None]] = field(default_factory=dict)
    is_retired: bool = False
    is_open: bool = True
    order: int = field(default_factory=itertools.count(1).__next__)


def host(table: SlotTable, reports: list[Report] | None = None) -> HolderState:
    """Return the state of a holder with these slots, which appends its reports to a list."""
    reports = [] if reports is None else reports
    store: Any = SimpleNamespace(
        arena_identity="arena", confirm=lambda owner, held: table.confirm(owner, held)[1],
        lease=lambda owner, job, rank, attempt: table.lease(owner, 4, attempt=attempt),
        reclaim=table.reclaim, lock=threading.RLock(), index=ReplicaIndex(table),
    )  # fmt: skip
    return HolderState(
        HostInfo("a", 1, ()), store, lambda shard, digest: None, Limits(2.0, 6.0), now=lambda: 0.0,
        report=reports.append, ask=lambda request: None, is_stopping=lambda: False,
        is_alive=lambda owner: True, pin_numbers=itertools.count(1),
    )  # fmt: skip


def test_of_two_links_that_arrive_at_once_the_later_one_is_taken() -> None:
    """The first one's welcome is late: by then the process has given it up, and is connected on the other."""
    state, first, second = host(SlotTable(8)), Link(), Link()
    late = ranks.join(state, first, HELLO)
    assert isinstance(next(late), effects.SendWelcome)
    first.is_open = False
    list(ranks.join(state, second, HELLO))
    assert state.ranks.links == {"n": second}
    assert [type(effect) for effect in late] == [effects.CloseLink]
    assert (state.ranks.links, first.is_retired, second.is_retired) == ({"n": second}, True, False)


def test_a_link_that_is_closed_late_frees_nothing_that_a_newer_one_was_leased() -> None:
    """It waits for the end of an older link; meanwhile a third one is welcomed and leased slots."""
    table = SlotTable(8)
    state, oldest, first, second = host(table), Link(), Link(), Link()
    state.ranks.links["n"] = oldest
    late = ranks.join(state, first, HELLO)
    assert isinstance(next(late), effects.CloseLink)
    leased: list[int] = []
    for effect in ranks.join(state, second, HELLO):
        leased += ranks.lease(state, second) if isinstance(effect, effects.Grant) else []
    assert len(leased) == 4
    list(late)
    assert sorted(table.leases[OWNER]) == sorted(leased)
    assert state.ranks.links == {"n": second}


def test_a_link_that_was_accepted_before_the_one_that_is_taken_is_ended() -> None:
    """Its thread ran late: what its rank held then would free what the newer link has been leased."""
    table = SlotTable(8)
    state, newer, late = host(table), Link(order=2), Link(order=1)
    for effect in ranks.join(state, newer, HELLO):
        if isinstance(effect, effects.Grant):
            ranks.lease(state, newer)
    assert [type(effect) for effect in ranks.join(state, late, HELLO)] == [effects.CloseLink]
    assert (state.ranks.links, late.is_retired, len(table.leases[OWNER])) == ({"n": newer}, True, 4)


def test_a_link_that_ends_keeps_no_pin_and_is_no_ones_link_any_more() -> None:
    """It is out of the table before its pins go, so a read that is being answered keeps none for it."""
    state, link, seen = host(SlotTable(8)), Link(), list[bool]()
    state.ranks.links["n"] = link
    link.pins = dict.fromkeys((1, 2), lambda: seen.append(state.ranks.is_current(link)))
    assert ranks.end(state, link)
    assert (seen, link.pins) == ([False, False], {})
    assert not ranks.end(state, link)


def test_a_welcome_that_cannot_be_sent_leaves_nothing() -> None:
    """The procedure ends by the error, and the next link of the process is taken."""
    state, link = host(SlotTable(8)), Link()
    steps = ranks.join(state, link, HELLO)
    effect: Effect = next(steps)
    assert isinstance(effect, effects.SendWelcome)
    try:
        steps.throw(ConnectionError("reset"))
    except ConnectionError:
        pass
    assert state.ranks.links == {}
    again = Link()
    list(ranks.join(state, again, HELLO))
    assert state.ranks.links == {"n": again}


def test_a_process_that_says_bye_is_reported_as_gone() -> None:
    """Its controller may have been away when it closed its store: nothing else says that its steps will not go on."""
    reports: list[Report] = []
    table = SlotTable(8)
    state, link = host(table, reports), Link()
    list(ranks.join(state, link, HELLO))
    assert ranks.lease(state, link)
    list(ranks.leave(state, link))
    assert reports == [RankArrived(nonce="n"), RankGone(nonce="n")]
    assert (state.ranks.links, state.ranks.owners, table.leases.get(OWNER, set())) == ({}, {}, set())


def test_room_for_a_first_put_is_kept_until_the_last_rank_here_has_gone() -> None:
    """Other ranks of the job may put, processes of other jobs are none of its own."""
    state = host(SlotTable(8))
    links = [Link(), Link(nonce="m", owner=replace(OWNER, pid=OWNER.pid + 1))]
    for link, nonce in zip(links, ("n", "m"), strict=True):
        list(ranks.join(state, link, structs.replace(HELLO, nonce=nonce)))
    state.store.index.prepared.update(job=PeerShare(1, {0: 4}, 4), other=PeerShare(1, {0: 4}, 4))
    list(ranks.leave(state, links[0]))
    assert {*state.store.index.prepared} == {"job", "other"}
    list(ranks.leave(state, links[1]))
    assert {*state.store.index.prepared} == {"other"}


@pytest.mark.parametrize("is_over", [False, True])
def test_the_thread_of_an_earlier_try_to_connect_that_runs_late_changes_nothing(is_over: bool) -> None:
    """A frozen holder accepted both: the process gave the first up, and may be gone again by then (R4, R8)."""
    reports: list[Report] = []
    state = host(SlotTable(8), reports)
    first, second = Link(), Link(owner=replace(OWNER, link=2))
    list(ranks.join(state, second, HELLO))
    if is_over:
        list(ranks.leave(state, second))
    before = list(reports)
    assert [type(effect) for effect in ranks.join(state, first, HELLO)] == [effects.CloseLink]
    assert state.ranks.links == ({} if is_over else {"n": second})
    assert reports == before


def test_a_former_stores_link_that_comes_back_does_not_take_the_newest_ones_place() -> None:
    """A holder restarts while a process has two stores: the one that it left, and has not closed, comes back last."""
    table, reports = SlotTable(8), list[Report]()
    state = host(table, reports)
    newest, former = Link(owner=replace(OWNER, link=2)), Link()
    for effect in ranks.join(state, newest, structs.replace(HELLO, life=2)):
        if isinstance(effect, effects.Grant):
            ranks.lease(state, newest)
    assert [type(effect) for effect in ranks.join(state, former, structs.replace(HELLO, life=1))] == [
        effects.SendWelcome
    ]
    assert state.ranks.links == {"n": newest}
    list(ranks.leave(state, former))
    assert reports == [RankArrived(nonce="n")]
    assert (state.ranks.links, len(table.leases[newest.owner])) == ({"n": newest}, 4)


def test_the_newest_stores_link_whose_thread_runs_after_the_former_ones_takes_its_place() -> None:
    """A holder that restarts accepted the newest store first: its life decides, not the order."""
    state, newest, former = host(SlotTable(8)), Link(owner=replace(OWNER, link=2), order=1), Link(order=2)
    list(ranks.join(state, former, structs.replace(HELLO, life=1)))
    list(ranks.join(state, newest, structs.replace(HELLO, life=2)))
    assert state.ranks.links == {"n": newest}


def test_a_former_stores_link_whose_welcome_is_late_does_not_take_the_newest_ones_place() -> None:
    """It came back just before the process connected its newest store."""
    state, newest, former = host(SlotTable(8)), Link(owner=replace(OWNER, link=2)), Link()
    late = ranks.join(state, former, structs.replace(HELLO, life=1))
    assert isinstance(next(late), effects.SendWelcome)
    list(ranks.join(state, newest, structs.replace(HELLO, life=2)))
    assert list(late) == []
    assert (state.ranks.links, former.is_retired) == ({"n": newest}, False)


def test_a_former_store_is_taken_again_once_a_newer_ones_connect_has_failed() -> None:
    """It is the only one that the process has then."""
    state, newest, former = host(SlotTable(8)), Link(owner=replace(OWNER, link=2)), Link()
    list(ranks.join(state, newest, structs.replace(HELLO, life=2)))
    list(ranks.leave(state, newest))
    list(ranks.join(state, former, structs.replace(HELLO, life=1)))
    assert state.ranks.links == {"n": former}


def test_what_a_closed_store_was_leased_is_freed_by_the_next_ones_hello() -> None:
    """Its process lives on, and its `bye` met no holder: nothing else would ever free these slots."""
    table = SlotTable(8)
    state, former, newest = host(table), Link(), Link(owner=replace(OWNER, link=2))
    table.lease(OWNER, 4, attempt=1)
    list(ranks.join(state, newest, structs.replace(HELLO, life=2), [former.owner]))
    assert OWNER not in table.leases


def test_a_process_that_connects_again_while_its_bye_is_carried_out_is_no_dead_one() -> None:
    """The report that it is gone comes before the one that it has arrived (R20)."""
    reports: list[Report] = []
    state, link, again = host(SlotTable(8), reports), Link(), Link(owner=replace(OWNER, link=2))
    list(ranks.join(state, link, HELLO))
    leaving = ranks.leave(state, link)
    while not isinstance(next(leaving), effects.ForgetProcess):
        pass
    list(ranks.join(state, again, HELLO))
    list(leaving)
    assert [type(report) for report in reports] == [RankArrived, RankGone, RankArrived]
    assert state.ranks.links == {"n": again}


def test_a_rank_that_arrives_is_reported_after_those_of_the_launch_before_it_that_ended() -> None:
    """Or its launch would be refused as long as the next look at processes has not come (R20)."""
    reports: list[Report] = []
    state = host(SlotTable(8), reports)
    list(ranks.join(state, Link(), HELLO))
    state.is_alive = lambda owner: owner != OWNER
    list(ranks.join(state, Link("m", Owner(2, 2, 2)), structs.replace(HELLO, nonce="m", pid=2)))
    assert reports == [RankArrived(nonce="n"), RankGone(nonce="n"), RankArrived(nonce="m")]

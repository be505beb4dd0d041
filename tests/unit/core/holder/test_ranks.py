"""What a holder does with the links of one process, call by call: two that come at once, one that ends (R4, R8)."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
from holder_io import ScriptedIo
from msgspec import structs

from memstore.core.arena.replica_index import IncomingReplica, ReplicaIndex
from memstore.core.arena.slot_table import Owner, PeerShare, SlotTable
from memstore.core.holder import ranks
from memstore.core.holder.state import Ready
from memstore.core.wire.ids import WireShard, WireSpec
from memstore.core.wire.orders import Bring
from memstore.core.wire.rank_messages import CheckInto, RankHello
from memstore.core.wire.reports import ProcessGone, RankArrived
from recovery.inventory import ShardId, ShardSpec

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


class Host(ScriptedIo):
    """A holder with eight slots, of which a rank that is granted room gets four."""

    def __init__(self) -> None:
        self.table = table = SlotTable(8)
        store = SimpleNamespace(
            arena_identity="arena",
            confirm=lambda owner, held: table.confirm(owner, held)[1],
            lease=lambda owner, job, rank, attempt: table.lease(owner, 4, attempt=attempt),
            reclaim=table.reclaim,
            lock=threading.RLock(),
            index=ReplicaIndex(table),
        )
        super().__init__(store=store)

    async def grant(self, link: Any) -> None:
        ranks.lease(self.state, link)

    @property
    def links(self) -> dict[str, Any]:
        return self.state.ranks.links

    def join(self, link: Link, hello: RankHello = HELLO, ended: Sequence[Owner] = ()) -> Coroutine[Any, Any, None]:
        return ranks.join(self, self.state, link, hello, ended)

    def leave(self, link: Link) -> Coroutine[Any, Any, None]:
        return ranks.leave(self, self.state, link)

    def asked_by(self, steps: Coroutine[Any, Any, None]) -> list[str]:
        """Run a procedure to its end; return the names of what it asked for."""
        before = len(self.calls)
        self.play(steps)
        return self.names[before:]


def test_of_two_links_that_arrive_at_once_the_later_one_is_taken() -> None:
    """The first one's welcome is late: by then the process has given it up, and is connected on the other."""
    host, first, second = Host(), Link(), Link()
    late = host.join(first)
    host.play_until("send_welcome", late)
    first.is_open = False
    host.play(host.join(second))
    assert host.links == {"n": second}
    assert host.asked_by(late) == ["close_link"]
    assert (host.links, first.is_retired, second.is_retired) == ({"n": second}, True, False)


def test_a_link_that_is_closed_late_frees_nothing_that_a_newer_one_was_leased() -> None:
    """It waits for the end of an older link; meanwhile a third one is welcomed and leased slots."""
    host, oldest, first, second = Host(), Link(), Link(), Link()
    host.links["n"] = oldest
    late = host.join(first)
    host.play_until("close_link", late)
    host.play(host.join(second))
    leased = set(host.table.leases[OWNER])
    assert len(leased) == 4
    host.play(late)
    assert host.table.leases[OWNER] == leased
    assert host.links == {"n": second}


def test_a_link_that_was_accepted_before_the_one_that_is_taken_is_ended() -> None:
    """Its thread ran late: what its rank held then would free what the newer link has been leased."""
    host, newer, late = Host(), Link(order=2), Link(order=1)
    host.play(host.join(newer))
    assert host.asked_by(host.join(late)) == ["close_link"]
    assert (host.links, late.is_retired, len(host.table.leases[OWNER])) == ({"n": newer}, True, 4)


def test_a_link_that_ends_keeps_no_pin_and_is_no_ones_link_any_more() -> None:
    """It is out of the table before its pins go, so a read that is being answered keeps none for it."""
    host, link, seen = Host(), Link(), list[bool]()
    host.links["n"] = link
    link.pins = dict.fromkeys((1, 2), lambda: seen.append(host.state.ranks.is_current(link)))
    assert ranks.end(host.state, link)
    assert (seen, link.pins) == ([False, False], {})
    assert not ranks.end(host.state, link)


def test_a_welcome_that_cannot_be_sent_leaves_nothing() -> None:
    """The procedure ends by the error, and the next link of the process is taken."""
    host = Host()
    host.errors["send_welcome"] = ConnectionError("reset")
    with pytest.raises(ConnectionError):
        host.play(host.join(Link()))
    assert host.links == {}
    host.errors.clear()
    again = Link()
    host.play(host.join(again))
    assert host.links == {"n": again}


def test_a_process_that_says_bye_is_reported_as_gone() -> None:
    """Its controller may have been away when it closed its store: nothing else says that its steps will not go on."""
    host, link = Host(), Link()
    host.play(host.join(link))
    assert host.table.leases[OWNER]
    host.play(host.leave(link))
    assert host.reports == [RankArrived(nonce="n"), ProcessGone(nonce="n")]
    assert (host.links, host.state.ranks.owners, host.table.leases.get(OWNER, set())) == ({}, {}, set())


def test_room_for_a_first_put_is_kept_until_the_last_rank_here_has_gone() -> None:
    """Other ranks of the job may put, processes of other jobs are none of its own."""
    host = Host()
    prepared = host.state.store.index.prepared
    links = [Link(), Link(nonce="m", owner=replace(OWNER, pid=OWNER.pid + 1))]
    for link in links:
        host.play(host.join(link, structs.replace(HELLO, nonce=link.nonce)))
    prepared.update(job=PeerShare(1, {0: 4}, 4), other=PeerShare(1, {0: 4}, 4))
    host.play(host.leave(links[0]))
    assert {*prepared} == {"job", "other"}
    host.play(host.leave(links[1]))
    assert {*prepared} == {"other"}


@pytest.mark.parametrize("is_over", [False, True])
def test_the_thread_of_an_earlier_try_to_connect_that_runs_late_changes_nothing(is_over: bool) -> None:
    """A frozen holder accepted both: the process gave the first up, and may be gone again by then (R4, R8)."""
    host, first, second = Host(), Link(), Link(owner=replace(OWNER, link=2))
    host.play(host.join(second))
    if is_over:
        host.play(host.leave(second))
    before = list(host.reports)
    assert host.asked_by(host.join(first)) == ["close_link"]
    assert host.links == ({} if is_over else {"n": second})
    assert host.reports == before


def test_a_former_stores_link_that_comes_back_does_not_take_the_newest_ones_place() -> None:
    """A holder restarts while a process has two stores: the one that it left, and has not closed, comes back last."""
    host, newest, former = Host(), Link(owner=replace(OWNER, link=2)), Link()
    host.play(host.join(newest, structs.replace(HELLO, life=2)))
    assert host.asked_by(host.join(former, structs.replace(HELLO, life=1))) == ["send_welcome"]
    assert host.links == {"n": newest}
    host.play(host.leave(former))
    assert host.reports == [RankArrived(nonce="n")]
    assert (host.links, len(host.table.leases[newest.owner])) == ({"n": newest}, 4)


def test_the_newest_stores_link_whose_thread_runs_after_the_former_ones_takes_its_place() -> None:
    """A holder that restarts accepted the newest store first: its life decides, not the order."""
    host, newest, former = Host(), Link(owner=replace(OWNER, link=2), order=1), Link(order=2)
    host.play(host.join(former, structs.replace(HELLO, life=1)))
    host.play(host.join(newest, structs.replace(HELLO, life=2)))
    assert host.links == {"n": newest}


def test_a_former_stores_link_whose_welcome_is_late_does_not_take_the_newest_ones_place() -> None:
    """It came back just before the process connected its newest store."""
    host, newest, former = Host(), Link(owner=replace(OWNER, link=2)), Link()
    late = host.join(former, structs.replace(HELLO, life=1))
    host.play_until("send_welcome", late)
    host.play(host.join(newest, structs.replace(HELLO, life=2)))
    assert host.asked_by(late) == []
    assert (host.links, former.is_retired) == ({"n": newest}, False)


def test_a_former_store_is_taken_again_once_a_newer_ones_connect_has_failed() -> None:
    """It is the only one that the process has then."""
    host, newest, former = Host(), Link(owner=replace(OWNER, link=2)), Link()
    host.play(host.join(newest, structs.replace(HELLO, life=2)))
    host.play(host.leave(newest))
    host.play(host.join(former, structs.replace(HELLO, life=1)))
    assert host.links == {"n": former}


def test_what_a_closed_store_was_leased_is_freed_by_the_next_ones_hello() -> None:
    """Its process lives on, and its `bye` met no holder: nothing else would ever free these slots."""
    host, former, newest = Host(), Link(), Link(owner=replace(OWNER, link=2))
    host.table.lease(OWNER, 4, attempt=1)
    host.play(host.join(newest, structs.replace(HELLO, life=2), [former.owner]))
    assert OWNER not in host.table.leases


def test_a_process_that_connects_again_while_its_bye_is_carried_out_is_no_dead_one() -> None:
    """The report that it is gone comes before the one that it has arrived (R20)."""
    host, link, again = Host(), Link(), Link(owner=replace(OWNER, link=2))
    host.play(host.join(link))
    leaving = host.leave(link)
    host.play_until("forget_process", leaving)
    host.play(host.join(again))
    host.play(leaving)
    assert [type(report) for report in host.reports] == [RankArrived, ProcessGone, RankArrived]
    assert host.links == {"n": again}


def test_a_rank_that_arrives_is_reported_after_those_of_the_launch_before_it_that_ended() -> None:
    """Or its launch would be refused as long as the next look at processes has not come (R20)."""
    host = Host()
    host.play(host.join(Link()))
    host.state.is_alive = lambda owner: owner != OWNER
    host.play(host.join(Link("m", Owner(2, 2, 2)), structs.replace(HELLO, nonce="m", pid=2)))
    assert host.reports == [RankArrived(nonce="n"), ProcessGone(nonce="n"), RankArrived(nonce="m")]


@pytest.mark.parametrize("reader", ["n", "other"])
def test_a_rank_whose_link_broke_is_asked_again_to_compare_into(reader: str) -> None:
    """The get waits for its answer; another process has no part in it (R26)."""
    host, link = Host(), Link()
    shard, spec = ShardId("job", 1, 2, 0), ShardSpec("d" * 32, 16, 8, 2, 1)
    order = host.state.reads.newest["job", 0] = Bring(
        read=7,
        job="job",
        shard=WireShard.of(shard),
        spec=WireSpec.of(spec),
        chunks=None,
        attempt=1,
        holders=(),
        runs=(),
        durable=None,
        reader=reader,
        use="get",
    )
    host.state.reads.ready[7] = Ready(order, IncomingReplica(shard, [], [], 1), b"manifest", {})
    host.play(host.join(link))
    check = CheckInto(read=7, manifest=b"manifest")
    assert host.of("send_to_rank") == ([[link, check]] if reader == "n" else [])

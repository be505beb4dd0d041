"""What a holder does with the links of one process, call by call: two that come at once, one that ends (R4, R8)."""

from __future__ import annotations

import contextlib
import errno
import itertools
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
from holder_io import ScriptedIo, halt
from msgspec import structs

from memstore.core.arena.replica_index import IncomingReplica, ReplicaIndex, StoredReplica
from memstore.core.arena.slot_table import Owner, PeerShare, SlotTable
from memstore.core.holder import orders, ranks
from memstore.core.holder.puts import equal_ranks
from memstore.core.holder.puts.shared_shards import HolderSharedShards
from memstore.core.holder.state import Ready
from memstore.core.wire.calls import ReadStep
from memstore.core.wire.codec import encode
from memstore.core.wire.ids import WireShard, WireSpec
from memstore.core.wire.orders import Bring, CallAnswered, PushTargets, RankTargets, Reserve, TermNumber
from memstore.core.wire.rank_messages import CheckInto, RankHello
from memstore.core.wire.replies import NothingStored
from memstore.core.wire.reports import ProcessGone, RankArrived, Reserved
from memstore.errors import ConfigError
from memstore.testing.requests import request_of
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


# -- equal ranks --------------------------------------------------------------------------------------
# A writer that does not put holds no offer up for long, and a removed job is forgotten (R13, R34).


CHUNK_BYTES = 64 << 10
DIGESTS = (b"a" * 16, b"b" * 16)


@dataclass(eq=False)
class EqualLink:
    """A connection of a rank's process."""

    rank: int
    attempt: int = 1
    job: str = "job"


@dataclass(eq=False)
class EqualHost(ScriptedIo):
    """A holder with what its store has, on which offers wait."""

    lock = contextlib.nullcontext()
    index: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(shards={}))

    async def wait_for(self, is_there: Callable[[], bool], limit_s: float | None = None) -> bool:
        assert limit_s == equal_ranks.WRITER_WAIT_S
        return bool(await halt(is_there))

    @property
    def known(self) -> HolderSharedShards:
        return self.state.shared_shards

    def offer(self, step: int, attempt: int = 1, rank: int = 1) -> Offer:
        """Begin to answer the offer of rank 1, or another."""
        return Offer(self, ShardId("job", attempt, step, rank))

    def waits(self, step: int, attempt: int = 1, rank: int = 1) -> bool:
        """Whether such an offer waits for rank 0's put; its time passes and nothing comes."""
        offer = self.offer(step, attempt, rank)
        waited = offer.is_waiting
        offer.time_is_over()
        return waited

    def compare(self, copy: StoredReplica) -> None:
        """Store a copy and compare it."""
        self.index.shards[copy.shard, ""] = copy
        self.play(equal_ranks.compare(self, self.state, copy.shard))


class Offer:
    """An offer whose answer may wait."""

    def __init__(self, host: EqualHost, shard: ShardId) -> None:
        self.steps = equal_ranks.await_own(host, host.state, shard)
        self.is_there: Callable[[], bool] | None = next(self.steps.__await__(), None)

    @property
    def is_waiting(self) -> bool:
        """Whether what it waits for is not there."""
        return self.is_there is not None and not self.is_there()

    def time_is_over(self) -> None:
        """Let the wait end, with or without what it is for."""
        if self.is_there is not None:
            self.go_on(self.is_there())

    def go_on(self, was_there: bool) -> None:
        """Answer the offer, whose wait has ended."""
        with pytest.raises(StopIteration):
            self.steps.send(was_there)


def stored(rank: int, step: int, attempt: int = 1, digests: tuple[bytes, ...] = DIGESTS) -> StoredReplica:
    spec = ShardSpec("", 2 * CHUNK_BYTES, CHUNK_BYTES, 2, 2)
    return StoredReplica(ShardId("job", attempt, step, rank), spec, digests, [None, None])


def test_no_offer_waits_for_a_rank_that_names_no_shard() -> None:
    """Equal chunks alone say nothing of the next put: only ranks that name one shard are waited for."""
    host = EqualHost()
    host.known.put_sealed(stored(0, 1), None)
    host.compare(stored(1, 1))
    assert not host.waits(2)


def test_a_declared_equal_rank_is_one_of_its_attempt() -> None:
    """In the next attempt this host may have no such rank, and no seal of it would ever end the wait."""
    host = EqualHost()
    host.known.declare(copying(1))
    assert not host.waits(2, attempt=2)
    assert host.waits(2)


def copying(attempt: int) -> PushTargets:
    """Rank 0 copies for ranks 1 and 2."""
    return PushTargets(job="job", attempt=attempt, targets=(), ranks=(RankTargets(0, ("h1", "h2"), (1, 2)),))


def test_a_frozen_writer_is_waited_for_once_until_it_seals_again() -> None:
    """Else each offer of each of the other writers would hold a thread of its sender for seconds, and others'
    copies wait.
    """
    host = EqualHost()
    host.known.declare(copying(1))
    assert host.waits(1)
    assert not host.waits(1, rank=2)
    assert not host.waits(2)
    host.known.put_sealed(stored(0, 1), 2)
    assert not host.waits(1)
    assert host.waits(3)
    host.known.declare(copying(2))
    assert host.waits(4, attempt=2)


def test_all_offers_that_wait_for_one_rank_go_with_the_first() -> None:
    """Rank 2's offer gives up while rank 1's waits, which ends then."""
    host = EqualHost()
    host.known.declare(copying(1))
    first, second = host.offer(2), host.offer(2, rank=2)
    assert first.is_waiting
    second.time_is_over()
    assert not first.is_waiting
    first.time_is_over()
    assert host.known.late == {("job", 0): 1}


@pytest.mark.parametrize(
    "happens",
    [
        lambda known: known.put_sealed(stored(0, 2), 2),
        lambda known: known.declare(copying(2)),
        lambda known: known.forget("job", 1),
    ],
    ids=["sealed", "newer attempt", "removed"],
)
def test_what_happened_after_the_wait_ended_counts(happens: Callable[[HolderSharedShards], object]) -> None:
    """An offer's time is over, and before it goes on the rank has sealed, or its attempt is over: it is not late."""
    host = EqualHost()
    host.known.declare(copying(1))
    offer = host.offer(2)
    assert offer.is_waiting
    happens(host.known)
    offer.go_on(was_there=False)
    assert not host.known.late


@pytest.mark.parametrize(
    "ends", [lambda known: known.declare(copying(2)), lambda known: known.forget("job", 1)], ids=["newer", "removed"]
)
def test_offers_that_wait_end_with_the_attempt(ends: Callable[[HolderSharedShards], object]) -> None:
    """Its ranks are fenced or gone: no later seal of them has to be awaited."""
    host = EqualHost()
    host.known.declare(copying(1))
    offer = host.offer(2)
    ends(host.known)
    assert not offer.is_waiting
    offer.time_is_over()
    assert not host.known.late


def test_no_rank_is_late_because_the_holder_stops() -> None:
    """The offers that wait then end at once."""
    host = EqualHost()
    host.known.declare(copying(1))
    offer = host.offer(2)
    host.is_stopping = True
    assert not offer.is_waiting
    offer.time_is_over()
    assert not host.known.late


def test_the_rank_that_put_a_differing_shard_is_notified_once_and_again_when_it_is_equal() -> None:
    """On its link of that attempt, and no other rank gets it."""
    host = EqualHost()
    host.known.declare(copying(1))
    mine = EqualLink(0)
    links: list[Any] = [mine, EqualLink(0, attempt=2), EqualLink(1), EqualLink(0, job="other")]
    host.state.ranks.links.update({str(number): link for number, link in enumerate(links)})
    other = (DIGESTS[0], b"c" * 16)
    for step, theirs in ((1, DIGESTS), (2, other), (3, other), (4, DIGESTS)):
        host.known.put_sealed(stored(0, step), 2)
        host.compare(stored(1, step, digests=theirs))
    notices = host.of("send_to_rank")
    assert [link for link, _ in notices] == [mine, mine]
    assert [(event.step, event.count, event.chunks) for _, event in notices] == [(2, 1, (1,)), (4, 0, ())]


def test_a_removed_job_leaves_nothing_and_a_newer_attempt_stays() -> None:
    """A host that serves thousands of jobs keeps no digests of those that are gone."""
    host = EqualHost()
    host.known.declare(copying(1))
    host.known.put_sealed(stored(0, 1), 2)
    assert host.waits(2, rank=2)
    host.known.forget("job", 0)
    assert [len(kept) for kept in (host.known.declared, host.known.late, host.known.newest)] == [1, 1, 1]
    host.known.forget("job", 1)
    assert (host.known.declared, host.known.late, host.known.newest) == ({}, {}, {})


# -- room ---------------------------------------------------------------------------------------------
# A share that is claimed for a first put while the holder has no file descriptor left (R10).


ORDER = Reserve(job="j", attempt=1, ranks={0: 4}, peer_slots=4, world_size=1, versions=2, number=TermNumber(1, 3))


@dataclass(eq=False)
class RoomHost(ScriptedIo):
    """A holder where claiming fails for so long."""

    problem: Exception
    lasts_s: float

    async def claim_room(self, job: str, share: PeerShare) -> None:
        if self.now < self.lasts_s:
            raise self.problem


def claimed(problem: Exception, lasts_s: float) -> tuple[Reserved, float, list[Exception]]:
    """Carry the order out where claiming fails for so long; return the report, when it came, and what was logged."""
    host = RoomHost(problem, lasts_s)
    host.play(orders.reserve(host, host.state, ORDER))
    [report] = host.reports
    assert isinstance(report, Reserved)
    return report, host.now, [error for _, error in host.of("unexpected")]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_a_lack_of_descriptors_that_passes_is_waited_out(number: int) -> None:
    """The claim is tried again, and no rank gets an error."""
    report, took_s, logged = claimed(OSError(number, "Too many open files"), lasts_s=2.0)
    assert (report.problem, report.is_fault, logged) == (None, False, [])
    assert 2.0 <= took_s < 2.0 + 2 * orders.RETRY_S


def test_a_lack_of_descriptors_that_lasts_is_reported_as_that() -> None:
    """After a time that a first put has: with the cause and what to raise; also where a file's opener says it."""
    report, took_s, [logged] = claimed(OSError(errno.EMFILE, "Too many open files"), lasts_s=1e9)
    assert report.is_fault
    assert "no file descriptor left for 10 s" in str(report.problem)
    assert "raise its limit" in str(report.problem)
    assert isinstance(logged, OSError)
    assert orders.DESCRIPTORS_S <= took_s < orders.DESCRIPTORS_S + 2 * orders.RETRY_S
    error = ConfigError("cannot open slots")
    error.__cause__ = OSError(errno.EMFILE, "Too many open files")
    assert claimed(error, lasts_s=2.0)[0].problem is None


def test_another_fault_is_reported_at_once() -> None:
    """Waiting would not help."""
    report, took_s, logged = claimed(OSError(errno.EIO, "Input/output error"), lasts_s=2.0)
    assert (report.is_fault, took_s, len(logged)) == (True, 0.0, 1)
    assert "failed to claim room" in str(report.problem)


# -- holder answers -----------------------------------------------------------------------------------
# To which link the controller's answer to a rank's call goes, and what becomes of one that cannot be read (R4, R7).


ANSWER_OWNER = Owner(7, 1, 1)
READ = request_of("read_step", {"job": "job", "rank": 0}, step=None, of_attempt=None)
REPLY = encode(NothingStored())


@dataclass(eq=False)
class AnswerLink:
    """A connection of a rank's process."""

    owner: Owner = ANSWER_OWNER
    nonce: str = "n"
    pins: dict[int, Any] = field(default_factory=dict)


def answered(link: AnswerLink, data: bytes, error: tuple[str, str] | None = None) -> list[tuple[Any, ...]]:
    """Return the calls for an answer to the process OWNER, while this link is in the table."""
    io = ScriptedIo()
    table: dict[str, Any] = io.state.ranks.links
    table[link.nonce] = link
    assert isinstance(READ, ReadStep)
    io.play(ranks.pass_on(io, io.state, ranks.ForwardedCall(ANSWER_OWNER, "n", 5, READ), data, error))
    return io.calls


def test_an_answer_goes_to_the_link_on_which_its_process_is_connected() -> None:
    """Under the rank's own number of the call."""
    link: Any = AnswerLink()
    assert answered(link, REPLY) == [("send_to_rank", link, CallAnswered(id=5, reply=REPLY))]


@pytest.mark.parametrize("link", [AnswerLink(owner=Owner(8, 1, 1)), AnswerLink(nonce="m")])
def test_no_other_process_or_store_gets_the_answer(link: AnswerLink) -> None:
    """A process that is started again has calls of its own, with the same numbers."""
    assert answered(link, REPLY) == []


def test_an_error_of_the_controller_is_passed_on() -> None:
    """With its name, by which the rank raises it again."""
    [(_, _, message)] = answered(AnswerLink(), b"", ("WorldSizeError", "4 ranks, not 8"))
    assert message == CallAnswered(id=5, reply=b"", error=("WorldSizeError", "4 ranks, not 8"))


def test_an_answer_that_cannot_be_read_is_answered_all_the_same() -> None:
    """The call is taken out, so the rank would wait for its whole limit."""
    [(noted, *_), (_, _, message)] = answered(AnswerLink(), b"?")
    assert noted == "unexpected"
    assert (message.id, message.error[0]) == (5, "InternalError")

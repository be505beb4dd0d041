"""What each order of the controller begins here, and on which threads; the session's orders are refused (R12, R21)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from holder_io import ScriptedIo
from msgspec import structs

from memstore.core.arena.replica_index import StoredReplica
from memstore.core.holder import orders, persist
from memstore.core.holder.holder_io import Lane, Storage
from memstore.core.holder.puts import push, seal
from memstore.core.holder.reads import bring
from memstore.core.wire.ids import WireCopy, WireShard, WireSpec, WireStep
from memstore.core.wire.orders import (
    Bring,
    CallAnswered,
    DropJob,
    DurablePlace,
    EchoClock,
    Fence,
    FreeCopies,
    FreeStep,
    HostNews,
    Lineage,
    ListMarkers,
    Order,
    PushCopy,
    PushTargets,
    PutEarly,
    RemoveStep,
    Reserve,
    SlicesOfShard,
    StepLevel,
    TakeIncarnation,
    TermNumber,
    VerifyCopies,
    WriteJournal,
    WriteMarker,
    WriteSlices,
)
from memstore.core.wire.replies import HostVerified
from memstore.core.wire.reports import CopiesVerified, MarkersFound, MarkersListed, MarkerWritten, Sealed, StepRemoved
from memstore.errors import IntegrityError, InternalError, TransportError
from recovery.inventory import Copy, ShardId, ShardSpec

SHARD = ShardId("job", 1, 2, 0)
SPEC = ShardSpec("d" * 32, 16, 8, 2, 1)
ROWS, DIGEST = (WireShard.of(SHARD),), SPEC.digest
STEP = WireStep(1, 2)
PLACE = DurablePlace(url="/d", compression=None, key_file=None, bytes_per_s=None)
PACED = structs.replace(PLACE, bytes_per_s=100)
ROOM: dict[str, Any] = {
    "job": "job",
    "attempt": 1,
    "ranks": {},
    "peer_slots": 4,
    "world_size": 1,
    "versions": 2,
    "number": TermNumber(1, 1),
}
SLICES = WriteSlices(job="job", durable=PLACE, step=STEP, parts=(SlicesOfShard(ROWS[0], DIGEST, (0, 1)),), key="k")
MARKER = WriteMarker(job="job", durable=PACED, step=STEP, specs={}, uses={}, key="k", lineage=Lineage(1, None, None))
REPAIR = PushCopy(shard=ROWS[0], digest=DIGEST, target="b")
GET = Bring(
    read=7,
    job="job",
    shard=WireShard.of(SHARD),
    spec=WireSpec.of(SPEC),
    chunks=None,
    attempt=1,
    holders=("a",),
    durable=None,
    runs=(),
    reader="n",
    use="get",
)
WRITE, LIST = Lane("write", ("/d",)), Lane("list", ("/d",))
BEGUN: list[tuple[Order, Lane, Callable[..., Any]]] = [  # each is given the order
    (Reserve(**ROOM), Lane("room"), orders.reserve),
    (Reserve(**ROOM, is_claim=False), Lane("room"), orders.grow),
    (GET, Lane("read"), bring.run),
    (StepLevel(job="job", attempt=1, step=2, level="skipped", reason="", resume=3), Lane("drop"), orders.abandon),
    (FreeCopies(shards=ROWS, number=TermNumber(1, 2)), Lane("drop"), orders.free),
    (FreeStep(job="job", step=STEP, number=TermNumber(1, 2)), Lane("drop"), orders.free_step),
    (DropJob(job="job", attempt=1, shards=ROWS), Lane("drop"), orders.drop_job),
    (VerifyCopies(call=9, job="job"), Lane("verify"), orders._verify),
    (MARKER, WRITE, persist.marker),
    (RemoveStep(job="job", durable=PLACE, step=STEP, only_unmarked=False), WRITE, persist.remove),
    (ListMarkers(job="job", durable=PLACE, call=9), LIST, persist.markers),
]
BEGUN_WITH: list[tuple[Order, Lane, Callable[..., Any], tuple[Any, ...]]] = [
    *((order, lane, procedure, (order,)) for order, lane, procedure in BEGUN),
    (HostNews(hosts=(), gone=(), jobs=("job",)), Lane("room"), orders.keep_shares, (("job",),)),
    (Fence(job="job", attempt=2, members=("n",)), Lane("fence"), seal.fence, ("job", 2, ("n",))),
    (REPAIR, Lane("repair"), push.run, (push.Push(SHARD, DIGEST, "b", is_repair=True),)),
]
SESSION: list[Order] = [
    WriteJournal(keep=None, records=(), seq=1),
    EchoClock(clock_s=1.0),
    TakeIncarnation(above=1),
    CallAnswered(id=1, reply=b""),
]
AT_ONCE = {PushTargets, StepLevel, PutEarly}  # and slices, which are begun one by one


@dataclass(eq=False)
class Host(ScriptedIo):
    """A holder that has no shard."""

    lock = contextlib.nullcontext()

    def obey(self, order: Order) -> None:
        """Obey an order, and end what has to be over before the next."""
        now = orders.obey(self, self.state, order)
        if now is not None:
            self.play(now)


@pytest.mark.parametrize(
    ("order", "lane", "procedure", "given"), BEGUN_WITH, ids=[type(row[0]).__name__ for row in BEGUN_WITH]
)
def test_an_order_begins_what_it_asks_for(
    order: Order, lane: Lane, procedure: Callable[..., Any], given: tuple[Any, ...]
) -> None:
    """And nothing else: the reader of orders waits for none of it."""
    host = Host()
    assert orders.obey(host, host.state, order) is None
    [begun] = host.started
    assert begun == (lane, procedure, (host.state, *given))
    assert host.names == ["start"]


@pytest.mark.parametrize("order", SESSION, ids=lambda order: type(order).__name__)
def test_an_order_of_the_session_is_refused(order: Order) -> None:
    """Its holder keeps the journal, the clock, the incarnation and the answers itself."""
    host = Host()
    with pytest.raises(InternalError, match=f"{type(order).__name__} is the session's"):
        host.obey(order)
    assert host.calls == []


def test_each_kind_of_order_is_obeyed_or_the_sessions() -> None:
    """None is missing in this file."""
    known = [type(row[0]) for row in BEGUN_WITH] + [type(order) for order in SESSION]
    assert {*known, *AT_ONCE, WriteSlices} == {*get_args(Order)}


@pytest.mark.parametrize(("place", "key"), [(PLACE, ("/d",)), (PACED, ("/d", "job"))])
def test_each_slice_is_written_by_itself_and_a_capped_job_holds_up_no_other(
    place: DurablePlace, key: tuple[str, ...]
) -> None:
    """A job whose pace is capped has threads of its own beside those of its storage."""
    host, order = Host(), structs.replace(SLICES, durable=place)
    host.obey(order)
    stop = host.state.stops["job", STEP.id]
    pieces = [persist.Slice(order, order.parts[0], number, stop, []) for number in (0, 1)]
    assert host.started == [(Lane("write", key), persist.write, (host.state, piece)) for piece in pieces]


def test_slices_of_a_step_that_is_to_be_written_no_more_stop_at_once() -> None:
    """Before another order is obeyed, and whichever of them have begun."""
    host = Host()
    host.obey(SLICES)
    host.obey(structs.replace(SLICES, parts=()))
    assert host.state.stops["job", STEP.id].is_set
    assert len(host.started) == 2


def test_writes_go_on_beside_a_newer_one_only_if_its_order_names_them() -> None:
    """A newer controller knows of none that an older one began: they end with its first order."""
    host, newer, newest = Host(), WireStep(1, 8), WireStep(1, 9)
    host.obey(SLICES)
    host.obey(structs.replace(SLICES, step=newer, beside=(STEP,)))
    older = host.state.stops["job", STEP.id]
    assert not older.is_set
    host.obey(structs.replace(SLICES, step=newest, beside=(newer,)))
    assert older.is_set
    assert [stop.is_set for stop in host.state.stops.values()] == [False, False]


def test_a_fence_refuses_what_comes_after_the_order() -> None:
    """Not only what comes after its procedure has begun (R21)."""
    host = Host()
    host.obey(Fence(job="job", attempt=2, members=()))
    assert host.state.fences.is_fenced("job", 1)


def test_a_get_is_the_newest_one_from_its_order_on() -> None:
    """What still fetches for an older one gives up, also while no thread is free for this one (R25)."""
    host = Host()
    host.obey(GET)
    assert host.state.reads.newest == {("job", 0): GET}


def test_a_repair_that_is_under_way_is_not_begun_again() -> None:
    """The target would get the shard twice (R29)."""
    host = Host()
    host.obey(REPAIR)
    host.obey(REPAIR)
    assert len(host.started) == 1


def test_targets_count_for_the_next_put() -> None:
    """They are taken before the next order is obeyed (R13)."""
    host = Host()
    host.obey(PushTargets(job="job", attempt=1, targets=("b",), ranks=()))
    assert (host.state.shared_shards.targets(SHARD), host.started) == (["b"], [])


def test_a_level_is_sent_before_the_next_order_is_obeyed() -> None:
    """So levels of a step come to its ranks in their order (R15)."""
    host = Host()
    link: Any = SimpleNamespace(nonce="n", job="job", rank=0, attempt=1)
    host.state.ranks.links["n"] = link
    host.obey(StepLevel(job="job", attempt=1, step=2, level="committed"))
    assert host.calls == [("send_to_rank", link, StepLevel(job="job", attempt=1, step=2, level="committed"))]


@pytest.mark.parametrize(
    ("error", "problem", "is_foreseen"),
    [(None, "", True), (IntegrityError("odd"), "odd", True), (OSError("odd"), "OSError('odd')", False)],
)
def test_the_end_of_a_verification_is_reported(error: Exception | None, problem: str, is_foreseen: bool) -> None:
    """With what was found, or why nothing was: the caller waits for all hosts (R30)."""
    host = Host(errors={} if error is None else {"verify_copies": error})
    host.obey(VerifyCopies(call=9, job="job"))
    host.play_started()
    assert host.of("verify_copies") == [["job"]]
    found = HostVerified(shards=0, chunks=0, damaged=0, damaged_manifests=0) if error is None else None
    assert host.reports == [CopiesVerified(call=9, found=found, problem=problem)]
    assert (host.of("unexpected") == []) == is_foreseen


# -- durable orders -----------------------------------------------------------------------------------
# What a durable order does, call by call: in turn, under one key, of verified bytes, or not at all (R31).


DURABLE_DIGEST = "d" * 32
DURABLE_SPEC = ShardSpec(DURABLE_DIGEST, 16, 8, 2, 1)
COPY = Copy(SHARD, DURABLE_SPEC, "me")
STORED = StoredReplica(SHARD, DURABLE_SPEC, (b"0", b"1"), [4, 5])
DURABLE_MARKER = WriteMarker(
    job="job",
    durable=PLACE,
    step=STEP,
    specs={0: WireSpec.of(DURABLE_SPEC)},
    uses={},
    key="k",
    lineage=Lineage(attempt=1, parent_attempt=None, parent_step=None),
)


@dataclass(eq=False)
class DurableHost(ScriptedIo):
    """A holder that has the shard; `bad` is a chunk that went bad in its slot."""

    bad: int | None = None
    turn_s: float = 0.0
    is_here: bool = True
    pins: int = 0
    pins_at_write: list[int] = field(default_factory=list)
    lock = contextlib.nullcontext()
    index = SimpleNamespace(find=lambda shard, digest: STORED)

    def pin(self, shard: ShardId, digest: str) -> tuple[StoredReplica, int] | None:
        self.pins += self.is_here
        return (STORED, 1) if self.is_here else None

    def unpin(self, stored: StoredReplica, pin: int) -> None:
        self.pins -= 1

    def manifest(self, stored: StoredReplica) -> bytes:
        return b"manifest"

    async def slice_turn(self, job: str, nbytes: int, bytes_per_s: int | None) -> float:
        return self.turn_s

    async def copy_slice(self, stored: StoredReplica, number: int) -> tuple[list[bytes], int | None]:
        return ([b"0", b"1"], None) if self.bad is None else ([], self.bad)

    async def write_slice(self, storage: Storage, *given: Any) -> bool:
        self.pins_at_write.append(self.pins)
        return await super().write_slice(storage, *given)

    def write(self, *slices: persist.Slice) -> None:
        """Write slices one after the other."""
        for piece in slices:
            self.play(persist.write(self, self.state, piece))
            assert self.pins == 0

    @property
    def reported(self) -> list[tuple[Any, ...]]:
        """What was reported to the controller of slices: rank, slice, and why not."""
        return [
            (report.rank, report.number, report.problem) for report in self.reports if not isinstance(report, Sealed)
        ]


def order(step: WireStep = STEP, key: str | None = "k") -> WriteSlices:
    """Make an order of two slices."""
    part = SlicesOfShard(WireShard.of(SHARD), DURABLE_DIGEST, (0, 1))
    return WriteSlices(job="job", durable=PLACE, step=step, parts=(part,), key=key)


def stop(host: DurableHost, step: WireStep = STEP) -> None:
    """Order that no more of a step is written."""
    assert persist.slices(host.state, structs.replace(order(step), parts=())) == []


def test_slices_are_copied_under_a_pin_and_written_without_one() -> None:
    """Storage may hang: then the slots of a step that was dropped meanwhile are free all the same."""
    host = DurableHost()
    host.write(*persist.slices(host.state, order()))
    assert host.reported == [(0, 0, None), (0, 1, None)]
    assert host.pins_at_write == [0, 0]


def test_a_host_with_another_key_writes_nothing_and_names_its_key() -> None:
    """Slices of one step are all under the key that the controller has chosen."""
    host = DurableHost(key="other")
    host.write(persist.slices(host.state, order())[0])
    assert host.reports[0].key == "other"
    assert host.reported[0][2].startswith("it is under key k, durable_key_file here has key other: put the file")
    assert "write_slice" not in host.names


def test_without_a_key_to_begin_with_a_host_writes_under_its_own_and_names_it() -> None:
    """The first report of a write decides under which key all of it is."""
    host = DurableHost(key="own")
    host.write(*persist.slices(host.state, order(key=None)))
    assert [(report.key, report.problem) for report in host.reports] == [("own", None), ("own", None)]


def test_a_chunk_that_went_bad_is_quarantined_and_not_written() -> None:
    """The copy is reported as it is then, so that repair replaces it."""
    host = DurableHost(bad=1)
    host.write(persist.slices(host.state, order())[0])
    assert [report.copy for report in host.reports if isinstance(report, Sealed)] == [WireCopy.of(COPY)]
    assert host.reported[0][2] == f"chunk 1 of {SHARD} went bad before it was written"


def test_a_slice_of_what_was_dropped_says_so() -> None:
    """The controller plans again."""
    host = DurableHost(is_here=False)
    host.write(persist.slices(host.state, order())[0])
    assert host.reported[0][2] == f"{SHARD} is not here any more"


@pytest.mark.parametrize("is_stopped_early", [True, False])
def test_nothing_is_said_of_slices_that_are_not_wanted_any_more(is_stopped_early: bool) -> None:
    """Whether the word comes before a slice begins or while it waits for its turn."""
    host = DurableHost(turn_s=5.0)
    slices = persist.slices(host.state, order())
    if is_stopped_early:
        stop(host)
    host.meanwhile = lambda: stop(host)
    host.write(*slices)
    assert host.reports == []
    assert ("slice_turn" in host.names) != is_stopped_early


def test_one_step_of_a_job_is_written_at_a_time_and_may_begin_again() -> None:
    """An order of another step ends the older one's slices; one after a stop is obeyed."""
    host, later = DurableHost(), WireStep(1, 3)
    older = persist.slices(host.state, order())
    newer = persist.slices(host.state, order(later))
    host.write(*older, *newer)
    assert [report.step for report in host.reports] == [later, later]
    stop(host, later)
    host.write(*persist.slices(host.state, order(later)))
    assert len(host.reports) == 4


def test_a_failed_write_is_reported_with_its_reason() -> None:
    """Nothing is known of the bytes; the controller tries again."""
    host = DurableHost(errors={"write_slice": TransportError("storage hangs")})
    host.write(persist.slices(host.state, order())[0])
    assert host.reported == [(0, 0, "storage hangs")]


def test_a_marker_is_reported_before_what_lies_around_is_swept() -> None:
    """A sweep may take long, and its failure is no failure of the step."""
    host = DurableHost(errors={"sweep_durable": TransportError("storage hangs")})
    host.play(persist.marker(host, host.state, DURABLE_MARKER))
    assert host.reports == [MarkerWritten(job="job", step=STEP, key="k", problem=None)]
    assert host.names == ["store_marker", "sweep_durable", "warn"]


def test_what_older_writes_under_way_have_written_is_not_swept() -> None:
    """The marker's order names them."""
    host, older = DurableHost(), WireStep(STEP.attempt, STEP.step - 1)
    host.play(persist.marker(host, host.state, structs.replace(DURABLE_MARKER, beside=(older,))))
    [sweep] = [call for call in host.calls if call[0] == "sweep_durable"]
    assert {STEP.id, older.id} in sweep


def test_nothing_is_swept_around_a_marker_that_could_not_be_written() -> None:
    """What lies there may be needed: the controller tries again."""
    host = DurableHost(errors={"store_marker": TransportError("storage hangs")})
    host.play(persist.marker(host, host.state, DURABLE_MARKER))
    assert host.reports == [MarkerWritten(job="job", step=STEP, key="k", problem="storage hangs")]
    assert host.names == ["store_marker"]


@pytest.mark.parametrize("problem", [None, "storage hangs"])
@pytest.mark.parametrize("only_unmarked", [True, False])
def test_a_removal_is_reported_with_what_it_left(only_unmarked: bool, problem: str | None) -> None:
    """With its marker left alone, a torn step is not gone."""
    host = DurableHost(errors={"remove_durable": TransportError(problem)} if problem is not None else {})
    order = RemoveStep(job="job", durable=PLACE, step=STEP, only_unmarked=only_unmarked)
    host.play(persist.remove(host, host.state, order))
    assert host.reports == [StepRemoved(job="job", step=STEP, only_unmarked=only_unmarked, problem=problem)]


def test_markers_are_listed_with_the_key_of_this_host() -> None:
    """A list that fails is reported as failed, with its reason and without a marker."""
    host, order = DurableHost(), ListMarkers(job="job", durable=PLACE, call=9)
    found = MarkersFound(markers=(), key="k", damaged="", lacks="")
    host.play(persist.markers(host, host.state, order))
    host.errors = {"read_markers": TransportError("storage hangs")}
    host.play(persist.markers(host, host.state, order))
    assert host.reports == [
        MarkersListed(job="job", call=9, found=found, problem=""),
        MarkersListed(job="job", call=9, found=None, problem="storage hangs"),
    ]

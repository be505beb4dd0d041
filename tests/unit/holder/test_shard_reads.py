"""Parts of a shard, brought to a reader's host: only what is wanted, digested, and given back (R7, R13, R27)."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any, cast
from unittest.mock import MagicMock

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memstore.core.arena.claimed_memory import Limit
from memstore.core.arena.replica_index import StoredReplica
from memstore.core.arena.replica_store import ReplicaStore
from memstore.core.format.manifest import Chunk, Manifest, chunk_digest, chunk_sizes, encode_manifest
from memstore.core.holder.reads import bring, fetch, ready
from memstore.core.wire.calls import AskSteps, RankCall, ReadStep
from memstore.core.wire.codec import encode
from memstore.core.wire.ids import WireShard, WireSpec
from memstore.core.wire.orders import Bring, CallAnswered, ChunkRange, Run
from memstore.core.wire.replies import ShardPlaced, ShardReady, StepList
from memstore.errors import CapacityError, ConfigError, DigestMismatch, IntegrityError, PeerTimeout, RecoveryError
from memstore.shell.arena.mapping import lock_free
from memstore.shell.arena.slot_headers import SLOTS_NAME
from memstore.shell.codec.encode import copy_into, plan_state
from memstore.shell.holder.holder import Holder
from memstore.shell.peer.client import PeerClient
from memstore.shell.rank.arena_view import RankMapping
from memstore.shell.rank.holder_link import HolderLink
from memstore.shell.rank.shard_read import ShardRanges, ShardRead, chunk_runs
from memstore.testing.clusters.processes import wait_for
from memstore.testing.clusters.two_holders import two_holders
from recovery.inventory import ShardId

CHUNK_BYTES = 64 << 10
WAIT_S = 30.0
SHARD = ShardId("train", 1, 2, 3)
FILLS = bytes(range(1, 9))
FROM_A, FROM_HERE = Run("peer", "a", 0, 8), Run("local", None, 0, 8)


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Holder, Holder]]:
    monkeypatch.setattr(fetch, "RETRY_S", 0.01)
    monkeypatch.setattr(fetch, "RETRY_LIMIT_S", 0.5)
    with two_holders(CHUNK_BYTES, detect=0.6) as found:
        yield found


def seal(replicas: ReplicaStore, fills: bytes = FILLS, shard: ShardId = SHARD) -> StoredReplica:
    """Store a shard of one chunk per fill byte."""
    replicas.ensure_free(len(fills))
    slots = replicas.take_slots(len(fills))
    for slot, fill in zip(slots, fills, strict=True):
        replicas.arena.view(slot, CHUNK_BYTES)[:] = bytes([fill]) * CHUNK_BYTES
    return replicas.seal_local(shard, world_size=4, layout=b"", nbytes=len(fills) * CHUNK_BYTES, slots=slots, attempt=1)


def rot(replicas: ReplicaStore, stored: StoredReplica, index: int) -> None:
    """Flip a bit of a sealed chunk behind all processes' back."""
    slot = stored.slots[index]
    assert slot is not None
    replicas.arena.view(slot, CHUNK_BYTES)[7] ^= 1


def order(
    stored: StoredReplica,
    chunks: list[list[int]],
    number: int = 1,
    *,
    run: Run = FROM_A,
    holders: Sequence[str] = ("a",),
) -> Bring:
    """Stage some chunks from host a, as the controller would order it."""
    return Bring(
        read=number,
        job="train",
        shard=WireShard.of(stored.shard),
        spec=WireSpec.of(stored.spec),
        attempt=2,
        runs=(run,),
        durable=None,
        holders=tuple(holders),
        chunks=tuple(ChunkRange(*each) for each in chunks),
        reader="",
        use="repair",
    )


def stage(holder: Holder, order: Bring) -> dict[str, list[int]]:
    """Bring the chunks to a holder, as its controller would order it."""
    return holder.io.run(bring._bring, holder.state, order)


def used_slots(holder: Holder) -> int:
    """Slots of the arena that hold something; it may grow meanwhile."""
    with holder.replicas.lock:
        return len(holder.replicas.table.slots) - len(holder.replicas.table.free)


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The chunks that cross the network."""
    found: list[int] = []
    real = PeerClient.fetch_into

    def noted(
        self: PeerClient, replicas: ReplicaStore, replica: Any, digest: str, chunks: list[int], *more: Any
    ) -> Any:
        found.extend(chunks)
        return real(self, replicas, replica, digest, chunks, *more)

    monkeypatch.setattr(PeerClient, "fetch_into", noted)
    return found


# -- which chunks -------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 90)), max_size=8), st.integers(1, 40))
def test_runs_cover_exactly_the_chunks_that_ranges_touch(ranges: list[tuple[int, int]], chunk_bytes: int) -> None:
    """The oracle goes byte by byte; runs are sorted, apart, and not empty."""
    wanted = {byte // chunk_bytes for start, size in ranges for byte in range(start, start + size)}
    runs = chunk_runs(ranges, chunk_bytes)
    assert {i for first, count in runs for i in range(first, first + count)} == wanted
    assert all(count > 0 for _, count in runs)
    assert all(one[0] + one[1] < other[0] for one, other in itertools.pairwise(runs))


def test_runs_of_a_hostile_range_take_no_memory() -> None:
    """What damaged metadata names is not counted chunk by chunk."""
    assert chunk_runs([(1 << 61, 1 << 61), (0, 1 << 60)], 1) == [[0, 1 << 60], [1 << 61, 1 << 61]]


# -- partial read -----------------------------------------------------------------------------------------


def test_only_the_wanted_chunks_cross_the_network(pair: tuple[Holder, Holder], fetched: list[int]) -> None:
    """Of eight chunks three are asked for and three come; they count as no copy; given back, nothing is left (R7)."""
    a, b = pair
    stored, before = seal(a.replicas), used_slots(b)
    assert stage(b, order(stored, [[1, 2], [6, 1]])) == {}
    assert sorted(fetched) == [1, 2, 6]
    taken = ready.take(b.state, 1)
    assert [i for i, slot in enumerate(taken.replica.slots) if slot is not None] == [1, 2, 6]
    assert b.replicas.index.copies("b") == []
    ready.release(b.state, 1)
    assert used_slots(b) == before
    with pytest.raises(IntegrityError, match="is gone"):
        ready.take(b.state, 1)


def test_what_the_host_holds_of_another_shard_is_not_fetched(pair: tuple[Holder, Holder], fetched: list[int]) -> None:
    """Equal content of any shard is referenced, and survives the partial read (R13)."""
    a, b = pair
    stored = seal(a.replicas)
    mine = seal(b.replicas, FILLS[:3], ShardId("train", 1, 1, 0))
    assert stage(b, order(stored, [[0, 4]])) == {}
    assert fetched == [3]
    ready.release(b.state, 1)
    assert b.replicas.verify(mine) == []


def test_a_rotten_local_chunk_is_replaced_from_a_peer(pair: tuple[Holder, Holder], fetched: list[int]) -> None:
    """The reader's host digests what it has; what is bad comes from another holder, and is not served (R30)."""
    a, b = pair
    stored, mine = seal(a.replicas), seal(b.replicas)
    rot(b.replicas, mine, 2)
    assert stage(b, order(stored, [[1, 3]], run=FROM_HERE, holders=["a", "b"])) == {}
    assert fetched == [2]
    taken = ready.take(b.state, 1)
    assert bytes(b.replicas.arena.view(taken.replica.slots[2] or 0, 4)) == b"\3\3\3\3"
    ready.release(b.state, 1)
    assert sorted(mine.missing) == [2]


@pytest.mark.parametrize("where", ["local", "remote"])
def test_a_chunk_without_a_good_copy_is_refused(pair: tuple[Holder, Holder], where: str) -> None:
    """A read of bytes that no host has intact names the hosts that lack them, and leaves no slot behind (R25)."""
    a, b = pair
    stored = seal(a.replicas if where == "remote" else b.replicas)
    holder = "a" if where == "remote" else "b"
    rot((a if where == "remote" else b).replicas, stored, 5)
    run = FROM_A if where == "remote" else FROM_HERE
    found = stage(b, order(stored, [[4, 2]], run=run, holders=[holder]))
    assert found == {holder: [5]}
    assert b.replicas.index.incoming == {}
    assert used_slots(b) == (7 if where == "local" else 0)


def test_chunks_that_the_shard_does_not_have_are_refused(pair: tuple[Holder, Holder]) -> None:
    """Ranges of damaged metadata end with an error, not with memory."""
    a, b = pair
    stored = seal(a.replicas)
    for runs in ([[0, 9]], [[8, 1]], [[0, 1 << 60]]):
        with pytest.raises(IntegrityError, match="has 8 chunks"):
            stage(b, order(stored, runs))


def test_a_shard_that_no_process_has_is_no_success(pair: tuple[Holder, Holder]) -> None:
    """Without a holder or durable storage the read fails."""
    a, b = pair
    stored = seal(a.replicas)
    assert stage(b, order(stored, [[0, 2]], holders=[])) == {"b": [0, 1]}


def test_a_partial_read_that_no_process_takes_goes(
    pair: tuple[Holder, Holder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was staged for a reader that never came is let go after the deadline, not before (R7)."""
    a, b = pair
    stored, before = seal(a.replicas), used_slots(b)
    stage(b, order(stored, [[0, 2]], 1))
    monkeypatch.setattr(ready, "TAKE_S", -1.0)
    for number in (2, 3):
        stage(b, order(stored, [[4, 2]], number))
    ready.take(b.state, 3)
    b.io.run(ready.expire, b.state)
    assert list(b.state.reads.ready) == [1, 3]  # not yet due, and taken
    for number in (1, 3):
        ready.release(b.state, number)
    assert used_slots(b) == before


def test_readers_of_one_host_take_turns_where_room_is_tight(
    pair: tuple[Holder, Holder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read that finds the arena full of another one's chunks waits until they are given back (R10)."""
    a, b = pair
    stored = seal(a.replicas)
    others = seal(a.replicas, bytes(range(101, 109)), ShardId("train", 1, 2, 2))
    b.replicas.ensure_free(16)
    b.replicas.room.limit = Limit(len(b.replicas.table.slots) * CHUNK_BYTES)
    whole = b.replicas.take_slots(len(b.replicas.table.slots) - 8)
    assert stage(b, order(stored, [[0, 8]], 1)) == {}
    with pytest.raises(CapacityError):
        stage(b, order(others, [[0, 8]], 2))
    monkeypatch.setattr(fetch, "RETRY_LIMIT_S", 60.0)
    first = threading.Timer(0.2, ready.release, [b.state, 1])
    first.start()
    assert stage(b, order(others, [[0, 8]], 3)) == {}
    first.join()
    ready.release(b.state, 3)
    assert used_slots(b) == len(whole)


def test_a_shard_that_several_ranks_read_comes_once_and_is_no_copy(
    pair: tuple[Holder, Holder], fetched: list[int]
) -> None:
    """It lies in the second reader's reach, too; nothing of it stays, as it would in the place of others' copies."""
    a, b = pair
    stored, before = seal(a.replicas), used_slots(b)
    whole = msgspec.structs.replace(order(stored, []), chunks=None, use="read")
    for number in (1, 2):
        assert b.io.run(bring._bring_here, b.state, msgspec.structs.replace(whole, read=number)) == {}
    assert sorted(fetched) == list(range(8))
    assert b.replicas.index.find(stored.shard, stored.spec.digest) is None
    for number in (1, 2):
        assert ready.take(b.state, number).replica.missing == []
        ready.release(b.state, number)
    assert used_slots(b) == before


# -- a reader's process ---------------------------------------------------------------------------------


class Reader:
    """A link to host b, with this test in the controller's place."""

    def __init__(self, holder: Holder, stored: StoredReplica, monkeypatch: pytest.MonkeyPatch) -> None:
        self.holder, self.count = holder, 0
        self.bad_at_first: Sequence[int] = ()  # chunks that the holder quarantines before it answers the first read
        monkeypatch.setattr(holder.calls, "_relay", functools.partial(self.relay, stored))
        monkeypatch.setattr(holder.state, "report", lambda report: None)
        self.link = HolderLink(holder.folder, nonce="reader")
        self.ranges = ShardRanges(self.link, "train", timeout_s=30.0)

    def relay(self, stored: StoredReplica, call_id: int, request: RankCall) -> None:
        if isinstance(request, AskSteps):
            none = StepList(attempt=1, steps=[], gone=[], attempts=[], pins={}, origin=None)
            self.holder.ranks.answer(call_id, encode(none), None)
            return
        if not isinstance(request, ReadStep):  # a tool of another test looks at every store of this machine
            self.holder.ranks.answer(call_id, None, ["PeerUnreachable", "here is no controller"])
            return
        self.count += 1
        bad = stage(self.holder, order(stored, [[run.first, run.count] for run in request.chunks or ()], self.count))
        for index in self.bad_at_first if self.count == 1 else ():
            slot = ready.take(self.holder.state, self.count).replica.slots[index]
            assert slot is not None
            self.holder.replicas.arena.view(slot, CHUNK_BYTES)[7] ^= 1
            self.holder.replicas.verify_slots([slot])
        error = ["RecoveryError", f"{bad} are damaged"] if bad else None
        reply = ShardReady(step=2, attempt=1, verdict="peer", why="", report=None, read=self.count)
        self.holder.ranks.answer(call_id, None if bad else encode(reply), error)


@pytest.fixture
def reader(pair: tuple[Holder, Holder], monkeypatch: pytest.MonkeyPatch) -> Iterator[Reader]:
    a, b = pair
    found = Reader(b, seal(a.replicas), monkeypatch)
    yield found
    found.link.close()


def test_ranges_across_chunk_borders_are_read_and_given_back(reader: Reader, fetched: list[int]) -> None:
    """A read copies exactly the bytes asked for; bytes outside it are not to be had; close gives all slots back."""
    before = used_slots(reader.holder)
    start = 3 * CHUNK_BYTES - 2
    with reader.ranges.ask(2, 3, [(start, 4), (9, 0)], CHUNK_BYTES) as found:
        assert found.bytes_of([(start, 4), (0, 0), (start + 1, 2)]) == [b"\3\3\4\4", b"", b"\3\4"]
        with pytest.raises(IntegrityError, match="not among the chunks read"):
            found.bytes_of([(5 * CHUNK_BYTES, 1)])
    assert sorted(fetched) == [2, 3]
    wait_for(lambda: used_slots(reader.holder) == before, "the slots to be given back")


def test_the_manifest_alone_moves_no_chunk(reader: Reader, fetched: list[int]) -> None:
    """Asking for no ranges answers with the manifest."""
    with reader.ranges.ask(2, 3) as found:
        assert found.manifest().shard == SHARD
        assert (found.answer().slots, fetched) == ((None,) * 8, [])


@pytest.mark.parametrize("is_elsewhere", [True, False])
def test_bytes_that_change_under_the_copy_are_found(
    reader: Reader, pair: tuple[Holder, Holder], is_elsewhere: bool
) -> None:
    """A chunk is digested after its copy, where it lay, and brought again; without a good copy the read fails (R7)."""
    with reader.ranges.ask(2, 3, [(0, 10)], CHUNK_BYTES) as found:
        found.answer()
        taken = ready.take(reader.holder.state, 1)
        reader.holder.replicas.arena.view(taken.replica.slots[0] or 0, 8)[3] ^= 1
        if is_elsewhere:
            assert found.bytes_of([(0, 10)]) == [b"\1" * 10]
        else:
            stored = pair[0].replicas.index.find(SHARD)
            assert stored is not None
            rot(pair[0].replicas, stored, 0)
            with pytest.raises(DigestMismatch, match=r"chunks \[0\] .* no good copy was found"):
                found.bytes_of([(0, 10)])
    wait_for(lambda: not reader.holder.state.reads.ready, "the partial read to go")


def test_a_wanted_chunk_that_was_quarantined_is_brought_again(reader: Reader) -> None:
    """The answer names no slot for it: it is repaired like one that is bad after its copy (R7, R30)."""
    reader.bad_at_first = [1, 2]
    with reader.ranges.ask(2, 3, [(0, 3 * CHUNK_BYTES)], CHUNK_BYTES) as found:
        assert found.answer().slots[:4] == (found.answer().slots[0], None, None, None)
        assert found.bytes_of([(CHUNK_BYTES - 1, CHUNK_BYTES + 2)]) == [b"\1" + b"\2" * CHUNK_BYTES + b"\3"]
    assert reader.count == 2


def test_a_reader_that_dies_leaves_nothing(reader: Reader) -> None:
    """The end of the link gives back what its reader still held."""
    before = used_slots(reader.holder)
    found = reader.ranges.ask(2, 3, [(0, 5 * CHUNK_BYTES)], CHUNK_BYTES)
    assert sum(slot is not None for slot in found.answer().slots) == 5
    assert used_slots(reader.holder) == before + 5
    reader.link.outbox.put(None)
    reader.link.closed.set()  # no `bye`
    reader.link.channel.close()
    wait_for(lambda: used_slots(reader.holder) == before, "the slots to be given back")
    assert not reader.holder.state.reads.ready


def test_a_read_that_failed_says_why_and_one_that_takes_too_long_is_given_up(
    reader: Reader, pair: tuple[Holder, Holder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal is a RecoveryError; a late answer finds no process, and its slots are given back."""
    a, _ = pair
    stored = a.replicas.index.find(SHARD)
    assert stored is not None
    rot(a.replicas, stored, 1)
    with reader.ranges.ask(2, 3, [(0, 2 * CHUNK_BYTES)], CHUNK_BYTES) as refused:
        for _ in range(2):  # a later wait meets the refusal again, at once
            with pytest.raises(RecoveryError, match=r"\{'a': \[1\]\} are damaged"):
                refused.answer()

    late: list[Any] = []
    monkeypatch.setattr(reader.holder.calls, "_relay", lambda *call: late.append(call))
    reader.ranges.timeout_s = 0.01
    with (
        reader.ranges.ask(2, 3, [(3 * CHUNK_BYTES, 1)], CHUNK_BYTES) as asked,
        pytest.raises(PeerTimeout, match=r"0\.01 s"),
    ):
        asked.answer()
    wait_for(lambda: late, "the call")
    reader.relay(stored, *late[0])
    wait_for(lambda: not reader.holder.state.reads.ready, "the late partial read to go")


@pytest.mark.parametrize("is_there", [True, False])
def test_a_read_that_no_process_opens_is_given_back(
    reader: Reader, pair: tuple[Holder, Holder], monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    """A load that fails drops what it asked for ahead, whether that has come already or comes later (R7)."""
    stored = pair[0].replicas.index.find(SHARD)
    assert stored is not None
    before = used_slots(reader.holder)
    late: list[Any] = []
    if not is_there:
        monkeypatch.setattr(reader.holder.calls, "_relay", lambda *call: late.append(call))
    asked = reader.ranges.ask(2, 3, [(0, 5 * CHUNK_BYTES)], CHUNK_BYTES)
    wait_for(lambda: asked._future.done() or bool(late), "the call")
    asked.close()
    for call in late:
        reader.relay(stored, *call)
    wait_for(lambda: used_slots(reader.holder) == before, "the slots to be given back")
    assert not reader.holder.state.reads.ready


def test_no_byte_behind_a_shard_is_read(pair: tuple[Holder, Holder], monkeypatch: pytest.MonkeyPatch) -> None:
    """The last slot goes on behind its chunk with bytes that no digest covers: they are refused."""
    a, b = pair
    a.replicas.ensure_free(1)
    slots = a.replicas.take_slots(1)
    stored = a.replicas.seal_local(SHARD, world_size=4, layout=b"", nbytes=100, slots=slots, attempt=1)
    reader = Reader(b, stored, monkeypatch)
    with reader.ranges.ask(2, 3, [(0, 100)], CHUNK_BYTES) as found:
        assert len(found.bytes_of([(0, 100)])[0]) == 100
        with pytest.raises(IntegrityError, match="ends at 100"):
            found.bytes_of([(90, 20)])
    reader.link.close()


def is_held(holder: Holder, slot: int) -> bool:
    """Whether a reader keeps the pages of a slot of this holder's arena."""
    with open(holder.folder / SLOTS_NAME, "r+b") as slots:
        return list(lock_free(slots.fileno(), slot, 1)) == []


def test_slots_are_read_in_the_arena_that_is_there_when_they_are_named(
    reader: Reader, pair: tuple[Holder, Holder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The holder came back with an empty arena before it answered: a slot of the old one is not there any more."""
    a, b = pair
    stored = a.replicas.index.find(SHARD)
    assert stored is not None
    b.replicas.ensure_free(40)
    old = b.replicas.take_slots(40)[-1]  # a slot that the new arena does not have
    new = stored.slots[1]
    assert new is not None
    monkeypatch.setattr(b.calls, "_relay", lambda *call: None)
    with ShardRead(reader.link, ReadStep(job="train", step=None, rank=3), WAIT_S) as read:
        [number] = reader.link.calls
        reader.link.leases.take_arena(RankMapping(a.folder, a.replicas.arena_identity), [])
        placed = ShardPlaced(
            step=2,
            attempt=1,
            verdict="peer",
            why="",
            report=None,
            manifest=a.replicas.manifest(stored),
            slots=(old, new, *[None] * 6),
            elsewhere=(),
            pin=1,
        )
        reader.link.take_event(CallAnswered(id=number, reply=encode(placed)))
        found = [(index, bytes(view)) for index, view in read.take([0, 1, 2])]
        assert found == [(0, b""), (1, b"\2" * CHUNK_BYTES), (2, b"")]
        assert (is_held(b, old), is_held(a, new)) == (False, True)
    assert not is_held(a, new)


def test_a_read_that_cannot_be_asked_for_is_refused_before_it_is_sent(reader: Reader) -> None:
    """No message can hold such a step; the link forgets the read."""
    with pytest.raises(ConfigError, match="read_step of job"):
        ShardRead(reader.link, ReadStep(job="train", step=-1, rank=3), 1.0)
    assert reader.link.calls == {}


def test_another_shard_than_the_one_asked_for_is_refused(reader: Reader) -> None:
    """If something went wrong on the way, bytes of another rank or step are no answer, and are let go of."""
    for step, rank, attempt in ((2, 2, None), (1, 3, None), (2, 3, 7)):
        with (
            reader.ranges.ask(step, rank, [(0, 1)], CHUNK_BYTES, attempt=attempt) as asked,
            pytest.raises(IntegrityError, match="read again"),
        ):
            asked.answer()
    wait_for(lambda: not reader.holder.state.reads.ready, "the partial read to go")


# -- the answer ---------------------------------------------------------------------------------------
# The answer to a read names the shard that was asked for, or nothing of it is given out (R27).


class Asked:
    """A link whose question is answered with a shard that is here; None: not answered."""

    nonce, job, rank = "n", "job", 0

    def __init__(self, answer: ShardPlaced | None) -> None:
        self.answer, self.asked = answer, list[ReadStep]()
        self.mapping = MagicMock()  # no arena: nothing whose pages a reader could keep

    def call_soon(self, request: ReadStep) -> Future[ShardPlaced]:
        self.asked.append(request)
        future: Future[ShardPlaced] = Future()
        if self.answer is not None:
            future.set_result(self.answer)
        return future

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def placed(manifest: bytes, step: int) -> ShardPlaced:
    """An answer that says it is of a step."""
    return ShardPlaced(
        step=step,
        attempt=1,
        verdict="local",
        why="",
        report=None,
        manifest=manifest,
        slots=(0,) * 4,
        elsewhere=(),
        pin=1,
    )


def put(step: int) -> bytes:
    """The manifest of a step."""
    plan = plan_state({"w": torch.full((1000,), float(step))})
    sizes = chunk_sizes(plan.nbytes, 1024)
    slots = [bytearray(1024) for _ in sizes]
    copy_into(plan, [memoryview(slot) for slot in slots], 1024)
    chunks = tuple(Chunk(chunk_digest(memoryview(s)[:n]), n) for s, n in zip(slots, sizes, strict=True))
    return encode_manifest(Manifest(ShardId("job", 1, step, 0), 1, plan.layout, plan.nbytes, 1024, chunks))


@pytest.mark.parametrize(
    "asked",
    [
        ReadStep(job="job", step=9, rank=0),
        ReadStep(job="job", step=None, rank=3),
        ReadStep(job="job", step=10, of_attempt=2, rank=0),
        ReadStep(job="other", step=None, rank=0),
    ],
    ids=["step", "rank", "attempt", "job"],
)
def test_another_shard_than_asked_for_is_refused(asked: ReadStep) -> None:
    """No byte of it is given out, and each later wait says so again."""
    read = ShardRead(cast(HolderLink, Asked(placed(put(10), 10))), asked, 60.0)
    for wait in (lambda: read.take([0]), read.answer, read.manifest):
        with pytest.raises(IntegrityError, match=r"asked for .*job='(job|other)'.* and .*step=10, rank=0, .*\) came"):
            wait()


def test_a_get_is_given_no_other_step_than_its_answer_says() -> None:
    """The answer of all ranks names a step; the shard that comes with it is of that step and of this rank."""
    with pytest.raises(IntegrityError, match=r"asked for .*step=11.* and .*step=10.* came"):
        ShardRead(
            cast(HolderLink, Asked(None)), ReadStep(job="job", step=None, rank=0), 60.0, placed(put(10), 11)
        ).manifest()


def test_a_read_names_its_reader_and_is_over_in_time() -> None:
    """The holder finds by the nonce whose read it is; without an answer every wait ends by one deadline."""
    link = Asked(None)
    read = ShardRead(cast(HolderLink, link), ReadStep(job="job", step=None, rank=3), 0.01)
    assert [asked.reader for asked in link.asked] == ["n"]
    for wait in (read.answer, read.manifest):
        with pytest.raises(PeerTimeout, match=r"was not answered within 0\.01 s"):
            wait()

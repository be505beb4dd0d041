"""A fresh shard on the wire before it is sealed: pushed early, sealed late, gone when the put fails (R7, R13, R14)."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from memstore import errors
from memstore.core.arena.replica_index import StoredReplica
from memstore.core.format.manifest import Chunk, Manifest, chunk_digest, chunk_sizes, encode_manifest
from memstore.core.holder.puts import push
from memstore.core.holder.puts.push import Push
from memstore.core.wire import frame
from memstore.core.wire.codec import Message, decode_reply, encode
from memstore.core.wire.error_message import ErrorMessage
from memstore.core.wire.frame import Kind
from memstore.core.wire.handshake import HolderIdentity
from memstore.core.wire.ids import WireShard
from memstore.core.wire.orders import PushTargets
from memstore.core.wire.peer_messages import (
    ChunkBatch,
    ChunkRun,
    ChunksLacking,
    Done,
    HasCopy,
    Offer,
    OfferedChunk,
    Ping,
    Refused,
    Seal,
    WholeShard,
    decode_lacking,
)
from memstore.errors import MemstoreError, PeerRefused
from memstore.shell.holder.holder import Holder
from memstore.shell.net.channel import Channel
from memstore.shell.net.listener import connect_tcp
from memstore.shell.peer.client import PeerClient
from memstore.shell.peer.outgoing_shard import StreamingReplica
from memstore.testing.clusters.processes import wait_for
from memstore.testing.clusters.two_holders import two_holders
from recovery.inventory import ShardId

CHUNK_BYTES = 64 << 10
CHUNKS = 6
WAIT_S = 60.0
SHARD = ShardId("train", 1, 2, 0)


@pytest.fixture
def pair() -> Iterator[tuple[Holder, Holder]]:
    """Two holders that know each other, without a controller; b holds copies of a's shards."""
    with two_holders(CHUNK_BYTES) as found:
        for holder in found:
            holder.replicas.ensure_free(2 * CHUNKS)
            holder.state.limits = replace(holder.state.limits, whole_bytes=0)  # none goes in one request
        found[0].state.shared_shards.declare(PushTargets(job="train", attempt=1, targets=("b",), ranks=()))
        yield found


def submitted(holder: Holder, fills: range) -> list[int]:
    """Fill slots as a rank's put does."""
    slots = holder.replicas.take_slots(len(fills))
    for slot, fill in zip(slots, fills, strict=True):
        holder.replicas.arena.view(slot, CHUNK_BYTES)[:] = bytes([fill]) * CHUNK_BYTES
    return slots


class Gate:
    """The fresh shard of a put whose digests come only when the test lets them."""

    def __init__(self, holder: Holder, slots: list[int]) -> None:
        self.holder, self.slots = holder, slots
        self.fresh = StreamingReplica(holder.replicas, SHARD, slots, chunk_sizes(len(slots) * CHUNK_BYTES, CHUNK_BYTES))
        self.digested = threading.Semaphore(0)
        real = self.fresh.add

        def add(digest: bytes) -> None:
            if not self.digested.acquire(timeout=WAIT_S):
                raise TimeoutError("the test never let it go on")
            real(digest)

        self.fresh.add = add  # type: ignore[method-assign]
        self.thread = threading.Thread(target=self._seal, daemon=True)
        holder.state.shared_shards.declare(PushTargets(job=SHARD.job, attempt=1, targets=("b",), ranks=()))
        holder.io.run(push.replicate, holder.state, SHARD, "", self.fresh)
        self.thread.start()

    def _seal(self) -> None:
        try:
            self.holder.replicas.seal_local(
                SHARD,
                world_size=1,
                layout=b"",
                nbytes=len(self.slots) * CHUNK_BYTES,
                slots=self.slots,
                attempt=1,
                follower=self.fresh,
            )
        except Exception as exc:
            self.fresh.fail(str(exc))

    def end(self) -> None:
        """Wait until both the seal and the push are over."""
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()
        wait_for(lambda: not self.holder.state.pushes.under_way, "the push to end")


def test_chunks_travel_before_the_last_is_digested(pair: tuple[Holder, Holder]) -> None:
    """The peer has the first batch while this host still digests; it seals only after this host has."""
    a, b = pair
    gate = Gate(a, submitted(a, range(CHUNKS)))
    for _ in range(CHUNKS // 2):  # one of two streams' batches
        gate.digested.release()
    wait_for(lambda: b.peer_server.received_bytes == CHUNKS // 2 * CHUNK_BYTES, "half of the chunks")
    assert a.replicas.index.find(SHARD) is None
    assert b.replicas.index.find(SHARD) is None
    for _ in range(CHUNKS):
        gate.digested.release()
    gate.end()
    mine, theirs = a.replicas.index.find(SHARD), b.replicas.index.find(SHARD)
    assert mine is not None
    assert theirs is not None
    assert not mine.pins
    assert (mine.spec, b.replicas.verify(theirs)) == (theirs.spec, [])


def test_a_put_that_fails_half_digested_leaves_nothing_at_the_peer(
    pair: tuple[Holder, Holder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its manifest never exists, so the peer seals nothing and has all its slots back."""
    a, b = pair
    before = b.replicas.stats()["used_bytes"]

    def no_manifest(name: str, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(a.replicas.manifests, "save", no_manifest)
    gate = Gate(a, submitted(a, range(CHUNKS)))
    for _ in range(CHUNKS):
        gate.digested.release()
    gate.end()
    wait_for(lambda: not b.replicas.index.incoming, "the peer to give up")
    assert b.replicas.index.find(SHARD) is None
    assert (b.replicas.stats()["used_bytes"], a.replicas.stats()["used_bytes"]) == (before, 0)
    with pytest.raises(PeerRefused, match="put failed"):
        gate.fresh.sealed()


def test_a_slot_recycled_under_a_push_costs_a_second_send_only(
    pair: tuple[Holder, Holder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that changed between digest and send are refused by the peer and sent again from where they lie (R14)."""
    a, b = pair
    slots = submitted(a, range(CHUNKS))
    real = StreamingReplica.view
    spoilt = bytearray(CHUNK_BYTES)

    def view(self: StreamingReplica, index: int) -> memoryview | None:
        if index == 1 and not b.peer_server.damage.stats()["digest_errors"]:
            return memoryview(spoilt)
        return real(self, index)

    monkeypatch.setattr(StreamingReplica, "view", view)
    gate = Gate(a, slots)
    for _ in range(CHUNKS):
        gate.digested.release()
    gate.end()
    theirs = b.replicas.index.find(SHARD)
    assert theirs is not None
    assert b.replicas.verify(theirs) == []
    assert b.peer_server.damage.stats()["digest_errors"] == 1


# -- whole shard --------------------------------------------------------------------------------------
# A small shard that travels in one request: admitted, received, digested and sealed like any other (R13, R14).


@pytest.fixture
def whole_pair() -> Iterator[tuple[Holder, Holder]]:
    with two_holders(CHUNK_BYTES) as found:
        yield found


def seal(holder: Holder, fills: bytes = b"\1\2\3", nbytes: int = 2 * CHUNK_BYTES + 10) -> StoredReplica:
    """Store a shard of some chunks, the last of them short."""
    replicas = holder.replicas
    replicas.ensure_free(len(fills))
    slots = replicas.take_slots(len(fills))
    for slot, fill in zip(slots, fills, strict=True):
        replicas.arena.view(slot, CHUNK_BYTES)[:] = bytes([fill]) * CHUNK_BYTES
    return replicas.seal_local(SHARD, world_size=1, layout=b"", nbytes=nbytes, slots=slots, attempt=1)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The requests that travel."""
    found: list[str] = []
    converse = Channel.send

    def noted(self: Channel, kind: Kind, request_id: int = 0, body: Any = b"", *given: Any, **named: Any) -> None:
        if kind is Kind.CALL:
            found.append(type(body).__name__)
        converse(self, kind, request_id, body, *given, **named)

    monkeypatch.setattr(Channel, "send", noted)
    return found


def copied(a: Holder, stored: StoredReplica) -> None:
    a.io.run(push.run, a.state, Push(SHARD, stored.spec.digest, "b"))


def bytes_of(holder: Holder, stored: StoredReplica) -> list[bytes]:
    views = [holder.replicas.chunk_view(stored, index) for index in range(len(stored.slots))]
    return [b"" if view is None else bytes(view) for view in views]


@pytest.mark.parametrize("nbytes", [1, 2 * CHUNK_BYTES + 10])
def test_a_small_shard_is_one_request(whole_pair: tuple[Holder, Holder], asked: list[str], nbytes: int) -> None:
    """Offer, chunks and seal in one; the copy is whole and counts."""
    a, b = whole_pair
    stored = seal(a, b"\1\2\3"[: -(-nbytes // CHUNK_BYTES)], nbytes)
    b.replicas.ensure_free(4)
    copied(a, stored)
    assert asked == ["WholeShard"]
    found = b.replicas.index.find(SHARD, stored.spec.digest)
    assert found is not None
    assert bytes_of(b, found) == bytes_of(a, stored)
    assert not b.replicas.index.incoming
    copied(a, stored)  # it is there
    assert asked == ["WholeShard"] * 2


def test_a_larger_shard_is_offered_first(whole_pair: tuple[Holder, Holder], asked: list[str]) -> None:
    """What the target has does not travel: that is worth the round trips of a large shard."""
    a, b = whole_pair
    a.state.limits = dataclasses.replace(a.state.limits, whole_bytes=2 * CHUNK_BYTES)
    stored = seal(a)
    b.replicas.ensure_free(4)
    copied(a, stored)
    assert sorted(set(asked)) == ["ChunkBatch", "Offer", "Seal"]


def test_a_refused_shard_leaves_the_connection_usable(whole_pair: tuple[Holder, Holder], asked: list[str]) -> None:
    """Its bytes are read and dropped; the next request on the same connection is answered."""
    a, b = whole_pair
    stored = seal(a)
    b.fences.open("train", 5)
    copied(a, stored)
    assert b.replicas.index.find(SHARD) is None
    assert not b.replicas.index.incoming
    assert a.peers.peer("b").call(Ping()) is not None
    assert asked == ["WholeShard", "Ping"]
    assert b.peer_server.damage.stats() == {"digest_errors": 0, "broken_frames": 0}


def test_a_chunk_that_arrives_damaged_is_sent_again(
    whole_pair: tuple[Holder, Holder], asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its digest is compared on arrival; the ordinary way brings it, and only it (R14)."""
    a, b = whole_pair
    stored = seal(a)
    b.replicas.ensure_free(4)
    real = Channel.request

    def flipped(self: Channel, body: Any, bulk: Any = (), **named: Any) -> Any:
        views = [memoryview(bytearray(view)) for view in bulk]
        if isinstance(body, WholeShard):
            views[1][9] ^= 1
        return real(self, body, views, **named)

    monkeypatch.setattr(Channel, "request", flipped)
    copied(a, stored)
    found = b.replicas.index.find(SHARD, stored.spec.digest)
    assert found is not None
    assert bytes_of(b, found) == bytes_of(a, stored)
    assert asked == ["WholeShard", "ChunkBatch", "Seal"]
    assert b.peer_server.damage.stats()["digest_errors"] == 1


def test_a_chunk_that_is_bad_at_the_sender_is_not_sent(whole_pair: tuple[Holder, Holder], asked: list[str]) -> None:
    """The scrub took its slot out before: the push ends, and the target has nothing."""
    a, b = whole_pair
    stored = seal(a)
    slot = stored.slots[1]
    assert slot is not None
    a.replicas.arena.view(slot, 8)[3] ^= 1
    a.replicas.verify_slots([slot])
    copied(a, stored)
    assert asked == ["Abort"]  # nothing else: the target has not taken anything
    assert b.replicas.index.find(SHARD) is None


@pytest.mark.parametrize("nonsense", ["short", "long", "other shard", "another's name"])
def test_a_request_that_contradicts_its_bytes_stores_nothing(whole_pair: tuple[Holder, Holder], nonsense: str) -> None:
    """A peer that sends other bytes than its manifest names, or speaks for another host, is refused or cut off."""
    _, b = whole_pair
    b.replicas.ensure_free(4)
    data = b"\1" * 100
    manifest = Manifest(SHARD, 1, b"", 100, CHUNK_BYTES, (Chunk(chunk_digest(data), 100),))
    named = SHARD._replace(rank=1) if nonsense == "other shard" else SHARD
    sender = "elsewhere" if nonsense == "another's name" else "x"
    sent = {"short": data[:50], "long": data + b"\1"}.get(nonsense, data)
    request = WholeShard(shard=WireShard.of(named), sender=sender, attempt=1, manifest=encode_manifest(manifest))
    address, port = b.listeners[0].address[:2]
    channel = connect_tcp(
        str(address),
        int(port),
        secret=b.secret,
        store=b.config.store,
        identity=HolderIdentity(host="x", incarnation=1),
        timeout_s=5.0,
    )
    with channel, contextlib.suppress(MemstoreError):
        frame = channel.request(request, [memoryview(sent)], timeout_s=5.0)
        assert isinstance(decode_reply(request, frame.data), Refused)
    assert b.replicas.index.find(SHARD) is None
    assert b.replicas.index.find(named) is None


def test_room_is_found_before_a_byte_is_stored(
    whole_pair: tuple[Holder, Holder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target without room refuses, is asked again until there is some, and then stores it (R10, R13)."""
    a, b = whole_pair
    stored = seal(a)
    replies: list[str] = []
    real = PeerClient.send_whole

    def noted(self: PeerClient, *given: Any, **named: Any) -> Any:
        reply = real(self, *given, **named)
        replies.append(type(reply).__name__)
        b.replicas.ensure_free(4)
        return reply

    monkeypatch.setattr(PeerClient, "send_whole", noted)
    copied(a, stored)
    assert replies == ["Refused", "HasCopy"]


# -- chunk run wire -----------------------------------------------------------------------------------
# Frames of chunks as a hostile or unlucky peer sends them: no slot is lost, nothing wrong is kept (R14).


COUNT = 6
RUN_SHARD = WireShard("train", 1, 2, 0)
RUN_CHUNKS = [bytes([i]) * CHUNK_BYTES for i in range(COUNT)]
OFFER = Offer(shard=RUN_SHARD, digest=None, attempt=1, sender="z", chunks_count=COUNT)
BATCH = ChunkBatch(
    shard=RUN_SHARD,
    sender="z",
    chunks=tuple(OfferedChunk(i, chunk_digest(chunk), CHUNK_BYTES) for i, chunk in enumerate(RUN_CHUNKS)),
)


def run(*sizes: Any) -> ChunkRun:
    """The body of a frame of chunks of these sizes."""
    return ChunkRun(sizes=sizes)


def stranger(holder: Holder) -> Channel:
    """Connect as the holder of a host that the store does not know, with its secret."""
    return connect_tcp(
        holder.state.info.endpoints[0].address,
        holder.state.info.endpoints[0].port,
        secret=holder.secret,
        store=holder.config.store,
        identity=HolderIdentity(host="z", incarnation=1),
        timeout_s=5,
    )


def ask_for_all(channel: Channel) -> None:
    """Begin a request whose chunks the receiver lacks, all of them."""
    channel.send(Kind.CALL, 9, BATCH, deadline_s=5)
    assert decode_lacking(channel.recv(timeout_s=5).data) == ChunksLacking(chunks=tuple(range(COUNT)))


def offer(channel: Channel) -> None:
    """Open the incoming replica."""
    assert decode_reply(OFFER, channel.request(OFFER, timeout_s=5).data) == Done()


def received(channel: Channel) -> None:
    """Take the end of the batch."""
    assert decode_reply(BATCH, channel.recv(timeout_s=5).data) == Done()


def wait_all_free(holder: Holder) -> None:
    """Wait until every slot is free again."""

    def are_free() -> bool:
        with holder.replicas.lock:
            return len(holder.replicas.table.free) == len(holder.replicas.table.slots)

    wait_for(are_free, "every slot to be free")


@pytest.mark.parametrize(
    ("kind", "message", "nbytes"),
    [
        pytest.param(Kind.CHUNK, run(*[CHUNK_BYTES] * (COUNT + 1)), CHUNK_BYTES * (COUNT + 1), id="too many"),
        pytest.param(Kind.CHUNK, run(), 0, id="none"),
        pytest.param(Kind.CHUNK, run(*[0] * COUNT), 0, id="all lacking"),
        pytest.param(Kind.CHUNK, run(-1, CHUNK_BYTES), CHUNK_BYTES, id="negative"),
        pytest.param(Kind.CHUNK, run(1.0), 1, id="fraction"),
        pytest.param(Kind.CHUNK, run(True), 1, id="truth"),
        pytest.param(Kind.CHUNK, run(*[CHUNK_BYTES] * 3), 2 * CHUNK_BYTES, id="more than the bulk"),
        pytest.param(Kind.CHUNK, run(CHUNK_BYTES + 1), CHUNK_BYTES + 1, id="longer than a slot"),
        pytest.param(Kind.CHUNK, BATCH, CHUNK_BYTES, id="no sizes"),
        pytest.param(
            Kind.ERROR, ErrorMessage(error="CapacityError", message="x", context={}), 1000, id="error with bulk"
        ),
    ],
)
def test_a_frame_that_contradicts_itself_costs_no_slot(
    kind: Kind, message: Message, nbytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The connection ends or the chunks count as bad; the incoming replica goes with its connection."""
    with two_holders(CHUNK_BYTES) as (_, holder):
        holder.replicas.ensure_free(2 * COUNT)
        with stranger(holder) as channel:
            offer(channel)
            ask_for_all(channel)
            with contextlib.suppress(errors.TransportError):
                channel.send(kind, 9, message, [memoryview(bytes(nbytes))] if nbytes else [], deadline_s=5)
                received(channel)
                ask_for_all(channel)
        wait_all_free(holder)
    assert not [record for record in caplog.records if "error of ours" in record.getMessage()]


def test_what_came_before_a_cut_is_kept_until_the_sender_is_gone() -> None:
    """Of three whole chunks of a frame that was cut in the fourth two are good, one counts as damaged; none stays."""
    with two_holders(CHUNK_BYTES) as (_, holder):
        holder.replicas.ensure_free(2 * COUNT)
        with stranger(holder) as feeding, stranger(holder) as other:
            offer(other)
            ask_for_all(feeding)
            packed = encode(run(*[CHUNK_BYTES] * COUNT))
            head = frame.pack_header(Kind.CHUNK, 9, packed, COUNT * CHUNK_BYTES)
            feeding._sock.setblocking(True)  # type: ignore[union-attr]
            sent = RUN_CHUNKS[0] + bytes([77]) * CHUNK_BYTES + RUN_CHUNKS[2] + RUN_CHUNKS[3][:1000]
            feeding._sock.sendall(head + packed + sent)  # type: ignore[union-attr]
            feeding._sock.setblocking(False)  # type: ignore[union-attr]
            feeding.close()
            replica = holder.replicas.index.find_incoming("z", ShardId("train", 1, 2, 0))
            assert replica is not None
            wait_for(lambda: replica.missing == [1, 3, 4, 5], "two chunks to be kept", seen=lambda: replica.missing)
        wait_all_free(holder)
        stats = holder.peer_server.damage.stats
        wait_for(lambda: stats()["digest_errors"] == 1, "the damaged chunk to be counted", seen=stats)


def test_chunks_without_a_slot_are_asked_for_again() -> None:
    """Two slots for a frame of six: two are kept, four are lacking, the connection is in order."""
    with two_holders(CHUNK_BYTES) as (_, holder):
        holder.replicas.ensure_free(2 * COUNT)
        with stranger(holder) as channel:
            offer(channel)
            taken = holder.replicas.take_slots(len(holder.replicas.table.free) - 2)
            ask_for_all(channel)
            bulk = [memoryview(chunk) for chunk in RUN_CHUNKS]
            channel.send(Kind.CHUNK, 9, run(*[CHUNK_BYTES] * COUNT), bulk, deadline_s=5)
            received(channel)
            replica = holder.replicas.index.find_incoming("z", ShardId("train", 1, 2, 0))
            assert replica is not None
            assert replica.missing == [2, 3, 4, 5]
            assert decode_reply(Ping(), channel.request(Ping(), timeout_s=5).data) == Done()
        holder.replicas.give_back(taken)
        wait_all_free(holder)


# -- repeated seal ------------------------------------------------------------------------------------
# A seal whose answer was lost comes again, over another connection, and is answered as the first was (R13, R14).


REPEATED_COUNT = 40  # more than travels in one request


def test_a_seal_that_comes_again_finds_the_copy() -> None:
    """Else the sender would give a copy up that is there; one that never was is refused as before."""
    with two_holders(CHUNK_BYTES) as (a, b):
        for holder in (a, b):
            holder.replicas.ensure_free(REPEATED_COUNT)
        slots = a.replicas.take_slots(REPEATED_COUNT)
        for number, slot in enumerate(slots):
            a.replicas.arena.view(slot, CHUNK_BYTES)[:] = bytes([number + 1]) * CHUNK_BYTES
        stored = a.replicas.seal_local(
            SHARD, world_size=1, layout=b"", nbytes=REPEATED_COUNT * CHUNK_BYTES, slots=slots, attempt=1
        )
        seal = Seal(shard=WireShard.of(SHARD), sender="a", manifest=a.replicas.manifest(stored))
        peer = a.context.peers.peer("b")
        assert isinstance(peer.call(seal), Refused)
        a.io.run(push.run, a.state, Push(SHARD, stored.spec.digest, "b"))
        assert b.replicas.index.find(SHARD) is not None
        assert isinstance(peer.call(seal), HasCopy)

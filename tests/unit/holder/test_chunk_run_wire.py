"""Frames of chunks as a hostile or unlucky peer sends them: no slot is lost, nothing wrong is kept (R14)."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from memstore import errors
from memstore.core.format.manifest import chunk_digest
from memstore.core.wire import frame
from memstore.core.wire.codec import Message, decode_reply, encode
from memstore.core.wire.error_message import ErrorMessage
from memstore.core.wire.frame import Kind
from memstore.core.wire.handshake import HolderIdentity
from memstore.core.wire.ids import WireShard
from memstore.core.wire.peer_messages import (
    ChunkBatch,
    ChunkRun,
    ChunksLacking,
    Done,
    Offer,
    OfferedChunk,
    Ping,
    decode_lacking,
)
from memstore.shell.holder.holder import Holder
from memstore.shell.net.channel import Channel
from memstore.shell.net.listener import connect_tcp
from memstore.testing.clusters.processes import wait_for
from memstore.testing.clusters.two_holders import two_holders
from recovery.inventory import ShardId

CHUNK_BYTES = 64 << 10
COUNT = 6
SHARD = WireShard("train", 1, 2, 0)
CHUNKS = [bytes([i]) * CHUNK_BYTES for i in range(COUNT)]
OFFER = Offer(shard=SHARD, digest=None, attempt=1, sender="z", chunks_count=COUNT)
BATCH = ChunkBatch(
    shard=SHARD,
    sender="z",
    chunks=tuple(OfferedChunk(i, chunk_digest(chunk), CHUNK_BYTES) for i, chunk in enumerate(CHUNKS)),
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
    """Two whole chunks of a frame that was cut in the third are good; an abort frees their slots."""
    with two_holders(CHUNK_BYTES) as (_, holder):
        holder.replicas.ensure_free(2 * COUNT)
        with stranger(holder) as feeding, stranger(holder) as other:
            offer(other)
            ask_for_all(feeding)
            packed = encode(run(*[CHUNK_BYTES] * COUNT))
            head = frame.pack_header(Kind.CHUNK, 9, packed, COUNT * CHUNK_BYTES)
            feeding._sock.setblocking(True)  # type: ignore[union-attr]
            feeding._sock.sendall(head + packed + CHUNKS[0] + CHUNKS[1] + CHUNKS[2][:1000])  # type: ignore[union-attr]
            feeding._sock.setblocking(False)  # type: ignore[union-attr]
            feeding.close()
            replica = holder.replicas.index.find_incoming("z", ShardId("train", 1, 2, 0))
            assert replica is not None
            wait_for(lambda: replica.missing == [2, 3, 4, 5], "two chunks to be kept", seen=lambda: replica.missing)
        wait_all_free(holder)


def test_chunks_without_a_slot_are_asked_for_again() -> None:
    """Two slots for a frame of six: two are kept, four are lacking, the connection is in order."""
    with two_holders(CHUNK_BYTES) as (_, holder):
        holder.replicas.ensure_free(2 * COUNT)
        with stranger(holder) as channel:
            offer(channel)
            taken = holder.replicas.take_slots(len(holder.replicas.table.free) - 2)
            ask_for_all(channel)
            bulk = [memoryview(chunk) for chunk in CHUNKS]
            channel.send(Kind.CHUNK, 9, run(*[CHUNK_BYTES] * COUNT), bulk, deadline_s=5)
            received(channel)
            replica = holder.replicas.index.find_incoming("z", ShardId("train", 1, 2, 0))
            assert replica is not None
            assert replica.missing == [2, 3, 4, 5]
            assert decode_reply(Ping(), channel.request(Ping(), timeout_s=5).data) == Done()
        holder.replicas.give_back(taken)
        wait_all_free(holder)

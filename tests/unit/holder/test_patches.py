"""A chunk that differs in few blocks from one that both hosts have travels as those blocks (R13, R14)."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memstore.core.arena.replica_index import StoredReplica
from memstore.core.holder.puts import push
from memstore.core.holder.puts.push import Push
from memstore.core.send_gate import BLOCK_BYTES_MAX, BLOCKS_MIN, block_bytes, may_pay, pays, sampled
from memstore.core.wire.codec import Message, decode_reply, encode
from memstore.core.wire.frame import HEADER_BYTES, UNAUTHENTICATED_KINDS, Kind
from memstore.core.wire.handshake import HolderIdentity
from memstore.core.wire.ids import WireShard
from memstore.core.wire.peer_messages import (
    ChunkBatch,
    ChunkRun,
    ChunksLacking,
    Done,
    Offer,
    OfferedChunk,
    decode_lacking,
)
from memstore.core.wire.reports import Sealed
from memstore.errors import MemstoreError
from memstore.shell.holder.holder import Holder
from memstore.shell.net.channel import Channel
from memstore.shell.net.listener import connect_tcp
from memstore.shell.peer import client, patches
from memstore.shell.peer.patches import apply, differing, packed, patch_bytes
from memstore.testing.clusters.processes import wait_for
from memstore.testing.clusters.two_holders import two_holders
from recovery.inventory import ShardId

CHUNK_BYTES, CHUNKS = 256 << 10, 12
TABLE_BYTES, ROW_BYTES = CHUNK_BYTES * CHUNKS, 512
BASE_STEP, STEP = ShardId("train", 1, 1, 0), ShardId("train", 1, 2, 0)

# -- what pays ----------------------------------------------------------------------------------------


@given(st.integers(1, 64 << 20))
def test_a_chunk_has_several_blocks_and_they_are_compared_word_by_word(nbytes: int) -> None:
    """Small chunks have small blocks, so that a few changed bytes of them pay as well."""
    size = block_bytes(nbytes)
    assert size % 8 == 0
    assert 8 <= size <= BLOCK_BYTES_MAX
    assert nbytes < 8 * BLOCKS_MIN or -(-nbytes // size) >= BLOCKS_MIN


@given(st.integers(0, 1 << 16))
def test_a_sample_is_small_and_spread_over_the_chunk(blocks_count: int) -> None:
    """A few dozen blocks at equal distances: whatever changed all of a chunk changed these."""
    chosen = range(blocks_count)[sampled(blocks_count)]
    assert len(chosen) <= 32
    assert blocks_count - max(chosen, default=0) <= chosen.step
    assert len(chosen) >= min(blocks_count, 16)


@pytest.mark.parametrize(("differing_count", "is_compared"), [(0, True), (12, True), (13, False), (16, False)])
def test_a_chunk_whose_sample_has_changed_is_not_compared(differing_count: int, is_compared: bool) -> None:
    """All of it changes in most training, and comparing it would read as much again as the put wrote."""
    assert may_pay(differing_count, 16) == is_compared


def test_a_patch_is_at_most_half_of_its_chunk() -> None:
    """The target copies and digests the whole chunk all the same. Where no block differs, a digest is wrong."""
    assert pays(50, 100)
    assert not pays(51, 100)
    assert not pays(0, 100)


# -- patches ------------------------------------------------------------------------------------------


def noise(nbytes: int, seed: int = 1) -> bytearray:
    """Bytes none of which tells where it lies."""
    return bytearray(np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8))


@given(st.integers(1, 20_000), st.lists(st.tuples(st.integers(0, 19_999), st.integers(1, 300)), max_size=8))
def test_a_patch_of_a_base_is_the_chunk(nbytes: int, changes: list[tuple[int, int]]) -> None:
    """Its blocks are those that differ, byte by byte; with all others of the base they are the chunk again."""
    base, new = noise(nbytes), noise(nbytes)
    for start, count in changes:
        for at in range(start, min(start + count, nbytes)):
            new[at] ^= 0x5A
    size = block_bytes(nbytes)
    truth = [new[at : at + size] != base[at : at + size] for at in range(0, nbytes, size)]
    sent = sum(len(new[at : at + size]) for at, differs in zip(range(0, nbytes, size), truth, strict=True) if differs)
    blocks = differing(memoryview(new), memoryview(base))
    if blocks is None:
        assert not 0 < 2 * sent <= nbytes or sum(truth[: nbytes // size][sampled(nbytes // size)]) > 0
        return
    assert blocks.tolist() == truth
    patch = packed(memoryview(new), blocks)
    assert patch.nbytes == patch_bytes(blocks, nbytes) == sent
    built = bytearray(nbytes)
    apply(memoryview(built), memoryview(base), patch, blocks)
    assert built == new


def test_a_chunk_that_has_changed_is_told_by_its_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """A put of nothing but new bytes costs a few cache lines of each chunk."""
    compared: list[int] = []
    real = np.any

    def noted(found: Any, **named: Any) -> Any:
        compared.append(found.size)
        return real(found, **named)

    monkeypatch.setattr(patches.np, "any", noted)
    assert differing(memoryview(noise(4 << 20)), memoryview(noise(4 << 20, 2))) is None
    assert sum(compared) <= 32 * 64


# -- two hosts ----------------------------------------------------------------------------------------


@pytest.fixture
def pair() -> Iterator[tuple[Holder, Holder]]:
    """Two holders that know each other, with room for two steps of a table."""
    with two_holders(CHUNK_BYTES) as found:
        for holder in found:
            holder.replicas.ensure_free(2 * (CHUNKS + 1))
            holder.state.limits = dataclasses.replace(holder.state.limits, whole_bytes=0)
        yield found


@pytest.fixture
def travelled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each frame that either host has sent, but for the handshakes of new connections."""
    found: list[int] = []
    real = Channel.send

    def counted(self: Channel, kind: Kind, request_id: int = 0, body: Any = b"", bulk: Any = (), **named: Any) -> None:
        data = encode(body) if isinstance(body, Message) else body
        if kind not in UNAUTHENTICATED_KINDS:
            found.append(HEADER_BYTES + len(data) + sum(view.nbytes for view in bulk))
        real(self, kind, request_id, body, bulk, **named)

    monkeypatch.setattr(Channel, "send", counted)
    return found


def stored_at(holder: Holder, shard: ShardId, data: bytes | bytearray) -> StoredReplica:
    """Store a shard of a rank as its put does."""
    replicas, slots = holder.replicas, holder.replicas.take_slots(-(-len(data) // CHUNK_BYTES))
    for number, slot in enumerate(slots):
        part = data[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]
        replicas.arena.view(slot, len(part))[:] = part
    return replicas.seal_local(shard, world_size=1, layout=b"", nbytes=len(data), slots=slots, attempt=1)


def copied(a: Holder, stored: StoredReplica) -> None:
    """Push a shard, and wait for its end."""
    a.io.run(push.run, a.state, Push(stored.shard, stored.spec.digest, "b"))


def assert_copied(b: Holder, stored: StoredReplica, data: bytes | bytearray) -> None:
    """The target has the very bytes, as they lie in its slots."""
    theirs = b.replicas.index.find(stored.shard, stored.spec.digest)
    assert theirs is not None
    assert b.replicas.verify(theirs) == []
    views = [b.replicas.chunk_view(theirs, index) for index in range(len(theirs.slots))]
    assert b"".join(bytes(view) for view in views if view is not None) == data


def with_changed_rows(table: bytearray) -> bytearray:
    """Return a table one row of each of whose chunks, two in a thousand, is another."""
    new = bytearray(table)
    for number, start in enumerate(range(0, len(new), CHUNK_BYTES)):
        size = min(ROW_BYTES, len(new) - start)
        place = start + 7919 * ROW_BYTES * number % min(CHUNK_BYTES, len(new) - start)
        place -= place % ROW_BYTES
        new[place : place + size] = noise(size, 7 + number)
    return new


def base_copied(pair: tuple[Holder, Holder], table: bytearray) -> StoredReplica:
    """Return the last step, of which both hosts have a copy."""
    stored = stored_at(pair[0], BASE_STEP, table)
    copied(pair[0], stored)
    return stored


def test_scattered_rows_of_a_table_travel_alone(pair: tuple[Holder, Holder], travelled: list[int]) -> None:
    """Of a table every chunk of which has a changed row at most 2 % of the bytes are on the wire, frames and all."""
    a, b = pair
    table = noise(TABLE_BYTES + 1500)  # its last chunk is short, and has no whole number of words
    base = base_copied(pair, table)
    new = with_changed_rows(table)
    travelled.clear()
    stored = stored_at(a, STEP, new)
    copied(a, stored)
    assert_copied(b, stored, new)
    assert all(ours != theirs for ours, theirs in zip(stored.digests, base.digests, strict=True))
    assert CHUNKS * ROW_BYTES < sum(travelled) <= 0.02 * len(new)


def test_a_table_all_of_which_changed_travels_as_without_patches(
    pair: tuple[Holder, Holder], travelled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same frames to the byte as where no base was ever looked at."""
    a, b = pair
    base_copied(pair, noise(TABLE_BYTES))
    sums = []
    for is_patched in (True, False):
        if not is_patched:
            monkeypatch.setattr(push, "base_of", lambda state, push: ())
        travelled.clear()
        new = noise(TABLE_BYTES, 2 + is_patched)
        stored = stored_at(a, STEP, new)
        copied(a, stored)
        assert_copied(b, stored, new)
        sums.append(sum(travelled))
        for holder in pair:
            holder.replicas.drop(STEP)
    assert sums[0] == sums[1] > TABLE_BYTES


def test_a_target_without_the_base_gets_the_chunks_whole(pair: tuple[Holder, Holder]) -> None:
    """It says so when the chunks are announced; nothing travels twice."""
    a, b = pair
    table = noise(TABLE_BYTES)
    base_copied(pair, table)
    b.replicas.drop(BASE_STEP)
    before = a.peers.peer("b").sent_bytes
    new = with_changed_rows(table)
    stored = stored_at(a, STEP, new)
    copied(a, stored)
    assert_copied(b, stored, new)
    assert a.peers.peer("b").sent_bytes - before == TABLE_BYTES


def rot(holder: Holder, stored: StoredReplica, index: int, at: int) -> None:
    """Flip a bit of a chunk, as memory does."""
    slot = stored.slots[index]
    assert slot is not None
    holder.replicas.arena.view(slot)[at] ^= 1


def test_a_bad_base_is_found_reported_and_the_chunk_comes_whole(
    pair: tuple[Holder, Holder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest of the built chunk is wrong, so the base is digested: what is bad is never used again (R30)."""
    a, b = pair
    table = noise(TABLE_BYTES)
    stored = base_copied(pair, table)
    theirs = b.replicas.index.find(BASE_STEP, stored.spec.digest)
    assert theirs is not None
    rot(b, theirs, 3, 60_000)
    new = bytearray(table)
    new[3 * CHUNK_BYTES + 5] ^= 1
    reports: list[Any] = []
    monkeypatch.setattr(b.state, "report", reports.append)
    before = a.peers.peer("b").sent_bytes
    stored = stored_at(a, STEP, new)
    copied(a, stored)
    assert_copied(b, stored, new)
    assert a.peers.peer("b").sent_bytes - before == BLOCK_BYTES_MAX + CHUNK_BYTES
    assert theirs.missing == {3}
    damaged, sealed = (report for report in reports if isinstance(report, Sealed))
    assert (damaged.copy.shard.step, damaged.copy.missing) == (1, (3,))
    assert (sealed.copy.shard.step, sealed.copy.missing) == (2, ())
    assert b.peer_server.damage.stats()["digest_errors"] == 0  # it was no transfer's fault


def test_a_patch_that_arrives_damaged_condemns_no_base(
    pair: tuple[Holder, Holder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chunk comes whole, and the copy of the last step stays as it is (R14)."""
    a, b = pair
    table = noise(TABLE_BYTES)
    base = base_copied(pair, table)
    new = with_changed_rows(table)
    real = patches.packed

    def flipped(chunk: memoryview, blocks: Any) -> memoryview:
        patch = memoryview(bytearray(real(chunk, blocks)))
        patch[9] ^= 1
        return patch

    monkeypatch.setattr(patches, "packed", flipped)
    stored = stored_at(a, STEP, new)
    copied(a, stored)
    assert_copied(b, stored, new)
    theirs = b.replicas.index.find(BASE_STEP, base.spec.digest)
    assert theirs is not None
    assert not theirs.missing
    assert b.peer_server.damage.stats()["digest_errors"] > 0


@pytest.mark.parametrize("where", ["sender", "target"])
def test_a_base_that_is_dropped_in_mid_push_costs_a_whole_chunk_only(
    pair: tuple[Holder, Holder], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """At the sender later batches go whole; at the target a patch is of no use, and its chunk is asked for again."""
    a, b = pair
    table = noise(TABLE_BYTES)
    base_copied(pair, table)
    new = bytearray(table)
    for start in range(0, TABLE_BYTES, CHUNK_BYTES):
        new[start + 9] ^= 1
    holder, one_by_one = {"sender": a, "target": b}[where], threading.Lock()
    module, name = {"sender": (client, "offer_of"), "target": (patches, "receive_head")}[where]
    real = getattr(module, name)

    def before_drop(*given: Any, **named: Any) -> Any:
        with one_by_one:
            found = real(*given, **named)
            holder.replicas.drop(BASE_STEP)
            return found

    monkeypatch.setattr(module, name, before_drop)
    before = a.peers.peer("b").sent_bytes
    stored = stored_at(a, STEP, new)
    copied(a, stored)
    assert_copied(b, stored, new)
    sent = a.peers.peer("b").sent_bytes - before
    if where == "sender":
        assert CHUNK_BYTES <= sent < TABLE_BYTES
    else:
        assert TABLE_BYTES < sent <= TABLE_BYTES + CHUNKS * BLOCK_BYTES_MAX
    for each in pair:
        used = {slot for copy in each.replicas.index.shards.values() for slot in copy.slots}
        assert each.replicas.stats()["used_bytes"] == len(used) * CHUNK_BYTES


# -- hostile patches ----------------------------------------------------------------------------------

WIRE_STEP = WireShard.of(STEP)
CHUNK = bytes(noise(CHUNK_BYTES))
OFFER = Offer(shard=WIRE_STEP, digest=None, attempt=1, sender="z", chunks_count=1)
ONE_BLOCK = bytes([1]) + bytes(CHUNK_BYTES // block_bytes(CHUNK_BYTES) // 8 - 1)


@pytest.mark.parametrize(
    ("sizes", "masks"),
    [
        pytest.param((1024,), (), id="no mask"),
        pytest.param((1024,), (ONE_BLOCK, ONE_BLOCK), id="too many masks"),
        pytest.param((1024,), (ONE_BLOCK[:-1],), id="short mask"),
        pytest.param((1024,), (ONE_BLOCK + b"\0",), id="long mask"),
        pytest.param((1024,), (b"",), id="empty mask"),
        pytest.param((1024,), (bytes(len(ONE_BLOCK)),), id="no block"),
        pytest.param((512,), (ONE_BLOCK,), id="half a block"),
        pytest.param((2048,), (ONE_BLOCK,), id="two blocks for one"),
        pytest.param((0,), (ONE_BLOCK,), id="no bytes"),
        pytest.param((0,), (bytes(len(ONE_BLOCK)),), id="nothing"),
    ],
)
def test_a_patch_that_contradicts_itself_costs_no_slot(
    pair: tuple[Holder, Holder], sizes: tuple[int, ...], masks: tuple[bytes, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """The connection ends, and with it what it had begun."""
    _, b = pair
    base = stored_at(b, BASE_STEP, CHUNK)
    batch = ChunkBatch(shard=WIRE_STEP, sender="z", chunks=(OfferedChunk(0, b"z" * 16, CHUNK_BYTES, base.digests[0]),))
    endpoint = b.state.info.endpoints[0]
    channel = connect_tcp(
        endpoint.address,
        endpoint.port,
        secret=b.secret,
        store=b.config.store,
        identity=HolderIdentity(host="z", incarnation=1),
        timeout_s=5,
    )
    with channel:
        assert decode_reply(OFFER, channel.request(OFFER, timeout_s=5).data) == Done()
        channel.send(Kind.CALL, 9, batch, deadline_s=5)
        assert decode_lacking(channel.recv(timeout_s=5).data) == ChunksLacking(chunks=(), patches=(0,))
        bulk = [memoryview(bytes(sum(sizes)))] if sum(sizes) else []
        channel.send(Kind.CHUNK, 9, ChunkRun(sizes=sizes, masks=masks), bulk, deadline_s=5)
        with pytest.raises(MemstoreError):
            channel.recv(timeout_s=5)
    wait_for(lambda: not b.replicas.index.incoming, "the incoming replica to go")
    assert b.replicas.stats()["used_bytes"] == CHUNK_BYTES
    assert not [record for record in caplog.records if "error of ours" in record.getMessage()]

"""A fresh shard on the wire before it is sealed: pushed early, sealed late, gone when the put fails (R7, R13, R14)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from memstore.core.format.manifest import chunk_sizes
from memstore.core.holder.puts import push
from memstore.core.wire.orders import PushTargets
from memstore.errors import PeerRefused
from memstore.shell.holder.holder import Holder
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

"""A seal whose answer was lost comes again, over another connection, and is answered as the first was (R13, R14)."""

from __future__ import annotations

from memstore.core.holder.puts import push
from memstore.core.holder.puts.push import Push
from memstore.core.wire.ids import WireShard
from memstore.core.wire.peer_messages import HasCopy, Refused, Seal
from memstore.testing.clusters.two_holders import two_holders
from recovery.inventory import ShardId

CHUNK_BYTES = 64 << 10
COUNT = 40  # more than travels in one request
SHARD = ShardId("train", 1, 2, 0)


def test_a_seal_that_comes_again_finds_the_copy() -> None:
    """Else the sender would give a copy up that is there; one that never was is refused as before."""
    with two_holders(CHUNK_BYTES) as (a, b):
        for holder in (a, b):
            holder.replicas.ensure_free(COUNT)
        slots = a.replicas.take_slots(COUNT)
        for number, slot in enumerate(slots):
            a.replicas.arena.view(slot, CHUNK_BYTES)[:] = bytes([number + 1]) * CHUNK_BYTES
        stored = a.replicas.seal_local(
            SHARD, world_size=1, layout=b"", nbytes=COUNT * CHUNK_BYTES, slots=slots, attempt=1
        )
        seal = Seal(shard=WireShard.of(SHARD), sender="a", manifest=a.replicas.manifest(stored))
        peer = a.context.peers.peer("b")
        assert isinstance(peer.call(seal), Refused)
        a.io.run(push.run, a.state, Push(SHARD, stored.spec.digest, "b"))
        assert b.replicas.index.find(SHARD) is not None
        assert isinstance(peer.call(seal), HasCopy)

"""Copies between two holders whose chunks travel through NIXL (R6, R13, R14)."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Iterator

import pytest

from memstore.core.arena.replica_index import StoredReplica
from memstore.core.holder.puts import push
from memstore.core.holder.puts.push import Push
from memstore.core.wire.peer_messages import ChunkPlaces
from memstore.errors import ConfigError
from memstore.shell.holder.holder import Holder
from memstore.shell.peer import chunk_reads
from memstore.shell.transport import by_name
from memstore.shell.transport.nixl import NixlTransport
from memstore.testing.clusters.processes import wait_for
from memstore.testing.clusters.two_holders import two_holders
from recovery.inventory import ShardId

HAS_NIXL = any(importlib.util.find_spec(name) for name in ("nixl_cu12", "nixl_cu13"))
CHUNK_BYTES = 64 << 10
COUNT = 40
SHARD = ShardId("train", 1, 2, 0)
needs_nixl = pytest.mark.skipif(not HAS_NIXL, reason="nixl is not installed (pip install nixl)")


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Holder, Holder]]:
    """Two holders with agents, over TCP."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    with two_holders(CHUNK_BYTES, transport="nixl") as found:
        yield found


def seal(holder: Holder) -> StoredReplica:
    """Store a shard that is too large to travel in one request."""
    replicas = holder.replicas
    replicas.ensure_free(COUNT)
    slots = replicas.take_slots(COUNT)
    for number, slot in enumerate(slots):
        replicas.arena.view(slot, CHUNK_BYTES)[:] = bytes([number + 1]) * CHUNK_BYTES
    nbytes = COUNT * CHUNK_BYTES - 10
    return replicas.seal_local(SHARD, world_size=1, layout=b"", nbytes=nbytes, slots=slots, attempt=1)


def bytes_of(holder: Holder, stored: StoredReplica) -> list[bytes]:
    """Return the chunks of a copy."""
    views = [holder.replicas.chunk_view(stored, index) for index in range(COUNT)]
    return [b"" if view is None else bytes(view) for view in views]


def copied(a: Holder, stored: StoredReplica) -> None:
    """Push a shard to the other host, once."""
    a.runner.run(push.run(a.state, Push(SHARD, stored.spec.digest, "b")))


def transport_of(holder: Holder) -> NixlTransport:
    """Return a holder's transport."""
    assert isinstance(holder.transport, NixlTransport)
    return holder.transport


def free_count(holder: Holder) -> int:
    """Return the free slots."""
    with holder.replicas.lock:
        return len(holder.replicas.table.free)


@needs_nixl
def test_a_pushed_copy_has_the_same_bytes(pair: tuple[Holder, Holder]) -> None:
    """What one holder put lies on the other one, and comes back when it is fetched."""
    a, b = pair
    stored = seal(a)
    b.replicas.ensure_free(COUNT)
    copied(a, stored)
    found = b.replicas.index.find(SHARD, stored.spec.digest)
    assert found is not None
    assert bytes_of(b, found) == bytes_of(a, stored)
    assert b.peer_server.received_bytes == COUNT * CHUNK_BYTES - 10
    digests, manifest = list(stored.digests), a.replicas.manifest(stored)
    a.replicas.drop(SHARD)
    sizes = [stored.spec.chunk_nbytes(i) for i in range(COUNT)]
    replica = a.replicas.open_incoming("b", SHARD, digests, sizes, attempt=1)
    bad = a.peers.peer("b").fetch_into(a.replicas, replica, stored.spec.digest, range(COUNT))
    assert bad == []
    again = a.replicas.finish("b", manifest)
    assert bytes_of(a, again) == bytes_of(b, found)


@needs_nixl
def test_wrong_bytes_are_refused(pair: tuple[Holder, Holder]) -> None:
    """A chunk that is damaged where it lies, after its digest was taken, is not kept by the receiver."""
    a, b = pair
    stored = seal(a)
    b.replicas.ensure_free(COUNT)
    view = a.replicas.chunk_view(stored, 7)
    assert view is not None
    view[5] ^= 1
    copied(a, stored)
    assert b.replicas.index.find(SHARD, stored.spec.digest) is None
    assert b.peer_server.damage.stats()["digest_errors"] >= 1
    wait_for(lambda: free_count(b) == COUNT, "its slots to be free")


@needs_nixl
def test_a_sender_that_dies_costs_no_slot(pair: tuple[Holder, Holder], monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender's agent is killed as its chunks are read: the slots are free once nothing can land in them."""
    a, b = pair
    stored = seal(a)
    b.replicas.ensure_free(COUNT)
    bring, killed = chunk_reads.ChunkReads.bring, list[int]()

    def killing(self: chunk_reads.ChunkReads, places: ChunkPlaces, *given: object, **named: object) -> object:
        if not killed:
            killed.append(transport_of(a)._serving._process.pid)
            os.kill(killed[0], signal.SIGKILL)
        return bring(self, places, *given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(chunk_reads.ChunkReads, "bring", killing)
    copied(a, stored)
    assert killed
    wait_for(lambda: free_count(b) == COUNT or b.replicas.index.find(SHARD) is not None, "its slots to be free")
    assert b.replicas.withheld.count == 0
    copied(a, stored)
    found = b.replicas.index.find(SHARD, stored.spec.digest)
    assert found is not None
    assert bytes_of(b, found) == bytes_of(a, stored)


def test_a_holder_without_nixl_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not start."""
    monkeypatch.setattr(by_name, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install nixl"), two_holders(CHUNK_BYTES, transport="nixl"):
        pass


def test_an_unknown_transport_is_refused() -> None:
    """The error names those there are; TLS is no part of NIXL's."""
    with pytest.raises(ConfigError, match="use tcp or nixl"), two_holders(CHUNK_BYTES, transport="rdma"):
        pass
    files = {"tls_cert": "/a", "tls_key": "/b", "tls_ca": "/c"}
    with pytest.raises(ConfigError, match="has no TLS"), two_holders(CHUNK_BYTES, transport="nixl", **files):
        pass

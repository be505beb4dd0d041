"""A small shard that travels in one request: admitted, received, digested and sealed like any other (R13, R14)."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from memstore.core.arena.replica_index import StoredReplica
from memstore.core.format.manifest import Chunk, Manifest, chunk_digest, encode_manifest
from memstore.core.holder.puts import push
from memstore.core.holder.puts.push import Push
from memstore.core.wire.codec import decode_reply
from memstore.core.wire.frame import Kind
from memstore.core.wire.handshake import HolderIdentity
from memstore.core.wire.ids import WireShard
from memstore.core.wire.peer_messages import Ping, Refused, WholeShard
from memstore.errors import MemstoreError
from memstore.shell.holder.holder import Holder
from memstore.shell.net.channel import Channel
from memstore.shell.net.listener import connect_tcp
from memstore.shell.peer.client import PeerClient
from memstore.testing.clusters.two_holders import two_holders
from recovery.inventory import ShardId

CHUNK_BYTES = 64 << 10
SHARD = ShardId("train", 1, 2, 0)


@pytest.fixture
def pair() -> Iterator[tuple[Holder, Holder]]:
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
def test_a_small_shard_is_one_request(pair: tuple[Holder, Holder], asked: list[str], nbytes: int) -> None:
    """Offer, chunks and seal in one; the copy is whole and counts."""
    a, b = pair
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


def test_a_larger_shard_is_offered_first(pair: tuple[Holder, Holder], asked: list[str]) -> None:
    """What the target has does not travel: that is worth the round trips of a large shard."""
    a, b = pair
    a.state.limits = dataclasses.replace(a.state.limits, whole_bytes=2 * CHUNK_BYTES)
    stored = seal(a)
    b.replicas.ensure_free(4)
    copied(a, stored)
    assert sorted(set(asked)) == ["ChunkBatch", "Offer", "Seal"]


def test_a_refused_shard_leaves_the_connection_usable(pair: tuple[Holder, Holder], asked: list[str]) -> None:
    """Its bytes are read and dropped; the next request on the same connection is answered."""
    a, b = pair
    stored = seal(a)
    b.fences.open("train", 5)
    copied(a, stored)
    assert b.replicas.index.find(SHARD) is None
    assert not b.replicas.index.incoming
    assert a.peers.peer("b").call(Ping()) is not None
    assert asked == ["WholeShard", "Ping"]
    assert b.peer_server.damage.stats() == {"digest_errors": 0, "broken_frames": 0}


def test_a_chunk_that_arrives_damaged_is_sent_again(
    pair: tuple[Holder, Holder], asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its digest is compared on arrival; the ordinary way brings it, and only it (R14)."""
    a, b = pair
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


def test_a_chunk_that_is_bad_at_the_sender_is_not_sent(pair: tuple[Holder, Holder], asked: list[str]) -> None:
    """The scrub took its slot out before: the push ends, and the target has nothing."""
    a, b = pair
    stored = seal(a)
    slot = stored.slots[1]
    assert slot is not None
    a.replicas.arena.view(slot, 8)[3] ^= 1
    a.replicas.verify_slots([slot])
    copied(a, stored)
    assert asked == ["Abort"]  # nothing else: the target has not taken anything
    assert b.replicas.index.find(SHARD) is None


@pytest.mark.parametrize("nonsense", ["short", "long", "other shard", "another's name"])
def test_a_request_that_contradicts_its_bytes_stores_nothing(pair: tuple[Holder, Holder], nonsense: str) -> None:
    """A peer that sends other bytes than its manifest names, or speaks for another host, is refused or cut off."""
    _, b = pair
    b.replicas.ensure_free(4)
    data = b"\1" * 100
    manifest = Manifest(SHARD, 1, b"", 100, CHUNK_BYTES, (Chunk(chunk_digest(data), 100),))
    named = dataclasses.replace(SHARD, rank=1) if nonsense == "other shard" else SHARD
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


def test_room_is_found_before_a_byte_is_stored(pair: tuple[Holder, Holder], monkeypatch: pytest.MonkeyPatch) -> None:
    """A target without room refuses, is asked again until there is some, and then stores it (R10, R13)."""
    a, b = pair
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

"""What a holder does for its peers: one offer's room is not found by another, a have is true (R10, R13)."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, cast

import pytest
from parity_fleet import no_parity

from memstore.core.arena.claimed_memory import Limit
from memstore.core.arena.replica_index import StoredReplica
from memstore.core.arena.replica_store import ReplicaStore
from memstore.core.arena.slot_table import PeerShare
from memstore.core.wire.codec import Message, encode
from memstore.core.wire.frame import Kind
from memstore.core.wire.handshake import HolderIdentity
from memstore.core.wire.ids import WireShard
from memstore.core.wire.peer_messages import Abort, Done, HasCopy, Offer, Ping, Refused
from memstore.errors import PeerUnreachable
from memstore.shell.arena.arena import open_store
from memstore.shell.net.channel import Channel, Frame
from memstore.shell.peer.server import PeerServer
from memstore.testing.clusters.scratch import scratch_folder
from recovery.inventory import ShardId

CHUNK_BYTES = 64 << 10


class Moments:
    """A lock that, once armed, does something as soon as no thread holds it: what another thread could do."""

    def __init__(self) -> None:
        self.lock, self.depth = threading.RLock(), 0
        self.work: Callable[[], None] | None = None

    def __enter__(self) -> None:
        self.lock.acquire()
        self.depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.depth -= 1
        self.lock.release()
        if not self.depth and self.work is not None:
            work, self.work = self.work, None
            work()


@pytest.fixture
def replicas() -> Iterator[ReplicaStore]:
    with scratch_folder() as folder:
        made = open_store(folder, chunk_bytes=CHUNK_BYTES, limit=Limit(8 * CHUNK_BYTES))
        yield made
        made.close()


def offer_of(sender: str, shard: ShardId, digest: str | None = None) -> Offer:
    """An offer of a shard of two chunks."""
    return Offer(shard=WireShard.of(shard), digest=digest, attempt=shard.attempt, sender=sender, chunks_count=2)


def offer(server: PeerServer, sender: str, shard: ShardId, digest: str | None = None) -> Message:
    """Offer it."""
    return server._offer(cast(Channel, object()), offer_of(sender, shard, digest))


@pytest.mark.parametrize("is_reserved", [True, False])
def test_two_offers_at_once_share_no_room(
    replicas: ReplicaStore, monkeypatch: pytest.MonkeyPatch, is_reserved: bool
) -> None:
    """Room for one shard, offered two: one is admitted and one refused, with a share and without (R10, R13)."""
    server = PeerServer(
        replicas, "a", is_fenced=lambda job, attempt: False, on_sealed=lambda copy: None, parity=no_parity(replicas)
    )
    if is_reserved:
        replicas.claim("job", PeerShare(1, {}, 2))
    else:
        replicas.ensure_free(2)
    moments, real = Moments(), replicas.index.peer_refusal
    monkeypatch.setattr(replicas, "lock", moments)
    answers: list[Message] = []

    def refusal(shard: ShardId, chunks_count: int, known: StoredReplica | None) -> str | None:
        why = real(shard, chunks_count, known)
        if not answers and shard.rank == 1:
            moments.work = lambda: answers.append(offer(server, "c", ShardId("job", 1, 7, 2)))
        return why

    monkeypatch.setattr(replicas.index, "peer_refusal", refusal)
    answers.append(offer(server, "b", ShardId("job", 1, 7, 1)))
    second, first = answers
    assert first == Done()
    assert isinstance(second, Refused)
    assert not second.is_final
    assert len(replicas.index.incoming) == 1
    server._abort(Abort(sender="b", shard=WireShard("job", 1, 7, 1)))
    assert offer(server, "c", ShardId("job", 1, 7, 2)) == Done()


def test_a_copy_that_is_dropped_while_it_is_verified_is_no_have(
    replicas: ReplicaStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An offer of a shard that retention drops at that moment is taken as new, and no copy is reported (R13)."""
    reported: list[Any] = []
    server = PeerServer(
        replicas, "a", is_fenced=lambda job, attempt: False, on_sealed=reported.append, parity=no_parity(replicas)
    )
    shard = ShardId("job", 1, 7, 1)
    replicas.ensure_free(4)
    slots = replicas.take_slots(2)
    known = replicas.seal_local(shard, world_size=2, layout=b"", nbytes=2 * CHUNK_BYTES, slots=slots, attempt=1)
    assert offer(server, "b", shard, known.spec.digest) == HasCopy()
    assert len(reported) == 1
    real = replicas.verify_old
    monkeypatch.setattr(replicas, "verify_old", lambda digests, sizes: (real(digests, sizes), replicas.drop(shard)))
    assert offer(server, "b", shard, known.spec.digest) == Done()
    assert len(reported) == 1


class Line:
    """A connection of a peer: what it asks, one by one, then its end."""

    def __init__(self) -> None:
        self.peer = "tcp:b"
        self.asked: queue.Queue[Frame | None] = queue.Queue()
        self.replies: queue.Queue[Message] = queue.Queue()

    def recv(self, timeout_s: float | None) -> Frame:
        frame = self.asked.get(timeout=120)
        if frame is None:
            raise PeerUnreachable("the connection ended", peer=self.peer)
        return frame

    def send(self, kind: Kind, request_id: int, message: Message, *, deadline_s: float) -> None:
        self.replies.put(message)


def test_an_incoming_replica_outlives_the_connection_that_offered_it(replicas: ReplicaStore) -> None:
    """A peer's pushes share its connections; only with the last one its incoming replicas go (R13)."""
    server = PeerServer(
        replicas, "a", is_fenced=lambda job, attempt: False, on_sealed=lambda copy: None, parity=no_parity(replicas)
    )
    replicas.claim("job", PeerShare(1, {}, 2))
    shard = ShardId("job", 1, 7, 1)
    identity = HolderIdentity(host="b", incarnation=1)
    first, second, older = Line(), Line(), Line()
    lives = {first: identity, second: identity, older: HolderIdentity(host="b", incarnation=0)}
    serving = {
        line: threading.Thread(target=server.serve, args=(cast(Channel, line), of)) for line, of in lives.items()
    }
    for line, thread in serving.items():
        thread.start()
        line.asked.put(Frame(Kind.CALL, 1, encode(Ping()), 0))
        assert line.replies.get(timeout=120) == Done()
    first.asked.put(Frame(Kind.CALL, 2, encode(offer_of("b", shard)), 0))
    assert first.replies.get(timeout=120) == Done()
    for line, is_kept in ((first, True), (second, False), (older, False)):
        line.asked.put(None)
        serving[line].join(60)
        assert (replicas.index.find_incoming("b", shard) is not None) is is_kept


def test_a_restore_that_finds_free_slots_does_not_wait_while_the_arena_grows(
    replicas: ReplicaStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Growth for another job, or for puts to come, takes minutes for hundreds of gigabytes (R10, D107)."""
    replicas.ensure_free(2)
    grow, begun, may_end = replicas.arena.grow, threading.Event(), threading.Event()

    def slow(slots_count: int, **more: Any) -> None:
        begun.set()
        assert may_end.wait(60.0)
        grow(slots_count, **more)

    monkeypatch.setattr(replicas.arena, "grow", slow)
    with ThreadPoolExecutor(2) as pool:
        claim = pool.submit(replicas.claim, "other", PeerShare(1, {0: 4}, 2, 1, 1))
        assert begun.wait(60.0)
        restore = pool.submit(lambda: (replicas.ensure_free(2), replicas.take_slots_growing(2))[1])
        try:
            assert len(restore.result(30.0)) == 2
        finally:
            may_end.set()
        claim.result(60.0)
    assert len(replicas.table.slots) >= 6

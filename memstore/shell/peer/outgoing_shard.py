"""What a push sends: a stored replica, or a fresh one whose digests come while its first chunks are on the wire.

    Fresh: submitted --digested--> sealed, pinned once for every push --a push ends--> one pin less
                 '--> failed: its pushes abort at the peers

A peer checks every chunk on arrival and seals nothing before it has the manifest, which exists only once this
host has sealed (R7, R13, R14): sending early puts no byte at risk, it only saves the time of a pass over them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from memstore.core.arena.replica_index import StoredReplica
from memstore.core.arena.replica_store import PIN_S, Store
from memstore.errors import PeerRefused
from recovery.inventory import ShardId

DIGEST_S = 60.0  # longest wait for this host's own digests


class SealedReplica:
    """A stored replica, pinned until it is released."""

    def __init__(self, replicas: Store, replica: StoredReplica, pin: int) -> None:
        self.replicas, self.replica, self._pin = replicas, replica, pin
        self.shard, self.digest = replica.shard, replica.spec.digest
        self.sizes = [replica.spec.chunk_nbytes(i) for i in range(replica.spec.chunks_count)]

    def digests(self, batch: Sequence[int]) -> list[bytes]:
        """Return the digests of these chunks."""
        return [self.replica.digests[i] for i in batch]

    def view(self, index: int) -> memoryview | None:
        """Return a chunk's bytes, or None if this host lacks it."""
        return self.replicas.chunk_view(self.replica, index)

    def manifest(self) -> bytes:
        """Return the manifest."""
        return self.replicas.manifest(self.replica)

    @property
    def stored(self) -> StoredReplica:
        """Return the stored replica."""
        return self.replica

    def has_digests(self, batch: Sequence[int]) -> bool:
        """Return whether `digests` answers at once: always."""
        return True

    def is_settled(self) -> bool:
        """Return whether `manifest` answers at once: always."""
        return True

    def release(self) -> None:
        """End the push."""
        self.replicas.unpin(self.replica, self._pin)


class StreamingReplica:
    """A shard that this host is digesting now, or whose digests come with its chunks.

    The sealing thread calls add, seal and fail; pushes call the rest.
    """

    digest = ""  # not known before the last chunk is digested

    def __init__(
        self,
        replicas: Store,
        shard: ShardId,
        slots: Sequence[int],
        sizes: Sequence[int],
        digests: Sequence[bytes] | None = None,
    ) -> None:
        self.replicas, self.shard = replicas, shard
        self.slots, self.sizes = slots, sizes
        self._changed = threading.Condition()
        self._known = list(digests or ())
        self._replica: StoredReplica | None = None
        self._readers = 0  # pushes that have begun and not ended
        self._pins: list[int] = []
        self._why = ""

    def add(self, digest: bytes) -> None:
        """Note that the next chunk is digested."""
        with self._changed:
            self._known.append(digest)
            self._changed.notify_all()

    def seal(self, replica: StoredReplica) -> None:
        """Pin the stored replica for every push, before it could be dropped; needs the replica store's lock."""
        with self._changed:
            deadline_s = self.replicas.clock.monotonic() + PIN_S
            self._pins = [self.replicas.index.pin(replica, deadline_s) for _ in range(self._readers)]
            self._replica = replica
            self._changed.notify_all()

    def fail(self, why: str) -> None:
        """Fail the pushes: the shard will not be stored."""
        with self._changed:
            self._why = self._why or why
            self._changed.notify_all()

    def begin(self) -> None:
        """Begin a push that reads it; each needs one release."""
        with self._changed:
            self._readers += 1

    @property
    def stored(self) -> StoredReplica | None:
        """Return the stored replica, if there is one yet."""
        return self._replica

    def has_digests(self, batch: Sequence[int]) -> bool:
        """Return whether `digests` answers at once, if only by its error."""
        return bool(self._why) or len(self._known) > max(batch, default=-1)

    def is_settled(self) -> bool:
        """Return whether the shard is stored, or never will be."""
        return bool(self._why) or self._replica is not None

    def digests(self, batch: Sequence[int]) -> list[bytes]:
        """Return the digests of these chunks as soon as they are known; PeerRefused if the put failed here."""
        self._wait(lambda: self.has_digests(batch))
        return [self._known[i] for i in batch]

    def view(self, index: int) -> memoryview | None:
        """Return a chunk's bytes.

        The slot of a chunk whose content was here already is recycled when the shard is sealed; if that happens
        under a send, the peer's digest refuses the chunk and it is sent again from where it lies then.
        """
        with self._changed:
            replica = self._replica
        if replica is not None:
            return self.replicas.chunk_view(replica, index)
        return self.replicas.arena.view(self.slots[index], self.sizes[index])

    def manifest(self) -> bytes:
        """Return the manifest as soon as the shard is sealed; PeerRefused if the put failed here."""
        return self.replicas.manifest(self.sealed())

    def sealed(self) -> StoredReplica:
        """Return the stored replica as soon as there is one; PeerRefused if the put failed here."""
        self._wait(self.is_settled)
        if self._replica is None:
            raise PeerRefused(f"{self.shard} was not sealed here", is_final=True)
        return self._replica

    def release(self) -> None:
        """End one push."""
        with self._changed:
            self._readers -= 1
            pin, replica = (self._pins.pop() if self._pins else None), self._replica
        if pin is not None and replica is not None:
            self.replicas.unpin(replica, pin)

    def _wait(self, is_there: Callable[[], bool]) -> None:
        with self._changed:
            if not self._changed.wait_for(is_there, DIGEST_S):
                raise PeerRefused(f"{self.shard} was not digested within {DIGEST_S:g} s", is_final=False)
            if self._why:
                raise PeerRefused(f"the put failed on its own host: {self._why}", is_final=True)


OutgoingReplica = SealedReplica | StreamingReplica


class OutgoingShards:
    """The replicas of one host that pushes may send."""

    def __init__(self, replicas: Store) -> None:
        self._replicas = replicas

    def outgoing(self, shard: ShardId, digest: str) -> SealedReplica | None:
        """Pin a replica for a push; None if it is not here, or dropped."""
        pinned = self._replicas.pin(shard, digest)
        return SealedReplica(self._replicas, *pinned) if pinned is not None else None

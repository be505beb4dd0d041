"""Chunks that the receiver reads from the sender's arena through a transport (R6, R13, R14).

slots taken --read--> digested, kept
              '--given up: slots withheld--the read has ended--> free
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memstore.core.arena.replica_index import IncomingReplica
from memstore.core.format.manifest import chunk_digest
from memstore.core.wire.peer_messages import ChunkPlaces
from memstore.errors import ConfigError, PeerUnreachable, ProtocolError
from memstore.shell.arena.replica_store import ReplicaStore
from memstore.shell.peer.corruption_counts import Damage
from memstore.shell.transport.transport import Piece, Transport


class ChunkReads:
    """What a holder reads from peers, and lets peers read."""

    def __init__(self, transport: Transport, replicas: ReplicaStore, offset: Callable[[memoryview], int]) -> None:
        """`offset` returns where in the arena a view of a chunk begins."""
        self._transport, self._replicas, self._offset = transport, replicas, offset

    def places(self, views: Sequence[memoryview | None]) -> ChunkPlaces:
        """Return where chunks lie here; None stands for one that is lacking. The caller keeps them in place.

        Raises:
            PeerUnreachable: What peers read from cannot be started now.
        """
        try:
            metadata = self._transport.metadata()
        except (ConfigError, OSError) as error:
            raise PeerUnreachable(f"no peer can read from this host now: {error}") from error
        return ChunkPlaces(
            sizes=tuple(0 if view is None else view.nbytes for view in views),
            offsets=tuple(0 if view is None else self._offset(view) for view in views),
            metadata=metadata,
        )

    def bring(
        self, places: ChunkPlaces, replica: IncomingReplica, indices: Sequence[int], *, host: str,
        take: Callable[[int], list[int]], damage: Damage, timeout_s: float,
    ) -> tuple[set[int], int]:  # fmt: skip
        """Read chunks into slots, digest and keep them; return which are here now, and the bytes that came.

        Raises:
            TransportError: They did not come within `timeout_s`. The slots stay out of use until the read has ended.
            CapacityError: From `take`.
        """
        if len(places.offsets) != len(places.sizes):
            raise ProtocolError(f"host {host}: {len(places.sizes)} chunks at {len(places.offsets)} places")
        rows = zip(indices, places.sizes, places.offsets, strict=False)
        wanted = [row for row in rows if row[1]]
        numbers = take(len(wanted)) if wanted else []
        coming = list(zip(wanted, numbers, strict=False))
        pieces = [Piece(offset, number * self._replicas.chunk_bytes, size) for (_, size, offset), number in coming]
        if pieces:  # if this raises, nothing is known of the read, and the slots stay taken
            given_up = self._transport.read(places.metadata, pieces, host=host, deadline_s=timeout_s)
            if given_up is not None:
                with self._replicas.lock:
                    self._replicas.withheld.withhold(numbers, given_up.has_ended)
                raise given_up.error
        arrived = [
            (index, number, size, chunk_digest(self._replicas.arena.view(number, size)))
            for (index, size, _), number in coming
        ]
        bad = self._replicas.keep_chunks(replica, arrived)
        for _ in bad:
            damage.chunk()
        return {index for index, *_ in arrived}.difference(bad), sum(size for _, _, size, _ in arrived)

    def free_ended(self) -> None:
        """Free the slots of reads that were given up and have ended."""
        with self._replicas.lock:
            if self._replicas.withheld.free_ended():
                self._replicas.flush()

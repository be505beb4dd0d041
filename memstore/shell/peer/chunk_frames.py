"""Chunks on the wire: a run of them in one frame, sent from where they lie and received into slots (R13, R14).

The body of a CHUNK frame is a ChunkRun, which gives the sizes of the chunks that its bulk is.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from memstore.core.arena.replica_index import IncomingReplica
from memstore.core.arena.replica_store import Store
from memstore.core.wire.error_message import decode_error
from memstore.core.wire.frame import BULK_BYTES_MAX, Kind
from memstore.core.wire.peer_messages import ChunkRun, decode_chunks
from memstore.errors import ProtocolError
from memstore.shell.net.channel import BulkGate, Channel

# -- corruption counts --------------------------------------------------------------------------------
# What arrived damaged at one holder, as receiver or as client, or at a rank of its host, counted for status (R14).


log = logging.getLogger("memstore")


class Damage:
    """Two counts that any thread may raise."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunks_count = 0  # their digest was wrong: they are asked for again
        self._frames_count = 0  # their header or body was: the connection is ended

    def frame(self, error: ProtocolError) -> None:
        """Count bytes that are no valid frame."""
        self.add(frames=1)
        log.warning("a connection is ended: %s", error)

    def add(self, *, chunks: int = 0, frames: int = 0) -> None:
        """Raise the counts."""
        with self._lock:
            self._chunks_count += chunks
            self._frames_count += frames

    def stats(self) -> dict[str, int]:
        """Return the counts by name."""
        with self._lock:
            return {"digest_errors": self._chunks_count, "broken_frames": self._frames_count}


# -- chunk frames -------------------------------------------------------------------------------------


CHUNK_TIMEOUT_S = 30.0  # a sender that stalls this long inside a batch loses its incoming replica
REPLY_TIMEOUT_S = 30.0
RUN_BYTES = BULK_BYTES_MAX  # the larger, the less of the interpreter's lock is held for a gigabyte
SLOW_RUN_BYTES = 16 << 20  # of copies that are held back: a limit acts, and a receiver sees progress, once per run


class ReceivedRun(NamedTuple):
    """One frame's chunks at the receiver: how many it answers for, which are not here now, and the bytes that came."""

    answered: int
    bad: list[int]
    nbytes: int


def runs(sizes: Sequence[int], limit_bytes: int = RUN_BYTES) -> Iterator[slice]:
    """Cut chunks of these sizes into runs of at most so many bytes, one chunk at least."""
    first = nbytes = 0
    for index, size in enumerate(sizes):
        if index > first and nbytes + size > limit_bytes:
            yield slice(first, index)
            first, nbytes = index, 0
        nbytes += size
    if first < len(sizes):
        yield slice(first, len(sizes))


def send_run(
    channel: Channel,
    request_id: int,
    views: Sequence[memoryview | None],
    masks: Sequence[bytes] = (),
    *,
    timeout_s: float,
    gate: BulkGate | None = None,
) -> None:
    """Send one run; None stands for a chunk that is lacking here. `timeout_s` is for each chunk. TransportError.

    With masks it is a run of patches.
    """
    run = ChunkRun(sizes=tuple(0 if view is None else view.nbytes for view in views), masks=tuple(masks))
    bulk = [view for view in views if view is not None]
    channel.send(Kind.CHUNK, request_id, run, bulk, deadline_s=timeout_s * len(views), gate=gate)


def receive_run(
    channel: Channel,
    replicas: Store,
    replica: IncomingReplica,
    indices: Sequence[int],
    *,
    take: Callable[[int], list[int]],
    damage: Damage,
    timeout_s: float,
) -> ReceivedRun:
    """Receive the next frame's chunks, the first of `indices`, each digested while it is hot.

    Args:
        take: Takes up to the given number of slots; chunks without one are skipped and count as bad.
        damage: Called with chunks whose digest differs from the replica's.
        timeout_s: For each chunk.

    Raises:
        TransportError: The connection failed, or the frame is not such a run. Earlier chunks are kept.
        CapacityError: From `take`.
        MemstoreError: The peer's own error, if that came instead.
    """
    sizes = receive_head(channel, len(indices), replicas.chunk_bytes, timeout_s=timeout_s).sizes
    return receive_bulk(channel, replicas, replica, indices, sizes, take=take, damage=damage, timeout_s=timeout_s)


def receive_bulk(
    channel: Channel,
    replicas: Store,
    replica: IncomingReplica,
    indices: Sequence[int],
    sizes: Sequence[int],
    *,
    take: Callable[[int], list[int]],
    damage: Damage,
    timeout_s: float,
) -> ReceivedRun:
    """Receive the chunks that are the bulk of the last frame, as `receive_run` does; size 0 for one that is lacking."""
    wanted = [(index, size) for index, size in zip(indices, sizes, strict=False) if size]
    numbers = take(len(wanted)) if wanted else []
    due = [(index, number, size) for (index, size), number in zip(wanted, numbers, strict=False)]
    digests: list[bytes] = []
    try:
        chunks = [(replicas.arena.view(number, size),) for _, number, size in due]
        channel.recv_bulk_digests(chunks, digests, timeout_s=timeout_s)
        channel.skip_bulk(timeout_s=timeout_s)
    finally:
        replicas.give_back(numbers[len(digests) :])
        arrived = [(*chunk, digest) for chunk, digest in zip(due, digests, strict=False)]
        bad = replicas.keep_chunks(replica, arrived)
        damage.add(chunks=len(bad))
    here = {index for index, *_ in arrived}.difference(bad)
    lacking = [index for index in indices[: len(sizes)] if index not in here]
    return ReceivedRun(len(sizes), lacking, sum(size for _, _, size, _ in arrived))


def receive_head(channel: Channel, count: int, chunk_bytes: int = BULK_BYTES_MAX, *, timeout_s: float) -> ChunkRun:
    """Return what the next frame names; ProtocolError unless it is 1 to `count` chunks of this size, and its bulk."""
    frame = channel.recv(timeout_s=timeout_s)
    if frame.kind is Kind.ERROR and not frame.bulk_bytes:
        raise decode_error(frame.data).rebuilt()
    if frame.kind is not Kind.CHUNK:
        raise ProtocolError(f"{channel.peer}: {frame.kind.name} where up to {count} chunks were due")
    run = decode_chunks(frame.data)
    sizes, bulk_bytes = run.sizes, sum(run.sizes)
    if not 0 < len(sizes) <= count:
        raise ProtocolError(f"{channel.peer}: a run of {len(sizes)} chunks where up to {count} were due")
    if bulk_bytes != frame.bulk_bytes or max(sizes) > chunk_bytes:
        raise ProtocolError(
            f"{channel.peer}: {frame.bulk_bytes} bytes of chunks of at most {chunk_bytes}, it names {sizes[:64]}"
        )
    return run

"""Reads of a shard, or of some chunks of one, seen from the process that reads (R7, R26, R27).

    asked --answered--> pinned --close--> given back
      |--refused, or too late--> over
      '--close--> given up: what is answered later is given back

The chunks lie in slots of this host, where a holder brought them from durable storage or has them anyway, or at other
hosts' holders, from which this process fetches them (`peer_chunks.py`). Where they go is the reader's: `CheckedStream`
copies or receives them into memory that it is given, and digests each. So a reader that was fenced, or too slow,
returns no bytes that others wrote meanwhile.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType

import numpy as np
from msgspec.structs import replace

from memstore.core.cluster.text import dropped_text
from memstore.core.format.layout import batches
from memstore.core.format.manifest import Manifest, decode_manifest, shard_digest
from memstore.core.wire.calls import AskSteps, ReadStep
from memstore.core.wire.orders import ChunkRange
from memstore.core.wire.rank_messages import ArrivedDamaged, Unpin
from memstore.core.wire.replies import ShardPlaced
from memstore.errors import IntegrityError, PeerTimeout, RecoveryError, StepDropped
from memstore.shell.arena.mapping import PageHold, runs
from memstore.shell.codec.interpreter import waiting
from memstore.shell.codec.verified_stream import CheckedStream, Targets, Views
from memstore.shell.rank.arena_view import RankMapping
from memstore.shell.rank.holder_link import HolderLink
from memstore.shell.rank.peer_chunks import Dialler, PeerChunks
from memstore.shell.tensors.slot_stream import address_of
from memstore.shell.threads import answer_of, is_answered
from recovery.inventory import ShardId

Range = tuple[int, int]  # first byte of the stream, nbytes
REPAIR_BYTES = 32 << 20  # asked for again at once, of what a reader could not fetch itself (D259)
REPAIR_TIMEOUT_S = 120.0  # for these to come from another copy; a holder that cannot reach one says so far earlier


class ShardRead:
    """One read of a rank's shard; a context manager, at whose end its slots are given back.

    Raises:
        PeerTimeout: From any wait, once `timeout_s` have passed since the first wait.
        RecoveryError: There is no such shard, or some chunk has no good copy.
        IntegrityError: Another shard came than was asked for.
    """

    def __init__(
        self, link: HolderLink, request: ReadStep, timeout_s: float, answer: ShardPlaced | None = None
    ) -> None:
        """Ask, and wait for nothing yet.

        Args:
            answer: What a get() that all ranks made was answered: nothing is asked.
        """
        self.link, self._timeout_s = link, timeout_s
        self._until_s: float | None = None
        self._manifest: Manifest | None = None
        self._slots: tuple[int | None, ...] = ()  # of the chunks that are here
        self._mapping: RankMapping | None = None  # of the arena that these slots are of
        self._hold: PageHold | None = None  # of these slots
        self._answer: ShardPlaced | None = None
        self._peers: PeerChunks | None = None  # those that this process fetches
        self._pin: int | None = None
        self._is_closed = False
        self._future: Future[ShardPlaced] = Future()
        if answer is not None:
            self._future.set_result(answer)
        else:
            self._future = link.call_soon(replace(request, reader=link.nonce))
        self._request = request

    def __enter__(self) -> ShardRead:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the slots, and of what still comes. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self.link.forget_call(self._future)
        if self._peers is not None:
            self.link.fetches.end(self._peers)
            if self._peers.damaged_count or self._peers.broken_frames:
                self.link.notify(ArrivedDamaged(self._peers.damaged_count, self._peers.broken_frames))
        if self._hold is not None:
            self._hold.close()
        if self._pin is not None:
            self.link.notify(Unpin(pin=self._pin))
        else:
            self._future.add_done_callback(self._give_back)  # it may just have come; later ones the link gives back

    def _give_back(self, future: Future[ShardPlaced]) -> None:
        if future.exception() is None:
            self.link.notify(Unpin(pin=future.result().pin))

    # -- what has come --------------------------------------------------------------------------

    def manifest(self) -> Manifest:
        """Wait for the manifest."""
        self.answer()
        assert self._manifest is not None
        return self._manifest

    def answer(self) -> ShardPlaced:
        """Wait until all that was asked for is here, or cannot be brought; return the controller's answer."""
        if self._answer is None:
            self._answer = self._take_answer(self._await_answer())
        return self._answer

    def take(self, wanted: Sequence[int]) -> Views:
        """Return these chunks; one that is not here as an empty view."""
        self.answer()
        return [(index, self._view(index)) for index in wanted]

    def remote(self, wanted: Sequence[int]) -> list[int]:
        """Return those of the chunks that this process fetches from other hosts."""
        self.answer()
        return [index for index in wanted if self._peers is not None and self._peers.has_source_of(index)]

    @contextlib.contextmanager
    def fetching(self, indices: Sequence[int], targets: Targets) -> Iterator[Callable[[], list[int]]]:
        """Fetch chunks in threads (see PeerChunks)."""
        if self._peers is None:
            yield lambda: list(indices)
        else:
            with self._peers.fetching(indices, targets) as fetched:
                yield fetched

    def bytes_of(self, spans: Iterable[tuple[int, int]]) -> list[bytearray]:
        """Return copies of parts (first byte, nbytes) of the stream, of chunks that were verified after the copy."""
        stream = CheckedStream(self.manifest(), self)
        found = [stream.read_later(offset, nbytes) for offset, nbytes in spans]
        stream.settle()
        return found

    def pin(self, views: Views, device: int) -> None:
        """Let a CUDA device read these where they lie."""
        self.link.leases.mapping.pin_at(
            [address_of(np.frombuffer(view, np.uint8)) for _, view in views if view.nbytes], device
        )

    def repair(self, wanted: Sequence[int], use: Callable[[Mapping[int, memoryview]], None]) -> None:
        """Have the holder digest its copies of these chunks again, and bring bad ones from elsewhere (R27)."""
        if self.link.interrupted:  # the fetch that these are left of was ended by it
            raise self.link.fenced_error()
        self.answer()
        sizes = [chunk.nbytes for chunk in self.manifest().chunks]
        for part in batches(sorted(wanted), sizes.__getitem__, REPAIR_BYTES):
            self._bring_again(part, use)

    def _bring_again(self, wanted: Sequence[int], use: Callable[[Mapping[int, memoryview]], None]) -> None:
        shard = self.manifest().shard
        chunks = tuple(ChunkRange(first, count) for first, count in runs(wanted))
        request = ReadStep(
            job=shard.job, step=shard.step, of_attempt=shard.attempt, rank=shard.rank, chunks=chunks, is_repair=True
        )
        with ShardRead(self.link, request, REPAIR_TIMEOUT_S) as again:
            try:
                again.answer()
            except RecoveryError:
                self._check_kept()
                raise
            if again.manifest() != self.manifest():
                raise IntegrityError(f"{shard} was put again while it was read: call get() again")
            use(dict(again.take(wanted)))

    def _check_kept(self) -> None:
        """Raise StepDropped if newer steps took the place of this one."""
        shard = self.manifest().shard
        rows = self.link.call(AskSteps(job=shard.job), REPAIR_TIMEOUT_S).steps
        kept = [(row.attempt, row.step) for row in rows if row.committed and row.copies]
        if not kept or max(kept) <= (shard.attempt, shard.step) or (shard.attempt, shard.step) in kept:
            return
        raise StepDropped(self.link.commands(dropped_text(shard.job, shard.step)))

    def _view(self, index: int) -> memoryview:
        assert self._mapping is not None
        if (slot := self._slots[index]) is not None:
            with contextlib.suppress(IndexError):  # named of a former arena, just before the holder took this one
                return self._mapping.view(slot, self.manifest().chunks[index].nbytes)
            return memoryview(b"")
        asked = self._request.chunks
        if asked is not None and not any(0 <= index - run.first < run.count for run in asked):
            raise IntegrityError(f"chunk {index} of {self.manifest().shard} is not among the chunks read")
        return memoryview(b"")

    # -- waiting --------------------------------------------------------------------------------

    def _await_answer(self) -> ShardPlaced:
        if self._until_s is None:
            self._until_s = time.monotonic() + self._timeout_s
        if not self._future.done():
            with waiting():
                is_there = is_answered(self._future, max(0.0, self._until_s - time.monotonic()))
            if not is_there:
                raise PeerTimeout(
                    f"read of job {self._request.job!r} was not answered within {self._timeout_s:g} s: is the "
                    f"controller running? ({self.link.commands('`memstore status`')}) If it is, raise timeout_s",
                    operation="read",
                    waited_s=self._timeout_s,
                    limit_s=self._timeout_s,
                )
        return answer_of(self._future)

    def _take_answer(self, answer: ShardPlaced) -> ShardPlaced:
        self._pin = answer.pin  # first: it is given back even if the rest is malformed
        manifest = decode_manifest(answer.manifest)
        self._check_asked(manifest.shard, answer)
        if len(answer.slots) != len(manifest.chunks):
            raise IntegrityError(
                f"{manifest.shard} has {len(manifest.chunks)} chunks, its holder named {len(answer.slots)} slots: "
                "call get() again"
            )
        self._manifest, self._slots, self._mapping = manifest, answer.slots, self.link.leases.mapping
        self._hold = self._mapping.open().reading()  # their pages stay while this reads (R9)
        self._hold.add(slot for slot in answer.slots if slot is not None)
        if rows := self.link.fetches.reachable(answer.elsewhere):
            digest = shard_digest(answer.manifest)
            dialler = Dialler(self.link.folder, self.link.welcome.store)
            self._peers = PeerChunks(dialler, manifest, digest, rows, self.link.fetches.networks_of(rows))
            self.link.fetches.begin(self._peers)
        return answer

    def _check_asked(self, shard: ShardId, answer: ShardPlaced) -> None:
        """Refuse another shard than the one that was asked for, or than the one that the answer says it is."""
        asked = self._request
        step = answer.step if asked.step is None else asked.step
        attempt = answer.attempt if asked.of_attempt is None else asked.of_attempt
        wanted = ShardId(asked.job, attempt, step, asked.rank)
        if shard != wanted:
            raise IntegrityError(f"asked for {wanted}, and {shard} came: read again")


def chunk_runs(ranges: Iterable[Range], chunk_bytes: int) -> list[list[int]]:
    """Return the chunks that ranges touch as [first, count] runs.

    >>> chunk_runs([(0, 1), (5, 4), (40, 0)], 4)
    [[0, 3]]
    """
    spans = sorted((start // chunk_bytes, (start + size - 1) // chunk_bytes) for start, size in ranges if size)
    runs: list[list[int]] = []
    for first, last in spans:  # never chunk by chunk: the ranges may come from hostile metadata
        end = sum(runs[-1]) if runs else -1
        if first > end:
            runs.append([first, last + 1 - first])
        else:
            runs[-1][1] = max(end, last + 1) - runs[-1][0]
    return runs


class ShardRanges:
    """Reads of one job through one link; `attempt` chooses among steps of one number, None leaves it to the lineage."""

    def __init__(self, link: HolderLink, job: str, timeout_s: float = 600.0, attempt: int | None = None) -> None:
        self.link, self.job, self.timeout_s, self.attempt = link, job, timeout_s, attempt

    def ask(
        self,
        step: int | None,
        rank: int,
        ranges: Iterable[Range] = (),
        chunk_bytes: int = 1,
        *,
        attempt: int | None = None,
    ) -> ShardRead:
        """Begin to bring ranges of a shard of `chunk_bytes` here; no ranges: its manifest.

        `attempt` names who put the step, where several lineages have one of that number; None: the one of all reads.
        """
        attempt = self.attempt if attempt is None else attempt
        chunks = tuple(ChunkRange(first, count) for first, count in chunk_runs(ranges, chunk_bytes))
        request = ReadStep(job=self.job, step=step, of_attempt=attempt, rank=rank, chunks=chunks)
        return ShardRead(self.link, request, self.timeout_s)

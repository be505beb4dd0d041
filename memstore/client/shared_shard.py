"""Shared shards: ranks that name one shard hold equal state, so some of them put it and all get it back (R34).

put     a writer stores [shared | own], any other rank its own alone
get     a rank's own from its own shard, the shared state from a writer's: the same step, verified by the same round
"""

from __future__ import annotations

import contextlib
import logging
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from memstore.client.restore import OpenShard
from memstore.core.format.manifest import LAYOUT_BYTES_MAX, Manifest
from memstore.core.format.shared_layout import ShardPart, SharedShardLayout, extents_in
from memstore.core.wire.calls import Get, ReadStep, ReportDiffering
from memstore.core.wire.rank_messages import ShardDiffers
from memstore.core.wire.replies import Joined, ShardPlaced, StepAgreed
from memstore.errors import ManifestMismatch, MemstoreError, RecoveryError, UnsupportedState
from memstore.shell.codec.decode import check_into
from memstore.shell.codec.encode import StatePlan, plan_state
from memstore.shell.codec.interpreter import copying
from memstore.shell.rank.collective import collective
from memstore.shell.rank.holder_link import HolderLink
from memstore.shell.rank.shard_read import ShardRanges, ShardRead
from memstore.shell.tensors.placed_sources import PlacedSources

log = logging.getLogger("memstore")
COMPARED_CHUNKS_MAX = 8  # of those that differ, whose tensors are named
NAMES_MAX = 10
NAMING_S = 30.0
# Reads the shard of one of these ranks, of the same step: for all ranks of a host the same one. A context manager.
Read = Callable[[Sequence[int]], ShardRead]


@dataclass(frozen=True)
class Resized:
    """Where the state of a shard lies in a step that another number of ranks put."""

    step: int
    attempt: int
    writer: int  # the rank whose shard has it
    agreed: StepAgreed | None  # None: of get(step=), on which no rank waits for another
    shard: SharedShard  # this rank's


@dataclass(frozen=True)
class SharedShard:
    """What this rank shares with others, in the present attempt."""

    shard: int
    shards: int
    writers: tuple[int, ...]  # ranks that copy this shard's state
    rank: int
    writers_by_shard: tuple[tuple[int, ...], ...] = ()  # rank 0 keeps them for all

    @classmethod
    def joined(cls, answer: Joined) -> SharedShard | None:
        """Decode the answer of a join or a rewind; None if the launch named no shards."""
        place = answer.shared_shard
        if place is None:
            return None
        return cls(place.shard, place.shards, place.writers, answer.rank, place.writers_by_shard)

    @property
    def is_writer(self) -> bool:
        """Whether put() copies the shared state on this rank."""
        return self.rank in self.writers

    def plan(
        self, state: Any, rank_state: Any, chunk_bytes: int, plan: Callable[[object, str], StatePlan] = plan_state
    ) -> StatePlan:
        """Lay out the state that this rank stores, without copying it; a state that it does not store is not inspected.

        The shared part fills its last chunk, so that its chunks are equal on all ranks of the shard.

        Args:
            plan: Lays out one of both, by its name.

        Raises:
            UnsupportedState: As plan_state.
        """
        shared = plan(state, "state") if self.is_writer else None
        mine = plan(rank_state, "rank_state")
        count = -(-shared.nbytes // chunk_bytes) if shared is not None else 0
        start = count * chunk_bytes
        layout = SharedShardLayout(
            self.shard,
            self.shards,
            self.writers,
            self.writers_by_shard,
            ShardPart(shared.layout, 0, shared.nbytes) if shared is not None else None,
            ShardPart(mine.layout, count, mine.nbytes),
        ).encode(start + mine.nbytes)
        if len(layout) > LAYOUT_BYTES_MAX:
            raise UnsupportedState(
                f"the plain objects of the state and of rank_state= take {len(layout)} bytes and the limit is "
                f"{LAYOUT_BYTES_MAX}; put long lists of numbers as tensors or numpy arrays. Nothing was copied."
            )
        placed = PlacedSources.of(
            (*(shared.placed if shared is not None else ()), *((start + at, source) for at, source in mine.placed))
        )
        parts = (*((("state", 0, shared.layout),) if shared is not None else ()), ("rank_state", start, mine.layout))
        return StatePlan(layout, start + mine.nbytes, placed, count, parts)

    # -- another world size ---------------------------------------------------------------------

    def find_resized(self, link: HolderLink, request: Get) -> Resized | None:
        """Return where the state lies of a step that another number of ranks put, under as many shards (R27, R34).

        Args:
            request: The get() that could not give this rank a shard; all ranks call this then.
        """
        timeout_s = request.timeout_s
        ranges = ShardRanges(link, link.job, timeout_s)
        found = self._writer_elsewhere(link, ranges, request.step)
        agreed: StepAgreed | None = None
        if found is not None and request.step is None:
            reply = collective(link, replace(request, is_agreement=True, then_loads=True), timeout_s)
            if not isinstance(reply, StepAgreed):
                return None
            agreed = reply
            if (agreed.step, agreed.attempt) != found[:2]:  # a late host brought a newer one, of other writers
                found = self._writer_elsewhere(link, ranges, agreed.step, agreed.attempt)
        return None if found is None else Resized(*found, agreed, self)

    def load_resized(
        self, link: HolderLink, found: Resized, into: Any, timeout_s: float
    ) -> tuple[OpenShard, ShardPlaced, Any]:
        """Return the writer's shard, the controller's answer for the step, and the shared state."""
        wanted = ReadStep(job=link.job, step=found.step, of_attempt=found.attempt, rank=found.writer)
        with copying(), ShardRead(link, wanted, timeout_s) as read:
            staged = OpenShard(read, read.manifest())
            part = shared_part(staged, self.shard, self.shards)
            _check(part, into)
            with staged.naming_partial_writes():
                state = _load(staged, part, into)
                return staged, _of_all(read.answer(), found.agreed), state

    def _writer_elsewhere(
        self, link: HolderLink, ranges: ShardRanges, step: int | None, attempt: int | None = None
    ) -> tuple[int, int, int] | None:
        """Return a step, its attempt, and a rank that copied this shard in it; None if none can have (R27)."""
        with ranges.ask(step, 0, attempt=attempt) as read:
            layout, answer = SharedShardLayout.decode(read.manifest()), read.answer()
        if layout is None or layout.shards != self.shards or not layout.writers_by_shard:
            return None
        return answer.step, answer.attempt, _chosen(link, layout.writers_by_shard[self.shard])

    # -- writers that differ ----------------------------------------------------------------------

    def name_differing(self, link: HolderLink, event: ShardDiffers, wait: Callable[[int], object]) -> None:
        """Look, in a thread of its own, which tensors two writers put differently, and report it to the controller.

        Args:
            event: The holder's: the step, the other writer, chunks that differ; none if they are equal again.
            wait: Returns when a step is committed, else raises: only then can it be read.
        """
        threading.Thread(
            target=self._name_differing, args=(link, event, wait), name="memstore-differing", daemon=True
        ).start()

    def _name_differing(self, link: HolderLink, event: ShardDiffers, wait: Callable[[int], object]) -> None:
        step, other_rank, names = event.step, event.other_rank, list[str]()
        try:
            if event.count:
                with contextlib.suppress(MemstoreError, TimeoutError):  # reported all the same, without names
                    wait(step)
                    names = self._differing_names(link, event)
                where = ", ".join(names) or f"{event.count} chunks"
                both = f"ranks {self.rank} and {other_rank}"
                log.warning("memstore %s: %s differ at step %d in %s", link.job, both, step, where)
            report = ReportDiffering(
                job=link.job,
                attempt=event.attempt,
                step=step,
                ranks=(self.rank, other_rank),
                chunks=event.count,
                names=tuple(names),
            )
            link.call(report, NAMING_S)
        except MemstoreError as error:
            log.warning("memstore %s: step %d: that ranks differ could not be reported: %s", link.job, step, error)

    def _differing_names(self, link: HolderLink, event: ShardDiffers) -> list[str]:
        ranges = ShardRanges(link, link.job, NAMING_S)
        chunks = list(event.chunks[:COMPARED_CHUNKS_MAX])
        with contextlib.ExitStack() as stack:
            both = []
            for rank in (self.rank, event.other_rank):
                with ranges.ask(event.step, rank, attempt=event.attempt) as known:
                    size, count = known.manifest().chunk_bytes, len(known.manifest().chunks)
                wanted = [(chunk * size, 1) for chunk in chunks if chunk < count]
                read = ranges.ask(event.step, rank, wanted, size, attempt=event.attempt)
                both.append(stack.enter_context(read))
            return differing_names(both[0], both[1], chunks)[:NAMES_MAX]


def _of_all(read: ShardPlaced, agreed: StepAgreed | None) -> ShardPlaced:
    """Return the result of a read, with the step's fields for all ranks."""
    report = agreed.report if agreed is not None else None
    return read if report is None else replace(read, report=report, verdict=report.verdict, why=report.why)


def differing_names(mine: ShardRead, theirs: ShardRead, chunks: list[int]) -> list[str]:
    """Return the tensors whose bytes in these chunks differ; if the layouts differ, all tensors in these chunks."""
    layout, other = SharedShardLayout.decode(mine.manifest()), SharedShardLayout.decode(theirs.manifest())
    if layout is None or layout.shared is None:
        return []
    size = mine.manifest().chunk_bytes
    extents = list(extents_in(layout.shared.layout, layout.shared.first_chunk, chunks, size))
    if other is None or other.shared is None or other.shared.layout != layout.shared.layout:
        return [name for extent in extents for name in extent.names]
    parts = [
        (number, start, end - start)
        for number, extent in enumerate(extents)
        for chunk in chunks
        if (start := max(extent.offset, chunk * size)) < (end := min(extent.offset + extent.nbytes, (chunk + 1) * size))
    ]
    spans = [(start, nbytes) for _, start, nbytes in parts]
    pairs = zip(parts, mine.bytes_of(spans), theirs.bytes_of(spans), strict=True)
    unequal = {number for (number, _, _), one, two in pairs if one != two}
    return [name for number, extent in enumerate(extents) if number in unequal for name in extent.names]


# -- getting ------------------------------------------------------------------------------------------


def check_shard(manifest: Manifest, into: Any, rank_state_into: Any, now: SharedShard | None = None) -> None:
    """Compare a rank's `into` with its shard, but for shared state that the shard does not hold.

    Args:
        now: The rank's shared shard in the present attempt.

    Raises:
        ManifestMismatch, ProtocolError: As check_into; or the rank's number had another shard in that step.
    """
    layout = SharedShardLayout.decode(manifest)
    if layout is None:
        if rank_state_into is not None:
            raise ManifestMismatch(
                f"step {manifest.shard.step} was put without shard_rank=: there is nothing for rank_state_into="
            )
        if into is not None:
            check_into(manifest.layout, into)
        return
    if now is not None and (layout.shard, layout.shards) != (now.shard, now.shards):
        shard = manifest.shard
        raise ManifestMismatch(
            f"step {shard.step} was put with shard_rank={layout.shard}, shard_count={layout.shards} on rank "
            f"{shard.rank}, and this launch has shard_rank={now.shard}, shard_count={now.shards}: connect as then, or "
            "read the shard of any rank with get(step, rank=)"
        )
    if into is not None and layout.shared is not None:
        check_into(layout.shared.layout, into)
    if rank_state_into is not None:
        check_into(layout.own.layout, rank_state_into, "rank_state")


def reader_of(link: HolderLink, manifest: Manifest, timeout_s: float) -> Read:
    """Return what reads other ranks' shards of the step that a shard is of."""
    shard = manifest.shard
    asked = ReadStep(job=shard.job, step=shard.step, of_attempt=shard.attempt, rank=shard.rank)
    return lambda ranks: ShardRead(link, replace(asked, rank=_chosen(link, ranks)), timeout_s)


def _chosen(link: HolderLink, ranks: Sequence[int]) -> int:
    """Return the rank whose shard all of this host's ranks read, so that it comes here once; hosts differ."""
    return ranks[zlib.crc32(link.folder.name.encode()) % len(ranks)]


def load_shared_shard(
    staged: OpenShard, layout: SharedShardLayout, others: Read, into: Any, rank_state_into: Any
) -> tuple[Any, Any]:
    """Return shared and own state of a rank's shard; both are checked before either is written (R26).

    Raises:
        RecoveryError: The writer's shard is not what this rank's says it is.
    """
    source, shared = staged, layout.shared
    with contextlib.ExitStack() as stack:
        if shared is None:
            read = stack.enter_context(others(layout.writers))
            source = OpenShard(read, read.manifest(), staged)
            shared = shared_part(source, layout.shard, layout.shards)
        _check(shared, into)
        _check(layout.own, rank_state_into, "rank_state")
        rank_state = _load(staged, layout.own, rank_state_into, "rank_state")
        return _load(source, shared, into), rank_state


def shared_part(staged: OpenShard, shard: int, shards: int) -> ShardPart:
    """Return where the shared state of a writer's shard lies. RecoveryError if it has none of that shard."""
    found = SharedShardLayout.decode(staged.manifest)
    if found is None or found.shared is None or (found.shard, found.shards) != (shard, shards):
        named = f"a copy of the state of shard {shard} of {shards}"
        raise RecoveryError(f"{staged.manifest.shard} is named as {named} and has none")
    return found.shared


def _check(part: ShardPart, into: Any, name: str = "state") -> None:
    """Raise ManifestMismatch before anything is written."""
    if into is not None:
        check_into(part.layout, into, name)


def _load(staged: OpenShard, part: ShardPart, into: Any, name: str = "state") -> Any:
    return staged.build(part.layout, into, offset=part.first_chunk * staged.manifest.chunk_bytes, name=name)

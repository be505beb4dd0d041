"""The room of a replica store: slots with memory behind them, claimed up to a limit as jobs reserve (R9, R10)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from memstore.core.arena.memory_ports import SlotMemory
from memstore.core.arena.replica_index import JobRoom, ReplicaIndex
from memstore.core.arena.slot_table import PeerShare
from memstore.errors import CapacityError

_SIZES = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"))


@dataclass(frozen=True)
class Limit:
    """The most that one arena may claim."""

    nbytes: int
    why: str = "arena_bytes"  # what set it
    remedies: str = "raise arena_bytes"  # where it is reached
    admit: Callable[[int, int], str | None] = lambda asked_bytes, claimed_bytes: None
    """Says why this machine has no room for so many bytes, with so many claimed; None if it has."""
    quotas: Mapping[str, int] = field(default_factory=dict)
    """The most bytes that a job may reserve, by name; "" stands for every other job."""


LISTED_MAX = 8  # jobs in an error that a person reads


class ClaimedMemory:
    """Grows and empties one arena; `lock` is held meanwhile, and never the lock of the index for long.

    Args:
        arena: The arena whose pages are claimed and given back.
        replica_index: The index of the stored replicas, under `index_lock`.
        lock: Held while the arena grows or shrinks.
        flush: Records which slots are free; called under `index_lock`.
        chunk_bytes: The size of a slot.
        limit: The most that may be claimed.
    """

    def __init__(
        self,
        arena: SlotMemory,
        replica_index: ReplicaIndex,
        index_lock: AbstractContextManager[object],
        lock: AbstractContextManager[object],
        flush: Callable[[], None],
        *,
        chunk_bytes: int,
        limit: Limit,
    ) -> None:
        self._arena, self._index, self._index_lock, self._flush = arena, replica_index, index_lock, flush
        self._chunk_bytes, self.limit = chunk_bytes, limit
        self.overlooked: set[int] = set()  # slots whose readers outlived their pins: one may still look at them (R7)
        self.lock = lock

    def claim(self, job: str, share: PeerShare) -> None:
        """Grow the arena to hold the share and reserve it; CapacityError with all reservations if it cannot.

        A share that was refused elsewhere shrinks again, and so does that of an ended job: slots that no job reserves
        then are given back. Peers' copies that only moved to another host come again, and their room stays.
        """
        with self.lock:
            with self._index_lock:
                needed, before = self._index.slots_needed(job, share), self._index.shares.get(job)
                prepared, beside = self._index.prepared.get(job), self._index.beside(job, share)
            with self._naming_reservations(job, share):
                self._check_quota(job, share)
                try:
                    self.grow_to(needed + beside)
                except CapacityError:  # then puts wait for slots until processes of before, or a step, are gone
                    self.grow_to(needed)
            with self._index_lock:
                self._index.set_share(job, share)
        shrinks = before is not None and (not share.total or sum(share.ranks.values()) < sum(before.ranks.values()))
        if shrinks or (prepared is not None and share.total < prepared.total):
            self.release()

    def _check_quota(self, job: str, share: PeerShare) -> None:
        """Raise CapacityError for more than the job's quota; room for more would only keep others from theirs."""
        asked_bytes = share.total * self._chunk_bytes
        quota_bytes = self.limit.quotas.get(job, self.limit.quotas.get(""))
        if quota_bytes is not None and asked_bytes > quota_bytes:
            raise CapacityError(
                f"job {job!r} asks for {gib(asked_bytes)} of this host, and its quota is {gib(quota_bytes)}; do one of:"
                " lower its keep_steps, in_flight or replicas, or take pins back · raise the quota: `memstore down`, "
                f"then `memstore up --quota {job}=SIZE` with the other quotas (what is stored stays)",
                asked_bytes=asked_bytes,
                limit_bytes=quota_bytes,
            )

    @contextlib.contextmanager
    def _naming_reservations(self, job: str = "", share: PeerShare | None = None) -> Iterator[None]:
        """Say in a CapacityError raised in here what the job asks for, and below it what every job has reserved."""
        try:
            yield
        except CapacityError as exc:
            asked = f". {self._asked(share)}" if share is not None else ""
            with self._index_lock:
                rows = self._index.rooms()
            table = reservations_text(rows, job, self._chunk_bytes)
            raise CapacityError(f"{exc}{asked}{table}", **vars(exc)) from exc

    def _asked(self, share: PeerShare) -> str:
        size = self._chunk_bytes
        ranks = ", ".join(f"{rank}: {gib(slots * size)}" for rank, slots in sorted(share.ranks.items())[:8])
        return (
            f"The job reserves {share.versions} versions for each rank here (rank {ranks or '-'}) and "
            f"{gib(share.peer_slots * size)} for copies of other hosts' ranks"
        )

    def keep_shares(self, jobs: Collection[str]) -> None:
        """Give back room of jobs that the controller does not know, if no shard of them is here.

        A controller that died before it recorded the job left such a claim.
        """
        index = self._index
        with self._index_lock:
            incoming = {replica.shard.job for replica in index.incoming.values()}
            known = {*jobs, *incoming, *(shard.job for shard, _ in index.shards)}
            unknown = [job for job in {**index.shares, **index.prepared} if job not in known]
            for job in unknown:
                index.shares.pop(job, None)
                index.end_preparation(job)
        if unknown:
            self.release()

    def prepare(self, job: str, share: PeerShare) -> None:
        """Grow for a share that may be claimed later, or for a version less; CapacityError if that is beyond the limit.

        Others may claim the slots; until then `release` leaves them.
        """
        self._check_quota(job, share)
        table = self._index.table
        with self._index_lock:
            self._index.prepared[job] = share
            missing = self._index.slots_needed(job, share) - table.claimed_count
            count = len(table.free) + missing
        try:
            self.ensure_free(count)
        except CapacityError:  # then the first put claims less, if more is in flight than it needs
            self.ensure_free(count - share.of_version(share.total))

    def ensure_free(self, count: int) -> None:
        """Make sure `count` slots are free for staging (R10); if they are free, do not wait for others' growth."""
        table = self._index.table
        while len(table.free) < count:
            with self.lock:
                with self._index_lock:
                    needed = table.claimed_count + count - len(table.free)
                with self._naming_reservations():
                    self.grow_to(needed)

    def grow_to(self, slots_count: int) -> None:
        """Claim pages until there are `slots_count` slots; the caller holds `lock`.

        Raises:
            CapacityError: They are beyond the limit, or the machine has no memory for them.
        """
        arena, table, chunk_bytes = self._arena, self._index.table, self._chunk_bytes
        missing = slots_count - table.claimed_count
        if missing <= 0:
            return
        claimed_bytes, asked_bytes = table.claimed_count * chunk_bytes, slots_count * chunk_bytes
        if asked_bytes > self.limit.nbytes:
            raise CapacityError(
                f"the arena needs {gib(asked_bytes)}, may take {gib(self.limit.nbytes)} ({self.limit.why}), has "
                f"{gib(claimed_bytes)} now; do one of: {self.limit.remedies}",
                asked_bytes=asked_bytes,
                limit_bytes=self.limit.nbytes,
            )
        refusal = self.limit.admit(asked_bytes, claimed_bytes)
        if refusal is not None:
            raise CapacityError(refusal, asked_bytes=asked_bytes)
        unbacked = table.unbacked[:missing]
        if unbacked:
            arena.fill(unbacked)
            with self._index_lock:
                table.fill(unbacked)
        if missing > len(unbacked):
            arena.grow(arena.slots_count + missing - len(unbacked))
            with self._index_lock:
                table.grow(arena.slots_count)

    def release(self) -> None:
        """Give back the pages of free slots that no job has reserved, but for those that some process still needs."""
        with self.lock:
            with self._index_lock:
                self._flush()  # free slots are recorded as free before they lose their bytes
                chosen = self._index.table.empty(self._index.spare_count(), self.overlooked)
            kept = self._arena.give_back(chosen)
            with self._index_lock:
                self._index.table.fill(kept)


def reservations_text(rows: Sequence[JobRoom], asking: str, chunk_bytes: int) -> str:
    """Return a table of what jobs have, below the way to free it; "" if there is none but the one that asks."""
    if all(row.job == asking for row in rows):
        return ""
    cells = [("JOB", "RESERVED", "HOLDS", "PROCESSES HERE")]
    for row in rows[:LISTED_MAX]:
        pids = ", ".join(map(str, row.pids[:3])) + (f" and {len(row.pids) - 3} more" if len(row.pids) > 3 else "")
        sizes = gib(row.reserved_count * chunk_bytes), gib(row.held_count * chunk_bytes)
        cells.append((row.job, *sizes, f"pid {pids}" if pids else "none"))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    more = [f"and {len(rows) - LISTED_MAX} more"] if len(rows) > LISTED_MAX else []
    freed = ". `memstore rm JOB` gives back what one that is over has, steps included"
    return "\n".join([freed, "Reserved on this host:", *lines, *more])


def gib(nbytes: int) -> str:
    """Return a size for people."""
    size, unit = next((kind for kind in _SIZES if abs(nbytes) >= kind[0]), _SIZES[-1])
    return f"{nbytes / size:.1f} {unit}"

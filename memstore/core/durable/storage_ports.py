"""What the durable part of the store needs from the outside, as Protocols. Pure.

`memstore/shell/durable/tier.py` is the tier; it stands on named files that appear whole, of which there are two kinds:
`directory.py` and `objects.py`. Read `slice_format.py` and `marker_format.py` for the two formats.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

from memstore.core.durable.marker_format import MarkerRecord
from recovery.inventory import DurableMarker, ShardId, ShardSpec, StepId

Wrote = Literal["written", "there", "stopped"]


class DurableTier(Protocol):
    """Storage that outlives every host's memory (R31). All calls block; none runs on a training thread.

    Errors, for all methods alike: ConfigError (not writable, not there), CapacityError (full),
    IntegrityError (missing, truncated or altered bytes), TransportError (anything that may pass, such as an
    I/O error or a stale handle: no evidence about the bytes in the sense of R25).
    """

    key: str  # name of the key that it writes under, "" without one

    def write_slice(
        self, shard: ShardId, spec: ShardSpec, number: int, manifest: bytes, chunks: Iterable[bytes | memoryview], *,
        should_stop: Callable[[], bool],
    ) -> int | None:  # fmt: skip
        """Write one slice of a shard so that it is there whole or not at all; writing it again is fine.

        Args:
            spec: Says into which slices the shard is cut (`slice_format.slice_range`).
            manifest: Opaque; its xxh3-128 is the shard's digest (R14). Stored with slice 0.
            chunks: Those of the slice, in order.
            should_stop: Asked between chunks; True abandons the write and leaves nothing behind.

        Returns:
            The bytes stored when the slice is durable, None when it was abandoned.
        """

    def write_marker(self, job: str, marker: DurableMarker, lineage: Mapping[str, Any]) -> None:
        """Declare a step whole, after checking that every slice of every part it lists is there (R31).

        Args:
            lineage: `attempt`, `parent_attempt` and `parent_step` (the last two None at the root), and
                anything else JSON can hold that the caller wants back.

        Raises:
            IntegrityError: a slice is missing, or a sound marker of other bytes is there already.
        """

    def markers(self, job: str) -> tuple[list[DurableMarker], list[str]]:
        """Return the job's markers, oldest first, and one sentence per marker that could not be trusted."""

    def marker_records(self, job: str) -> tuple[list[MarkerRecord], list[str]]:
        """Return what `markers` returns, with each step's lineage."""

    def lacks(self, job: str, step: StepId) -> str:
        """Return which slices of its marker a step lacks, "" if each is there in its size, under any key."""

    def jobs(self) -> list[str]:
        """Return the names of all jobs that have anything stored, sorted."""

    def read_manifest(self, shard: ShardId, spec: ShardSpec) -> bytes:
        """Return the shard's manifest, or raise DigestMismatch if it is not the one `spec.digest` names."""

    def read_chunk_into(self, shard: ShardId, spec: ShardSpec, index: int, view: memoryview) -> None:
        """Fill `view` with chunk `index`; its length must be the chunk's. The caller checks the digest."""

    def remove_step(self, job: str, step: StepId, *, only_unmarked: bool = False) -> None:
        """Remove a step, the marker first, so that a crash leaves slices without a marker, never a marker without
        slices.
        """

    def remove_job(self, job: str) -> None:
        """Remove all of a job; files that are not memstore's are left alone."""

    def probe(self) -> None:
        """Raise ConfigError, with place, cause and remedy, unless a file can be written here."""

    def sweep(self, job: str, keep: Collection[StepId]) -> tuple[StepId, ...]:
        """Remove temporary files and unmarked steps that no live write can own; return the steps removed.

        Steps in `keep`, and steps newer than all of `keep`, are not touched: they may be under way.
        With an empty `keep` every unmarked step goes. A step whose marker is damaged stays for a person to see.
        """


class DurableReader(Protocol):
    """One file or object, open for reading."""

    nbytes: int

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill `view` from `offset`; an end before that is an IntegrityError."""


class DurableFiles(Protocol):
    """Named files under job/attempt/step that appear whole or not at all. Errors are those of `DurableTier`."""

    where: str  # for messages

    def path(self, job: str, *names: object) -> str:
        """Return the place of a job, attempt, step or file, for messages; ConfigError for other names."""

    def write(
        self, job: str, step: StepId, name: str, pieces: Sequence[bytes | memoryview], *,
        should_stop: Callable[[], bool], is_once: bool,
    ) -> Wrote:  # fmt: skip
        """Put a file in place; with `is_once` only if none of that name is there, as far as the storage can tell."""

    def opened(self, job: str, step: StepId, name: str) -> AbstractContextManager[DurableReader]:
        """Open a file for reading; one that is gone is an IntegrityError."""

    def names(self, job: str, step: StepId) -> set[str]:
        """Return the files of a step; none if there is no such step."""

    def has(self, job: str, step: StepId, name: str) -> bool:
        """Say whether the step has such a file; cheaper than `names`."""

    def steps(self, job: str) -> tuple[list[StepId], list[str]]:
        """Return the job's steps, oldest first, and the entries that are in the way of one."""

    def jobs(self) -> list[str]:
        """Return the names of all jobs, sorted."""

    def remove_step(self, job: str, step: StepId, first: str) -> None:
        """Remove a step's files, `first` first and durably so; missing files are fine."""

    def remove_job(self, job: str) -> None:
        """Remove the rest of a job without steps."""

    def tidy(self, job: str, step: StepId) -> None:
        """Remove the partial files of a crash."""

    def probe(self) -> None:
        """See `DurableTier.probe`."""

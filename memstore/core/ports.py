"""What the durable part of the store needs from the outside, as a Protocol. Pure.

Every implementation passes `tests/test_durable_directory.py`; the first one is
`memstore/shell/durable_directory.py`. Read `durable_part.py` and `durable_marker.py` for the two file formats.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol

from memstore.core.durable_marker import MarkerRecord
from recovery.inventory import DurableMarker, ShardId, StepId


class DurableTier(Protocol):
    """Storage that outlives every host's memory (R31). All calls block; none runs on a training thread.

    Errors, for all methods alike: ConfigError (not writable, not there), CapacityError (full),
    IntegrityError (missing, truncated or altered bytes), TransportError (anything that may pass, such as an
    I/O error or a stale handle: no evidence about the bytes in the sense of R25).
    """

    def write_part(
        self, shard: ShardId, manifest: bytes, chunks: Iterable[memoryview], *, should_stop: Callable[[], bool]
    ) -> bool:
        """Write one shard so that it is there whole or not at all; writing the same shard again is fine.

        Args:
            shard: Names the part.
            manifest: Opaque; its xxh3-128 is the shard's digest (R14).
            chunks: In order; all of one size but the last, which may be shorter.
            should_stop: Asked between chunks; True abandons the write and leaves nothing behind.

        Returns:
            True when the part is durable, False when it was abandoned.

        Raises:
            IntegrityError: the step has a marker that names other bytes for this rank.
        """

    def write_marker(self, job: str, marker: DurableMarker, lineage: Mapping[str, Any]) -> None:
        """Declare a step whole, after checking that every part it lists is there with that digest (R31).

        Args:
            lineage: `attempt`, `parent_attempt` and `parent_step` (the last two None at the root), and
                whatever else JSON can hold that the caller wants back.
        """

    def markers(self, job: str) -> tuple[list[DurableMarker], list[str]]:
        """Return the job's markers, oldest first, and one sentence per marker that could not be trusted."""

    def marker_records(self, job: str) -> tuple[list[MarkerRecord], list[str]]:
        """Return what `markers` returns, with each step's lineage."""

    def jobs(self) -> list[str]:
        """Return the names of all jobs that have anything stored, sorted."""

    def read_manifest(self, shard: ShardId, digest: str) -> bytes:
        """Return the shard's manifest, or raise DigestMismatch if it is not the one `digest` names."""

    def read_chunk_into(self, shard: ShardId, index: int, view: memoryview) -> None:
        """Fill `view` with chunk `index`; its length must be the chunk's. The caller checks the digest."""

    def remove_step(self, job: str, step: StepId) -> None:
        """Remove a step, the marker first, so that a crash leaves an unmarked step and never a hollow one."""

    def remove_job(self, job: str) -> None:
        """Remove all of a job; files that are not memstore's are left alone."""

    def probe(self) -> None:
        """Raise ConfigError, with path, errno and remedy, unless a file can be written and synced here."""

    def sweep(self, job: str, keep: Collection[StepId]) -> tuple[StepId, ...]:
        """Remove temporary files and unmarked steps that no live write can own; return the steps removed.

        Steps in `keep`, and steps newer than all of `keep`, are not touched: they may be under way.
        With an empty `keep` every unmarked step goes. A step whose marker is damaged stays for a person to see.
        """

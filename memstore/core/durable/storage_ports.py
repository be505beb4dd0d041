"""Named files that appear whole, on which the durable tier stands, as Protocols: directories and objects. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Literal, Protocol

from recovery.inventory import StepId

Wrote = Literal["written", "there", "stopped"]


class DurableReader(Protocol):
    """One file or object, open for reading."""

    nbytes: int

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill `view` from `offset`; an end before that is an IntegrityError."""


class DurableFiles(Protocol):
    """Named files under job/attempt/step that appear whole or not at all.

    Errors, for all methods alike: ConfigError (not writable, not there), CapacityError (full), IntegrityError (missing,
    truncated or altered bytes), TransportError (anything that may pass, such as an I/O error or a stale handle: no
    evidence about the bytes in the sense of R25).
    """

    where: str  # for messages

    def path(self, job: str, *names: object) -> str:
        """Return the place of a job, attempt, step or file, for messages; ConfigError for other names."""

    def write(
        self,
        job: str,
        step: StepId,
        name: str,
        pieces: Sequence[bytes | memoryview],
        *,
        should_stop: Callable[[], bool],
        is_once: bool,
    ) -> Wrote:
        """Put a file in place; with `is_once` only if none of that name is there, as far as the storage can tell."""

    def opened(self, job: str, step: StepId, name: str) -> AbstractContextManager[DurableReader]:
        """Open a file for reading; one that is gone is an IntegrityError."""

    def names(self, job: str, step: StepId) -> set[str]:
        """Return the files of a step; none if there is no such step."""

    def has(self, job: str, step: StepId, name: str) -> bool:
        """Say whether the step has such a file; cheaper than `names`."""

    def steps(self, job: str) -> tuple[list[StepId], list[str]]:
        """Return the job's steps, oldest first, and the entries that are in the way of one."""

    def remove(self, job: str, step: StepId, names: Collection[str]) -> None:
        """Remove files of a step, durably so, and the step if nothing is left; missing files are fine."""

    def tidy(self, job: str, step: StepId) -> None:
        """Remove the partial files of a crash."""

    def probe(self, name: str = "", *, is_kept: bool = False) -> None:
        """Write a file, read it back and remove it, unless it is to be kept; of a name of its own if none is given.

        ConfigError, with place, cause and remedy: it cannot be written here, or reads otherwise.
        """

    def probes(self) -> set[str]:
        """Return the names of the probes that are there: hosts of one storage see one another's."""

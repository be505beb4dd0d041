"""Durable files in a directory, local or shared (R31): names are those of `memstore/core/durable/paths.py`.

Every file appears whole, by temporary file, fsync, rename and fsync of the folder. Below the root no symbolic link is
followed, and no name that memstore would not write is opened. Files and folders are their owner's alone (0700, 0600).
`tier.py` has the content of the files.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from memstore.core.durable.paths import is_step_number, step_path
from memstore.core.durable.storage_ports import DurableFiles, DurableReader, Wrote
from memstore.errors import ConfigError, IntegrityError, MemstoreError
from memstore.shell.durable.files import (
    PROBE_TEXT,
    TEMP_PREFIX,
    is_folder,
    mapped,
    opened_file,
    read_all,
    rmdir_if_empty,
    sync_folder,
    unlink_if_there,
    write_file,
)
from recovery.inventory import StepId

_PROBE = ".probe-"  # starts with a dot, as no job does
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


@dataclass(frozen=True, slots=True)
class _FileReader(DurableReader):
    """An open file."""

    fd: int
    nbytes: int

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill `view` from `offset`."""
        read_all(self.fd, view, offset)


class DirectoryFiles(DurableFiles):
    """Files in a folder that every host of the job sees at the same path."""

    def __init__(self, root: str | Path) -> None:
        """Name the folder; nothing is touched until `probe` or the first call. A relative path is a ConfigError."""
        self.where = os.fspath(root)
        if "\0" in self.where:
            raise ConfigError(f"durable={self.where!r} has a NUL in it: no path has one")
        if not os.path.isabs(self.where):
            raise ConfigError(
                f"durable={self.where!r} is not an absolute path: processes have different working folders"
            )

    def path(self, job: str, *names: object) -> str:
        """Return a path for messages; see `step_path`."""
        return step_path(self.where, job, *names)

    def probe(self, name: str = "", *, is_kept: bool = False) -> None:
        """Create the folder if only its last name is missing, then write, sync, read and remove a file in it."""
        file, text = _PROBE + (name or secrets.token_hex(8)), bytearray(len(PROBE_TEXT))
        try:
            with suppress(FileExistsError):
                os.mkdir(self.where, 0o700)
            with self._folder() as root:
                write_file(root, file, [PROBE_TEXT], lambda: False)
                with opened_file(root, file, self.where) as (fd, _):
                    read_all(fd, memoryview(text), 0)
                if not is_kept:
                    unlink_if_there(root, file)
            if text != PROBE_TEXT:
                raise IntegrityError(f"{file} reads otherwise than it was written")
        except (OSError, MemstoreError) as exc:
            cause = exc if isinstance(exc, OSError) else exc.__cause__
            name = errno.errorcode.get(getattr(cause, "errno", 0) or 0, "no errno")
            raise ConfigError(
                f"durable={self.where!r} cannot be written on this host ({name}: {getattr(cause, 'strerror', exc)}): "
                "create or mount it, give this user write access and room, or choose another path; "
                "the folder that contains it must exist",
                path=self.where,
                errno_name=name,
            ) from exc

    def probes(self) -> set[str]:
        """Return the names of the probes that lie in the folder."""
        with mapped("list", self.where), self._folder() as root:
            return {name.removeprefix(_PROBE) for name in os.listdir(root) if name.startswith(_PROBE)}

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
        """Put a file in place by rename; of two that write a name at once with `is_once`, the last one wins."""
        path = self.path(job, step.attempt, step.step, name)
        with mapped("write", path), self._folder(job, str(step.attempt), str(step.step), create=True) as folder:
            if is_once and name in os.listdir(folder):
                return "there"
            return "written" if write_file(folder, name, pieces, should_stop) else "stopped"

    @contextmanager
    def opened(self, job: str, step: StepId, name: str) -> Iterator[DurableReader]:
        """Open a plain file for reading."""
        path = self.path(job, step.attempt, step.step)
        with (
            mapped("read", f"{path}/{name}"),
            self._folder(job, str(step.attempt), str(step.step)) as folder,
            opened_file(folder, name, path) as (fd, nbytes),
        ):
            yield _FileReader(fd, nbytes)

    def names(self, job: str, step: StepId) -> set[str]:
        """Return the files in a step's folder."""
        path = self.path(job, step.attempt, step.step)
        with (
            mapped("list", path),
            suppress(FileNotFoundError),
            self._folder(job, str(step.attempt), str(step.step)) as folder,
        ):
            return set(os.listdir(folder))
        return set()

    def has(self, job: str, step: StepId, name: str) -> bool:
        """Return whether anything of that name lies there."""
        return name in self.names(job, step)

    def steps(self, job: str) -> tuple[list[StepId], list[str]]:
        """Return the job's step folders, oldest first, and the entries that are in the way of one."""
        steps: list[StepId] = []
        problems: list[str] = []

        def numbered(folder: int, where: str) -> Iterator[int]:
            for name in os.listdir(folder):
                if is_step_number(name) and is_folder(folder, name):
                    yield int(name)
                elif is_step_number(name):
                    problems.append(f"{where}/{name} is not a folder (symbolic links are not followed): ignored")

        path = self.path(job)
        with mapped("list", path), suppress(FileNotFoundError), self._folder(job) as top:
            for attempt in numbered(top, path):
                with suppress(FileNotFoundError), self._folder(job, str(attempt)) as folder:
                    steps += [StepId(attempt, step) for step in numbered(folder, f"{path}/{attempt}")]
        return sorted(steps), problems

    def remove(self, job: str, step: StepId, names: Collection[str]) -> None:
        """Remove files, with what is left of a crash if all go; a step that is not there is fine."""
        folders = (job, str(step.attempt), str(step.step))
        with mapped("remove", self.path(*folders)), suppress(FileNotFoundError), self._folder(*folders[:-1]) as above:
            with self._folder(*folders) as folder:
                for name in names:
                    unlink_if_there(folder, name)
                sync_folder(folder)
            rmdir_if_empty(above, folders[-1])

    def tidy(self, job: str, step: StepId) -> None:
        """Remove temporary files."""
        names = (job, str(step.attempt), str(step.step))
        with mapped("tidy", self.path(*names)), suppress(FileNotFoundError), self._folder(*names) as folder:
            for name in os.listdir(folder):
                if name.startswith(TEMP_PREFIX):
                    unlink_if_there(folder, name)

    @contextmanager
    def _folder(self, *names: str, create: bool = False) -> Iterator[int]:
        """Open a folder below the root, one name at a time, following no symbolic link on the way (hostile trees)."""
        try:
            fd = os.open(self.where, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as exc:
            # Never "no such job": an unmounted share must not look like a job without history (R23).
            raise ConfigError(
                f"durable={self.where!r} cannot be opened ({exc.strerror}): mount or create it, or change `durable`"
            ) from exc
        try:
            for name in names:
                if create:
                    with suppress(FileExistsError):
                        os.mkdir(name, 0o700, dir_fd=fd)
                    sync_folder(fd)
                child = os.open(name, _FOLDER_FLAGS, dir_fd=fd)
                os.close(fd)
                fd = child
            yield fd
        finally:
            os.close(fd)

"""The durable tier on a directory, local or shared (R31): `<root>/<job>/<attempt>/<step>/rank-<n>` and `marker`.

Every file appears whole, by temporary file, fsync, rename and fsync of the folder. Below the root no symbolic link is
followed, and no name that memstore would not write is opened. What is made here is its owner's alone (0700, 0600). The
formats are in `memstore/core/durable_part.py` and `durable_marker.py`; when to write and what to keep is decided by
`memstore/core/durable_schedule.py`.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import xxhash

from memstore.core.durable_marker import MARKER_LIMIT_BYTES, MarkerRecord, decode_marker, encode_marker
from memstore.core.durable_part import HEADER_BYTES, MANIFEST_LIMIT_BYTES
from memstore.core.ports import DurableTier
from memstore.errors import CapacityError, ConfigError, DigestMismatch, IntegrityError, MemstoreError
from memstore.shell.durable_file import (
    TEMP_PREFIX,
    fill_part,
    is_folder,
    mapped,
    opened_file,
    opened_part,
    read_all,
    rmdir_if_empty,
    sync_folder,
    unlink_if_there,
    write_all,
    write_file,
)
from recovery.inventory import DurableMarker, ShardId, StepId

_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z", re.ASCII)
_NUMBER = re.compile(r"(?:0|[1-9][0-9]{0,17})\Z", re.ASCII)
_PART = re.compile(r"rank-(?:0|[1-9][0-9]{0,17})\Z", re.ASCII)
_MARKER = "marker"
_PROBE = ".probe"  # starts with a dot, as no job does
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


class DirectoryTier(DurableTier):
    """Durable parts and markers in a folder that every host of the job sees at the same path."""

    def __init__(self, root: str | Path) -> None:
        """Name the folder; nothing is touched until `probe` or the first call. A relative path is a ConfigError."""
        self.root = os.fspath(root)
        if "\0" in self.root:
            raise ConfigError(f"durable={self.root!r} has a NUL in it: no path has one")
        if not os.path.isabs(self.root):
            raise ConfigError(
                f"durable={self.root!r} is not an absolute path: processes have different working folders"
            )

    def probe(self) -> None:
        """Create the folder if only its last name is missing, then write, sync and remove a file in it."""
        try:
            with suppress(FileExistsError):
                os.mkdir(self.root, 0o700)
            with self._folder() as root:
                write_file(root, _PROBE, lambda fd: write_all(fd, memoryview(b"memstore"), 0) > 0)
                unlink_if_there(root, _PROBE)
        except (OSError, MemstoreError) as exc:
            cause = exc if isinstance(exc, OSError) else exc.__cause__
            name = errno.errorcode.get(getattr(cause, "errno", 0) or 0, "no errno")
            raise ConfigError(
                f"durable={self.root!r} cannot be written on this host ({name}: {getattr(cause, 'strerror', exc)}): "
                "create or mount it, give this user write access and room, or choose another path; "
                "the folder that contains it must exist",
                path=self.root,
                errno_name=name,
            ) from exc

    def write_part(
        self, shard: ShardId, manifest: bytes, chunks: Iterable[memoryview], *, should_stop: Callable[[], bool]
    ) -> bool:
        """Write one shard whole or not at all; see `DurableTier.write_part`."""
        if len(manifest) > MANIFEST_LIMIT_BYTES:
            raise CapacityError(f"manifest of {len(manifest)} bytes, the limit is {MANIFEST_LIMIT_BYTES}")
        digest = xxhash.xxh3_128_hexdigest(manifest)
        with self._step(shard.job, _step_of(shard), create=True) as (folder, path):
            if _MARKER in os.listdir(folder):
                self._check_rewrite(folder, shard, digest, path)
            return write_file(
                folder, _part_name(shard.rank), lambda fd: fill_part(fd, manifest, digest, chunks, should_stop)
            )

    def write_marker(self, job: str, marker: DurableMarker, lineage: Mapping[str, Any]) -> None:
        """Write the marker of a step whose parts are all there; see `DurableTier.write_marker`."""
        record = encode_marker(job, marker, lineage)
        with self._step(job, marker.step) as (folder, path):
            found = set(os.listdir(folder))
            missing = [rank for rank in sorted(marker.specs) if _part_name(rank) not in found]
            if missing:
                raise IntegrityError(
                    f"{path} as seen from this host lacks {len(missing)} of {marker.world_size} parts, "
                    f"first ranks {missing[:10]}: no marker was written; every host must see the same folder there"
                )
            for rank, spec in sorted(marker.specs.items()):
                with opened_part(folder, _part_name(rank), path) as (_, header):
                    if (header.digest, header.payload_nbytes) != (spec.digest, spec.nbytes):
                        raise IntegrityError(
                            f"{path}/{_part_name(rank)} holds {header.payload_nbytes} bytes of shard {header.digest}, "
                            f"the marker would promise {spec.nbytes} bytes of {spec.digest}: it was not written"
                        )
            write_file(folder, _MARKER, lambda fd: write_all(fd, memoryview(record), 0) > 0)

    def markers(self, job: str) -> tuple[list[DurableMarker], list[str]]:
        """Return the job's markers, oldest first, and what is wrong with the others."""
        records, problems = self.marker_records(job)
        return [record.marker for record in records], problems

    def marker_records(self, job: str) -> tuple[list[MarkerRecord], list[str]]:
        """Return the job's markers with their lineage, oldest first, and what is wrong with the others."""
        records: list[MarkerRecord] = []
        steps, problems = self._steps(job)
        for step in steps:
            try:
                with self._step(job, step) as (folder, path):
                    record = _read_marker(folder, job, step, path)
            except MemstoreError as exc:
                problems.append(f"{job} attempt {step.attempt} step {step.step} is not used: {exc}")
                continue
            if record is not None:
                records.append(record)
        return records, problems

    def jobs(self) -> list[str]:
        """Return the names of all jobs that have a folder, sorted."""
        with mapped("list", self.root), self._folder() as root:
            return sorted(name for name in os.listdir(root) if _JOB.match(name) and is_folder(root, name))

    def read_manifest(self, shard: ShardId, digest: str) -> bytes:
        """Return the shard's manifest, checked against `digest`."""
        with (
            self._step(shard.job, _step_of(shard)) as (folder, path),
            opened_part(folder, _part_name(shard.rank), path) as (fd, header),
        ):
            manifest = bytearray(header.manifest_nbytes)
            read_all(fd, memoryview(manifest), HEADER_BYTES)
        actual = xxhash.xxh3_128_hexdigest(manifest)
        if actual != digest:
            raise DigestMismatch(
                f"{path}/{_part_name(shard.rank)} has a manifest with digest {actual}, asked was {digest}",
                shard=shard,
                expected=digest,
                actual=actual,
            )
        return bytes(manifest)

    def read_chunk_into(self, shard: ShardId, index: int, view: memoryview) -> None:
        """Fill `view` with chunk `index`; a view of another size than the chunk's is an IntegrityError."""
        with (
            self._step(shard.job, _step_of(shard)) as (folder, path),
            opened_part(folder, _part_name(shard.rank), path) as (fd, header),
        ):
            offset, nbytes = header.chunk_range(index)
            if view.nbytes != nbytes:
                raise IntegrityError(
                    f"chunk {index} of {path}/{_part_name(shard.rank)} has {nbytes} bytes, {view.nbytes} were expected"
                )
            read_all(fd, view.cast("B"), offset)

    def remove_step(self, job: str, step: StepId) -> None:
        """Remove the marker, make that durable, then remove the parts; a step that is not there is fine."""
        names = (job, str(step.attempt), str(step.step))
        path = self._path(*names)
        with mapped("remove", path), suppress(FileNotFoundError), self._folder(*names[:-1]) as above:
            with self._folder(*names) as folder:
                found = os.listdir(folder)
                if _MARKER in found:
                    os.unlink(_MARKER, dir_fd=folder)
                    sync_folder(folder)
                for name in found:
                    if _PART.match(name) or name.startswith(TEMP_PREFIX):
                        unlink_if_there(folder, name)
            rmdir_if_empty(above, names[-1])

    def remove_job(self, job: str) -> None:
        """Remove every step of the job, oldest first, then the folders that are empty by then."""
        for step in self._steps(job)[0]:
            self.remove_step(job, step)
        with mapped("remove", self._path(job)), suppress(FileNotFoundError), self._folder() as root:
            with self._folder(job) as folder:
                for name in os.listdir(folder):
                    if _NUMBER.match(name) and is_folder(folder, name):
                        rmdir_if_empty(folder, name)
            rmdir_if_empty(root, job)

    def sweep(self, job: str, keep: Collection[StepId]) -> tuple[StepId, ...]:
        """Remove what crashes left; see `DurableTier.sweep`."""
        removed: list[StepId] = []
        newest = max(keep, default=None)
        for step in self._steps(job)[0]:
            if newest is not None and (step in keep or step > newest):
                continue
            with self._step(job, step) as (folder, _):
                found = os.listdir(folder)
                for name in found:
                    if name.startswith(TEMP_PREFIX):
                        unlink_if_there(folder, name)
            if _MARKER not in found:
                self.remove_step(job, step)
                removed.append(step)
        return tuple(removed)

    def _check_rewrite(self, folder: int, shard: ShardId, digest: str, path: str) -> None:
        """Refuse to replace a part that a marker promises by other bytes."""
        record = _read_marker(folder, shard.job, _step_of(shard), path)
        spec = record.marker.specs.get(shard.rank) if record else None
        if record and (spec is None or spec.digest != digest):
            raise IntegrityError(
                f"{path} is marked complete with {spec.digest if spec else 'no part'} for rank {shard.rank}: "
                f"shard {digest} cannot take that place; remove the step first"
            )

    def _steps(self, job: str) -> tuple[list[StepId], list[str]]:
        """Return the job's step folders, oldest first, and the entries that are in the way of one."""
        steps: list[StepId] = []
        problems: list[str] = []

        def numbered(folder: int, where: str) -> Iterator[int]:
            for name in os.listdir(folder):
                if _NUMBER.match(name) and is_folder(folder, name):
                    yield int(name)
                elif _NUMBER.match(name):
                    problems.append(f"{where}/{name} is not a folder (symbolic links are not followed): ignored")

        path = self._path(job)
        with mapped("list", path), suppress(FileNotFoundError), self._folder(job) as top:
            for attempt in numbered(top, path):
                with suppress(FileNotFoundError), self._folder(job, str(attempt)) as folder:
                    steps += [StepId(attempt, step) for step in numbered(folder, f"{path}/{attempt}")]
        return sorted(steps), problems

    @contextmanager
    def _step(self, job: str, step: StepId, *, create: bool = False) -> Iterator[tuple[int, str]]:
        """Open a step's folder; yields its descriptor and its path for messages."""
        names = (job, str(step.attempt), str(step.step))
        path = self._path(*names)
        with mapped("write" if create else "read", path), self._folder(*names, create=create) as folder:
            yield folder, path

    @contextmanager
    def _folder(self, *names: str, create: bool = False) -> Iterator[int]:
        """Open a folder below the root, one name at a time, following no symbolic link on the way (hostile trees)."""
        try:
            fd = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as exc:
            # Never "no such job": an unmounted share must not look like a job without history (R23).
            raise ConfigError(
                f"durable={self.root!r} cannot be opened ({exc.strerror}): mount or create it, or change `durable`"
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

    def _path(self, job: str, *names: str) -> str:
        """Return the path for messages, after checking the names that came from outside."""
        if not _JOB.match(job):
            raise ConfigError(
                f"job {job!r} is no folder name: use 1 to 64 of A-Z a-z 0-9 . _ - and start with a letter or digit"
            )
        for name in names:
            if not _NUMBER.match(name):
                raise ConfigError(f"attempt or step {name} of job {job} is not a whole number from 0")
        return "/".join((self.root, job, *names))


def tier_from_url(url: str) -> DurableTier:
    """Return the durable tier that `Config.durable` names: an absolute path or a file:// URL.

    Raises:
        ConfigError: an object store or another scheme (not supported yet), another host, or a relative path.
    """
    scheme, is_url, rest = url.partition("://")
    if not is_url:
        return DirectoryTier(url)
    if scheme != "file":
        raise ConfigError(
            f"durable={url!r}: object stores and other {scheme}:// places are not supported yet; "
            "give an absolute path or a file:// URL, for instance of a shared or mounted file system"
        )
    host, slash, path = rest.partition("/")
    if host not in ("", "localhost") or "?" in path or "#" in path:
        raise ConfigError(f"durable={url!r}: write file:///absolute/path, without host, query or fragment")
    return DirectoryTier(unquote(slash + path))


def _step_of(shard: ShardId) -> StepId:
    return StepId(shard.attempt, shard.step)


def _part_name(rank: int) -> str:
    """Return the file name of a rank's part."""
    name = f"rank-{rank}"
    if not _PART.match(name):
        raise ConfigError(f"rank {rank} is not a whole number from 0")
    return name


def _read_marker(folder: int, job: str, step: StepId, path: str) -> MarkerRecord | None:
    """Return the step's marker, None if it has none; IntegrityError for one that is damaged or of another step."""
    if _MARKER not in os.listdir(folder):
        return None
    with opened_file(folder, _MARKER, path) as (fd, nbytes):
        if nbytes > MARKER_LIMIT_BYTES:
            raise IntegrityError(f"{path}/{_MARKER} has {nbytes} bytes, the limit is {MARKER_LIMIT_BYTES}")
        data = bytearray(nbytes)
        read_all(fd, memoryview(data), 0)
    record = decode_marker(bytes(data))
    if (record.job, record.marker.step) != (job, step):
        found = record.marker.step
        raise IntegrityError(f"{path}/{_MARKER} belongs to {record.job} attempt {found.attempt} step {found.step}")
    return record

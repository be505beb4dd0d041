"""Manifests as small files beside the arena: a shard is held when its manifest is here (R7, R14).

Written under a temporary name, then renamed, so a manifest is there whole or not at all. No fsync:
the folder is on tmpfs like the arena, and outlives processes, not machines. Each is kept open: what a
cleaner removes is read, and written again, all the same (`folder_guard.py`). A few files with pages of their own are
kept in reserve: a put whose slots are claimed needs no room of a file system that others have filled.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

from memstore.errors import CapacityError, ConfigError
from memstore.shell.arena.folder import check_level, is_at, open_file

NO_ROOM = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT)
MANIFESTS_NAME = "manifests"
MANIFEST_NBYTES_MAX = 256 << 20  # a manifest of a million tensors has about 100 MB
_NAME = re.compile(r"[0-9a-f]{40}")
_TEMPORARY = ".new-"
SPARES_NAME = "spares"
SPARES_COUNT = 16
SPARE_NBYTES = 8192  # of one that no manifest was before
SPARES_NBYTES_MAX = 16 << 20  # of all, once removed manifests have taken the places of the first ones


class _Spares:
    """Files that have their pages already: a manifest is written into one where the file system has no page left.

    A removed manifest takes the place of a smaller one, so that the next manifests of a job find files of their size.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._sizes: dict[str, int] = {}  # bytes of allocated pages by name
        self._names = map(str, itertools.count())

    def adopt(self) -> None:
        """Take over those of an earlier holder, and make the missing ones."""
        self._path.mkdir(mode=0o700, exist_ok=True)
        check_level(self._path)
        for name in os.listdir(self._path):
            status = os.lstat(self._path / name)
            if name.isdecimal() and stat.S_ISREG(status.st_mode):
                self._sizes[name] = status.st_blocks * 512
        self._names = map(str, itertools.count(1 + max(map(int, self._sizes), default=-1)))
        self.fill()

    def fill(self) -> None:
        """Make the missing ones while the file system has room."""
        with self._lock, contextlib.suppress(FileNotFoundError):  # a cleaner has removed the folder
            while len(self._sizes) < SPARES_COUNT:
                name = next(self._names)
                fd = open_file(self._path, name, os.O_RDWR | os.O_CREAT)
                try:
                    os.posix_fallocate(fd, 0, SPARE_NBYTES)
                    self._sizes[name] = SPARE_NBYTES
                except OSError as error:
                    (self._path / name).unlink(missing_ok=True)
                    if error.errno not in NO_ROOM:
                        raise
                    return
                finally:
                    os.close(fd)

    def take(self, nbytes: int) -> Path | None:
        """Return the smallest one whose pages hold `nbytes`; it is no spare any more."""
        with self._lock:
            name = min(
                (n for n, size in self._sizes.items() if size >= nbytes), key=self._sizes.__getitem__, default=""
            )
            if not name:
                return None
            del self._sizes[name]
        return self._path / name

    def keep(self, path: Path, nbytes: int) -> bool:
        """Make a file that is to be removed a spare, where one lacks or is smaller; False if it is not wanted."""
        with self._lock, contextlib.suppress(FileNotFoundError):
            is_short = len(self._sizes) < SPARES_COUNT
            smallest = "" if is_short else min(self._sizes, key=self._sizes.__getitem__)
            others = sum(self._sizes.values()) - self._sizes.get(smallest, 0)
            if others + nbytes > SPARES_NBYTES_MAX or nbytes <= self._sizes.get(smallest, 0):
                return False
            name = next(self._names)
            path.rename(self._path / name)
            self._sizes[name] = nbytes
            if smallest:
                del self._sizes[smallest]
                (self._path / smallest).unlink(missing_ok=True)
            return True
        return False


class ManifestFolder:
    """The `manifests/` folder of one arena; one writer, which holds the arena's lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._status = os.lstat(path)
        self._fds: dict[str, int] = {}
        self._reading = threading.Lock()  # else a number could be another file's by the time that it is read
        self.skipped: dict[str, str] = {}  # file name -> why the last `load_all` did not read it
        self.problem = ""  # why the last `save` found no room, while there is none
        self._wanted_nbytes = 0
        self._spares = _Spares(path.parent / SPARES_NAME)

    @classmethod
    def open(cls, folder: Path) -> ManifestFolder:
        """Create the folder inside an arena folder if it is absent, or adopt it."""
        path = folder / MANIFESTS_NAME
        path.mkdir(mode=0o700, exist_ok=True)
        check_level(path)
        made = cls(path)
        made._spares.adopt()
        return made

    def save(self, name: str, data: bytes) -> None:
        """Store a manifest under a name from `name_of`, replacing one of that name.

        Raises:
            CapacityError: It is too large, or the file system is full; nothing changed.
        """
        target = self._file(name)
        if len(data) > MANIFEST_NBYTES_MAX:
            raise CapacityError(
                f"manifest of {len(data)} bytes exceeds the limit of {MANIFEST_NBYTES_MAX}: put fewer, larger tensors",
                needed_bytes=len(data),
            )
        temporary = self.path / (_TEMPORARY + name)
        try:
            self._write(temporary, data, target)
        except CapacityError as error:
            if not self._write_spare(data, target):
                self.problem, self._wanted_nbytes = str(error), len(data)
                raise
        self.problem = ""

    def _write(self, path: Path, data: bytes, target: Path) -> None:
        """Write a file and rename it, or leave none; CapacityError if there is no room for it."""
        try:
            fd = open_file(self.path, path.name, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            try:
                with os.fdopen(os.dup(fd), "wb") as file:
                    file.write(data)
                path.rename(target)
            except BaseException:
                os.close(fd)
                raise
            self._keep(target.name, fd)
        except OSError as error:
            path.unlink(missing_ok=True)
            if error.errno not in NO_ROOM:
                raise
            raise CapacityError(
                f"no room for a manifest of {len(data)} bytes in {self.path}: the file system is full; free room there",
                needed_bytes=len(data),
            ) from error

    def _write_spare(self, data: bytes, target: Path) -> bool:
        """Write a manifest into a spare file, which needs no room, and rename it; False if none is large enough."""
        spare = self._spares.take(len(data))
        if spare is None or not spare.exists():
            return False
        fd = open_file(spare.parent, spare.name, os.O_RDWR)
        try:
            os.pwrite(fd, data, 0)
            os.ftruncate(fd, len(data))
            spare.rename(target)
        except BaseException:
            os.close(fd)
            raise
        self._keep(target.name, fd)
        return True

    def look_for_room(self) -> None:
        """Make the spare files that lack; forget the `problem` once a manifest of that size would fit again."""
        self._spares.fill()
        if not self.problem:
            return
        probe = self.path / (_TEMPORARY + "room")  # removed by `load_all` if we die now
        with contextlib.suppress(CapacityError):
            self._write(probe, bytes(self._wanted_nbytes), probe)
            probe.unlink()
            self._drop(probe.name)
            self.problem = ""

    def load_all(self) -> Iterator[tuple[str, bytes]]:
        """Yield every manifest as (name, bytes), in name order; remove a dead writer's partial files.

        A file that is no manifest of ours, or is too large, is not read: `skipped` says why.
        """
        self.skipped = {}
        for name in sorted(os.listdir(self.path)):
            try:
                if name.startswith(_TEMPORARY):
                    (self.path / name).unlink(missing_ok=True)
                    continue
                data = self._read(name)
            except FileNotFoundError:
                continue
            except (ConfigError, OSError) as error:
                self.skipped[name] = str(error)
                continue
            yield name, data

    def load(self, name: str) -> bytes:
        """Return one manifest; FileNotFoundError if there is none of that name."""
        return self._read(name)

    def remove(self, name: str) -> None:
        """Remove a manifest; none of that name is fine. The caller frees the slots afterwards (R7)."""
        path = self._file(name)
        with self._reading:
            fd = self._fds.get(name, -1)
            is_there = fd >= 0 and is_at(path, os.fstat(fd))
            is_kept = is_there and self._spares.keep(path, os.fstat(fd).st_blocks * 512)
        if not is_kept:
            path.unlink(missing_ok=True)
        self._drop(name)

    def is_whole(self) -> bool:
        """Say whether the folder is the one of its name, and every manifest in it. Not beside `save` and `remove`."""
        with self._reading:
            return is_at(self.path, self._status) and all(os.fstat(fd).st_nlink for fd in self._fds.values())

    def sizes(self) -> list[int]:
        """Return the bytes of every manifest that is open. Not beside `save` and `remove`."""
        with self._reading:
            return [os.fstat(fd).st_size for fd in self._fds.values()]

    def copy_to(self, other: ManifestFolder) -> None:
        """Save these manifests there too, unless they are there."""
        there = set(os.listdir(other.path))
        for name in self._fds.keys() - there:
            other.save(name, self._read(name))

    def close(self) -> None:
        """Close the files; a second call does nothing."""
        for name in list(self._fds):
            self._drop(name)

    def _read(self, name: str) -> bytes:
        self._file(name)
        with self._reading:
            if name not in self._fds:
                self._fds[name] = open_file(self.path, name, os.O_RDONLY)
            fd = self._fds[name]
            nbytes = os.fstat(fd).st_size
            if nbytes > MANIFEST_NBYTES_MAX:
                raise ConfigError(f"{self.path / name} has {nbytes} bytes, limit {MANIFEST_NBYTES_MAX}")
            return os.pread(fd, nbytes, 0)

    def _keep(self, name: str, fd: int) -> None:
        with self._reading:
            old, self._fds[name] = self._fds.get(name, -1), fd
            if old >= 0:
                os.close(old)

    def _drop(self, name: str) -> None:
        with self._reading:
            fd = self._fds.pop(name, -1)
            if fd >= 0:
                os.close(fd)

    def _file(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{name!r} is not a manifest name: want 40 hex digits, from ManifestFolder.name_of")
        return self.path / name

"""The facts journal beside an arena: an append-only file of framed records (R16).

Frame: u32 length, u64 xxh3-64 of the payload, payload; little-endian. The payload is the caller's.
A journal is read up to the first record that is torn or damaged; the rest is cut off and counted.
No fsync: like the arena it outlives processes, not machines. A fact is safe because it is
in the journals of several hosts. The file has pages ahead of its end, so that commits go on for a while where others
have filled the file system.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import xxhash

from memstore.errors import CapacityError, ClosedError
from memstore.shell.arena.folder import is_at, open_file

AHEAD_NBYTES = 64 << 10
JOURNAL_NAME = "journal"
RECORD_NBYTES_MAX = 64 << 20
_FRAME = struct.Struct("<IQ")
_FALLOC_KEEP_SIZE = 1
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)


class JournalFile:
    """An open journal; one writer, which holds the arena's lock."""

    def __init__(self, path: Path, fd: int, *, nbytes: int, dropped_nbytes: int) -> None:
        self.path = path
        self.nbytes = nbytes  # of whole records, frames included
        self.dropped_nbytes = dropped_nbytes  # cut off when it was opened: a torn or damaged tail
        self._fd = fd
        self._renaming = threading.Lock()
        self._ahead_nbytes = 0  # the file has its pages up to here
        self._allocate_ahead()

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> JournalFile:
        """Create or adopt a journal; cuts off a torn or damaged tail and counts it in `dropped_nbytes`."""
        path = Path(path)
        fd = open_file(path.parent, path.name, os.O_RDWR | os.O_CREAT)
        total = os.fstat(fd).st_size
        good = sum(_FRAME.size + len(payload) for payload in _scan(os.dup(fd)))
        if good < total:
            os.ftruncate(fd, good)
        return cls(path, fd, nbytes=good, dropped_nbytes=total - good)

    def records(self) -> list[bytes]:
        """Return every payload, oldest first, from the open file, even if its name is gone.

        A damaged rest is cut off: else no reader would reach what is appended behind it.
        """
        self._check_open()
        found = list(_scan(os.dup(self._fd)))
        good = sum(_FRAME.size + len(payload) for payload in found)
        if good < self.nbytes:
            os.ftruncate(self._fd, good)
            self.dropped_nbytes += self.nbytes - good
            self.nbytes = good
        return found

    def append(self, records: Sequence[bytes]) -> None:
        """Append payloads in order; when it returns they survive the death of this process.

        Raises:
            CapacityError: A payload is over 64 MiB or the file system is full; nothing was appended.
        """
        self._check_open()
        self.nbytes += _write(self._fd, self.path, self.nbytes, _framed(records))
        self._allocate_ahead()

    def rewrite(self, records: Sequence[bytes]) -> None:
        """Replace the whole journal by these payloads, at once: readers see the old one or the new one.

        Raises:
            CapacityError: As for `append`; the old journal stays.
        """
        self._check_open()
        data = _framed(records)
        temporary = self.path.with_name(f".{self.path.name}-new")
        fd = open_file(self.path.parent, temporary.name, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            _write(fd, self.path, 0, data)
            with self._renaming:
                temporary.rename(self.path)
                old, self._fd = self._fd, fd
        except BaseException:
            os.close(fd)
            temporary.unlink(missing_ok=True)
            raise
        os.close(old)
        self.nbytes, self._ahead_nbytes = len(data), 0
        self._allocate_ahead()

    def is_current(self) -> bool:
        """Say whether the file that is written is the one of its name."""
        with self._renaming:
            return self._fd < 0 or is_at(self.path, os.fstat(self._fd))

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _allocate_ahead(self) -> None:
        if self.nbytes + AHEAD_NBYTES // 2 <= self._ahead_nbytes:
            return
        if _libc.fallocate(self._fd, _FALLOC_KEEP_SIZE, self.nbytes, AHEAD_NBYTES) == 0:  # else there is no room
            self._ahead_nbytes = self.nbytes + AHEAD_NBYTES

    def _check_open(self) -> None:
        if self._fd < 0:
            raise ClosedError(f"journal {self.path} is closed")


def _framed(records: Sequence[bytes]) -> bytes:
    parts: list[bytes] = []
    for record in records:
        if len(record) > RECORD_NBYTES_MAX:
            raise CapacityError(f"journal record of {len(record)} bytes exceeds the limit of {RECORD_NBYTES_MAX}")
        parts += (_FRAME.pack(len(record), xxhash.xxh3_64_intdigest(record)), record)
    return b"".join(parts)


def _write(fd: int, path: Path, at: int, data: bytes) -> int:
    """Write all of `data` at offset `at`, or nothing."""
    view = memoryview(data)
    done = 0
    try:
        while done < len(view):
            done += os.pwrite(fd, view[done:], at + done)
    except OSError as error:
        os.ftruncate(fd, at)
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
            raise
        raise CapacityError(
            f"no room for {len(data)} more bytes in journal {path}: the file system is full; free room there",
            needed_bytes=len(data),
        ) from error
    return done


def read_records(path: Path) -> list[bytes]:
    """Return the payloads of a journal that another process may be writing, oldest first; changes nothing."""
    return list(_scan(open_file(path.parent, path.name, os.O_RDONLY)))


def _scan(fd: int) -> Iterator[bytes]:
    """Yield payloads up to the first that is torn or damaged; a length is checked before it is read. Closes `fd`."""
    with os.fdopen(fd, "rb") as file:
        file.seek(0)
        left = os.fstat(file.fileno()).st_size
        while (payload := _read_record(file, left)) is not None:
            left -= _FRAME.size + len(payload)
            yield payload


def _read_record(file: BinaryIO, left: int) -> bytes | None:
    frame = file.read(_FRAME.size)
    if len(frame) < _FRAME.size:
        return None
    nbytes, digest = _FRAME.unpack(frame)
    if nbytes > min(RECORD_NBYTES_MAX, left - _FRAME.size):
        return None
    payload = file.read(nbytes)
    return payload if len(payload) == nbytes and xxhash.xxh3_64_intdigest(payload) == digest else None

"""Slots whose pages a process needs beyond its lease: locks on their records, which the kernel drops at its end (R9).

A rank that registers slots with CUDA, or copies out of them, holds them by a shared lock. Before the holder gives the
pages of free slots back it locks their records alone; what it cannot lock keeps its pages. So nothing has to be said to
a holder, and nothing is forgotten by one that is killed. The locks are of an open file (OFD): forked children, which
close those files, do not prolong them.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
import weakref
from collections.abc import Iterable, Iterator

WAIT_S = 1.0  # for a holder that is giving the pages of these very slots back
POLL_S = 0.001


def hold(fd: int, first: int, count: int) -> bool:
    """Lock slots against being emptied, until the file is closed; False if they are being emptied for too long."""
    deadline_s = time.monotonic() + WAIT_S
    while not _lock(fd, fcntl.F_RDLCK, first, count):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(POLL_S)
    return True


def lock_free(fd: int, first: int, count: int) -> Iterator[tuple[int, int]]:
    """Lock the slots that no other process holds, and yield them as (first, count); unlock each after its use."""
    if _lock(fd, fcntl.F_WRLCK, first, count):
        try:
            yield first, count
        finally:
            _lock(fd, fcntl.F_UNLCK, first, count)
    elif count > 1:
        half = count // 2
        yield from lock_free(fd, first, half)
        yield from lock_free(fd, first + half, count - half)


def _lock(fd: int, kind: int, first: int, count: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", kind, os.SEEK_SET, first, count, 0))
    except (BlockingIOError, PermissionError):  # another file's lock is in the way
        return False
    return True


def runs(slots: Iterable[int], count_max: int = 1 << 62) -> Iterator[tuple[int, int]]:
    """Yield (first, count) of neighbours among sorted slots, at most `count_max` together.

    >>> list(runs([1, 2, 3, 5], 2))
    [(1, 2), (3, 1), (5, 1)]
    """
    first = count = 0
    for slot in slots:
        if count and (slot != first + count or count == count_max):
            yield first, count
            count = 0
        if not count:
            first = slot
        count += 1
    if count:
        yield first, count


class PageHold:
    """Slots that one reader holds, until `close`."""

    def __init__(self, slots_fd: int) -> None:
        self._fd = os.open(f"/proc/self/fd/{slots_fd}", os.O_RDONLY | os.O_CLOEXEC)  # locks of its own
        _OPEN.add(self)

    def add(self, slots: Iterable[int]) -> None:
        """Hold more slots. One that is being emptied is lost to the reader: its copy fails the digest."""
        for first, count in runs(sorted(set(slots))):
            hold(self._fd, first, count)

    def close(self) -> None:
        """Let go of them. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    __del__ = close


def _close_in_child() -> None:
    for hold in list(_OPEN):
        hold.close()


_OPEN: weakref.WeakSet[PageHold] = weakref.WeakSet()
os.register_at_fork(after_in_child=_close_in_child)

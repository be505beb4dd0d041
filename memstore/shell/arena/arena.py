"""The holder's arena: one file of chunk-sized slots, made or adopted, grown in extents (R6, R9).

The file is as long as the limit from the start and sparse, so that it is mapped once. Room is
claimed by `grow`: allocated (a full file system says ENOSPC here, where it is an error, and not
later, where it would be a SIGBUS), pre-faulted, and only then written down as claimed. Free slots
may lose its memory, which makes them unbacked: `give_back` punches holes, `fill` claims the pages again before a slot
is used. Which slots are unbacked is written nowhere: the file system says it, so that no death can make it wrong.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from memstore.core.arena.claimed_memory import Limit
from memstore.core.arena.replica_store import ReplicaStore
from memstore.core.arena.slot_table import SlotState
from memstore.core.journal.records import other_format
from memstore.errors import CapacityError, ConfigError, IntegrityError
from memstore.shell.arena.folder import check_folder, commands_for, open_file
from memstore.shell.arena.journal_file import JOURNAL_NAME, read_records
from memstore.shell.arena.lock import ArenaLock, is_alive
from memstore.shell.arena.manifests import ManifestFolder
from memstore.shell.arena.mapping import ARENA_NAME, STEP_NBYTES, ArenaMapping, lock_free, runs
from memstore.shell.arena.slot_headers import SLOTS_NAME, SlotHeaders, read_file_header
from memstore.shell.native.loops import add_into

CHUNK_NBYTES_MAX = 1 << 30
_FALLOC_KEEP_SIZE = 1
_FALLOC_PUNCH_HOLE = 2

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)


class Arena:
    """One host's slots. The caller holds the folder's ArenaLock (R2) for as long as this is open."""

    def __init__(self, folder: Path, fd: int, headers: SlotHeaders, limit_slots: int) -> None:
        self.folder = folder
        self.headers = headers
        self.chunk_bytes = headers.chunk_bytes
        self.limit_slots = limit_slots
        self.freed: dict[int, str] = {}  # slots whose record could not be true on adoption, and why
        self.unbacked: list[int] = []  # free slots without pages, as found on adoption
        self._fd, self._records_fd = fd, open_file(folder, SLOTS_NAME, os.O_RDWR)
        self.mapping = ArenaMapping(folder, fd, open_file(folder, SLOTS_NAME, os.O_RDONLY))

    @classmethod
    def open(cls, folder: str | os.PathLike[str], *, limit_bytes: int, chunk_bytes: int) -> Arena:
        """Create the arena, or adopt the one a predecessor left.

        A limit above the predecessor's lengthens the file; one below it keeps the claimed slots.
        Records that cannot be true are freed and listed in `freed`; digests are the caller's to check.

        Raises:
            ConfigError: A bad size, or the arena was made with another chunk size.
            CapacityError: No room for the slot table or for the claimed slots.
            IntegrityError: The slot table is damaged.
        """
        path = check_folder(folder)
        if chunk_bytes % mmap.PAGESIZE or not 0 < chunk_bytes <= CHUNK_NBYTES_MAX:
            raise ConfigError(
                f"chunk_bytes={chunk_bytes} must be a multiple of {mmap.PAGESIZE}, at most {CHUNK_NBYTES_MAX}"
            )
        limit_slots = limit_bytes // chunk_bytes
        if limit_slots < 1:
            raise ConfigError(f"arena_bytes={limit_bytes} has no room for one chunk of chunk_bytes={chunk_bytes}")
        fd = open_file(path, ARENA_NAME, os.O_RDWR | os.O_CREAT)
        headers: SlotHeaders | None = None
        try:
            headers = SlotHeaders.open(path, chunk_bytes=chunk_bytes, capacity=limit_slots)
            freed = headers.free_impossible(slots_with_bytes=os.fstat(fd).st_size // chunk_bytes)
            limit_slots = max(limit_slots, headers.slots_count)
            if os.fstat(fd).st_size < limit_slots * chunk_bytes:
                os.ftruncate(fd, limit_slots * chunk_bytes)
            unbacked = _settle(path, fd, headers)
            arena = cls(path, fd, headers, limit_slots)
        except BaseException:
            if headers is not None:
                headers.close()
            os.close(fd)
            raise
        arena.freed, arena.unbacked = freed, unbacked
        return arena

    @staticmethod
    def destroy(folder: str | os.PathLike[str], *, lock: ArenaLock | None = None) -> None:
        """Remove the arena with all it holds and its folder; other hosts' folders stay (`down --discard`).

        Processes that still map it keep their pages until they unmap. None there is fine.

        Raises:
            ConfigError: `lock` was not given and a live holder has it, or the folder is not safe to touch.
        """
        if not os.path.lexists(folder):
            return
        path = check_folder(folder)
        held = lock or ArenaLock.take(path, timeout_s=1.0)
        for name in (SLOTS_NAME, ARENA_NAME):  # the table first: bytes without a table are nothing, the reverse a lie
            (path / name).unlink(missing_ok=True)
        shutil.rmtree(path)
        held.release()
        for parent in (path.parent, path.parent.parent):
            with contextlib.suppress(OSError):  # not empty: another host or store is there
                parent.rmdir()

    @property
    def slots_count(self) -> int:
        """Slots claimed so far, unbacked ones included."""
        return self.headers.slots_count

    def grow(self, slots_count: int, should_stop: Callable[[], bool] | None = None) -> int:
        """Claim slots until there are `slots_count` in all, in steps of 64 MiB without the GIL.

        Each step is allocated and pre-faulted; the new slots count only when all of them are there.
        If they cannot all be there, or `should_stop` says so, what this call had claimed is given
        back by punching a hole, and earlier slots stay as they were. Returns the slots there are.
        One call at a time; meant for a background thread.

        Raises:
            CapacityError: Beyond the limit, or the file system or memory is full.
        """
        before = self.slots_count
        if slots_count <= before:
            return before
        if slots_count > self.limit_slots:
            raise CapacityError(
                f"arena {self.folder} may have {self.limit_slots} slots ({self.limit_slots * self.chunk_bytes} bytes),"
                f" asked for {slots_count} ({slots_count * self.chunk_bytes} bytes); raise arena_bytes",
                needed_bytes=slots_count * self.chunk_bytes,
                limit_bytes=self.limit_slots * self.chunk_bytes,
            )
        if self._claim(range(before, slots_count), should_stop):
            self.headers.slots_count = slots_count
        return self.slots_count

    def fill(self, slots: Sequence[int]) -> None:
        """Claim the pages of unbacked slots again, all or none of them; as `grow` does."""
        self._claim(slots, None)

    def give_back(self, slots: Sequence[int]) -> list[int]:
        """Give back the pages of unleased free slots; return the slots that some process still needs."""
        kept = set(slots)
        for first, count in runs(sorted(slots)):
            for free, free_count in lock_free(self._records_fd, first, count):
                _punch_hole(self._fd, free * self.chunk_bytes, free_count * self.chunk_bytes)
                kept.difference_update(range(free, free + free_count))
        return sorted(kept)

    def _claim(self, slots: Sequence[int], should_stop: Callable[[], bool] | None) -> bool:
        """Allocate and pre-fault slots step by step; False, with all of it given back, if it was stopped."""
        wanted, done, is_whole = len(slots) * self.chunk_bytes, 0, False
        try:
            for first, count in runs(slots, max(1, STEP_NBYTES // self.chunk_bytes)):
                if should_stop and should_stop():
                    return False
                at, nbytes = first * self.chunk_bytes, count * self.chunk_bytes
                _allocate(self.folder, self._fd, at, nbytes, done_bytes=done, wanted_bytes=wanted)
                self.mapping.populate(at, nbytes)
                done += nbytes
            is_whole = True
        finally:
            if not is_whole:
                for first, count in runs(slots):
                    _punch_hole(self._fd, first * self.chunk_bytes, count * self.chunk_bytes)
        return True

    @property
    def identity(self) -> str:
        """The identity of this arena; see ArenaMapping."""
        return self.mapping.identity

    def files_present(self) -> dict[str, bool]:
        """Return for each of the two files whether it is the one of its name."""
        return self.mapping.files_present(self._fd)

    def write_again(self) -> None:
        """Write the removed files again, with the sealed slots as they are; all others are free in them.

        Their bytes move to the new file slot by slot, so that both take the memory of one: this one has lost them then.

        Raises:
            CapacityError: No room for the slot table. OSError: none for all bytes; those that fit are there.
        """
        present = self.files_present()
        if all(present.values()):
            return
        (self.folder / SLOTS_NAME).unlink(missing_ok=True)  # bytes without a table are nothing, the reverse a lie
        table = self.headers.all()
        sealed = np.flatnonzero(table["state"] == SlotState.SEALED).tolist()
        moved: list[int] = sealed if present[ARENA_NAME] else []
        try:
            if not present[ARENA_NAME]:
                self._move(sealed, moved)
        finally:
            headers = SlotHeaders.open(self.folder, chunk_bytes=self.chunk_bytes, capacity=self.headers.capacity)
            headers.slots_count = self.slots_count
            for slot in moved:
                headers.write(slot, self.headers.read(slot))
            headers.close()

    def _move(self, slots: Sequence[int], moved: list[int]) -> None:
        (self.folder / ARENA_NAME).unlink(missing_ok=True)
        fd = open_file(self.folder, ARENA_NAME, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            os.ftruncate(fd, self.limit_slots * self.chunk_bytes)
            for slot in slots:
                view, at = self.view(slot), slot * self.chunk_bytes  # all: no hole is left in a slot in use
                done = 0
                while done < len(view):
                    done += os.pwrite(fd, view[done:], at + done)
                moved.append(slot)
                _punch_hole(self._fd, at, self.chunk_bytes)
        finally:
            os.close(fd)

    def view(self, slot: int, nbytes: int | None = None) -> memoryview:
        """Return a writable view of a slot, or of its first `nbytes`; see ArenaMapping.view."""
        return self.mapping.view(slot, nbytes)

    def prefault(self, slots: Sequence[int], should_stop: Callable[[], bool] | None = None) -> int:
        """Enter the pages of an adopted arena's slots; see ArenaMapping.prefault."""
        return self.mapping.prefault(slots, should_stop)

    def close(self) -> None:
        """Unmap and close; the files stay for the next holder. Idempotent."""
        self.mapping.close()
        self.headers.close()
        fds, self._fd, self._records_fd = (self._fd, self._records_fd), -1, -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)


def _settle(folder: Path, fd: int, headers: SlotHeaders) -> list[int]:
    """Make memory and table agree on adoption; return the free slots without pages.

    What a predecessor had allocated beyond its last word, when it died in `grow`, is given back, and so is what it had
    of a slot when it died in `fill`. A slot in use that lost pages gets them again (as zeros, which the digests will
    tell), or else they would be a SIGBUS.
    """
    chunk_bytes, length = headers.chunk_bytes, os.fstat(fd).st_size
    claimed_bytes = headers.slots_count * chunk_bytes
    if length > claimed_bytes:
        _punch_hole(fd, claimed_bytes, length - claimed_bytes)
    if os.fstat(fd).st_blocks * 512 >= claimed_bytes:
        return []
    is_free = headers.all()["state"] == SlotState.FREE
    lacking = _with_holes(fd, chunk_bytes, headers.slots_count)
    unbacked = [slot for slot in lacking if is_free[slot]]
    for first, count in runs(unbacked):
        _punch_hole(fd, first * chunk_bytes, count * chunk_bytes)
    used = [slot for slot in lacking if not is_free[slot]]
    for first, count in runs(used):
        at, nbytes = first * chunk_bytes, count * chunk_bytes
        _allocate(folder, fd, at, nbytes, done_bytes=0, wanted_bytes=len(used) * chunk_bytes)
    return unbacked


def _with_holes(fd: int, chunk_bytes: int, slots_count: int) -> list[int]:
    """Return the slots that lack some page, or have one that was allocated and never touched."""
    found: list[int] = []
    at, end = 0, slots_count * chunk_bytes
    while (hole := os.lseek(fd, at, os.SEEK_HOLE)) < end:
        try:
            at = min(os.lseek(fd, hole, os.SEEK_DATA), end)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            at = end  # nothing but hole
        first = hole // chunk_bytes
        found += range(max(first, found[-1] + 1 if found else 0), -(-at // chunk_bytes))
    return found


def _allocate(folder: Path, fd: int, at: int, nbytes: int, *, done_bytes: int, wanted_bytes: int) -> None:
    """Allocate a range with posix_fallocate, in parts; it releases the GIL."""
    try:
        os.posix_fallocate(fd, at, nbytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
            raise
        room = os.fstatvfs(fd)
        free_bytes, total_bytes = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
        raise CapacityError(
            f"arena {folder} cannot grow by {wanted_bytes} bytes: {error.strerror} at byte {at};"
            f" its file system has {free_bytes} of {total_bytes} bytes free with {done_bytes} of the growth claimed"
            " (given back now); do one of: enlarge it (mount -o remount,size=..., docker --shm-size, a larger emptyDir)"
            " · set arena_dir to a larger memory file system · lower arena_bytes, replicas or keep_steps",
            needed_bytes=wanted_bytes,
            free_bytes=free_bytes + done_bytes,
            total_bytes=total_bytes,
        ) from error


def _punch_hole(fd: int, at: int, nbytes: int) -> None:
    """Give pages back without changing the file's length, which every process has mapped."""
    if _libc.fallocate(fd, _FALLOC_PUNCH_HOLE | _FALLOC_KEEP_SIZE, at, nbytes) != 0:
        reason = ctypes.get_errno()
        raise OSError(reason, f"cannot give back {nbytes} bytes of the arena at {at}: {os.strerror(reason)}")


# -- host store ---------------------------------------------------------------------------------------
# Opens the replica store of one host, on an arena folder.


HostStore = ReplicaStore[Arena, ManifestFolder]


def of_this_release(folder: Path) -> Path:
    """Return a host's folder, unless another release left what is in it; reads only (R40).

    What is damaged is no other format: adoption sees to it.

    Raises:
        ConfigError: Names who reads it.
    """
    with contextlib.suppress(FileNotFoundError, IntegrityError):
        fd = open_file(folder, SLOTS_NAME, os.O_RDONLY)
        try:
            read_file_header(fd, folder / SLOTS_NAME)
        finally:
            os.close(fd)
    with contextlib.suppress(FileNotFoundError):
        for record in read_records(folder / JOURNAL_NAME):
            if why := other_format(record):
                discard = commands_for(folder, f"`memstore down --leftovers --discard --host {folder.name}`")
                raise ConfigError(f"{folder / JOURNAL_NAME}: {why}, or give the data up with {discard}")
    return folder


def open_store(folder: Path, *, chunk_bytes: int, limit: Limit) -> HostStore:
    """Create the replica store of a host in an arena folder, or adopt an earlier holder's (R6)."""
    arena = Arena.open(folder, limit_bytes=limit.nbytes, chunk_bytes=chunk_bytes)
    return ReplicaStore(
        arena,
        ManifestFolder.open(folder),
        chunk_bytes=chunk_bytes,
        limit=limit,
        clock=time,
        is_alive=is_alive,
        lock=threading.RLock(),
        room_lock=threading.Lock(),
        parity_lock=threading.Lock(),
        add=add_into,
    )

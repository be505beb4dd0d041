"""The arena file mapped into one process: views of slots, pre-faulting, and forks (R8, R9).

The holder and every rank map the whole file once, claimed or not; only claimed slots have memory behind
them, and only those can be viewed, since touching another could be a SIGBUS. A claimed slot that nothing uses may be
unbacked, its pages given back: it gets them again before it is leased.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import struct
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from memstore.core.wire.rank_messages import SlotSample
from memstore.errors import CapacityError, ClosedError, ConfigError, IntegrityError
from memstore.shell.arena.folder import check_folder, commands_for, is_at, open_file
from memstore.shell.arena.slot_headers import SLOTS_NAME, read_file_header

# -- page locks ---------------------------------------------------------------------------------------
# Slots whose pages a process needs beyond its lease: locks on their records, which the kernel drops at its end (R9).


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
        _HOLDS.add(self)

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
    for hold in list(_HOLDS):
        hold.close()


_HOLDS: weakref.WeakSet[PageHold] = weakref.WeakSet()
os.register_at_fork(after_in_child=_close_in_child)


# -- mapping ------------------------------------------------------------------------------------------


ARENA_NAME = "arena"
LINE_BYTES = 64  # of a processor's cache
STEP_NBYTES = 64 << 20  # one uninterruptible piece of work: some 50 ms on fresh memory

_MADV_POPULATE_READ = 22  # Linux 5.14
_MAP_FIXED_NOREPLACE = 0x100000  # Linux 4.17
_MAP_NORESERVE = 0x4000
_PROT_NONE = 0

# Calls through CDLL release the GIL; mmap.madvise of the standard library holds it.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class ArenaMapping:
    """The arena mapped read and write; takes no lock. Absent in forked children, where it is closed."""

    def __init__(self, folder: Path, arena_fd: int, slots_fd: int) -> None:
        """Map the file behind `arena_fd` (not kept); takes over `slots_fd`."""
        self.folder = folder
        self._slots_fd = slots_fd
        header = read_file_header(slots_fd, folder / SLOTS_NAME)
        self.chunk_bytes = header.chunk_bytes
        self._slots_count = header.slots_count
        status = os.fstat(arena_fd)
        self.nbytes = status.st_size
        #: Equal in two processes that map the same file: the table's id, and where the kernel keeps the file.
        self.identity = f"{header.arena_id.hex()}-{status.st_dev}-{status.st_ino}"
        try:
            mapped = mmap.mmap(arena_fd, self.nbytes)
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise CapacityError(
                f"cannot map the {self.nbytes} bytes of {folder / ARENA_NAME}: {error}; check `ulimit -v`",
                needed_bytes=self.nbytes,
            ) from error
        mapped.madvise(mmap.MADV_DONTFORK)
        self._map: mmap.mmap | None = mapped
        self._view = memoryview(mapped)
        self._entered: set[int] = set()  # slots whose pages this process has
        self._address = np.frombuffer(mapped, np.uint8).ctypes.data
        self._close_slots = weakref.finalize(self, os.close, slots_fd)  # an unclosed one goes with its last view
        self._close_slots.atexit = False
        _OPEN.add(self)

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> ArenaMapping:
        """Map an arena that a holder has made.

        Raises:
            ConfigError: There is no arena, or its folder is not safe to use.
        """
        path = check_folder(folder)
        arena_fd = slots_fd = -1
        try:
            slots_fd = open_file(path, SLOTS_NAME, os.O_RDONLY)
            arena_fd = open_file(path, ARENA_NAME, os.O_RDWR)
            return cls(path, arena_fd, slots_fd)
        except BaseException as error:
            if slots_fd >= 0:
                os.close(slots_fd)
            if isinstance(error, FileNotFoundError):
                advice = commands_for(path, "run `memstore up`")
                raise ConfigError(f"there is no arena in {path}: {error.filename} is missing; {advice}") from error
            raise
        finally:
            if arena_fd >= 0:
                os.close(arena_fd)

    @property
    def slots_count(self) -> int:
        """Slots claimed so far, as the holder last wrote it down."""
        self._check_open()
        self._slots_count = read_file_header(self._slots_fd, self.folder / SLOTS_NAME).slots_count
        return self._slots_count

    def view(self, slot: int, nbytes: int | None = None) -> memoryview:
        """Return a writable view of a claimed slot, or of its first `nbytes`.

        Raises:
            ClosedError: The mapping was closed, or this process is a forked child.
            IndexError: The slot is not claimed, or lies beyond the mapping (the limit was raised
                since: map again).
        """
        self._check_open()
        self._check_slot(slot)
        nbytes = self.chunk_bytes if nbytes is None else nbytes
        if not 0 <= nbytes <= self.chunk_bytes:
            raise ValueError(f"slot {slot} has {self.chunk_bytes} bytes, asked for {nbytes}")
        start = slot * self.chunk_bytes
        return self._view[start : start + nbytes]

    def lines(self, slots: Sequence[int], places: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        """Return copies of some cache lines of claimed slots, by their numbers in each: `[slots, places, bytes]`.

        Errors as `view`.
        """
        self._check_open()
        for slot in slots:
            self._check_slot(slot)
        starts = np.array(slots, np.int64) * (self.chunk_bytes // LINE_BYTES)
        with self._view[:] as held:
            # Its own view is gone when this returns, so that the mapping can be closed.
            found: npt.NDArray[np.uint8] = np.frombuffer(held, np.uint8).reshape(-1, LINE_BYTES)[
                starts[:, None] + places
            ]
            return found

    def address(self, slot: int) -> int:
        """Return where a claimed slot begins, for as long as the mapping is open. Errors as `view`."""
        self._check_open()
        self._check_slot(slot)
        return self._address + slot * self.chunk_bytes

    def hold(self, first: int, count: int) -> bool:
        """Keep the pages of slots for as long as this is mapped, leased or not; False if they are being given back."""
        self._check_open()
        return hold(self._slots_fd, first, count)

    def reading(self) -> PageHold:
        """Return what keeps the pages of the slots that one reader looks at, until it is closed."""
        self._check_open()
        return PageHold(self._slots_fd)

    def slot_at(self, address: int) -> int | None:
        """Return the slot that an address lies in, or None if it is not of this mapping."""
        slot = (address - self._address) // self.chunk_bytes
        return slot if 0 <= slot < self.nbytes // self.chunk_bytes else None

    def offset(self, view: memoryview) -> int:
        """Return where in the arena a view of it begins."""
        return int(np.frombuffer(view, np.uint8).ctypes.data) - self._address

    def prefault(self, slots: Sequence[int], should_stop: Callable[[], bool] | None = None) -> int:
        """Enter the pages of claimed slots into this process, in steps of 64 MiB without the GIL.

        Contents do not change, so slots in use may be among them; those entered before are passed over, since
        walking their pages again costs a tenth of copying them. Returns the bytes entered by this call.
        """
        self._check_open()
        for slot in slots:
            self._check_slot(slot)
        done = 0
        for at, nbytes in self._steps([slot for slot in slots if slot not in self._entered]):
            if should_stop and should_stop():
                break
            done += self.populate(at, nbytes)
            self._entered.update(range(at // self.chunk_bytes, (at + nbytes) // self.chunk_bytes))
        return done

    def populate(self, at: int, nbytes: int) -> int:
        """Fault in one range with memory behind it, which the caller guarantees; return `nbytes`.

        By reading: the kernel then enters sixteen pages at a time, for writing too, the file being shared and in
        memory. By writing it enters them one by one and needs twice the time.
        """
        self._check_open()
        with self._view[at : at + nbytes] as held:  # an exported view: it cannot be unmapped during the call
            if _libc.madvise(self._address + at, nbytes, _MADV_POPULATE_READ) == 0:
                return nbytes
            reason = ctypes.get_errno()
            if reason != errno.EINVAL:
                raise CapacityError(
                    f"the kernel gave no memory for {nbytes} bytes of {self.folder / ARENA_NAME} at {at}:"
                    f" {os.strerror(reason)}; free memory on this host or lower arena_bytes",
                    needed_bytes=nbytes,
                )
            # A kernel before 5.14: reading a byte of each page does the same.
            int(np.frombuffer(held, np.uint8)[:: mmap.PAGESIZE].max(initial=0))
        return nbytes

    def files_present(self, arena_fd: int) -> dict[str, bool]:
        """Return for the arena's two files, by name, whether each is still the one in the folder."""
        files = ((ARENA_NAME, arena_fd), (SLOTS_NAME, self._slots_fd))
        return {name: is_at(self.folder / name, os.fstat(fd)) for name, fd in files}

    def close(self) -> None:
        """Unmap; if the caller still holds views, the memory goes with the last of them. Idempotent."""
        mapped, self._map = self._map, None
        if mapped is None:
            return
        _OPEN.discard(self)
        self._close_slots()
        self._view.release()
        with contextlib.suppress(BufferError):
            mapped.close()

    def _close_in_child(self) -> None:
        """Forget the mapping in a forked child, which never had it (MADV_DONTFORK).

        The mmap object would still unmap the range when it dies, and by then the child may have
        other memory there. So the empty range is taken first; if it cannot be, the object is kept.
        """
        mapped, self._map = self._map, None
        if mapped is None:
            return
        self._close_slots()
        self._view.release()
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED_NOREPLACE
        got = _libc.mmap(self._address, self.nbytes, _PROT_NONE, flags, -1, 0)
        if got == self._address:
            with contextlib.suppress(BufferError):
                mapped.close()
            return
        if got is not None and got != ctypes.c_void_p(-1).value:
            _libc.munmap(got, self.nbytes)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(mapped))

    def _steps(self, slots: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield (offset, bytes) of neighbouring slots joined, in steps of at most 64 MiB."""
        for first, count in runs(slots, max(1, STEP_NBYTES // self.chunk_bytes)):
            yield first * self.chunk_bytes, count * self.chunk_bytes

    def _check_slot(self, slot: int) -> None:
        if 0 <= slot < self._slots_count or 0 <= slot < self.slots_count:
            if (slot + 1) * self.chunk_bytes <= self.nbytes:
                return
            raise IndexError(f"slot {slot} lies beyond the {self.nbytes} bytes mapped of {self.folder}: map it again")
        raise IndexError(f"slot {slot} is outside the {self._slots_count} claimed slots of {self.folder}")

    def _check_open(self) -> None:
        if self._map is None:
            raise ClosedError(f"the mapping of {self.folder} is closed (in a forked child it always is)")


def _close_all_in_child() -> None:
    for mapping in list(_OPEN):
        mapping._close_in_child()
    _OPEN.clear()


_OPEN: weakref.WeakSet[ArenaMapping] = weakref.WeakSet()
os.register_at_fork(after_in_child=_close_all_in_child)


# -- slot sample --------------------------------------------------------------------------------------
# A look at the bytes of slots by two processes: do a rank that filled them and its holder see the same memory? (R8)


LINES_COUNT = 4  # of each chunk: half a percent of the copy, measured with 1 GiB in chunks of 4 MiB
DIGEST_BYTES = 8
_GOLDEN = 0x9E3779B97F4A7C15  # splitmix64; numpy's own generators may differ between two versions of it
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def sample(mapping: ArenaMapping, slots: Sequence[int], nbytes: int, seed: int) -> SlotSample:
    """Return what this process sees of a stream of `nbytes` in these slots; errors as `ArenaMapping.view`."""
    lines = mapping.lines(slots, _places(seed, len(slots), nbytes, mapping.chunk_bytes))
    return SlotSample(seed=seed, digests=b"".join(xxhash.xxh3_64_digest(chunk) for chunk in lines))


def differing(mapping: ArenaMapping, slots: Sequence[int], nbytes: int, seen: SlotSample) -> list[int]:
    """Return the chunks of which another process has seen other bytes than this one sees.

    Raises:
        IntegrityError: The rank's sample does not fit the number of chunks.
    """
    if len(seen.digests) != len(slots) * DIGEST_BYTES:
        raise IntegrityError(f"it came without a sample of its {len(slots)} chunks")
    ours = sample(mapping, slots, nbytes, seen.seed).digests
    return [i for i in range(len(slots)) if _at(ours, i) != _at(seen.digests, i)]


def _at(digests: bytes, index: int) -> bytes:
    return digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]


def _places(seed: int, count: int, nbytes: int, chunk_bytes: int) -> npt.NDArray[np.int64]:
    """Return the numbers of some cache lines of every chunk, `[count, LINES_COUNT]`; the last chunk may be short."""
    x = np.arange(1, count * LINES_COUNT + 1, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(seed % (1 << 64))
    for shift, factor in _MIX:
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    x ^= x >> np.uint64(31)
    limits = np.full(count, chunk_bytes // LINE_BYTES, np.uint64)
    if count:
        limits[-1] = -(-(nbytes - (count - 1) * chunk_bytes) // LINE_BYTES)
    places: npt.NDArray[np.int64] = (x.reshape(count, LINES_COUNT) % limits[:, None]).astype(np.int64)
    return places

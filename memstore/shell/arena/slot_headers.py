"""One 64-byte record for every slot of the arena, in a mapped file that outlives the holder (R6, R7, R8).

A 4 KiB file header (magic, format version, chunk size, claimed slots, the arena's id, a checksum), then the
records. The whole file is allocated when it is made, so that storing into it cannot meet a full
file system, which would be a SIGBUS. References are not stored: they are recounted from manifests.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from memstore.core.arena.memory_ports import SlotHeader
from memstore.core.arena.slot_table import SlotState
from memstore.core.format.releases import reader_of
from memstore.errors import CapacityError, ConfigError, IntegrityError
from memstore.shell.arena.folder import commands_for, open_file

SLOTS_NAME = "slots"
FORMAT_VERSION = 3  # of all files in the folder (R40); 2: the arena's id; 3: a checksum
DAMAGED_NAME = "slots.damaged"  # what was put aside
HEADER_NBYTES = 4096
RECORD_NBYTES = 64

_MAGIC = b"MEMSLOTS"
_HEADER = struct.Struct("<8sIIQ16s")  # magic, version, chunk_bytes, slots_count, arena_id
_SLOTS_COUNT_AT = 16
_CHECKSUM_AT = HEADER_NBYTES - 8  # the same in every version, of all before it but the slots' count
_U64 = struct.Struct("<Q")
_BODY = struct.Struct("<I16sIIQQd")  # after the state byte and three bytes of padding
_BODY_AT = 4
_CONTENT_NBYTES = 20  # nbytes and digest
_CONTENT_END = _BODY_AT + _CONTENT_NBYTES

RECORD_DTYPE = np.dtype(
    {
        "names": ["state", "nbytes", "digest", "owner_pid", "attempt", "owner_start", "generation", "last_verified"],
        "formats": ["u1", "<u4", "V16", "<u4", "<u4", "<u8", "<u8", "<f8"],
        "offsets": [0, 4, 8, 24, 28, 32, 40, 48],
        "itemsize": RECORD_NBYTES,
    }
)


@dataclass(frozen=True, slots=True)
class FileHeader:
    """What every process that maps the arena must know."""

    chunk_bytes: int
    slots_count: int  # claimed: these slots have memory behind them, but for free ones that gave it back
    arena_id: bytes  # 16 random bytes, drawn when the table was made


def read_file_header(fd: int, path: Path) -> FileHeader:
    """Read the header of a slots file without mapping it; the caller keeps the fd.

    Raises:
        IntegrityError: The file is not a slots file, or its numbers contradict its size.
        ConfigError: It has another format version.
    """
    raw = os.pread(fd, HEADER_NBYTES, 0)
    leftovers = _discard_command(path.parent)
    is_ours = len(raw) == HEADER_NBYTES and raw[:8] == _MAGIC
    checksum = raw[_CHECKSUM_AT:]
    if not is_ours or (any(checksum) and checksum != _checksum(raw)):  # versions before 3 had none
        raise IntegrityError(f"{path} is not a slot table: its header is damaged; {leftovers} removes it")
    _, version, chunk_bytes, slots_count, arena_id = _HEADER.unpack_from(raw)
    if version != FORMAT_VERSION:
        raise ConfigError(
            f"{path} has format {version}, this memstore reads {FORMAT_VERSION}: {reader_of('arena', version)},"
            f" or give the data up with {leftovers}"
        )
    room = (os.fstat(fd).st_size - HEADER_NBYTES) // RECORD_NBYTES
    if chunk_bytes <= 0 or chunk_bytes % mmap.PAGESIZE or slots_count > room:
        raise IntegrityError(
            f"{path} is damaged: it claims {slots_count} slots of {chunk_bytes} bytes, with room for {room} records;"
            f" {leftovers} removes it"
        )
    return FileHeader(chunk_bytes, slots_count, arena_id)


def _checksum(header: bytes) -> bytes:
    return _U64.pack(xxhash.xxh3_64_intdigest(header[:_SLOTS_COUNT_AT] + header[_SLOTS_COUNT_AT + 8 : _CHECKSUM_AT]))


def _discard_command(folder: Path) -> str:
    return commands_for(folder, f"`memstore down --leftovers --discard --host {folder.name}`")


class SlotHeaders:
    """The holder's mapped table of slot records; one writer, which holds the arena's lock."""

    def __init__(self, folder: Path, fd: int, header: FileHeader, put_aside: str = "") -> None:
        self.path = folder / SLOTS_NAME
        self.put_aside = put_aside  # why an earlier table was, "" if none
        self.chunk_bytes = header.chunk_bytes
        nbytes = os.fstat(fd).st_size
        self.capacity = (nbytes - HEADER_NBYTES) // RECORD_NBYTES
        self._map = mmap.mmap(fd, nbytes)
        self._slots_count = header.slots_count

    @property
    def file_bytes(self) -> int:
        """Return the size of the table's file."""
        return len(self._map)

    @classmethod
    def open(cls, folder: Path, *, chunk_bytes: int, capacity: int) -> SlotHeaders:
        """Create or adopt the table, with room for at least `capacity` records; a damaged one is put aside first.

        Raises:
            ConfigError: The table was made for another chunk size.
            CapacityError: The file system has no room for the table.
        """
        path, put_aside = folder / SLOTS_NAME, ""
        try:
            fd = open_file(folder, SLOTS_NAME, os.O_RDWR)
        except FileNotFoundError:
            fd = _create(folder, chunk_bytes, capacity)
        try:
            try:
                header = read_file_header(fd, path)
            except IntegrityError:
                nbytes = os.fstat(fd).st_size
                path.replace(folder / DAMAGED_NAME)
                os.close(fd)
                fd = _create(folder, chunk_bytes, capacity)
                header = read_file_header(fd, path)
                put_aside = (
                    f"{path} was no slot table any more ({nbytes} bytes, header damaged or missing): it was put aside "
                    f"as {DAMAGED_NAME} and this host began empty; its shards come from their other copies"
                )
            if header.chunk_bytes != chunk_bytes:
                advice = f"give the data up with {_discard_command(folder)}"
                raise ConfigError(
                    f"the arena in {folder} was made with chunk_bytes={header.chunk_bytes}, this configuration says"
                    f" {chunk_bytes}: use {header.chunk_bytes}, or {advice}"
                )
            if os.fstat(fd).st_size < HEADER_NBYTES + capacity * RECORD_NBYTES:
                _allocate(fd, path, capacity)
            return cls(folder, fd, header, put_aside)
        finally:
            os.close(fd)

    @property
    def slots_count(self) -> int:
        """Slots that are claimed, so that have memory behind them."""
        return self._slots_count

    @slots_count.setter
    def slots_count(self, count: int) -> None:
        if not 0 <= count <= self.capacity:
            raise ValueError(f"slots_count {count} is outside 0..{self.capacity}")
        self._slots_count = count
        _U64.pack_into(self._map, _SLOTS_COUNT_AT, count)

    def read(self, slot: int) -> SlotHeader:
        """Return one record; a state byte that means nothing is a ValueError."""
        at = self._offset(slot)
        return SlotHeader(SlotState(self._map[at]), *_BODY.unpack_from(self._map, at + _BODY_AT))

    def write(self, slot: int, header: SlotHeader) -> None:
        """Store one record so that a death between any two stores leaves no slot sealed by mistake (R7).

        The state byte goes last. A sealed record that changes its content is unsealed first.
        """
        at = self._offset(slot)
        if header.nbytes > self.chunk_bytes:
            raise ValueError(f"slot {slot} cannot hold {header.nbytes} bytes: chunk_bytes is {self.chunk_bytes}")
        if len(header.digest) != 16:
            raise ValueError(f"a slot digest has 16 bytes, got {len(header.digest)}")
        body = _BODY.pack(*header[1:])
        if self._map[at] == SlotState.SEALED and self._map[at + _BODY_AT : at + _CONTENT_END] != body[:_CONTENT_NBYTES]:
            self._map[at] = SlotState.FREE
        self._map[at + _BODY_AT : at + _BODY_AT + len(body)] = body
        self._map[at] = header.state

    def all(self) -> npt.NDArray[Any]:
        """Return a copy of the claimed slots' records as a structured array, `[slots_count]`, by RECORD_DTYPE."""
        table: npt.NDArray[Any] = np.frombuffer(self._map, RECORD_DTYPE, self._slots_count, HEADER_NBYTES).copy()
        return table

    def free_impossible(self, *, slots_with_bytes: int) -> dict[int, str]:
        """Free the records that cannot be true; return why, by slot. For adoption, before anything is served.

        `slots_with_bytes` is how many slots the arena file still covers.
        """
        table = self.all()
        unknown = table["state"] > SlotState.SEALED
        too_long = table["nbytes"] > self.chunk_bytes
        ownerless = (table["state"] == SlotState.LEASED) & (table["owner_pid"] == 0)
        bodiless = (table["state"] != SlotState.FREE) & (np.arange(len(table)) >= slots_with_bytes)
        reasons: dict[int, str] = {}
        for slot in np.flatnonzero(unknown | too_long | ownerless | bodiless).tolist():
            record = table[slot]
            if unknown[slot]:
                reasons[slot] = f"state {record['state']} does not exist"
            elif too_long[slot]:
                reasons[slot] = f"{record['nbytes']} bytes do not fit into {self.chunk_bytes}"
            elif ownerless[slot]:
                reasons[slot] = "leased by no process"
            else:
                reasons[slot] = f"the arena file ends after {slots_with_bytes} slots"
            at = self._offset(slot)
            self._map[at] = SlotState.FREE
            self._map[at : at + RECORD_NBYTES] = bytes(RECORD_NBYTES)
        return reasons

    def close(self) -> None:
        """Unmap the table; a second call does nothing."""
        self._map.close()

    def _offset(self, slot: int) -> int:
        if not 0 <= slot < self._slots_count:
            raise IndexError(f"slot {slot} is outside the {self._slots_count} claimed slots of {self.path}")
        return HEADER_NBYTES + slot * RECORD_NBYTES


def _create(folder: Path, chunk_bytes: int, capacity: int) -> int:
    """Make the file whole under another name, then rename: half a table is never seen."""
    temporary = f".{SLOTS_NAME}-{os.getpid()}"
    fd = open_file(folder, temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        _allocate(fd, folder / temporary, capacity)
        header = _HEADER.pack(_MAGIC, FORMAT_VERSION, chunk_bytes, 0, secrets.token_bytes(16)).ljust(
            _CHECKSUM_AT, b"\0"
        )
        os.pwrite(fd, header + _checksum(header), 0)
        os.rename(folder / temporary, folder / SLOTS_NAME)
    except BaseException:
        os.close(fd)
        (folder / temporary).unlink(missing_ok=True)
        raise
    return fd


def _allocate(fd: int, path: Path, capacity: int) -> None:
    nbytes = HEADER_NBYTES + capacity * RECORD_NBYTES
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
            raise
        raise CapacityError(
            f"no room for the slot table {path}: it needs {nbytes} bytes for {capacity} slots and the file system is"
            " full; free room there, lower arena_bytes or set arena_dir",
            needed_bytes=nbytes,
        ) from error

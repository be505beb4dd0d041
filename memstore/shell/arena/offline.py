"""Arenas read without their holders: nothing is changed, no lock is taken, and what is not whole is left out (R6, R7).

For tools where neither Ray nor a holder answers. A live holder may write meanwhile, and the files may be cut short or
damaged: a chunk counts once its bytes match the digest in its manifest. Root reads other users' arenas, too. Files are
read, never mapped: one that gets shorter is no SIGBUS.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import numpy as np

from memstore.config import Config
from memstore.core.arena.slot_table import SlotState
from memstore.core.format.manifest import Chunk, chunk_digest, manifest_name
from memstore.core.journal.records import Entry, entries_of
from memstore.core.salvage import KnownShard, readable
from memstore.errors import ConfigError, MemstoreError
from memstore.shell.arena.folder import open_file
from memstore.shell.arena.journal_file import JOURNAL_NAME, read_records
from memstore.shell.arena.lock import owner
from memstore.shell.arena.manifests import MANIFEST_NBYTES_MAX, MANIFESTS_NAME
from memstore.shell.arena.mapping import ARENA_NAME
from memstore.shell.arena.slot_headers import HEADER_NBYTES, RECORD_DTYPE, RECORD_NBYTES, SLOTS_NAME, read_file_header
from recovery.inventory import Copy


class OfflineArena:
    """One host's arena as its files are now; a context manager. `problems` says what could not be read, and why."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.store, self.host = folder, folder.parent.name, folder.name
        self.problems: list[str] = []
        self.is_held = False  # its holder lives
        self.entries: list[Entry] = []
        self.shards: list[KnownShard] = []
        self.age_s: dict[str, float] = {}  # by a shard's digest: since its manifest was written
        self._fd, self._nbytes, self._chunk_bytes = -1, 0, 0
        for what in (self._read_lock, self._read_journal, self._read_manifests, self._read_arena):
            try:
                what()
            except (MemstoreError, OSError) as error:
                self.problems.append(str(error))

    def __enter__(self) -> OfflineArena:
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def copy(self, shard: KnownShard, has: Callable[[Chunk], object]) -> Copy:
        """Return a shard as a copy here, with the chunks of which `has` says that they are: `chunk`, or `is_listed`."""
        missing = frozenset(index for index, chunk in enumerate(shard.manifest.chunks) if not has(chunk))
        return Copy(shard.manifest.shard, shard.spec, self.host, missing)

    def is_dropped(self, shard: KnownShard) -> bool:
        """Return whether its manifest is gone by now: a live holder removes it before it frees the slots."""
        name = manifest_name(shard.manifest.shard, shard.spec.digest)
        return self.is_held and not (self.folder / MANIFESTS_NAME / name).exists()

    def is_listed(self, chunk: Chunk) -> bool:
        """Return whether the slot table names the chunk, and the file reaches so far; its bytes are not looked at."""
        ends = (slot * self._chunk_bytes + chunk.nbytes for slot in self._places.get(chunk.digest, ()))
        return any(end <= self._nbytes for end in ends)

    def chunk(self, chunk: Chunk) -> bytes | None:
        """Return a chunk whose bytes match its digest; None if there is none."""
        for slot in self._places.get(chunk.digest, ()):
            data = os.pread(self._fd, chunk.nbytes, slot * self._chunk_bytes)
            if len(data) == chunk.nbytes and chunk_digest(data) == chunk.digest:
                return data
        return None

    # -- files ------------------------------------------------------------------------------------

    def _read_lock(self) -> None:
        holding = owner(self.folder)
        self.is_held = holding is not None and holding.is_alive()

    def _read_journal(self) -> None:
        records = read_records(self.folder / JOURNAL_NAME)
        known = readable(records)
        self.entries = entries_of(self.host, known)
        if len(known) < len(records):
            self.problems.append(f"its journal has {len(records) - len(known)} records of another version")

    def _read_manifests(self) -> None:
        folder, now_s = self.folder / MANIFESTS_NAME, time.time()
        for name in sorted(os.listdir(folder)):
            if name.startswith("."):
                continue  # of a holder that is writing it, or died over it
            try:
                data, written_s = _read_whole(folder, name)
                shard = KnownShard.of(data)
                if name != manifest_name(shard.manifest.shard, shard.spec.digest):
                    raise MemstoreError("it does not hold what its name says")
            except FileNotFoundError:
                continue  # its step was dropped meanwhile
            except (MemstoreError, OSError) as error:
                self.problems.append(f"manifest {name} is left out: {error}")
                continue
            self.shards.append(shard)
            self.age_s[shard.spec.digest] = max(0.0, now_s - written_s)

    def _read_arena(self) -> None:
        self._fd = open_file(self.folder, ARENA_NAME, os.O_RDONLY)
        self._nbytes = os.fstat(self._fd).st_size

    @cached_property
    def _places(self) -> dict[bytes, list[int]]:
        """By digest, the slots that are sealed with it."""
        places: dict[bytes, list[int]] = {}
        if self._fd < 0:
            return places
        try:
            fd = open_file(self.folder, SLOTS_NAME, os.O_RDONLY)
            try:
                header = read_file_header(fd, self.folder / SLOTS_NAME)
                raw = os.pread(fd, header.slots_count * RECORD_NBYTES, HEADER_NBYTES)
            finally:
                os.close(fd)
        except (MemstoreError, OSError) as error:
            self.problems.append(str(error))
            return places
        self._chunk_bytes = header.chunk_bytes
        table = np.frombuffer(raw, RECORD_DTYPE, len(raw) // RECORD_NBYTES)
        for slot in np.flatnonzero(table["state"] == SlotState.SEALED).tolist():
            places.setdefault(table["digest"][slot].tobytes(), []).append(slot)
        return places


def _read_whole(folder: Path, name: str) -> tuple[bytes, float]:
    """Return a file's bytes and when it was written, by the wall clock."""
    fd = open_file(folder, name, os.O_RDONLY)
    with os.fdopen(fd, "rb") as file:
        return file.read(MANIFEST_NBYTES_MAX + 1), os.fstat(fd).st_mtime


def arena_folders(config: Config) -> list[Path]:
    """Return the folders of a store's hosts on this machine, for root those of whichever user has such a store.

    Raises:
        ConfigError: Root asks, and several users have one: what one of them wrote is not to count for another.
    """
    top = Path(config.arena_dir)
    users = sorted(top.glob("memstore-*")) if os.geteuid() == 0 else [top / f"memstore-{os.geteuid()}"]
    found = [user / config.store for user in users if _is_folder(user) and _is_folder(user / config.store)]
    found = [store for store in found if store.parent.name == f"memstore-{os.lstat(store.parent).st_uid}"]
    if len(found) > 1:
        names = ", ".join(store.parent.name.removeprefix("memstore-") for store in found)
        raise ConfigError(
            f"users {names} have a store {config.store!r} under {top} each: run this as one of them (sudo -u '#UID')"
        )
    return [path for store in found for path in sorted(store.glob("[!.]*")) if _is_folder(path)]


def _is_folder(path: Path) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False

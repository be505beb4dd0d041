"""The files of a living holder's folder: which of them were removed, and how they are written again (R2, R5, R35).

What follows from a removed file is decided in `core/holder/lost_files.py`.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memstore.core.holder.lost_files import FileLoss, look
from memstore.errors import CapacityError
from memstore.shell.arena.folder import is_at, make_folder, next_incarnation, open_file, write_secret
from memstore.shell.arena.journal_file import JOURNAL_NAME, JournalFile
from memstore.shell.arena.lock import ArenaLock, LockOwner
from memstore.shell.arena.manifests import ManifestFolder
from memstore.shell.holder.context import HolderContext

log = logging.getLogger("memstore")
NOTE_NAME = "lost"  # names for the successor what its predecessor found removed
NOTE_BYTES_MAX = 1000
SMALL_FILES_BYTES = 64 << 10  # secret, incarnation, note, lock, and folders


class FolderGuard:
    """The guard of one holder's folder. One thread calls `look`, a few times a second."""

    def __init__(
        self,
        context: HolderContext,
        lock_file: ArenaLock,
        journal: JournalFile,
        secret: bytes,
        *,
        records: Callable[[], list[bytes]],
        incarnation: Callable[[], int],
        on_lost: Callable[[], None],
    ) -> None:
        """Guard the folder as it is now.

        Args:
            context: The holder's.
            lock_file: The lock that the holder has on the folder; from now on it is this part's to hold.
            journal: The holder's journal.
            secret: The content of the folder's secret file.
            records: Returns the journal's records.
            incarnation: Returns the holder's present incarnation.
            on_lost: Reports the loss, then ends every connection: the rest is for a successor.
        """
        self.context, self.folder = context, context.folder
        self.lock_file, self.journal, self.secret = lock_file, journal, secret
        self._records, self._incarnation, self._on_lost = records, incarnation, on_lost
        self.loss = FileLoss(names=_take_note(self.folder))
        self._at_start = {name: os.lstat(self.folder / name) for name in (".", "secret", "holder.sock")}

    def stats(self) -> dict[str, Any]:
        """Return the heartbeat's fields: the removed names, and whether that is over."""
        return {"files_lost": self.loss.names, "files_lost_now": self.loss.is_now, "files_problem": self.loss.problem}

    def look(self) -> None:
        """Look once."""
        look(self, self.loss)

    def missing(self) -> list[str]:
        """Return the names of files that are gone, or are not the holder's any more."""
        replicas = self.context.replicas
        found = {name: is_at(self.folder / name, status) for name, status in self._at_start.items()}
        with replicas.lock:
            found |= {"manifests": replicas.manifests.is_whole(), **replicas.arena.files_present()}
        found |= {"lock": self.lock_file.is_current(), JOURNAL_NAME: self.journal.is_current()}
        if self.context.state.is_stopping():  # asked last: it says so before it takes its own files away
            return []
        return [{".": "the folder"}.get(name, name) for name, is_there in found.items() if not is_there]

    def prepare(self) -> None:
        """Have the folder and its lock, and room for all that is written again."""
        self._take_folder()
        self._check_room()

    def other_holder(self, error: Exception) -> bool:
        """Return whether `prepare` failed because another holder has the folder."""
        return isinstance(getattr(error, "owner", None), LockOwner)

    def say_loss(self, names: str) -> None:
        """Log the names that are gone."""
        log.error("host %s: %s removed from %s under this holder", self.context.host_id, names, self.folder)

    def last_word(self) -> None:
        """Report the loss, then end every connection."""
        self._on_lost()

    def end(self, why: str) -> None:
        """End the holder."""
        self.context.on_fatal(f"{self.folder}: {why}")

    def _take_folder(self) -> None:
        """Have the folder, and its lock, so that no other holder begins in it."""
        make_folder(self.context.config.arena_dir, store=self.folder.parent.name, host=self.folder.name)
        if not self.lock_file.is_current():
            self.lock_file = ArenaLock.take(self.folder, timeout_s=0.0)

    def _check_room(self) -> None:
        """Raise CapacityError if the file system has no room for the copy: the bytes here are served on.

        A chunk's bytes leave the old file when they are in the new one, so the arena itself takes one chunk more.
        """
        replicas = self.context.replicas
        with replicas.lock:
            sizes = [replicas.arena.headers.file_bytes, self.journal.nbytes, *replicas.manifests.sizes()]
        needed_bytes = sum(_in_pages(size) for size in sizes) + replicas.chunk_bytes + SMALL_FILES_BYTES
        room = os.statvfs(self.folder)
        free_bytes = room.f_bavail * room.f_frsize
        if free_bytes < needed_bytes:
            raise CapacityError(
                f"writing {self.folder} again needs {needed_bytes} bytes and its file system has {free_bytes} free; "
                "remove what else lies there, or enlarge it (mount -o remount,size=...)",
                needed_bytes=needed_bytes,
                free_bytes=free_bytes,
            )

    def write_again(self) -> None:
        """Write the files that a successor adopts: bytes, slot table, manifests, journal, and the rest."""
        replicas = self.context.replicas
        write_secret(self.folder, self.secret)
        next_incarnation(self.folder, self._incarnation())
        _leave_note(self.folder, self.loss.names)
        with replicas.lock:
            replicas.flush()
            replicas.arena.write_again()
            manifests = ManifestFolder.open(self.folder)
            replicas.manifests.copy_to(manifests)
            manifests.close()
        if not self.journal.is_current():
            records = self._records()
            with contextlib.closing(JournalFile.open(self.folder / JOURNAL_NAME)) as journal:
                journal.rewrite(records)


def _in_pages(nbytes: int) -> int:
    return -(-max(1, nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE


def _leave_note(folder: Path, lost: str) -> None:
    fd = open_file(folder, NOTE_NAME, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        os.write(fd, lost.encode()[:NOTE_BYTES_MAX])
    finally:
        os.close(fd)


def _take_note(folder: Path) -> str:
    """Return the names that the previous holder found removed, or "", and remove its note."""
    try:
        fd = open_file(folder, NOTE_NAME, os.O_RDONLY)
    except FileNotFoundError:
        return ""
    try:
        return os.read(fd, NOTE_BYTES_MAX).decode(errors="replace")
    finally:
        os.close(fd)
        (folder / NOTE_NAME).unlink(missing_ok=True)

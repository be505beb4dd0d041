"""The files of an arena, read and damaged without their holder."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np

from memstore.core.format.manifest import Manifest, decode_manifest
from memstore.errors import MemstoreError
from memstore.shell.arena.folder import check_folder
from memstore.shell.arena.manifests import MANIFESTS_NAME
from memstore.shell.arena.mapping import ARENA_NAME
from memstore.shell.arena.slot_headers import HEADER_NBYTES, RECORD_DTYPE, SLOTS_NAME


def arena_identity(folder: str | Path) -> tuple[int, int] | None:
    """Return device and inode of the arena file, or None if there is none. A newly made arena has other ones."""
    try:
        status = (Path(folder) / ARENA_NAME).lstat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def arena_nbytes(folder: str | Path) -> int:
    """Return the memory that the files of an arena folder take, in bytes."""
    return sum(p.stat().st_blocks * 512 for p in Path(folder).rglob("*") if p.is_file())


def destroy_arena(folder: str | Path) -> int:
    """Remove an arena folder with all its files, also while a holder has it; return its size in bytes."""
    path = Path(folder)
    if not path.exists():
        return 0
    nbytes = arena_nbytes(path)
    # Rename it first, which is one step: so a successor that starts right now finds no folder or its own new one.
    doomed = check_folder(path).with_name(f"{path.name}-lost-{time.time_ns()}")
    path.rename(doomed)
    shutil.rmtree(doomed)
    return nbytes


def slot_records(folder: str | Path) -> np.ndarray[Any, Any]:
    """Return the records of all slots, as the slot table has them now."""
    return np.fromfile(Path(folder) / SLOTS_NAME, RECORD_DTYPE, offset=HEADER_NBYTES)


def manifest_files(folder: str | Path) -> dict[Path, bytes]:
    """Return the manifest files of an arena with their bytes, without those that go while they are read."""
    found = {}
    for path in sorted((Path(folder) / MANIFESTS_NAME).glob("[!.]*")):
        with contextlib.suppress(OSError):
            found[path] = path.read_bytes()
    return found


def manifests(folder: str | Path) -> list[Manifest]:
    """Return the manifests of an arena whose holder lives."""
    found = []
    for data in manifest_files(folder).values():
        with contextlib.suppress(MemstoreError):
            found.append(decode_manifest(data))
    return found


def flip_bit(path: str | Path, at: int, bit: int) -> None:
    """Flip one bit of the byte `at` of a file."""
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ (1 << bit)]), at)
    finally:
        os.close(fd)

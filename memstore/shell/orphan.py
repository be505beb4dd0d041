"""When an arena's job is over for good: nobody has connected for `orphan_ttl_s` (R5)."""

from __future__ import annotations

import logging
import os
import shutil
import time
from pathlib import Path

from memstore.shell.arena_folder import open_file

log = logging.getLogger("memstore")
USED_NAME = "used"  # its modification time says when a rank connected last


def touch(folder: Path) -> None:
    """A rank connected: the arena is not an orphan."""
    fd = open_file(folder, USED_NAME, os.O_WRONLY | os.O_CREAT)
    os.utime(fd)
    os.close(fd)


def drop_orphan(folder: Path, ttl_s: float) -> None:
    """Empty an arena that no rank has connected to for `ttl_s`: its job is over (R5). The caller holds the lock."""
    used = folder / USED_NAME
    if used.exists() and time.time() - used.stat().st_mtime > ttl_s:
        log.warning("dropping the arena in %s: no rank connected for %.0f s", folder, ttl_s)
        for name in ("arena", "slots", "journal"):
            (folder / name).unlink(missing_ok=True)
        shutil.rmtree(folder / "manifests", ignore_errors=True)
        used.unlink()
    if not used.exists():
        touch(folder)

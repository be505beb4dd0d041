"""The number of a holder's life, in its host's folder: it only grows, and no clock has a part in it (R3)."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from memstore.core.holder import incarnation
from memstore.shell.arena.folder import open_file

INCARNATION_NAME = "incarnation"
FIRST_BITS = 48  # a folder that is new, or was lost, begins at random: no number of a former life comes twice
_WIDTH = 20


def next_incarnation(folder: Path, above: int = 0) -> int:
    """Take the number after the last life's, and after `above`, and keep it. The caller holds the arena's lock.

    It is written in place, in one call: that needs no room in a file system that is full.
    """
    fd = open_file(folder, INCARNATION_NAME, os.O_RDWR | os.O_CREAT)
    try:
        text = os.read(fd, _WIDTH)
        last = int(text) if len(text) == _WIDTH and text.isdigit() else secrets.randbits(FIRST_BITS)
        number = incarnation.following(last, above)
        os.pwrite(fd, f"{number:0{_WIDTH}d}".encode(), 0)
    finally:
        os.close(fd)
    return number

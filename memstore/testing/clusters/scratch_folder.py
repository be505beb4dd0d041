"""An arena folder under a random store name, which is removed afterwards, for tests and drills (R5)."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from memstore.shell.arena.folder import make_folder


@contextlib.contextmanager
def scratch_folder(arena_dir: str | os.PathLike[str] = "/dev/shm", *, host: str = "h1") -> Iterator[Path]:
    """Make `<arena_dir>/memstore-<uid>/test-<random>/<host>`, yield it, remove the whole store."""
    folder = make_folder(arena_dir, store=f"test-{uuid.uuid4().hex}", host=host)
    try:
        yield folder
    finally:
        shutil.rmtree(folder.parent, ignore_errors=True)
        with contextlib.suppress(OSError):  # other stores are there
            folder.parent.parent.rmdir()

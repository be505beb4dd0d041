"""An arena folder under a random store name, which is removed afterwards, for tests and drills (R5)."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from memstore.shell.arena.folder import make_folder
from memstore.testing.clusters.store_name import scratch_store_name


@contextlib.contextmanager
def scratch_folder(arena_dir: str | os.PathLike[str] = "/dev/shm", *, host: str = "h1") -> Iterator[Path]:
    """Make `<arena_dir>/memstore-<uid>/test-<process>-<random>/<host>`, yield it, remove the whole store."""
    folder = make_folder(arena_dir, store=scratch_store_name("test"), host=host)
    try:
        yield folder
    finally:
        shutil.rmtree(folder.parent, ignore_errors=True)
        with contextlib.suppress(OSError):  # other stores are there
            folder.parent.parent.rmdir()

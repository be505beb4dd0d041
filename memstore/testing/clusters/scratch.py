"""Scratch stores: names that show the process that made them, and arena folders that are removed afterwards (R5)."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from memstore.shell.arena.folder import make_folder

# -- store name ---------------------------------------------------------------------------------------
# Names of scratch stores, which show the process that made them.


_MAKER = re.compile(r"-p([1-9][0-9]*)(?![0-9A-Za-z])")


def scratch_store_name(prefix: str = "t") -> str:
    """Return a store name that no other has: the prefix, this process's id, a random token."""
    return f"{prefix}-p{os.getpid()}-{secrets.token_hex(4)}"


def racks(hosts_count: int, racks_count: int = 2) -> dict[str, dict[str, str]]:
    """Return the labels of hosts h1, h2, ... by turns in some racks."""
    return {f"h{i + 1}": {"rack": f"r{i % racks_count + 1}"} for i in range(hosts_count)}


def maker_pid(name: str) -> int | None:
    """Return the id of the process that made a name, also of a path that contains one; None if the name has none."""
    found = _MAKER.search(name)
    return int(found.group(1)) if found else None


# -- scratch folder -----------------------------------------------------------------------------------
# An arena folder under a random store name, which is removed afterwards, for tests and drills (R5).


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

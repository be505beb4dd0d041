"""A folder that appears whole or not at all, however the process that fills it ends."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from memstore.errors import ConfigError
from memstore.shell.arena.lock import is_alive, process_start_time


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield a folder beside `target` to fill; synced and renamed at the end, removed if anything is raised.

    What a killed process of this host left beside the same target is removed first.

    Raises:
        ConfigError: the target exists, or its parent does not.
        OSError: the file system refused something, such as for want of room.
    """
    _check_absent(target)
    if not target.parent.is_dir():
        raise ConfigError(f"{target.parent} is no folder: create it first", field="DIR", value=str(target))
    prefix = f".{target.name}.partial-{socket.gethostname()}-"
    _sweep(target.parent, prefix)
    folder = target.parent / f"{prefix}{os.getpid()}-{process_start_time(os.getpid()) or 0}"
    folder.mkdir()
    try:
        yield folder
        for path in [*sorted(folder.rglob("*")), folder]:
            _sync(path)
        _check_absent(target)
        folder.rename(target)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):
            raise error.__context__ from None  # torch's archive cannot be closed after the disk said no
        raise
    _sync(target.parent)


def _check_absent(target: Path) -> None:
    if os.path.lexists(target):
        raise ConfigError(f"{target} exists: name a folder that does not, or remove it first", field="DIR")


def _sweep(parent: Path, prefix: str) -> None:
    for left in parent.iterdir():
        pid, _, start = left.name.removeprefix(prefix).partition("-")
        if left.name.startswith(prefix) and pid.isdigit() and start.isdigit() and not is_alive(int(pid), int(start)):
            shutil.rmtree(left, ignore_errors=True)


def _sync(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)

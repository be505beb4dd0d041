"""Asking a running store: a link that joins nothing, found through the arena folders of this machine (R4).

Imports neither torch nor ray, so that holders, the controller and the command line stay light (R28).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from memstore.config import Config
from memstore.core.wire.codec import Request
from memstore.errors import MemstoreError, PeerUnreachable
from memstore.shell.arena.folder import commands_for
from memstore.shell.arena.lock import process_start_time
from memstore.shell.rank.holder_link import CONNECT_S, HolderLink

R = TypeVar("R")
ASK_S = 30.0


def store_root(config: Config) -> Path:
    """Return the folder that holds one folder per host of this store on this machine (R5)."""
    return Path(config.arena_dir) / f"memstore-{os.getuid()}" / config.store


def host_folders(config: Config) -> list[Path]:
    """Return the folders of this store's hosts on this machine."""
    root = store_root(config)
    return sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []


class Tool:
    """A link that joins nothing: for readers and the command line. A context manager."""

    def __init__(self, folder: Path, connect_s: float = CONNECT_S) -> None:
        if not (folder / "holder.sock").exists():
            advice = commands_for(folder, "start the store with `memstore up`")
            raise PeerUnreachable(f"no holder runs at {folder}: {advice}")
        start = process_start_time(os.getpid()) or 0
        nonce = f"tool-{os.getpid()}-{start}-{os.urandom(4).hex()}"
        self.link = HolderLink(folder, nonce=nonce, connect_s=connect_s)

    def __enter__(self) -> Tool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def ask(self, request: Request[R], timeout_s: float = ASK_S) -> R:
        """Ask the controller; its error is raised here."""
        return self.link.call(request, timeout_s)

    def close(self) -> None:
        """End the link."""
        self.link.close()


@contextlib.contextmanager
def any_tool(config: Config, avoid: Collection[str] = ()) -> Iterator[Tool]:
    """Yield what `open_any` returns, and close it."""
    with open_any(config, avoid) as tool:
        yield tool


def open_any(config: Config, avoid: Collection[str] = ()) -> Tool:
    """Return a Tool on any holder of this machine but those to avoid, for what is not about one host.

    Raises:
        PeerUnreachable: None answers.
    """
    root = store_root(config)
    folders = [path for path in host_folders(config) if path.name not in avoid]
    problems = []
    for folder in folders:
        try:
            return Tool(folder)
        except MemstoreError as exc:
            problems.append(f"{folder.name}: {exc}")
    detail = "; ".join(problems) or f"there is no arena under {root}"
    advice = config.commands("Run `memstore up`")
    if not os.path.isdir(config.arena_dir):
        detail, advice = f"{config.arena_dir} is no directory", "Name that of its arenas: --arena-dir, arena_dir="
    raise PeerUnreachable(f"no holder of store {config.store!r} answers on this machine: {detail}. {advice}")

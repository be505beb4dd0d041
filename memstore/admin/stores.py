"""Which stores of this user lie on this machine, and which of them know a job.

Said where a store lacks one, because a mistyped store name starts an empty store.
"""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from memstore.config import Config, check_name
from memstore.core.wire.calls import AskStatus
from memstore.errors import ConfigError, MemstoreError, PeerUnreachable, RecoveryError
from memstore.shell.arena.folder import held_bytes
from memstore.shell.arena.lock import is_held
from memstore.shell.rank.admin_link import Tool, host_folders, store_root

ASK_S = 2.0  # for all stores, which are asked beside one another


@dataclass(frozen=True)
class StoreHere:
    """A store with arenas on this machine; `jobs` are those of a live one, with their newest committed step."""

    store: str
    hosts: list[str]
    nbytes: int
    is_live: bool
    jobs: dict[str, int | None] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        jobs = ", ".join(job if step is None else f"{job} at step {step}" for job, step in self.jobs.items())
        return f"{self.store} (live: {jobs or 'no job'})" if self.is_live else f"{self.store} (left over)"


def stores_here(config: Config) -> list[StoreHere]:
    """Return this user's stores under `arena_dir` by name; live ones are asked for their jobs, at most `ASK_S`."""
    found: list[StoreHere] = []
    live: dict[Path, StoreHere] = {}
    top = store_root(config).parent
    for root in sorted(top.iterdir()) if top.is_dir() else []:
        with contextlib.suppress(OSError, ConfigError):  # gone, not ours, or no store's name
            check_name("store", root.name)
            hosts = sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
            held = [folder for folder in hosts if is_held(folder)]
            store = StoreHere(root.name, [path.name for path in hosts], sum(map(held_bytes, hosts)), bool(held))
            if hosts:
                found.append(store)
                live.update(dict.fromkeys(held, store))
    deadline_s = time.monotonic() + ASK_S
    with ThreadPoolExecutor(len(live) or 1) as pool:  # a holder that hangs holds up no other's answer
        for store, jobs in zip(live.values(), pool.map(lambda folder: _jobs(folder, deadline_s), live), strict=True):
            store.jobs.update(jobs)
    return found


def _jobs(folder: Path, deadline_s: float) -> dict[str, int | None]:
    """Ask the holder in a folder for its store's jobs, each with its newest committed step; none if it is silent."""
    with contextlib.suppress(MemstoreError, OSError), Tool(folder, max(0.0, deadline_s - time.monotonic())) as tool:
        rows = tool.ask(AskStatus(), timeout_s=max(0.0, deadline_s - time.monotonic())).jobs
        return {row.job: row.newest.committed_step if row.newest is not None else None for row in rows}
    return {}


def others_here(config: Config, job: str) -> str:
    """Return words about this user's other stores on this machine, first those that know the job; "" if none is."""
    return _others(config, job, stores_here(config))


def others_where_none_is(config: Config) -> str:
    """Return words about this user's other stores here if nothing of the named one is, else "": it may be mistyped."""
    others = others_here(config, "") if not host_folders(config) else ""
    return f"; {others}" if others else ""


def having(config: Config, job: str) -> str:
    """Return which other stores here have a job, each with the command that shows it; "" if none has."""
    names = [store.store for store in stores_here(config) if job in store.jobs and store.store != config.store]
    return shown_in(config, job, names, "on this machine")


def shown_in(config: Config, job: str, stores: list[str], where: str, address: str = "") -> str:
    """Return that other stores have a job, each with the command that shows it."""
    folder = "" if config.arena_dir == Config.arena_dir else f" --arena-dir {shlex.quote(config.arena_dir)}"
    commands = [f"`memstore ls --store {name}{folder}{address} {job}`" for name in stores]
    return f"it is in store {' and '.join(stores)} {where}: {', '.join(commands)}" if stores else ""


@contextlib.contextmanager
def naming_others(config: Config, job: str) -> Iterator[None]:
    """Name in an error the other stores here if the store that was asked does not know the job."""
    try:
        yield
    except (ConfigError, PeerUnreachable, RecoveryError) as error:
        found = stores_here(config)
        is_known = any(job in store.jobs for store in found if store.store == config.store)
        is_elsewhere = any(job in store.jobs for store in found)
        words = _others(config, job, found)
        if is_known or not words or (isinstance(error, RecoveryError) and not is_elsewhere):
            raise
        raise type(error)(f"{error}; {words}") from error


def _others(config: Config, job: str, found: list[StoreHere]) -> str:
    others = [store for store in found if store.store != config.store]
    knowing = [store.store for store in others if job in store.jobs]
    listed = ", ".join(str(store) for store in others[:10])
    if knowing:
        where = " and ".join(knowing)
        return f"job {job!r} has history in store {where}: is store={config.store!r} mistyped? Stores here: {listed}"
    return f"other stores here: {listed}" if others else ""

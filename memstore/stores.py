"""Which stores of this user lie on this machine, and which of them know a job: a mistyped name starts an empty one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from memstore.config import Config
from memstore.errors import ConfigError, MemstoreError, PeerUnreachable, RecoveryError
from memstore.shell.arena_folder import held_bytes
from memstore.shell.arena_lock import is_held
from memstore.shell.tool import any_tool, store_root

ASK_S = 2.0


@dataclass(frozen=True)
class StoreHere:
    """A store with arenas on this machine; `jobs` are those that a live one tells, with their newest committed step."""

    store: str
    hosts: list[str]
    nbytes: int
    is_live: bool
    jobs: dict[str, int | None] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, JSON-able."""
        return asdict(self)

    def __str__(self) -> str:
        jobs = ", ".join(job if step is None else f"{job} at step {step}" for job, step in self.jobs.items())
        return f"{self.store} (live: {jobs or 'no job'})" if self.is_live else f"{self.store} (left over)"


def stores_here(config: Config) -> list[StoreHere]:
    """Return this user's stores under `arena_dir` by name; a live one is asked for its jobs, with a short limit."""
    found = []
    top = store_root(config).parent
    for root in sorted(top.iterdir()) if top.is_dir() else []:
        with contextlib.suppress(OSError, ConfigError):  # gone, not ours, or no store's name
            hosts = sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
            if hosts:
                found.append(_store_here(config.with_fields({"store": root.name}), hosts))
    return found


def _store_here(config: Config, hosts: list[Path]) -> StoreHere:
    is_live = any(is_held(folder) for folder in hosts)
    jobs: dict[str, int | None] = {}
    if is_live:
        with contextlib.suppress(MemstoreError), any_tool(config) as tool:
            jobs = {row["job"]: row.get("committed_step") for row in tool.ask("status", timeout_s=ASK_S)["jobs"]}
    nbytes = sum(map(held_bytes, hosts))
    return StoreHere(config.store, [folder.name for folder in hosts], nbytes, is_live, jobs)


def others_here(config: Config, job: str) -> str:
    """Return words about this user's other stores on this machine, first those that know the job; "" if none is."""
    return _others(config, job, stores_here(config))


@contextlib.contextmanager
def naming_others(config: Config, job: str) -> Iterator[None]:
    """Add to an error which other stores here know the job, where the one that was asked does not."""
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

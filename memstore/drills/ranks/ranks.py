"""The drill's ranks: Ray actors that put, get and compare. Each rank of each attempt is a process."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from memstore.config import Config
from memstore.errors import ConfigError, DrillError, MemstoreError
from memstore.shell.arena.lock import process_start_time

CALL_S = 120.0  # limit for a call to all ranks; on a busy machine the start of a worker process is part of it


@dataclass(frozen=True)
class Restored:
    """The result of one rank's get, compared with a fresh state; or the error that it raised."""

    rank: int
    step: int | None = None
    verdict: str = ""
    reason: str = ""
    nbytes: int = 0
    bytes_equal: int = 0
    differences: tuple[str, ...] = ()
    ranks_moved: tuple[int, ...] = ()
    bytes_by_tier: dict[str, int] = field(default_factory=dict)
    seconds_by_phase: dict[str, float] = field(default_factory=dict)
    error: str = ""
    message: str = ""

    @property
    def problem(self) -> str:
        """Return why this is not the whole right shard, as text; "" if every byte of it is equal."""
        if self.error:
            return self.message or self.error
        if self.differences or not self.bytes_equal == self.nbytes > 0:
            return "; ".join(self.differences[:2]) or f"{self.bytes_equal} of {self.nbytes} bytes are equal"
        return ""


def compared(got: Any, state: Any, rank: int, seed: int, nbytes: int) -> Restored:
    """Compare a state, all or a part of what a get() returned, with the one made from (seed, rank, its step)."""
    from memstore.drills.ranks.training import compare, make_state

    fresh = make_state(seed, rank, got.step, nbytes)
    equal, differences = compare(state, fresh)
    whole, _ = compare(fresh, fresh)
    return Restored(
        rank, got.step, got.source, got.source_reason, whole, equal, tuple(differences), got.ranks_moved,
        dict(got.bytes_by_tier), dict(got.seconds_by_phase),
    )  # fmt: skip


@dataclass(frozen=True)
class PutRow:
    """The result of one put, as the rank saw it."""

    step: int
    stall_s: float
    error: str = ""


class DrillRank:
    """One rank in a Ray worker process; it can join attempts of different jobs, one after the other."""

    def __init__(self) -> None:
        import torch

        torch.set_num_threads(1)
        self.store: Any = None
        self.seed = self.nbytes = 0

    def who(self) -> tuple[int, int]:
        """Return pid and start time of this process."""
        return os.getpid(), process_start_time(os.getpid()) or 0

    def join(
        self, job: str, rank: int, world_size: int, key: str, config: Config, *, fresh: bool, seed: int, nbytes: int
    ) -> int:
        """Connect to the job; return the number of the attempt."""
        import memstore

        self.seed, self.nbytes = seed, nbytes
        self.store = memstore.connect(job, rank=rank, world_size=world_size, attempt=key, config=config, fresh=fresh)
        return int(self.store.attempt)

    def put(self, first: int, last: int, pause_s: float = 0.0, mark: str = "") -> list[PutRow]:
        """Put the states of the steps `first` to `last`, and wait `pause_s` after each; return a row for each.

        The file `mark` holds the step while its put is under way, and is empty between two puts.
        """
        from memstore.drills.ranks.training import make_state

        rows = []
        for step in range(first, last + 1):
            state = make_state(self.seed, self.store.rank, step, self.nbytes)
            if mark:
                Path(mark).write_text(str(step))
            started_s = time.perf_counter()
            try:
                rows.append(PutRow(step, self.store.put(step, state).stall_s))
            except MemstoreError as exc:
                rows.append(PutRow(step, time.perf_counter() - started_s, f"{type(exc).__name__}: {exc}"))
            if mark:
                Path(mark).write_text("")
            time.sleep(pause_s)
        return rows

    def wait(self, level: str, timeout_s: float) -> int:
        """Wait until the newest put has reached a level, if it was not skipped; return the newest committed step."""
        self.store.flush(level, timeout_s)
        return int(self.store.latest_step())

    def restore(self, timeout_s: float, *, is_altered: bool = False, **which: int) -> Restored:
        """Call get(), and compare every byte with a fresh state made from (seed, rank, step).

        `which` is empty for the restore of an attempt, or names the step and the rank to read beside training (R27).
        """
        from memstore.drills.ranks.training import alter

        rank = which.get("rank", self.store.rank)
        try:
            got = self.store.get(timeout_s=timeout_s, **which)
        except MemstoreError as exc:
            return Restored(rank, error=type(exc).__name__, message=str(exc))
        if got is None:
            words = "get() returned None: the store says that the job has no history"
            return Restored(rank, error="None", message=words)
        if is_altered:
            alter(got.state)
        return compared(got, got.state, rank, self.seed, self.nbytes)

    def leave(self) -> None:
        """Close the store; after that the process can join another job."""
        if self.store is not None:
            self.store.close()
            self.store = None


@dataclass
class Rank:
    """The drill's handle of one rank process."""

    actor: Any
    host: str
    pid: int = 0
    start: int = 0

    def call(self, name: str, *args: Any, **options: Any) -> Any:
        """Begin a call of a method of `DrillRank`; return what `collect` takes."""
        return getattr(self.actor, name).remote(*args, **options)

    def end(self) -> None:
        """Kill the process."""
        ray.kill(self.actor)


class RankPool:
    """A pool of rank processes, so that those of an ended drill serve the next one."""

    def __init__(self) -> None:
        self._idle: list[Rank] = []

    def start(self, host: str, nodes: dict[str, str]) -> Rank:
        """Start a rank's process on a host; it may not run yet."""
        node = NodeAffinitySchedulingStrategy(nodes[host], soft=False)
        options = {"num_cpus": 0, "max_restarts": 0, "scheduling_strategy": node}
        return Rank(ray.remote(DrillRank).options(**options).remote(), host)

    def take(self, hosts: Sequence[str], nodes: dict[str, str]) -> list[Rank]:
        """Return one rank per entry of `hosts`, an idle one if there is one; `nodes` maps hosts to Ray nodes.

        Raises:
            DrillError: a process did not start.
        """
        found, new = [], []
        for host in hosts:
            rank = next((r for r in self._idle if r.host == host), None)
            if rank is not None:
                self._idle.remove(rank)
            else:
                rank = self.start(host, nodes)
                new.append(rank)
            found.append(rank)
        for rank, who in zip(new, collect([r.call("who") for r in new], "start"), strict=True):
            rank.pid, rank.start = who
        return found

    def give_back(self, ranks: Sequence[Rank]) -> None:
        """Keep ranks that have left their job, for the next drill."""
        self._idle += ranks

    def forget(self, host: str) -> None:
        """Drop the idle ranks of a host whose processes are gone."""
        self._idle = [r for r in self._idle if r.host != host]

    def close(self) -> None:
        """Kill every idle process."""
        kill_actors(self._idle)
        self._idle = []


def kill_actors(ranks: Sequence[Rank]) -> None:
    """Kill rank processes as a launcher does; skip those that are gone."""
    for rank in ranks:
        with contextlib.suppress(Exception):
            rank.end()


def collect(calls: Sequence[Any], what: str, timeout_s: float = CALL_S) -> list[Any]:
    """Return the results of calls to all ranks.

    Raises:
        DrillError: a rank died, raised or did not answer in time; so the drill itself does not work.
        ConfigError: a rank raised it.
    """
    if not calls:  # without Ray, ray.get would start a Ray cluster
        return []
    if isinstance(calls[0], Future):
        return _collect_threads(calls, what, timeout_s)
    try:
        return list(ray.get(list(calls), timeout=timeout_s))
    except ray.exceptions.RayTaskError as exc:
        cause = exc.cause if exc.cause is not None else exc
        if isinstance(cause, ConfigError):
            raise cause from None
        raise DrillError(f"{what}: a rank of the drill raised {type(cause).__name__}: {cause}") from exc
    except ray.exceptions.GetTimeoutError as exc:
        raise DrillError(f"{what}: the drill's ranks did not answer within {timeout_s:g} s") from exc
    except ray.exceptions.RayError as exc:
        raise DrillError(f"{what}: a rank of the drill is gone: {str(exc).splitlines()[0]}") from exc


def _collect_threads(calls: Sequence[Any], what: str, timeout_s: float) -> list[Any]:
    """Return the results of calls to rank processes (`rank_processes.py`), each of which has a thread for its calls."""
    deadline_s = time.monotonic() + timeout_s
    try:
        return [call.result(timeout=max(0.0, deadline_s - time.monotonic())) for call in calls]
    except FutureTimeout as exc:
        raise DrillError(f"{what}: the drill's ranks did not answer within {timeout_s:g} s") from exc
    except ConfigError:
        raise
    except MemstoreError as exc:
        raise DrillError(f"{what}: a rank of the drill raised {exc}") from exc
    except OSError as exc:
        raise DrillError(f"{what}: a rank of the drill is gone: {exc}") from exc

"""The drill's handles of ranks: a Ray actor or a forked process for each rank of each attempt.

Both carry the commands of `memstore.testing.ranks.rank`, so that scenes and flows serve both. Forked ranks survive a
network cut: Ray would kill the raylet of a host that is cut off, and its ranks with it, and the drill would prove
something else.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from memstore.errors import ConfigError, DrillError
from memstore.testing.ranks.rank import RankProgram
from memstore.testing.ranks.rank_process import RankFailed, RankNursery, RankProcess

CALL_S = 120.0  # limit for a call to all ranks; on a busy machine the start of a worker process is part of it
ANSWER_S = 3 * CALL_S  # of a forked rank, above the time-out of every caller of `collect`


@dataclass
class Rank:
    """The drill's handle of one rank process."""

    actor: Any
    host: str
    pid: int = 0
    start: int = 0

    def call(self, do: str, **command: Any) -> Future[Any]:
        """Begin a command of `RankProgram`; return its Future."""
        found: Future[Any] = self.actor.answer.remote(do, command).future()
        return found

    def end(self) -> None:
        """Kill the process."""
        ray.kill(self.actor)


@dataclass
class ForkedRank(Rank):
    """The drill's handle of one forked rank, whose calls run in order."""

    def __post_init__(self) -> None:
        self.process: RankProcess = self.actor
        self._caller = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"drill-rank-{self.process.pid}")

    def call(self, do: str, **command: Any) -> Future[Any]:
        """Queue a command; return its Future."""
        return self._caller.submit(self._call, do, command)

    def _call(self, do: str, command: dict[str, Any]) -> dict[str, Any]:
        try:
            self.process.begin(do, **command)
            return self.process.finish(ANSWER_S)
        except RankFailed as failed:
            if failed.error == "ConfigError":
                raise ConfigError(failed.message) from None
            raise
        except (EOFError, ValueError) as exc:
            raise ConnectionError(f"rank process {self.process.pid} is gone: {exc}") from exc

    def end(self) -> None:
        """Kill the process."""
        self.process.kill()
        self._caller.shutdown(cancel_futures=True)  # a call that is under way ends now, with the pipe


class RankPool:
    """A pool of rank processes, so that those of an ended drill serve the next one."""

    def __init__(self) -> None:
        self._idle: list[Rank] = []

    def start(self, host: str, nodes: dict[str, str]) -> Rank:
        """Start a rank's process on a host; it may not run yet."""
        node = NodeAffinitySchedulingStrategy(nodes[host], soft=False)
        options = {"num_cpus": 0, "max_restarts": 0, "scheduling_strategy": node}
        return Rank(ray.remote(RankProgram).options(**options).remote(), host)

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
            rank.pid, rank.start = who["pid"], who["start"]
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


class ForkedPool(RankPool):
    """A pool of forked ranks, each in the network namespace of its host."""

    def __init__(self, nursery: RankNursery, namespace: Callable[[str], str]) -> None:
        super().__init__()
        self._nursery, self._namespace = nursery, namespace
        self._launcher = secrets.token_hex(8)

    def start(self, host: str, nodes: dict[str, str]) -> ForkedRank:
        """Fork a rank in the namespace of a host."""
        env = {"MEMSTORE_HOST": host, "TORCHELASTIC_RUN_ID": self._launcher}
        return ForkedRank(self._nursery.start(0, env, namespace=self._namespace(host)), host)

    def give_back(self, ranks: Sequence[Rank]) -> None:
        """Kill the ranks; a new fork costs less than to keep a process and a thread."""
        kill_actors(ranks)


def kill_actors(ranks: Sequence[Rank]) -> None:
    """Kill rank processes as a launcher does; skip those that are gone."""
    for rank in ranks:
        with contextlib.suppress(Exception):
            rank.end()


def collect(calls: Sequence[Future[Any]], what: str, timeout_s: float = CALL_S) -> list[Any]:
    """Return the results of calls to all ranks.

    Raises:
        DrillError: a rank died, raised or did not answer in time; so the drill itself does not work.
        ConfigError: a rank raised it.
    """
    deadline_s = time.monotonic() + timeout_s
    try:
        return [call.result(timeout=max(0.0, deadline_s - time.monotonic())) for call in calls]
    except FutureTimeout as exc:
        raise DrillError(f"{what}: the drill's ranks did not answer within {timeout_s:g} s") from exc
    except RankFailed as exc:
        raise DrillError(f"{what}: a rank of the drill raised {exc}") from exc
    except ray.exceptions.RayTaskError as exc:
        cause = exc.cause if exc.cause is not None else exc
        if isinstance(cause, ConfigError):
            raise cause from None
        raise DrillError(f"{what}: a rank of the drill raised {type(cause).__name__}: {cause}") from exc
    except (ray.exceptions.RayError, OSError) as exc:
        raise DrillError(f"{what}: a rank of the drill is gone: {str(exc).splitlines()[0]}") from exc

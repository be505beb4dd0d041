"""The drill's ranks without Ray: `DrillRank` in processes that are forked from one that has imported torch.

They take the same calls as the actors of `ranks.py`, so that scenes and flows serve both. They survive a network cut:
Ray would kill the raylet of a host that is cut off, and its ranks with it, and the drill would prove something else.
Calls and answers are lines of JSON. Run as a module, this file is the process that forks the ranks.
"""

from __future__ import annotations

import logging
import secrets
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from memstore.config import Config
from memstore.drills.ranks.ranks import CALL_S, DrillRank, PutRow, Rank, RankPool, Restored, kill_actors
from memstore.errors import ConfigError, DrillError
from memstore.testing.ranks.rank_process import CommandedRank, RankFailed, RankNursery, RankProcess, nursery_main

ANSWER_S = 3 * CALL_S  # above the time-out of every caller of `collect`
KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in (Config, PutRow, Restored)}


def to_wire(value: Any) -> Any:
    """Return an argument or an answer of `DrillRank` as JSON values."""
    if type(value).__name__ in KINDS:
        return {"kind": type(value).__name__, "fields": asdict(value)}
    return [to_wire(item) for item in value] if isinstance(value, (list, tuple)) else value


def from_wire(value: Any) -> Any:
    """Return the value for which `to_wire` made these JSON values; lists in the fields of our classes were tuples."""
    if isinstance(value, dict) and "kind" in value:
        fields = {key: tuple(v) if isinstance(v, list) else v for key, v in value["fields"].items()}
        return KINDS[value["kind"]](**fields)
    return [from_wire(item) for item in value] if isinstance(value, list) else value


# -- the drill's side -----------------------------------------------------------------------------


@dataclass
class ProcessRank(Rank):
    """The drill's handle of one rank process, whose calls run in order."""

    def __post_init__(self) -> None:
        self.process: RankProcess = self.actor
        self._caller = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"drill-rank-{self.process.pid}")

    def call(self, name: str, *args: Any, **options: Any) -> Future[Any]:
        """Queue a call; return its Future."""
        return self._caller.submit(self._call, name, args, options)

    def _call(self, name: str, args: Sequence[Any], options: dict[str, Any]) -> Any:
        try:
            self.process.begin(name, args=to_wire(list(args)), options=options)
            return from_wire(self.process.finish(ANSWER_S)["value"])
        except RankFailed as failed:
            words = f"{failed.error}: {failed}" if failed.error not in str(failed) else str(failed)
            raise (ConfigError if failed.error == "ConfigError" else DrillError)(words) from None
        except (EOFError, ValueError) as exc:
            raise ConnectionError(f"rank process {self.process.pid} is gone: {exc}") from exc

    def end(self) -> None:
        """Kill the process."""
        self.process.kill()
        self._caller.shutdown(cancel_futures=True)  # a call that is under way ends now, with the pipe


class ProcessPool(RankPool):
    """A pool of rank processes, each in the network namespace of its host."""

    def __init__(self, nursery: RankNursery, namespace: Callable[[str], str]) -> None:
        super().__init__()
        self._nursery, self._namespace = nursery, namespace
        self._launcher = secrets.token_hex(8)

    def start(self, host: str, nodes: dict[str, str]) -> ProcessRank:
        """Fork a rank in the namespace of a host."""
        env = {"MEMSTORE_HOST": host, "TORCHELASTIC_RUN_ID": self._launcher}
        return ProcessRank(self._nursery.start(0, env, namespace=self._namespace(host)), host)

    def give_back(self, ranks: Sequence[Rank]) -> None:
        """Kill the ranks; a new fork costs less than to keep a process and a thread."""
        kill_actors(ranks)


# -- the rank's side ------------------------------------------------------------------------------


class DrillCommands(CommandedRank):
    """The rank process's end of the calls."""

    def __init__(self, channel: socket.socket) -> None:
        super().__init__(channel)
        self.rank = DrillRank()

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        """Make one call."""
        call = getattr(self.rank, command["do"])
        return {"value": to_wire(call(*from_wire(command["args"]), **command["options"]))}


if __name__ == "__main__":
    logging.getLogger("memstore").setLevel(logging.ERROR)  # faults make a rank's link log warnings
    import memstore.drills.ranks.training  # noqa: F401  (torch, imported before the first fork)

    nursery_main(DrillCommands)

"""A store of processes with one trained job, and the `memstore` command run on it in this process."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import threading
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

import memstore.client.connect
from memstore import errors
from memstore.cli import main
from memstore.cli.options import ASK_S, Where
from memstore.client.store import Store
from memstore.config import Config
from memstore.core.report.problems import problems
from memstore.core.wire.calls import RankCall
from memstore.core.wire.codec import tag_of
from memstore.core.wire.status_rows import HostRow, HostStats
from memstore.testing.clusters.processes import ProcessCluster
from memstore.testing.controller.holder import DirectedRank
from memstore.testing.controller.world import ControllerWorld
from memstore.testing.fuzz.messages import blank

HOSTS = {"h1": {"rack": "r1"}, "h2": {"rack": "r2"}, "h3": {"rack": "r1", "memstore": "replica"}}
STEPS = 3
_where = threading.local()  # the host a rank of this process runs on: two ranks, two hosts, one process


def on_every_rank(ranks: int, work: Callable[[int], Any]) -> list[Any]:
    """Run `work(rank)` on all ranks at once, as collective calls need; return what they returned."""
    results: list[Any] = [None] * ranks
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a rank hangs"
    if errors:
        raise errors[0]
    return results


def train(config: Config, job: str = "llama3-8b", hosts: tuple[str, ...] = ("h1", "h2")) -> list[Store]:
    """Connect one rank per host and commit STEPS steps; return the open stores."""
    stores = connect_all(config, job, hosts)

    def begin(rank: int) -> Store:
        assert stores[rank].get() is None
        for step in range(STEPS):
            state = {"w": np.random.default_rng((rank, step)).standard_normal((64, 1024)), "step": step}
            stores[rank].put(step, state).wait("committed", 10)
        return stores[rank]

    return on_every_rank(len(hosts), begin)


def connect_all(config: Config, job: str, hosts: tuple[str, ...] = ("h1", "h2")) -> list[Store]:
    """Connect one rank per host, all of this process."""
    quick = config.with_fields({"connect_timeout_s": 10.0})

    def begin(rank: int) -> Store:
        _where.host = hosts[rank]
        return memstore.client.connect.connect(job, rank=rank, world_size=len(hosts), config=quick)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memstore.client.connect, "rank_host", lambda env, root, labels: _where.host)
        return on_every_rank(len(hosts), begin)


@contextlib.contextmanager
def open_store(folder: Path) -> Iterator[ProcessCluster]:
    """Give a patient store of three hosts with one job of two ranks; for tests that change nothing."""
    with ProcessCluster(folder, HOSTS, detect=60.0) as cluster:
        ranks = train(cluster.config)
        yield cluster
        for rank in ranks:
            rank.close()


def run(cluster: ProcessCluster | None, *arguments: str) -> Result:
    """Run a verb on the cluster's store in this process."""
    where = ["--store", cluster.config.store] if cluster is not None else []
    return CliRunner().invoke(main, [*arguments, *where])


def run_json(cluster: ProcessCluster, *arguments: str, code: int = 0) -> dict[str, Any]:
    """Run a verb with --json; stdout must be one JSON document and the exit code `code`."""
    result = run(cluster, *arguments, "--json")
    assert result.exit_code == code, result.output
    body: dict[str, Any] = json.loads(result.stdout)
    return body


def run_remedies(cluster: ProcessCluster) -> list[str]:
    """Run every command that status recommends now; none may be wrong usage. Return them."""
    text = "\n".join(row["remedy"] for row in cluster.status()["problems"])
    commands = re.findall(r"`memstore ([^`]+)`", text)
    for command in commands:
        result = run(cluster, *shlex.split(command))
        assert result.exit_code in (0, 3, 4), f"{command}: {result.output}"
    return commands


def cells(screen: str, first: str) -> list[str]:
    """Return the cells of the row that begins with `first`; columns are two spaces apart."""
    line = next(line for line in screen.splitlines() if line.startswith(first))
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def host_causes(kind: str, stats: HostStats) -> list[str]:
    """Return the causes of the rows of one kind that status makes of a holder's heartbeat."""
    host = replace(blank(HostRow), host="h1", status="live", stats=stats)
    return [row.cause for row in problems([host], [], []) if row.kind == kind]


# -- desk ---------------------------------------------------------------------------------------------
# The `memstore` command against the real controller in virtual time, whose hosts hang and die when a test says so.


class Desk:
    """Takes what the command asks to the controller of a world, through one of its ranks."""

    def __init__(self, patch: pytest.MonkeyPatch, world: ControllerWorld, rank: DirectedRank) -> None:
        self.world, self.rank = world, rank
        patch.setattr(Where, "ask", lambda where, request, limit_s=ASK_S: self.ask(request, limit_s))
        clock = SimpleNamespace(monotonic=lambda: world.now, sleep=world.run)
        for module in ("lifecycle", "status"):
            patch.setattr(import_module(f"memstore.cli.{module}"), "time", clock)

    def ask(self, request: RankCall, limit_s: float) -> Any:
        """As `Where.ask`, in the world's time."""
        verb = tag_of(request)
        said, refused = self.rank.answers.setdefault(verb, []), self.rank.errors.setdefault(verb, [])
        before = len(said), len(refused)
        self.rank.relay(request)
        if not self.world.run_until(lambda: (len(said), len(refused)) != before, limit_s):
            raise errors.PeerTimeout(verb, operation=verb, waited_s=limit_s, limit_s=limit_s)
        if len(refused) > before[1]:
            kind, message = refused[-1]
            raise getattr(errors, kind)(message)
        return self.rank.last_reply

    def run(self, *typed: str) -> Result:
        """Type a command."""
        return CliRunner().invoke(main, typed)

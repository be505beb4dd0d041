"""What a put at every step costs a training whose gradients share the link with the copies: naive, capped, interleaved.

Two hosts are network namespaces behind a link of 1 Gbit/s (veth, tbf). Each has a rank that computes and all-reduces
with gloo in turns (sharing_rank.py), and a holder that sends its rank's copy to the other host. Needs root. What
copies and training take from one another of the processors: bench_put.py.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.report.harness import MIB, Options, Record, Took, interleave, require
from benchmarks.report.targets import SHARING
from benchmarks.rigs import rig
from memstore.testing.clusters import namespaces
from memstore.testing.clusters.namespaces import NamespaceRig
from memstore.testing.clusters.processes import ProcessCluster

HOSTS = {"h0": {"rack": "r1"}, "h1": {"rack": "r2"}}
LINK_BITS_PER_S = 1_000_000_000
ITERATIONS = 5
PLAIN, NAIVE, CAPPED, INTERLEAVED = "no put", "put, naive", "put, capped", "put, interleaved"


class Case(NamedTuple):
    """One training: lengths of computing in seconds, bytes of each all-reduce, bytes that each rank puts."""

    name: str
    spans_s: tuple[float, ...]
    reduce_bytes: int
    nbytes: int
    cap_bytes_per_s: int  # 0: no capped contender
    rounds_max: int


ENOUGH = Case("sharing", (0.05,) * 4, 5 * MIB // 2, 10 * MIB, 64_000_000, 9)
SHORT = Case("sharing, too little idle time", (0.02,) * 4, 5 * MIB // 2, 24 * MIB, 0, 2)


def run(options: Options) -> list[Record]:
    """Return a record for a training that has idle time for its copies, one that has not, one short of processors."""
    why = namespaces.available()
    if why is not None:
        absent = dict.fromkeys((PLAIN, NAIVE, CAPPED, INTERLEAVED), why)
        return [Record(case.name, 0, {}, absent=absent) for case in (ENOUGH, SHORT)]
    return [_measure(case, options) for case in (ENOUGH, SHORT)]


def _measure(case: Case, options: Options) -> Record:
    options = Options(case.nbytes, min(options.rounds, case.rounds_max), min(1, options.warmups))
    with _training(case) as training:
        contenders = {name: training.contender(name) for name in (PLAIN, *training.clusters)}
        rounds = interleave(contenders, options, lambda number: None)
        record = Record(case.name, 0, rounds.seconds)
        for name in training.clusters:
            target = SHARING if name == INTERLEAVED and case is ENOUGH else None
            record.ratio(f"{name} / {PLAIN}", name, PLAIN, target)
        record.notes = training.notes()
    return record


class Training:
    """Both ranks, and a store for each contender that puts."""

    def __init__(self, case: Case, ranks: list[subprocess.Popen[str]], clusters: dict[str, ProcessCluster]) -> None:
        self.case, self.ranks, self.clusters = case, ranks, clusters
        self.stalls_s: dict[str, list[float]] = {name: [] for name in clusters}

    def contender(self, name: str) -> Any:
        """Return what trains for one round and gives the median seconds of an iteration, bytes compared."""

        def train(number: int) -> Took:
            first = number * ITERATIONS
            told = notify(
                self.ranks,
                {"name": name, "first_step": first, "iterations": ITERATIONS, "is_marked": name == INTERLEAVED},
            )
            if name in self.clusters:
                self.stalls_s[name] += told[0]["stalls_s"]
                self._compare(name, first + ITERATIONS - 1)
            return Took(statistics.median(told[0]["took_s"]))

        return train

    def _compare(self, name: str, step: int) -> None:
        """The peer's copy of rank 0's last put has its bytes."""
        got = rig.read_at("h1", self.clusters[name].config, step, job="train")
        found = got.state["state"].numpy()
        require(got.source == "local" and bool(np.all(found == step)), f"{name}: the peer's copy of step {step}")

    def notes(self) -> list[str]:
        """What the puts blocked, and what went beside collectives."""
        lines = [f"{name}: a put blocked {statistics.median(s) * 1e3:.1f} ms" for name, s in self.stalls_s.items()]
        cluster = self.clusters[INTERLEAVED]
        hosts = {row["host"]: row["stats"]["spilled_bytes"] / MIB for row in cluster.status()["hosts"]}
        return lines + [f"{host}, interleaved: spilled {mib:.1f} MiB" for host, mib in hosts.items()]


def notify(ranks: list[subprocess.Popen[str]], command: dict[str, Any]) -> list[dict[str, Any]]:
    """Send one command to all ranks and return their answers."""
    for rank in ranks:
        if rank.stdin is not None:
            rank.stdin.write(json.dumps(command) + "\n")
            rank.stdin.flush()
    return [json.loads(rank.stdout.readline()) for rank in ranks if rank.stdout is not None]


@contextlib.contextmanager
def _training(case: Case) -> Iterator[Training]:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        net = stack.enter_context(NamespaceRig(HOSTS))
        for host in HOSTS:
            net.shape(host, LINK_BITS_PER_S, burst_bytes=32 << 10, latency_ms=20)
        settings: dict[str, dict[str, Any]] = {
            NAIVE: {"dscp": 0},
            **({CAPPED: {"replicate_bytes_per_s": case.cap_bytes_per_s}} if case.cap_bytes_per_s else {}),
            INTERLEAVED: {},
        }
        clusters = {}
        for number, (name, fields) in enumerate(settings.items()):
            clusters[name] = stack.enter_context(
                ProcessCluster(
                    folder / str(number),
                    HOSTS,
                    rig=net,
                    arena_bytes=6 * case.nbytes + 64 * MIB,
                    chunk_bytes=4 * MIB,
                    detect="normal",
                    **fields,
                )
            )
        ranks = []
        for number, host in enumerate(HOSTS):
            spec = {
                "rank": number,
                "world": len(HOSTS),
                "meeting": str(folder / "meeting"),
                "spans_s": case.spans_s,
                "reduce_bytes": case.reduce_bytes,
                "nbytes": case.nbytes,
                "is_on_processor": False,
                "stores": {name: cluster.config.store_fields() for name, cluster in clusters.items()},
            }
            argv = [*net.prefix(host), "env", f"MEMSTORE_HOST={host}", "GLOO_SOCKET_IFNAME=eth0"]
            rank = subprocess.Popen(
                [*argv, sys.executable, "-m", "benchmarks.rigs.sharing_rank"],
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            stack.callback(_end, rank)
            ranks.append(rank)
            if rank.stdin is not None:
                rank.stdin.write(json.dumps(spec) + "\n")
                rank.stdin.flush()
        for rank in ranks:
            if rank.stdout is not None and not rank.stdout.readline():
                raise RuntimeError("a rank did not start: see its error above")
        yield Training(case, ranks, clusters)


def _end(rank: subprocess.Popen[str]) -> None:
    if rank.stdin is not None:
        rank.stdin.close()
    try:
        rank.wait(10)
    except subprocess.TimeoutExpired:
        rank.kill()
        rank.wait(10)
    if rank.stdout is not None:
        rank.stdout.close()

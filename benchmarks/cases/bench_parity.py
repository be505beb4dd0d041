"""What parity of 4 + 1 hosts costs beside two copies: stall, processors, wire, restore, repair, memory.

Five hosts are network namespaces whose links carry 40 MB/s each way (veth, tbf), so that the link is the limit and
not the processors that all hosts share. Two stores run on them, one with copies and one with parity, and a rank of
each on every host. In every round each puts a step whose every chunk is new, and one with half a second from rank to
rank: the stall is measured on that one, since five puts at once wait for the two processors. One more is put over
links without a limit: the kernel passes each packet through its token buckets on the processors that the hosts share.
Each reads a shard where it lies, and loses a host, another one each time: an empty one takes its place, all ranks get,
and the clock runs on until nothing is missing. Every byte that a get brings is compared. Memory is that of stores of
their own, whose arenas have exactly what they are said to need: every put has to be committed. Needs root.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.report import targets
from benchmarks.report.harness import MIB, Options, Record, Rounds, Took, interleave, require
from benchmarks.rigs import rig
from benchmarks.rigs.stopwatch import cpu_seconds, until_idle
from memstore.testing.clusters.namespaces import NamespaceRig, available
from memstore.testing.clusters.processes import ProcessCluster, wait_for
from memstore.testing.ranks.fleet import Fleet
from memstore.testing.ranks.rank import RankProgram, Restored
from memstore.testing.ranks.rank_process import RankNursery, RankProcess, nursery_main, together

COPIES, PARITY, WIDE, TWO_LOSSES = "two copies", "4 + 1", "8 + 1", "4 + 2"
LINK_BITS_PER_S = 320_000_000
BURST_BYTES = 256 << 10
NBYTES_MAX, WIDE_NBYTES_MAX = 64 * MIB, 32 * MIB
UNFILLED_BYTES = 16 << 10  # left of a shard's last chunk, for the layout: one chunk more would be one row more
LOOK_S = 0.02
TURN_S = 0.5  # from the put of one rank to that of the next
STALL, OUT, IN, CPU = "stall", "out", "in", "CPU without a limit"
LOCAL, RESTORE, COMPLETE = "get, local", "get after a lost host", "get, until nothing is missing"


class Peak:
    """Looks at the memory that the arenas of a store take, until closed: the most of any host at any moment."""

    def __init__(self, cluster: ProcessCluster) -> None:
        self.nbytes = 0
        self._folders = [cluster.arena(host) for host in cluster.labels]
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over.wait(LOOK_S):
            self.nbytes = max(self.nbytes, *map(_allocated_bytes, self._folders))

    def close(self) -> None:
        """Stop looking."""
        self._is_over.set()
        self._thread.join(10.0)


def _allocated_bytes(folder: Path) -> int:
    with contextlib.suppress(OSError):  # the host is being lost just now
        return (folder / "arena").stat().st_blocks * 512
    return 0


@dataclass
class Size:
    """How large a shard is, and its chunks."""

    nbytes: int
    chunk_bytes: int

    @classmethod
    def of(cls, options: Options, nbytes_max: int, chunks_count: int) -> Size:
        """Return that of a state of these options: at least so many chunks, for rows are made of whole ones."""
        nbytes = min(options.nbytes, nbytes_max)
        return cls(nbytes - UNFILLED_BYTES, min(options.chunk_bytes, max(16 << 10, nbytes // chunks_count)))

    def arena_bytes(self, parity: int, *, replicas: int = 2, spare: int = 0) -> int:
        """Return what two versions take: a shard and its copies, or its parts of the parity; `spare` shards more."""
        chunks = -(-self.nbytes // self.chunk_bytes)
        others = (replicas - 1) * (-(-chunks // parity) if parity else chunks)
        return self.chunk_bytes * (2 * (chunks + others) + spare * chunks)


class Side:
    """One store on all hosts and its ranks: a contender. `found` are its figures of every round, by name."""

    def __init__(
        self, cluster: ProcessCluster, nursery: RankNursery, size: Size, *, parity: int, replicas: int = 2
    ) -> None:
        self.cluster, self.size, self.net = cluster, size, cluster.rig
        self.hosts = list(cluster.labels)
        kib = size.nbytes // 512  # a fleet's ranks put half of what they are told
        self.fleet = Fleet(cluster, nursery, job=rig.JOB, kib=kib, parity=parity, replicas=replicas)
        self.ranks: list[RankProcess] = []
        self.step = 0
        self.found: dict[str, list[float]] = {}
        self.cpu_s: list[float] = []

    def note(self, **figures: float) -> None:
        """Keep figures of this round."""
        for name, value in figures.items():
            self.found.setdefault(name, []).append(value)

    @property
    def pids(self) -> list[int]:
        """Return the processes that take part in a put."""
        return [*rig.pids_of(self.cluster), *(rank.pid for rank in self.ranks)]

    def put(self, *, turn_s: float = 0.0) -> list[dict[str, float]]:
        """Put one step on every rank, so long after each other, every chunk of it new, and wait for its commit."""
        self.step += 1
        together(self.ranks, "prepare", step=self.step)
        until_idle(self.pids)
        begin_s = time.monotonic()
        for number, rank in enumerate(self.ranks):
            rank.begin("timed_put", step=self.step, at_s=begin_s + number * turn_s)
        return [rank.finish() for rank in self.ranks]

    def begin(self) -> None:
        """Launch a job without history and put its first step."""
        self.ranks, _ = self.fleet.resume(self.hosts)
        self.put()

    def put_timed(self) -> Took:
        """Put a step; note stall and wire bytes; return the time from the first put to the last commit."""
        self.put()  # the first of an attempt reserves
        stall_s = statistics.median(row["stall"] for row in self.put(turn_s=TURN_S))
        until_idle(self.pids)
        used_s, moved = cpu_seconds(self.pids), self._moved()
        rows = self.put()
        took_s = max(row["committed"] for row in rows) - min(row["begun"] for row in rows)
        spent_s = cpu_seconds(self.pids) - used_s
        worst = [max(b - a for a, b in zip(*pair, strict=True)) for pair in zip(moved, self._moved(), strict=True)]
        nbytes = rows[0]["nbytes"]
        self.note(**{STALL: stall_s, OUT: worst[0] / nbytes, IN: worst[1] / nbytes})
        return Took(took_s, spent_s)

    def put_unshaped(self) -> None:
        """Put a step over links without a limit, and note its processor seconds."""
        assert self.net is not None
        for host in self.hosts:
            self.net.unshape(host)
        until_idle(self.pids)
        used_s = cpu_seconds(self.pids)
        self.put()
        self.note(**{CPU: cpu_seconds(self.pids) - used_s})
        _shape(self.net)

    def _moved(self) -> tuple[list[int], list[int]]:
        assert self.net is not None
        return [self.net.sent_bytes(h) for h in self.hosts], [self.net.received_bytes(h) for h in self.hosts]

    def get_local(self) -> None:
        """Read every rank's shard on its own host, one after the other; note the median."""
        took = []
        for rank in self.ranks:
            got = rank.call("get", into="same", rank=rank.rank)
            require(got["step"] == self.step and not got["problem"], f"local get: {got}")
            took.append(got["ended_s"] - got["began_s"])
        self.note(**{LOCAL: statistics.median(took)})

    def lose(self, host: str) -> None:
        """Lose a host and its rank; note what a get takes on an empty host in its place, and until all is there."""
        self.fleet.kill(self.ranks)
        self.cluster.lose_host(host)
        self.cluster.start_holder(host)
        self.cluster.wait_live(host)
        self.ranks = self.fleet.launch(self.hosts)
        begun_s = time.monotonic()
        got = together(self.ranks, "get", into="same")
        took_s = max(row["ended_s"] for row in got) - min(row["began_s"] for row in got)
        require(all(row["step"] == self.step and not row["problem"] for row in got), f"get without {host}: {got}")
        wait_for(self._is_complete, "copies or parity of all shards")
        self.note(**{RESTORE: took_s, COMPLETE: time.monotonic() - begun_s})

    def _is_complete(self) -> bool:
        job = self.cluster.job(rig.JOB)
        return job is not None and (job["copies"], job["missing_copies"]) == (2, 0)


def run(options: Options) -> list[Record]:
    """Return a record of memory, one of puts, one of local gets, and one of lost hosts."""
    why = available()
    names = ("parity: put", "parity: get, local", "parity: a lost host")
    memory = measure_memory(options)
    if why is not None:
        return [memory, *(Record(name, 0, {}, absent={COPIES: why, PARITY: why}) for name in names)]
    return [memory, *measure(options, names)]


def measure(options: Options, names: tuple[str, ...]) -> list[Record]:
    """Return the records of two copies and of 4 + 1 parity, in turns."""
    size = Size.of(options, NBYTES_MAX, 32)
    options = replace(options, warmups=min(1, options.warmups))
    hosts = _hosts(5)
    loads: list[float] = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        net = stack.enter_context(NamespaceRig(hosts))
        _shape(net)
        nursery = stack.enter_context(RankNursery("benchmarks.cases.bench_parity"))
        sides = {name: _side(stack, folder, hosts, nursery, size, k, net) for name, k in {COPIES: 0, PARITY: 4}.items()}
        for side in sides.values():
            side.begin()

        def contend(name: str, number: int) -> Took:
            side, took = sides[name], sides[name].put_timed()
            side.put_unshaped()
            side.get_local()
            side.lose(side.hosts[number % len(side.hosts)])
            return took

        contenders: Mapping[str, Callable[[int], Took]] = {
            name: lambda number, name=name: contend(name, number)  # type: ignore[misc]
            for name in sides
        }
        rounds = interleave(contenders, options, lambda number: loads.append(os.getloadavg()[0]))
    found = {
        name: {what: values[options.warmups :] for what, values in side.found.items()} for name, side in sides.items()
    }
    put = _put_record(names[0], len(hosts) * size.nbytes, rounds, found)
    local = Record(names[1], size.nbytes, {name: found[name][LOCAL] for name in sides})
    local.ratio("a local get / two copies'", PARITY, COPIES, targets.PARITY_LOCAL)
    lost = Record(
        names[2], size.nbytes, {f"{n}: {what}": found[n][what] for what in (RESTORE, COMPLETE) for n in sides}
    )
    lost.ratio(
        "get after a lost host / two copies'", f"{PARITY}: {RESTORE}", f"{COPIES}: {RESTORE}", targets.PARITY_GET
    )
    lost.ratio(
        "until nothing is missing / two copies'",
        f"{PARITY}: {COMPLETE}",
        f"{COPIES}: {COMPLETE}",
        targets.PARITY_COMPLETE,
    )
    shown = ", ".join(f"{load:.0f}" for load in loads[options.warmups :])
    for record in (put, local, lost):
        record.notes.append(
            f"Load of the machine as the rounds began: {shown}. Links of {LINK_BITS_PER_S / 8e6:.0f} MB/s."
        )
    return [put, local, lost]


def _put_record(name: str, nbytes: int, rounds: Rounds, found: Mapping[str, Mapping[str, list[float]]]) -> Record:
    put = Record(name, nbytes, rounds.seconds, cpu_seconds=rounds.cpu_seconds)
    put.ratio("put to committed / two copies'", PARITY, COPIES, targets.PARITY_PUT)
    put.cpu_ratio("CPU seconds, put to committed / two copies'", PARITY, COPIES, targets.PARITY_CPU)
    put.figure(
        "CPU seconds without a limit of the links / two copies'", _ratios(found, CPU), "", targets.PARITY_CPU_PLAIN
    )
    put.figure("put's stall / two copies'", _ratios(found, STALL), "", targets.PARITY_STALL)
    put.figure("bytes out of the worst host / two copies'", _ratios(found, OUT), "", targets.PARITY_WIRE)
    put.figure("bytes into the worst host / two copies'", _ratios(found, IN), "", targets.PARITY_WIRE)
    for side in found:
        put.figure(f"{side}: put's stall", found[side][STALL], "s")
        put.figure(f"{side}: CPU seconds without a limit of the links", found[side][CPU], "s")
        put.figure(f"{side}: bytes out of the worst host / bytes put", found[side][OUT], "")
        put.figure(f"{side}: bytes into the worst host / bytes put", found[side][IN], "")
    return put


def _shape(net: NamespaceRig) -> None:
    for host in net.hosts:
        net.shape(host, LINK_BITS_PER_S, burst_bytes=BURST_BYTES)


def _ratios(found: Mapping[str, Mapping[str, list[float]]], what: str) -> list[float]:
    return [a / b for a, b in zip(found[PARITY][what], found[COPIES][what], strict=True)]


def _side(
    stack: contextlib.ExitStack,
    folder: Path,
    hosts: Mapping[str, Mapping[str, str]],
    nursery: RankNursery,
    size: Size,
    parity: int,
    net: NamespaceRig | None,
    replicas: int = 2,
) -> Side:
    cluster = ProcessCluster(
        folder / f"{parity}+{replicas - 1}",
        hosts,
        arena_bytes=size.arena_bytes(parity, replicas=replicas, spare=0 if net is None else 2),
        chunk_bytes=size.chunk_bytes,
        rig=net,
    )
    cluster.niceness = 0
    return Side(stack.enter_context(cluster), nursery, size, parity=parity, replicas=replicas)


def measure_memory(options: Options) -> Record:
    """Return the most memory that a host takes over a few puts; one round, over loopback."""
    record = Record("parity: memory", 0, {})
    cases = [
        (COPIES, 5, 0, 2, Size.of(options, NBYTES_MAX, 32), targets.COPIES_MEMORY),
        (PARITY, 5, 4, 2, Size.of(options, NBYTES_MAX, 32), targets.PARITY_MEMORY),
        (WIDE, 9, 8, 2, Size.of(options, WIDE_NBYTES_MAX, 128), targets.PARITY_WIDE_MEMORY),
        (TWO_LOSSES, 6, 4, 3, Size.of(options, NBYTES_MAX, 32), targets.PARITY_TWO_MEMORY),
    ]
    for name, count, parity, replicas, size, target in cases:
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            nursery = stack.enter_context(RankNursery("benchmarks.cases.bench_parity"))
            side = _side(stack, folder, _hosts(count), nursery, size, parity, None, replicas)
            peak = Peak(side.cluster)
            side.begin()
            for _ in range(options.rounds):
                side.put()
            side.get_local()
            peak.close()
        record.figure(f"{name}: memory of the worst host, peak / bytes put", [peak.nbytes / size.nbytes], "", target)
    return record


def _hosts(count: int) -> dict[str, dict[str, str]]:
    return {f"h{i}": {"rack": f"r{i}", "memstore": "replica"} for i in range(count)}


# -- the ranks -----------------------------------------------------------------------------------------


class TimedRank(RankProgram):
    """A rank whose every chunk changes with every step, and whose puts are timed."""

    trained_step = 0

    def state(self, step: int) -> dict[str, Any]:
        """Return a state of one large tensor: noise of this rank, each number of which changes with every step."""
        bits = np.random.Generator(np.random.Philox(key=self.shard))
        weights = torch.from_numpy(np.frombuffer(bits.bytes(self.nbytes), np.int64).copy())
        return {"model": {"weights": weights.add_(step)}}

    def train(self, step: int) -> dict[str, Any]:
        """Return the state of this rank at a step, in the tensors of the steps before."""
        if self.trained is None:
            self.trained, self.trained_step = self.state(step), step
        self.trained["model"]["weights"].add_(step - self.trained_step)
        self.trained_step = step
        return self.trained

    def do_prepare(self, step: int) -> dict[str, Any]:
        """Change the state as a training step does."""
        self.train(step)
        return {}

    def do_timed_put(self, step: int, at_s: float) -> dict[str, Any]:
        """Put what is prepared, not before that time, and wait for its commit; return when, on the monotonic clock."""
        time.sleep(max(0.0, at_s - time.monotonic()))
        begun_s = time.monotonic()
        ticket = self.store.put(step, self.trained)
        ticket.wait("committed", 120.0)
        times = {"begun": begun_s, "committed": time.monotonic(), "stall": ticket.stall_s}
        return {**times, "nbytes": ticket.nbytes}

    def compared(self, got: Any, rank: int) -> Restored:
        """Compare what a get brought with the state of this rank at that step."""
        mine, theirs = self.state(got.step)["model"]["weights"], got.state["model"]["weights"]
        equal = self.nbytes if torch.equal(mine, theirs) else 0
        return Restored(rank, got.step, got.source, got.source_reason, self.nbytes, equal, attempt=got.attempt)


if __name__ == "__main__":
    nursery_main(TimedRank)

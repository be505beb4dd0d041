"""`python -m benchmarks.cases.bench_faults --repetitions 5 --out FOLDER`: seconds to notice a fault and to be past it.

Four hosts in network namespaces, a rank of 8 MiB on each, two copies, product settings; needs root. Every repetition
has a cluster of its own and plays every fault once, on another host each time.
What is timed stands in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.report import harness
from benchmarks.report.harness import MIB, require
from memstore.core.wire.replies import Status
from memstore.drills.ranks.ranks import kill_actors
from memstore.drills.run.runner import Watch
from memstore.drills.sites.scratch import ScratchJob
from memstore.drills.sites.site_namespaces import NamespacesSite, namespaces_site
from memstore.testing.clusters.namespaces import available

HOSTS = 4
NBYTES = 8 * MIB
ARENA_BYTES = 256 * MIB
STALL_BUDGET_S = 1.0
SLOW_BITS_PER_S = 10_000_000
NOTICE_S = 30.0
COMMIT_S = 120.0
HEAD = "| fault | noticed p50 | p90 | max | recovered p50 | p90 | max |\n|---|---:|---:|---:|---:|---:|---:|"


class Faults:
    """One cluster with a job on it; each method breaks something and returns (noticed, recovered) in seconds."""

    def __init__(self, site: NamespacesSite, job: ScratchJob, host: str) -> None:
        self.site, self.job, self.host = site, job, host
        self.step = 3

    @contextmanager
    def noticed(self) -> Iterator[Watch]:
        """Watch for the host to be no longer live."""

        def look(status: Status, started_s: float) -> str | None:
            return next((row.status for row in status.hosts if row.host == self.host and row.status != "live"), None)

        watch = Watch(self.site, look)
        watch.start()
        try:
            yield watch
        finally:
            watch.end()

    def committed_since(self, started_s: float) -> float:
        """Put as training does until a step put after now is committed; seconds since `started_s`."""
        first = self.step
        deadline_s = time.monotonic() + COMMIT_S
        while time.monotonic() < deadline_s:
            self.job.put(self.step, self.step)
            self.step += 1
            for _ in range(20):
                if self.job.committed_step() >= first:
                    return time.monotonic() - started_s
                time.sleep(0.01)
        raise RuntimeError(f"no step was committed within {COMMIT_S:g} s")

    def found(self, watch: Watch) -> float:
        """Seconds until the store noticed."""
        require(watch.found.wait(NOTICE_S), f"{self.host} was not noticed within {NOTICE_S:g} s; no byte")
        return watch.seconds

    def kill_host(self) -> tuple[float | None, float]:
        """Holder, rank and memory of a host; recovered when every rank has its bytes back, compared."""
        others = [host for host in self.site.places() if host != self.host]
        self.job.stand_by([r.host if r.host != self.host else others[0] for r in self.job.ranks])
        with self.noticed() as watch:
            started_s = time.monotonic()
            kill_actors([r for r in self.job.ranks if r.host == self.host])
            self.site.cluster.lose_host(self.host)
            self.job.restart()
            results = self.job.restore()
            took_s = time.monotonic() - started_s
            require(all(not r.error and r.bytes_equal == r.nbytes > 0 for r in results), f"kill-host: {results[0]}")
            found_s = self.found(watch)
        self.site.cluster.start_holder(self.host)
        return found_s, took_s

    def kill_holder(self) -> tuple[float | None, float]:
        """The holder; its successor is started at once."""
        with self.noticed() as watch:
            started_s = time.monotonic()
            self.site.cluster.kill_holder(self.host)
            self.site.cluster.start_holder(self.host)
            took_s = self.committed_since(started_s)
            return (watch.seconds if watch.found.is_set() else None), took_s

    def cut_link(self) -> tuple[float | None, float]:
        """The cable of a host; recovered counts from its return."""
        return self._links(lambda: self.site.rig.cut(self.host))

    def cut_one_way(self) -> tuple[float | None, float]:
        """What a host sends to the controller and to every other host vanishes; what they send arrives."""

        def block() -> None:
            for other in [*self.site.places(), self.site.controller_host]:
                if other != self.host:
                    self.site.rig.block(self.host, other, one_way=True)

        return self._links(block)

    def _links(self, breaks: Callable[[], None]) -> tuple[float | None, float]:
        self.site.unreachable_hosts.add(self.host)
        with self.noticed() as watch:
            breaks()
            found_s = self.found(watch)
        started_s = time.monotonic()
        self.site.heal()
        return found_s, self.committed_since(started_s)

    def slow_link(self) -> tuple[float | None, float]:
        """10 Mbit/s: no host is suspect; recovered is the first commit of a step put over it."""
        self.site.rig.shape(self.host, SLOW_BITS_PER_S)
        try:
            with self.noticed() as watch:
                took_s = self.committed_since(time.monotonic())
                return (watch.seconds if watch.found.is_set() else None), took_s
        finally:
            self.site.rig.unshape(self.host)

    def kill_controller(self) -> tuple[float | None, float]:
        """The controller; its successor is started at once on the same host."""
        started_s = time.monotonic()
        self.site.cluster.kill_controller()
        self.site.cluster.start_controller(on_host=self.site.controller_host)
        return None, self.committed_since(started_s)


FAULTS = {
    "kill host": Faults.kill_host,
    "kill holder": Faults.kill_holder,
    "cut link": Faults.cut_link,
    "cut one way": Faults.cut_one_way,
    "slow link": Faults.slow_link,
    "kill controller": Faults.kill_controller,
}


def measure(repetitions: int, names: Sequence[str]) -> dict[str, list[tuple[float | None, float]]]:
    """Play the faults, each on a job of its own; return (noticed, recovered) for every repetition."""
    found: dict[str, list[tuple[float | None, float]]] = {name: [] for name in names}
    for repetition in range(repetitions):
        with namespaces_site(HOSTS, arena_bytes=ARENA_BYTES) as site:
            config = site.config.with_fields({"stall_budget_s": STALL_BUDGET_S})
            for number, name in enumerate(names):
                hosts = site.places()
                job = ScratchJob(site, "bench", config, seed=repetition, nbytes=NBYTES)
                job.start(hosts)
                job.train(0, 2, "before the fault")
                job.wait_redundant()
                result = FAULTS[name](Faults(site, job, hosts[(repetition + number) % len(hosts)]))
                found[name].append(result)
                print(f"{repetition + 1}/{repetitions} {name}: {result}", flush=True)
                site.wait_hosts_live(hosts)
                job.remove()
    return found


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Return p50, p90 (nearest rank) and max in seconds; None without values."""
    if not values:
        return None
    rising = sorted(values)
    return {
        name: round(rising[math.ceil(share * len(rising)) - 1], 3)
        for name, share in (("p50", 0.5), ("p90", 0.9), ("max", 1.0))
    }


def row(name: str, result: dict[str, Any]) -> str:
    """One line of the table."""
    cells = []
    for key in ("noticed", "recovered"):
        shown = result[key]
        cells += ["–"] * 3 if shown is None else [f"{shown[p]:.2f} s" for p in ("p50", "p90", "max")]
    return f"| {name} | {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run what the command line asks for; return the record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cases.bench_faults", description=__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--only", choices=sorted(FAULTS), action="append", help="only this fault; may be repeated")
    parser.add_argument("--out", type=Path, help="folder for faults.json")
    chosen = parser.parse_args(arguments)
    why = available()
    if why is not None:
        parser.error(f"faults are timed on hosts in network namespaces: {why}")
    about = {"machine": harness.machine(), "repetitions": chosen.repetitions, "hosts": HOSTS, "nbytes_per_rank": NBYTES}
    results = {}
    for name, pairs in measure(chosen.repetitions, chosen.only or list(FAULTS)).items():
        results[name] = {
            "noticed": percentiles([noticed for noticed, _ in pairs if noticed is not None]),
            "recovered": percentiles([recovered for _, recovered in pairs]),
            "values": pairs,
        }
    record = {
        **about,
        "load_after": round(os.getloadavg()[0], 2),
        "faults": results,
        "ended": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    print("\n".join([HEAD, *(row(name, result) for name, result in results.items())]))
    if chosen.out is not None:
        chosen.out.mkdir(parents=True, exist_ok=True)
        (chosen.out / "faults.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return record


if __name__ == "__main__":
    main()

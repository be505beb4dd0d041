"""Rounds of a job with parity whose hosts are killed at random moments (R37).

A seed draws hosts, parity, a size for every rank, and the kills; each is followed by a new launch. The newest of all
steps that were reported as committed, to a rank or by the status, must come back, or a newer one, all bytes as put.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

from memstore.errors import MemstoreError
from memstore.testing.clusters.processes import ProcessCluster, wait_for
from memstore.testing.ranks.fleet import Fleet
from memstore.testing.ranks.rank_process import RankFailed, RankNursery, RankProcess, fail_together, together
from placement.parity_sets import parity_groups
from placement.topology import Host, Topology

CHUNK_BYTES = 64 << 10
CHUNKS_MAX = 40
JOB = "train"
UNDEGRADED_STEPS = 60  # puts until one has to be committed with all of its parity
# How a host goes, and what the next launch finds: another machine, none, the same one empty, or with its memory.
KINDS = ("new", "left", "back", "holder", "all-holders")
# Of the last put: half of a rank's bytes are copied, it waits for its seals, it is committed, puts follow one another.
MOMENTS = ("mid-put", "mid-seal", "mid-seal", "between", "loop", "loop")


@dataclass(frozen=True)
class Kill:
    """One kill: what goes, when, and whether the launcher ends the ranks before."""

    kind: str
    moment: str
    delay_s: float
    ranks_first: bool


@dataclass(frozen=True)
class Scenario:
    """One round; drawn from its seed alone."""

    seed: int
    hosts_count: int
    parity: int
    kib: tuple[int, ...]  # twice what each rank puts
    kills: tuple[Kill, ...]
    has_storage: bool
    last_moment: str  # of the loss of two hosts of one set

    def text(self) -> str:
        """Return it in one line, for the message of a failure."""
        kills = ", ".join(f"{k.kind} {k.moment} {k.delay_s:.3f} s" for k in self.kills)
        chunks = "+".join(str(kib // 128) for kib in self.kib)
        return f"seed {self.seed}: {self.hosts_count} hosts, parity {self.parity}, chunks {chunks}; {kills}; then two"


def draw(seed: int, *, kills_count: int = 4) -> Scenario:
    """Return the round of a seed."""
    rng = random.Random(f"parity {seed}")
    hosts_count = rng.choice((4, 5, 5, 5, 7))
    world_size = hosts_count * (2 if hosts_count < 7 and rng.random() < 0.25 else 1)
    kills = [
        Kill(rng.choice(KINDS), rng.choice(MOMENTS), rng.uniform(0.0, 0.25), rng.random() < 0.3)
        for _ in range(kills_count)
    ]
    return Scenario(
        seed,
        hosts_count,
        parity=rng.choice((2, 3, 4)),
        kib=tuple(128 * rng.choice((1, rng.randint(2, 9), rng.randint(10, CHUNKS_MAX))) for _ in range(world_size)),
        kills=tuple(kills),
        has_storage=rng.random() < 0.3,
        last_moment=rng.choice(("between", "between", "loop")),
    )


class ParityRound:
    """A job of one scenario, launched again after every kill."""

    def __init__(self, scenario: Scenario, folder: Path, nursery: RankNursery) -> None:
        self.scenario, self.folder = scenario, folder
        self.rng = random.Random(f"hosts {scenario.seed}")
        self.counts = Counter[str]()
        self.hosts = [f"h{i}" for i in range(scenario.hosts_count)]
        labels = {host: {"rack": f"r{i}", "memstore": "replica"} for i, host in enumerate(self.hosts)}
        self.cluster = ProcessCluster(folder, labels, detect=2.0, chunk_bytes=CHUNK_BYTES)
        durable: dict[str, Any] = {}
        if scenario.has_storage:
            storage = folder / "storage"
            storage.mkdir(parents=True)
            durable = {"durable": str(storage), "durable_every": 2}
        self.fleet = Fleet(
            self.cluster, nursery, kib=scenario.kib, parity=scenario.parity, seed=scenario.seed, **durable
        )
        self.ranks: list[RankProcess] = []
        self.step = 0  # the newest that any rank began to put
        self.owed = -1  # the newest that was reported as committed
        self.trail: list[str] = []

    def play(self) -> Counter[str]:
        """Play all kills, then the loss of two hosts of a set; return what was counted."""
        try:
            with self.cluster:
                self._launch()
                for kill in self.scenario.kills:
                    self._put_until_whole()
                    self._play(kill)
                self._put_until_whole()
                self._lose_two()
        except (AssertionError, MemstoreError, EOFError) as exc:
            raise AssertionError(f"{self.scenario.text()}\n  {'; '.join(self.trail)}\n  {exc}") from exc
        return self.counts

    # -- the job ------------------------------------------------------------------------------

    @property
    def places(self) -> list[str]:
        """Return the host of each rank."""
        return [self.hosts[rank % len(self.hosts)] for rank in range(len(self.scenario.kib))]

    def _launch(self) -> None:
        """Launch the job; its get must return what is owed, or newer, with every byte as put."""
        self.ranks, got = self.fleet.resume(self.places)
        step = -1 if got["step"] is None else got["step"]
        self.trail.append(f"got {step} of {self.owed} owed, {self.step} put ({got['verdict']})")
        if not self.owed <= step <= self.step and self.step:
            raise AssertionError(f"get returned step {step}: {self.owed} was committed, {self.step} was put last")
        if self.step and got["steps_lost"] > self.step - step:
            raise AssertionError(f"{got['steps_lost']} steps lost, from {step} to {self.step}")
        self.counts[f"restored {got['verdict']}"] += 1
        self.counts["newer than owed"] += step > self.owed
        self.step = self.owed = step

    def _put_until_whole(self) -> None:
        """Put step after step until one is committed with all of its parity."""
        for _ in range(UNDEGRADED_STEPS):
            self._put()
            replies = together(self.ranks, "settle", step=self.step, timeout_s=2.0)
            if all(reply["level"] == "committed" and not reply["degraded"] for reply in replies):
                self.owed = self.step
                return
            self.counts["puts until whole"] += 1
        raise AssertionError(f"no step up to {self.step} was committed undegraded: {replies[0]}")

    def _put(self) -> None:
        self.step += 1
        together(self.ranks, "put", step=self.step)

    def _committed(self) -> int:
        """Return the newest step that the status has as committed, not degraded; -1 if no controller answers."""
        with contextlib.suppress(MemstoreError, OSError):
            job = self.cluster.job(JOB)
            row = job or {}
            if row.get("committed_step") is not None and not row["degraded"]:
                return int(row["committed_step"])
        return -1

    # -- kills --------------------------------------------------------------------------------

    def _reach(self, moment: str, delay_s: float) -> None:
        """Bring the job to a moment."""
        if moment == "mid-put":
            held = self.rng.choice(self.ranks)
            self.step += 1
            for rank in self.ranks:
                rank.begin("put", step=self.step, hold=rank is held)
            for rank in self.ranks:
                rank.finish()
        elif moment == "loop":
            for rank in self.ranks:
                rank.begin("puts", first=self.step + 1, last=self.step + 1000)
            self.step += 1000
        else:
            self._put()
        if moment == "between":
            self.owed = max(self.owed, self._settled())
        else:
            Event().wait(delay_s * (2 if moment == "loop" else 1))  # a moment, not a condition

    def _settled(self) -> int:
        replies = together(self.ranks, "settle", step=self.step, timeout_s=10.0)
        is_whole = any(reply["level"] == "committed" and not reply["degraded"] for reply in replies)
        return self.step if is_whole else -1

    def _play(self, kill: Kill) -> None:
        """Kill, and launch the job again."""
        victim = self.rng.choice(self.hosts)
        self.trail.append(f"{kill.kind} {victim} {kill.moment} at step {self.step + 1}")
        self._reach(kill.moment, kill.delay_s)
        self.owed = max(self.owed, self._committed())
        if kill.ranks_first:
            self.fleet.kill(self.ranks)
        getattr(self, "_" + kill.kind.replace("-", "_"))(victim)
        self.fleet.kill(self.ranks)
        self._launch()
        self.counts[f"{kill.kind}, {kill.moment}"] += 1

    def _new(self, victim: str) -> None:
        """Lose a host; another one comes in its place."""
        self.cluster.lose_host(victim)
        name = f"h{len(self.cluster.labels)}"
        self.cluster.add_host(name, self.cluster.labels[victim])
        self.hosts[self.hosts.index(victim)] = name
        self.cluster.wait_live(name)

    def _left(self, victim: str) -> None:
        """Lose a host; its ranks go to those that are left, if these can keep parity."""
        if len(self.hosts) < 4:
            self._new(victim)
            return
        self.cluster.lose_host(victim)
        self.hosts.remove(victim)
        wait_for(lambda: self.cluster.host_status().get(victim) in ("dead", None), f"the death of {victim}")

    def _back(self, victim: str) -> None:
        """Lose a host's memory; the host itself comes back."""
        self.cluster.lose_host(victim)
        self.cluster.start_holder(victim)
        self.cluster.wait_live(victim)

    def _holder(self, victim: str) -> None:
        """Kill a holder and start it again: it adopts its memory, rows in the making are gone."""
        self.cluster.kill_holder(victim)
        self.cluster.start_holder(victim)
        self.cluster.wait_live(victim)

    def _all_holders(self, _: str) -> None:
        """Kill all holders and the controller, and start them again."""
        hosts = self.cluster.running()
        self.cluster.kill_all()
        self.cluster.start_controller()
        for host in hosts:
            self.cluster.start_holder(host)
        self.cluster.wait_live(*hosts)

    # -- two hosts ----------------------------------------------------------------------------

    def _lose_two(self) -> None:
        """Lose two hosts of one set at once: an error names what is gone, or a durable step comes back."""
        lost = self.rng.sample(self._group(), 2)
        gone = [rank for rank, host in enumerate(self.places) if host in lost]
        self.trail.append(f"two lost: {lost} with ranks {gone}, {self.scenario.last_moment}")
        durable = self._durable()
        self._reach(self.scenario.last_moment, 0.1)
        self.fleet.kill(self.ranks)
        for host in lost:
            self.cluster.lose_host(host)
        self.hosts = [host for host in self.hosts if host not in lost]
        if self.scenario.has_storage:
            self._get_durable(durable)
            return
        errors = fail_together(self.fleet.launch(self.places), "get")
        self._check_refused(errors, gone)
        self.counts["two lost: refused"] += 1

    def _group(self) -> Sequence[str]:
        """Return hosts of which each keeps parity for the others."""
        topology = Topology.of(Host(host, self.cluster.labels[host]) for host in self.hosts)
        return self.rng.choice(parity_groups(topology, "rack", self.scenario.parity))

    def _durable(self) -> int:
        """Wait for a durable step, where there is storage; return it."""
        if not self.scenario.has_storage:
            return -1
        row: dict[str, Any] = wait_for(
            lambda: (job := self.cluster.job(JOB)) and job["durable_step"] is not None and job, "a durable step"
        )
        return int(row["durable_step"])

    def _get_durable(self, durable: int) -> None:
        """Get; it must be a step of durable storage, no older than the newest that was there."""
        _, got = self.fleet.resume(self.places)
        if got["step"] < durable or got["verdict"] not in ("durable", "mixed"):
            raise AssertionError(f"step {got['step']} from {got['verdict']}, although {durable} was durable")
        self.counts[f"two lost: {got['verdict']}"] += 1

    @staticmethod
    def _check_refused(errors: Sequence[RankFailed], gone: Sequence[int]) -> None:
        words = str(errors[0])
        if {error.error for error in errors} != {"RecoveryError"} or not any(f"{rank}" in words for rank in gone):
            raise AssertionError(f"two hosts with ranks {gone} are gone, and get raised {errors[0]}")

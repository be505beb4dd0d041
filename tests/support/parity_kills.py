"""Rounds of a job with parity whose hosts are killed at random moments, as many at once as it survives (R37).

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
from memstore.testing.ranks.rank_process import RankFailed, RankNursery, RankProcess, together
from placement.parity_sets import DATA_MIN, parity_groups
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
    last_moment: str  # of the loss of one host of a set too many
    spare: int = 1  # hosts that may be lost at once

    def text(self) -> str:
        """Return it in one line, for the message of a failure."""
        kills = ", ".join(f"{k.kind} {k.moment} {k.delay_s:.3f} s" for k in self.kills)
        chunks = "+".join(str(kib // 128) for kib in self.kib)
        hosts = f"{self.hosts_count} hosts, parity {self.parity}+{self.spare}"
        return f"seed {self.seed}: {hosts}, chunks {chunks}; {kills}; then one more"


def draw(seed: int, *, kills_count: int = 4, spare: int = 1) -> Scenario:
    """Return the round of a seed."""
    rng = random.Random(f"parity {seed}")
    hosts_count = rng.choice((4, 5, 5, 5, 7)) if spare == 1 else rng.choice((5, 6, 6, 6, 8))
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
        spare=spare,
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
        fields = {"parity": scenario.parity, "replicas": scenario.spare + 1, **durable}
        self.fleet = Fleet(self.cluster, nursery, kib=scenario.kib, seed=scenario.seed, **fields)
        self.ranks: list[RankProcess] = []
        self.step = 0  # the newest that any rank began to put
        self.owed = -1  # the newest that was reported as committed
        self.trail: list[str] = []

    def play(self) -> Counter[str]:
        """Play all kills, then the loss of one host of a set too many; return what was counted."""
        try:
            with self.cluster:
                self._launch()
                for kill in self.scenario.kills:
                    self._put_until_whole()
                    self._play(kill)
                self._put_until_whole()
                self._lose_too_many()
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
        victims = self.rng.sample(self.hosts, self.scenario.spare)
        self.trail.append(f"{kill.kind} {', '.join(victims)} {kill.moment} at step {self.step + 1}")
        self._reach(kill.moment, kill.delay_s)
        self.owed = max(self.owed, self._committed())
        if kill.ranks_first:
            self.fleet.kill(self.ranks)
        getattr(self, "_" + kill.kind.replace("-", "_"))(victims)
        self.fleet.kill(self.ranks)
        self._launch()
        self.counts[f"{kill.kind}, {kill.moment}"] += 1

    def _lose(self, victims: Sequence[str]) -> None:
        for victim in victims:
            self.cluster.lose_host(victim)

    def _new(self, victims: Sequence[str]) -> None:
        """Lose hosts; others come in their place."""
        self._lose(victims)
        for victim in victims:
            name = f"h{len(self.cluster.labels)}"
            self.cluster.add_host(name, self.cluster.labels[victim])
            self.hosts[self.hosts.index(victim)] = name
            self.cluster.wait_live(name)

    def _left(self, victims: Sequence[str]) -> None:
        """Lose hosts; their ranks go to those that are left, if these can keep parity."""
        spare = self.scenario.spare
        if len(self.hosts) - spare < DATA_MIN + spare:
            self._new(victims)
            return
        self._lose(victims)
        for victim in victims:
            self.hosts.remove(victim)
            wait_for(lambda host=victim: self.cluster.host_status().get(host) in ("dead", None), f"{victim} is dead")

    def _back(self, victims: Sequence[str]) -> None:
        """Lose hosts' memory; the hosts themselves come back."""
        self._lose(victims)
        for victim in victims:
            self.cluster.start_holder(victim)
        self.cluster.wait_live(*victims)

    def _holder(self, victims: Sequence[str]) -> None:
        """Kill holders and start them again: they adopt their memory, rows in the making are gone."""
        for victim in victims:
            self.cluster.kill_holder(victim)
        for victim in victims:
            self.cluster.start_holder(victim)
        self.cluster.wait_live(*victims)

    def _all_holders(self, _: Sequence[str]) -> None:
        """Kill all holders and the controller, and start them again."""
        hosts = self.cluster.running()
        self.cluster.kill_all()
        self.cluster.start_controller()
        for host in hosts:
            self.cluster.start_holder(host)
        self.cluster.wait_live(*hosts)

    # -- one host too many --------------------------------------------------------------------

    def _lose_too_many(self) -> None:
        """Lose one host more of a set than it survives: an error names what is gone, or a durable step comes back.

        Shards that are shorter than a stripe may not need what is gone: then the newest step comes back whole.
        """
        lost = self.rng.sample(self._group(), self.scenario.spare + 1)
        gone = [rank for rank, host in enumerate(self.places) if host in lost]
        self.trail.append(f"too many lost: {lost} with ranks {gone}, {self.scenario.last_moment}")
        durable = self._durable()
        self._reach(self.scenario.last_moment, 0.1)
        self.owed = max(self.owed, self._committed())
        self.fleet.kill(self.ranks)
        self._lose(lost)
        self.hosts = [host for host in self.hosts if host not in lost]
        self.ranks = self.fleet.launch(self.places)
        replies, errors = tried_together(self.ranks, "get")
        if errors:
            self._check_refused(errors, gone)
        else:
            self._check_returned(replies, durable)
        self.counts[f"too many lost: {'refused' if errors else replies[0]['verdict']}"] += 1

    def _group(self) -> Sequence[str]:
        """Return hosts of which each keeps parity for the others."""
        topology = Topology.of(Host(host, self.cluster.labels[host]) for host in self.hosts)
        return self.rng.choice(parity_groups(topology, "rack", self.scenario.parity, self.scenario.spare))

    def _durable(self) -> int:
        """Wait for a durable step, where there is storage; return it."""
        if not self.scenario.has_storage:
            return -1
        row: dict[str, Any] = wait_for(
            lambda: (job := self.cluster.job(JOB)) and job["durable_step"] is not None and job, "a durable step"
        )
        return int(row["durable_step"])

    def _check_returned(self, got: Sequence[dict[str, Any]], durable: int) -> None:
        """A step that comes back is whole: from RAM no older than what is owed, else than the newest durable one."""
        self.fleet.check(got)
        step, verdict = got[0]["step"], got[0]["verdict"]
        if step is None or step < (self.owed if verdict == "peer" else durable):
            raise AssertionError(f"step {step} from {verdict}, although {self.owed} was owed and {durable} durable")

    def _check_refused(self, errors: Sequence[RankFailed], gone: Sequence[int]) -> None:
        words, kinds = str(errors[0]), {error.error for error in errors}
        is_meant = kinds == {"RecoveryError"} and len(errors) == len(self.ranks) and not self.scenario.has_storage
        if not is_meant or not any(f"{rank}" in words for rank in gone):
            raise AssertionError(f"hosts with ranks {gone} are gone, and get raised {words} on {len(errors)} ranks")


def tried_together(ranks: Sequence[RankProcess], do: str) -> tuple[list[dict[str, Any]], list[RankFailed]]:
    """Run one collective command on all ranks; return the replies and the errors."""
    replies, errors = list[dict[str, Any]](), list[RankFailed]()
    for rank in ranks:
        rank.begin(do)
    for rank in ranks:
        try:
            replies.append(rank.finish())
        except RankFailed as failed:
            errors.append(failed)
    return replies, errors

"""Random histories of one job.

Anything that happens, what was committed comes back whole, and things go on at the end.
"""

from __future__ import annotations

import random

import pytest
from variants import later

from memstore.core.cluster.facts import StepCommitted
from memstore.testing.controller.holder import DirectedRank
from memstore.testing.controller.world import JOB, ControllerWorld, describe
from recovery.inventory import StepId
from recovery.planner import plan

SEEDS_COUNT = 160
SEEDS_PER_TEST = 20
EVENTS_COUNT = 14


class History:
    """One seed's events and the promises they must not break."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.hosts_count = self.random.choice([2, 3, 5])
        self.replicas = self.random.choice([2, 2, 3])
        self.world = ControllerWorld(
            self.hosts_count,
            seed=seed,
            replicas=self.replicas,
            keep_steps=self.random.choice([1, 2]),
            rules={"max_restores": 50},
        )
        self.ranks: list[DirectedRank] = []
        self.step = 0
        self.down: list[str] = []
        self.newest: StepId | None = None  # newest commit seen along the lineage

    def launch(self) -> None:
        """A new launch restores what it must and puts once."""
        world = self.world
        self.ranks = world.launch(3)
        if any(not r.answers.get("join") for r in self.ranks):
            return
        answers = world.get(self.ranks, limit_s=30.0)
        world.check_restored(answers)
        steps = {a.get("step") for a in answers if "error" not in a}
        assert len(steps) <= 1, f"one get, several answers: {steps}"
        if any("error" in a for a in answers):
            return
        restored = answers[0]["step"]
        if self.newest is not None:
            assert restored is not None, f"{self.newest} was committed, get said nothing is stored"
            got = StepId(answers[0]["attempt"], restored)
            assert got >= self.newest, f"{got} restored, {self.newest} was committed"
        self.step = restored if restored is not None else 0
        world.reserve(self.ranks)

    def lose(self, name: str) -> None:
        """A host goes with its memory; more at once than replicas - 1 break the promise."""
        self.world.kill_host(name)
        self.down.append(name)

    def is_lossless(self) -> bool:
        """True if the newest commit still has all its copies, so that a loss now is within the promise."""
        job = self.world.served.jobs.get(JOB) if self.world.machine is not None else None
        if job is None or not self.world.served.is_settled:
            return False
        commits = [s for s, c in job.commits.items() if not c.is_degraded]
        if not commits:
            return not job.commits
        newest = max(job.commits)
        return all(
            len(self.world.holders_of(newest, r)) >= self.replicas for r in range(job.commits[newest].world_size)
        )

    def act(self) -> None:
        """One random event."""
        world, choice = self.world, self.random.random()
        living = [r for r in self.ranks if not r.is_dead]
        if choice < 0.45 and len(living) == 3 and all(r.has_room for r in self.ranks):
            self.step += 1
            for rank in self.ranks:
                if self.random.random() < 0.9:
                    world.put(rank, self.step)
                else:
                    world.skip(rank, self.step)
        elif choice < 0.55 and len(self.down) + 2 < self.hosts_count + 1 and self.is_lossless():
            up = sorted(set(world.holders) - set(self.down))
            if len(up) > 1:
                self.lose(self.random.choice(up))
        elif choice < 0.65 and self.down:
            world.return_host(self.down.pop())
        elif choice < 0.75:
            world.crash_controller()
        elif choice < 0.8:
            name = self.random.choice(sorted(world.holders))
            world.silence(name)
            world.run(self.random.choice([1.0, 3.0]))
            world.thaw(name)
        elif choice < 0.92 or not self.ranks:
            self.launch()
        world.run(self.random.choice([0.02, 0.2, 1.0, 3.0]))
        self.check()

    def check(self) -> None:
        """What must be true at any moment."""
        if self.world.machine is None or not self.world.served.is_settled:
            return
        job = self.world.served.jobs.get(JOB)
        if job is None or job.newest is None:
            return
        for step in job.commits:
            assert not job.is_abandoned(step), f"{step} was skipped and committed (R12)"
        own = [s for s in job.commits if s.attempt == job.newest.attempt_number]
        if own:
            newest = max(own)
            assert self.newest is None or newest >= self.newest, f"commits went back: {self.newest} to {newest} (I6)"
            self.newest = newest

    def finish(self) -> None:
        """All hosts back: the job goes on, and the controller equals the union of what hosts hold (I18)."""
        world = self.world
        for name in self.down:
            world.return_host(name)
        self.down = []
        world.run(12.0)
        if world.machine is None:
            world.start_controller()
        world.run(12.0)
        self.launch()
        assert all(r.answers.get("get") for r in self.ranks), [r.errors for r in self.ranks]
        assert world.put_all(self.ranks, self.step + 1), [(r.tickets, r.errors) for r in self.ranks]
        world.run(15.0)
        assert world.put_all(self.ranks, self.step + 2), [(r.tickets, r.errors) for r in self.ranks]
        world.run(15.0)
        job = world.job()
        newest = max(job.commits)
        assert not job.commits[newest].is_degraded or self.replicas > self.hosts_count
        held = {(shard, host) for host, holder in world.holders.items() for shard in holder.held}
        known = {(c.shard, h) for ranks in job.copies.values() for hosts in ranks.values() for h, c in hosts.items()}
        assert held == known, f"held only {sorted(held - known)[:3]}, known only {sorted(known - held)[:3]}"
        by_host = {(s, r, h) for h, steps in job.on_host.items() for s, ranks in steps.items() for r in ranks}
        assert by_host == {(StepId(shard.attempt, shard.step), shard.rank, host) for shard, host in known}
        assert all(ranks for steps in job.on_host.values() for ranks in steps.values())
        self.survives(newest)

    def survives(self, newest: StepId) -> None:
        """The newest commit is whole after losing any `replicas - 1` hosts (I1)."""
        job = self.world.job()
        fact = job.commits[newest]
        assert isinstance(fact, StepCommitted)
        if fact.is_degraded:
            return
        for _ in range(4):
            lost = set(self.random.sample(sorted(self.world.holders), self.replicas - 1))
            left = [h for h in self.world.holders if h not in lost]
            verdict = plan(
                job.inventory(live=left, silent=()),
                job.spans(job.newest.attempt_number),
                world_size=3,
                rank_hosts=dict.fromkeys(range(3), left[0]),
            )
            assert verdict.step == newest, f"losing {lost}: {verdict.why}"


def run_seed(seed: int) -> None:
    """Play one history."""
    history = History(seed)
    try:
        history.launch()
        for _ in range(EVENTS_COUNT):
            history.act()
        history.finish()
    except AssertionError as exc:
        raise AssertionError(f"seed {seed}: {exc}\n{describe(history.world)}") from exc


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 20, 40, 60, *later(*range(80, SEEDS_COUNT, SEEDS_PER_TEST))])
def test_any_history_keeps_the_promise(first: int) -> None:
    """Puts, skips, losses, returns, silence, controller crashes and relaunches never lose or mix a committed step."""
    for seed in range(first, first + SEEDS_PER_TEST):
        run_seed(seed)

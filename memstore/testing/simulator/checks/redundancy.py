"""R29 and I16: committed steps get all their copies back, and commits go on once the faults are over."""

from __future__ import annotations

from collections import Counter

from memstore.core.cluster.step_lookup import kept_steps
from memstore.testing.simulator.checks.hosts import are_well, racks_of, trusted_hosts
from memstore.testing.simulator.checks.observed import Observed
from memstore.testing.simulator.checks.promises import Promises
from memstore.testing.simulator.world.processes import AnyController
from memstore.testing.simulator.world.violation import Violation
from memstore.testing.simulator.world.world import World
from recovery.inventory import ShardId, StepId

COMMITS_WANTED = 3
REPAIR_S = 12.0  # a calm store has its newest step back at full redundancy within this, also between two steps


class Redundancy:
    """The copies of committed steps, and what the store claims of them."""

    def __init__(self, world: World, observed: Observed, promises: Promises) -> None:
        self.world, self.observed, self.promises = world, observed, promises
        self._short: tuple[StepId | None, float] = (None, 0.0)  # newest commit, and since when it lacks copies

    # -- what the store claims ----------------------------------------------------------------

    def is_claimed(self, controller: AnyController) -> bool:
        """Say whether the store claims all copies of its newest committed step and of all promises."""
        job = controller.machine.jobs.get(self.world.scenario.job)
        if job is None or not job.commits:
            return not self.observed.acked
        newest = max(job.commits)
        fact = job.commits[newest]
        live = set(controller.machine.hosts.live_ids())
        for rank in range(fact.world_size):
            hosts = job.copies.get(newest, {}).get(rank, {})
            have = [h for h, c in hosts.items() if h in live and not c.missing]
            if len(have) < self.world.scenario.replicas:
                return False
        return not fact.is_degraded and self.promises.claims_redundancy(controller)

    # -- what is there ------------------------------------------------------------------------

    def newest_there(self) -> StepId | None:
        """Return the newest committed step; in a wild scenario the newest of which some shard is left anywhere.

        There all hosts may have lost a step, and the job begins again under lower numbers.
        """
        left = {StepId(s.attempt, s.step) for shards in self.observed.whole.values() for s, _ in shards}
        steps = self.observed.facts.keys()
        return max(steps if self.world.scenario.is_strict else steps & left, default=None)

    def lacking(self, step: StepId) -> str:
        """Say which rank's shard of a committed step lies whole on too few hosts or in too few racks, or ""."""
        trusted, wanted = trusted_hosts(self.world), self._copies_wanted()
        for rank, digest in enumerate(self.observed.facts[step].digests):
            shard = ShardId(self.world.scenario.job, step.attempt, step.step, rank)
            have = [h for h, whole in self.observed.whole.items() if (shard, digest) in whole]
            if len(have) < wanted:
                return f"rank {rank} of {step} is on {have}, wanted {wanted} hosts"
            if self._is_even() and len(racks_of(self.world, have)) < self._racks_wanted(trusted):
                return f"rank {rank} of {step} is on {have}, all in {racks_of(self.world, have)}"
        return ""

    def _racks_wanted(self, trusted: list[str]) -> int:
        return min(self.world.scenario.racks_wanted, len(racks_of(self.world, trusted)))

    def _copies_wanted(self) -> int:
        return max(1, min(self.world.scenario.replicas, len(self.world.holders)))

    def _is_even(self) -> bool:
        """Say whether the hosts with ranks lie so in racks that placement owes every shard its own racks."""
        hosts = {rank.host_id for rank in self.world.ranks}
        racks = Counter(self.world.holders[host].info.labels.get("rack", "") for host in hosts)
        return max(racks.values(), default=0) * self.world.scenario.replicas <= len(hosts)

    # -- what must be there -------------------------------------------------------------------

    def look_at_repair(self) -> None:
        """Raise Violation if the newest step lacks copies for long although nothing hinders repair (R29)."""
        newest, now = self.newest_there(), self.world.now
        if newest is None or newest != self._short[0] or not self._is_calm() or not self.lacking(newest):
            self._short = (newest, now)
        elif not self.world.scenario.is_strict and self._is_lost(newest):
            return  # faults took every copy of some shard: nothing can bring it back
        elif now - self._short[1] > REPAIR_S:
            raise Violation("R29", f"for {REPAIR_S:g} s {self.lacking(newest)}, and nothing hinders repair")

    def _is_lost(self, step: StepId) -> bool:
        """Say whether some rank's shard of a committed step lies whole on no host."""
        shards = {
            (ShardId(self.world.scenario.job, step.attempt, step.step, rank), digest)
            for rank, digest in enumerate(self.observed.facts[step].digests)
        }
        return not shards <= {each for whole in self.observed.whole.values() for each in whole}

    def _is_calm(self) -> bool:
        """Say whether every process and link works and the newest attempt trains."""
        world = self.world
        if (
            world.served() is None
            or not world.has_kv
            or world.network.cut
            or world.network.slow
            or world.network.silent
        ):
            return False
        return are_well(world) and all(r.steps_done and not r.is_dead and not r.is_frozen for r in world.ranks)

    def is_live(self) -> bool:
        """Say whether commits go on and the newest has every copy in truth (I16)."""
        return not self.why_not_live()

    def why_not_live(self) -> str:
        """Say what is missing for that, or ""."""
        acked = self.observed.acked_after_heal
        if acked < COMMITS_WANTED:
            return f"{acked} whole commits since then, wanted {COMMITS_WANTED}. {self.observed.degraded}"
        newest = self.newest_there()
        return (self.lacking(newest) if newest is not None else "") or (
            self.promises.lacking(self._copies_wanted()) if self.world.scenario.is_strict else ""
        )

    def why_not_kept(self) -> str:
        """Say which kept step lacks copies, or ""; a step of which bytes are lost for good is left out (R29)."""
        world = self.world
        controller = world.served()
        if controller is None:
            return "no controller serves the job"
        job = controller.machine.jobs.get(world.scenario.job)
        if job is None or job.newest is None or len(trusted_hosts(world)) < len(world.holders):
            return ""  # a copy's place may be a host that dies often, which gets none
        for step in kept_steps(job, job.newest) & self.observed.facts.keys():
            ranks = range(self.observed.facts[step].world_size)
            copies = [job.copies.get(step, {}).get(rank, {}) for rank in ranks]
            is_lost = not all(any(not copy.missing for copy in hosts.values()) for hosts in copies)
            # Strict scenarios destroy memory once the newest step has all its copies; an older one may still lack some.
            is_excused = is_lost and not (world.scenario.is_strict and step == self.newest_there())
            if lacking := "" if is_excused else self.lacking(step):
                return lacking
        return ""

"""Copies of steps: which are kept (R19, R36), which come back (R29, I16), and what is known of them at the end."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterator

from memstore.core.cluster.job import TRUSTED, Job
from memstore.core.cluster.step_lookup import kept_steps
from memstore.core.wire.orders import DropJob, FreeCopies, FreeStep
from memstore.testing.simulator.checks.observed import Observed, are_well, racks_of, trusted_hosts
from memstore.testing.simulator.checks.parity import LossCheck, claimed, short_of
from memstore.testing.simulator.world.world import AnyController, Violation, World
from recovery.inventory import ShardId, StepId
from recovery.lineage import in_lineage

# -- promises -----------------------------------------------------------------------------------------
# R19 for pins: a pinned step stays restorable. R38 for trust: so does the newest trusted step, until a newer one is.
#
# Only what was acknowledged is demanded. A question whose rank died before the answer promises nothing.


class Promises:
    """The pins of one simulation."""

    def __init__(self, world: World, observed: Observed, losses: LossCheck) -> None:
        self.world, self.observed, self.losses = world, observed, losses
        self.pins: dict[str, StepId] = {}  # acknowledged pins, until a command takes them back

    def pinned(self, name: str, step: StepId) -> None:
        """Take an answer. That of an older trust may come last: it promises nothing any more."""
        if name not in self.pins or self._has_moved(step):
            self.pins[name] = step

    def _job(self) -> Job | None:
        controller = self.world.served()
        return controller.machine.jobs.get(self.world.scenario.job) if controller is not None else None

    def _has_moved(self, step: StepId) -> bool:
        """Say whether trust may have moved on to a step: it is newer, or nothing goes on from the one before."""
        job, before = self._job(), self.pins[TRUSTED]
        return step > before or (job is not None and not in_lineage(job.spans(job.present_number), before))

    def _follow_trust(self) -> None:
        """Demand the step to which trust has moved on, from its fact on: what was before it is let go of then."""
        job = self._job()
        pin = job.pins.get(TRUSTED) if job is not None else None
        if pin is not None and TRUSTED in self.pins:
            self.pinned(TRUSTED, StepId(pin.attempt, pin.step))

    def steps(self) -> set[StepId]:
        """Return the steps that are promised now."""
        self._follow_trust()
        return set(self.pins.values())

    def promised(self) -> Iterator[tuple[str, ShardId]]:
        """Yield every shard that a pin promises, with the name of that."""
        self._follow_trust()
        facts = self.observed.facts
        for name, step in sorted(self.pins.items()):
            yield from ((f"pin {name}", self._shard(step, rank)) for rank in range(len(facts[step].digests)))

    def _shard(self, step: StepId, rank: int) -> ShardId:
        return ShardId(self.world.scenario.job, step.attempt, step.step, rank)

    def copies(self, shard: ShardId) -> list[str]:
        """Return the hosts that have a shard, as far as a controller can know at this moment."""
        believed = self.observed.believed
        return sorted(host for host, held in believed.items() if any(copy == shard for copy, _ in held))

    def claims_redundancy(self, controller: AnyController) -> bool:
        """Say whether the store claims every copy of what is promised."""
        live = set(controller.machine.hosts.live_ids())
        for _, shard in self.promised():
            job = controller.machine.jobs.get(shard.job)
            step = StepId(shard.attempt, shard.step)
            copies = job.copies.get(step, {}).get(shard.rank, {}) if job is not None else {}
            if job is not None and self.losses.is_in_parity(shard):
                if not self.losses.is_claimed(controller, job, step, self.observed.facts[step].digests):
                    return False
            elif len([h for h, c in copies.items() if h in live and not c.missing]) < self.world.scenario.replicas:
                return False
        return True

    def dropped(self, host: str, shard: ShardId, taken: list[str]) -> None:
        """Look at a copy that has gone without a fault: a promised shard must have enough others (R19).

        Args:
            taken: Hosts whose copies faults have taken since the drop was ordered: the order counted on them.
        """
        for what, promised in self.promised():
            left = [*self.copies(shard), *taken]
            if promised == shard and not self.losses.is_in_parity(shard) and len(left) < self.world.scenario.replicas:
                raise Violation("R19", f"{host} dropped {shard}, kept by {what}; copies left: {left}")

    def lacking(self, wanted: int) -> str:
        """Say which promised shard lies on too few hosts, or ""."""
        for step in sorted(self.steps()):
            if why := self.losses.why_lacking(step):
                return f"kept by a pin: {why}"
        for what, shard in self.promised():
            if self.losses.is_in_parity(shard):
                continue
            have = self.copies(shard)
            if len(have) < wanted:
                return f"{shard}, kept by {what}, is on {have}, wanted {wanted} hosts"
        return ""


# -- redundancy ---------------------------------------------------------------------------------------
# R29 and I16: committed steps get all their copies back, and commits go on once the faults are over.


COMMITS_WANTED = 3
REPAIR_S = 12.0  # a calm store has its newest step back at full redundancy within this, also between two steps


class Redundancy:
    """The copies of committed steps, and what the store claims of them."""

    def __init__(self, world: World, observed: Observed, promises: Promises, losses: LossCheck) -> None:
        self.world, self.observed, self.promises, self.losses = world, observed, promises, losses
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
            if self.losses.is_in_parity(ShardId(job.name, newest.attempt, newest.step, rank)):
                if not self.losses.is_claimed(controller, job, newest, fact.digests):
                    return False
            elif len(have) < self.world.scenario.replicas:
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
        if why := self.losses.why_lacking(step):
            return why
        for rank, digest in enumerate(self.observed.facts[step].digests):
            shard = ShardId(self.world.scenario.job, step.attempt, step.step, rank)
            if self.losses.is_in_parity(shard):
                continue
            have = [h for h, whole in self.observed.whole.items() if (shard, digest) in whole]
            if len(have) < wanted:
                return f"rank {rank} of {step} is on {have}, wanted {wanted} hosts"
            if self._is_even() and len(racks_of(self.world, have)) < self._racks_wanted(trusted):
                return f"rank {rank} of {step} is on {have}, all in {racks_of(self.world, have)}"
            if len(have) > 1 and len(trusted) == len(self.world.holders) and self._are_in_one_group(have):
                return f"rank {rank} of {step} is on {have}, all in one group"
        return ""

    def _are_in_one_group(self, have: list[str]) -> bool:
        """Say whether copies are all in one group of ranks, where they could all be placed otherwise (R18.8)."""
        scenario, by_host = self.world.scenario, dict[str, set[int]]()
        for rank in self.world.ranks if scenario.groups else ():
            by_host.setdefault(rank.host_id, set()).update(scenario.groups_of(rank.rank).values())
        group = {host: frozenset(numbers) for host, numbers in by_host.items()}
        for _ in group:  # a host with ranks of two groups makes them one
            group = {
                h: frozenset().union(*(each for each in group.values() if each & mine)) for h, mine in group.items()
            }
        if len({group.get(host, host) for host in have}) > 1:
            return False
        is_rack_owed = scenario.racks_wanted > 1 and self._is_even()
        racks = {h: self.world.racks[h] if is_rack_owed else h for h in group}
        return _can_be_apart(tuple((racks[h], group[h]) for h in sorted(group)), scenario.replicas)

    def _racks_wanted(self, trusted: list[str]) -> int:
        return min(self.world.scenario.racks_wanted, len(racks_of(self.world, trusted)))

    def _copies_wanted(self) -> int:
        return max(1, min(self.world.scenario.replicas, len(self.world.holders)))

    def _is_even(self) -> bool:
        """Say whether the hosts with ranks lie so in racks that placement owes every shard its own racks."""
        hosts = {rank.host_id for rank in self.world.ranks}
        racks = Counter(self.world.racks[host] for host in hosts)
        return max(racks.values(), default=0) * self.world.scenario.replicas <= len(hosts)

    # -- what must be there -------------------------------------------------------------------

    def look_at_repair(self) -> None:
        """Raise Violation if the newest step lacks copies for long although nothing hinders repair (R29)."""
        newest, now = self.newest_there(), self.world.now
        if newest is None or newest != self._short[0] or not self._is_calm() or not self.lacking(newest):
            self._short = (newest, now)
        elif not self.world.scenario.is_strict and self.losses.is_lost(newest):
            return  # faults took every copy of some shard: nothing can bring it back
        elif now - self._short[1] > REPAIR_S:
            raise Violation("R29", f"for {REPAIR_S:g} s {self.lacking(newest)}, and nothing hinders repair")

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
            if is_lost and world.scenario.parity:
                is_lost = bool(short_of(claimed(controller, job, step), self.observed.facts[step].digests))
            # Strict scenarios destroy memory once the newest step has all its copies; an older one may still lack some.
            is_excused = is_lost and not (world.scenario.is_strict and step == self.newest_there())
            if lacking := "" if is_excused else self.lacking(step):
                return lacking
        return ""


@functools.lru_cache(256)
def _can_be_apart(hosts: tuple[tuple[str, frozenset[int]], ...], replicas: int) -> bool:
    """Say whether copies can lie in distinct racks, never all in one group, each host with as many: all are tried."""
    choices = [
        [
            targets
            for targets in itertools.combinations(range(len(hosts)), replicas - 1)
            if len({hosts[at][0] for at in (owner, *targets)}) == replicas
            and len({hosts[at][1] for at in (owner, *targets)}) > 1
        ]
        for owner in range(len(hosts))
    ]

    def is_possible(owner: int, loads: tuple[int, ...]) -> bool:
        if max(loads, default=0) >= replicas:
            return False
        return owner == len(hosts) or any(
            is_possible(owner + 1, tuple(load + (at in targets) for at, load in enumerate(loads)))
            for targets in choices[owner]
        )

    return is_possible(0, (0,) * len(hosts))


# -- drops --------------------------------------------------------------------------------------------
# R19, R36: no host is to drop a copy of the newest committed step that is needed, or of one that is leased.


NOTICE_S = 0.05  # a controller learns of a host's end within this


class DropCheck:
    """Copies that were dropped on order, and copies that faults destroyed."""

    def __init__(self, world: World, observed: Observed, promises: Promises, losses: LossCheck) -> None:
        self.world, self.observed, self.promises, self.losses = world, observed, promises, losses
        self._ordered_s: dict[tuple[str, ShardId], float] = {}  # (host, shard) -> when its drop was ordered
        self._unaware: set[tuple[str, ShardId]] = set()  # dropped by order of a controller that knew of no such commit
        self._taken_s: dict[tuple[str, ShardId], float] = {}  # (host, shard) -> when a fault took the copy
        self._excused: set[tuple[str, ShardId]] = set()  # dropped by order, of a degraded commit that was lost by then

    def ordered(self, controller: AnyController, host: str, order: FreeCopies | FreeStep | DropJob) -> None:
        """Look at an order to drop copies: of its newest committed step a controller must know enough others."""
        if isinstance(order, FreeStep):
            place = (order.job, order.step.attempt, order.step.step)
            holder = self.world.holders.get(host)  # none: it is lost for good
            here = {shard for shard, _ in holder.replicas.index.shards} if holder is not None else set[ShardId]()
            shards = sorted(shard for shard in here if (shard.job, shard.attempt, shard.step) == place)
        else:
            shards = [shard.id for shard in order.shards]
        self._look_at_leases(controller, host, shards)
        self._ordered_s.update({(host, shard): self.world.now for shard in shards})
        job = controller.machine.jobs.get(self.world.scenario.job)
        commits = {(job.name, step) for job in controller.machine.jobs.values() for step in job.commits}
        unaware = {shard for shard in shards if (shard.job, StepId(shard.attempt, shard.step)) not in commits}
        self._unaware.difference_update((host, shard) for shard in shards)
        self._unaware.update((host, shard) for shard in unaware)
        newest = max(job.commits, default=None) if job is not None else None
        self._excused.difference_update((host, shard) for shard in shards)
        if job is None or newest is None or isinstance(order, DropJob) or not self.world.scenario.is_strict:
            return
        if newest in self.observed.facts and job.commits[newest].is_degraded and self.losses.is_lost(newest):
            # It had too few copies to survive what happened, and said so.
            mine = (job.name, newest.attempt, newest.step)
            self._excused.update((host, s) for s in shards if (s.job, s.attempt, s.step) == mine)
            return
        for shard in shards:
            if self.losses.is_in_parity(shard):
                continue  # what is left of it is looked at when it has gone
            if shard.job == job.name and StepId(shard.attempt, shard.step) == newest:
                known = job.copies.get(newest, {}).get(shard.rank, {})
                left = sorted(h for h, copy in known.items() if h != host and not copy.missing)
                if len(left) < self.world.scenario.replicas:
                    raise Violation(
                        "R19", f"{host} is to drop {shard}, the newest committed; whole elsewhere, as it knows: {left}"
                    )

    def _look_at_leases(self, controller: AnyController, host: str, shards: list[ShardId]) -> None:
        """Look for a step that the controller drops before it has ended its lease; repair may drop surplus copies."""
        for shard in shards:
            job, step = controller.machine.jobs.get(shard.job), StepId(shard.attempt, shard.step)
            left = job.copies.get(step, {}).get(shard.rank, {}) if job is not None else {}
            if job is not None and step in job.leased and all(copy.missing for copy in left.values()):
                raise Violation("R36", f"{host} is to drop {shard}, which a reader has leased; no host has it then")

    def taken_by_fault(self, host: str, shard: ShardId) -> None:
        """Record that a fault destroyed a copy."""
        self._taken_s[host, shard] = self.world.now

    def dropped(self, host: str, shard: ShardId, digest: str) -> None:
        """Look at a copy that has gone without a fault."""
        taken = self._taken_meanwhile(host, shard)
        self.promises.dropped(host, shard, taken)
        if self.losses.is_in_parity(shard):
            return
        step = StepId(shard.attempt, shard.step)
        newest = max(self.observed.facts, default=None)
        if newest is None or step != newest or shard.job != self.world.scenario.job or (host, shard) in self._excused:
            return
        if step not in self.observed.acked and (host, shard) in self._unaware:
            # its fact is in too few journals: no rank was informed of it, and a new controller has not learned of it
            return
        left = sorted(h for h, believed in self.observed.believed.items() if (shard, digest) in believed)
        left += taken
        if len(left) < self.world.scenario.replicas:
            raise Violation("R19", f"{host} dropped {shard}, the newest committed; copies left: {left}")

    def _taken_meanwhile(self, host: str, shard: ShardId) -> list[str]:
        """Return the hosts whose copy a fault took after this host was ordered to drop its own.

        The controller counted on their copies when it gave the order, and was right to do so.
        """
        since_s = self._ordered_s.get((host, shard), self.world.now) - NOTICE_S
        return sorted(h for (h, lost), at_s in self._taken_s.items() if lost == shard and at_s >= since_s)


# -- ending -------------------------------------------------------------------------------------------
# I13, I16 and I18: at the end the controller knows every copy, and nothing is kept for dead processes.


def look_at_the_end(world: World, redundancy: Redundancy) -> None:
    """Look at a store whose ranks have ended and in which nothing happens any more."""
    controller = world.served()
    if controller is None:
        raise Violation("I16", "no controller serves at the end")
    known = {
        (copy.shard, host, copy.missing)
        for job in controller.machine.jobs.values()
        for ranks in (*job.copies.values(), *job.parity.values())
        for hosts in ranks.values()
        for host, copy in hosts.items()
    }
    held = {(c.shard, h, c.missing) for h, holder in world.holders.items() for c in holder.copies()}
    if known != held:
        only_held, only_known = sorted(map(str, held - known))[:3], sorted(map(str, known - held))[:3]
        raise Violation("I18", f"held but unknown: {only_held}; known but not held: {only_known}")
    for host, holder in world.holders.items():
        leased = {o: n for o, n in holder.replicas.table.leases.items() if n}
        if leased:
            raise Violation("I13", f"{host} still leases slots to dead processes: {leased}")
        # A sender that was cut off could not say that it gave up, so its incoming replica stays until it has been idle
        # for long. Chunks that no reader took, because their reader died or the controller did, go by their deadline.
        incoming = {k for k, replica in holder.replicas.index.incoming.items() if replica.part is None}
        kept = [k for k in incoming if (k[1], k[0]) not in holder.peer_server.incoming]
        if kept:
            raise Violation("I13", f"{host} still has incoming replicas {sorted(map(str, kept))[:3]}")
    why = redundancy.why_not_live()
    if why:
        raise Violation("I16", f"at the end {why}")

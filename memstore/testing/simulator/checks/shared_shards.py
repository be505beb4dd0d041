"""R34: ranks with equal state. Which of them copy, where their copies lie, what is reported of them, what they get."""

from __future__ import annotations

from collections import defaultdict
from typing import Protocol

from memstore.core.cluster.facts import AttemptOpened, Fact, StepCommitted
from memstore.core.format.shared_layout import SharedShardLayout
from memstore.core.wire.replies import Joined, SharedShardPlace
from memstore.testing.simulator.checks.observed import Observed, are_well, racks_of, trusted_hosts
from memstore.testing.simulator.world.world import AnyRank, Violation, World
from recovery.inventory import ShardId, StepId

Launch = tuple[int, str | None]  # attempt, key
Disturbances = tuple[int, tuple[int, ...]]  # faults so far; the term of the controller, incarnations of the holders
REPORTED_WITHIN = 4  # commits in a row


class SharingRank(AnyRank, Protocol):
    """A rank that names its shard, which other ranks may hold too."""

    @property
    def shard(self) -> int:
        """The number of its shard."""


class SharedShardCheck:
    """What ranks with equal state put and receive; nothing if ranks name no shard."""

    def __init__(self, world: World, observed: Observed) -> None:
        self.world, self.observed = world, observed
        self.opened: dict[Launch, list[AttemptOpened]] = defaultdict(list)  # in some journal, each with other writers
        self.writers: dict[Launch, AttemptOpened] = {}  # the fact whose writers a rank was sent
        # (attempt and step, shard) -> what its writers put as shared chunks
        self.shared: dict[tuple[StepId, int], list[list[bytes]]] = defaultdict(list)
        self.put_by: dict[ShardId, list[bytes]] = {}  # shared chunks of a rank's put
        self._calm: dict[int, Disturbances] = {}  # attempt -> those before it, if none of them lasts
        self._unreported: dict[tuple[int, int, int], int] = {}  # attempt, two writers that differ -> commits in a row
        self._reported: set[tuple[int, int, int]] = set()  # attempt, two writers that a holder reported to differ

    # -- which ranks copy -----------------------------------------------------------------------

    def journalled(self, host: str, fact: Fact) -> None:
        """Look at a fact in a journal: writers lie in domains of their own, and stay those that ranks were sent."""
        if not isinstance(fact, AttemptOpened) or not fact.shard_of or fact.job != self.world.scenario.job:
            return
        launch: Launch = (fact.attempt, fact.key)
        if all((known.shard_of, known.writers) != (fact.shard_of, fact.writers) for known in self.opened[launch]):
            known_fact = self.writers.get(launch)
            if known_fact is not None:
                raise Violation(
                    "R34", f"{launch} has writers {fact.writers} on {host}, ranks know {known_fact.writers}"
                )
            self.opened[launch].append(fact)
            self._look_at_writers(fact)

    def _look_at_writers(self, fact: AttemptOpened) -> None:
        scenario = self.world.scenario
        for shard in range(scenario.shards):
            ranks = [rank for rank, named in enumerate(fact.shard_of) if named == shard]
            chosen = [rank for rank in fact.writers if rank in ranks]
            hosts, all_hosts = {fact.hosts[rank] for rank in chosen}, {fact.hosts[rank] for rank in ranks}
            if not chosen or len(hosts) < len(chosen) or len(chosen) > scenario.replicas:
                raise Violation("R34", f"shard {shard} of attempt {fact.attempt} has writers {chosen} on {hosts}")
            if not scenario.racks and len(chosen) < min(scenario.replicas, len(all_hosts)):
                raise Violation("R34", f"shard {shard} of attempt {fact.attempt} is on {all_hosts}, writers {chosen}")
            racks = racks_of(self.world, hosts)
            if self._owes_racks(fact) and len(racks) < len(chosen):
                raise Violation("R34", f"shard {shard} of attempt {fact.attempt} has writers {chosen} in {racks}")

    def _owes_racks(self, fact: AttemptOpened) -> bool:
        """Say whether the hosts of the ranks are well and lie in enough racks, so that each writer owes a rack."""
        holders = [self.world.holders[host] for host in set(fact.hosts)]
        is_well = all(h.is_serving and h.session is not None and h.info.labels for h in holders)
        return is_well and len(racks_of(self.world, set(fact.hosts))) >= self.world.scenario.replicas

    def joined(self, rank: SharingRank, answer: Joined) -> None:
        """Look at the writers that a rank is sent: those of the fact, whichever controller or process asks again."""
        launch: Launch = (answer.attempt, rank.key)
        known = [self.writers[launch]] if launch in self.writers else self.opened[launch]
        for fact in known:
            by_shard = tuple(
                tuple(r for r in fact.writers if fact.shard_of[r] == shard) for shard in range(max(fact.shard_of) + 1)
            )
            number = fact.shard_of[answer.rank]
            writers_by_shard = by_shard if answer.rank == 0 else ()
            if answer.shared_shard == SharedShardPlace(number, len(by_shard), by_shard[number], writers_by_shard):
                self.writers[launch] = fact
                if self._is_calm():
                    self._calm.setdefault(fact.attempt, self._disturbances())
                return
        facts = [fact.writers for fact in known]
        raise Violation("R34", f"rank {rank.rank} of {launch} was sent {answer.shared_shard}, facts say {facts}")

    # -- what was put ---------------------------------------------------------------------------

    def shared_put(self, rank: SharingRank, step: int, chunks: list[bytes]) -> None:
        """Record what a rank puts of the shard that it shares; no chunks if it is no writer."""
        shard = ShardId(rank.job, rank.attempt, step, rank.rank)
        self.put_by[shard] = chunks
        if chunks and chunks not in self.shared[StepId(rank.attempt, step), rank.shard]:
            self.shared[StepId(rank.attempt, step), rank.shard].append(chunks)

    def shared_count(self, shard: ShardId) -> int:
        """Return how many of a put's first chunks other ranks have too, bit for bit."""
        return len(self.put_by.get(shard, ()))

    def reported(self, shard: ShardId, other_rank: int, unequal: list[int]) -> None:
        """Look at a holder's report of the chunks in which two writers differ: it must be true."""
        theirs = self.put_by.get(ShardId(shard.job, shard.attempt, shard.step, other_rank), [])
        mine = self.put_by.get(shard, [])
        truth = [n for n, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b]
        self._reported.discard((shard.attempt, shard.rank, other_rank))
        if truth:
            self._reported.add((shard.attempt, shard.rank, other_rank))
        if unequal != truth:
            raise Violation("R34", f"{shard} and rank {other_rank} are said to differ in {unequal}, and do in {truth}")

    # -- what is committed ----------------------------------------------------------------------

    def committed(self, step: StepId, fact: StepCommitted) -> None:
        """Look at a commit.

        Unless a fault hinders that, writers hold one another's copies, and those that differ are reported.
        """
        launch = next((x for x in reversed(self.writers) if x[0] == step.attempt), None)
        if launch is None or fact.is_degraded:
            return
        if not self._is_calm() or self._calm.get(step.attempt) != self._disturbances():
            self._calm.pop(step.attempt, None)
            return
        opened = self.writers[launch]
        hosts = {rank.rank: rank.host_id for rank in self.world.ranks if rank.attempt == step.attempt}
        for rank in opened.writers:
            others = [r for r in opened.writers if r != rank and opened.shard_of[r] == opened.shard_of[rank]]
            away = {hosts[r] for r in others if r in hosts and self._may_hold(hosts, rank, r)} - {
                *fact.digests.keepers[rank]
            }
            if away:
                raise Violation("R34", f"{step}: writer {rank}'s shard is not on the other writers' {away}")
            for other in others:
                if rank < other:
                    self._look_at_pair(step, rank, other)

    def _may_hold(self, hosts: dict[int, str], rank: int, other: int) -> bool:
        """Say whether a writer may hold the other's copy: not if both sit in one rack or group that copies must leave.

        They sit in one rack if the hosts of other racks were away when the attempt opened, in one group if a process
        that took a rank's place since made two groups one.
        """
        controller = self.world.served()
        job = controller.machine.jobs.get(self.world.scenario.job) if controller is not None else None
        for domains in job.group_domains if job is not None else ():
            if rank in hosts and other in hosts and domains.get(hosts[rank]) == domains.get(hosts[other]):
                return False
        racks = [self.world.racks[hosts[r]] for r in (rank, other) if r in hosts]
        return len(set(racks)) == len(racks) or self.world.scenario.racks_wanted == 1

    def _look_at_pair(self, step: StepId, rank: int, other: int) -> None:
        """Demand that two writers that differ are reported within some commits.

        A copy that comes after the next put was sealed is not compared; of several in a row some are in time.
        """
        mine, theirs = (
            self.put_by[ShardId(self.world.scenario.job, step.attempt, step.step, r)] for r in (rank, other)
        )
        pair = (step.attempt, rank, other)
        if mine == theirs or pair in self._reported:
            self._unreported.pop(pair, None)
            return
        self._unreported[pair] = self._unreported.get(pair, 0) + 1
        if self._unreported[pair] >= REPORTED_WITHIN:
            raise Violation("R34", f"ranks {rank} and {other} differ {REPORTED_WITHIN} times to {step}, unreported")

    def _is_calm(self) -> bool:
        """Say whether no effect of a fault lasts."""
        world = self.world
        is_clear = not (world.network.cut or world.network.slow or world.drains) and world.has_kv
        served = world.served()
        is_clear = is_clear and served is not None and not any(map(served.machine.state.is_draining, world.holders))
        return are_well(world) and is_clear and len(trusted_hosts(world)) == len(world.holders)

    def _disturbances(self) -> Disturbances:
        """Return what grows with each fault but ranks that differ, with the end of all faults and with each restart.

        Some faults end a process long after they are done, and it may be there again before the next commit.
        """
        world, injected = self.world, self.observed.injected
        faults_count = sum(injected.values()) - injected.get("differ", 0) + self.observed.is_healed
        served = world.served()
        term = served.term if served is not None else 0
        return faults_count, (term, *(holder.info.incarnation for holder in world.holders.values()))

    # -- what is got ----------------------------------------------------------------------------

    def loaded(
        self,
        rank: SharingRank,
        step: StepId,
        where: StepId,
        found: SharedShardLayout,
        shared: list[bytes],
        own: list[bytes] | None,
    ) -> None:
        """Look at both parts that a rank has restored.

        Both are of the step that the round gave: the own part of the rank's own shard, the shared part as some writer
        of its shard put it.
        """
        who = f"rank {rank.rank} of attempt {rank.attempt}"
        if where != step:
            raise Violation("R34", f"{who} restored {step} and got the shared part of {where}")
        if found.shared is None or (found.shard, found.shards) != (rank.shard, self.world.scenario.shards):
            raise Violation("R34", f"{who} was sent for shard {rank.shard} of {step} to a rank that has no copy of it")
        if shared not in self.shared[step, rank.shard]:
            raise Violation("R34", f"{who} got as shared part of {step} what no writer of shard {rank.shard} put")
        put = self.observed.contents.get(ShardId(rank.job, step.attempt, step.step, rank.rank), [])
        if own is not None and not any(content[-len(own) :] == own for content in put):
            raise Violation("R34", f"{who} got as its own part of {step} what it did not put")

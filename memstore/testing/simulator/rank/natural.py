"""Ranks with equal state in one simulation: how launches deal shards, what was put, and what must be true (R34)."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from memstore.core.cluster.facts import AttemptOpened, Fact, StepCommitted
from memstore.core.format.shared_layout import NaturalLayout
from memstore.testing.simulator.checks.checker import Violation
from recovery.inventory import ShardId, StepId

if TYPE_CHECKING:
    from memstore.testing.simulator.rank.natural_rank import NaturalRank
    from memstore.testing.simulator.world.world import Simulation

Body = dict[str, Any]
Launch = tuple[int, tuple[int, ...], str | None]  # attempt, order of its ranks, key
SAID_WITHIN = 4  # commits in a row


class Natural:
    """What twins of one simulation share; nothing where ranks name no shard."""

    def __init__(self, world: Simulation) -> None:
        self.world = world
        self.rng = random.Random(f"natural {world.scenario.seed}")
        self.opened: dict[Launch, list[AttemptOpened]] = defaultdict(list)  # that some journal had, with other copiers
        self.copiers: dict[Launch, AttemptOpened] = {}  # that a rank was told
        # (attempt, step, shard) -> what its copiers put as shared chunks
        self.shared: dict[tuple[StepId, int], list[list[bytes]]] = defaultdict(list)
        self.put_by: dict[ShardId, list[bytes]] = {}
        self.is_blocked = world.scenario.is_blocked  # how the next launch deals the shards
        self.calm: dict[int, int] = {}  # attempt -> faults before it, of which none lasts
        self.unsaid: dict[tuple[int, int, int], int] = {}  # attempt, two copiers -> commits in a row without a word
        self.known: set[tuple[int, int, int]] = set()  # those of whom it was said

    # -- launches -------------------------------------------------------------------------------

    def dealt(self) -> list[int]:
        """Return, by rank, the shard that the next launch's ranks name."""
        scenario = self.world.scenario
        size = self.rng.choice(scenario.sizes) if scenario.sizes else scenario.world_size
        if self.rng.random() < 0.08 and not self.world.checker.is_healed:
            self.is_blocked = not self.is_blocked  # a mistake, which is refused if the step's ranks held other shards
        return _dealt(size, scenario.shards, is_blocked=self.is_blocked)

    def deal_otherwise(self, shard_of: Sequence[int]) -> None:
        """A launch that dealt them so was refused."""
        is_blocked = list(shard_of) == _dealt(len(shard_of), self.world.scenario.shards, is_blocked=True)
        self.is_blocked = not is_blocked

    # -- who copies -----------------------------------------------------------------------------

    def journalled(self, host: str, fact: Fact) -> None:
        """A journal has a fact: an attempt's copiers sit in domains of their own, and stay who ranks were told."""
        if not isinstance(fact, AttemptOpened) or not fact.shard_of or fact.job != self.world.scenario.job:
            return
        launch: Launch = (fact.attempt, fact.order, fact.key)
        if all((known.shard_of, known.copiers) != (fact.shard_of, fact.copiers) for known in self.opened[launch]):
            told = self.copiers.get(launch)
            if told is not None:
                raise Violation("R34", f"{launch} has copiers {fact.copiers} on {host}, ranks know {told.copiers}")
            self.opened[launch].append(fact)
            self._look_at_copiers(fact)

    def _look_at_copiers(self, fact: AttemptOpened) -> None:
        scenario, holders = self.world.scenario, self.world.holders
        for shard in range(scenario.shards):
            ranks = [rank for rank, named in enumerate(fact.shard_of) if named == shard]
            chosen = [rank for rank in fact.copiers if rank in ranks]
            hosts, seats = {fact.hosts[rank] for rank in chosen}, {fact.hosts[rank] for rank in ranks}
            if not chosen or len(hosts) < len(chosen) or len(chosen) > scenario.replicas:
                raise Violation("R34", f"shard {shard} of attempt {fact.attempt} has copiers {chosen} on {hosts}")
            if not scenario.racks and len(chosen) < min(scenario.replicas, len(seats)):
                raise Violation("R34", f"shard {shard} of attempt {fact.attempt} is on {seats}, copiers {chosen}")
            racks = {holders[host].info.labels.get("rack", "") for host in hosts}
            if self._owes_racks(fact) and len(racks) < len(chosen):
                raise Violation("R34", f"shard {shard} of attempt {fact.attempt} has copiers {chosen} in {racks}")

    def _owes_racks(self, fact: AttemptOpened) -> bool:
        """True if hosts with ranks in enough racks are there, so that copiers owe racks of their own."""
        holders = [self.world.holders[host] for host in set(fact.hosts)]
        racks = {holder.info.labels.get("rack", "") for holder in holders}
        is_well = all(h.is_serving and h.session is not None and h.info.labels for h in holders)
        return is_well and len(racks) >= self.world.scenario.replicas

    def told(self, rank: NaturalRank, answer: Body) -> None:
        """A rank was told its shard's copiers: those of the fact, also by another controller or in another's place."""
        launch: Launch = (int(answer["attempt"]), tuple(answer["order"]), rank.key)
        known = [self.copiers[launch]] if launch in self.copiers else self.opened[launch]
        for fact in known:
            by_shard = [
                [r for r in fact.copiers if fact.shard_of[r] == shard] for shard in range(max(fact.shard_of) + 1)
            ]
            number = fact.shard_of[int(answer["rank"])]
            roster = by_shard if answer["rank"] == 0 else []
            if answer["natural"] == [number, len(by_shard), by_shard[number], roster]:
                self.copiers[launch] = fact
                if self._is_calm():
                    self.calm.setdefault(fact.attempt, self._faults())
                return
        facts = [fact.copiers for fact in known]
        raise Violation("R34", f"rank {rank.rank} of {launch} was told {answer['natural']}, facts say {facts}")

    # -- what was put ---------------------------------------------------------------------------

    def shared_put(self, rank: NaturalRank, step: int, chunks: list[bytes]) -> None:
        """A copier puts what its shard shares."""
        shard = ShardId(rank.job, rank.attempt, step, rank.rank)
        self.put_by[shard] = chunks
        if chunks and chunks not in self.shared[StepId(rank.attempt, step), rank.shard]:
            self.shared[StepId(rank.attempt, step), rank.shard].append(chunks)

    def shared_count(self, shard: ShardId) -> int:
        """How many of a put's first chunks its twins have too, bit for bit."""
        return len(self.put_by.get(shard, ()))

    def said(self, shard: ShardId, twin: int, unequal: list[int]) -> None:
        """A holder says that two copiers differ in these chunks, or in none any more: it must be so."""
        theirs = self.put_by.get(ShardId(shard.job, shard.attempt, shard.step, twin), [])
        mine = self.put_by.get(shard, [])
        truth = [n for n, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b]
        self.known.discard((shard.attempt, shard.rank, twin))
        if truth:
            self.known.add((shard.attempt, shard.rank, twin))
        if unequal != truth:
            raise Violation("R34", f"{shard} and rank {twin} are said to differ in {unequal}, and do in {truth}")

    # -- what is committed ----------------------------------------------------------------------

    def committed(self, step: StepId, fact: StepCommitted) -> None:
        """Where nothing went wrong copiers hold one another's copies, and it is said that they differ."""
        launch = next((x for x in reversed(self.copiers) if x[0] == step.attempt), None)  # perhaps renumbered
        if launch is None or fact.is_degraded:
            return
        if not self._is_calm() or self.calm.get(step.attempt) != self._faults():
            self.calm.pop(step.attempt, None)
            return
        opened = self.copiers[launch]
        hosts = {rank.rank: rank.host_id for rank in self.world.ranks if rank.attempt == step.attempt}
        for rank in opened.copiers:
            others = [r for r in opened.copiers if r != rank and opened.shard_of[r] == opened.shard_of[rank]]
            away = {hosts[r] for r in others if r in hosts and self._may_hold(hosts, rank, r)} - {*fact.hosts[rank]}
            if away:
                raise Violation("R34", f"{step}: copier {rank}'s shard is on {fact.hosts[rank]}, not on twins' {away}")
            for other in others:
                if rank < other:
                    self._look_at_pair(step, rank, other)

    def _may_hold(self, hosts: dict[int, str], rank: int, other: int) -> bool:
        """True unless copies owe racks of their own, and both copiers sit in one: the others were lost at the start."""
        racks = [self.world.holders[hosts[r]].info.labels.get("rack", "") for r in (rank, other) if r in hosts]
        return len(set(racks)) == len(racks) or self.world.checker.racks_wanted() == 1

    def _look_at_pair(self, step: StepId, rank: int, other: int) -> None:
        """A copy that comes after the next put was sealed is not compared; of several in a row some are in time."""
        mine, theirs = (
            self.put_by[ShardId(self.world.scenario.job, step.attempt, step.step, r)] for r in (rank, other)
        )
        pair = (step.attempt, rank, other)
        if mine == theirs or pair in self.known:
            self.unsaid.pop(pair, None)
            return
        self.unsaid[pair] = self.unsaid.get(pair, 0) + 1
        if self.unsaid[pair] >= SAID_WITHIN:
            raise Violation("R34", f"ranks {rank} and {other} differ {SAID_WITHIN} times to {step}; nobody says so")

    def _is_calm(self) -> bool:
        """True if nothing that went wrong lasts."""
        world = self.world
        holders = world.holders.values()
        is_well = all(h.is_serving and h.session is not None and not h.memory.is_full for h in holders)
        is_clear = not (world.network.cut or world.network.slow or world.drains) and world.has_kv
        served = world.served()
        is_clear = is_clear and served is not None and not any(map(served.catalog.state.is_draining, world.holders))
        return is_well and is_clear and len(world.checker.trusted()) == len(holders)

    def _faults(self) -> int:
        """How many there were, but for ranks that differ; the last is that all are healed."""
        injected = self.world.injected
        return sum(injected.values()) - injected.get("differ", 0) + self.world.checker.is_healed

    # -- what is got ----------------------------------------------------------------------------

    def loaded(
        self, rank: NaturalRank, step: StepId, where: StepId, found: NaturalLayout, shared: list[bytes],
        own: list[bytes] | None,
    ) -> None:  # fmt: skip
        """A rank has both parts: of the step that the round gave, its own shard's, and what a copier of it put."""
        who = f"rank {rank.rank} of attempt {rank.attempt}"
        if where != step:
            raise Violation("R34", f"{who} restored {step} and got the shared part of {where}")
        if found.shared is None or (found.shard, found.shards) != (rank.shard, self.world.scenario.shards):
            raise Violation("R34", f"{who} was sent for shard {rank.shard} of {step} to a rank that has no copy of it")
        if shared not in self.shared[step, rank.shard]:
            raise Violation("R34", f"{who} got as shared part of {step} what no copier of shard {rank.shard} put")
        put = self.world.checker.contents.get(ShardId(rank.job, step.attempt, step.step, rank.rank), [])
        if own is not None and not any(content[-len(own) :] == own for content in put):
            raise Violation("R34", f"{who} got as its own part of {step} what it did not put")


def _dealt(size: int, shards: int, *, is_blocked: bool) -> list[int]:
    return [rank * shards // size if is_blocked else rank % shards for rank in range(size)]

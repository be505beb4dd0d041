"""Recovery in place: what a generation goes on from (I24, R25), who is a rank (I25), what an abort leaves (I26), stores
left behind (R20, I13).
"""

from __future__ import annotations

from typing import Protocol

from memstore.core.arena.slot_table import Owner
from memstore.testing.simulator.checks.observed import Observed
from memstore.testing.simulator.world.world import AnyRank, CopiedRead, Violation, World
from recovery.inventory import ShardId, StepId

MAX_RESTORES = 3  # of one step by whole launches, until it may be given up (R25)
CLOSED_S = 20.0  # a store that its process has closed has no leases after this: a `bye` waits 10 s for submissions


class InPlaceStore(AnyRank, Protocol):
    """A Store of a process that has others before and after it."""

    number: int  # its generation

    @property
    def pid(self) -> int:
        """Its process."""

    @property
    def is_closed(self) -> bool:
        """Return whether its process has left and closed it."""

    @property
    def closed_s(self) -> float:
        """Return when."""


class Generations:
    """The generations of one simulation; nothing if its job does not recover in place."""

    def __init__(self, world: World, observed: Observed) -> None:
        self.world, self.observed = world, observed
        self._met: dict[tuple[str, int, int], int] = {}  # (run, generation, rank) -> the process that came
        self._put: dict[tuple[str, int, int], int] = {}  # (key, attempt, rank) -> the process that puts
        self._from: dict[tuple[str, int], StepId] = {}  # (key, attempt) -> the step that its ranks go on from
        self._stores: dict[Owner, InPlaceStore] = {}
        self._void: dict[StepId, int] = {}  # steps whose put by a rank was computed from half a result

    def met(self, run: str, number: int, rank: int, pid: int) -> None:
        """Look at a process that has met the others: no other process came as the same rank (I25)."""
        other = self._met.setdefault((run, number, rank), pid)
        if other != pid:
            raise Violation("I25", f"processes {other} and {pid} are both rank {rank} of {run}'s generation {number}")

    def began(self, store: InPlaceStore) -> None:
        """Note whose leases are whose."""
        self._stores[store.owner] = store

    def goes_on(self, store: InPlaceStore, answer: CopiedRead) -> None:
        """Look at the bytes that a rank has got: of a committed step, the same on all ranks (I24)."""
        self._look_at_older(store, StepId(answer.placed.attempt, answer.placed.step))
        who = f"rank {store.rank} of attempt {store.attempt}, generation {store.number},"
        given = self._step_of(store, answer.whole)
        if given is None:
            return  # bytes that no rank put are I3
        if given not in self.observed.facts:
            raise Violation("I24", f"{who} goes on from {given}, which is not committed")
        others = self._from.setdefault((store.key, store.attempt), given)
        if given != others:
            raise Violation("I24", f"{who} goes on from {given}, another rank from {others}")

    def _look_at_older(self, store: InPlaceStore, got: StepId) -> None:
        """Demand that no generation goes on from an older step than one before it, unless that is not whole (R25)."""
        before = max((s for (a, _), s in self.observed.decided.items() if s and a < store.attempt), default=got)
        if before <= got or before not in self.observed.facts or not self.world.scenario.is_strict:
            return
        here = [name for name, holder in self.world.holders.items() if holder.is_serving and holder.session is not None]
        whole = set().union(*(self.observed.whole.get(name, set()) for name in here))
        shards = enumerate(self.observed.facts[before].digests)
        is_whole = all((ShardId(store.job, before.attempt, before.step, rank), d) in whole for rank, d in shards)
        if is_whole and not self.is_spent(before):
            raise Violation("R25", f"{store.key} goes on from {got}, although {before} is whole, which was restored")

    def _step_of(self, store: InPlaceStore, read: list[bytes]) -> StepId | None:
        """Return the newest step as which this rank has put these bytes."""
        steps = [
            StepId(shard.attempt, shard.step)
            for shard, puts in self.observed.contents.items()
            if shard.rank == store.rank and read in puts
        ]
        return max(steps, default=None)

    def puts(self, store: InPlaceStore, step: int) -> None:
        """Look at a put: of an attempt one process puts as one rank (I25)."""
        other = self._put.setdefault((store.key, store.attempt, store.rank), store.pid)
        if other != store.pid:
            shard = ShardId(store.job, store.attempt, step, store.rank)
            raise Violation("I25", f"process {store.pid} puts {shard}, process {other} has put as that rank")

    def puts_void(self, store: InPlaceStore, step: int) -> None:
        """Note a put of what was computed from half a result."""
        self._void.setdefault(StepId(store.attempt, step), store.rank)

    def is_spent(self, step: StepId) -> bool:
        """Say whether so many whole launches have restored a step that it counts as crash loop; in place none does."""
        whole = [key for (_, key), got in self.observed.decided.items() if got == step and key.endswith(":0")]
        return len(whole) >= MAX_RESTORES

    def look_at_stores(self) -> None:
        """Look at what holders keep of the stores of processes, and at what is committed, every second."""
        for step in self._void.keys() & self.observed.facts.keys():
            raise Violation("I26", f"{step} is committed; rank {self._void[step]} computed it from half a result")
        self._look_at_links()
        self._look_at_closed()

    def _look_at_links(self) -> None:
        """Raise Violation if a holder speaks to a store that its process has left, and not to its newest one (R20)."""
        for holder in self.world.holders.values():
            for link in holder.connected() if holder.is_serving else ():
                if link not in self.world.former:
                    continue
                newest = [r for r in self.world.ranks if r.nonce == link.nonce and r.holder is holder]
                if newest and not newest[0].is_dead and newest[0].owner.link > link.owner.link:
                    raise Violation("R20", f"{holder.host_id} speaks to a former store of rank {link.rank}'s process")

    def _look_at_closed(self) -> None:
        """Raise Violation if a holder leases slots to a store that a living process has closed long ago (I13)."""
        for host, holder in self.world.holders.items():
            for owner, slots in holder.replicas.table.leases.items() if holder.is_serving else ():
                store = self._stores.get(owner)
                if store is None or not slots or not store.is_closed or store.is_dead:
                    continue
                if self.world.now - store.closed_s > CLOSED_S:
                    who = f"rank {store.rank}'s process {store.pid}, which has left generation {store.number}"
                    raise Violation("I13", f"{host} still leases {len(slots)} slots to a closed store of {who}")

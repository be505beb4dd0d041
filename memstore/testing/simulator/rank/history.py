"""Pins and forks in the simulator: what people ask for in the middle of a run, and what must be true of it (R19, R32).

What was acknowledged is demanded: a pinned step stays restorable, a fork is bit for bit its origin. A question whose
rank died before the answer demands nothing: nobody was promised anything.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

from memstore.core.format.manifest import Manifest, chunk_digest
from memstore.core.wire.messages import shard_from_wire
from memstore.errors import CapacityError, DigestMismatch
from memstore.shell.holder.fork import forked_body, look, make
from recovery.inventory import ShardId, StepId

if TYPE_CHECKING:
    from memstore.testing.simulator.checks.scenario import Fault
    from memstore.testing.simulator.host.holder import SimHolder
    from memstore.testing.simulator.rank.rank import SimRank
    from memstore.testing.simulator.world.control import Controller
    from memstore.testing.simulator.world.world import Simulation, Wait

Body = dict[str, Any]
LOOK_S = 0.004
HEARD_S = 0.05  # a controller hears of a host's end within this
KINDS = ("pin-step", "unpin-step", "fork-step", "remove-fork")


class History:
    """What people asked of one simulation."""

    def __init__(self, world: Simulation) -> None:
        self.world = world
        self.pins: dict[str, StepId] = {}  # acknowledged, and nobody has asked to take it back
        self.forks: dict[str, StepId] = {}  # the same, by new job: its origin's step
        self.asked: dict[str, StepId] = {}  # every fork that was ever asked for
        self.count = 0
        self.drops_s: dict[tuple[str, ShardId], float] = {}  # ordered of a host -> when
        self.taken: dict[tuple[str, ShardId], float] = {}  # copies on a host that a fault took -> when

    # -- what people do -----------------------------------------------------------------------

    def act(self, each: Fault) -> None:
        """Do one of `KINDS` through a living rank."""
        living = [r for r in self.world.ranks if not r.is_dead and r.holder is not None]
        if not living:
            return
        rank, number = living[each.rank % len(living)], each.count - 1
        committed = sorted(self.world.checker.acked, reverse=True)
        self.count += 1
        if each.kind == "pin-step" and committed:
            self._pin(rank, committed[number % min(4, len(committed))], f"p{self.count}")
        elif each.kind == "fork-step" and committed:
            self._fork(rank, committed[number % min(4, len(committed))], f"fork{self.count}")
        elif each.kind == "unpin-step" and self.pins:
            name = sorted(self.pins)[number % len(self.pins)]
            del self.pins[name]
            self._ask(rank, "unpin", lambda answer: None, name=name)
        elif each.kind == "remove-fork" and self.forks:
            name = sorted(self.forks)[number % len(self.forks)]
            del self.forks[name]
            self._ask(rank, "rm", lambda answer: None, job=name, force=True)

    def _pin(self, rank: SimRank, step: StepId, name: str) -> None:
        self._ask(
            rank, "pin", lambda answer: self.pins.update({name: step}),
            step=step.step, of_attempt=step.attempt, name=name,
        )  # fmt: skip

    def _fork(self, rank: SimRank, step: StepId, name: str) -> None:
        self.asked[name] = step
        self._ask(
            rank, "fork", lambda answer: self.forks.update({name: step}),
            step=step.step, of_attempt=step.attempt, new_job=name, nonce=f"{name}-{rank.nonce}",
        )  # fmt: skip

    def _ask(self, rank: SimRank, verb: str, done: Callable[[Body], object], **body: Any) -> None:
        call_id = rank.ask(verb, **body)

        def wait() -> Generator[Wait, None, None]:
            yield lambda: call_id in rank.replies or rank.is_dead
            answer = rank.replies.pop(call_id, None)
            what = "no answer" if answer is None else answer.get("error", "done")
            self.world.note(f"rank {rank.rank}: {verb} {body.get('name') or body.get('new_job') or body}: {what}")
            if answer is not None and "error" not in answer:
                done(answer)

        self.world.spawn(wait(), self.world)

    # -- what must be true --------------------------------------------------------------------

    def look(self, name: str, manifest: Manifest) -> str:
        """Say why a fork's manifest on a host does not name what its origin's rank put, or ""."""
        shard, origin = manifest.shard, self.asked.get(manifest.shard.job)
        if origin is None:
            return f"{name} holds {shard}, of a job that nobody asked for"
        put = self.world.checker.contents.get(self._shard(origin, shard.rank), [])
        wanted = [[chunk_digest(data) for data in content] for content in put]
        if [chunk.digest for chunk in manifest.chunks] not in wanted:
            return f"{shard} on {name} is not {origin} of its origin, bit for bit"
        return ""

    def promised(self) -> Iterator[tuple[str, ShardId]]:
        """Every shard that a pin or a fork promises, with what promises it."""
        facts = self.world.checker.facts
        for name, step in sorted(self.pins.items()):
            yield from ((f"pin {name}", self._shard(step, rank)) for rank in range(len(facts[step].digests)))
        for job in sorted(self.forks):
            shards = {shard for whole in self.world.checker.whole.values() for shard, _ in whole if shard.job == job}
            attempt = max((shard.attempt for shard in shards), default=1)
            step = self.forks[job]
            size = len(facts[step].digests)
            yield from ((f"fork {job}", ShardId(job, attempt, step.step, rank)) for rank in range(size))

    def _shard(self, step: StepId, rank: int) -> ShardId:
        return ShardId(self.world.scenario.job, step.attempt, step.step, rank)

    def copies(self, shard: ShardId) -> list[str]:
        """Hosts that have a shard, as far as a controller can know at that moment."""
        believed = self.world.checker.believed
        return sorted(host for host, held in believed.items() if any(copy == shard for copy, _ in held))

    def claims_redundancy(self, controller: Controller) -> bool:
        """Say whether the store claims every copy of what is promised: a strict scenario destroys only then."""
        live = set(controller.catalog.hosts.live_ids())
        for _, shard in self.promised():
            job = controller.catalog.jobs.get(shard.job)
            step = StepId(shard.attempt, shard.step)
            copies = job.copies.get(step, {}).get(shard.rank, {}) if job is not None else {}
            if len([h for h, c in copies.items() if h in live and not c.missing]) < self.world.scenario.replicas:
                return False
        return True

    def drop_ordered(self, controller: Controller, host: str, body: Body) -> str:
        """Say why a controller may not drop a copy of its newest committed step: it knows too few other whole ones."""
        self.drops_s.update({(host, shard_from_wire(item)): self.world.now for item in body["shards"]})
        job = controller.catalog.jobs.get(self.world.scenario.job)
        newest = max(job.commits, default=None) if job is not None else None
        if job is None or newest is None or "removed" in body or not self.world.scenario.is_strict:
            return ""
        for shard in map(shard_from_wire, body["shards"]):
            if shard.job == job.name and StepId(shard.attempt, shard.step) == newest:
                known = job.copies.get(newest, {}).get(shard.rank, {})
                left = sorted(h for h, copy in known.items() if h != host and not copy.missing)
                if len(left) < self.world.scenario.replicas:
                    return f"{host} is to drop {shard}, the newest committed; whole elsewhere, as it knows: {left}"
        return ""

    def taken_meanwhile(self, host: str, shard: ShardId) -> list[str]:
        """Hosts whose copy a fault took when this host was told to drop its own, or later: who ordered it was right."""
        since_s = self.drops_s.get((host, shard), self.world.now) - HEARD_S
        return sorted(h for (h, lost), at_s in self.taken.items() if lost == shard and at_s >= since_s)

    def dropped(self, host: str, shard: ShardId) -> str:
        """A copy went without a fault: say which promise is short of copies now, or ""."""
        for what, promised in self.promised():
            left = self.copies(shard)
            if promised == shard and len(left) < self.world.scenario.replicas:
                return f"{host} dropped {shard}, kept by {what}; copies left: {left}"
        return ""

    def lacking(self, wanted: int) -> str:
        """Say which promised shard lies whole on too few hosts, or ""."""
        for what, shard in self.promised():
            have = self.copies(shard)
            if len(have) < wanted:
                return f"{shard}, kept by {what}, is on {have}, wanted {wanted} hosts"
        return ""


def fork(holder: SimHolder, body: Body) -> Generator[Wait, None, None]:
    """Carry out an order to look or to make, as shell/holder/orders.py does."""
    yield LOOK_S
    if body["what"] == "look":
        holder.report("forked", forked_body(body, look(holder.vault, body["shards"])))
        return
    with contextlib.suppress(CapacityError, DigestMismatch):  # ordered again
        for shelved in make(holder.vault, body["shards"]):
            holder.sealed(shelved)
            yield LOOK_S

"""Planted bugs in pins and forks: steps that must be kept, and references that a fork must add."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from memstore.core.arena.replica_index import StoredReplica
from memstore.core.cluster.job import Job
from memstore.core.cluster.kept_steps import kept_steps
from memstore.core.history.pins import Pins
from memstore.core.repair import repair
from memstore.core.wire.messages import shard_from_wire, shard_to_wire
from memstore.shell.arena.replica_store import ReplicaStore
from memstore.shell.holder.fork import make
from memstore.testing.simulator.host import fork
from memstore.testing.simulator.planted.bug import planted
from memstore.testing.simulator.world.scenario import Fault
from recovery.inventory import StepId

PINNED = Fault(4.0, "pin-step")
FORKED = Fault(4.0, "fork-step")


@planted("retention-ignores-pins", "R19", "R19", PINNED)
@contextmanager
def retention_ignores_pins() -> Iterator[None]:
    """Retention drops a step although it is pinned."""

    def nothing(*_: Any) -> set[StepId]:
        return set()

    with patch.object(Pins, "_held", nothing), patch.object(Job, "pinned_steps", nothing):
        yield


@planted("pins-not-repaired", "R29", "I16", PINNED, Fault(6.0, "kill-host", (1,), for_s=2.0))
def pins_not_repaired() -> Any:
    """Repair looks only at steps that retention keeps, so pinned steps stay without copies."""
    return patch.object(repair, "redundant_steps", kept_steps)


@planted("fork-takes-the-references", "R32", "R6 R7 R19", FORKED)
def fork_takes_the_references() -> Any:
    """A fork takes its origin's references instead of adding its own, so the next drop frees chunks in use."""

    def moved(replicas: ReplicaStore, shards: Collection[Any]) -> Iterator[StoredReplica]:
        for item in shards:
            is_new = replicas.index.find(shard_from_wire(item[2])) is None
            for made in make(replicas, [item]):
                for number in made.slots if is_new else ():
                    if number is not None:
                        replicas.table.unhold(number)
                yield made

    return patch.object(fork, "make", moved)


@planted("fork-frees-its-origin", "R32", "R19", FORKED)
def fork_frees_its_origin() -> Any:
    """A fork drops the origin's replica once the new job's is there."""

    def moved(replicas: ReplicaStore, shards: Collection[Any]) -> Iterator[StoredReplica]:
        for item in shards:
            for made in make(replicas, [item]):
                replicas.drop(shard_from_wire(item[0]))
                yield made

    return patch.object(fork, "make", moved)


@planted("fork-of-another-step", "R32", "R32", FORKED, keep_steps=2, tries=3)
def fork_of_another_step() -> Any:
    """A fork is made of another step of its origin than the one that was named."""

    def other(replicas: ReplicaStore, shards: Collection[Any]) -> Iterator[StoredReplica]:
        for item in shards:
            wanted = shard_from_wire(item[0])
            held = sorted(s for s, _ in replicas.index.shards if (s.job, s.rank) == (wanted.job, wanted.rank))
            others = [shard for shard in held if shard != wanted]
            found = replicas.index.find(others[0]) if others else None
            if found is not None:
                yield from make(replicas, [[shard_to_wire(found.shard), found.spec.digest, item[2]]])

    return patch.object(fork, "make", other)

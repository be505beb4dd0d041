"""Begins the durable orders of one simulated holder (core/holder/persist.py), on the storage that all hosts see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from memstore.core.durable.slice_format import slice_range, slices_count
from memstore.core.format.manifest import chunk_digest
from memstore.core.holder import effects
from memstore.core.holder import persist as procedure
from memstore.core.holder.state import HolderState
from memstore.core.wire.messages import spec_to_wire
from memstore.errors import TransportError
from memstore.testing.simulator.host.context import HostContext
from memstore.testing.simulator.host.driver import Driver, Waits
from memstore.testing.simulator.world.durable_storage import DurableStorage
from memstore.testing.simulator.world.violation import Violation
from recovery.inventory import ShardId, StepId

Body = dict[str, Any]


@dataclass(frozen=True)
class OpenStorage:
    """The storage under the key that the host had when it was opened."""

    storage: DurableStorage
    key: str


class Persister:
    """One holder's durable work."""

    def __init__(self, holder: HostContext, state: HolderState, driver: Driver) -> None:
        self.holder, self.state, self.storage = holder, state, holder.world.durable
        self.driver = driver.extended(
            {
                effects.OpenDurable: self._open,
                effects.SliceTurn: self._turn,
                effects.CopySlice: self._copy,
                effects.WriteSlice: self._write,
                effects.WriteMarker: self._write_marker,
                effects.RemoveDurable: self._remove,
                effects.SweepDurable: self._sweep,
                effects.ListMarkers: self._list,
            }
        )

    def order(self, body: Body) -> None:
        """Do as the controller says."""
        what = body["what"]
        if what == "stop":
            procedure.stop(self.state, body)
        elif what == "parts":
            for steps in procedure.slices(self.state, body):
                self.driver.start(steps)
        else:
            begin = {"marker": procedure.marker, "key": procedure.say_key, "remove": procedure.remove}[what]
            self.driver.start(begin(self.state, body))

    def markers(self, body: Body) -> None:
        """List the markers of a job."""
        self.driver.start(procedure.markers(self.state, body))

    # -- effects ------------------------------------------------------------------------------

    def _travel(self) -> Waits[None]:
        yield self.storage.delay_s
        if self.storage.problem:
            raise TransportError(self.storage.problem)

    def _open(self, effect: effects.OpenDurable) -> Waits[OpenStorage]:
        yield from ()
        return OpenStorage(self.storage, self.storage.key_of({"durable": effect.place}, self.holder.host_id))

    def _turn(self, effect: effects.SliceTurn) -> Waits[float]:
        yield from ()
        return 0.0

    def _copy(self, effect: effects.CopySlice) -> Waits[tuple[list[bytes], int | None]]:
        yield from ()
        chunks: list[bytes] = []
        for index in slice_range(effect.shelved.spec, effect.number):
            self.holder.checker.stored_bytes.read(self.holder, effect.shelved, index)
            view = self.holder.replicas.chunk_view(effect.shelved, index)
            if view is None or chunk_digest(view) != effect.shelved.digests[index]:
                return [], index
            chunks.append(bytes(view))
        return chunks, None

    def _write(self, effect: effects.WriteSlice) -> Waits[bool]:
        yield from self._travel()
        if effect.stop.is_set:
            return False
        chunks = list(effect.chunks)
        if self.storage.tears and chunks:
            self.storage.tears -= 1
            chunks[-1] = chunks[-1][: len(chunks[-1]) // 2]
        key = cast(OpenStorage, effect.storage).key
        of_slice = (effect.shard, effect.spec.digest, key, effect.number)
        self.storage.slices[of_slice] = (slices_count(effect.spec), effect.manifest, chunks)
        return True

    def _write_marker(self, effect: effects.WriteMarker) -> Waits[None]:
        yield from self._travel()
        step, specs = effect.marker.step, dict(effect.marker.specs)
        self.storage.markers[effect.job, step.attempt, step.step] = (specs, effect.marker.key, dict(effect.lineage))
        for rank, spec in specs.items():  # every slice of every part must be there before the marker (R31)
            shard = ShardId(effect.job, step.attempt, step.step, rank)
            if self.storage.part(shard, spec.digest, effect.marker.key) is None:
                raise Violation("R31", f"the marker of {step} was written before rank {rank}'s part under its key")

    def _remove(self, effect: effects.RemoveDurable) -> Waits[None]:
        yield from self._travel()
        step = effect.step
        if not (effect.only_unmarked and (effect.job, step.attempt, step.step) in self.storage.markers):
            self.storage.remove_step(effect.job, step.attempt, step.step)

    def _sweep(self, effect: effects.SweepDurable) -> Waits[None]:
        yield from ()  # the storage of the simulation keeps what abandoned writes leave

    def _list(self, effect: effects.ListMarkers) -> Waits[Body]:
        yield from self._travel()
        rows = [
            [attempt, step, [[rank, spec_to_wire(spec)] for rank, spec in sorted(specs.items())], key, lineage]
            for (job, attempt, step), (specs, key, lineage) in sorted(self.storage.markers.items())
            if job == effect.job
        ]
        lacks = "" if effect.check is None else self._lacks(effect.job, effect.check)
        return {
            "key": self.storage.key_of({"durable": effect.place}, self.holder.host_id),
            "markers": rows,
            "lacks": lacks,
        }

    def _lacks(self, job: str, step: StepId) -> str:
        """Say which part of a step is not there, "" if all are."""
        specs, key, _ = self.storage.markers.get((job, step.attempt, step.step), ({}, "", {}))
        shards = {rank: ShardId(job, step.attempt, step.step, rank) for rank in specs}
        gone = [rank for rank, spec in specs.items() if self.storage.part(shards[rank], spec.digest, key) is None]
        return f"parts of ranks {gone} are missing" if gone or not specs else ""

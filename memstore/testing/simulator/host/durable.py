"""Begins the durable orders of one simulated holder (core/holder/persist.py), on the storage that all hosts see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import msgspec

from memstore.core.durable.marker_format import MarkerRecord, row_of
from memstore.core.durable.slice_format import slice_nbytes, slice_range, slices_count
from memstore.core.format.manifest import chunk_digest
from memstore.core.holder import effects
from memstore.core.holder import persist as procedure
from memstore.core.holder.state import HolderState
from memstore.core.schedule.durable_interval import take_turn
from memstore.core.wire.orders import (
    DurableOrder,
    ListMarkers,
    NameKey,
    RemoveStep,
    RemoveTornStep,
    StopWriting,
    WriteMarker,
    WriteSlices,
)
from memstore.errors import IntegrityError, TransportError
from memstore.testing.simulator.host.context import HostContext
from memstore.testing.simulator.host.driver import Driver, Waits
from memstore.testing.simulator.world.durable_storage import DurableStorage
from memstore.testing.simulator.world.violation import Violation
from recovery.inventory import DurableMarker, ShardId, StepId


@dataclass(frozen=True)
class OpenStorage:
    """The storage under the key that the host had when it was opened."""

    storage: DurableStorage
    key: str


class Persister:
    """One holder's durable work."""

    def __init__(self, holder: HostContext, state: HolderState, driver: Driver) -> None:
        self.holder, self.state, self.storage = holder, state, holder.world.durable
        self.free_s: dict[str, float] = {}  # job -> when its next slice may begin
        self.driver = driver.extended(
            {
                effects.OpenDurable: self._open,
                effects.SliceTurn: self._turn,
                effects.CopySlice: self._copy,
                effects.WriteSlice: self._write,
                effects.StoreMarker: self._write_marker,
                effects.RemoveDurable: self._remove,
                effects.SweepDurable: self._sweep,
                effects.ReadMarkers: self._list,
            }
        )

    def order(self, order: DurableOrder) -> None:
        """Do as the controller says."""
        state, start = self.state, self.driver.start
        match order:
            case StopWriting():
                procedure.stop(state, order)
            case WriteSlices():
                for steps in procedure.slices(state, order):
                    start(steps)
            case WriteMarker():
                start(procedure.marker(state, order))
            case RemoveStep():
                start(procedure.remove(order))
            case RemoveTornStep():
                start(procedure.remove_torn(state, order))
            case NameKey():
                start(procedure.say_key(state, order))
            case ListMarkers():
                start(procedure.markers(state, order))

    # -- effects ------------------------------------------------------------------------------

    def _travel(self) -> Waits[None]:
        yield self.storage.delay_s
        if self.storage.problem:
            raise TransportError(self.storage.problem)

    def _open(self, effect: effects.OpenDurable) -> Waits[OpenStorage]:
        yield from ()
        return OpenStorage(self.storage, self.storage.key_of(effect.place, self.holder.host_id))

    def _turn(self, effect: effects.SliceTurn) -> Waits[float]:
        yield from ()
        nbytes = slice_nbytes(effect.stored.spec, effect.number)
        return take_turn(self.free_s, effect.job, self.holder.world.now, nbytes, effect.bytes_per_s)

    def _copy(self, effect: effects.CopySlice) -> Waits[tuple[list[bytes], int | None]]:
        yield from ()
        chunks: list[bytes] = []
        for index in slice_range(effect.stored.spec, effect.number):
            self.holder.checker.stored_bytes.read(self.holder, effect.stored, index)
            view = self.holder.replicas.chunk_view(effect.stored, index)
            if view is None or chunk_digest(view) != effect.stored.digests[index]:
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

    def _write_marker(self, effect: effects.StoreMarker) -> Waits[None]:
        yield from self._travel()
        step, specs = effect.marker.step, dict(effect.marker.specs)
        path = (effect.job, step.attempt, step.step)
        for rank, spec in specs.items():  # every slice of every part must be there before the marker (R31)
            if self.storage.part(ShardId(*path, rank), spec.digest, effect.marker.key) is None:
                if path in self.storage.removed:  # the order came late, as to a holder that was frozen
                    raise IntegrityError(f"{step} lacks the part of rank {rank}: no marker was written")
                raise Violation("R31", f"the marker of {step} was written before rank {rank}'s part under its key")
        self.storage.markers[path] = (specs, effect.marker.key, msgspec.to_builtins(effect.lineage))

    def _remove(self, effect: effects.RemoveDurable) -> Waits[None]:
        yield from self._travel()
        step = effect.step
        if not (effect.only_unmarked and (effect.job, step.attempt, step.step) in self.storage.markers):
            self.storage.remove_step(effect.job, step.attempt, step.step)

    def _sweep(self, effect: effects.SweepDurable) -> Waits[None]:
        yield from ()  # the storage of the simulation keeps what abandoned writes leave

    def _list(self, effect: effects.ReadMarkers) -> Waits[effects.MarkersFound]:
        yield from self._travel()
        rows = tuple(
            row_of(MarkerRecord(job, DurableMarker(StepId(attempt, step), len(specs), specs, key), lineage))
            for (job, attempt, step), (specs, key, lineage) in sorted(self.storage.markers.items())
            if job == effect.job
        )
        lacks = "" if effect.check is None else self._lacks(effect.job, effect.check)
        key = self.storage.key_of(effect.place, self.holder.host_id)
        return effects.MarkersFound(key, rows, "", lacks)

    def _lacks(self, job: str, step: StepId) -> str:
        """Say which part of a step is not there, "" if all are."""
        specs, key, _ = self.storage.markers.get((job, step.attempt, step.step), ({}, "", {}))
        shards = {rank: ShardId(job, step.attempt, step.step, rank) for rank in specs}
        gone = [rank for rank, spec in specs.items() if self.storage.part(shards[rank], spec.digest, key) is None]
        return f"parts of ranks {gone} are missing" if gone or not specs else ""

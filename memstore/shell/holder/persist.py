"""Runs durable orders on threads of their own, with their effects on storage (core/holder/persist.py, R31)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

import msgspec

from memstore.core.durable.marker_format import row_of
from memstore.core.durable.slice_format import slice_nbytes, slice_range
from memstore.core.durable.storage_ports import DurableTier
from memstore.core.format.manifest import chunk_digest
from memstore.core.holder import effects
from memstore.core.holder import persist as procedure
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
from memstore.shell.durable.tier import open_tier
from memstore.shell.holder.context import HolderContext
from memstore.shell.holder.runner import Runner
from memstore.shell.threads.own_threads import OwnThreads
from memstore.shell.threads.priority import lower_thread_priority

T = TypeVar("T")
PERSIST_THREADS = 4  # slices at once: each may be in memory once more (slice_format.SLICE_LIMIT_BYTES)
LIST_THREADS = 2  # apart from the writers: a stuck write must not keep a restore from listing markers


class Persister:
    """Durable work of one holder."""

    def __init__(self, context: HolderContext, runner: Runner) -> None:
        self.context, self.replicas = context, context.replicas
        self.writers = OwnThreads(PERSIST_THREADS, "memstore-persist", lower_thread_priority)
        self.listers = OwnThreads(LIST_THREADS, "memstore-markers")
        self.lock = threading.Lock()
        self.free_s: dict[str, float] = {}  # job -> when its next slice may begin
        self.runner = runner.extended(
            {
                effects.OpenDurable: lambda effect: open_tier(effect.place),
                effects.SliceTurn: self._turn,
                effects.CopySlice: self._copy,
                effects.WriteSlice: _no_panic(self._write),
                effects.StoreMarker: _no_panic(self._write_marker),
                effects.RemoveDurable: _no_panic(self._remove),
                effects.SweepDurable: _no_panic(self._sweep),
                effects.ReadMarkers: _no_panic(self._list),
            }
        )

    def close(self) -> None:
        """Abandon the writes under way."""
        with self.runner.state():
            for stop in self.context.state.stops.values():
                stop.is_set = True
        self.writers.close()
        self.listers.close()

    def order(self, order: DurableOrder) -> None:
        """Do as the controller says, in the background.

        Each storage has threads of its own, so one that hangs delays no other (D205); so has a job with a cap.
        """
        state, run = self.context.state, self.runner.run
        match order:
            case StopWriting():
                with self.runner.state():
                    procedure.stop(state, order)
            case WriteSlices():
                with self.runner.state():
                    slices = procedure.slices(state, order)
                url = order.durable.url
                for steps in slices:
                    self.writers.submit((url, order.job if order.durable.bytes_per_s else ""), run, steps)
            case WriteMarker():
                self.writers.submit(order.durable.url, run, procedure.marker(state, order))
            case RemoveStep():
                self.writers.submit(order.durable.url, run, procedure.remove(order))
            case RemoveTornStep():
                self.writers.submit(order.durable.url, run, procedure.remove_torn(state, order))
            case NameKey():
                self.listers.submit(order.durable.url, run, procedure.say_key(state, order))
            case ListMarkers():
                self.listers.submit(order.durable.url, run, procedure.markers(state, order))

    # -- effects ------------------------------------------------------------------------------

    def _turn(self, effect: effects.SliceTurn) -> float:
        nbytes = slice_nbytes(effect.stored.spec, effect.number)
        with self.lock:
            return take_turn(self.free_s, effect.job, time.monotonic(), nbytes, effect.bytes_per_s)

    def _copy(self, effect: effects.CopySlice) -> tuple[list[bytes], int | None]:
        chunks: list[bytes] = []
        for index in slice_range(effect.stored.spec, effect.number):
            view = self.replicas.chunk_view(effect.stored, index)
            chunk = bytes(view) if view is not None else None  # digested after it left the slot (R7)
            if chunk is None or chunk_digest(chunk) != effect.stored.digests[index]:
                return [], index
            chunks.append(chunk)
        return chunks, None

    def _write(self, effect: effects.WriteSlice) -> bool:
        nbytes = cast(DurableTier, effect.storage).write_slice(
            effect.shard, effect.spec, effect.number, effect.manifest, effect.chunks,
            should_stop=lambda: effect.stop.is_set,
        )  # fmt: skip
        return nbytes is not None

    def _write_marker(self, effect: effects.StoreMarker) -> None:
        open_tier(effect.place).write_marker(effect.job, effect.marker, msgspec.to_builtins(effect.lineage))

    def _remove(self, effect: effects.RemoveDurable) -> None:
        open_tier(effect.place).remove_step(effect.job, effect.step, only_unmarked=effect.only_unmarked)

    def _sweep(self, effect: effects.SweepDurable) -> None:
        open_tier(effect.place).sweep(effect.job, {effect.step})

    def _list(self, effect: effects.ReadMarkers) -> effects.MarkersFound:
        tier = open_tier(effect.place)
        records, problems = tier.marker_records(effect.job)
        lacks = "" if effect.check is None else tier.lacks(effect.job, effect.check)
        return effects.MarkersFound(tier.key, tuple(map(row_of, records)), "; ".join(problems), lacks)


def _no_panic(call: Callable[[Any], T]) -> Callable[[Any], T]:
    """Return a call that raises a RuntimeError for a panic in obstore's native code, which is no Exception."""

    def guarded(effect: Any) -> T:
        try:
            return call(effect)
        except Exception:
            raise
        except BaseException as exc:
            raise RuntimeError(repr(exc)) from exc

    return guarded

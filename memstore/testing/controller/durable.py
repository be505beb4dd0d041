"""Fake durable storage: which host wrote which slice, which markers are there, and what fails."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from memstore.core.durable.slice_format import slices_count
from memstore.core.wire import orders, reports
from memstore.core.wire.ids import WireSpec, WireStep
from memstore.core.wire.messages import HostInfo
from recovery.inventory import Copy, ShardId, ShardSpec


@dataclass
class Durable:
    """Durable storage that all hosts see: slices of parts, then markers."""

    slices: dict[tuple[ShardId, ShardSpec, int], list[str]] = field(default_factory=dict)  # -> hosts that wrote it
    markers: dict[tuple[str, int, int], tuple[dict[int, ShardSpec], orders.Lineage]] = field(default_factory=dict)
    damaged: set[tuple[int, int]] = field(default_factory=set)  # (attempt, step) whose marker cannot be read
    discarded: list[tuple[str, int, int]] = field(default_factory=list)  # steps whose unfinished slices were removed
    problem: str = ""
    lacks: str = ""  # what is missing of the step that a host is ordered to check
    keys: dict[ShardId, set[str]] = field(default_factory=dict)  # -> keys that some slice of it was written under
    marker_keys: dict[tuple[str, int, int], str] = field(default_factory=dict)

    def has_part(self, shard: ShardId, spec: ShardSpec) -> bool:
        """Say whether every slice of a shard is there."""
        return all((shard, spec, number) in self.slices for number in range(slices_count(spec)))


class StorageUser(Protocol):
    """A holder, as durable storage sees it."""

    info: HostInfo
    durable: Durable
    durable_problem: str  # why this host alone cannot use it
    durable_key: str  # name of the key in its file
    copies: dict[ShardId, Copy]

    def report(self, report: reports.Report) -> None:
        """Send a report to the controller."""


def persist(holder: StorageUser, order: orders.DurableOrder) -> None:
    """Do what the controller orders: write slices or the marker, or remove a step."""
    storage, problem = holder.durable, holder.durable.problem or holder.durable_problem or None
    match order:
        case orders.WriteSlices():
            _write_slices(holder, order, problem)
        case orders.WriteMarker():
            place = (order.job, order.step.attempt, order.step.step)
            if problem is None:
                storage.markers[place] = ({rank: spec.spec for rank, spec in order.specs.items()}, order.lineage)
                storage.marker_keys[place] = order.key
            holder.report(reports.MarkerWritten(job=order.job, step=order.step, key=order.key, problem=problem))
        case orders.RemoveStep():
            place, unmarked = (order.job, order.step.attempt, order.step.step), order.only_unmarked
            if unmarked:
                storage.discarded.append(place)
            elif problem is None:
                storage.markers.pop(place, None)
            removed = reports.StepRemoved(job=order.job, step=order.step, only_unmarked=unmarked, problem=problem)
            holder.report(removed)


def _write_slices(holder: StorageUser, order: orders.WriteSlices, problem: str | None) -> None:
    if order.key not in (None, holder.durable_key):
        problem = f"other key {holder.durable_key}"
    for part in order.parts:
        shard = part.shard.id
        for number in part.numbers:
            if shard in holder.copies and problem is None:
                place = (shard, holder.copies[shard].spec, number)
                holder.durable.slices.setdefault(place, []).append(holder.info.host_id)
                holder.durable.keys.setdefault(shard, set()).add(holder.durable_key)
            written = reports.SliceWritten(
                job=order.job, step=order.step, rank=shard.rank, number=number, key=holder.durable_key, problem=problem
            )
            holder.report(written)


def list_markers(holder: StorageUser, order: orders.ListMarkers) -> None:
    """Report the markers of a job."""
    storage = holder.durable
    if why := storage.problem or holder.durable_problem:
        holder.report(reports.MarkersListed(job=order.job, call=order.call, found=None, problem=why))
        return
    mine = [(place, value) for place, value in sorted(storage.markers.items()) if place[0] == order.job]
    torn = [place[2] for place, _ in mine if place[1:] in storage.damaged]
    rows = tuple(
        reports.MarkerRow(
            WireStep(*place[1:]),
            {rank: WireSpec.of(spec) for rank, spec in sorted(specs.items())},
            storage.marker_keys.get(place, ""),
            lineage,
        )
        for place, (specs, lineage) in mine
        if place[1:] not in storage.damaged
    )
    found = reports.MarkersFound(
        markers=rows,
        key=holder.durable_key,
        damaged="; ".join(f"marker of step {step} is torn" for step in torn),
        lacks=storage.lacks if order.check is not None else "",
    )
    holder.report(reports.MarkersListed(job=order.job, call=order.call, found=found, problem=""))

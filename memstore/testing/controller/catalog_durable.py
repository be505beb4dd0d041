"""Fake durable storage: which host wrote which slice, which markers are there, and what fails."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from memstore.core.durable.slice_format import slices_count
from memstore.core.wire.messages import Body, HostInfo, shard_from_wire, spec_from_wire, spec_to_wire
from recovery.inventory import Copy, ShardId, ShardSpec


@dataclass
class Durable:
    """Durable storage that all hosts see: slices of parts, then markers."""

    slices: dict[tuple[ShardId, ShardSpec, int], list[str]] = field(default_factory=dict)  # -> hosts that wrote it
    markers: dict[tuple[str, int, int], tuple[dict[int, ShardSpec], Body]] = field(default_factory=dict)
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

    def report(self, kind: str, body: Body) -> None:
        """Send a report to the controller."""


def persist(holder: StorageUser, body: Body) -> None:
    """Do what the controller orders: report the key, write slices or the marker, or remove a step."""
    job, (attempt, step), what = body["job"], body["step"], body["what"]
    why = holder.durable.problem or holder.durable_problem
    if what == "parts" and body["key"] != holder.durable_key:
        why = f"other key {holder.durable_key}"
    key = body["key"] if what == "marker" else holder.durable_key
    reply = {
        "job": job, "what": what, "step": body["step"], "rank": -1, "slice": 0, "ok": not why, "why": why,
        "key": key,
    }  # fmt: skip
    if what == "key":
        holder.report("persisted", reply)
    elif what == "parts":
        for item, _, numbers in body["parts"]:
            shard = shard_from_wire(item)
            for number in numbers:
                if shard in holder.copies and not why:
                    place = (shard, holder.copies[shard].spec, int(number))
                    holder.durable.slices.setdefault(place, []).append(holder.info.host_id)
                    holder.durable.keys.setdefault(shard, set()).add(holder.durable_key)
                holder.report("persisted", {**reply, "rank": shard.rank, "slice": number})
    elif what == "marker":
        specs = {int(rank): spec_from_wire(spec) for rank, spec in body["specs"]}
        if not why:
            holder.durable.markers[job, attempt, step] = (specs, dict(body["lineage"]))
            holder.durable.marker_keys[job, attempt, step] = body["key"]
        holder.report("persisted", reply)
    elif what == "remove" and body["only_unmarked"]:
        holder.durable.discarded.append((job, attempt, step))
    elif what == "remove":
        if not why:
            holder.durable.markers.pop((job, attempt, step), None)
        if body.get("is_torn"):
            holder.report("persisted", reply)


def list_markers(holder: StorageUser, body: Body) -> None:
    """Report the markers of a job."""
    rows = [
        [
            attempt,
            step,
            [[rank, spec_to_wire(spec)] for rank, spec in sorted(specs.items())],
            holder.durable.marker_keys.get((job, attempt, step), ""),
            lineage,
        ]
        for (job, attempt, step), (specs, lineage) in sorted(holder.durable.markers.items())
        if job == body["job"]
    ]
    why = holder.durable.problem or holder.durable_problem
    damaged = [row for row in rows if (row[0], row[1]) in holder.durable.damaged]
    rows = [row for row in rows if row not in damaged]
    said = why or "; ".join(f"marker of step {row[1]} is torn" for row in damaged)
    report = {"job": body["job"], "call": body["call"], "ok": not why, "why": said, "markers": rows}
    holder.report(
        "markers", {**report, "key": holder.durable_key, "lacks": holder.durable.lacks if body.get("check") else ""}
    )

"""Durable storage in the simulator, and the holder's part in writing it: parts from verified bytes, the marker last."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from memstore.core.durable.slice_format import slice_range, slices_count
from memstore.core.format.manifest import chunk_digest
from memstore.core.wire.messages import shard_from_wire, spec_from_wire, spec_to_wire
from memstore.errors import DigestMismatch
from memstore.testing.simulator.checks.checker import Violation
from recovery.inventory import ShardId, ShardSpec

if TYPE_CHECKING:
    from memstore.testing.simulator.host.holder import SimHolder
    from memstore.testing.simulator.world.world import Wait

Body = dict[str, Any]


@dataclass
class Durable:
    """What all hosts see: slices of parts with their bytes, and markers."""

    # (shard, digest, key's name, slice) -> number of slices, manifest, chunks
    slices: dict[tuple[ShardId, str, str, int], tuple[int, bytes, list[bytes]]] = field(default_factory=dict)
    markers: dict[tuple[str, int, int], tuple[dict[int, ShardSpec], str, Body]] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)  # host -> name of the key in its file
    problem: str = ""  # every operation fails with it
    delay_s: float = 0.05
    tears: int = 0  # so many of the next slices are cut short, silently

    def remove_step(self, job: str, attempt: int, step: int) -> None:
        """The marker goes, then the slices."""
        self.markers.pop((job, attempt, step), None)
        for key in [k for k in self.slices if (k[0].job, k[0].attempt, k[0].step) == (job, attempt, step)]:
            del self.slices[key]

    def part(self, shard: ShardId, digest: str, key: str) -> tuple[bytes, list[bytes]] | None:
        """Return a shard's manifest and chunks under a key, None if a slice is missing."""
        count, manifest, _ = self.slices.get((shard, digest, key, 0), (1, b"", []))
        found = [self.slices.get((shard, digest, key, number)) for number in range(count)]
        chunks = [chunk for each in found if each is not None for chunk in each[2]]
        return (manifest, chunks) if None not in found else None

    def key_of(self, body: Body, host: str) -> str:
        """Return the name of the key that a host has for the job of an order."""
        return self.keys.get(host, "0" * 16) if body["durable"]["key_file"] else ""

    def part_for(self, body: Body, shard: ShardId, digest: str) -> tuple[bytes, list[bytes]] | None:
        """Return a shard's manifest and chunks for an order to stage it; a person gave every host the key."""
        place = body.get("durable") or {}
        return self.part(shard, digest, str(place["key"])) if "key" in place else None


class Persister:
    """One holder's writes."""

    def __init__(self, holder: SimHolder) -> None:
        self.holder = holder

    def order(self, body: Body) -> None:
        """Write parts or a marker, or remove a step."""
        self.holder.spawn(self._run(body))

    def _run(self, body: Body) -> Generator[Wait, None, None]:
        holder, durable = self.holder, self.holder.world.durable
        job, (attempt, step), what = str(body["job"]), body["step"], str(body["what"])
        key = durable.key_of(body, holder.host_id)
        reply = {"job": job, "what": what, "step": body["step"], "rank": -1, "slice": 0, "key": key}
        if what == "key":
            holder.report("persisted", {**reply, "ok": True, "why": ""})
        elif what == "parts":
            for item, digest, numbers in body["parts"]:
                for number in numbers:
                    yield durable.delay_s
                    shard = shard_from_wire(item)
                    key = durable.key_of(body, holder.host_id)  # it may have been replaced meanwhile
                    why = f"this host has key {key}, ordered was {body['key']}" if key != body["key"] else ""
                    why = why or durable.problem or self._write_slice(shard, str(digest), int(number), key)
                    of_slice = {"rank": shard.rank, "slice": number, "key": key, "ok": not why, "why": why}
                    holder.report("persisted", {**reply, **of_slice})
        elif what == "marker":
            yield durable.delay_s
            if not durable.problem:
                specs = {int(rank): spec_from_wire(spec) for rank, spec in body["specs"]}
                durable.markers[job, int(attempt), int(step)] = (specs, str(body["key"]), dict(body["lineage"]))
                for rank, spec in specs.items():  # every slice of every part must be there before the marker (R31)
                    shard = ShardId(job, int(attempt), int(step), rank)
                    if durable.part(shard, spec.digest, str(body["key"])) is None:
                        raise Violation(
                            "R31", f"the marker of {body['step']} was written before rank {rank}'s part under its key"
                        )
            problem = durable.problem
            holder.report("persisted", {**reply, "key": body["key"], "ok": not problem, "why": problem})
        elif what == "remove" and not durable.problem:
            is_marked = (job, int(attempt), int(step)) in durable.markers
            if not (is_marked and body["only_unmarked"]):
                durable.remove_step(job, int(attempt), int(step))

    def _write_slice(self, shard: ShardId, digest: str, number: int, key: str) -> str:
        """Write one slice of a shard; return why not, or ""."""
        holder, durable = self.holder, self.holder.world.durable
        pinned = holder.vault.pin(shard, digest)
        if pinned is None:
            return f"{shard} is not here any more"
        shelved, pin = pinned
        try:
            chunks = []
            for index in slice_range(shelved.spec, number):
                view = holder.vault.chunk_view(shelved, index)
                if view is None or chunk_digest(view) != shelved.digests[index]:
                    holder.vault.verify(shelved)
                    holder.sealed(shelved)
                    return f"chunk {index} went bad before it was written"
                chunks.append(bytes(view))
            if durable.tears and chunks:
                durable.tears -= 1
                chunks[-1] = chunks[-1][: len(chunks[-1]) // 2]
            count = slices_count(shelved.spec)
            durable.slices[shard, digest, key, number] = (count, holder.vault.manifest(shelved), chunks)
        except DigestMismatch as exc:
            return str(exc)
        finally:
            holder.vault.unpin(shelved, pin)
        return ""

    def markers(self, body: Body) -> None:
        """List the markers of a job."""
        durable = self.holder.world.durable
        rows = [
            [attempt, step, [[rank, spec_to_wire(spec)] for rank, spec in sorted(specs.items())], key, lineage]
            for (job, attempt, step), (specs, key, lineage) in sorted(durable.markers.items())
            if job == body["job"]
        ]
        why = durable.problem
        reply = {"job": body["job"], "call": body["call"], "ok": not why, "why": why, "markers": [] if why else rows}
        step = body.get("check")
        reply["lacks"] = "" if step is None else self._lacks(str(body["job"]), *step)
        reply["key"] = durable.key_of(body, self.holder.host_id)
        self.holder.report("markers", reply)

    def _lacks(self, job: str, attempt: int, step: int) -> str:
        """Say which part of a step is not there, "" if all are."""
        durable = self.holder.world.durable
        specs, key, _ = durable.markers.get((job, attempt, step), ({}, "", {}))
        shards = {rank: ShardId(job, attempt, step, rank) for rank in specs}
        gone = [rank for rank, spec in specs.items() if durable.part(shards[rank], spec.digest, key) is None]
        return f"parts of ranks {gone} are missing" if gone or not specs else ""

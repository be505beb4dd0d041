"""A simulated holder's writes to durable storage: parts from verified bytes, the marker last."""

from __future__ import annotations

from typing import Any

from memstore.core.durable.slice_format import slice_range, slices_count
from memstore.core.format.manifest import chunk_digest
from memstore.core.wire.messages import shard_from_wire, spec_from_wire, spec_to_wire
from memstore.errors import DigestMismatch
from memstore.testing.simulator.host.context import HostContext
from memstore.testing.simulator.world.violation import Violation
from memstore.testing.simulator.world.virtual_time import Thread
from recovery.inventory import ShardId

Body = dict[str, Any]


class Persister:
    """One holder's writes."""

    def __init__(self, holder: HostContext) -> None:
        self.holder = holder

    def order(self, body: Body) -> None:
        """Write parts or a marker, or remove a step."""
        self.holder.spawn(self._run(body))

    def _run(self, body: Body) -> Thread:
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

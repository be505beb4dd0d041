"""Carries out durable orders: slices of shards, markers, removals, lists; never on a path that a put waits for (R31).

    slice: ordered --its turn under the job's cap--> its chunks copied, each digested --> written --> reported
              '--the step is to be written no more--> nothing is said      '--a chunk went bad--> reported as failed

The chunks of a slice are copied first: a pin that is held while storage hangs would keep slots that puts need.
"""

from __future__ import annotations

from typing import Any

from memstore.core.arena.replica_index import StoredReplica
from memstore.core.holder.effects import (
    CopySlice,
    ListMarkers,
    LoadManifest,
    OpenDurable,
    RemoveDurable,
    SliceTurn,
    Steps,
    Stop,
    SweepDurable,
    Unexpected,
    Verify,
    WaitFor,
    Warn,
    WriteMarker,
    WriteSlice,
)
from memstore.core.holder.state import HolderState
from memstore.core.wire.messages import Body, shard_from_wire, spec_from_wire
from memstore.errors import IntegrityError, MemstoreError
from recovery.inventory import DurableMarker, ShardId, StepId


def stop(state: HolderState, body: Body) -> None:
    """Write nothing more of a step."""
    state.stops.setdefault(_key(body), Stop()).is_set = True


def slices(state: HolderState, body: Body) -> list[Steps[None]]:
    """Return the procedures that write the pieces of an order; those of another step of the job stop."""
    job, step = key = _key(body)
    for old in [k for k in state.stops if k[0] == job and k[1] != step]:
        state.stops.pop(old).is_set = True
    if key not in state.stops or state.stops[key].is_set:  # more slices may be ordered, and a step may be begun again
        state.stops[key] = Stop()
    mark = state.stops[key]
    return [
        _slice(state, body, shard_from_wire(shard), str(digest), int(number), mark)
        for shard, digest, numbers in body["parts"]
        for number in numbers
    ]


def _slice(state: HolderState, body: Body, shard: ShardId, digest: str, number: int, mark: Stop) -> Steps[None]:
    """Write one slice and report it; report nothing if it is not wanted any more."""
    report = {**_report(body), "rank": shard.rank, "slice": number}
    try:
        if not (yield from _written(state, body, shard, digest, number, mark, report)):
            return
    except MemstoreError as exc:
        report.update(ok=False, why=str(exc))
    except Exception as exc:
        yield Unexpected("durable write", exc)
        report.update(ok=False, why=repr(exc))
    state.report("persisted", report)


def _written(
    state: HolderState, body: Body, shard: ShardId, digest: str, number: int, mark: Stop, report: Body
) -> Steps[bool]:
    """Write one slice, or note in the report why not; return False if it is not wanted any more."""
    if mark.is_set:
        return False
    pinned = state.store.pin(shard, digest)
    if pinned is not None:
        state.store.unpin(*pinned)  # its turn may be far off
        wait_s = yield SliceTurn(str(body["job"]), pinned[0], number, body["durable"]["bytes_per_s"])
        if (yield WaitFor(lambda: mark.is_set or state.is_stopping(), wait_s)):
            return False
    storage = yield OpenDurable(body["durable"])
    if storage.key != body["key"]:
        why = f"durable_key_file has key {storage.key} here, ordered was {body['key']}: put the same file on all hosts"
        report.update(key=storage.key, ok=False, why=why)
        return True
    shelved, manifest, chunks = yield from _copied(state, shard, digest, number)
    return (yield WriteSlice(storage, shard, shelved.spec, number, manifest, chunks, mark))  # type: ignore[no-any-return]


def _copied(
    state: HolderState, shard: ShardId, digest: str, number: int
) -> Steps[tuple[StoredReplica, bytes, list[bytes]]]:
    """Copy the chunks of a slice; one that went bad meanwhile is quarantined, so that repair replaces it."""
    pinned = state.store.pin(shard, digest)
    if pinned is None:
        raise IntegrityError(f"{shard} is not here any more")
    shelved, pin = pinned
    try:
        manifest = yield LoadManifest(shelved)
        chunks, bad = yield CopySlice(shelved, number)
        if bad is not None:
            yield Verify(shelved)
            state.sealed(shelved, None)
            raise IntegrityError(f"chunk {bad} of {shard} went bad before it was written")
        return shelved, manifest, chunks
    finally:
        state.store.unpin(shelved, pin)


def marker(state: HolderState, body: Body) -> Steps[None]:
    """Write the marker of a step whose parts are all there, report it, then remove what abandoned writes left."""
    step = _step(body)
    specs = {int(rank): spec_from_wire(spec) for rank, spec in body["specs"]}
    record = DurableMarker(step, len(specs), specs, body["key"])
    if (yield from _reported(state, body, WriteMarker(body["durable"], str(body["job"]), record, body["lineage"]))):
        yield from _quietly(SweepDurable(body["durable"], str(body["job"]), step))


def remove(state: HolderState, body: Body) -> Steps[None]:
    """Remove a step from durable storage; report it only of a torn step, for which the controller waits."""
    order = RemoveDurable(body["durable"], str(body["job"]), _step(body), bool(body["only_unmarked"]))
    if body.get("is_torn"):
        yield from _reported(state, body, order)
    else:
        yield from _quietly(order)


def say_key(state: HolderState, body: Body) -> Steps[None]:
    """Report the name of the key that is in this host's key file now."""
    report = _report(body)
    try:
        report["key"] = (yield OpenDurable(body["durable"])).key
    except MemstoreError as exc:
        report.update(ok=False, why=str(exc))
    except Exception as exc:
        yield Unexpected("durable key", exc)
        report.update(ok=False, why=repr(exc))
    state.report("persisted", report)


def markers(state: HolderState, body: Body) -> Steps[None]:
    """List the durable markers of a job, and report them with the faults of the others."""
    report: Body = {"job": body["job"], "call": body["call"], "ok": True, "why": "", "markers": [], "key": ""}
    report["lacks"] = ""
    try:
        check = body.get("check")
        step = StepId(*map(int, check)) if check is not None else None
        report.update((yield ListMarkers(body["durable"], str(body["job"]), step)))
    except MemstoreError as exc:
        report.update(ok=False, why=str(exc))
    except Exception as exc:
        yield Unexpected("durable markers", exc)
        report.update(ok=False, why=repr(exc))
    state.report("markers", report)


def _reported(state: HolderState, body: Body, order: Any) -> Steps[bool]:
    """Have an order carried out and report its end; True if it was."""
    report = _report(body)
    try:
        yield order
    except MemstoreError as exc:
        report.update(ok=False, why=str(exc))
    except Exception as exc:
        yield Unexpected("durable write", exc)
        report.update(ok=False, why=repr(exc))
    state.report("persisted", report)
    return bool(report["ok"])


def _quietly(order: Any) -> Steps[None]:
    try:
        yield order
    except MemstoreError as exc:
        yield Warn(f"durable clean-up: {exc}")


def _step(body: Body) -> StepId:
    return StepId(int(body["step"][0]), int(body["step"][1]))


def _key(body: Body) -> tuple[str, StepId]:
    return str(body["job"]), _step(body)


def _report(body: Body) -> Body:
    """Return the report that an order was carried out."""
    report = {key: body[key] for key in ("job", "what", "step")}
    return {**report, "rank": -1, "slice": 0, "ok": True, "why": "", "key": body.get("key", "")}

"""Brings a shard to this host and verifies every byte of it, as the controller's plan says (R23, R24).

ordered --it is here and whole--> kept for its reader, pinned --> reported
   '--fetched (fetch.py): every chunk came--> stored --> kept for its reader
         '--a source lacks chunks--> reported as evidence: the controller plans again
         '--out of reach, no room, too late--> reported as no evidence: it fails the get, never the step (R25)

Of several reads of one shard one fetches and the others wait; one that brings nothing for 10 s is overtaken.
"""

from __future__ import annotations

from memstore.core.arena.replica_index import StagedKey, StoredReplica
from memstore.core.format.manifest import decode_manifest
from memstore.core.holder import fetch, partial_read
from memstore.core.holder.effects import (
    EnsureFree,
    KeepStaged,
    LoadManifest,
    OpenDraft,
    OpenHerald,
    Steps,
    Unexpected,
    Verify,
    WaitFor,
    Warn,
)
from memstore.core.holder.state import HolderState, Reading
from memstore.core.wire.messages import Body, shard_from_wire, shard_to_wire, spec_from_wire
from memstore.errors import DigestMismatch, IntegrityError, MemstoreError, PeerUnreachable
from recovery.inventory import ShardId, ShardSpec

BESIDE_S = 10.0  # without a chunk, until a read that waits for another one of the same shard takes its place
LOOK_S = 0.5  # between two looks at how far that one has come


def begin(state: HolderState, body: Body) -> None:
    """Note the round of an order: only in the newest round of a rank are fetches tried again."""
    if int(body["round"]) > 0:
        state.stages.newest[str(body["job"]), int(body["rank"])] = int(body["round"])


def run(state: HolderState, body: Body) -> Steps[None]:
    """Stage a shard, or some chunks of it, and report the end."""
    shard = shard_from_wire(body["shard"])
    report = {
        "job": body["job"], "round": body["round"], "rank": body["rank"], "ok": False, "why": "", "bad": {},
        "shard": body["shard"], "digest": body["spec"][0],
    }  # fmt: skip
    try:
        is_part = body.get("chunks") is not None
        bad = yield from partial_read.stage(state, body) if is_part else _once(state, body, shard)
        report["bad"], report["ok"] = bad, not bad
        if bad:
            parts = "; ".join(f"{source}: {len(chunks)} chunks" for source, chunks in bad.items())
            report["why"] = f"chunks damaged or missing at {parts}"
    except MemstoreError as exc:
        report["why"] = f"{type(exc).__name__}: {exc}"
    except Exception as exc:
        yield Unexpected(f"staging {body['shard']}", exc)
        report["why"] = repr(exc)
    state.report("staged", report)


def _once(state: HolderState, body: Body, shard: ShardId) -> Steps[dict[str, list[int]]]:
    """Stage a shard; of several reads of it, as by ranks that share its state, one fetches and the others wait."""
    if int(body["round"]) > 0:
        return (yield from stage(state, body, shard))
    reading = state.stages.reading
    key, mine = (shard, spec_from_wire(body["spec"]).digest), Reading()
    while (first := reading.setdefault(key, mine)) is not mine:
        if (yield from _await_other(state, first)):
            return (yield from stage(state, body, shard))  # which fetches, if the other could not
        if reading.get(key) is first:  # the reads that waited beside this one wait for it now
            del reading[key]
    try:
        return (yield from stage(state, body, shard, mine))
    finally:
        if reading.get(key) is mine:
            del reading[key]
        mine.is_over = True


def _await_other(state: HolderState, other: Reading) -> Steps[bool]:
    """Wait until another read has ended; return False if no chunk came for it within `BESIDE_S`."""
    left, since_s = other.left(), state.now()
    while not (yield WaitFor(lambda: other.is_over, LOOK_S)):
        if other.left() != left:
            left, since_s = other.left(), state.now()
        elif state.now() - since_s > BESIDE_S:
            return False
    return True


def stage(
    state: HolderState, body: Body, shard: ShardId, reading: Reading | None = None
) -> Steps[dict[str, list[int]]]:
    """Return {} when the whole shard is here and verified, else source -> chunks that it says it lacks."""
    spec, me, store = spec_from_wire(body["spec"]), state.host_id, state.store
    key = (str(body["job"]), int(body["round"]), int(body["rank"]))
    bad = yield from _staged_here(state, body, key, shard, spec)
    if bad is None:
        return {}
    until_s = fetch.deadline_s(state)
    data, lack_all = yield from fetch.manifest(state, body, shard, spec.digest, until_s)
    if data is None:
        return {**bad, **{source: list(range(spec.chunks_count)) for source in lack_all or {me}}}
    sizes = [c.nbytes for c in decode_manifest(data).chunks]
    digests = [c.digest for c in decode_manifest(data).chunks]
    name = f"stage-{body['attempt']}-{body['round']}"
    draft = yield OpenDraft(name, shard, digests, sizes, int(body["attempt"]))
    if reading is not None:
        reading.draft = draft
    try:
        yield EnsureFree(len(draft.missing))
        notifier = yield OpenHerald(body.get("stream"), data, draft)
        lost, problems = yield from fetch.chunks(state, body, draft, sizes, until_s, notifier)
        for source, chunks in lost.items():
            bad.setdefault(source, []).extend(chunks)
        if draft.missing and problems and not bad:
            raise PeerUnreachable("; ".join(problems))
        if draft.missing:
            return bad or {me: draft.missing}
        shelved = store.finish(name, data)
    finally:
        store.abort_draft(name, shard)
    state.sealed(shelved, None)
    pinned = store.pin(shard, spec.digest)
    if pinned is None:
        raise IntegrityError(f"{shard_to_wire(shard)} was dropped while it was staged")
    yield KeepStaged(key, *pinned)
    return {}


def _staged_here(
    state: HolderState, body: Body, key: StagedKey, shard: ShardId, spec: ShardSpec
) -> Steps[dict[str, list[int]] | None]:
    """Keep the copy that is here and return None, if it is whole; else return the planned chunks that it lacks."""
    pinned = state.store.pin(shard, spec.digest)
    if pinned is None:
        return {}
    shelved, pin = pinned
    is_kept = False
    try:
        # A reader digests what it copies and fetches bad chunks again, so it is not digested here first (R27).
        is_read = key[1] < 0
        lacking = sorted(shelved.missing) if is_read else (yield Verify(shelved))
        if not lacking and (yield from _has_manifest(state, body, shelved)):
            is_kept = True
            yield KeepStaged(key, shelved, pin)
            return None
        state.sealed(shelved, None)
    finally:
        if not is_kept:
            state.store.unpin(shelved, pin)
    planned = {i for tier, _, first, count in body["runs"] if tier == "local" for i in range(first, first + count)}
    lost = sorted(planned & set(lacking))
    return {state.host_id: lost} if lost else {}  # evidence for the next plan


def _has_manifest(state: HolderState, body: Body, shelved: StoredReplica) -> Steps[bool]:
    """Return whether a copy's manifest is what was stored; a damaged one is brought from another copy first."""
    try:
        yield LoadManifest(shelved)
    except DigestMismatch as exc:
        yield Warn(f"host {state.host_id}: {exc}")
        until_s = fetch.deadline_s(state)
        data, _ = yield from fetch.brought_manifest(state, body, shelved.shard, shelved.spec.digest, until_s)
        if data is None:
            return False
        state.store.mend_manifest(shelved, data)
    return True

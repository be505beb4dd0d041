"""Brings a shard to this host and verifies every byte of it, as the controller's plan says (R23, R24).

Local chunks are re-digested where they lie; the rest comes from several peers at once, then from
durable storage. What a source says it lacks is reported chunk by chunk: that is the evidence on
which the controller plans anew. A broken connection, a deadline or a lack of room is no evidence:
it is tried again, from other holders too, and in the end fails the get, never the step (R25).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from memstore.core.arena.replica_index import Draft, Shelved, StagedKey
from memstore.core.format.manifest import decode_manifest
from memstore.core.wire.messages import shard_from_wire, shard_to_wire, spec_from_wire
from memstore.errors import DigestMismatch, IntegrityError, MemstoreError, PeerUnreachable
from memstore.shell.holder.context import HolderContext
from memstore.shell.holder.fetch import Fetcher
from memstore.shell.holder.partial_read import Excerpts
from memstore.shell.holder.rank_connections import RankConnections
from recovery.inventory import ShardId, ShardSpec

log = logging.getLogger("memstore")
STAGE_THREADS = 8
DIGEST_THREADS = min(4, os.cpu_count() or 1)  # two fill a small machine's memory bus
BESIDE_S = 10.0  # without a chunk, until a read that waits for another one of the same shard takes its place
LOOK_S = 0.5  # between two looks at how far that one has come


@dataclass(eq=False, slots=True)
class Reading:
    """A read that fetches what others wait for."""

    over: threading.Event = field(default_factory=threading.Event)
    draft: Draft | None = None

    def left(self) -> int:
        """Chunks that have not come; -1 before that is known."""
        return len(self.draft.missing) if self.draft is not None else -1


class Stager:
    """Staging of one holder."""

    def __init__(
        self, context: HolderContext, connections: RankConnections, fetcher: Fetcher, excerpts: Excerpts
    ) -> None:
        self.context, self.vault, self.connections = context, context.vault, connections
        self.fetcher, self.excerpts = fetcher, excerpts
        self.workers = ThreadPoolExecutor(STAGE_THREADS, thread_name_prefix="memstore-stage")
        self.digesters = ThreadPoolExecutor(DIGEST_THREADS, thread_name_prefix="memstore-digest")
        self.lock = threading.Lock()
        self.reading: dict[tuple[ShardId, str], Reading] = {}

    def order(self, body: dict[str, Any]) -> None:
        """Stage in the background; the end is reported."""
        self.fetcher.begin(body)
        self.workers.submit(self._run, body)

    def close(self) -> None:
        """Stop taking work."""
        for pool in (self.workers, self.digesters):
            pool.shutdown(wait=False, cancel_futures=True)

    def _run(self, body: dict[str, Any]) -> None:
        shard = shard_from_wire(body["shard"])
        report = {
            "job": body["job"], "round": body["round"], "rank": body["rank"], "ok": False, "why": "", "bad": {},
            "shard": body["shard"], "digest": body["spec"][0],
        }  # fmt: skip
        try:
            bad = self.excerpts.stage(body) if body.get("chunks") is not None else self._stage_once(body, shard)
            report["bad"] = bad
            report["ok"] = not bad
            if bad:
                parts = "; ".join(f"{source}: {len(chunks)} chunks" for source, chunks in bad.items())
                report["why"] = f"chunks damaged or missing at {parts}"
        except MemstoreError as exc:
            report["why"] = f"{type(exc).__name__}: {exc}"
        except Exception as exc:
            log.exception("staging %s", body["shard"])
            report["why"] = repr(exc)
        self.context.report("staged", report)

    def _stage_once(self, body: dict[str, Any], shard: ShardId) -> dict[str, list[int]]:
        """Of several reads of one shard, as of ranks that share its state, one fetches and the others find it here."""
        if int(body["round"]) > 0:
            return self._stage(body, shard)
        key, mine = (shard, spec_from_wire(body["spec"]).digest), Reading()
        while (first := self._first(key, mine)) is not mine:
            if self._await_other(first):
                return self._stage(body, shard)  # which fetches, if the other could not
            with self.lock:
                if self.reading.get(key) is first:  # who waited beside us waits for us now
                    del self.reading[key]
        try:
            return self._stage(body, shard, mine)
        finally:
            with self.lock:
                if self.reading.get(key) is mine:
                    del self.reading[key]
            mine.over.set()

    def _first(self, key: tuple[ShardId, str], mine: Reading) -> Reading:
        with self.lock:
            return self.reading.setdefault(key, mine)

    @staticmethod
    def _await_other(read: Reading) -> bool:
        """Wait until a read has ended; False if nothing came for it for `BESIDE_S`: it hangs, and not for us."""
        left, since_s = read.left(), time.monotonic()
        while not read.over.wait(LOOK_S):
            if read.left() != left:
                left, since_s = read.left(), time.monotonic()
            elif time.monotonic() - since_s > BESIDE_S:
                return False
        return True

    def _stage(self, body: dict[str, Any], shard: ShardId, reading: Reading | None = None) -> dict[str, list[int]]:
        """Return {} when the whole shard is here and verified, else source -> chunks that it says it lacks."""
        spec, me = spec_from_wire(body["spec"]), self.context.host_id
        key = (str(body["job"]), int(body["round"]), int(body["rank"]))
        bad = self._staged_here(body, key, shard, spec)
        if bad is None:
            return {}
        deadline_s = self.fetcher.deadline_s()
        data, lack_all = self.fetcher.manifest(body, shard, spec.digest, deadline_s)
        if data is None:
            return {**bad, **{source: list(range(spec.chunks_count)) for source in lack_all or {me}}}
        sizes = [c.nbytes for c in decode_manifest(data).chunks]
        digests = [c.digest for c in decode_manifest(data).chunks]
        name = f"stage-{body['attempt']}-{body['round']}"
        draft = self.vault.open_draft(name, shard, digests, sizes, int(body["attempt"]))
        if reading is not None:
            reading.draft = draft
        try:
            self.vault.ensure_free(len(draft.missing))
            herald = self.connections.herald(body.get("stream"), data, draft)
            lost, problems = self.fetcher.fetch(body, draft, spec.digest, sizes, deadline_s, herald)
            for source, chunks in lost.items():
                bad.setdefault(source, []).extend(chunks)
            if draft.missing and problems and not bad:
                raise PeerUnreachable("; ".join(problems))
            if draft.missing:
                return bad or {me: draft.missing}
            shelved = self.vault.finish(name, data)
        finally:
            self.vault.abort_draft(name, shard)
        self.context.sealed(shelved)
        pinned = self.vault.pin(shard, spec.digest)
        if pinned is None:
            raise IntegrityError(f"{shard_to_wire(shard)} was dropped while it was staged")
        self.vault.keep_staged(key, *pinned)
        return {}

    def _staged_here(
        self, body: dict[str, Any], key: StagedKey, shard: ShardId, spec: ShardSpec
    ) -> dict[str, list[int]] | None:
        """Keep the copy that is here, if it is whole; else return what it lacks of what was planned from it."""
        pinned = self.vault.pin(shard, spec.digest)
        if pinned is None:
            return {}
        shelved, pin = pinned
        is_kept = False
        try:
            # A read verifies what it copies, and mends it: no barrier waits for the word that it is good (R27).
            is_read = key[1] < 0
            lacking = sorted(shelved.missing) if is_read else self.vault.verify(shelved, self.digesters.map)
            if not lacking and self._has_manifest(body, shelved):
                is_kept = True
                self.vault.keep_staged(key, shelved, pin)
                return None
            self.context.sealed(shelved)
        finally:
            if not is_kept:
                self.vault.unpin(shelved, pin)
        planned = {i for tier, _, first, count in body["runs"] if tier == "local" for i in range(first, first + count)}
        lost = sorted(planned & set(lacking))
        return {self.context.host_id: lost} if lost else {}  # evidence for the next plan

    def _has_manifest(self, body: dict[str, Any], shelved: Shelved) -> bool:
        """Return whether a copy's manifest is what was stored; a damaged one is brought from another copy first."""
        try:
            self.vault.manifest(shelved)
        except DigestMismatch as exc:
            log.warning("host %s: %s", self.context.host_id, exc)
            data, _ = self.fetcher.brought_manifest(body, shelved.shard, shelved.spec.digest, self.fetcher.deadline_s())
            if data is None:
                return False
            self.vault.mend_manifest(shelved, data)
        return True

    def check(self, body: dict[str, Any]) -> None:
        """Let the rank compare `into=` with what was staged for it; an order that cannot be done is answered (R26)."""
        found = self.vault.shelf.staged.get((str(body["job"]), int(body["round"]), int(body["rank"])))
        why = f"what was staged for rank {body['rank']} on host {self.context.host_id} is gone: call get() again"
        try:
            if found is not None:
                self.connections.check(body, found[0])
                return
        except DigestMismatch as exc:
            why = str(exc)
        reply = {key: body[key] for key in ("job", "round", "rank")}
        self.context.report("checked", {**reply, "ok": False, "error": ["RecoveryError", why]})

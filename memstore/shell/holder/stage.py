"""Brings a shard to this host and verifies every byte of it, as the controller's plan says (R23, R24).

Local chunks are re-digested where they lie; the rest comes from several peers at once, then from
durable storage. What a source says it lacks is reported chunk by chunk: that is the evidence on
which the controller plans anew. A broken connection, a deadline or a lack of room is no evidence:
it is tried again, from other holders too, and in the end fails the get, never the step (R25).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from memstore.core.arena.replica_index import Draft, Shelved, StagedKey
from memstore.core.durable.storage_ports import DurableTier
from memstore.core.format.manifest import chunk_digest, decode_manifest
from memstore.core.wire.messages import shard_from_wire, shard_to_wire, spec_from_wire
from memstore.errors import DigestMismatch, IntegrityError, MemstoreError, PeerUnreachable, TransportError
from memstore.shell.durable.tier import open_tier
from memstore.shell.holder.chunk_notifier import TELL_S, Herald
from memstore.shell.holder.partial_read import Excerpts
from recovery.inventory import Copy, ShardId, ShardSpec

if TYPE_CHECKING:
    from memstore.shell.holder.holder import Holder

log = logging.getLogger("memstore")
STAGE_THREADS = 8
RANGE_THREADS = 16  # of durable storage, over all shards: an object store is fast only by many requests at once
DIGEST_THREADS = min(4, os.cpu_count() or 1)  # two fill a small machine's memory bus
RETRY_S = 0.2
RETRY_LIMIT_S = 10.0  # and at least twice repair_after_s: a dead source is known dead before its fetch fails a get
BESIDE_S = 10.0  # without a chunk, until a read that waits for another one of the same shard takes its place
LOOK_S = 0.5  # between two looks at how far that one has come
SOURCE_TRIES = 3  # before the other holders of the shard are asked as well
DURABLE = "durable"  # names durable storage among sources, in reports


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

    def __init__(self, holder: Holder) -> None:
        self.holder = holder
        self.vault = holder.vault
        self.workers = ThreadPoolExecutor(STAGE_THREADS, thread_name_prefix="memstore-stage")
        self.sources = ThreadPoolExecutor(STAGE_THREADS, thread_name_prefix="memstore-source")
        self.ranges = ThreadPoolExecutor(RANGE_THREADS, thread_name_prefix="memstore-range")
        self.digesters = ThreadPoolExecutor(DIGEST_THREADS, thread_name_prefix="memstore-digest")
        self.lock = threading.Lock()
        self.reading: dict[tuple[ShardId, str], Reading] = {}
        self.newest: dict[tuple[str, int], int] = {}  # (job, rank) -> round ordered last; what went before may give up
        self.excerpts = Excerpts(self)

    def order(self, body: dict[str, Any]) -> None:
        """Stage in the background; the end is reported."""
        if int(body["round"]) > 0:
            self.newest[str(body["job"]), int(body["rank"])] = int(body["round"])
        self.workers.submit(self._run, body)

    def close(self) -> None:
        """Stop taking work."""
        for pool in (self.workers, self.sources, self.ranges, self.digesters):
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
        self.holder.report("staged", report)

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
        spec, me = spec_from_wire(body["spec"]), self.holder.info.host_id
        key = (str(body["job"]), int(body["round"]), int(body["rank"]))
        bad = self._staged_here(body, key, shard, spec)
        if bad is None:
            return {}
        deadline_s = self.deadline_s()
        data, lack_all = self.manifest(body, shard, spec.digest, deadline_s)
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
            herald = self.holder.ranks.herald(body.get("stream"), data, draft)
            lost, problems = self.fetch(body, draft, spec.digest, sizes, deadline_s, herald)
            for source, chunks in lost.items():
                bad.setdefault(source, []).extend(chunks)
            if draft.missing and problems and not bad:
                raise PeerUnreachable("; ".join(problems))
            if draft.missing:
                return bad or {me: draft.missing}
            shelved = self.vault.finish(name, data)
        finally:
            self.vault.abort_draft(name, shard)
        self.holder.sealed(shelved)
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
            self.holder.sealed(shelved)
        finally:
            if not is_kept:
                self.vault.unpin(shelved, pin)
        planned = {i for tier, _, first, count in body["runs"] if tier == "local" for i in range(first, first + count)}
        lost = sorted(planned & set(lacking))
        return {self.holder.info.host_id: lost} if lost else {}  # evidence for the next plan

    def _has_manifest(self, body: dict[str, Any], shelved: Shelved) -> bool:
        """Return whether a copy's manifest is what was stored; a damaged one is brought from another copy first."""
        try:
            self.vault.manifest(shelved)
        except DigestMismatch as exc:
            log.warning("host %s: %s", self.holder.info.host_id, exc)
            data, _ = self._brought_manifest(body, shelved.shard, shelved.spec.digest, self.deadline_s())
            if data is None:
                return False
            self.vault.mend_manifest(shelved, data)
        return True

    def check(self, body: dict[str, Any]) -> None:
        """Let the rank compare `into=` with what was staged for it; an order that cannot be done is answered (R26)."""
        found = self.vault.shelf.staged.get((str(body["job"]), int(body["round"]), int(body["rank"])))
        why = f"what was staged for rank {body['rank']} on host {self.holder.info.host_id} is gone: call get() again"
        try:
            if found is not None:
                self.holder.ranks.check(body, found[0])
                return
        except DigestMismatch as exc:
            why = str(exc)
        reply = {key: body[key] for key in ("job", "round", "rank")}
        self.holder.report("checked", {**reply, "ok": False, "error": ["RecoveryError", why]})

    def may_wait(self, body: dict[str, Any], deadline_s: float) -> bool:
        """Wait before another try; False if there is to be none: too late, stopping, or a newer round is under way."""
        number = int(body["round"])
        is_newest = number < 0 or self.newest.get((str(body["job"]), int(body["rank"]))) == number
        return is_newest and time.monotonic() < deadline_s and not self.holder.stopping.wait(RETRY_S)

    def deadline_s(self) -> float:
        """When a fetch that begins now fails, on the monotonic clock."""
        return time.monotonic() + max(RETRY_LIMIT_S, 2 * self.holder.config.repair_after_s)

    def manifest(
        self, body: dict[str, Any], shard: ShardId, digest: str, deadline_s: float
    ) -> tuple[bytes | None, set[str]]:
        """Get the manifest from any holder, else from durable storage; or None and the sources that say they lack it.

        Raises:
            TransportError: some source cannot be reached, and none of the others has it.
        """
        shelved = self.vault.shelf.find(shard, digest)
        if shelved is not None:
            with contextlib.suppress(DigestMismatch):
                return self.vault.manifest(shelved), set()
        return self._brought_manifest(body, shard, digest, deadline_s)

    def _brought_manifest(
        self, body: dict[str, Any], shard: ShardId, digest: str, deadline_s: float
    ) -> tuple[bytes | None, set[str]]:
        """Do what `manifest` does, from elsewhere."""
        sources = [str(h) for h in body["holders"] if h != self.holder.info.host_id]
        sources += [DURABLE] if body.get("durable") else []
        lacking: set[str] = set()
        while True:
            problems = []
            for source in sources:
                try:
                    if source == DURABLE:
                        return open_tier(body["durable"]).read_manifest(shard, spec_from_wire(body["spec"])), lacking
                    return self.holder.peer(source).fetch_manifest(shard, digest), lacking
                except IntegrityError:
                    lacking.add(source)
                except TransportError as exc:
                    problems.append(f"{source}: {exc}")
            if not problems:
                return None, lacking
            sources = [s for s in sources if s not in lacking]
            if not self.may_wait(body, deadline_s):
                raise PeerUnreachable(f"no source gave the manifest of {shard_to_wire(shard)}: {'; '.join(problems)}")

    def fetch(
        self, body: dict[str, Any], draft: Draft, digest: str, sizes: list[int], deadline_s: float,
        herald: Herald | None = None,
    ) -> tuple[dict[str, list[int]], list[str]]:  # fmt: skip
        """Fetch every planned run, all sources at once; return what sources say they lack, and other problems.

        A herald's reader needs plain objects before it can use the rest, and they lie at the end: that comes first.
        """
        wanted: dict[str, list[int]] = {}
        missing = set(draft.missing)
        for tier, source, first, count in body["runs"]:
            if tier != "local":
                lacking = [i for i in range(first, first + count) if i in missing]
                wanted.setdefault(source or DURABLE, []).extend(lacking)
        futures = {
            source: self.sources.submit(
                self._fetch_planned, body, source, draft, digest, chunks[::-1] if herald else chunks, sizes, deadline_s
            )
            for source, chunks in wanted.items()
            if chunks
        }
        tell = herald.tell if herald else lambda: None
        tell()
        pending = set(futures.values())
        while pending:  # none may still write to the draft when it is given up
            pending = wait(pending, TELL_S if herald else None).not_done
            tell()
        found = {source: future.result() for source, future in futures.items()}
        lost = {source: chunks for source, (chunks, _) in found.items() if chunks}
        return lost, [problem for _, problem in found.values() if problem]

    def _fetch_planned(
        self, body: dict[str, Any], source: str, draft: Draft, digest: str, chunks: list[int], sizes: list[int],
        deadline_s: float,
    ) -> tuple[list[int], str]:  # fmt: skip
        """Fetch chunks from their planned source, then from whoever else holds the shard (R25).

        Returns the chunks that the source says it lacks, and why others could not be fetched, or "".
        """
        others = [str(h) for h in body["holders"] if h not in (source, self.holder.info.host_id)]
        turns = [source] * SOURCE_TRIES + (others if source != DURABLE else [])
        lost: set[int] = set()
        problem = ""
        for turn in itertools.count():
            host = turns[turn % len(turns)]
            todo = [i for i in chunks if draft.slots[i] is None and i not in lost]
            try:
                lacking = self._fetch_from(body, host, draft, digest, todo, sizes)
                problem = problem or f"{host}: chunks it holds undamaged arrived damaged"
            except IntegrityError:
                lacking = todo
            except TransportError as exc:
                lacking, problem = [], f"{host}: {exc}"
                log.warning("staging from %s: %s", host, exc)
            if host == source:  # another holder is asked on the chance: what it lacks is no news
                lost.update(lacking)
            if all(draft.slots[i] is not None or i in lost for i in chunks):
                return sorted(lost), ""
            if not self.may_wait(body, deadline_s if turn + 1 >= len(turns) else float("inf")):
                break
        return sorted(lost), problem

    def _fetch_from(
        self, body: dict[str, Any], host: str, draft: Draft, digest: str, chunks: list[int], sizes: list[int]
    ) -> list[int]:
        if host != DURABLE:
            return self.holder.peer(host).fetch_into(self.vault, draft, digest, chunks)
        tier, spec = open_tier(body["durable"]), spec_from_wire(body["spec"])
        futures = [self.ranges.submit(self._fetch_range, tier, draft, spec, index, sizes[index]) for index in chunks]
        wait(futures)  # none may still write to the draft when it is given up
        return [index for future in futures for index in future.result()]

    def _fetch_range(self, tier: DurableTier, draft: Draft, spec: ShardSpec, index: int, nbytes: int) -> list[int]:
        """Fetch one chunk from durable storage; return [index] if it is not there as it was put, else []."""
        number = self.vault.take_slots_growing(1)[0]
        view = self.vault.arena.view(number, nbytes)
        try:
            tier.read_chunk_into(draft.shard, spec, index, view)
        except IntegrityError:
            self.vault.give_back([number])
            return [index]
        except BaseException:
            self.vault.give_back([number])
            raise
        return self.vault.keep_chunks(draft, [(index, number, nbytes, chunk_digest(view))])


def sealed_copy(shelved: Shelved, host_id: str) -> Copy:
    """Return the inventory entry of a replica."""
    return Copy(shelved.shard, shelved.spec, host_id, shelved.missing)

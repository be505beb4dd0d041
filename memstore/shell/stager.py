"""Brings a shard to this host and verifies every byte of it, as the controller's plan says (R23, R24).

Local chunks are re-digested where they lie; the rest comes from several peers at once, then from
durable storage. What a source could not give is reported chunk by chunk: that is the evidence on
which the controller plans anew (R25).
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from memstore.core.events import shard_from_wire, shard_to_wire, spec_from_wire
from memstore.core.manifest import decode_manifest
from memstore.core.shelf import Draft, Shelved
from memstore.errors import IntegrityError, MemstoreError, TransportError
from memstore.shell.durable_directory import tier_from_url
from recovery.inventory import Copy, ShardId

if TYPE_CHECKING:
    from memstore.shell.holder import Holder

log = logging.getLogger("memstore")
STAGE_THREADS = 8


class Stager:
    """Staging of one holder."""

    def __init__(self, holder: Holder) -> None:
        self.holder = holder
        self.vault = holder.vault
        self.workers = ThreadPoolExecutor(STAGE_THREADS, thread_name_prefix="memstore-stage")
        self.sources = ThreadPoolExecutor(STAGE_THREADS, thread_name_prefix="memstore-source")
        self.staged: dict[tuple[str, int, int], tuple[Shelved, int]] = {}  # (job, round, rank) -> pinned replica

    def order(self, body: dict[str, Any]) -> None:
        """Stage in the background; the end is reported."""
        self.workers.submit(self._run, body)

    def close(self) -> None:
        """Stop taking work."""
        self.workers.shutdown(wait=False, cancel_futures=True)
        self.sources.shutdown(wait=False, cancel_futures=True)

    def _run(self, body: dict[str, Any]) -> None:
        shard = shard_from_wire(body["shard"])
        report = {
            "job": body["job"], "round": body["round"], "rank": body["rank"], "ok": False, "why": "", "bad": {},
            "shard": body["shard"], "digest": body["spec"][0], "seconds": 0.0,
        }  # fmt: skip
        started_s = time.monotonic()
        try:
            bad = self._stage(body, shard)
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
        report["seconds"] = time.monotonic() - started_s
        self.holder.report("staged", report)

    def _stage(self, body: dict[str, Any], shard: ShardId) -> dict[str, list[int]]:
        """Return {} when the whole shard is here and verified, else source -> chunks it could not give."""
        spec = spec_from_wire(body["spec"])
        key = (str(body["job"]), int(body["round"]), int(body["rank"]))
        bad: dict[str, list[int]] = {}
        pinned = self.vault.pin(shard, spec.digest)
        if pinned is not None:
            lacking = self.vault.verify(pinned[0])
            if not lacking:
                self._keep(key, pinned)
                return {}
            planned = {
                i for tier, _, first, count in body["runs"] if tier == "local" for i in range(first, first + count)
            }
            if planned & set(lacking):
                bad[self.holder.info.host_id] = sorted(planned & set(lacking))  # evidence for the next plan
            else:
                self.holder.sealed(pinned[0])
            self.vault.unpin(*pinned)
        data = self._manifest(body, shard, spec.digest)
        manifest = decode_manifest(data)
        sizes = [c.nbytes for c in manifest.chunks]
        name = f"stage-{body['round']}"
        draft = self.vault.open_draft(name, shard, [c.digest for c in manifest.chunks], sizes, int(body["attempt"]))
        try:
            self.vault.ensure_free(len(draft.missing))
            for source, chunks in self._fetch(body, draft, spec.digest, sizes).items():
                bad.setdefault(source, []).extend(chunks)
            if draft.missing:
                return bad or {self.holder.info.host_id: draft.missing}
            shelved = self.vault.finish(name, data)
        finally:
            self.vault.abort_draft(name, shard)
        self.holder.sealed(shelved)
        pinned = self.vault.pin(shard, spec.digest)
        if pinned is None:
            raise IntegrityError(f"{shard_to_wire(shard)} was dropped while it was staged")
        self._keep(key, pinned)
        return {}

    def _keep(self, key: tuple[str, int, int], pinned: tuple[Shelved, int]) -> None:
        """Pin the staged replica until a later round of the job replaces it (R7)."""
        for old in [k for k in self.staged if k[0] == key[0] and k[2] == key[2]]:
            self.vault.unpin(*self.staged.pop(old))
        self.staged[key] = pinned

    def release(self, job: str) -> None:
        """The job has put again: nothing of its restores is needed any more."""
        for key in [k for k in self.staged if k[0] == job]:
            self.vault.unpin(*self.staged.pop(key))

    def staged_shard(self, body: dict[str, Any]) -> Shelved | None:
        """Return what was staged for a rank in a round."""
        found = self.staged.get((str(body["job"]), int(body["round"]), int(body["rank"])))
        return found[0] if found is not None else None

    def _manifest(self, body: dict[str, Any], shard: ShardId, digest: str) -> bytes:
        """Get the manifest from any holder, else from durable storage."""
        shelved = self.vault.shelf.find(shard, digest)
        if shelved is not None:
            return self.vault.manifest(shelved)
        problems = []
        for host in body["holders"]:
            if host == self.holder.info.host_id:
                continue
            try:
                return self.holder.peer(host).fetch_manifest(shard, digest)
            except MemstoreError as exc:
                problems.append(f"{host}: {exc}")
        if body.get("durable"):
            return tier_from_url(str(body["durable"])).read_manifest(shard, digest)
        raise IntegrityError(f"no source has the manifest of {shard_to_wire(shard)}: {'; '.join(problems)}")

    def _fetch(self, body: dict[str, Any], draft: Draft, digest: str, sizes: list[int]) -> dict[str, list[int]]:
        """Fetch every planned run from its source, all sources at once."""
        wanted: dict[str | None, list[int]] = {}
        for tier, source, first, count in body["runs"]:
            if tier != "local":
                lacking = [i for i in range(first, first + count) if draft.slots[i] is None]
                wanted.setdefault(source, []).extend(lacking)
        futures = {
            source: self.sources.submit(self._fetch_source, body, source, draft, digest, chunks, sizes)
            for source, chunks in wanted.items()
            if chunks
        }
        bad = {source or "durable": future.result() for source, future in futures.items()}
        return {source: chunks for source, chunks in bad.items() if chunks}

    def _fetch_source(
        self, body: dict[str, Any], source: str | None, draft: Draft, digest: str, chunks: list[int], sizes: list[int]
    ) -> list[int]:
        try:
            if source is not None:
                return self.holder.peer(source).fetch_into(self.vault, draft, digest, chunks)
            return self._fetch_durable(str(body["durable"]), draft, chunks, sizes)
        except TransportError as exc:
            log.warning("staging from %s: %s", source or "durable storage", exc)
            return [i for i in chunks if draft.slots[i] is None]

    def _fetch_durable(self, url: str, draft: Draft, chunks: list[int], sizes: list[int]) -> list[int]:
        tier = tier_from_url(url)
        bad = []
        for index in chunks:
            number = self.vault.take_slot_growing()
            try:
                tier.read_chunk_into(draft.shard, index, self.vault.arena.view(number, sizes[index]))
            except MemstoreError:
                self.vault.give_back([number])
                bad.append(index)
                continue
            if not self.vault.keep_chunk(draft, index, number, sizes[index]):
                bad.append(index)
        return bad


def sealed_copy(shelved: Shelved, host_id: str) -> Copy:
    """Return the inventory entry of a replica."""
    return Copy(shelved.shard, shelved.spec, host_id, shelved.missing)

"""Staging of the simulation: brings the shards of a restore to one holder and verifies them (R23, R25).

It mirrors shell/holder/stage.py step by step; the bytes come from real peer servers and from simulated durable storage.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

from memstore.core.arena.replica_index import Draft, Shelved
from memstore.core.format.manifest import Manifest, chunk_digest, decode_manifest, shard_digest
from memstore.core.wire.messages import shard_from_wire, shard_to_wire, spec_from_wire
from memstore.errors import DigestMismatch, IntegrityError, MemstoreError, PeerUnreachable, TransportError
from memstore.testing.simulator.host.context import HostContext
from memstore.testing.simulator.host.peer_requests import connect
from memstore.testing.simulator.world.processes import Rank
from memstore.testing.simulator.world.virtual_time import Thread, Wait
from recovery.inventory import ShardId

Body = dict[str, Any]
STAGE_LIMIT_S = 10.0
RETRY_S = 0.1
SOURCE_TRIES = 2
BESIDE_S = 120.0


class Stager:
    """Brings shards of a restore to one holder and verifies them (R23, R25)."""

    def __init__(self, holder: HostContext) -> None:
        self.holder = holder
        self.reading: set[tuple[ShardId, str]] = set()  # some read fetches it
        self.staged_s: dict[tuple[str, int, int], float] = {}  # since when its bytes have been verified

    def has_staged(self, body: Body) -> bool:
        """Say whether this round's shard of this rank is here."""
        return (str(body["job"]), int(body["round"]), int(body["rank"])) in self.holder.vault.shelf.staged

    def run(self, body: Body) -> Thread:
        """Stage one shard and report."""
        holder = self.holder
        spec = spec_from_wire(body["spec"])
        report = {
            "job": body["job"], "round": body["round"], "rank": body["rank"], "ok": False, "why": "", "bad": {},
            "shard": body["shard"], "digest": spec.digest,
        }  # fmt: skip
        try:
            bad = yield from self._stage_once(body, shard_from_wire(body["shard"]))
            report.update(ok=not bad, bad=bad, why="chunks damaged or missing" if bad else "")
        except MemstoreError as exc:
            report.update(why=str(exc))
        holder.report("staged", report)

    def _stage_once(self, body: Body, shard: ShardId) -> Generator[Wait, None, dict[str, list[int]]]:
        """Of several reads of one shard one fetches, and the others find it here."""
        key = (shard, spec_from_wire(body["spec"]).digest)
        if int(body["round"]) > 0 or key in self.reading:
            until_s = self.holder.world.now + BESIDE_S
            if int(body["round"]) < 0:
                yield lambda: key not in self.reading or self.holder.world.now > until_s
            return (yield from self._stage(body, shard))
        self.reading.add(key)
        try:
            return (yield from self._stage(body, shard))
        finally:
            self.reading.discard(key)

    def read(self, rank: Rank, body: Body) -> tuple[Body, tuple[str, str] | None]:
        """Copy out what an answer names, checked as client/checkpoint.py does (R7); with the error, if there is one."""
        vault, checker = self.holder.vault, self.holder.checker
        pinned = vault.pin(shard_from_wire(body["shard"]), str(body["digest"]), is_reader=True)
        if pinned is None:
            return body, ("RecoveryError", "the staged shard was dropped before it could be read: call get() again")
        shelved, error = pinned[0], None
        try:
            body = {**body, "slots": list(shelved.slots), "manifest": vault.manifest(shelved)}
        except DigestMismatch as exc:
            vault.unpin(*pinned)
            return body, ("DigestMismatch", str(exc))
        body["read"] = rank.read(body["slots"])
        if [chunk_digest(data) for data in body["read"]] != list(shelved.digests):
            error = ("DigestMismatch", "a staged chunk was damaged before it was read: call get() again")
            if "round" in body:  # else no barrier has said that it is good (R27)
                staged_s = self.staged_s.get((rank.job, int(body["round"]), rank.rank), self.holder.world.now)
                checker.restores.read_damaged(rank, [n for n in shelved.slots if n is not None], staged_s)
        vault.unpin(*pinned)
        return body, error

    def manifest_of(self, body: Body) -> Manifest:
        """What this round staged for this rank."""
        shelved, _ = self.holder.vault.shelf.staged[str(body["job"]), int(body["round"]), int(body["rank"])]
        return decode_manifest(self.holder.vault.manifest(shelved))

    def _keep(self, body: Body, pinned: tuple[Shelved, int], verified_s: float) -> None:
        key = (str(body["job"]), int(body["round"]), int(body["rank"]))
        self.holder.vault.keep_staged(key, *pinned)
        self.staged_s[key] = verified_s

    def _stage(self, body: Body, shard: ShardId) -> Generator[Wait, None, dict[str, list[int]]]:
        holder, vault, me = self.holder, self.holder.vault, self.holder.host_id
        spec = spec_from_wire(body["spec"])
        yield holder.world.network.rng.uniform(0.005, 0.05)
        bad: dict[str, list[int]] = {}
        pinned = vault.pin(shard, spec.digest)
        if pinned is not None:
            lacking = vault.verify(pinned[0])
            if not lacking and (yield from self._has_manifest(body, pinned[0])):
                self._keep(body, pinned, holder.world.now)
                return {}
            planned = {i for tier, _, first, n in body["runs"] if tier == "local" for i in range(first, first + n)}
            if planned & set(lacking):
                bad[me] = sorted(planned & set(lacking))
            holder.sealed(pinned[0])
            vault.unpin(*pinned)
        until_s = holder.world.now + STAGE_LIMIT_S
        data = yield from self._manifest(body, shard, spec.digest, until_s)
        if data is None:
            return bad or {me: list(range(spec.chunks_count))}
        chunks = decode_manifest(data).chunks
        digests, sizes = [c.digest for c in chunks], [c.nbytes for c in chunks]
        began_s = holder.world.now  # each chunk is verified when it comes, the first long before the last
        name = f"stage-{body['attempt']}-{body['round']}"
        draft = vault.open_draft(name, shard, digests, sizes, int(body["attempt"]))
        try:
            vault.ensure_free(len(draft.missing))
            problem = yield from self._fetch(body, draft, sizes, bad, until_s)
            if vault.shelf.draft(name, shard) is not draft:
                raise PeerUnreachable("the draft was aborted meanwhile")
            if draft.missing:
                if problem and not bad:
                    raise PeerUnreachable(problem)
                return bad or {me: draft.missing}
            shelved = vault.finish(name, data)
        finally:
            if vault.shelf.draft(name, shard) is draft:
                vault.abort_draft(name, shard)
        holder.sealed(shelved)
        pinned = vault.pin(shard, spec.digest)
        if pinned is None:
            raise IntegrityError("it was dropped while it was staged")
        self._keep(body, pinned, began_s)
        return {}

    def _manifest(self, body: Body, shard: ShardId, digest: str, until_s: float) -> Generator[Wait, None, bytes | None]:
        holder = self.holder
        shelved = holder.vault.shelf.find(shard, digest)
        if shelved is not None:
            with contextlib.suppress(DigestMismatch):  # damaged: another copy's
                return holder.vault.manifest(shelved)
        return (yield from self._brought_manifest(body, shard, digest, until_s))

    def _has_manifest(self, body: Body, shelved: Shelved) -> Generator[Wait, None, bool]:
        """Say whether a copy's manifest is what was stored; a damaged one is brought from another copy first."""
        try:
            self.holder.vault.manifest(shelved)
        except DigestMismatch:
            until_s = self.holder.world.now + STAGE_LIMIT_S
            data = yield from self._brought_manifest(body, shelved.shard, shelved.spec.digest, until_s)
            if data is None:
                return False
            self.holder.vault.mend_manifest(shelved, data)
        return True

    def _brought_manifest(
        self, body: Body, shard: ShardId, digest: str, until_s: float
    ) -> Generator[Wait, None, bytes | None]:
        """Do what `_manifest` does, from elsewhere."""
        holder = self.holder
        sources = [str(h) for h in body["holders"] if h != holder.host_id]
        while True:
            is_unreachable = False
            for source in list(sources):
                try:
                    ask = {"do": "manifest", "shard": body["shard"], "digest": digest}
                    answer = yield from connect(holder, source).ask(ask)
                    if shard_digest(bytes(answer["manifest"])) == digest:
                        return bytes(answer["manifest"])
                except IntegrityError:
                    sources.remove(source)
                except TransportError:
                    is_unreachable = True
            part = holder.world.durable.part_for(body, shard, digest)
            if part is not None and not holder.world.durable.problem:
                return part[0]
            if not is_unreachable:
                return None
            if holder.world.now > until_s:
                raise PeerUnreachable("no source gave the manifest")
            yield RETRY_S

    def _fetch(
        self, body: Body, draft: Draft, sizes: list[int], bad: dict[str, list[int]], until_s: float
    ) -> Generator[Wait, None, str]:
        """Fetch every planned chunk; evidence of loss goes into `bad`, other problems are returned (R25)."""
        problem = ""
        digest = spec_from_wire(body["spec"]).digest
        for tier, source, first, count in body["runs"]:
            if tier == "local":
                continue
            name = "durable" if tier == "durable" else str(source)
            others = [str(h) for h in body["holders"] if h not in (name, self.holder.host_id)]
            turns = [name] if name == "durable" else [name] * SOURCE_TRIES + others
            lost: set[int] = set()
            turn = 0
            while True:
                todo = [i for i in range(first, first + count) if draft.slots[i] is None and i not in lost]
                if not todo:
                    break
                host = turns[turn % len(turns)]
                try:
                    lacking = yield from self._fetch_from(body, host, draft, digest, todo, sizes)
                except IntegrityError:
                    lacking = todo
                except TransportError as exc:
                    lacking, problem = [], str(exc)
                if host == name:
                    lost.update(lacking)
                turn += 1
                if turn >= len(turns) and self.holder.world.now > until_s:
                    break
                yield RETRY_S
            if lost:
                bad.setdefault(name, []).extend(sorted(lost))
        return problem

    def _fetch_from(
        self, body: Body, host: str, draft: Draft, digest: str, todo: list[int], sizes: list[int]
    ) -> Generator[Wait, None, list[int]]:
        """Pull chunks; return those the source says it lacks."""
        holder, vault = self.holder, self.holder.vault
        if host == "durable":
            yield holder.world.durable.delay_s
            _, chunks = holder.world.durable.part_for(body, draft.shard, digest) or (b"", [])
            found = {i: chunks[i] if i < len(chunks) and not holder.world.durable.problem else b"" for i in todo}
        else:
            ask = {"do": "fetch", "shard": shard_to_wire(draft.shard), "digest": digest, "want": todo}
            chunks = yield from connect(holder, host).fetch(ask)
            found = dict(zip(todo, chunks, strict=False))
        bad = []
        for index in todo:
            data = found.get(index, b"")
            if len(data) != sizes[index]:
                bad.append(index)
                continue
            number = vault.take_slots_growing(1)[0]
            vault.arena.view(number, len(data))[:] = data
            holder.memory.version += 1
            bad += vault.keep_chunks(draft, [(index, number, len(data), chunk_digest(data))])
        if not bad or host == "durable":
            return bad
        ask = {"do": "verify", "shard": shard_to_wire(draft.shard), "digest": digest}
        answer = yield from connect(holder, host).ask(ask)
        return sorted({int(i) for i in answer["missing"]}.intersection(bad))

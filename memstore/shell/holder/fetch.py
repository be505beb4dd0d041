"""Brings chunks of a shard, and its manifest, to this host from peers and from durable storage (R23, R25).

All sources are asked at once. What a source says it lacks is returned chunk by chunk: that is evidence about the
bytes. A broken connection or a deadline is none: another try follows, later ones at the shard's other holders too.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from memstore.core.arena.replica_index import Draft
from memstore.core.durable.storage_ports import DurableTier
from memstore.core.format.manifest import chunk_digest
from memstore.core.wire.messages import shard_to_wire, spec_from_wire
from memstore.errors import DigestMismatch, IntegrityError, PeerUnreachable, TransportError
from memstore.shell.durable.tier import open_tier
from memstore.shell.holder.chunk_notifier import TELL_S, Herald
from memstore.shell.holder.context import HolderContext
from recovery.inventory import ShardId, ShardSpec

log = logging.getLogger("memstore")
SOURCE_THREADS = 8
RANGE_THREADS = 16  # of durable storage, over all shards: an object store is fast only by many requests at once
RETRY_S = 0.2
RETRY_LIMIT_S = 10.0  # and at least twice repair_after_s: a dead source is known dead before its fetch fails a get
SOURCE_TRIES = 3  # before the other holders of the shard are asked as well
DURABLE = "durable"  # names durable storage among sources, in reports


class Fetcher:
    """Fetches of one holder."""

    def __init__(self, context: HolderContext) -> None:
        self.context, self.vault = context, context.vault
        self.sources = ThreadPoolExecutor(SOURCE_THREADS, thread_name_prefix="memstore-source")
        self.ranges = ThreadPoolExecutor(RANGE_THREADS, thread_name_prefix="memstore-range")
        self.newest: dict[tuple[str, int], int] = {}  # (job, rank) -> round ordered last; what went before may give up

    def begin(self, body: dict[str, Any]) -> None:
        """Take note of an order: of a rank's rounds only the newest is still worth another try."""
        if int(body["round"]) > 0:
            self.newest[str(body["job"]), int(body["rank"])] = int(body["round"])

    def close(self) -> None:
        """Stop taking work."""
        for pool in (self.sources, self.ranges):
            pool.shutdown(wait=False, cancel_futures=True)

    def may_wait(self, body: dict[str, Any], deadline_s: float) -> bool:
        """Wait before another try; False if there is to be none: too late, stopping, or a newer round is under way."""
        number = int(body["round"])
        is_newest = number < 0 or self.newest.get((str(body["job"]), int(body["rank"]))) == number
        return is_newest and time.monotonic() < deadline_s and not self.context.stopping.wait(RETRY_S)

    def deadline_s(self) -> float:
        """When a fetch that begins now fails, on the monotonic clock."""
        return time.monotonic() + max(RETRY_LIMIT_S, 2 * self.context.config.repair_after_s)

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
        return self.brought_manifest(body, shard, digest, deadline_s)

    def brought_manifest(
        self, body: dict[str, Any], shard: ShardId, digest: str, deadline_s: float
    ) -> tuple[bytes | None, set[str]]:
        """Do what `manifest` does, from elsewhere."""
        sources = [str(h) for h in body["holders"] if h != self.context.host_id]
        sources += [DURABLE] if body.get("durable") else []
        lacking: set[str] = set()
        while True:
            problems = []
            for source in sources:
                try:
                    if source == DURABLE:
                        return open_tier(body["durable"]).read_manifest(shard, spec_from_wire(body["spec"])), lacking
                    return self.context.peers.peer(source).fetch_manifest(shard, digest), lacking
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
        others = [str(h) for h in body["holders"] if h not in (source, self.context.host_id)]
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
            return self.context.peers.peer(host).fetch_into(self.vault, draft, digest, chunks)
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

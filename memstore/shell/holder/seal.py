"""Turns hand-overs into sealed shards, in order, off every other thread: R7, R12, R14, R21.

Each link of a rank has one worker. A hand-over is stamped with the fence that held when it came, so that a
later fence finishes it instead of refusing it; a put that fails here is skipped on all ranks alike.
"""

from __future__ import annotations

import logging
import queue
import threading
from typing import Any

from memstore.core.arena.replica_index import Shelved
from memstore.core.arena.slot_table import Owner
from memstore.core.format.manifest import chunk_sizes
from memstore.errors import CapacityError, IntegrityError
from memstore.shell.arena.slot_sample import differing
from memstore.shell.holder.context import HolderContext
from memstore.shell.holder.pending_calls import Call, Calls
from memstore.shell.holder.push import Pusher
from memstore.shell.holder.put_timings import PutMeter, measured
from memstore.shell.holder.rank_connections import RankConnections, RankLink
from memstore.shell.holder.shared_shards import Twins, shared_count
from memstore.shell.net.pacing import give_way
from memstore.shell.peer.outgoing_shard import Fresh
from recovery.inventory import ShardId

log = logging.getLogger("memstore")
SEAL_S = 60.0  # longest wait for the same shard to be sealed on behalf of an older link


class Sealer:
    """The hand-overs of all links of one holder."""

    def __init__(
        self, context: HolderContext, connections: RankConnections, calls: Calls, pusher: Pusher, twins: Twins
    ) -> None:
        self.context, self.vault, self.connections = context, context.vault, connections
        self.calls, self.pusher, self.twins = calls, pusher, twins
        self.changed = threading.Condition()
        self.pending: dict[tuple[str, int, Owner], int] = {}  # (job, attempt, process) -> hand-overs not finished
        self.sealing: set[ShardId] = set()
        self.meter = PutMeter()

    def start(self, link: RankLink) -> None:
        """Serve a link until None is queued."""
        threading.Thread(target=self._run, args=(link,), name=f"memstore-seal-{link.nonce}", daemon=True).start()

    def add(self, link: RankLink, body: dict[str, Any]) -> None:
        """Queue a hand-over that came completely; a fence that comes now waits for it (R21)."""
        with self.changed:
            if link.is_retired:
                return
            key = (link.job, int(body["attempt"]), link.owner)
            self.pending[key] = self.pending.get(key, 0) + 1
            link.handovers.put((body, self.context.fences.first(link.job)))

    def retire(self, link: RankLink) -> None:
        """The link's store came back on another one: forget what it will send again. Needs the connections' lock."""
        with self.changed:
            link.is_retired = True
        while True:
            try:
                item = link.handovers.get_nowait()
            except queue.Empty:
                break
            if item is not None:
                self._done(link, item[0])
        link.handovers.put(None)

    def drain(self, job: str, attempt: int, timeout_s: float) -> bool:
        """Wait until nothing handed over by older attempts is unfinished; False if it took too long (R21)."""
        with self.changed:
            return self.changed.wait_for(
                lambda: not any(name == job and ordinal < attempt for name, ordinal, _ in self.pending), timeout_s
            )

    def drain_owner(self, owner: Owner, timeout_s: float) -> bool:
        """Wait until nothing that one process handed over is unfinished."""
        with self.changed:
            return self.changed.wait_for(lambda: not any(o == owner for _, _, o in self.pending), timeout_s)

    def _done(self, link: RankLink, body: dict[str, Any]) -> None:
        with self.changed:
            key = (link.job, int(body["attempt"]), link.owner)
            left = self.pending.get(key, 0) - 1
            if left > 0:
                self.pending[key] = left
            else:
                self.pending.pop(key, None)
            self.changed.notify_all()

    def _run(self, link: RankLink) -> None:
        give_way()
        while True:
            item = link.handovers.get()
            if item is None:
                return
            body, fence = item
            shard = ShardId(link.job, int(body["attempt"]), int(body["step"]), link.rank)
            is_failed = True
            try:
                why = self._seal(link, shard, body, fence)
            except Exception as exc:
                why, is_failed = f"{type(exc).__name__}: {exc}", not isinstance(exc, CapacityError)
                log.warning("put of %s failed on host %s", shard, self.context.host_id, exc_info=True)
            try:
                if why:
                    self.connections.tell_level(link, shard.attempt, shard.step, "failed", why)
                    self._give_up(shard, why, is_failed=is_failed)
            finally:
                self._done(link, body)

    def _give_up(self, shard: ShardId, why: str, *, is_failed: bool) -> None:
        """A put failed on this host, for want of room or (`is_failed`) not: all ranks give the step up alike (R12)."""
        body = {"job": shard.job, "attempt": shard.attempt, "rank": shard.rank, "step": shard.step, "why": why}
        self.calls.ask(Call(None, "", 0, "skip", {**body, "is_failed": is_failed}))

    def _seal(self, link: RankLink, shard: ShardId, body: dict[str, Any], fence: int) -> str:
        """Digest what was handed over, store it, report it, push it; return why it cannot be (R7, R13, R14)."""
        with self.changed:
            if not self.changed.wait_for(lambda: shard not in self.sealing, SEAL_S):
                raise IntegrityError(f"{shard} was not sealed within {SEAL_S:g} s on behalf of a link that ended")
            self.sealing.add(shard)
        try:
            slots = [int(n) for n in body["slots"]]
            shared = shared_count(body, len(slots))
            # All of the body is read before a slot changes hands, and no list is made as long as a rank says.
            world_size, nbytes = int(body["world_size"]), int(body["nbytes"])
            if len(slots) != -(-nbytes // self.vault.chunk_bytes) or world_size < 1:
                raise IntegrityError(
                    f"{shard} was handed over with {len(slots)} slots for {nbytes} bytes, world size {world_size}"
                )
            sizes = chunk_sizes(nbytes, self.vault.chunk_bytes)
            if type(body["layout"]) is not bytes:  # of a number, bytes() would make that many
                raise IntegrityError(f"{shard} was handed over without a layout")
            seen = dict(body.get("sample") or {})
            with self.connections.lock, self.vault.lock:
                if link.is_retired:
                    return ""  # the new link brings it again
                known = self.vault.shelf.find(shard)
                is_lost = bool(body.get("lost")) or str(body["arena"]) != self.vault.arena.identity
                is_mine = not is_lost and self.vault.table.hand_over(link.owner, slots)
            is_refused = known is None and (shard.attempt < fence or not is_mine)
            if is_mine and (known is not None or is_refused):
                self.vault.give_back(slots)
            if is_refused:
                is_old = shard.attempt < fence
                return f"attempt {fence} was opened" if is_old else "its slots were no longer leased to it"
            if known is None:
                why = self._not_seen(shard, slots, nbytes, seen)
                if why:
                    self.vault.give_back(slots)
                    return why
                known, has_targets = self._seal_fresh(shard, body, slots, sizes)
            else:
                has_targets = self.pusher.replicate(shard, known.spec.digest)
        finally:
            with self.changed:
                self.sealing.discard(shard)
                self.changed.notify_all()
        before = self.twins.put_sealed(known, shared)
        self.connections.tell_level(link, shard.attempt, shard.step, "sealed", "")
        put = measured(body) | ({} if before is None else {"unchanged_since": before})
        self.context.sealed(known, put)
        self.twins.compare(shard)
        if not has_targets:
            self.connections.replicated(shard)
        self.connections.grant_current(link)
        return ""

    def _not_seen(self, shard: ShardId, slots: list[int], nbytes: int, seen: dict[str, Any]) -> str:
        """Return why these slots do not hold what the rank filled in, as far as a sample of its bytes tells, or ""."""
        try:
            found = differing(self.vault.arena.mapping, slots, nbytes, seen)
        except IntegrityError as exc:
            return f"{shard} was handed over, but {exc}"
        if not found:
            return ""
        why = (
            f"what rank {shard.rank} filled is not what its host sees: {len(found)} of {len(slots)} chunks differ, the "
            f"first is chunk {found[0]} in slot {slots[found[0]]}, so nothing of it is kept. Restart "
            "the rank: it has another file mapped than its holder, or writes on after its put"
        )
        log.error("host %s, job %s: %s", self.context.host_id, shard.job, why)
        return why

    def _seal_fresh(
        self, shard: ShardId, body: dict[str, Any], slots: list[int], sizes: list[int]
    ) -> tuple[Shelved, bool]:
        """Digest, store, and push meanwhile: the first chunks are on the wire before the last are digested."""
        fresh = Fresh(self.vault, shard, slots, sizes)
        try:
            has_targets = self.pusher.replicate(shard, "", fresh)
        except BaseException as exc:
            fresh.fail(repr(exc))
            self.vault.give_back(slots)
            raise
        try:
            shelved = self.vault.seal_local(
                shard, world_size=int(body["world_size"]), layout=body["layout"], nbytes=int(body["nbytes"]),
                slots=slots, attempt=shard.attempt, follower=fresh,
            )  # fmt: skip
        except BaseException as exc:
            fresh.fail(f"{type(exc).__name__}: {exc}")
            raise
        self.meter.count(shard.job, body)
        return shelved, has_targets

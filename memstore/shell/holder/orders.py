"""What a holder does on the controller's word: each order once, in the order they came (R12, R21, R23).

Whatever can block runs in a thread of `workers`; an order that fails ends no session.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

from memstore.core.arena.share import share_from_wire
from memstore.core.wire.messages import copy_to_wire, shard_from_wire
from memstore.errors import CapacityError, MemstoreError
from memstore.shell.arena.memory_limits import gib
from memstore.shell.holder.fork import drop_unknown_shares, forked_body, look, make

if TYPE_CHECKING:
    from memstore.shell.holder.holder import Holder

log = logging.getLogger("memstore")
FENCE_DRAIN_S = 5.0
CONNECT_S = 1.0  # room is not withheld for longer because a target does not answer


class Orders:
    """The orders of one holder's controller."""

    def __init__(self, holder: Holder) -> None:
        self.holder = holder
        self.vault = holder.vault
        self.workers = ThreadPoolExecutor(4, thread_name_prefix="memstore-orders")
        # One thread: an older share never replaces a newer one, and slow growth holds up no drop and no fence.
        self.reserves = ThreadPoolExecutor(1, thread_name_prefix="memstore-reserve")

    def close(self) -> None:
        """Begin nothing more."""
        for pool in (self.workers, self.reserves):
            pool.shutdown(wait=False, cancel_futures=True)

    def obey(self, body: dict[str, Any]) -> None:
        """One order that fails ends no session; but facts that broke in the writing are sent again to a new one."""
        self._order(body) if body.get("k") == "journal" else self.holder.logged(self._order, body)

    def _order(self, body: dict[str, Any]) -> None:
        """Carry out one order; whatever can block runs elsewhere."""
        kind = body.pop("k", None)
        if kind == "journal":
            self.holder.facts.take(body)
        elif kind == "clock" and self.holder.session is not None:
            self.holder.session.clock(body)
        elif kind == "view":
            self.holder.set_view(body["hosts"], body["gone"])
            self.reserves.submit(self.holder.logged, drop_unknown_shares, self.vault, body["jobs"])
        elif kind == "fence":
            job, attempt = str(body["job"]), int(body["attempt"])
            self.holder.fences[job] = max(self.holder.fences.get(job, 0), attempt)
            self.workers.submit(self.holder.logged, self._fence, job, attempt, body.get("members", []))
        elif kind == "targets":
            self.holder.targets[str(body["job"])] = [str(t) for t in body["targets"]]
            self.holder.twins.declare(str(body["job"]), int(body["attempt"]), body["copiers"])
        elif kind == "reserve":
            self.reserves.submit(self.holder.logged, self._reserve, body)
        elif kind == "grow":
            self.reserves.submit(self.holder.logged, self._grow, body)
        elif kind == "fork":
            self.workers.submit(self.holder.logged, self._fork, body)
        elif kind == "push":
            self.holder.pusher.order(body)
        elif kind == "stage":
            self.holder.stager.order(body)
        elif kind == "check":
            self.holder.stager.check(body)
        elif kind == "level":
            self.holder.ranks.level(body)
        elif kind == "abandon":
            self.workers.submit(self.holder.logged, self._abandon, body)
        elif kind == "drop":
            self.workers.submit(self.holder.logged, self._drop, body)
        elif kind == "persist":
            self.holder.persister.order(body)
        elif kind == "markers":
            self.holder.persister.markers(body)
        elif kind == "answer":
            self.holder.ranks.answer(int(body["id"]), body["body"], body["error"])
        elif kind == "ask":
            self.workers.submit(self.holder.logged, self._ask, body)
        elif kind == "dropped":
            self.holder.tombstones.take(str(body["job"]), str(body["story"]))
        elif kind == "outdated":
            self.workers.submit(self.holder.logged, self.holder.begin_again, int(body["above"]))
        elif kind == "exit":
            self.holder.on_fatal(str(body.get("why", "told to exit")))

    def _fence(self, job: str, attempt: int, members: list[str]) -> None:
        """Older processes are refused from now on; answer with what is here (R21)."""
        with self.vault.lock:
            self.vault.shelf.abort_older(job, attempt)
            self.vault.flush()
        self.holder.ranks.fence(job, attempt, FENCE_DRAIN_S, members)
        with self.vault.lock:
            copies = [copy_to_wire(c) for c in self.vault.shelf.copies(self.holder.info.host_id, job)]
            # Queued under the lock: a seal that comes after the inventory is reported after it.
            self.holder.report("fenced", {"job": job, "attempt": attempt, "copies": copies})

    def _reserve(self, body: dict[str, Any]) -> None:
        """Claim the room, or say why not: with numbers, or what broke, for all ranks wait for the word (R9, R10)."""
        job, share = str(body["job"]), share_from_wire(body)
        reply = {"job": job, "attempt": body["attempt"], "call": body.get("call", 0), "ok": True, "why": ""}
        # Meanwhile: a first put that has to connect finds nothing warm.
        connecting = self.workers.submit(self.holder.logged, self.holder.pusher.connect, job)
        try:
            self.vault.claim(job, share, functools.partial(self.holder.ranks.room, job))
        except CapacityError as exc:
            size = self.vault.chunk_bytes
            ranks = ", ".join(f"{rank}: {gib(slots * size)}" for rank, slots in sorted(share.ranks.items())[:8])
            asked = f"The job reserves {share.versions} versions for each rank here (rank {ranks or '-'}) and "
            asked += f"{gib(share.guest_slots * size)} for copies of other hosts' ranks and their repair"
            reply.update(ok=False, why=f"{exc}. {asked}")
        except Exception as exc:
            log.exception("room for job %s", job)
            reply.update(ok=False, why=f"its holder failed to claim room ({exc!r}): its log says where; put again then")
        wait([connecting], CONNECT_S)
        self.holder.report("reserved", reply)
        self.holder.ranks.grant_job(job)

    def release(self) -> None:
        """Give back what no job has reserved, after what is being reserved: what a process had leased is free."""
        with contextlib.suppress(RuntimeError):  # the holder ends
            self.reserves.submit(self.holder.logged, self.vault.room.release)

    def _grow(self, body: dict[str, Any]) -> None:
        """Memory and streams for the puts that may follow a restore, if there is any: nothing is claimed (R10)."""
        job, share = str(body["job"]), share_from_wire(body)
        self.workers.submit(self.holder.logged, self.holder.pusher.connect, job)
        with self.vault.lock:
            missing = self.vault.shelf.slots_needed(job, share) - self.vault.table.claimed_count
            count = len(self.vault.table.free) + missing
        with contextlib.suppress(CapacityError):
            self.vault.ensure_free(count)

    def _abandon(self, body: dict[str, Any]) -> None:
        """Forget an uncommitted step and tell its tickets (R12)."""
        job, attempt, step = str(body["job"]), int(body["attempt"]), int(body["step"])
        with self.vault.lock:
            keys = [*self.vault.shelf.shards, *((k[0], k[1]) for k in self.vault.shelf.drafts)]
            shards = {k[0] for k in keys if (k[0].job, k[0].attempt, k[0].step) == (job, attempt, step)}
            for key in [k for k in self.vault.shelf.drafts if k[0] in shards]:
                self.vault.shelf.abort_draft(key[1], key[0])
        for shard in shards:
            self.vault.drop(shard)
        self.holder.ranks.resume(body)
        self.holder.ranks.grant_job(job)

    def _drop(self, body: dict[str, Any]) -> None:
        shards = [shard_from_wire(item) for item in body["shards"]]
        removed = body.get("removed")
        try:
            self.vault.drop_all(shards, removed)
        finally:  # also where that failed
            self.holder.freed(body)
        if removed is not None:
            self.holder.twins.forget(str(removed[0]), int(removed[1]))
            if not body.get("is_refused_fork"):
                self.holder.ranks.removed(str(removed[0]), int(removed[1]))
        for job in {shard.job for shard in shards}:
            self.holder.ranks.grant_job(job)

    def _fork(self, body: dict[str, Any]) -> None:
        """Look at what is to be forked, or make manifests of the new job over the same slots (R32)."""
        if body["what"] == "look":
            self.holder.report("forked", forked_body(body, look(self.vault, body["shards"])))
        else:
            for shelved in make(self.vault, body["shards"]):
                self.holder.sealed(shelved)

    def _ask(self, body: dict[str, Any]) -> None:
        """Answer a question of the command line that needs this host's bytes."""
        reply: dict[str, Any] = {"ask": body["ask"], "ok": True, "why": "", "value": None}
        try:
            if body["what"] == "verify":
                reply["value"] = self.holder.scrubber.verify_all(body.get("job"))
        except MemstoreError as exc:
            reply.update(ok=False, why=str(exc))
        except Exception as exc:
            log.exception("question %s", body["what"])
            reply.update(ok=False, why=repr(exc))
        self.holder.report("answer", reply)

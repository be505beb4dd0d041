"""Claims room for jobs as the controller orders, and gives back what no job has reserved (R9, R10)."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from memstore.core.arena.share import share_from_wire
from memstore.errors import CapacityError
from memstore.shell.arena.memory_limits import gib
from memstore.shell.holder.context import HolderContext
from memstore.shell.holder.fork import drop_unknown_shares
from memstore.shell.holder.rank_connections import RankConnections

log = logging.getLogger("memstore")
CONNECT_S = 1.0  # room is not withheld for longer because a target does not answer


class RoomOrders:
    """The room of one holder's jobs.

    All of it is done by one thread: an older share never replaces a newer one, and slow growth holds up no drop and
    no fence.
    """

    def __init__(
        self, context: HolderContext, connections: RankConnections, connect: Callable[[str], Future[None]]
    ) -> None:
        """`connect`: begins to open the streams to a job's targets, which the first put needs."""
        self.context, self.replicas, self.connections, self._connect = context, context.replicas, connections, connect
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="memstore-reserve")

    def close(self) -> None:
        """Begin nothing more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def reserve(self, body: dict[str, Any]) -> None:
        """Claim a share, and report that it was claimed or why it cannot be."""
        self._thread.submit(self.context.logged, self._reserve, body)

    def grow(self, body: dict[str, Any]) -> None:
        """Have memory and streams for the puts that may follow a restore; claims nothing (R10)."""
        self._thread.submit(self.context.logged, self._grow, body)

    def keep_jobs(self, jobs: list[str]) -> None:
        """Give back the shares of jobs that the controller does not know and that have nothing here."""
        self._thread.submit(self.context.logged, drop_unknown_shares, self.replicas, jobs)

    def release(self) -> None:
        """Give back what no job has reserved, once the claims that are queued are done."""
        with contextlib.suppress(RuntimeError):  # the holder ends
            self._thread.submit(self.replicas.room.release)

    def _reserve(self, body: dict[str, Any]) -> None:
        """Claim the room and report it, or report why not, with numbers: all ranks wait for the report (R9, R10)."""
        job, share = str(body["job"]), share_from_wire(body)
        reply = {"job": job, "attempt": body["attempt"], "call": body.get("call", 0), "ok": True, "why": ""}
        connecting = self._connect(job)  # meanwhile: a first put that has to connect finds nothing warm
        try:
            self.replicas.claim(job, share, functools.partial(self.connections.room, job))
        except CapacityError as exc:
            size = self.replicas.chunk_bytes
            ranks = ", ".join(f"{rank}: {gib(slots * size)}" for rank, slots in sorted(share.ranks.items())[:8])
            asked = f"The job reserves {share.versions} versions for each rank here (rank {ranks or '-'}) and "
            asked += f"{gib(share.guest_slots * size)} for copies of other hosts' ranks and their repair"
            reply.update(ok=False, why=f"{exc}. {asked}")
        except Exception as exc:
            log.exception("room for job %s", job)
            reply.update(ok=False, why=f"its holder failed to claim room ({exc!r}): its log says where; put again then")
        wait([connecting], CONNECT_S)
        self.context.report("reserved", reply)
        self.connections.grant_job(job)

    def _grow(self, body: dict[str, Any]) -> None:
        job, share = str(body["job"]), share_from_wire(body)
        self._connect(job)
        with self.replicas.lock:
            missing = self.replicas.index.slots_needed(job, share) - self.replicas.table.claimed_count
            count = len(self.replicas.table.free) + missing
        with contextlib.suppress(CapacityError):
            self.replicas.ensure_free(count)

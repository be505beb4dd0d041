"""Claims room for jobs as the controller orders, and gives back what no job has reserved (R9, R10)."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from memstore.core.arena.share import share_of
from memstore.core.wire.orders import Grow, Reserve
from memstore.core.wire.reports import Reserved
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
        self.context, self.vault, self.connections, self._connect = context, context.vault, connections, connect
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="memstore-reserve")

    def close(self) -> None:
        """Begin nothing more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def reserve(self, order: Reserve) -> None:
        """Claim a share, and report that it was claimed or why it cannot be."""
        self._thread.submit(self.context.logged, self._reserve, order)

    def grow(self, order: Grow) -> None:
        """Have memory and streams for the puts that may follow a restore; claims nothing (R10)."""
        self._thread.submit(self.context.logged, self._grow, order)

    def keep_jobs(self, jobs: tuple[str, ...]) -> None:
        """Give back the shares of jobs that the controller does not know and that have nothing here."""
        self._thread.submit(self.context.logged, drop_unknown_shares, self.vault, jobs)

    def release(self) -> None:
        """Give back what no job has reserved, once the claims that are queued are done."""
        with contextlib.suppress(RuntimeError):  # the holder ends
            self._thread.submit(self.vault.room.release)

    def _reserve(self, order: Reserve) -> None:
        """Claim the room and report it, or report why not, with numbers: all ranks wait for the report (R9, R10)."""
        job, share, problem = order.job, share_of(order), None
        connecting = self._connect(job)  # meanwhile: a first put that has to connect finds nothing warm
        try:
            self.vault.claim(job, share, functools.partial(self.connections.room, job))
        except CapacityError as exc:
            size = self.vault.chunk_bytes
            ranks = ", ".join(f"{rank}: {gib(slots * size)}" for rank, slots in sorted(share.ranks.items())[:8])
            asked = f"The job reserves {share.versions} versions for each rank here (rank {ranks or '-'}) and "
            asked += f"{gib(share.guest_slots * size)} for copies of other hosts' ranks and their repair"
            problem = f"{exc}. {asked}"
        except Exception as exc:
            log.exception("room for job %s", job)
            problem = f"its holder failed to claim room ({exc!r}): its log says where; put again then"
        wait([connecting], CONNECT_S)
        self.context.report(Reserved(job=job, attempt=order.attempt, call=order.call, problem=problem))
        self.connections.grant_job(job)

    def _grow(self, order: Grow) -> None:
        job, share = order.job, share_of(order)
        self._connect(job)
        with self.vault.lock:
            missing = self.vault.shelf.slots_needed(job, share) - self.vault.table.claimed_count
            count = len(self.vault.table.free) + missing
        with contextlib.suppress(CapacityError):
            self.vault.ensure_free(count)

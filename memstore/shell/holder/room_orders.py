"""Claims room for jobs as the controller orders, and gives back what no job has reserved (core/holder/room.py)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from memstore.core.holder import effects
from memstore.core.holder import room as procedure
from memstore.core.wire.orders import Grow, Reserve
from memstore.shell.holder.context import HolderContext
from memstore.shell.holder.runner import Runner


class RoomOrders:
    """The room of one holder's jobs. One thread does all of it, so slow growth holds up no drop and no fence."""

    def __init__(self, context: HolderContext, runner: Runner, connect: Callable[[str], Future[None]]) -> None:
        """`connect`: begins to open the streams to a job's targets."""
        self.context, self._connect = context, connect
        self.runner = runner.extended({effects.BeginConnect: self._begin_connect})
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="memstore-reserve")

    def close(self) -> None:
        """Begin nothing more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def reserve(self, order: Reserve) -> None:
        """Claim a share, and report that it was claimed or why it cannot be."""
        self._begin(self.runner.run, procedure.reserve(self.context.state, order))

    def grow(self, order: Grow) -> None:
        """Have memory and streams for the puts that may follow a restore."""
        self._begin(self.runner.run, procedure.grow(self.context.state, order))

    def keep_jobs(self, jobs: Collection[str]) -> None:
        """Give back the shares of jobs that the controller does not know and that have nothing here."""
        self._begin(self.context.replicas.room.keep_shares, jobs)

    def release(self) -> None:
        """Give back what no job has reserved, once the claims that are queued are done."""
        with contextlib.suppress(RuntimeError):  # the holder ends
            self._thread.submit(self.context.replicas.room.release)

    def _begin(self, work: Callable[[Any], None], what: Any) -> None:
        self._thread.submit(self.context.logged, work, what)

    def _begin_connect(self, effect: effects.BeginConnect) -> Callable[[], bool]:
        connecting = self._connect(effect.job)
        connecting.add_done_callback(lambda _: self.runner.wake())
        return connecting.done

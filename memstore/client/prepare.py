"""Room, pages and connections for the puts to come, made ready before the first of them (R9, R10).

    asked --all ranks asked, every host grew and pre-faulted its arena--> claimed --own pages entered--> ready
      '--some host has no room, a newer attempt, no answer in time--> failed, on all ranks alike

Everything runs elsewhere: the holders grow and connect, the link's thread enters pages. A thread of its own
follows it, so that the cost is known to the second when it is over.
"""

from __future__ import annotations

import _thread
import inspect
import logging
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import torch

from memstore.config import check_seconds
from memstore.core.wire.calls import ReserveRoom
from memstore.core.wire.rank_messages import RoomGrown
from memstore.core.wire.replies import Noted
from memstore.errors import ClosedError, PeerTimeout
from memstore.shell.rank.collective import RollCall
from memstore.shell.rank.holder_link import HolderLink
from memstore.shell.tensors import subclasses
from memstore.shell.threads.waits import Answer, SafeEvent, answer_of

log = logging.getLogger("memstore")
BAR_S = 0.1  # between two updates of a progress bar
WAITED_S = 1.0  # a first put that waits longer for its room says how not to
SAY_S = 5.0  # the same for a log
ALIGNMENT_BYTES = 64  # of a tensor in a put, at most
_KINDS_OF_STEP = ("foreach", "fused", "capturable", "differentiable")  # none of them changes what is kept


class PutPreparation:
    """What `store.prepare` returns.

    Attributes: nbytes (of one put, in whole chunks), seconds (taken so far, or in all).
    """

    def __init__(
        self, link: HolderLink, request: ReserveRoom, chunk_bytes: int, *, versions: int, timeout_s: float
    ) -> None:
        """It asks for the room that `request` names in `begin`.

        Args:
            versions: Of a put's bytes that this rank will be leased, for the progress.
            timeout_s: Longest wait for the hosts, and then for this process's pages.
        """
        self.slots_count = request.slots
        self.nbytes = self.slots_count * chunk_bytes
        self._link, self._timeout_s = link, timeout_s
        self._pages_bytes = self.nbytes * versions
        self._chunk_bytes = chunk_bytes
        self._host = (0, 0)  # the bytes that this host has made ready, and those that it lacked
        self._claimed_s = self._ready_s = 0.0  # how long each took from the beginning; 0: it is not over
        self._error: BaseException | None = None
        self._over = SafeEvent()
        self._began_s = time.monotonic()
        self._cancelled: Future[None] = Answer()
        self._failed: Future[None] = Answer()  # holds the error, which a waiting put raises
        self._pid = os.getpid()
        self._request = request
        self._answer: Future[Noted] | None = None  # None: `begin` has not asked yet
        self._is_followed = False

    def begin(self) -> PutPreparation:
        """Send the request. Its first event may arrive at once: the caller must route events to `on_room` before."""
        self._answer = self._link.call_soon(self._request)
        _thread.start_new_thread(self._follow, ())
        return self

    def __repr__(self) -> str:
        return f"PutPreparation({self.nbytes} bytes, {self._words()}, {self.seconds:.2f} s)"

    @property
    def is_ready(self) -> bool:
        """Return whether by now a put finds all of it warm."""
        return self._over.is_set() and self._error is None

    @property
    def has_failed(self) -> bool:
        """Return whether by now it cannot become ready; `wait` says why."""
        if self._over.is_set():
            return self._error is not None
        # Its thread has yet to say so; or a signal's handler ended `begin` by an exception.
        return self._answer is None or (self._answer.done() and self._answer.exception() is not None)

    @property
    def fraction(self) -> float:
        """The finished part, from 0 to 1: this host's memory and this process's pages, by bytes."""
        if self._over.is_set():
            return 1.0 if self._error is None else 0.0
        grown, lacking = self._host
        own = min(self._held_count() * self._chunk_bytes, self._pages_bytes)
        return min(0.99, (grown + own) / max(1, lacking + self._pages_bytes))

    @property
    def seconds(self) -> float:
        """The seconds it took, or has taken so far."""
        return self._ready_s or time.monotonic() - self._began_s

    @property
    def cost(self) -> str:
        """Return the line for the log that says what it took, once it is ready."""
        job, rank, grown = self._link.job, self._link.rank, self._host[1]
        host = f", {grown / 1e9:.3g} GB new on this host" if grown else ""
        return (
            f"memstore {job} rank {rank}: ready for puts of {self.nbytes / 1e9:.3g} GB{host} · hosts "
            f"{self._claimed_s:.2f} pages {self._ready_s - self._claimed_s:.2f} s, once"
        )

    def wait(self, timeout_s: float | None = None) -> PutPreparation:
        """Wait until it is ready; on rank 0 with a bar on a terminal, with log lines elsewhere.

        Args:
            timeout_s: None: as long as the store waits for its hosts and ranks, `connect_timeout_s` each.

        Raises:
            CapacityError: A host has no room; on all ranks alike, or GrowthRefused where not all asked (R10).
            CommitError: The job has a history that this attempt has not asked for (R19).
            GatherTimeout: Not every rank prepared or put.
            PeerTimeout, FencedError, ClosedError: It cannot become ready any more.
            TimeoutError: It was not ready within `timeout_s`; it goes on.
        """
        limit_s = 2 * self._timeout_s if timeout_s is None else check_seconds("timeout_s", timeout_s)
        show = self._show_bar if sys.stderr.isatty() else self._say
        if self._link.rank != 0:
            self._over.wait(limit_s)
        elif not self._over.wait(min(BAR_S, limit_s)):
            show(time.monotonic() + limit_s - BAR_S)
        if not self._over.is_set():
            raise TimeoutError(
                f"not ready after {limit_s:g} s, {self._words()}: it goes on, wait longer with timeout_s=, or put: "
                "the first put waits for it"
            )
        if self._error is not None:
            raise self._error
        return self

    def say_waited(self, waited_s: float) -> None:
        """Log, on rank 0, the wait of a first put and how to have it done before training."""
        if waited_s >= WAITED_S and self._link.rank == 0:
            log.warning(
                "memstore %s: the first put blocked training for %.1f s while %.1f GiB a rank were claimed for it and "
                "later ones: store.prepare(state) before the loop does this in the background",
                self._link.job, waited_s, self.nbytes / (1 << 30),
            )  # fmt: skip

    def wait_claimed(self, roll: RollCall | None = None) -> None:
        """Wait until every host has reserved the room that a first put needs before it takes slots. Errors as `wait`.

        With `roll` the log names the awaited ranks.
        """
        assert self._answer is not None
        ends: list[Future[Any]] = [self._answer, self._failed, self._cancelled]
        if roll is not None:
            roll.wait(ends, self._timeout_s)
        else:
            self._link.wait_any(ends, self._timeout_s)
        if self._answer.done():
            answer_of(self._answer)
        elif self._failed.done():
            answer_of(self._failed)
        elif self._cancelled.done():
            raise ClosedError("the attempt that was prepared for is over")
        else:
            self._link.forget_call(self._answer)
            raise PeerTimeout(
                f"reserve of job {self._link.job!r} was not answered within {self._timeout_s:g} s: is the controller "
                f"running? ({self._link.commands('`memstore status`')})",
                operation="reserve", waited_s=self._timeout_s, limit_s=self._timeout_s,
            )  # fmt: skip

    def cancel(self) -> None:
        """Drop the preparation: a newer attempt has opened, or the store closes."""
        if os.getpid() != self._pid:
            return  # forked: its thread is not here, and another one may have held the link's lock (R8)
        if self._answer is not None:
            self._link.forget_call(self._answer)
        self._cancelled.set_result(None)
        with self._link.room:
            self._link.room.notify_all()
        if self._is_followed:
            self._over.wait(self._timeout_s)

    def on_room(self, event: RoomGrown) -> None:
        """Take this host's progress in growing its arena: bytes done, bytes wanted."""
        self._host = (event.done_bytes, event.wanted_bytes)

    # -- following it -----------------------------------------------------------------------------

    def _follow(self) -> None:
        self._is_followed = True
        try:
            self.wait_claimed(RollCall(self._link, self._request, self._timeout_s))
            self._claimed_s = time.monotonic() - self._began_s
            if not self._wait_pages():
                if self._link.fenced_by:
                    raise self._link.fenced_error()
                if self._cancelled.done() or self._link.closed.is_set():
                    raise ClosedError("the attempt that was prepared for is over")
                raise PeerTimeout(
                    f"job {self._link.job!r} rank {self._link.rank}: {self._held_count()} of {self.slots_count} "
                    f"slots were leased within {self._timeout_s:g} s: older steps are in their place, or the holder of "
                    f"this host does not answer ({self._link.commands('`memstore status`')})",
                    operation="prepare", waited_s=self._timeout_s, limit_s=self._timeout_s,
                )  # fmt: skip
            self._ready_s = time.monotonic() - self._began_s
            log.info("%s", self.cost)
        except BaseException as exc:
            self._error = exc
            self._failed.set_exception(exc)
            with self._link.room:
                self._link.room.notify_all()
            log.info("memstore %s rank %d: not prepared: %s", self._link.job, self._link.rank, exc)
        self._over.set()

    def _held_count(self) -> int:
        """Slots that are this rank's with their pages entered: free to fill, or filled and not sealed yet."""
        link = self._link
        with link.room:
            return len(link.pool) + len(link.in_copy) + sum(len(h.slots) for h in link.unsealed_puts.values())

    def _wait_pages(self) -> bool:
        """Wait until a put's slots are here and none of a grant is still to be entered; False if they are not."""
        link, count = self._link, self.slots_count
        with link.room:
            link.room.wait_for(
                lambda: (
                    (self._held_count() >= count and not link.granting)
                    or self._cancelled.done() or bool(link.fenced_by) or link.closed.is_set()
                ),
                self._timeout_s,
            )  # fmt: skip
            return self._held_count() >= count

    def _words(self) -> str:
        if self._over.is_set():
            return "ready" if self._error is None else f"failed: {self._error}"
        if self._answer is not None and self._answer.done():
            return "this process enters its pages"
        grown, lacking = self._host
        return "this host's memory grows" if grown < lacking else "waiting for all ranks and hosts"

    def _show_bar(self, deadline_s: float) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("memstore {task.description}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(self._words(), total=1.0)
            while not self._over.wait(BAR_S) and time.monotonic() < deadline_s:
                bar.update(task, completed=self.fraction, description=self._words())

    def _say(self, deadline_s: float) -> None:
        while not self._over.wait(max(0.0, min(SAY_S, deadline_s - time.monotonic()))):
            if time.monotonic() >= deadline_s:
                return
            log.info("memstore %s: %d %% of the first put's room, %s", self._link.job, 100 * self.fraction,
                     self._words())  # fmt: skip


def bytes_to_come(state: Any) -> int:
    """Return the bytes that the optimizers in a state will have after their first step, and have not yet (D271).

    What cannot be known beforehand is named in the log.
    """
    total = 0
    for optimizer in {id(found): found for found in _optimizers(state)}.values():
        if optimizer.state or not any(param.requires_grad for param in _parameters(optimizer)):
            continue
        try:
            total += _first_step_bytes(optimizer)
        except Exception as exc:  # of an optimizer's code, which may need real numbers
            log.warning(
                "memstore prepare(): the %s has not stepped, and the bytes that it will keep are not known (%s): the "
                "first put after its step claims what is missing, which takes seconds; prepare after the first step",
                type(optimizer).__name__, exc,
            )  # fmt: skip
    return total


def _optimizers(state: Any) -> Iterator[torch.optim.Optimizer]:
    if isinstance(state, torch.optim.Optimizer):
        yield state
    elif isinstance(state, dict | list | tuple):
        for each in state.values() if isinstance(state, dict) else state:
            yield from _optimizers(each)
    elif isinstance(inner := getattr(state, "optimizer", None), torch.optim.Optimizer):  # a NamedOptimizer, a schedule
        yield inner


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (param for group in optimizer.param_groups for param in group["params"])


def _first_step_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return what a new optimizer of this kind keeps after a step with parameters that have a shape and no memory."""
    kind: Any = type(optimizer)
    if not kind.__module__.startswith("torch.optim."):
        raise TypeError("its class is not one of torch.optim's")
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        trained = [param for param in group["params"] if param.requires_grad]
        local = [subclasses.local_tensor(param) if subclasses.is_dtensor(param) else param for param in trained]
        kept = {key: False if key in _KINDS_OF_STEP else group[key] for key in group if key != "param_names"}
        groups.append({**kept, "params": [torch.empty_like(param, device="meta") for param in local]})
    other = kind([group for group in groups if group["params"]])
    for param in _parameters(other):
        param.requires_grad_()
        param.grad = torch.empty_like(param)
    with torch.no_grad():
        inspect.unwrap(kind.step)(other)  # without hooks
    tensors = [value for entry in other.state.values() for value in entry.values() if isinstance(value, torch.Tensor)]
    return sum(-(-each.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for each in tensors)

"""A rank's room: the memory that the controller reserves on the hosts for its puts (R9, R10).

    asked --all ranks asked, every host grew and pre-faulted its arena--> claimed --own pages entered--> ready
      '--some host has no room, a newer attempt, no answer in time--> failed, on all ranks alike

The first put of an attempt claims it, by a round of all ranks, or `store.prepare` does before; more is claimed in the
background when the state has grown. Holders grow and connect, the link's threads enter pages and follow it.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import torch

from memstore.config import Config, check_seconds
from memstore.core.wire.calls import ReserveRoom
from memstore.core.wire.replies import Noted
from memstore.errors import ClosedError, GrowthRefused, MemstoreError, PeerTimeout
from memstore.shell.codec.interpreter import waiting
from memstore.shell.rank.collective import CALL_SLACK_S, RollCall
from memstore.shell.rank.holder_link import HolderLink
from memstore.shell.tensors import subclasses
from memstore.shell.threads import Answer, ProgressLog, answer_of, is_answered

log = logging.getLogger("memstore")
WAITED_S = 1.0  # a first put that waits longer for its room says how not to
ALIGNMENT_BYTES = 64  # of a tensor in a put, at most
_KINDS_OF_STEP = ("foreach", "fused", "capturable", "differentiable")  # none of them changes what is kept


class PutPreparation:
    """What `store.prepare` returns.

    Attributes: nbytes (of one put, in whole chunks).
    """

    def __init__(self, link: HolderLink, request: ReserveRoom, timeout_s: float) -> None:
        """It asks for the room that `request` names in `begin`; hosts have `timeout_s` to make it."""
        self.slots_count = request.slots
        self.nbytes = self.slots_count * link.welcome.chunk_bytes
        self._link, self._request, self._timeout_s = link, request, timeout_s
        self._began_s = time.monotonic()
        self._claimed_s = self._ready_s = 0.0  # how long each took from the beginning; 0: it is not over
        self._log, self._entered_count = ProgressLog(f"{link.job} rank {link.rank}: preparing puts", self.nbytes), 0
        self._answer: Future[Noted] | None = None  # None: `begin` has not asked yet
        self._over: Future[None] = Answer()  # ready, or the error

    def begin(self) -> PutPreparation:
        """Send the request."""
        self._answer = self._link.call_soon(self._request, self._on_answer)
        return self

    def __repr__(self) -> str:
        return f"PutPreparation({self.nbytes} bytes, {self._words()}, {self.seconds:.2f} s)"

    @property
    def is_ready(self) -> bool:
        """Return whether by now a put finds all of it warm."""
        return self._over.done() and self._over.exception() is None

    @property
    def has_failed(self) -> bool:
        """Return whether by now it cannot become ready; `wait` says why."""
        if self._answer is None:  # a signal's handler ended `begin` by an exception
            return True
        return any(each.done() and each.exception() is not None for each in (self._over, self._answer))

    @property
    def seconds(self) -> float:
        """The seconds it took, or has taken so far."""
        return self._ready_s or time.monotonic() - self._began_s

    @property
    def cost(self) -> str:
        """Return the line for the log that says what it took, once it is ready."""
        return (
            f"memstore {self._link.job} rank {self._link.rank}: ready for puts of {self.nbytes / 1e9:.3g} GB · hosts "
            f"{self._claimed_s:.2f} pages {self._ready_s - self._claimed_s:.2f} s, once"
        )

    def wait(self, timeout_s: float | None = None) -> PutPreparation:
        """Wait until it is ready; the log says for whom.

        Args:
            timeout_s: None: as long as the store waits for its hosts and ranks, `connect_timeout_s` each.

        Raises:
            CapacityError: A host has no room; on all ranks alike, or GrowthRefused where not all asked (R10).
            CommitError: The job has steps that this attempt has not asked for, or could not load (R19).
            GatherTimeout: Not every rank prepared or put.
            FencedError, ClosedError: It cannot become ready any more.
            TimeoutError: It was not ready within `timeout_s`; it goes on.
        """
        limit_s = 2 * self._timeout_s if timeout_s is None else check_seconds("timeout_s", timeout_s)
        until_s = time.monotonic() + limit_s
        if not (self._is_claimed(limit_s) and is_answered(self._over, max(0.0, until_s - time.monotonic()))):
            raise TimeoutError(
                f"not ready after {limit_s:g} s, {self._words()}: it goes on, wait longer with timeout_s=, or put: "
                "the first put waits for it"
            )
        answer_of(self._over)
        return self

    def wait_claimed(self) -> None:
        """Wait until every host has reserved the room that a first put needs before it takes slots. Errors as `wait`.

        Raises:
            PeerTimeout: The controller has not answered.
        """
        if not self._is_claimed(self._timeout_s):
            if self._answer is not None:
                self._link.forget_call(self._answer)
            raise PeerTimeout(
                f"reserve of job {self._link.job!r} was not answered within {self._timeout_s:g} s: is the controller "
                f"running? ({self._link.commands('`memstore status`')})",
                operation="reserve",
                waited_s=self._timeout_s,
                limit_s=self._timeout_s,
            )

    def _is_claimed(self, limit_s: float) -> bool:
        assert self._answer is not None
        ends: list[Future[Any]] = [self._answer, self._over]
        RollCall(self._link, self._request, self._timeout_s).wait(ends, limit_s)
        for end in ends:
            if end.done():
                answer_of(end)
        return any(end.done() for end in ends)

    def say_waited(self, waited_s: float) -> None:
        """Log, on rank 0, the wait of a first put and how to have it done before training."""
        if waited_s >= WAITED_S and self._link.rank == 0:
            log.warning(
                "memstore %s: the first put blocked training for %.1f s while %.1f GiB a rank were claimed for it and "
                "later ones: store.prepare(state) before the loop does this in the background",
                self._link.job,
                waited_s,
                self.nbytes / (1 << 30),
            )

    def cancel(self, error: MemstoreError) -> None:
        """Drop the preparation: a newer attempt has opened, or the store closes."""
        if self._answer is not None:
            self._link.forget_call(self._answer)
        self._end(error)

    # -- events of the link -----------------------------------------------------------------------

    def _on_answer(self, answer: Future[Noted]) -> None:
        error = answer.exception()
        if error is not None:
            self._end(error)
            return
        self._claimed_s = time.monotonic() - self._began_s
        self.look()

    def look(self) -> None:
        """Look whether a put's slots are here with their pages entered, and none of a grant is still to be."""
        leases = self._link.leases
        with leases.changed:
            count, self._log.total_bytes = leases.entered_count(), len(leases.tenants) * self._link.welcome.chunk_bytes
            is_ready = bool(self._claimed_s) and len(leases.tenants) == count >= self.slots_count
        self._log.add((count - self._entered_count) * self._link.welcome.chunk_bytes)
        self._entered_count = count
        if is_ready:  # after the log's last line: who waits goes on now
            self._end(None)

    def _end(self, error: BaseException | None) -> None:
        with self._link.leases.changed:
            if self._over.done():
                return
            self._ready_s = time.monotonic() - self._began_s
            if error is None:
                log.info("%s", self.cost)
                self._over.set_result(None)
            else:
                log.info("memstore %s rank %d: not prepared: %s", self._link.job, self._link.rank, error)
                self._over.set_exception(error)

    def _words(self) -> str:
        if self._over.done():
            return "ready" if self.is_ready else f"failed: {self._over.exception()}"
        if self._claimed_s:
            return f"{self._link.leases.entered_count()} of {self.slots_count} slots are leased, their pages entered"
        return "waiting for all ranks and hosts"


class Room:
    """What this rank has reserved, in the present attempt."""

    def __init__(self, link: HolderLink, config: Config) -> None:
        self._link, self._config, self._chunk_bytes = link, config, link.welcome.chunk_bytes
        self._slots = 0  # reserved for one put
        self._is_claimed = False  # by the round of the first put; later ones do not wait
        self._preparation: PutPreparation | None = None

    def begin_attempt(self) -> None:
        """Nothing is reserved any more."""
        self._slots, self._is_claimed = 0, False
        self.close(ClosedError("the attempt that was prepared for is over"))

    def close(self, error: MemstoreError) -> None:
        """Give the preparation up that is under way."""
        preparation, self._preparation = self._preparation, None
        if preparation is not None:
            preparation.cancel(error)

    def on_slots(self) -> None:
        """Slots that were leased are entered."""
        if (preparation := self._preparation) is not None:
            preparation.look()

    def prepare(self, nbytes: int) -> PutPreparation:
        """Begin the preparation of a put of `nbytes`, or return the one under way or done for as much (R10).

        Waits for a smaller one that is under way to end: a rank has one reservation call at a time.
        """
        count = max(1, -(-nbytes // self._chunk_bytes))
        known = self._preparation
        if known is not None and not known.has_failed:
            if count <= known.slots_count:
                return known
            with contextlib.suppress(MemstoreError):  # if the larger one fails too, it says why, on all ranks
                known.wait_claimed()
        count = max(count, self._slots)  # a smaller state gives nothing back before the attempt ends
        request = ReserveRoom(**self._link.who(), slots=count)
        self._preparation = PutPreparation(self._link, request, self._config.connect_timeout_s + CALL_SLACK_S)
        return self._preparation.begin()

    def reserve(self, count: int, growth_s: float) -> str:
        """Have `count` slots reserved, or return why the step is to be skipped, else "".

        Args:
            growth_s: Longest wait for more than was reserved; without it such a step is skipped (R11).

        Raises:
            As PutPreparation.wait, at the first put, whose room a collective round claims (R10).
        """
        if 0 < self._slots >= count:
            return ""
        known = self._preparation
        if known is not None and known.is_ready and count <= known.slots_count:
            self._slots, self._is_claimed = known.slots_count, True
            return ""
        if self._is_claimed:
            grown = self._claim(count)
            with waiting():
                if growth_s and is_answered(grown, growth_s) and grown.exception() is None:
                    self._grown(count, None)
                    return ""
            return f"the state has grown from {self._slots} to {count} chunks: room is being claimed"
        began_s = time.monotonic()
        try:
            with waiting():
                preparation = self.prepare(count * self._chunk_bytes)
                preparation.wait_claimed()
        except GrowthRefused as exc:
            # An exception on this rank only would end the whole job, so skip the step.
            self._slots, self._is_claimed = known.slots_count if known and known.is_ready else 0, True
            return str(exc)
        self._slots, self._is_claimed = preparation.slots_count, True
        with waiting():  # the grant follows the answer; this put may wait for it beyond the stall budget
            self._link.leases.wait_free(count, self._config.connect_timeout_s)
        preparation.say_waited(time.monotonic() - began_s)
        return ""

    def outgrown(self, count: int) -> None:
        """Claim what a put took beyond what its state was counted for; else the next one would lack it."""
        if count > self._slots:
            self._claim(count)

    def _claim(self, count: int) -> Future[Noted]:
        request = ReserveRoom(**self._link.who(), slots=count)
        return self._link.call_soon(request, lambda answer: self._grown(count, answer.exception()))

    def _grown(self, count: int, error: BaseException | None) -> None:
        if error is None:
            self._slots = max(count, self._slots)
        else:
            link = self._link
            log.warning("memstore %s rank %d: no room for the grown state: %s", link.job, link.rank, error)


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
                type(optimizer).__name__,
                exc,
            )
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

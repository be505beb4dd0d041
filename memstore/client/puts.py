"""The put side of one rank's store: what becomes of a step that training wants stored (R10, R11, R12).

begun --reserved, slots taken--> copied --submitted--> the holder's; its levels come back as events
  '--none free in time, or not copied--> skipped: the controller is notified, and all ranks skip the step
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from memstore.client.checkpoint import shown_paths
from memstore.client.overlapped_copy import Overlap
from memstore.client.prepare import Room
from memstore.client.put import Put
from memstore.client.shared_shard import SharedShard
from memstore.client.steps import STEPS_GROW, Steps
from memstore.client.ticket import TERMINAL, Ticket
from memstore.config import Config
from memstore.core.wire.orders import StepLevel
from memstore.core.wire.rank_messages import PutTerms, PutWaiting
from memstore.core.wire.replies import Joined
from memstore.errors import ClosedError, CommitError, FencedError, StepConflict
from memstore.shell.codec.encode import PlanMemory, StatePlan, cuda_device_of, plan_digest
from memstore.shell.codec.interpreter import copying, waiting
from memstore.shell.codec.nonfinite import Nonfinite
from memstore.shell.codec.plain_places import copies
from memstore.shell.rank.holder_link import HolderLink
from memstore.shell.rank.leases import OPEN, OVER
from recovery.inventory import ShardId

if TYPE_CHECKING:
    import torch

log = logging.getLogger("memstore")


class Puts:
    """All puts of one store. Used by one thread, but for the events of the link."""

    def __init__(self, link: HolderLink, config: Config, *, world_size: int) -> None:
        self.link, self.config, self.world_size = link, config, world_size
        self.chunk_bytes = link.welcome.chunk_bytes
        self.steps = Steps(link)
        self.room = Room(link, config)
        self.overlap = Overlap(config.stall_budget_s)
        self.shared_shard: SharedShard | None = None
        self._open: list[Put] = []  # begun, not submitted yet
        self._unusable = ""  # why the state that a load was to fill holds no step; "": none failed
        self._plans: dict[str, PlanMemory] = {}  # of the state, and of rank_state

    @property
    def job(self) -> str:
        """The job's name."""
        return self.link.job

    @property
    def rank(self) -> int:
        """The rank in the present attempt."""
        return self.link.rank

    def begin_attempt(self, joined: Joined) -> None:
        """Take the answer of a join or a rewind."""
        self.steps.begin_attempt(joined)
        self.shared_shard = SharedShard.joined(joined)
        self.room.begin_attempt()
        self._abandon_open()

    def close(self) -> None:
        """Give back the slots of puts that were begun and not ended."""
        self.room.close(ClosedError("the attempt that was prepared for is over"))
        self._abandon_open()

    def _abandon_open(self) -> list[Put]:
        """Abandon what was begun; return that of it which was not over."""
        left = [put for put in self._open if put.is_open]
        for put in left:
            put.abandon()
        self._open = [put for put in left if put.is_open]  # copied late
        return left

    # -- puts ---------------------------------------------------------------------------------

    @copying()  # until it has let go of its plan
    def put(
        self,
        step: int,
        state: Any,
        timeout_s: float | None,
        overlap: bool | Iterable[torch.Tensor] = False,
        rank_state: Any = None,
    ) -> Ticket:
        """Do what `Store.put` promises."""
        began_s = time.monotonic()
        ticket = self.steps.same(step)
        if ticket is not None:
            self.overlap.wait()  # a fence, as every put
            return self._put_again(ticket, state, rank_state)
        memory = self.overlap.steady_memory(overlap)
        plan = self.planned(state, rank_state)
        put = self._new(step, plan.nbytes, began_s, plan.shared_chunks)
        try:
            self._begin(put, 0, timeout_s, 0.0)
            if put.is_open and (memory is None or not self.overlap.copy(put, plan, memory)):
                put.copy(plan)
        except BaseException:
            if not put.is_passed_on:
                self.steps.forget(step)
            raise
        finally:
            # Must be first, and without a call, so that an exception from a signal handler cannot leave slots taken:
            # from here on those of a put that is not passed on are free.
            if put.state is OPEN and not put.is_late:
                put.state = OVER
            put.ticket.stall_s = time.monotonic() - began_s
        return put.ticket

    def _put_again(self, ticket: Ticket, state: Any, rank_state: Any) -> Ticket:
        """Return the newest step's ticket to a put of the same state; of a step that was given up, to any.

        Raises:
            StepConflict: The state is another one: this step has its bytes, and no second ones.
        """
        if ticket.level in TERMINAL:
            return ticket
        plan = self.planned(state, rank_state)
        with contextlib.suppress(CommitError, TimeoutError), waiting():
            ticket.wait("sealed", self.config.stall_budget_s)  # its holder names the digest then
        shard = ShardId(self.job, self.link.attempt, ticket.step, self.rank)
        if ticket.level in TERMINAL or plan_digest(plan, shard, self.world_size, self.chunk_bytes) == ticket.digest:
            return ticket
        what = "with another state" if ticket.digest else "and is not sealed yet, so that the states cannot be compared"
        raise StepConflict(
            f"job {self.job!r} rank {self.rank}: step {ticket.step} was put already, {what}: {ticket!r}. {STEPS_GROW}",
            step=ticket.step,
            last_step=self.steps.last,
        )

    def planned(self, state: Any, rank_state: Any) -> StatePlan:
        """Lay out what this rank puts of it; for CUDA tensors slots are pinned from now on. UnsupportedState."""
        plan = (
            self._plan(state, "state")
            if self.shared_shard is None
            else self.shared_shard.plan(state, rank_state, self.chunk_bytes, self._plan)
        )
        device = cuda_device_of(plan)
        if device is not None:
            self.link.leases.mapping.pin_for(device, self.link.outbox.put)
        return plan

    def _plan(self, state: object, name: str) -> StatePlan:
        if name not in self._plans and (paths := list(copies(state, name))):
            log.warning(
                "memstore %s rank %d: %s: state_dict() made that. A put stores what it was when it was made, and a "
                "get(into=) fills it and not the object: give the object itself",
                self.job,
                self.rank,
                shown_paths(paths),
            )
        return self._plans.setdefault(name, PlanMemory()).plan(state, name)

    def begin(self, step: int, nbytes: int, *, began_s: float, extra_slots: int = 0, growth_s: float = 0.0) -> Put:
        """Take slots for a put whose bytes the caller copies and submits itself; it is over if the step is skipped.

        Args:
            began_s: When the put began to block training, monotonic.
            extra_slots: Slots beyond `nbytes`, for bytes that are known only later.
            growth_s: Longest wait for more room than the rank has claimed so far; without it such a step is skipped.

        Raises:
            What put() raises; nothing was copied then.
        """
        put = self._new(step, nbytes, began_s)
        try:
            self._begin(put, extra_slots, None, growth_s)
        except BaseException:
            put.state = OVER
            self.steps.forget(step)
            raise
        return put

    def _new(self, step: int, nbytes: int, began_s: float, shared_chunks: int | None = None) -> Put:
        if self.link.closed.is_set():
            raise ClosedError(f"the store of job {self.job!r} is closed: connect again")
        self.check_usable()
        known = self.steps.same(step)
        if known is not None:
            raise StepConflict(f"job {self.job!r} rank {self.rank}: step {step} was put already: {known!r}", step=step)
        terms = PutTerms(
            attempt=self.link.attempt,
            step=step,
            world_size=self.world_size,
            shared_chunks=shared_chunks,
            began_s=began_s,
        )
        put = Put(self.link, self.steps, self.steps.new(step, nbytes, began_s), terms)
        if self.config.on_nonfinite != "ignore":
            put.look, put.skips_nonfinite = Nonfinite(), self.config.on_nonfinite == "skip"
        return put

    def check_usable(self) -> None:
        """Raise CommitError while the state of this rank may be half written by a load that failed."""
        if self._unusable:
            raise CommitError(
                f"job {self.job!r} rank {self.rank}: a load failed here, and nothing is put of what it left behind "
                f"({self._unusable}). Load again on every rank, or connect(..., fresh=True) to start over"
            )

    def loaded(self, problem: str) -> None:
        """Take why a load left this rank's state half written, "" when one has filled it."""
        self._unusable = problem

    def _begin(self, put: Put, extra_slots: int, timeout_s: float | None, growth_s: float) -> None:
        """Take slots for a put, or skip it: it is over then."""
        self.overlap.wait()
        ticket, count = put.ticket, -(-put.ticket.nbytes // self.chunk_bytes) + extra_slots
        self.steps.add(ticket)
        self.steps.catch_up(ticket)
        if not ticket.is_over and (why := self.room.reserve(count, growth_s)):
            self.steps.skip(ticket, why)
        if not ticket.is_over:
            budget_s = self.config.stall_budget_s if timeout_s is None else timeout_s
            is_taken = put.extend(count, 0.0)
            if not is_taken:
                # Slots are freed by commits: let the holder stop holding copies back.
                self.link.notify(PutWaiting(step=put.step))
                is_taken = put.extend(count, budget_s) or (self._give_up_open() and put.extend(count, budget_s))
            if self.link.fenced:
                raise self.link.fenced_error()
            if not is_taken:
                why = f"no free slots within {budget_s:g} s: {self.steps.slots_are_held_by(put.step)}"
                self.steps.skip(ticket, why)
        if ticket.is_over:
            put.state = OVER
        self._open = [*(other for other in self._open if other.is_open), put]

    def _give_up_open(self) -> bool:
        """Give up puts that an adapter began and never submitted, such as of a save that failed elsewhere."""
        stale = self._abandon_open()
        for put in stale:
            if not put.ticket.is_over:
                # Failed, not skipped: only that step is given up, and not the one for which the slots are needed.
                self.steps.skip(put.ticket, "it was begun, not ended, and its slots were needed", "failed")
        return bool(stale)

    # -- events of the link ---------------------------------------------------------------------

    def on_level(self, event: StepLevel) -> None:
        """Raise a ticket; open puts that can never be committed give their slots back."""
        self.steps.on_level(event)
        is_committed = event.level in ("committed", "durable")
        for put in self._open:
            if (put.step == event.step and event.level in TERMINAL) or (is_committed and put.step < event.step):
                put.abandon_unwritten()

    def on_fenced(self, error: FencedError) -> None:
        """Fail what this attempt has put, and what it prepares."""
        self.steps.fail_all(str(error))
        self.room.close(error)

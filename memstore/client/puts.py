"""The put side of one rank's store: tickets, room, skips (R10, R11, R12).

begun --room--> copied --submitted--> the holder's; its levels come back as events
  '--no room in time, or not copied--> skipped: the controller is notified, and all ranks skip the step
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from memstore.client.checkpoint import shown_paths
from memstore.client.overlapped_copy import Overlap
from memstore.client.pending_put import PendingPut
from memstore.client.prepare import PutPreparation
from memstore.client.shared_shard import SharedShard
from memstore.client.ticket import CATCHING_UP, TERMINAL, UNCOMMITTED, SkippedPuts, Ticket, check_step
from memstore.config import Config
from memstore.core.wire.calls import ReserveRoom, RetireStep, SkipStep
from memstore.core.wire.orders import StepLevel
from memstore.core.wire.rank_messages import PutWaiting, RoomGrown
from memstore.core.wire.replies import Joined, Noted
from memstore.errors import ClosedError, CommitError, GrowthRefused, MemstoreError, StepConflict
from memstore.shell.codec.encode import PlanMemory, StatePlan, copy_into, cuda_device_of, plan_digest
from memstore.shell.codec.interpreter import copying, waiting
from memstore.shell.codec.plain_places import copies
from memstore.shell.rank.holder_link import HolderLink
from memstore.shell.threads.waits import is_answered
from recovery.inventory import ShardId

if TYPE_CHECKING:
    import torch

log = logging.getLogger("memstore")
TICKETS_KEPT = 64
STEPS_GROW = (
    "Steps must strictly increase through the whole run: where a counter begins again in each epoch, put "
    "step + epoch * steps_per_epoch; to go back use store.rewind(step)"
)
RESERVE_SLACK_S = 10.0  # the controller's own deadline comes first and names the missing ranks


class Puts:
    """All puts of one store. Used by one thread, but for the events of the link."""

    def __init__(self, link: HolderLink, config: Config, *, world_size: int) -> None:
        self.link, self.config, self.world_size = link, config, world_size
        self.chunk_bytes = link.welcome.chunk_bytes
        self.tickets: dict[int, Ticket] = {}
        self._lock = threading.RLock()  # of the tickets; a signal's handler may put
        self._open: list[PendingPut] = []  # begun, not submitted yet
        self._skipping: Future[Any] | None = None
        self._reserved_slots = 0
        self._has_room = False  # some put of this attempt had
        self._preparation: PutPreparation | None = None
        self._resume_step = 0
        self.last_step = self._floor = -1
        self.overlap = Overlap(self)
        self.shared_shard: SharedShard | None = None
        self._unusable = ""  # why the state that a load was to fill holds no step; "": none failed
        self._plans: dict[str, PlanMemory] = {}  # of the state, and of rank_state
        self.skipped = SkippedPuts(link)

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
        self._resume_step = joined.resume_step
        restored = joined.restored_step
        self.last_step = self._floor = int(restored) if restored is not None else -1
        self._reserved_slots, self._has_room = 0, False
        self.skipped.begin()
        self.shared_shard = SharedShard.joined(joined)
        self.close()

    def go_on_from(self, step: int) -> None:
        """Note the step that a get restored."""
        self.last_step = self._floor = step

    def newest_first(self) -> list[Ticket]:
        """Return the tickets kept."""
        with self._lock:
            return [ticket for _, ticket in sorted(self.tickets.items(), reverse=True)]

    def wait_committed(self, step: int, limit_s: float = RESERVE_SLACK_S) -> None:
        """Wait for the commit of a step, if its ticket is known; CommitError, TimeoutError."""
        with self._lock:
            ticket = self.tickets.get(step)
        if ticket is not None:
            ticket.wait("committed", limit_s)

    def close(self) -> None:
        """Give back the slots of puts that were begun and not ended."""
        preparation, self._preparation = self._preparation, None
        if preparation is not None:
            preparation.cancel()
        for room in self._open:
            room.abandon()
        self._open = []

    # -- puts ---------------------------------------------------------------------------------

    def put(
        self, step: int, state: Any, timeout_s: float | None, overlap: bool | Iterable[torch.Tensor] = False,
        rank_state: Any = None,
    ) -> Ticket:  # fmt: skip
        """Do what `Store.put` promises."""
        with copying():  # until `_put` has let go of its plan
            return self._put(step, state, timeout_s, overlap, rank_state)

    def _put(
        self, step: int, state: Any, timeout_s: float | None, overlap: bool | Iterable[torch.Tensor], rank_state: Any
    ) -> Ticket:
        began_s = time.monotonic()
        ticket = self._same_step(step)
        if ticket is not None:
            self.overlap.wait()  # a fence, as every put
            return self._put_again(ticket, state, rank_state)
        memory = self.overlap.steady_memory(overlap)
        plan = self.planned(state, rank_state)
        room = self._open_put(step, plan.nbytes, began_s)
        try:
            self._begin(room, 0, timeout_s, 0.0)
            if not room.is_over and (memory is None or not self.overlap.copy(room, plan, memory)):
                self._copy(room, plan)
        except BaseException:
            if not room.is_passed_on:
                self._forget(step)
            raise
        finally:
            # Must be the first statement, so that an exception from a signal handler cannot leave slots taken: from
            # here on unpassed slots are free.
            room.is_over = room.is_over or not room.is_filled_late
            room.ticket.stall_s = time.monotonic() - began_s
        return room.ticket

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
            step=ticket.step, last_step=self.last_step,
        )  # fmt: skip

    def planned(self, state: Any, rank_state: Any) -> StatePlan:
        """Lay out what this rank puts of it; for CUDA tensors slots are pinned from now on. UnsupportedState."""
        plan = (
            self._plan(state, "state")
            if self.shared_shard is None
            else self.shared_shard.plan(state, rank_state, self.chunk_bytes, self._plan)
        )
        device = cuda_device_of(plan)
        if device is not None:
            self.link.mapping.pin_for(device, self.link.outbox.put)
        return plan

    def _plan(self, state: object, name: str) -> StatePlan:
        if name not in self._plans and (paths := list(copies(state, name))):
            log.warning(
                "memstore %s rank %d: %s: state_dict() made that. A put stores what it was when it was made, and a "
                "get(into=) fills it and not the object: give the object itself",
                self.job, self.rank, shown_paths(paths),
            )  # fmt: skip
        return self._plans.setdefault(name, PlanMemory()).plan(state, name)

    def begin(
        self, step: int, nbytes: int, *, began_s: float, extra_slots: int = 0, timeout_s: float | None = None,
        growth_s: float = 0.0,
    ) -> tuple[Ticket, PendingPut | None]:  # fmt: skip
        """Take room for a put whose bytes the caller copies and submits itself.

        Args:
            began_s: When the put began to block training, monotonic.
            extra_slots: Slots beyond `nbytes`, for bytes that are known only later.
            timeout_s: Longest wait for room instead of `stall_budget_s`.
            growth_s: Longest wait for more room than the rank has claimed so far; without it such a step is skipped.

        Returns:
            The put's ticket, and its room, or None if the step was skipped (R12).

        Raises:
            What put() raises; nothing was copied then.
        """
        room = self._open_put(step, nbytes, began_s)
        try:
            self._begin(room, extra_slots, timeout_s, growth_s)
        except BaseException:
            room.is_over = True
            self._forget(step)
            raise
        return room.ticket, None if room.is_over else room

    def _open_put(self, step: int, nbytes: int, began_s: float) -> PendingPut:
        if self.link.closed.is_set():
            raise ClosedError(f"the store of job {self.job!r} is closed: connect again")
        self.check_usable()
        known = self._same_step(step)
        if known is not None:
            raise StepConflict(f"job {self.job!r} rank {self.rank}: step {step} was put already: {known!r}", step=step)
        return PendingPut(self.link, Ticket(step, nbytes, began_s, self.link.commands), world_size=self.world_size)

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

    def _begin(self, room: PendingPut, extra_slots: int, timeout_s: float | None, growth_s: float) -> None:
        """Take room for a put, or skip it: it is over then."""
        self.overlap.wait()
        self._know(room.ticket)
        self._take_room(room, -(-room.ticket.nbytes // self.chunk_bytes) + extra_slots, timeout_s, growth_s)
        self._open = [*(r for r in self._open if not r.is_over), room]

    def _copy(self, room: PendingPut, plan: StatePlan) -> None:
        try:
            with room.lock:
                digests = copy_into(plan, room.views(), self.chunk_bytes)
        except BaseException as exc:
            room.abandon()
            self.skip(room.ticket, f"its state could not be copied: {exc!r}", "failed")
            raise
        self.submit(room, plan, digests)

    def submit(self, room: PendingPut, plan: StatePlan, digests: Sequence[bytes] | None = None) -> None:
        """Queue a copied state for the holder, or skip its step if the slots are not ours any more (R8)."""
        if not room.submit(plan.layout, plan.nbytes, plan.shared_chunks, digests):
            self.skip(room.ticket, "this host's holder restarted while the state was copied")

    def skip(self, ticket: Ticket, why: str, level: str = "skipped") -> None:
        """Give a step up; collective: the controller abandons it everywhere (R12)."""
        if ticket.raise_level(level, why):
            self.skipped.add(ticket)

        def resume(future: Any) -> None:
            if future.exception() is None:
                self._resume_step = max(self._resume_step, future.result().resume)

        request = SkipStep(
            **self.who(), step=ticket.step, why=why, stall_s=time.monotonic() - ticket.began_s,
            is_failed=level == "failed",
        )  # fmt: skip
        self._skipping = self.link.call_soon(request, resume)

    def retire(self, ticket: Ticket, why: str) -> None:
        """Give up a step that is torn, and if it is committed, now or by then, have no get return it (R12, R25)."""
        ticket.mark_torn(why)
        log.error(
            "memstore %s rank %d: step %d is torn and will not be restored: %s", self.job, self.rank, ticket.step, why
        )
        self.skip(ticket, why, "failed")
        self.link.call_soon(
            RetireStep(job=self.job, attempt=self.link.attempt, step=ticket.step, reason=why, is_torn=True)
        )

    def give_up(self, step: int, why: str) -> None:
        """Skip a step that this rank will not put, so that what other ranks put of it frees their room (R12).

        Waits, at most `stall_budget_s`, until the controller knows, else ranks that put the next step earlier would
        skip that one.
        """
        with contextlib.suppress(StepConflict):  # an older step takes no room any more
            ticket = self._same_step(step) or self._know(Ticket(step, 0, time.monotonic(), self.link.commands))
            if not ticket.is_over:
                self.skip(ticket, why, "failed")
        if self._skipping is not None:
            is_answered(self._skipping, self.config.stall_budget_s)

    # -- tickets ------------------------------------------------------------------------------

    def _same_step(self, step: int) -> Ticket | None:
        """Return the ticket of the newest step, None for a newer one; StepConflict for an older one."""
        check_step(step)
        with self._lock:
            known = self.tickets.get(step) if step == self.last_step else None
        if known is None and step <= self.last_step:
            raise StepConflict(
                f"job {self.job!r} rank {self.rank}: step {step} does not follow step {self.last_step}. {STEPS_GROW}",
                step=step, last_step=self.last_step,
            )  # fmt: skip
        return known

    def _know(self, ticket: Ticket) -> Ticket:
        with self._lock:
            self.tickets[ticket.step] = ticket
            for old in sorted(self.tickets)[:-TICKETS_KEPT]:
                del self.tickets[old]
        self.last_step = ticket.step
        return ticket

    def _forget(self, step: int) -> None:
        with self._lock:
            self.tickets.pop(step, None)
            self.last_step = max((s for s in self.tickets if s < step), default=self._floor)

    def on_level(self, event: StepLevel) -> None:
        """Raise a ticket; supersede older ones that can never rise."""
        step, level = event.step, event.level
        with self._lock:
            ticket = self.tickets.get(step)
            older = [t for s, t in self.tickets.items() if s < step]
        self._resume_step = max(self._resume_step, event.resume)
        if ticket is not None:
            ticket.digest = event.digest or ticket.digest
            if ticket.raise_level(level, event.reason, degraded=event.degraded) and level == "skipped":
                self.skipped.add(ticket)
            elif level == "skipped" and event.reason:
                self.skipped.why = event.reason  # of a step that this rank gave up itself: the controller knows more
        for room in self._open:
            if room.step == step and level in TERMINAL:  # it will not be submitted any more
                room.abandon_unwritten()
        if level in ("committed", "durable"):
            self.skipped.committed()
            for old in older:
                if old.level not in ("committed", "durable"):
                    old.raise_level("superseded", f"step {step} was committed")
            for room in self._open:
                if room.step < step:
                    room.abandon_unwritten()

    def fail_all(self, why: str, *, forget: bool = False) -> None:
        """Fail all earlier puts: they can reach no level any more."""
        with self._lock:
            tickets = list(self.tickets.values())
            if forget:
                self.tickets = {}
        for ticket in tickets:
            ticket.raise_level("failed", why)

    # -- room ---------------------------------------------------------------------------------

    def _take_room(self, room: PendingPut, count: int, timeout_s: float | None, growth_s: float) -> None:
        """Take leased slots, or skip the step."""
        ticket = room.ticket
        if ticket.step < self._resume_step:
            why = f"; the newest step was given up since {self.skipped.why}" if self.skipped.why else ""
            ticket.raise_level("skipped", f"{CATCHING_UP}: all ranks put again from step {self._resume_step}{why}")
            self.skipped.add(ticket)
        elif count > self._reserved_slots or self._reserved_slots == 0:
            self._reserve(ticket, count, growth_s)
        if ticket.is_over:
            room.is_over = True
            return
        budget_s = self.config.stall_budget_s if timeout_s is None else timeout_s
        has_room = room.extend(count, 0.0)
        if not has_room:
            # Room is freed by commits: let the holder stop holding copies back.
            self.link.notify(PutWaiting(step=ticket.step))
            has_room = room.extend(count, budget_s) or (self._abandon_open() and room.extend(count, budget_s))
        if self.link.fenced_by:
            raise self.link.fenced_error()
        if not has_room:
            room.is_over = True
            self.skip(ticket, f"no room within {budget_s:g} s: {self._room_is_held_by(ticket.step)}")
        self._has_room = self._has_room or has_room

    def _room_is_held_by(self, step: int) -> str:
        """Return what a step waits for that finds no room."""
        with self._lock:
            oldest = min((s for s, t in self.tickets.items() if s < step and t.level in UNCOMMITTED), default=None)
        if oldest is None:
            return "no older step of this rank waits for a commit: copies that are sent, read or written hold its room"
        return f"step {oldest} is not committed yet"

    def _abandon_open(self) -> bool:
        """Give up puts that an adapter began and never submitted, such as of a save that failed elsewhere."""
        stale = [room for room in self._open if not room.is_over]
        for room in stale:
            room.abandon()
            if not room.ticket.is_over:
                # Failed, not skipped: only that step is given up, and not the one for which the room is needed.
                self.skip(room.ticket, "it was begun, not ended, and its room was needed", "failed")
        self._open = [room for room in stale if not room.is_over]
        return bool(stale)

    def prepare(self, nbytes: int) -> PutPreparation:
        """Begin the preparation of a put of `nbytes`, or return the one under way or done for as much (R10).

        Waits for a smaller one that is under way to end: a rank has one reservation call at a time.
        """
        count = max(1, -(-nbytes // self.chunk_bytes))
        known = self._preparation
        if known is not None and not known.has_failed:
            if count <= known.slots_count:
                return known
            with contextlib.suppress(MemstoreError):  # if the larger one fails too, it says why, on all ranks
                known.wait_claimed()
        count = max(count, self._reserved_slots)  # a smaller state gives nothing back before the attempt ends
        config = self.config
        self._preparation = PutPreparation(
            self.link, ReserveRoom(**self.who(), slots=count), self.chunk_bytes,
            versions=config.keep_steps + 1 + (config.durable is not None),
            timeout_s=config.connect_timeout_s + RESERVE_SLACK_S,
        )  # fmt: skip
        return self._preparation.begin()

    def _reserve(self, ticket: Ticket, count: int, growth_s: float) -> None:
        """Claim room: a collective round at the first put, in the background later (R10, R11)."""
        known = self._preparation
        if known is not None and known.is_ready and count <= known.slots_count:
            self._reserved_slots = known.slots_count
            return
        if not self._has_room:
            try:
                began_s = time.monotonic()
                with waiting():
                    preparation = self.prepare(count * self.chunk_bytes)
                    preparation.wait_claimed()
            except GrowthRefused as exc:
                # An exception on this rank only would end the whole job, so skip the step.
                self._reserved_slots, self._has_room = known.slots_count if known and known.is_ready else 0, True
                self.skip(ticket, str(exc))
                return
            self._reserved_slots = preparation.slots_count
            # The grant follows the answer; this first put may wait for it beyond the stall budget.
            with waiting():
                self.link.wait_free(count, self.config.connect_timeout_s)
            preparation.say_waited(time.monotonic() - began_s)
            return
        grown = self._claim(count)
        with waiting():
            if growth_s and is_answered(grown, growth_s) and grown.exception() is None:
                return self._grown(count, None)
        self.skip(ticket, f"the state has grown from {self._reserved_slots} to {count} chunks: room is being claimed")

    def outgrown(self, count: int) -> None:
        """Claim what a put took beyond the room that its state was counted for; else the next one would lack it."""
        if count > self._reserved_slots:
            self._claim(count)

    def _claim(self, count: int) -> Future[Noted]:
        request = ReserveRoom(**self.who(), slots=count)
        return self.link.call_soon(request, lambda answer: self._grown(count, answer.exception()))

    def on_room(self, event: RoomGrown) -> None:
        """Take this host's progress in making room."""
        preparation = self._preparation
        if preparation is not None:
            preparation.on_room(event)

    def _grown(self, count: int, error: BaseException | None) -> None:
        if error is None:
            self._reserved_slots = max(count, self._reserved_slots)
        else:
            log.warning("memstore %s rank %d: no room for the grown state: %s", self.job, self.rank, error)

    def who(self) -> dict[str, Any]:
        """Return the fields of a request that say which rank asks."""
        return {"job": self.job, "attempt": self.link.attempt, "rank": self.rank}

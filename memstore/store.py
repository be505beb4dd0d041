"""Store: what a training loop calls. put copies into leased slots and returns; get restores one whole step (DESIGN 5).

Read `shell/rank_link.py` for the other end of every line here, `core/catalog.py` for who decides.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from types import TracebackType
from typing import Any

from memstore.checkpoint import Checkpoint, StepInfo, open_shard, restore_line, step_infos
from memstore.config import Config, check_name
from memstore.core.manifest import decode_manifest
from memstore.errors import (
    ClosedError,
    FencedError,
    MemstoreError,
    RecoveryError,
    StepConflict,
)
from memstore.shell.collective import CALL_SLACK_S, collective
from memstore.shell.launch import Launch
from memstore.shell.rank_link import RankLink
from memstore.shell.state_decode import check_into
from memstore.shell.state_encode import StatePlan, copy_into, plan_state
from memstore.ticket import Ticket

log = logging.getLogger("memstore")
TICKETS_KEPT = 64


class Store:
    """One rank of one attempt of a job; made by `memstore.connect`. A context manager; not thread-safe."""

    def __init__(self, link: RankLink, launch: Launch, config: Config, joined: dict[str, Any], *, job: str) -> None:
        self.job, self.world_size = job, launch.world_size
        self.config = config
        self._link = link
        self._launch = launch
        self._take_attempt(joined)
        self._chunk_bytes = int(link.welcome["chunk_bytes"])
        self._tickets: dict[int, Ticket] = {}
        self._tickets_lock = threading.Lock()
        self._reserved_slots = 0
        self._into: Any = None
        self._is_closed = False
        link.on_event = self.on_event

    def _take_attempt(self, joined: dict[str, Any]) -> None:
        self.attempt, self.rank = int(joined["attempt"]), int(joined["rank"])
        self._link.attempt, self._link.rank = self.attempt, self.rank
        self._resume_step = int(joined["resume_step"])
        restored = joined.get("restored_step")
        self._last_step = int(restored) if restored is not None else -1
        self._floor = self._last_step

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            with contextlib.suppress(MemstoreError, TimeoutError):
                self.flush(timeout_s=self.config.stall_budget_s)
        self.close()

    def __repr__(self) -> str:
        return f"Store(job={self.job!r}, attempt={self.attempt}, rank={self.rank} of {self.world_size})"

    def mesh_order(self, *, together: int = 1) -> tuple[int, ...]:
        """Renumber the ranks so that the fewest bytes move in the next get(); collective, before get() and put() (R27).

        Afterwards `self.rank` is this process's logical rank, and get() and put() are of its shard. torch.distributed
        must go by it too: start it with rank=store.rank, or let `memstore.adapters.torch.renumber` start it again;
        then build the mesh as always. (A DeviceMesh over `order` itself would not do: its groups sort their ranks.)
        Called again, or after a get or put, it returns the order that stands and changes nothing.

        Args:
            together: So many neighbouring ranks (one tensor-parallel group) are put on one host, moved bytes or not.

        Returns:
            By logical rank, the rank that the launcher gave the process that has it; equal on all ranks. The identity
            where nothing is stored, or where no other order moves fewer bytes.

        Raises:
            GatherTimeout: Not every rank called within `connect_timeout_s`.
            ConfigError: `together` does not divide the ranks of each host, or ranks disagree about it.
        """
        self._check_open()
        body = {
            "job": self.job, "attempt": self.attempt, "rank": self._launch.rank, "nonce": self._link.nonce,
            "together": together,
        }  # fmt: skip
        limit_s = self.config.connect_timeout_s + self.config.recovery_grace_s + CALL_SLACK_S
        joined = self._link.call("mesh_order", body, limit_s)
        self.rank = self._link.rank = int(joined["rank"])
        return tuple(joined["order"]) or tuple(range(self.world_size))

    # -- put ----------------------------------------------------------------------------------

    def put(self, step: int, state: Any, *, timeout_s: float | None = None) -> Ticket:
        """Copy the state into this host's memory and return; everything else happens elsewhere (R11).

        Args:
            step: >= 0 and above every step put or restored before in this lineage; the same step again
                returns its ticket.
            state: Any nesting DESIGN 5 lists.
            timeout_s: Longest wait for room instead of `stall_budget_s`.

        Returns:
            A ticket; if there was no room in time its level is "skipped" and training goes on (R12).

        Raises:
            UnsupportedState, StepConflict, ClosedError, FencedError: before anything is copied.
            CapacityError, CommitError: at the first put only, on all ranks alike (R10, R19).
        """
        began_s = time.monotonic()
        self._check_open()
        ticket = self._same_step(step)
        if ticket is not None:
            return ticket
        plan = plan_state(state)
        ticket = self._new_ticket(step, plan.nbytes, began_s)
        try:
            self._put(ticket, plan, timeout_s)
        except BaseException:
            with self._tickets_lock:
                self._tickets.pop(step, None)
            self._last_step = max((s for s in self._tickets if s < step), default=self._floor)
            raise
        finally:
            ticket.stall_s = time.monotonic() - began_s
        return ticket

    def _same_step(self, step: int) -> Ticket | None:
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 1 << 62:
            raise StepConflict(f"step {step!r} is not a step: use an int from 0 to 2**62")
        with self._tickets_lock:
            known = self._tickets.get(step)
        if known is None and step <= self._last_step:
            raise StepConflict(
                f"job {self.job!r} rank {self.rank}: step {step} does not follow step {self._last_step}: steps must "
                "strictly increase; to go back use store.rewind(step)",
                step=step, last_step=self._last_step,
            )  # fmt: skip
        return known

    def _new_ticket(self, step: int, nbytes: int, began_s: float) -> Ticket:
        ticket = Ticket(step, nbytes, began_s)
        with self._tickets_lock:
            self._tickets[step] = ticket
            for old in sorted(self._tickets)[:-TICKETS_KEPT]:
                del self._tickets[old]
        self._last_step = step
        return ticket

    def _put(self, ticket: Ticket, plan: StatePlan, timeout_s: float | None) -> None:
        if ticket.step < self._resume_step:
            ticket.rise("skipped", f"the store is catching up: all ranks put again from step {self._resume_step}")
            return
        count = -(-plan.nbytes // self._chunk_bytes)
        if count > self._reserved_slots or self._reserved_slots == 0:
            self._reserve(ticket, count)
            if ticket.is_over:
                return
        budget_s = self.config.stall_budget_s if timeout_s is None else timeout_s
        slots = self._link.acquire(count, budget_s)
        if self._link.fenced_by:
            raise self._fenced()
        if slots is None:
            self._skip(ticket, f"no room within {budget_s:g} s: older steps are not committed yet")
            return
        try:
            copy_into(plan, [self._link.view(slot) for slot in slots], self._chunk_bytes)
        except BaseException as exc:
            self._link.put_back(slots)
            self._skip(ticket, f"its state could not be copied: {exc!r}", "failed")
            raise
        body = {
            "attempt": self.attempt, "world_size": self.world_size, "layout": plan.layout, "nbytes": plan.nbytes,
            "began_s": ticket.began_s, "stall_s": time.monotonic() - ticket.began_s,  # for people
        }  # fmt: skip
        if not self._link.hand_over(ticket.step, slots, body):
            self._skip(ticket, "this host's holder restarted while the state was copied")

    def _reserve(self, ticket: Ticket, count: int) -> None:
        """Claim room: a collective round at the first put, in the background later (R10, R11)."""
        body = {"job": self.job, "attempt": self.attempt, "rank": self.rank, "slots": max(1, count)}
        if self._reserved_slots == 0:
            self._link.call("reserve", body, self.config.connect_timeout_s + CALL_SLACK_S)
            self._reserved_slots = max(1, count)
            # The grant follows the answer; this first put may wait for it beyond the stall budget.
            slots = self._link.acquire(count, self.config.connect_timeout_s)
            if slots is not None:
                self._link.put_back(slots)
            return
        self._link.call_soon("reserve", body).add_done_callback(lambda f: self._grown(count, f.exception()))
        self._skip(ticket, f"the state has grown from {self._reserved_slots} to {count} chunks: room is being claimed")

    def _grown(self, count: int, error: BaseException | None) -> None:
        if error is None:
            self._reserved_slots = count
        else:
            log.warning("memstore %s rank %d: no room for the grown state: %s", self.job, self.rank, error)

    def _skip(self, ticket: Ticket, why: str, level: str = "skipped") -> None:
        """Skipping is collective: the controller abandons the step everywhere (R12)."""
        ticket.rise(level, why)
        body = {
            "job": self.job, "attempt": self.attempt, "rank": self.rank, "step": ticket.step,
            "why": why, "stall_s": time.monotonic() - ticket.began_s,
        }  # fmt: skip

        def resume(future: Any) -> None:
            if future.exception() is None:
                self._resume_step = max(self._resume_step, int(future.result()["resume"]))

        self._link.call_soon("skip", body).add_done_callback(resume)

    # -- events of the link (reader thread) -------------------------------------------------------

    def on_event(self, body: dict[str, Any]) -> None:
        """Levels for tickets, checks for a get under way, fences."""
        if body["k"] == "level":
            self._on_level(body)
        elif body["k"] == "check":
            self._on_check(body)
        elif body["k"] == "fenced":
            with self._tickets_lock:
                tickets = list(self._tickets.values())
            for ticket in tickets:
                ticket.rise("failed", f"attempt {body['attempt']} of the job was opened")

    def _on_level(self, body: dict[str, Any]) -> None:
        step, level = int(body["step"]), str(body["level"])
        with self._tickets_lock:
            ticket = self._tickets.get(step)
            older = [t for s, t in self._tickets.items() if s < step]
        self._resume_step = max(self._resume_step, int(body.get("resume", 0)))
        if ticket is not None:
            ticket.rise(level, str(body["reason"]), degraded=bool(body["degraded"]))
        if level in ("committed", "durable"):
            for old in older:
                if old.level not in ("committed", "durable"):
                    old.rise("superseded", f"step {step} was committed")

    def _on_check(self, body: dict[str, Any]) -> None:
        error: list[str] | None = None
        try:
            if self._into is not None:
                check_into(decode_manifest(bytes(body["manifest"])).layout, self._into)
        except MemstoreError as exc:
            error = [type(exc).__name__, str(exc)]
        except Exception as exc:
            error = ["ManifestMismatch", f"into= cannot be compared: {exc!r}"]
        told = {"job": self.job, "round": body["round"], "rank": self.rank, "ok": error is None, "error": error}
        self._link.notify({"k": "checked", **told})

    # -- get ----------------------------------------------------------------------------------

    def get(
        self, step: int | None = None, *, rank: int | None = None, into: Any = None, must_exist: bool = False,
        timeout_s: float = 600.0,
    ) -> Checkpoint | None:  # fmt: skip
        """Return the newest whole step of the lineage, the same on every rank; collective (R23, R24).

        Args:
            step: Read this step instead; adopts nothing (R22).
            rank: Read one rank's shard, without a barrier (R27).
            into: Filled in place after every rank's bytes are verified (R26).
            must_exist: Raise RecoveryError instead of returning None.
            timeout_s: Deadline; GatherTimeout names the ranks that did not call.

        Returns:
            None only for a job without history.

        Raises:
            RecoveryError, WorldSizeError, ManifestMismatch, FencedError, PeerTimeout.
        """
        self._check_open()
        body: dict[str, Any] = {"job": self.job, "attempt": self.attempt, "rank": self.rank, "timeout_s": timeout_s}
        if rank is not None:
            answer = self._link.call("read", {**body, "rank": rank, "step": step}, timeout_s)
            return open_shard(self._link, answer, into)
        self._into = into
        try:
            answer = collective(self._link, "get", {**body, "step": step}, timeout_s)
        finally:
            self._into = None
        if answer["step"] is None:
            if must_exist:
                raise RecoveryError(f"job {self.job!r} has no history, and get() was called with must_exist=True")
            return None
        got = open_shard(self._link, answer, into)
        if step is None:
            self._last_step = self._floor = got.step
        if self.rank == 0:
            log.info("%s", restore_line(self.job, self.attempt, got, answer))
        return got

    def agree(self, *, timeout_s: float = 600.0) -> int | None:
        """Adopt the step that get() would return without loading its bytes; collective, the same on every rank (R27).

        For readers that take other ranks' shards with get(step, rank=) afterwards. None and the errors are get()'s.
        """
        self._check_open()
        body = {"job": self.job, "attempt": self.attempt, "rank": self.rank, "timeout_s": timeout_s, "step": None}
        answer = collective(self._link, "get", body, timeout_s)
        if answer["step"] is None:
            return None
        self._link.notify({"k": "unpin", "pin": answer["pin"]})
        self._last_step = self._floor = int(answer["step"])
        return self._last_step

    # -- the rest -----------------------------------------------------------------------------

    def latest_step(self) -> int | None:
        """The newest committed step of the lineage, for people; ranks branch on get()."""
        return max((s.step for s in self.steps() if s.committed and s.in_lineage), default=None)

    def steps(self) -> list[StepInfo]:
        """Every step the store knows of this job, newest first, for people."""
        self._check_open()
        return step_infos(self._link.call("steps", {"job": self.job}, self.config.connect_timeout_s))

    def rewind(self, step: int, *, attempt: int | None = None) -> None:
        """Go on from an older step: collective, opens a new attempt whose parent step is `step` (R22).

        Args:
            step: A committed step, in RAM or on durable storage; call `get()` for its bytes.
            attempt: The attempt that put it, where several lineages have a step of that number (`memstore ls`).

        Raises:
            RecoveryError: There is no such step, it is not committed, not whole or retired; nothing changed.
            WorldSizeError: It was put by another number of ranks.
            FencedError: A newer attempt runs, or another rank rewinds elsewhere.
        """
        self._check_open()
        body = {
            "job": self.job, "attempt": self.attempt, "rank": self.rank, "step": step, "of_attempt": attempt,
            "nonce": self._link.nonce, "key": self._launch.key, "world_size": self.world_size,
        }  # fmt: skip
        self._take_attempt(self._link.call("rewind", body, self.config.connect_timeout_s + CALL_SLACK_S))
        self._reserved_slots = 0
        with self._tickets_lock:
            tickets, self._tickets = list(self._tickets.values()), {}
        for ticket in tickets:
            ticket.rise("failed", f"the job was rewound to step {step} in attempt {self.attempt}")

    def pin(self, step: int, name: str, *, attempt: int | None = None) -> None:
        """Keep a committed step in RAM under a name, beside what `keep_steps` keeps, until `unpin` (R19).

        Any rank may call it, once for all. It survives restarts and `connect(fresh=True)`.

        Raises:
            RecoveryError: The step is not committed, or not whole in RAM.
            CapacityError: A pin takes room of its own, and there is none; nothing changed.
            ConfigError: The name is not allowed, or another step has it.
        """
        self._ask_pin("pin", {"step": step, "name": check_name("pin", name), "of_attempt": attempt})

    def unpin(self, name: str) -> None:
        """Take a pin's name back: retention decides about its step again (R19). ConfigError if there is none."""
        self._ask_pin("unpin", {"name": check_name("pin", name)})

    def _ask_pin(self, verb: str, body: dict[str, Any]) -> None:
        self._check_open()
        self._link.call(verb, {"job": self.job, **body}, self.config.connect_timeout_s + CALL_SLACK_S)

    def flush(self, level: str = "committed", timeout_s: float | None = None) -> None:
        """Wait until the newest put has reached `level`; a skipped or superseded put is passed over."""
        with self._tickets_lock:
            tickets = [t for _, t in sorted(self._tickets.items(), reverse=True)]
        for ticket in tickets:
            if ticket.level not in ("skipped", "superseded"):
                ticket.wait(level, self.config.connect_timeout_s if timeout_s is None else timeout_s)
                return

    def close(self) -> None:
        """Leave the job; what was committed stays. Safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        if not self._link.fenced_by:
            body = {"job": self.job, "attempt": self.attempt, "rank": self.rank}
            with contextlib.suppress(MemstoreError):
                self._link.call("close", body, CALL_SLACK_S)
        self._link.close()

    def _fenced(self) -> FencedError:
        return FencedError(
            f"job {self.job!r}: attempt {self._link.fenced_by} was opened; this process belongs to attempt "
            f"{self.attempt} and may not put or get any more"
        )

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError(f"this Store of job {self.job!r} is closed: connect again")
        if self._link.fenced_by:
            raise self._fenced()

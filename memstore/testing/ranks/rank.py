"""The program of a rank: commands that put, get and compare, for every engine of real processes.

A command takes and returns JSON values, so that any carrier serves: a forked process with lines over a socket pair
(`rank_process.py`), or a Ray actor (`drills/ranks/ranks.py`). The rank overwrites its tensors in place, as an optimizer
does, and compares what it gets with a state that is made again (`states.py`).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from memstore.client import put as client_put
from memstore.client.connect import connect
from memstore.client.reader import reader
from memstore.config import Config
from memstore.errors import CommitError, MemstoreError
from memstore.shell.arena.lock import process_start_time
from memstore.shell.codec.encode import copy_into
from memstore.testing.ranks.states import alter, compare, make_state, overwrite

STEP_S = 0.02  # duration of a training step: without it a loop of skipped puts would end at once
TICKETS_MAX = 64


@dataclass(frozen=True)
class Restored:
    """The result of one rank's get, compared with a fresh state; or the error that it raised."""

    rank: int
    step: int | None = None
    verdict: str = ""
    reason: str = ""
    nbytes: int = 0
    bytes_equal: int = 0
    differences: tuple[str, ...] = ()
    ranks_moved: tuple[int, ...] = ()
    bytes_by_tier: dict[str, int] = field(default_factory=dict)
    seconds_by_phase: dict[str, float] = field(default_factory=dict)
    error: str = ""
    message: str = ""
    attempt: int | None = None
    steps_lost: int = 0

    @property
    def problem(self) -> str:
        """Return why this is not the whole right shard, as text; "" if every byte of it is equal."""
        if self.error:
            return self.message or self.error
        if self.differences or not self.bytes_equal == self.nbytes > 0:
            return "; ".join(self.differences[:2]) or f"{self.bytes_equal} of {self.nbytes} bytes are equal"
        return ""

    def reply(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {**asdict(self), "problem": self.problem if self.step is not None else ""}


def compared(got: Any, state: Any, job: str, rank: int, seed: int, nbytes: int) -> Restored:
    """Compare a state, all or a part of what a get() returned, with the one that was put there."""
    fresh = make_state(seed, job, got.attempt, rank, got.step, nbytes)
    equal, differences = compare(state, fresh)
    whole, _ = compare(fresh, fresh)
    return Restored(
        rank,
        got.step,
        got.source,
        got.source_reason,
        whole,
        equal,
        tuple(differences),
        got.ranks_moved,
        dict(got.bytes_by_tier),
        dict(got.seconds_by_phase),
        attempt=got.attempt,
        steps_lost=got.steps_lost,
    )


def disagreements(replies: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return what is wrong with what the ranks of one get got: all must have one step, and its bytes as put."""
    steps = sorted({(reply.get("attempt"), reply["step"]) for reply in replies}, key=str)
    found = [("different-steps", f"ranks restored {steps}")] if len(steps) > 1 else []
    wrong = [(rank, reply) for rank, reply in enumerate(replies) if reply["step"] is not None and reply["problem"]]
    return found + [("wrong-bytes", f"rank {rank}, step {reply['step']}: {reply['problem']}") for rank, reply in wrong]


@dataclass(frozen=True)
class PutRow:
    """The result of one put, as the rank saw it; moments are monotonic."""

    step: int
    stall_s: float
    error: str = ""
    began_s: float = 0.0
    ended_s: float = 0.0
    is_first: bool = False


def config_from(carried: Mapping[str, Any]) -> Config:
    """Return the Config of which JSON has carried the fields; its lists were tuples."""
    fields: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in carried.items()}
    return Config(**fields)


class RankProgram:
    """A rank that carries out commands; it can join attempts of different jobs, one after the other.

    Attributes:
        stop: Says something and waits for the other end, in the middle of a command; the carrier sets it.
    """

    stop: Callable[[dict[str, Any]], None]

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.store: Any = None
        self.tickets: dict[int, Any] = {}
        self.reported: dict[int, tuple[Any, ...]] = {}
        self.trained: dict[str, Any] | None = None
        self.has_put = False
        self.seed = self.nbytes = 0

    def answer(self, do: str, command: Mapping[str, Any]) -> dict[str, Any]:
        """Carry out one command and return its reply."""
        reply: dict[str, Any] = getattr(self, "do_" + do)(**command)
        return reply

    # -- the job ------------------------------------------------------------------------------

    def do_who(self) -> dict[str, Any]:
        """Return pid and start time of this process."""
        return {"pid": os.getpid(), "start": process_start_time(os.getpid()) or 0}

    def do_connect(
        self, job: str, rank: int, world_size: int, config: dict[str, Any], seed: int, nbytes: int, **options: Any
    ) -> dict[str, Any]:
        """Join a job."""
        self.seed, self.nbytes, self.trained = seed, nbytes, None
        self.tickets, self.reported, self.has_put = {}, {}, False
        self.store = connect(job, rank=rank, world_size=world_size, config=config_from(config), **options)
        return {"attempt": self.store.attempt, **self.do_counts()}

    def do_counts(self) -> dict[str, Any]:
        """Return how many descriptors and threads this process has."""
        return {"fds": len(os.listdir("/proc/self/fd")), "threads": threading.active_count()}

    def do_close(self) -> dict[str, Any]:
        """Leave the job; after that the process can join another one."""
        if self.store is not None:
            self.store.close()
            self.store = None
        return {}

    # -- puts ---------------------------------------------------------------------------------

    @property
    def shard(self) -> int:
        """Return the number of what this rank puts."""
        return int(self.store.rank)

    def state(self, step: int) -> dict[str, Any]:
        """Return the state of this rank at a step, a new one."""
        return make_state(self.seed, self.store.job, self.store.attempt, self.shard, step, self.nbytes)

    def train(self, step: int) -> dict[str, Any]:
        """Return the state of this rank at a step, in the tensors of the steps before."""
        made = self.state(step)
        if self.trained is None:
            self.trained = made
        else:
            overwrite(self.trained, made)
        return self.trained

    def do_put(self, step: int, hold: bool = False, extra: str = "", **options: Any) -> dict[str, Any]:
        """Put a step; `hold` stops in mid-copy, `extra="unsupported"` adds an object that no codec takes."""
        state = self.train(step)
        if extra == "unsupported":
            state = {**state, "hook": {"callback": object()}}
        module: Any = client_put
        real = module.copy_into
        if hold:
            module.copy_into = self._held_copy
        try:
            return self._put(step, state, **options)
        finally:
            module.copy_into = real

    def _put(self, step: int, state: dict[str, Any], **options: Any) -> dict[str, Any]:
        self.tickets[step] = self.store.put(step, state, **options)
        while len(self.tickets) > TICKETS_MAX:
            self.tickets.pop(min(self.tickets))
        return self.do_ticket(step)

    def _held_copy(self, plan: Any, views: Any, *rest: Any, **named: Any) -> list[bytes] | None:
        """Fill half of the slots as a torn copy does, wait for the other end, then copy in full."""
        for view in views[: len(views) // 2]:
            view[:] = b"\xee" * len(view)
        self.stop({"at": "mid-copy", "slots": len(views)})
        return copy_into(plan, views, *rest, **named)

    def do_put_number(self, step: int, number: float) -> dict[str, Any]:
        """Put a state of this number alone."""
        return self._put(step, {"model": {"weights": torch.full((70_000,), number)}})

    def do_puts(self, first: int, last: int, pause_s: float = 0.0, mark: str = "") -> dict[str, Any]:
        """Put the steps `first` to `last`, and wait `pause_s` after each; an exception of put is part of its row.

        The file `mark` holds the step while its put is under way, and is empty between two puts.
        """
        rows = []
        for step in range(first, last + 1):
            state = self.train(step)
            if mark:
                Path(mark).write_text(str(step))
            began_s, error = time.monotonic(), ""
            try:
                stall_s = self._put(step, state)["stall_s"]
            except Exception as exc:
                stall_s, error = time.monotonic() - began_s, f"{type(exc).__name__}: {exc}"[:1000]
            rows.append(asdict(PutRow(step, stall_s, error, began_s, time.monotonic(), not self.has_put)))
            self.has_put = True
            if mark:
                Path(mark).write_text("")
            time.sleep(pause_s)
        return {"rows": rows, **self.do_levels()}

    def do_train(self, first: int, last: int, timeout_s: float = 30.0) -> dict[str, Any]:
        """Put the steps and wait for the commit of the last one."""
        for step in range(first, last + 1):
            self.do_put(step, timeout_s=timeout_s)
        return self.do_wait(last, timeout_s=timeout_s)

    def do_due(self, step: int) -> dict[str, Any]:
        """Say whether to put a step."""
        return {"due": self.store.should_put(step)}

    def do_wait(self, step: int, level: str = "committed", timeout_s: float = 30.0) -> dict[str, Any]:
        """Wait for a ticket's level."""
        self.tickets[step].wait(level, timeout_s)
        return self.do_ticket(step)

    def do_flush(self, level: str, timeout_s: float) -> dict[str, Any]:
        """Wait until the newest put has reached a level, if it was not skipped."""
        self.store.flush(level, timeout_s)
        return {}

    def do_settle(self, step: int, timeout_s: float) -> dict[str, Any]:
        """Wait for the commit of a step, and go on if it does not come: the ticket says how far it came, or why not."""
        try:
            with contextlib.suppress(TimeoutError):
                self.tickets[step].wait("committed", timeout_s)
        except CommitError:
            time.sleep(STEP_S)
        return self.do_ticket(step)

    def do_ticket(self, step: int) -> dict[str, Any]:
        """Return the ticket of a step as it is now."""
        ticket = self.tickets[step]
        return {
            "step": ticket.step,
            "level": ticket.level,
            "degraded": ticket.degraded,
            "reason": ticket.reason,
            "stall_s": ticket.stall_s,
            "nbytes": ticket.nbytes,
        }

    def do_levels(self) -> dict[str, Any]:
        """Return the tickets that have changed since the last call."""
        changed: list[list[Any]] = []
        for step, ticket in self.tickets.items():
            now = (ticket.level, bool(ticket.degraded), str(ticket.reason)[:200])
            if self.reported.get(step) != now:
                self.reported[step] = now
                changed.append([step, *now])
        return {"levels": changed}

    # -- gets ---------------------------------------------------------------------------------

    def do_get(self, into: str = "", is_altered: bool = False, **which: Any) -> dict[str, Any]:
        """Get a state, and compare every byte.

        Args:
            into: "" for none, "same" for a state that fits, "other" for one that does not.
            is_altered: A bit flips before it is compared.
            which: Of `Store.get`; with the rank to read beside training (R27).
        """
        target = self._target(into) if into else None
        began_s = time.monotonic()
        try:
            got = self.store.get(into=target, **which)
        except Exception as exc:
            if target is not None and any(bool(t.any()) for t in target["model"].values()):
                raise AssertionError(f"into= was written although get raised {exc!r}") from exc
            raise
        times = {"began_s": began_s, "ended_s": time.monotonic()}
        rank = which.get("rank", self.shard)
        if got is None:
            return {**Restored(rank).reply(), **times}
        if target is not None and got.state["model"]["weights"] is not target["model"]["weights"]:
            raise AssertionError("into= was not filled")
        if is_altered:
            alter(got.state)
        return {**self.compared(got, rank).reply(), **times}

    def compared(self, got: Any, rank: int) -> Restored:
        """Compare what a get brought with what was put."""
        return compared(got, got.state, self.store.job, rank, self.seed, self.nbytes)

    def _target(self, into: str) -> dict[str, Any]:
        target = self.state(0)
        for tensor in target["model"].values():
            tensor.zero_()
        if into == "other":
            target["model"]["bias"] = torch.zeros(3)
        return target

    def do_restore(self, timeout_s: float, **which: Any) -> dict[str, Any]:
        """Get and compare; an error of the store is part of the answer, and so is that there is no history."""
        rank = which.get("rank", self.shard)
        try:
            reply = self.do_get(timeout_s=timeout_s, **which)
        except MemstoreError as exc:
            return Restored(rank, error=type(exc).__name__, message=str(exc)).reply()
        if reply["step"] is None:
            words = "get() returned None: the store says that the job has no history"
            return Restored(rank, error="None", message=words).reply()
        return reply

    def do_read(
        self, job: str, config: dict[str, Any], seed: int, nbytes: int, ranks: list[int], step: int | None
    ) -> dict[str, Any]:
        """Read shards of some ranks as a reader, which joins no job, and compare them."""
        rows = []
        with reader(job, config=config_from(config)) as found:
            for rank in ranks:
                try:
                    got = found.get(step, rank=rank, timeout_s=20.0)
                except Exception as exc:
                    rows.append({"rank": rank, "error": f"{type(exc).__name__}: {exc}"[:400]})
                else:
                    rows.append(compared(got, got.state, job, rank, seed, nbytes).reply())
        return {"rows": rows}

    # -- history ------------------------------------------------------------------------------

    def do_rewind(self, step: int, attempt: int | None = None) -> dict[str, Any]:
        """Go back to a step."""
        self.store.rewind(step, attempt=attempt)
        return {"attempt": self.store.attempt}

    def do_pin(self, step: int, name: str) -> dict[str, Any]:
        """Pin a step."""
        self.store.pin(step, name)
        return {}

    def do_trust(self, step: int) -> dict[str, Any]:
        """Trust a step."""
        return {"step": self.store.trust(step)}

    def do_unpin(self, name: str) -> dict[str, Any]:
        """Take a pin back."""
        self.store.unpin(name)
        return {}

"""Ranks that are real processes, so that a test can kill or freeze one at an exact point.

A `RankNursery` is one process that has imported torch; it forks a rank in milliseconds. Test and rank talk in JSON
lines over a socket pair: one command, one reply. A put with `hold=True` stops after half of its bytes, reports that,
and goes on when asked, so that a test can find a rank in mid-copy without a clock.

The state is made from (seed, rank, step) with numpy alone. `state_digest` makes the same bytes in the test without the
store, so a restored state is compared with something that the store never saw.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from memstore.testing.clusters.nursery import REPLY_S, Nursery, fork_children

STEP_S = 0.02  # duration of a training step: without it a loop of skipped puts would end at once


def arrays(seed: int, rank: int, step: int, kib: int) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays of one rank's state at one step; most of it changes with every step, one part never."""
    moving = np.random.default_rng((seed, rank, step))
    fixed = np.random.default_rng((seed, 1 << 20))
    return {
        "weights": moving.standard_normal((kib, 96), np.float32),
        "frozen": fixed.standard_normal((kib, 32), np.float32),
        "bias": moving.integers(-100, 100, 17, np.int64),
    }


def digest(named: Mapping[str, Any], step: int) -> str:
    """Return one digest of a state's arrays and its step."""
    whole = hashlib.sha256(f"step {step}".encode())
    for name in sorted(named):
        whole.update(f"{name} {named[name].dtype} {named[name].shape}".encode())
        whole.update(np.ascontiguousarray(named[name]).tobytes())
    return whole.hexdigest()


def state_digest(rank: int, step: int, *, seed: int = 1, kib: int = 256) -> str:
    """Return the digest of a rank's state at a step, made from seed, rank and step."""
    return digest(arrays(seed, rank, step, kib), step)


class RankFailed(AssertionError):
    """The error of a command that raised in the rank: `error` is the class name, `message` the text."""

    def __init__(self, error: str, message: str) -> None:
        super().__init__(f"{error}: {message}")
        self.error, self.message = error, message


class RankProcess:
    """The test's end of one rank."""

    def __init__(self, pid: int, channel: socket.socket, rank: int) -> None:
        self.pid, self.rank = pid, rank
        self.channel = channel  # readable once a reply is there, or the rank is dead
        self._lines = channel.makefile("rb")

    def begin(self, do: str, **command: Any) -> None:
        """Send a command."""
        self.channel.sendall(json.dumps({"do": do, **command}).encode() + b"\n")

    def finish(self, timeout_s: float = REPLY_S) -> dict[str, Any]:
        """Return the reply to the last command; RankFailed if it raised in the rank, EOFError if the rank is dead."""
        self.channel.settimeout(timeout_s)
        line = self._lines.readline()
        if not line:
            raise EOFError(f"rank {self.rank} (pid {self.pid}) is gone")
        reply: dict[str, Any] = json.loads(line)
        if not reply.pop("ok"):
            raise RankFailed(reply["error"], reply["message"])
        return reply

    def call(self, do: str, **command: Any) -> dict[str, Any]:
        """Send a command and return its reply."""
        self.begin(do, **command)
        return self.finish()

    def fails(self, do: str, **command: Any) -> RankFailed:
        """Send a command that must raise in the rank; return the error."""
        try:
            reply = self.call(do, **command)
        except RankFailed as failed:
            return failed
        raise AssertionError(f"{do} {command} did not raise but returned {reply}")

    def send_signal(self, sig: signal.Signals) -> None:
        """Send a signal to the rank."""
        os.kill(self.pid, sig)

    def kill(self) -> None:
        """Send SIGKILL; return when the process is gone."""
        if self._lines.closed:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.channel.settimeout(REPLY_S)
        with contextlib.suppress(ConnectionError):
            while self.channel.recv(65536):
                pass
        self.close()

    def close(self) -> None:
        """Hang up; a rank that runs ends by itself."""
        self._lines.close()
        self.channel.close()


def together(ranks: Sequence[RankProcess], do: str, **command: Any) -> list[dict[str, Any]]:
    """Run one collective command on all ranks."""
    for rank in ranks:
        rank.begin(do, **command)
    return [rank.finish() for rank in ranks]


def fail_together(ranks: Sequence[RankProcess], do: str, **command: Any) -> list[RankFailed]:
    """Run one collective command that must raise on all ranks; return the errors."""
    for rank in ranks:
        rank.begin(do, **command)
    found = []
    for rank in ranks:
        try:
            reply = rank.finish()
        except RankFailed as failed:
            found.append(failed)
        else:
            raise AssertionError(f"{do} {command} did not raise on rank {rank.rank} but returned {reply}")
    return found


class RankNursery(Nursery):
    """A process that has imported everything and forks ranks; a context manager whose ranks end with it."""

    def __init__(self, module: str = "memstore.testing.ranks.rank_process") -> None:
        """Start the process, which runs `module`; that must call `nursery_main`."""
        super().__init__(module)
        self._ranks: list[RankProcess] = []
        self.env: dict[str, str] = {}  # of every rank, beside what `start` gets

    def __enter__(self) -> RankNursery:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill_all()
        super().__exit__()

    def start(self, rank: int, env: Mapping[str, str], *, namespace: str = "") -> RankProcess:
        """Fork a rank with these additions to its environment, in a network namespace (its path; "" for ours)."""
        pid, channel = self.fork({**self.env, **env}, namespace=namespace)
        process = RankProcess(pid, channel, rank)
        self._ranks.append(process)
        return process

    def kill_all(self) -> None:
        """Kill every rank that still lives."""
        for rank in self._ranks:
            with contextlib.suppress(OSError, ValueError):
                rank.kill()
        self._ranks.clear()


# -- the rank's side ------------------------------------------------------------------------------


class CommandedRank:
    """A rank that carries out commands; `do_connect` carries out the command "connect"."""

    def __init__(self, channel: socket.socket) -> None:
        self.lines = channel.makefile("rb")
        self.channel = channel
        self.store: Any = None
        self.tickets: dict[int, Any] = {}

    def run(self) -> None:
        """Answer commands until the other end hangs up."""
        for line in self.lines:
            try:
                reply = {"ok": True, **self.answer(json.loads(line))}
            except Exception as exc:
                reply = {"ok": False, "error": type(exc).__name__, "message": str(exc)}
            self.say(reply)

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        """Carry out one command and return its reply."""
        reply: dict[str, Any] = getattr(self, "do_" + command.pop("do"))(**command)
        return reply

    def say(self, reply: dict[str, Any]) -> None:
        """Send one line to the other end."""
        self.channel.sendall(json.dumps(reply).encode() + b"\n")

    def do_close(self) -> dict[str, Any]:
        """Leave the job."""
        self.store.close()
        return {}


def config_from(carried: Mapping[str, Any]) -> Any:
    """Return the Config of which JSON has carried the fields; its lists were tuples."""
    from memstore.config import Config

    fields: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in carried.items()}
    return Config(**fields)


class Rank(CommandedRank):
    """A rank that carries out the commands of one test."""

    def __init__(self, channel: socket.socket) -> None:
        super().__init__(channel)
        self.seed, self.kib = 1, 256

    def do_connect(
        self, job: str, rank: int, world_size: int, config: dict[str, Any], seed: int = 1, kib: int = 256,
        **options: Any,
    ) -> dict[str, Any]:  # fmt: skip
        """Join a job."""
        from memstore.client.connect import connect

        self.seed, self.kib = seed, kib
        self.store = connect(job, rank=rank, world_size=world_size, config=config_from(config), **options)
        return {"attempt": self.store.attempt}

    def state(self, step: int) -> dict[str, Any]:
        """Return the state of this rank at a step."""
        import torch

        made = arrays(self.seed, self.store.rank, abs(step), self.kib)
        return {"model": {name: torch.from_numpy(value) for name, value in made.items()}, "step": step}

    def do_put(self, step: int, hold: bool = False, extra: str = "", kib: int = 0, **options: Any) -> dict[str, Any]:
        """Put a step; `hold` stops in mid-copy, `extra="unsupported"` adds an object that no codec takes."""
        import memstore.client.put

        module: Any = memstore.client.put
        self.kib = kib or self.kib
        state = self.state(step)
        if extra == "unsupported":
            state["hook"] = {"callback": object()}
        real = module.copy_into
        if hold:
            module.copy_into = self._held_copy
        try:
            ticket = self.store.put(step, state, **options)
        finally:
            module.copy_into = real
        self.tickets[step] = ticket
        return self._ticket(ticket)

    def _held_copy(self, plan: Any, views: Any, *rest: Any) -> list[bytes] | None:
        """Fill half of the slots as a torn copy does, wait for the test, then copy in full."""
        from memstore.shell.codec.encode import copy_into

        for view in views[: len(views) // 2]:
            view[:] = b"\xee" * len(view)
        self.say({"ok": True, "at": "mid-copy", "slots": len(views)})
        if not self.lines.readline():
            os._exit(1)
        return copy_into(plan, views, *rest)

    def do_due(self, step: int) -> dict[str, Any]:
        """Say whether to put a step."""
        return {"due": self.store.should_put(step)}

    def do_wait(self, step: int, level: str = "committed", timeout_s: float = 30.0) -> dict[str, Any]:
        """Wait for a ticket's level."""
        return self._ticket(self.tickets[step].wait(level, timeout_s))

    def do_settle(self, step: int, timeout_s: float) -> dict[str, Any]:
        """Wait for the commit of a step, and go on if it does not come."""
        from memstore.errors import CommitError

        try:
            self.tickets[step].wait("committed", timeout_s)
        except CommitError:
            time.sleep(STEP_S)
        except TimeoutError:
            pass  # the ticket below says how far it came
        return self._ticket(self.tickets[step])

    def do_train(self, first: int, last: int, timeout_s: float = 30.0) -> dict[str, Any]:
        """Put the steps and wait for the commit of the last one."""
        for step in range(first, last + 1):
            self.do_put(step, timeout_s=timeout_s)
        return self.do_wait(last, timeout_s=timeout_s)

    def do_ticket(self, step: int) -> dict[str, Any]:
        """Return the ticket of a step as it is now."""
        return self._ticket(self.tickets[step])

    def _ticket(self, ticket: Any) -> dict[str, Any]:
        return {
            "step": ticket.step, "level": ticket.level, "degraded": ticket.degraded, "reason": ticket.reason,
            "stall_s": ticket.stall_s, "nbytes": ticket.nbytes,
        }  # fmt: skip

    def do_get(self, into: str = "", **options: Any) -> dict[str, Any]:
        """Get a state; `into` is "" for none, "same" for a state that fits, "other" for one that does not."""
        target = None
        if into:
            import torch

            target = self.state(0)
            for tensor in target["model"].values():
                tensor.zero_()
            if into == "other":
                target["model"]["bias"] = torch.zeros(3)
        try:
            got = self.store.get(into=target, **options)
        except Exception as exc:
            if target is not None and any(bool(t.any()) for t in target["model"].values()):
                raise AssertionError(f"into= was written although get raised {exc!r}") from exc
            raise
        if got is None:
            return {"step": None}
        state = got.state if target is None else target
        named = {name: tensor.numpy() for name, tensor in state["model"].items()}
        return {
            "step": got.step, "attempt": got.attempt, "verdict": got.source, "reason": got.source_reason,
            "bytes": got.bytes_by_tier, "steps_lost": got.steps_lost, "ranks_moved": list(got.ranks_moved),
            "digest": digest(named, int(got.state["step"])), "seconds": got.seconds_by_phase,
        }  # fmt: skip

    def do_steps(self) -> dict[str, Any]:
        """Return the steps that the store knows."""
        return {"steps": [[s.attempt, s.step, s.committed, s.degraded, s.durable] for s in self.store.steps()]}

    def do_rewind(self, step: int, attempt: int | None = None) -> dict[str, Any]:
        """Go back to a step."""
        self.store.rewind(step, attempt=attempt)
        return {"attempt": self.store.attempt}

    def do_pin(self, step: int, name: str) -> dict[str, Any]:
        """Pin a step."""
        self.store.pin(step, name)
        return {}

    def do_unpin(self, name: str) -> dict[str, Any]:
        """Take a pin back."""
        self.store.unpin(name)
        return {}


def nursery_main(serve: Callable[[socket.socket], CommandedRank]) -> None:
    """Import what every rank needs, then fork a rank for every request."""
    import memstore.client.connect  # noqa: F401

    fork_children(int(sys.argv[1]), lambda channel: serve(channel).run())


if __name__ == "__main__":
    nursery_main(Rank)

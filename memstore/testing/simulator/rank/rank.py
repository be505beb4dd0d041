"""A training process: joins, gets, checks every byte it is given, then puts step after step until something ends it.

It mirrors the rank's side of a link (shell/rank/holder_link.py): leased slots, slots under a copy, hand-overs kept
until sealed, calls kept until answered; all of them outlive the holder (R8).
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from memstore.core.arena.slot_table import Owner
from memstore.testing.controller.catalog_holder import LEVELS
from recovery.inventory import ShardId

if TYPE_CHECKING:
    from memstore.testing.simulator.host.holder import SimHolder
    from memstore.testing.simulator.host.staging import Stager
    from memstore.testing.simulator.world.memory import Memory
    from memstore.testing.simulator.world.world import Simulation, Wait

Body = dict[str, Any]
CHUNKS = 3
STALL_BUDGET_S = 1.0
JOIN_S, GET_S, RESERVE_S = 25.0, 60.0, 40.0
THAW_POLL_S = 0.1
WRITE_S = 0.004  # one chunk's copy: long enough to be stopped in


class SimRank:
    """One process of one rank."""

    def __init__(self, world: Simulation, rank: int, host_id: str, key: str) -> None:
        self.world, self.rank, self.host_id, self.key = world, rank, host_id, key
        self.job, self.world_size, self.chunks_count = world.scenario.job, world.scenario.world_size, CHUNKS
        self.pid = next(world.ids) + 1000
        self.nonce = f"n{self.pid}"
        self.owner = Owner(self.pid, 1, self.pid)
        self.attempt = 0
        self.is_dead = self.is_frozen = self.is_fenced = False
        self.is_left = self.is_restored = False  # its launcher takes it for dead; its get is over
        self.holder: SimHolder | None = None
        self.mapping: list[bytearray] = []  # the arena's file: another list where that is another file
        self.pool: list[int] = []
        self.in_copy: set[int] = set()
        self.handovers: dict[tuple[int, int], tuple[list[int], Body]] = {}  # (attempt, step) -> slots, message
        self.calls: dict[int, tuple[str, Body]] = {}
        self.call_ids = itertools.count(1)
        self.replies: dict[int, Body] = {}
        self.tickets: dict[int, str] = {}
        self.resume_step = self.steps_done = 0
        self.differs = 0  # so many of its next puts are not what its twins put
        self.why, self.layout = "", b""  # why it ended; of what it puts

    @property
    def is_up(self) -> bool:
        """False once its process is dead."""
        return not self.is_dead

    # -- link ---------------------------------------------------------------------------------

    def held(self) -> list[int]:
        """Every slot it believes to be its own."""
        waiting = [n for slots, _ in self.handovers.values() for n in slots]
        return sorted({*self.pool, *self.in_copy, *waiting})

    def connect(self, holder: SimHolder) -> None:
        """Come back to the host's holder: confirm the slots, send again what was not sealed or answered (R8)."""
        self.holder = holder
        stale = set(holder.welcome(self))
        self.map_arena(holder.memory)
        self.in_copy -= stale
        anew: set[int] = set()
        for key, (slots, body) in self.handovers.items():
            if stale.intersection(slots):
                anew.update(slots)
                self.handovers[key] = ([], {**body, "lost": True})
        taken = {n for slots, _ in self.handovers.values() for n in slots}
        self.pool = sorted({*self.pool, *anew} - stale - self.in_copy - taken)
        for (_, step), (slots, body) in sorted(self.handovers.items()):
            holder.take_over(self, step, slots, body)
        for call_id, (verb, body) in sorted(self.calls.items()):
            holder.call(self, call_id, verb, body)
        holder.grant(self)

    def map_arena(self, memory: Memory) -> None:
        """Map the arena that the holder maps (R8)."""
        self.mapping = memory.slots

    def granted(self, slots: list[int]) -> None:
        """The holder leased it more slots."""
        self.pool.extend(slots)

    def ask(self, verb: str, **body: Any) -> int:
        """Ask the controller; the answer comes into `replies`."""
        call_id = next(self.call_ids)
        full = {"job": self.job, "attempt": self.attempt, "rank": self.rank, **body}
        self.calls[call_id] = (verb, full)
        self._send(lambda holder: holder.call(self, call_id, verb, full))
        return call_id

    def _send(self, work: Callable[[SimHolder], None], holder: SimHolder | None = None) -> None:
        """On the link as it is now: a frozen holder reads it when it wakes, a dead one never."""
        holder = holder or self.holder
        if holder is None or holder is not self.holder or not holder.is_up:
            return  # what matters is sent again on the next link
        if holder.is_frozen:
            self.world.at(THAW_POLL_S, lambda: self._send(work, holder))
        else:
            work(holder)

    def answered(self, call_id: int, body: Body, error: tuple[str, str] | None) -> None:
        """An answer, which may be wished for no longer; that of a skip names the step to go on from (R12)."""
        verb, _ = self.calls.pop(call_id, ("", {}))
        if verb == "skip":
            self.resume_step = max(self.resume_step, int(body["resume"]) if not error else 0)
        elif verb:
            self.replies[call_id] = {"error": f"{error[0]}: {error[1]}"} if error else body

    def rise(self, step: int, level: str) -> None:
        """A ticket hears a level; levels only grow, and what ended stays ended (R15)."""
        if level != "pending":
            self.handovers.pop((self.attempt, step), None)
        now = self.tickets.get(step)
        if now not in LEVELS or now is None:
            return
        if level not in LEVELS or LEVELS.index(level) >= LEVELS.index(now):
            self.tickets[step] = level

    # -- life ---------------------------------------------------------------------------------

    def life(self) -> Generator[Wait, None, None]:
        """From connect to the end."""
        world, scenario = self.world, self.world.scenario
        is_fresh, step = world.starts_over, 0
        answer = yield from self._call(
            "join", JOIN_S, world_size=self.world_size, nonce=self.nonce, key=self.key, pid=self.pid,
            launcher="launcher", fresh=is_fresh, takeover=False, config=world.config, **self.named(),
        )  # fmt: skip
        if answer is None:
            return
        self.joined(answer)
        if scenario.is_ordered:
            answer = yield from self._call("mesh_order", JOIN_S, nonce=self.nonce, together=1)
            if answer is None:
                return
            self.rank = int(answer["rank"])
            world.checker.ordered(self, answer)
            self.joined(answer)
        if not is_fresh:
            got = yield from self.get()
            if got is None:
                return
            step = got
        self.is_restored = True
        if (yield from self._call("reserve", RESERVE_S, slots=self.chunks_count)) is None:
            return
        while True:
            step += 1
            yield from self._put(step)
            if self.is_fenced:
                self.why = "fenced"
                return
            self.steps_done = step
            # Training is in step: the next one needs every rank's gradients of this one.
            yield lambda: all(r.steps_done >= step for r in self.world.ranks if r.key == self.key)  # noqa: B023
            yield world.network.rng.uniform(0.5, 1.5) * scenario.step_s

    def named(self) -> Body:
        """What it says of its shard when it joins (R34)."""
        return {}

    def joined(self, answer: Body) -> None:
        """It has its place in an attempt."""
        self.attempt = int(answer["attempt"])
        self.resume_step = max(self.resume_step, int(answer["resume_step"]))

    def check(self, stager: Stager, order: Body) -> str:
        """Say why it cannot take what was staged for it, or "" (R26)."""
        return ""

    def get(self) -> Generator[Wait, None, int | None]:
        """Restore; the step to go on after, or None if the get failed."""
        answer = yield from self._call("get", GET_S, step=None, timeout_s=GET_S)
        return None if answer is None else self.world.checker.restored(self, answer)

    def _call(self, verb: str, limit_s: float, **body: Any) -> Generator[Wait, None, Body | None]:
        answer = yield from self._answer(verb, limit_s, **body)
        if "error" in answer:
            self.why = f"{verb}: {answer['error'] or 'no answer in time'}"
            self.world.checker.refused(self, verb, answer["error"])
            return None
        return answer

    def _answer(self, verb: str, limit_s: float, **body: Any) -> Generator[Wait, None, Body]:
        call_id, until_s = self.ask(verb, **body), self.world.now + limit_s
        yield lambda: call_id in self.replies or self.world.now > until_s
        answer = self.replies.pop(call_id, None)
        if answer is None or "error" in answer:
            self.calls.pop(call_id, None)
        return {"error": ""} if answer is None else answer

    def _put(self, step: int) -> Generator[Wait, None, None]:
        """Copy into leased slots chunk by chunk, hand over, go on; skip without room (R11, R12)."""
        world = self.world
        self.tickets[step] = "pending"
        if step < self.resume_step:
            self.tickets[step] = "skipped"
            return
        until_s = world.now + STALL_BUDGET_S
        count = self.chunks_count
        yield lambda: len(self.pool) >= count or world.now > until_s or self.is_fenced
        if len(self.pool) < count or self.is_fenced:
            self._skip(step, "skipped")
            return
        slots, self.pool = self.pool[:count], self.pool[count:]
        self.in_copy.update(slots)
        memory = world.memories[self.host_id]
        content = self.content(step)
        for slot, data in zip(slots, content, strict=True):
            if slot in self.in_copy:  # else the holder has said that it is not ours any more
                self.mapping[slot][: len(data)] = data
                memory.version += 1
            yield WRITE_S
        if not self.in_copy.issuperset(slots):
            self.pool.extend(n for n in slots if n in self.in_copy)
            self.in_copy.difference_update(slots)
            self._skip(step, "skipped")
            return
        self.in_copy.difference_update(slots)
        body: Body = {"attempt": self.attempt, "world_size": self.world_size, "layout": self.layout, **self.shares()}
        body["seen"] = [bytes(self.mapping[slot]) for slot in slots]
        self.handovers[self.attempt, step] = (slots, body)
        world.checker.handed_over(ShardId(self.job, self.attempt, step, self.rank), content)
        self._send(lambda holder: holder.take_over(self, step, slots, body))

    def content(self, step: int) -> list[bytes]:
        """Its state at a step: one chunk that never changes, one equal on all ranks, one of its own.

        The launch is in it: two of them that reach the same step have different bytes, so that mixing them shows.
        """
        texts = ("frozen layer", f"replicated {self.key} {step}", f"own {self.key} {self.rank} {step}")
        return [chunk_of(text) for text in texts]

    def shares(self) -> Body:
        """What a hand-over says of the chunks that other ranks have too (R34)."""
        return {}

    def _skip(self, step: int, level: str) -> None:
        self.tickets[step] = level
        self.ask("skip", step=step)


def chunk_of(text: str) -> bytes:
    """A chunk's bytes."""
    return hashlib.sha512(text.encode()).digest()

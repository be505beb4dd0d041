"""A training process: it joins, gets, checks every byte that it is given, then puts step after step until it ends.

It mirrors the rank's side of a link (shell/rank/holder_link.py): leased slots, slots under a copy, submissions kept
until they are sealed, calls kept until they are answered. All of them outlive the holder (R8).
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Generator, Sequence
from typing import Any

import msgspec

from memstore.client.ticket import LEVELS
from memstore.core.arena.slot_table import Owner
from memstore.core.format.manifest import Manifest, chunk_digest
from memstore.core.wire.calls import RankCall, SkipStep
from memstore.core.wire.orders import StepLevel
from memstore.core.wire.rank_messages import AttemptFenced, HolderEvent, PutReady, PutTerms, SlotSample, SlotsLeased
from memstore.core.wire.replies import Joined, Noted, NothingStored, Skipped, StepAgreed
from memstore.testing.requests import request_of
from memstore.testing.simulator.checks.checker import Checker
from memstore.testing.simulator.world.memory import Memory
from memstore.testing.simulator.world.virtual_time import Thread, Wait
from memstore.testing.simulator.world.world import Answer, AnyHolder, CallFailed, CopiedRead, World
from recovery.inventory import ShardId

CHUNKS = 3
SHORTER_BYTES = 11  # by so much a rank's last chunk is shorter
STALL_BUDGET_S = 1.0
JOIN_S, GET_S, LOADED_S, RESERVE_S = 25.0, 60.0, 70.0, 40.0
THAW_POLL_S = 0.1
RANGES_S = 30.0  # how long a read of ranges may take
TOGETHER_EVERY = 5  # one in so many steps every rank reads the same shard
WRITE_S = 0.004  # one chunk's copy: long enough for a fault to stop it


class SimRank:
    """One process of one rank."""

    def __init__(self, world: World, checker: Checker, rank: int, host_id: str, key: str) -> None:
        self.world, self.checker, self.rank, self.host_id, self.key = world, checker, rank, host_id, key
        self.job, self.world_size = world.scenario.job, world.scenario.world_size
        self.chunks_count = CHUNKS
        self.chunks_count = self.chunks_of(rank)
        self.pid = next(world.ids) + 1000
        self.nonce = f"n{self.pid}"
        self.owner = Owner(self.pid, 1, self.pid)
        self.attempt = 0
        self.place = (rank, 0)  # rank and attempt that its link names, from the moment at which the answer comes
        self.is_dead = self.is_frozen = self.is_fenced = False
        self.is_left = False  # its launcher takes it for dead
        self.is_restored = False  # its get is over
        self.holder: AnyHolder | None = None
        self.link: object = None  # to which it listens
        self.mapping: list[bytearray] = []  # the arena's file: another list if that is another file
        self.pool: list[int] = []
        self.in_copy: set[int] = set()
        self.unsealed_puts: dict[tuple[int, int], PutReady] = {}  # (attempt, step) -> message
        self.calls: dict[int, RankCall] = {}
        self.call_ids = itertools.count(1)
        self.replies: dict[int, Answer] = {}
        self.tickets: dict[int, str] = {}
        self.resume_step = self.steps_done = 0
        self.differs = 0  # so many of its next puts differ from those of ranks with the same shard
        self.raises = 0  # so many of its next puts raise before their copy
        self.why = ""  # why it ended
        self.stall_s = 0.0  # for how long it says that a put has blocked
        self.layout = b""  # of what it puts

    def chunks_of(self, rank: int) -> int:
        """Return how many chunks the shard of a rank has."""
        chunks = self.world.scenario.chunks
        return chunks[rank % len(chunks)] if chunks else self.chunks_count

    @property
    def is_up(self) -> bool:
        """True until its process is dead."""
        return not self.is_dead

    # -- link ---------------------------------------------------------------------------------

    def held(self) -> list[int]:
        """Return every slot that it believes to be its own."""
        waiting = [n for ready in self.unsealed_puts.values() for n in ready.slots]
        return sorted({*self.pool, *self.in_copy, *waiting})

    def ended(self) -> list[Owner]:
        """Return the stores that its process has closed."""
        return []

    def connect(self, holder: AnyHolder) -> None:
        """Open a link to the host's holder, and say which slots it holds (R8)."""
        holder.join(self)

    def welcomed(self, holder: AnyHolder, stale: Sequence[int]) -> None:
        """Give up slots that are not its own; a put in such slots is sent again for its level only."""
        self.holder = holder
        self.map_arena(holder.memory)
        self.in_copy.difference_update(stale)
        regranted: set[int] = set()
        for key, ready in self.unsealed_puts.items():
            if not set(ready.slots).isdisjoint(stale):
                regranted.update(ready.slots)
                self.unsealed_puts[key] = msgspec.structs.replace(ready, slots=(), nbytes=0, is_lost=True)
        taken = {n for ready in self.unsealed_puts.values() for n in ready.slots}
        self.pool = sorted({*self.pool, *regranted}.difference(stale) - self.in_copy - taken)

    def connected(self, holder: AnyHolder) -> None:
        """Send again what was not sealed or answered."""
        for _, ready in sorted(self.unsealed_puts.items()):
            holder.take_over(self, ready)
        for call_id, request in sorted(self.calls.items()):
            holder.call(self, call_id, request)

    def map_arena(self, memory: Memory) -> None:
        """Map the arena that the holder maps (R8)."""
        self.mapping = memory.slots

    def read(self, slots: Sequence[int | None]) -> list[bytes]:
        """Return the bytes of slots as it has them mapped, b"" for one that is None, or that it has not."""
        there = len(self.mapping)
        return [b"" if number is None or number >= there else bytes(self.mapping[number]) for number in slots]

    def receive(self, message: HolderEvent) -> None:
        """Take what the holder says."""
        match message:
            case SlotsLeased(slots=slots):
                self.pool.extend(slots)
            case AttemptFenced():
                self.is_fenced = True
            case StepLevel(step=step, level=level) if message.attempt == self.attempt:
                self.raise_level(step, level)
                self.resume_step = max(self.resume_step, message.resume)
                for old in [s for s, at in self.tickets.items() if s < step and at in LEVELS[:3]]:
                    self.tickets[old] = "superseded" if level == "committed" else self.tickets[old]

    def ask(self, verb: str, **body: Any) -> int:
        """Send a question to the controller; return its id in `replies`."""
        who = {"job": self.job, "attempt": self.attempt, "rank": self.rank}
        who = {name: value for name, value in who.items() if name not in body}
        return self.relay(request_of(verb, who, **body))

    def relay(self, request: RankCall) -> int:
        """Send a question to the controller; return its id in `replies`."""
        call_id = next(self.call_ids)
        self.calls[call_id] = request
        self._send(lambda holder: holder.call(self, call_id, request))
        return call_id

    def _send(self, work: Callable[[AnyHolder], None], holder: AnyHolder | None = None) -> None:
        """Send on the link as it is now: a frozen holder reads it when it wakes, a dead one never."""
        holder = holder or self.holder
        if holder is None or holder is not self.holder or not holder.is_up:
            return  # what matters is sent again on the next link
        if holder.is_frozen:
            self.world.at(THAW_POLL_S, lambda: self._send(work, holder))
        else:
            work(holder)

    def answered(self, call_id: int, answer: Answer) -> None:
        """Take an answer if it is still waited for; that to a skip names the step to go on from (R12)."""
        request = self.calls.pop(call_id, None)
        if isinstance(request, SkipStep):
            self.resume_step = max(self.resume_step, answer.resume if isinstance(answer, Skipped) else 0)
        elif request is not None:
            if isinstance(answer, Joined):
                self.place = (answer.rank, answer.attempt)
            self.replies[call_id] = answer

    def raise_level(self, step: int, level: str) -> None:
        """Set the level of a ticket; levels only grow, and a ticket that has ended stays as it is (R15)."""
        if level != "pending":
            self.unsealed_puts.pop((self.attempt, step), None)
        now = self.tickets.get(step)
        if now not in LEVELS or now is None:
            return
        if level not in LEVELS or LEVELS.index(level) >= LEVELS.index(now):
            self.tickets[step] = level

    # -- life ---------------------------------------------------------------------------------

    def life(self) -> Thread:
        """Do everything from connect to the end."""
        world, scenario = self.world, self.world.scenario
        is_fresh, step = self.checker.observed.starts_over, 0
        answer = yield from self._call(
            "join",
            JOIN_S,
            world_size=self.world_size,
            nonce=self.nonce,
            key=self.key,
            pid=self.pid,
            launcher="launcher",
            fresh=is_fresh,
            config=world.config,
            groups=scenario.groups_of(self.rank),
            **self.named(),
        )
        if answer is None:
            return
        self.joined(answer)
        if not is_fresh:
            got = yield from self.get()
            if got is None and "while its state was loaded" not in self.why:
                return
            step = got or 0  # after an error of its load_state_dict() a script may begin from scratch: no put is taken
        self.is_restored = True
        if (yield from self._call("reserve", RESERVE_S, slots=self.chunks_count)) is None:
            return
        self.checker.restores.may_put(self)
        while True:
            step += 1
            yield from self._put(step)
            if self.is_fenced:
                self.why = "fenced"
                return
            self.steps_done = step
            if scenario.reads_ranges and step % scenario.reads_every == self.rank % scenario.reads_every:
                self.world.spawn(self._read_ranges(), self)
            if scenario.reads_shards and step % TOGETHER_EVERY == 0:
                self.world.spawn(self._read_shard(0), self)
            elif scenario.reads_shards and step % scenario.reads_every == self.rank % scenario.reads_every:
                self.world.spawn(self._read_shard((self.rank + 1) % self.world_size), self)
            # Training is in step: the next one needs every rank's gradients of this one.
            yield lambda: self.is_in_step(step)  # noqa: B023
            yield world.network.rng.uniform(0.5, 1.5) * scenario.step_s

    def is_in_step(self, step: int) -> bool:
        """Return whether all ranks of its launch have come as far."""
        return all(r.steps_done >= step for r in self.world.ranks if r.key == self.key)

    def _read_ranges(self) -> Thread:
        """Read the first and the last chunk of another rank's newest shard: it may fail, but not lie (R27)."""
        other = (self.rank + 1) % self.world_size
        ends = [[index, 1] for index in sorted({0, self.chunks_of(other) - 1})]
        answer = yield from self._answer("read_step", RANGES_S, rank=other, step=None, of_attempt=None, chunks=ends)
        if isinstance(answer, CopiedRead):
            self.checker.restores.read_ranges(self, answer)

    def _read_shard(self, rank: int) -> Thread:
        """Read a rank's newest shard whole (R27)."""
        answer = yield from self._answer(
            "read_step", RANGES_S, rank=rank, step=None, of_attempt=None, reader=self.nonce
        )
        if isinstance(answer, CopiedRead):
            self.checker.restores.read_ranges(self, answer)

    def repair(self, manifest: Manifest, missing: Sequence[int]) -> Generator[Wait, None, dict[int, bytes]]:
        """Have the holder bring chunks that did not come, or came damaged; return those that are good."""
        shard = manifest.shard
        answer = yield from self._answer(
            "read_step",
            RANGES_S,
            rank=shard.rank,
            step=shard.step,
            of_attempt=shard.attempt,
            chunks=[[index, 1] for index in missing],
            is_repair=True,
        )
        if not isinstance(answer, CopiedRead):
            return {}
        return {i: data for i, data in answer.chunks.items() if chunk_digest(data) == manifest.chunks[i].digest}

    def named(self) -> dict[str, Any]:
        """Return what it says of its shard when it joins (R34)."""
        return {}

    def joined(self, answer: Joined) -> None:
        """Take its place in an attempt."""
        self.attempt = answer.attempt
        self.resume_step = max(self.resume_step, answer.resume_step)

    def check(self, manifest: Manifest) -> str:
        """Say why it cannot take the shard that was staged for it, or "" (R26)."""
        return ""

    def get(self) -> Generator[Wait, None, int | None]:
        """Restore; return the step to go on after, or None if the get failed."""
        while True:
            answer = yield from self._call("get", GET_S, step=None, timeout_s=GET_S)
            if answer is None or (yield from self.all_loaded(answer)):
                return None if answer is None else self.checker.restores.restored(self, answer)
            if self.why:
                return None

    def all_loaded(
        self, answer: NothingStored | CopiedRead | StepAgreed, problem: str | None = None
    ) -> Generator[Wait, None, bool]:
        """Say that it has loaded what it was sent, or why not; False if it is to ask again, or the get failed (R23)."""
        placed = answer.placed if isinstance(answer, CopiedRead) else answer
        report = None if isinstance(placed, NothingStored) else placed.report
        if report is None:
            return True
        if self.world.failing_loads and self.rank == self.world_size - 1:
            self.world.failing_loads -= 1
            problem = "it could not"
        self.checker.restores.loaded(self, report.round, is_failed=problem is not None)
        word = yield from self._call("shard_loaded", LOADED_S, round=report.round, is_adopting=True, problem=problem)
        if isinstance(word, Noted):
            self.checker.restores.returned(self, report.round)
        return isinstance(word, Noted)

    def _call(self, verb: str, limit_s: float, **body: Any) -> Generator[Wait, None, Answer]:
        """Ask and wait; return the answer, None if the call failed."""
        answer = yield from self._answer(verb, limit_s, **body)
        if isinstance(answer, CallFailed):
            self.why = f"{verb}: {answer.error or 'no answer in time'}"
            self.checker.restores.refused(self, verb, answer.error)
            return None
        return answer

    def _answer(self, verb: str, limit_s: float, **body: Any) -> Generator[Wait, None, Answer]:
        """Ask and wait; return the answer, or why there is none."""
        call_id, until_s = self.ask(verb, **body), self.world.now + limit_s
        yield lambda: call_id in self.replies or self.world.now > until_s
        answer = self.replies.pop(call_id, CallFailed(""))
        if isinstance(answer, CallFailed):
            self.calls.pop(call_id, None)
        return answer

    def _put(self, step: int) -> Thread:
        """Copy into leased slots chunk by chunk and submit; skip the step if there is no room (R11, R12)."""
        world = self.world
        self.tickets[step] = "pending"
        if self.raises or step < self.resume_step:
            self.tickets[step] = "failed" if self.raises else "skipped"
            self.raises = max(0, self.raises - 1)
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
        digests = self.digests_of(step, content)
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
        if not self.may_submit():
            self.pool.extend(slots)
            return
        ready = PutReady(
            terms=PutTerms(
                attempt=self.attempt, step=step, world_size=self.world_size, shared_chunks=self.shared_chunks()
            ),
            slots=tuple(slots),
            arena="",
            sample=SlotSample(seed=0, digests=b"".join(bytes(self.mapping[slot]) for slot in slots)),
            layout=self.layout,
            nbytes=sum(map(len, content)),
            stall_s=self.stall_s,
            digests=digests,
        )
        self.unsealed_puts[self.attempt, step] = ready
        self.checker.puts.submitted(ShardId(self.job, self.attempt, step, self.rank), content)
        self._send(lambda holder: holder.take_over(self, ready))

    def content(self, step: int) -> list[bytes]:
        """Return its state at a step: one chunk that never changes, one equal on all ranks, one of its own.

        The launch is in it. Two launches that reach the same step have different bytes, so mixing them shows. Of its
        own chunk a quarter changes from step to step: it travels as a patch.
        """
        chunks = [chunk_of(text) for text in ("frozen layer", f"replicated {self.key} {step}")[: self.chunks_count - 1]]
        for n in range(self.chunks_count - len(chunks)):
            kept, changed = (
                chunk_of(f"own {self.key} {self.rank} {text}{f' {n}' if n else ''}") for text in ("", step)
            )
            chunks.append(changed[: len(kept) // 4] + kept[len(kept) // 4 :])
        if self.world.scenario.chunks:
            chunks[-1] = chunks[-1][: len(chunks[-1]) - SHORTER_BYTES * (self.rank % 4)]
        return chunks

    def digests_of(self, step: int, content: list[bytes]) -> bytes | None:
        """Return the digests that it took with its copy, joined; every other step its holder digests (R14)."""
        return b"".join(chunk_digest(data) for data in content) if step % 2 else None

    def may_submit(self) -> bool:
        """Return whether a put whose copy has ended is submitted."""
        return True

    def shared_chunks(self) -> int | None:
        """Return how many of its first chunks other ranks put as well; None: it names no shard (R34)."""
        return None

    def _skip(self, step: int, level: str) -> None:
        self.tickets[step] = level
        self.ask("skip", step=step)


def chunk_of(text: str) -> bytes:
    """Return the bytes of a chunk, made of a text."""
    return hashlib.sha512(text.encode()).digest()

"""A process that recovers in place: after a rank is lost it leaves, meets the others and enters again.

It runs the product's decisions of `memstore/inplace/membership.py` over a board in virtual time, and mirrors the loop
of `memstore/inplace/reentry.py` and the stores of one process (`memstore/client/connect.py`): each generation has a
Store, so a link and leases of its own, under one nonce. A Store that was left without a close lives on until the next
one has joined, and its link comes back as every link does.

A rank that aborts its communicators leaves the ranks that have put fewer steps with half a result of what it was to
send them: what those put next is void (D244).
"""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence
from typing import Any

from memstore.core.arena.slot_table import Owner
from memstore.core.attempts.in_place import generation_key
from memstore.core.wire.calls import RankLoss
from memstore.core.wire.replies import Joined
from memstore.errors import FencedError, GatherTimeout
from memstore.inplace.membership import NONE, QUIET_S, Closing, Coming, Leaving, in_place_of, is_over
from memstore.testing.simulator.checks.checker import Checker
from memstore.testing.simulator.rank.rank import GET_S, THAW_POLL_S, SimRank
from memstore.testing.simulator.world.virtual_time import Thread, Wait
from memstore.testing.simulator.world.world import Answer, AnyHolder, CallFailed, CopiedRead, World

LOOK_S = 0.05
LOOKS_S = (LOOK_S, LOOK_S, LOOK_S, 0.4)  # of a watcher, which may have no core for a while, less than QUIET_S
VERDICT_S = 8.0
MEET_S = 20.0
CLOSED_SHARE = 0.6  # of stores that are left: the others' function has no `with`


class SimBoard:
    """The numbers that all processes of one run see, in the launcher's process."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self.losses: list[RankLoss] = []

    def number(self, key: str) -> int:
        """Return a number that was put there; NONE if none was."""
        return self.numbers.get(key, NONE)

    def put(self, key: str, number: int) -> None:
        """Put a number there."""
        self.numbers[key] = number

    def count(self, key: str, more: int = 0) -> int:
        """Add to a count, which begins at 0; return what it is then."""
        self.numbers[key] = self.numbers.get(key, 0) + more
        return self.numbers[key]


class InPlaceProcess:
    """One process of a rank, with a Store for each generation that it takes part in."""

    def __init__(
        self,
        world: World,
        checker: Checker,
        rng: random.Random,
        board: SimBoard,
        run: str,
        rank: int,
        life: int,
        first: int,
        host_id: str,
    ) -> None:
        """`life`: its number among the processes of this rank; `first`: the generation that it begins with."""
        self.world, self.checker, self.rng, self.board = world, checker, rng, board
        self.run, self.rank, self.life, self.first, self.host_id = run, rank, life, first, host_id
        self.pid = next(world.ids) + 1000
        self.is_dead = self.is_frozen = False
        self.is_left = False  # its launcher takes it for dead, and cannot end it
        self.has_raised = False  # its function ended by an exception that is no loss
        self.generation = NONE  # that it watches; NONE: none
        self.leaving: Leaving | None = None  # of the generation before
        self.met_s = self.looked_s = 0.0
        self.stores_count = 0
        self.former: list[InPlaceRank] = []  # stores that it has left and not closed
        self.ended: list[Owner] = []  # stores that it has closed since a hello that was welcomed
        self.store = InPlaceRank(self)

    @property
    def is_up(self) -> bool:
        """True until it is dead."""
        return not self.is_dead

    def life_of_it(self, start_s: float) -> Thread:
        """Start, then take part in one generation after the other."""
        yield start_s
        last = self.first - 1
        try:
            while True:
                last = yield from self._meet(last)
                yield from self._enter(last)
                failed_s = self.world.now
                is_over = yield from self._is_over(last)
                self.leaving = Leaving(failed_s, self.world.now, self.world.now)
                if not is_over:
                    self.store.why = self.store.why or "its function raised"
                    self.has_raised = True
                    return
        except (FencedError, GatherTimeout) as exc:
            self.world.note(f"rank {self.rank}, process {self.life}: {exc}")
            self.store.why, self.has_raised = str(exc), True

    def _meet(self, after: int) -> Generator[Wait, None, int]:
        coming = Coming(
            self.board,
            rank=self.rank,
            life=self.life,
            world_size=self.world.scenario.world_size,
            after=after,
            meet_s=MEET_S,
            now=self.world.now,
        )
        while (number := coming.look(self.world.now)) is None:
            yield LOOK_S
        self.met_s = self.world.now
        self.checker.generations.met(self.run, number, self.rank, self.pid)
        return number

    def _enter(self, number: int) -> Thread:
        """Do everything from connect to the moment at which the function is left."""
        if self.store.is_begun:
            self.store = InPlaceRank(self)
        store = self.store
        store.begin(number)
        self.world.entered(store)
        self.generation = number
        yield from store.life()
        self.generation = NONE
        self.world.note(f"rank {self.rank}, process {self.life} leaves generation {number}: {store.why[:100]}")
        # A connect() that fails closes its link. Of the others some functions have a `with`.
        if not store.attempt or self.rng.random() < CLOSED_SHARE:
            store.close()
        else:
            self.former.append(store)

    def end_former(self) -> None:
        """Close the stores that it left before: its newest one has joined (D133)."""
        former, self.former = self.former, []
        for store in former:
            store.is_fenced = True
            store.close()

    def _is_over(self, generation: int) -> Generator[Wait, None, bool]:
        until_s = self.world.now + VERDICT_S
        yield lambda: is_over(self.board, generation) or self.world.now > until_s
        return is_over(self.board, generation)

    def watch(self) -> Thread:
        """Free the training thread once its generation is over, as the watcher's thread does."""
        aborted, rng = NONE, random.Random(f"watcher {self.run} {self.rank} {self.life}")
        while True:
            yield rng.choice(LOOKS_S)
            self.looked_s = self.world.now
            if self.generation > NONE and is_over(self.board, self.generation):
                self.store.interrupt()
                if aborted != self.generation:
                    aborted = self.generation
                    self.world.spawn(self._abort(self.store, self.generation), self)

    def _abort(self, store: InPlaceRank, generation: int) -> Thread:
        """Abort the communicators of a generation once the other living ranks have closed their stores to it.

        Two ways in which one may put what is void are known and left (D244): its watcher does not look for QUIET_S; or
        a rank that counts as lost lives, and is counted in its place.
        """
        closing = Closing(self.board, generation, self.world.scenario.world_size, self.world.now)
        while not closing.look(self.world.now):
            yield LOOK_S
        others = [rank for rank in self.world.ranks if isinstance(rank, InPlaceRank) and rank.key == store.key]
        if self.is_left or any(other.is_left for other in others):
            return
        for other in others:
            if other.steps_done < store.steps_done:
                other.is_void |= self.world.now - other.process.looked_s < QUIET_S and not other.is_fenced


class InPlaceRank(SimRank):
    """One Store of a process that has others before and after it."""

    def __init__(self, process: InPlaceProcess) -> None:
        self.process, self.number = process, NONE
        key = generation_key(process.run, self.number)
        super().__init__(process.world, process.checker, process.rank, process.host_id, key)
        process.stores_count += 1
        self.pid, self.nonce = process.pid, f"n{process.pid}"
        self.owner = Owner(process.pid, 1, process.stores_count)
        self.is_begun = self.is_closed = False
        self.in_hello: list[Owner] = []  # closed stores that its last hello names
        self.closed_s = 0.0
        self.is_void = False  # what it computes: a collective ended with half a result

    @property
    def is_dead(self) -> bool:
        """Return whether its process is dead."""
        return self.process.is_dead

    @is_dead.setter
    def is_dead(self, value: bool) -> None:
        self.process.is_dead = value

    @property
    def is_frozen(self) -> bool:
        """Return whether its process is stopped."""
        return self.process.is_frozen

    @is_frozen.setter
    def is_frozen(self, value: bool) -> None:
        self.process.is_frozen = value

    @property
    def is_left(self) -> bool:
        """Return whether its launcher takes its process for dead."""
        return self.process.is_left

    @is_left.setter
    def is_left(self, value: bool) -> None:
        self.process.is_left = value

    def begin(self, number: int) -> None:
        """Enter a generation."""
        self.is_begun, self.number, self.key = True, number, generation_key(self.process.run, number)
        self.checker.generations.began(self)

    def connect(self, holder: AnyHolder) -> None:
        """Open a link, if it has begun and has not ended."""
        if self.is_begun and not self.is_closed:
            super().connect(holder)

    def ended(self) -> list[Owner]:
        """Return the stores that its process has closed, for a hello."""
        self.in_hello = self.process.ended
        return self.in_hello

    def welcomed(self, holder: AnyHolder, stale: Sequence[int]) -> None:
        """Name closed stores no more once the holder has read of them."""
        super().welcomed(holder, stale)
        self.process.ended = [owner for owner in self.process.ended if owner not in self.in_hello]

    def named(self) -> dict[str, Any]:
        """Return what it knows of the recovery in place that its launch is."""
        if self.number == 0:
            return {}
        process, now = self.process, self.world.now
        losses = tuple(process.board.losses) if self.rank == 0 else ()
        return {"in_place": in_place_of(self.number, losses, process.leaving, process.met_s, now)}

    def joined(self, answer: Joined) -> None:
        """Take its place in an attempt; the process's former stores end."""
        super().joined(answer)
        self.process.end_former()

    def get(self) -> Generator[Wait, None, int | None]:
        """Restore; return the step to go on after, or None if the get failed."""
        while True:
            answer = yield from self._call("get", GET_S, step=None, timeout_s=GET_S)
            if answer is None or (yield from self.all_loaded(answer)):
                break
            if self.why:
                return None
        if answer is None:
            return None
        if self not in self.world.ranks:
            self.why = "replaced while it was frozen: it reads an answer of then"
            return None
        if isinstance(answer, CopiedRead):
            self.checker.generations.goes_on(self, answer)
        return self.checker.restores.restored(self, answer)

    def interrupt(self) -> None:
        """End every wait of its process on it: its generation is over."""
        self.is_fenced, self.why = True, self.why or "its generation is over"

    def is_in_step(self, step: int) -> bool:
        """Return whether the other ranks are as far; a collective of a generation that is over ends."""
        return self.is_fenced or super().is_in_step(step)

    def _answer(self, verb: str, limit_s: float, **body: Any) -> Generator[Wait, None, Answer]:
        """Ask and wait until the answer comes, or the generation is over."""
        over = CallFailed("FencedError: its generation is over")
        if self.is_fenced:
            return over
        call_id, until_s = self.ask(verb, **body), self.world.now + limit_s
        yield lambda: call_id in self.replies or self.world.now > until_s or self.is_fenced
        answer = self.replies.pop(call_id, over if self.is_fenced else CallFailed(""))
        if isinstance(answer, CallFailed):
            self.calls.pop(call_id, None)
        return answer

    def _put(self, step: int) -> Thread:
        if not self.is_fenced:
            self.checker.generations.puts(self, step)
            if self.is_void:
                self.checker.generations.puts_void(self, step)
            yield from super()._put(step)

    def may_submit(self) -> bool:
        """Return whether a put whose copy has ended is submitted: not by an interrupted link."""
        return not self.is_fenced

    def close(self) -> None:
        """Send `bye` after everything else, and listen no more; without a link nothing is sent."""
        holder, link = self.holder, self.link
        self.is_closed, self.closed_s = True, self.world.now
        self.process.ended = [*self.process.ended, self.owner]
        self.holder, self.link = None, None
        self.pool.clear()
        self.in_copy.clear()
        self.unsealed_puts.clear()
        self.calls.clear()
        if holder is not None:
            self._bye(holder, link)

    def _bye(self, holder: AnyHolder, link: object) -> None:
        if holder.is_up and holder.is_frozen:
            self.world.at(2 * THAW_POLL_S, lambda: self._bye(holder, link))
        elif holder.is_up and not self.is_dead:
            holder.leave(link)

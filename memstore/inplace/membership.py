"""Which generation is wanted, who came to it, and which process is a rank now. Pure: numbers on a board.

    the server  begin --> wanted N --a rank is lost--> broken N --its new process is registered--> wanted N+1
    a rank      waits for a generation newer than the one it left --> here/N --all ranks are here--> begins N
                function returns --> done/N --all are done--> goes home
                                      | broken N
                                      v
                                    waits for a generation newer than N

What all ranks see is a board of numbers: `wanted` (the generation that ranks are to begin, set once its replacements
are there), `broken` (the newest generation that lost a rank), `here/N` (ranks that came to generation N; `here/N/W`:
which ones, of those from W * WORD on, as bits), `done/N` (ranks whose function returned in it; plus BROKEN once it has
lost one), `life/R` (the number of the process that is rank R now), `finished` (the generation in which all ranks had
returned before one was lost), `closed/N` (ranks that put nothing more in generation N), `asked/N` (ranks whose
collective timed out), `waits/N/W` (which ranks wait in torch too, or have left, as bits), `absent/N/W` (which do not),
`absent` (the newest generation in which that is known).

A rank may be lost while others return. Whether all were done first is decided by one addition: the server adds BROKEN
to `done/N`, and what was there before says it. So no rank goes home while another one waits for it.

The server registers a new process before it wants the generation to which that process comes. A rank reads them the
other way round: so a process that sees the new generation sees as well that it has lost its place.
"""

from __future__ import annotations

import dis
import traceback
from collections import defaultdict
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

import msgspec

from memstore.core.cluster.text import CAUSES, listed, phases_text
from memstore.core.wire.calls import InPlace, RankLoss
from memstore.errors import FencedError, GatherTimeout

NONE = -1
BROKEN = 1 << 30  # more than ranks
WORD = 32  # ranks in one number
ANSWER_S = 5.0  # longest wait for the ranks to say that they wait, too
QUIET_S = 0.5  # ten looks of a watcher: a rank that has not closed its store by then is lost too, or had no group yet


class Board(Protocol):
    """Numbers that the server and all ranks see, by key."""

    def number(self, key: str) -> int:
        """Return a number that was put there; NONE if none was."""

    def put(self, key: str, number: int) -> None:
        """Put a number there."""

    def count(self, key: str, more: int = 0) -> int:
        """Add to a count, which begins at 0; return what it is then."""


class RankMembership:
    """The server's side: the one that replaces processes."""

    def __init__(self, board: Board, world_size: int) -> None:
        self._board, self._world_size = board, world_size
        self.generation = NONE
        self.broken = NONE  # the newest generation that lost a rank
        self.finished = NONE  # the generation in which all ranks had returned before one was lost
        self.absent = NONE  # the newest generation whose absent ranks were taken
        self.lives: dict[int, int] = {}  # rank -> the number of its newest process

    def begin(self, generation: int) -> None:
        """Let all ranks meet for a generation: its replacements are there, or about to be."""
        self.generation = generation
        self._board.put("wanted", generation)

    def mark_broken(self) -> None:
        """Tell all ranks that the present generation has lost one, unless all of them had returned before."""
        if self.generation in (self.broken, self.finished):
            return
        if self._board.count(f"done/{self.generation}", BROKEN) - BROKEN >= self._world_size:
            self.finished = self.generation
            self._board.put("finished", self.finished)
        else:
            self.broken = self.generation
            self._board.put("broken", self.broken)

    def register(self, rank: int) -> int:
        """Return the number of a new process of this rank; the former one counts no more."""
        life = self.lives[rank] = self.lives.get(rank, 0) + 1
        self._board.put(f"life/{rank}", life)
        return life

    def take_absent(self) -> list[int]:
        """Return, once, the ranks that did not come to a collective of the present generation, and others did."""
        if self.absent == self.generation or self._board.number("absent") != self.generation:
            return []
        self.absent = self.generation
        return _ranks_at(self._board, f"absent/{self.generation}", self._world_size)

    def is_done(self) -> bool:
        """Return whether the function has returned on all ranks."""
        if self.generation == NONE:
            return False
        done = self._board.count(f"done/{self.generation}")
        return self.finished == self.generation or self._world_size <= done < BROKEN


def is_over(board: Board, generation: int) -> bool:
    """Return whether a generation has lost a rank, or a newer one is wanted."""
    return max(board.number("broken"), board.number("wanted") - 1) >= generation


def is_over_for_all(board: Board, generation: int, done: int, world_size: int) -> bool | None:
    """Return whether a rank that is done may go home; None if it is to look again.

    Args:
        board: What all ranks see.
        generation: In which this rank's function has returned.
        done: What `done/N` was when this rank looked last.
        world_size: Number of ranks.

    Returns:
        True if all ranks are done, False if one was lost before they all were, None if neither is known.
    """
    if world_size <= done < BROKEN or board.number("finished") == generation:
        return True
    return False if is_over(board, generation) else None


class Coming:
    """One process on its way to a generation newer than `after`, until all ranks have come to one."""

    def __init__(
        self, board: Board, *, rank: int, life: int, world_size: int, after: int, meet_s: float, now: float
    ) -> None:
        self.board, self.rank, self.life, self.world_size = board, rank, life, world_size
        self.after, self.meet_s = after, meet_s
        self.mine = NONE  # the generation that it came to
        self.deadline_s = now + meet_s

    def look(self, now: float) -> int | None:
        """Come to the generation that is wanted; return its number once all ranks have come, None before.

        NONE if the function has returned on all ranks.

        A rank that is lost meanwhile makes the others come to the generation of its replacement.

        Raises:
            GatherTimeout: The others did not come within `meet_s` of the last replacement.
            FencedError: Another process is this rank now: this one was frozen, or cut off, and taken for lost.
        """
        if self.board.number("finished") != NONE:
            return NONE
        wanted = self.board.number("wanted")
        if wanted > self.after and self._has_met(wanted, now):
            return wanted
        if now >= self.deadline_s:
            raise GatherTimeout(self._who_lacks())
        return None

    def _has_met(self, wanted: int, now: float) -> bool:
        if wanted != self.mine:
            self.deadline_s = now + self.meet_s  # replacements may come one after another
            self._check_life()
            self.mine = wanted
            _add_rank(self.board, f"here/{wanted}", self.rank)
            self.board.count(f"here/{wanted}", 1)
        return self.board.count(f"here/{wanted}") >= self.world_size

    def _check_life(self) -> None:
        life = self.board.number(f"life/{self.rank}")
        if life != self.life:
            raise FencedError(
                f"rank {self.rank}: process {life} has taken the place of this one, which is process {self.life}"
            )

    def _who_lacks(self) -> str:
        is_start, within = self.after == NONE, f"within {self.meet_s:g} s"
        if self.mine == NONE:
            what = f"the ranks were not asked to start {within}" if is_start else f"nothing replaced it {within}"
        else:
            come = _ranks_at(self.board, f"here/{self.mine}", self.world_size)
            absent, where = _others(come, self.world_size), "the start" if is_start else f"generation {self.mine}"
            who = f"rank {absent[0]} has" if len(absent) == 1 else f"ranks {listed(absent)} have"
            what = f"{len(come)} of {self.world_size} ranks came to {where} {within}; {who} not come"
        lost = "" if is_start else f"a rank of generation {self.after} was lost, and "
        return f"rank {self.rank}: {lost}{what}: all ranks must be restarted"


class Inquiry:
    """Finds out, for a rank whose collective timed out, which ranks did not come to it: those wait in none."""

    def __init__(self, board: Board, generation: int, world_size: int, now: float) -> None:
        self.board, self.generation, self.world_size = board, generation, world_size
        self.until_s = now + ANSWER_S
        board.count(f"asked/{generation}", 1)

    def look(self, now: float) -> list[int] | None:
        """Return the absent ranks once that is known, None before; report them, unless all or none are."""
        absent = _others(_ranks_at(self.board, f"waits/{self.generation}", self.world_size), self.world_size)
        if absent and now < self.until_s:
            return None
        if 0 < len(absent) < self.world_size:
            for word in range(_words(self.world_size)):
                bits = sum(1 << rank % WORD for rank in absent if rank // WORD == word)
                self.board.put(f"absent/{self.generation}/{word}", bits)
            self.board.put("absent", self.generation)
        return absent


def is_asked(board: Board, generation: int) -> bool:
    """Return whether some rank's collective of a generation has timed out."""
    return board.count(f"asked/{generation}") > 0


def note_waiting(board: Board, generation: int, rank: int) -> None:
    """Note, once, that a rank waits too, or has left."""
    _add_rank(board, f"waits/{generation}", rank)


def _words(world_size: int) -> int:
    return -(-world_size // WORD)


def _add_rank(board: Board, key: str, rank: int) -> None:
    word, bit = divmod(rank, WORD)
    board.count(f"{key}/{word}", 1 << bit)


def _ranks_at(board: Board, key: str, world_size: int) -> list[int]:
    bits = [board.count(f"{key}/{word}") for word in range(_words(world_size))]
    return [rank for rank in range(world_size) if bits[rank // WORD] >> rank % WORD & 1]


def _others(ranks: list[int], world_size: int) -> list[int]:
    return sorted(set(range(world_size)).difference(ranks))


class Closing:
    """Tells a rank that has closed its store to a generation when the other living ranks have."""

    def __init__(self, board: Board, generation: int, world_size: int, now: float) -> None:
        self.board, self.generation, self.world_size = board, generation, world_size
        self.closed, self.since_s = board.count(f"closed/{generation}", 1), now

    def look(self, now: float) -> bool:
        """Return whether all ranks but the lost one have closed theirs, or none has for QUIET_S.

        Which other ranks are lost may not be known yet, so their number is not waited for.
        """
        closed = self.board.count(f"closed/{self.generation}")
        if closed != self.closed:
            self.closed, self.since_s = closed, now
        return closed >= self.world_size - 1 or now - self.since_s >= QUIET_S


# -- verdict ------------------------------------------------------------------------------------------
# Is the exception that left the training function the loss of a peer, or the user's own bug? Pure.


# A collective fails in one of these packages; a wait on the store, or on Ray Train's barrier, does too.
OF_LOSSES = ("torch", "memstore", "ray")


def innermost_module(trace: TracebackType | None) -> str:
    """Return the name of the module whose code raised an exception; "" without a traceback."""
    name = ""
    while trace is not None:
        name = str(trace.tb_frame.f_globals.get("__name__", ""))
        trace = trace.tb_next
    return name


def is_of_raise(trace: TracebackType | None) -> bool:
    """Return whether a `raise` of Python code made an exception, not a call of C code, such as `work.wait()`."""
    if trace is None:
        return True
    while trace.tb_next is not None:
        trace = trace.tb_next
    return dis.opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]] in ("RAISE_VARARGS", "RERAISE")


def may_be_loss(error: BaseException) -> bool:
    """Return whether an exception may come of a lost peer: it is worth asking whether one is lost."""
    if not isinstance(error, Exception):
        return False  # KeyboardInterrupt, SystemExit: the process is to end
    if innermost_module(error.__traceback__).split(".")[0] in OF_LOSSES:
        return True
    return isinstance(error, RuntimeError) and not is_of_raise(error.__traceback__)


# -- phases -------------------------------------------------------------------------------------------
# How long a rank took to leave a generation and to enter the next: for people, not for decisions. Pure.


@dataclass(frozen=True, slots=True)
class Leaving:
    """When a process left a generation, on its monotonic clock."""

    failed_s: float  # an exception left the function; infinity: it returned, or never began
    over_s: float  # a loss was known
    end_s: float  # all was torn down

    @property
    def detect_s(self) -> float:
        """Return for how long it waited for word of a loss, which its exception came before."""
        return max(0.0, self.over_s - self.failed_s)


def in_place_of(
    generation: int, losses: tuple[RankLoss, ...], leaving: Leaving | None, met_s: float, made_s: float
) -> InPlace:
    """Return what a rank reports of a generation that it enters.

    Args:
        generation: Its number.
        losses: Of the run.
        leaving: How this process left the one before; None: it was in none.
        met_s: When all ranks had come, on the monotonic clock.
        made_s: When their process group was made.
    """
    return InPlace(
        generation=generation,
        losses=losses,
        detect_s=None if leaving is None else leaving.detect_s,
        abort_s=None if leaving is None else leaving.end_s - leaving.over_s,
        replace_s=None if leaving is None else met_s - leaving.end_s,
        meet_s=made_s - met_s,
        build_s=0.0,
    )


def met_text(entered: InPlace, before: int) -> str:
    """Return "generation 4: rank 3 was replaced (its process ended); all met: detect 0.40 s, ...".

    Args:
        entered: What this rank knows, with the losses of the run.
        before: The last generation that this process was in, or could have been in.
    """
    losses = [loss for loss in entered.losses if loss.generation > before]
    silent_s = losses[0].silent_s if losses else 0.0
    ranks = sorted({loss.rank for loss in losses})
    whys = ", ".join(sorted({CAUSES[loss.cause] for loss in losses}))
    who = f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks)} {'were' if len(ranks) > 1 else 'was'} replaced ({whys})"
    measured = {
        "detect": None if entered.detect_s is None else max(silent_s, entered.detect_s),
        "abort": entered.abort_s,
        "replace": entered.replace_s,
        "meet": entered.meet_s,
    }
    took_s = {phase: value_s for phase, value_s in measured.items() if value_s is not None}
    return f"generation {entered.generation}: {who if losses else 'it begins'}; all met: {phases_text(took_s)}"


# -- failures -----------------------------------------------------------------------------------------
# The same failure of the training function again and again: a bug, which no restart repairs. Pure.


REPEATS = 3


class Failure(msgspec.Struct, frozen=True):
    """An exception that left the training function on some rank and is no loss of another one.

    Attributes:
        run: Of the worker group that the rank belonged to.
        generation: In that run.
        rank: Whose function raised.
        step: The newest step that this rank had put or restored; None if there was none.
        kind: The exception's class, and the line that raised it.
        text: The traceback.
    """

    run: str
    generation: int
    rank: int
    step: int | None
    kind: str
    text: str


def failure_of(error: BaseException, *, run: str, generation: int, rank: int, step: int | None) -> Failure:
    """Return what an exception says of a rank's failure."""
    raised = traceback.extract_tb(error.__traceback__)[-1:]
    where = f"{raised[0].filename}:{raised[0].lineno}" if raised else "?"
    text = "".join(traceback.format_exception(error)).encode("utf-8", "backslashreplace").decode()
    return Failure(run, generation, rank, step, f"{type(error).__qualname__} in {where}", text)


class Failures:
    """All failures of a job, over its worker groups."""

    def __init__(self) -> None:
        self._generations: dict[tuple[int | None, str], set[tuple[str, int]]] = defaultdict(set)

    def is_hopeless(self, failure: Failure) -> bool:
        """Take a failure; return whether it has come in REPEATS generations at one step. Ranks of one count once."""
        generations = self._generations[failure.step, failure.kind]
        generations.add((failure.run, failure.generation))
        return len(generations) >= REPEATS

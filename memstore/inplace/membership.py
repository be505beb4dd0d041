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

from typing import Protocol

from memstore.core.cluster.text import listed
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
        """Return the absent ranks once that is known, None before; tell the server, unless all or none are."""
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

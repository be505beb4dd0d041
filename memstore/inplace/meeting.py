"""Where ranks meet: a torch TCPStore in the process that replaces lost ranks, so that no rank's death takes it away.

Keys: those of `membership.py`, `failures` and `failure/N` (exceptions that are no losses), `losses` (the ranks that
were replaced, and why), and what the process groups of a generation keep under its own prefix.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import msgspec
import torch.distributed as dist

from memstore.core.wire.calls import RankLoss
from memstore.inplace import membership
from memstore.inplace.gloo_sockets import open_sockets, probe_new
from memstore.inplace.lifelines import UNWATCHED_S, End, Lifelines, Process
from memstore.inplace.membership import NONE, Closing, Coming, Failure, Inquiry, RankMembership

# -- meeting ------------------------------------------------------------------------------------------


T = TypeVar("T")
LOOK_S = 0.005
DONE_LOOK_S = 0.05
COMES_SHARE = 0.5  # of meet_s, in which a process that has started comes to the meeting, or is replaced
LOSSES_MAX = 256  # the newest ones are kept
_FAILURE = msgspec.json.Decoder(Failure)
_LOSSES = msgspec.json.Decoder(tuple[RankLoss, ...])
CALL_S = 20.0  # longest wait to connect
SILENT_S = 30.0  # after which a host that does not answer is gone; a store whose process is stopped is waited for


@dataclass(frozen=True, slots=True, kw_only=True)
class MeetingPlace:
    """What a rank needs to find the others, and how it calls itself."""

    address: str
    port: int
    run: str  # new for every start of the whole worker group
    rank: int
    life: int  # the number of this process among those that have been this rank
    first: int  # the earliest generation that it may begin with
    world_size: int
    launcher: str  # what would start all ranks again
    backend: str
    collective_timeout_s: float
    gpu: int | None = None  # that NCCL is to use; None: the only one that the process sees
    meet_s: float = 60.0  # longest wait for the other ranks; then GatherTimeout
    leave_s: float = 60.0  # longest wait for this rank to leave a generation that is over; then its process is killed
    lifeline_port: int = 0  # where this rank's watchdog connects to
    hang_after_s: float | None = None  # after which a frozen process or a silent host is lost; None: no watchdog


class StoreBoard:
    """The board of a meeting: the numbers in its store, over another connection once one has broken."""

    def __init__(self, connect: Callable[[], dist.Store]) -> None:
        self._connect, self.store = connect, connect()

    def number(self, key: str) -> int:
        """Return a number that was put there; NONE if none was."""
        return self.ask(lambda store: int(store.get(key)) if store.check([key]) else NONE)

    def put(self, key: str, number: int) -> None:
        """Put a number there."""
        self.store.set(key, str(number))

    def count(self, key: str, more: int = 0) -> int:
        """Add to a count, which begins at 0; return what it is then."""
        now = self.ask(lambda store: store.add(key, 0))
        return self.store.add(key, more) if more else now  # not asked again: it may have been counted

    def ask(self, ask: Callable[[dist.Store], T]) -> T:
        """Ask the store; over other connections for as long as a first one may take, if this one breaks."""
        until_s = time.monotonic() + CALL_S
        while True:
            try:
                return ask(self.store)
            except dist.DistError:
                if time.monotonic() > until_s:
                    raise
                time.sleep(LOOK_S)
                self.store = self._connect()


class MeetingServer:
    """The meeting's store, in the process that starts ranks and replaces them."""

    def __init__(self, world_size: int, hang_after_s: float | None = None) -> None:
        self.run = secrets.token_hex(8)
        self._store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
        self._lifelines = None if hang_after_s is None else Lifelines(self.run, hang_after_s)
        self._hang_after_s = hang_after_s or 0.0
        self._lock = threading.Lock()
        self._ends: dict[int, End] = {}  # of ranks that are lost and not replaced yet
        self._expected: list[tuple[Process, float]] = []  # that begin, and when they are lost without a watchdog
        self._losses: list[RankLoss] = []
        self._failures = 0  # numbers that were looked at
        self._unread: set[int] = set()  # of failures whose rank ended between its number and its text, or is about to
        self._members = RankMembership(StoreBoard(lambda: self._store), world_size)

    def close(self) -> None:
        """End the store: ranks that still wait for one another get an error."""
        del self._store, self._members
        if self._lifelines is not None:
            self._lifelines.close()

    @property
    def port(self) -> int:
        """Return the port that the store listens at."""
        return int(self._store.port)

    @property
    def lifeline_port(self) -> int:
        """Return the port that the ranks' watchdogs connect to; 0 if ranks have none."""
        return 0 if self._lifelines is None else self._lifelines.port

    @property
    def generation(self) -> int:
        """Return the generation that is wanted."""
        return self._members.generation

    def begin(self, generation: int) -> None:
        """Let all ranks meet for a generation: its replacements are there, or about to be."""
        with self._lock:
            self._members.begin(generation)

    def mark_broken(self) -> None:
        """Tell all ranks that the present generation has lost one, unless all of them had returned before."""
        with self._lock:
            self._members.mark_broken()

    def register(self, rank: int, *, is_spare: bool = False) -> int:
        """Return the number of a new process of this rank; the former one counts no more.

        Args:
            rank: Whose first process it is, or whose last one was lost.
            is_spare: The process has waited for this.
        """
        with self._lock:
            life = self._members.register(rank)
            if life > 1:
                end = self._ends.pop(rank, End.UNSEEN)
                silent_s = end.silent_s(self._hang_after_s)
                self._losses.append(RankLoss(rank, self._members.generation + 1, end.cause, is_spare, silent_s))
                self._store.set("losses", msgspec.json.encode(self._losses[-LOSSES_MAX:]).decode())
            return life

    def is_done(self) -> bool:
        """Return whether the function has returned on all ranks: what ends now is no loss."""
        with self._lock:
            return self._members.is_done()

    def take_failures(self) -> list[Failure]:
        """Return the exceptions that left the function, and are no losses, since the last look."""
        with self._lock:
            first, self._failures = self._failures, self._store.add("failures", 0)
            self._unread.update(range(first + 1, self._failures + 1))
            there = [number for number in sorted(self._unread) if self._store.check([f"failure/{number}"])]
            self._unread.difference_update(there)
            return [_FAILURE.decode(self._store.get(f"failure/{number}")) for number in there]

    def expect(self, process: Process, meet_s: float, now: float) -> None:
        """Take a process, which has begun, for lost if it has no watchdog in time for the others' wait for it."""
        with self._lock:
            self._expected.append((process, now + max(UNWATCHED_S, COMES_SHARE * meet_s)))

    def take_lost(self, now: float) -> dict[int, End]:
        """Return the ranks that were lost since the last look, each with the reason; one thread looks."""
        if self._lifelines is None:
            return {}
        with self._lock:
            lives, expected = dict(self._members.lives), self._expected
            self._expected = []
        for process, until in expected:
            self._lifelines.expect(process, until)
        lost = self._lifelines.take_lost(lives, now)
        with self._lock:
            lost |= {rank: End.ABSENT for rank in self._members.take_absent() if rank not in lost}
            self._ends |= {rank: end for rank, end in lost.items() if self._members.lives[rank] == lives[rank]}
        return lost


def connect(place: MeetingPlace) -> dist.Store:
    """Return a connection to the meeting's store."""
    before = open_sockets()
    store = dist.TCPStore(
        place.address, place.port, is_master=False, timeout=timedelta(seconds=CALL_S), wait_for_workers=False
    )
    probe_new(before, place.port, SILENT_S)  # a call of the store has no limit of its own
    return store


class Meeting:
    """A rank's way to the others; each thread has one of its own."""

    def __init__(self, place: MeetingPlace) -> None:
        self.place = place
        self.board = StoreBoard(lambda: connect(place))

    def again(self) -> Meeting:
        """Return another connection to the same meeting, for another thread."""
        return Meeting(self.place)

    def is_over(self, generation: int) -> bool:
        """Return whether a generation has lost a rank, or a newer one is wanted."""
        return membership.is_over(self.board, generation)

    def is_over_for_all(self, generation: int) -> bool:
        """Say that this rank's function has returned, and wait until all ranks' have; False if one is lost first.

        There is no limit: another rank may work on for as long as it likes.
        """
        done = self.board.count(f"done/{generation}", 1)
        while (is_over := membership.is_over_for_all(self.board, generation, done, self.place.world_size)) is None:
            time.sleep(DONE_LOOK_S)
            done = self.board.count(f"done/{generation}")
        return is_over

    def inquire(self, generation: int) -> Inquiry:
        """Ask which ranks do not wait in a collective, though one of this rank's timed out."""
        return Inquiry(self.board, generation, self.place.world_size, time.monotonic())

    def is_asked(self, generation: int) -> bool:
        """Return whether some rank asks that."""
        return membership.is_asked(self.board, generation)

    def note_waiting(self, generation: int) -> None:
        """Answer, once, that this rank waits, or has left."""
        membership.note_waiting(self.board, generation, self.place.rank)

    def wait_until_closed(self, generation: int) -> None:
        """Count this rank among those that put nothing more in a generation, and wait until the other living ones have.

        A few times QUIET_S at most.
        """
        closing = Closing(self.board, generation, self.place.world_size, time.monotonic())
        while not closing.look(time.monotonic()):
            time.sleep(LOOK_S)

    def report(self, failure: Failure) -> None:
        """Report an exception that is to end this rank's process."""
        number = self.board.count("failures", 1)
        self.board.store.set(f"failure/{number}", msgspec.json.encode(failure).decode())

    def losses(self, upto: int) -> tuple[RankLoss, ...]:
        """Return the newest losses of this run whose ranks were replaced before a generation had met."""
        there = self.board.ask(lambda store: store.get("losses") if store.check(["losses"]) else b"[]")
        return tuple(loss for loss in _LOSSES.decode(there) if loss.generation <= upto)

    def meet(self, after: int) -> int:
        """Wait until all ranks have come to a generation newer than `after`, and return its number.

        NONE if the function has returned on all ranks: there will be no other generation.

        A rank that is lost meanwhile makes the others wait for the generation of its replacement.

        Raises:
            GatherTimeout: The others did not come within `meet_s` of the last replacement.
            FencedError: Another process is this rank now: this one was frozen, or cut off, and taken for lost.
        """
        place = self.place
        coming = Coming(
            self.board,
            rank=place.rank,
            life=place.life,
            world_size=place.world_size,
            after=after,
            meet_s=place.meet_s,
            now=time.monotonic(),
        )
        while (number := coming.look(time.monotonic())) is None:
            time.sleep(LOOK_S)
        return number

"""May the next bytes of a copy go now? Not while a rank of this host has a collective under way (D87). Pure.

    begin --> held piece by piece into idle spans --> end
        '--> released: a newer put of the rank begins, or `hold_s` have passed; the rest spills over, and is told

The gate runs Algorithm 2 (`chunk_fit.py`) as it goes: a span's room is what the profile (`idle_spans.py`) leaves of it
now, less what still waits in the kernel. Without marks all goes at once. Nothing here holds a restore or a repair.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from memstore.core.chunk_fit import SAFE_SHARE, Link, fit, piece_bytes
from memstore.core.idle_spans import IdleSpans

PIECE_S = 0.002  # a piece holds the link for so long; two are on their way at most when a collective begins early
STARTUP_S = 0.0002  # from the decision until the first byte is on the wire
FIRST_RATE = 125e6  # bytes per second, until one was measured
RATES_KEPT = 16
SAMPLE_S = 0.005  # a rate is measured over so long, or until everything has arrived
LOOK_S = 0.002  # how often somebody who waits for an idle span looks
TURN_S = 0.05  # a stream that has not asked for so long has lost its turn
BUSY_MAX_S = 10.0  # a collective that takes longer hangs, or its rank does: it moves no bytes
ITERATIONS_MAX = 64  # from one put to the next, for what is said of them
CHUNK_HOLD_S = 10.0  # a chunk that has begun waits no longer: its receiver gives up after 30 s


class Answer(NamedTuple):
    """So many bytes may go now; if 0, ask again after `wait_s`."""

    nbytes: int
    wait_s: float = 0.0


@dataclass(slots=True, eq=False)
class Sending:
    """One push of one put."""

    job: str
    rank: int
    order: tuple[int, int]  # attempt and step
    began_s: float
    sent_bytes: int = 0
    spilled_bytes: int = 0
    is_released: bool = False


class TrafficGate:
    """All pushes of puts of one host, and the marks of its ranks."""

    def __init__(self, hold_s: float) -> None:
        self.hold_s = hold_s
        self.ranks: dict[str, IdleSpans] = {}  # by process
        self.spilled_bytes = 0  # sent beside collectives, or regardless of them
        self.short = ""  # why idle time does not suffice; "" while it does
        self._sendings: list[Sending] = []
        self._last_bytes: dict[tuple[str, int], int] = {}  # (job, rank) -> what its last put sent to one target
        self._last_iteration: dict[tuple[str, int], int] = {}  # (job, rank) -> when its last put began
        self._rates: deque[float] = deque(maxlen=RATES_KEPT)
        self._stream = 0  # whose turn it is: one stream at a time, so that what waits in the kernel is known
        self._looked_s = -math.inf  # when it asked last
        self._sample_s = 0.0  # when the present sample of its rate began
        self._sample_bytes = 0  # given to the kernel since, and what it had then

    # -- the link -------------------------------------------------------------------------------

    @property
    def link(self) -> Link:
        """What sending costs now, by the fastest of the last samples: slower ones shared the link."""
        rate = max(self._rates, default=FIRST_RATE)
        return Link(rate, STARTUP_S, max(1, int(rate * PIECE_S)))

    def _take_turn(self, now: float, stream: int) -> bool:
        """Say whether it is this stream's turn; one that is stuck in its kernel loses its own."""
        if self._stream != stream:
            if self._stream and now - self._looked_s < TURN_S:
                return False
            self._stream, self._sample_bytes = stream, 0
        self._looked_s = now
        return True

    def _measure(self, now: float, queued: int) -> None:
        """Take how many bytes were acknowledged since the sample began."""
        took_s = now - self._sample_s
        if self._sample_bytes and took_s > 0 and (not queued or took_s >= SAMPLE_S):
            self._rates.append((self._sample_bytes - queued) / took_s)
            self._sample_s, self._sample_bytes = now, queued

    # -- pushes ---------------------------------------------------------------------------------

    def begin(self, now: float, job: str, rank: int, order: tuple[int, int], nbytes: int) -> Sending:
        """A put's copy is about to travel to one target; older ones of its rank are held no longer."""
        for older in self._sendings:
            if (older.job, older.rank) == (job, rank) and older.order < order:
                older.is_released = True
        sending = Sending(job, rank, order, now)
        self._sendings.append(sending)
        tightest = min((r for r in self.ranks.values() if r.expected), key=lambda r: sum(r.expected), default=None)
        if tightest is not None:
            asked = sum(self._last_bytes.get((s.job, s.rank), nbytes) for s in self._sendings if not s.is_released)
            since = tightest.iterations - self._last_iteration.get((job, rank), tightest.iterations)
            every = min(max(1, since), ITERATIONS_MAX)
            self._last_iteration[job, rank] = tightest.iterations
            self._say(fit(tightest.expected * every, asked, self.link).why, order[1])
        return sending

    def end(self, sending: Sending) -> None:
        """The push is over; what it could not fit is told."""
        if sending not in self._sendings:
            return
        self._sendings.remove(sending)
        if not sending.sent_bytes:
            return
        self._last_bytes[sending.job, sending.rank] = sending.sent_bytes
        if sending.spilled_bytes:
            rate = self.link.rate
            needs_s, had_s = sending.sent_bytes / rate, (sending.sent_bytes - sending.spilled_bytes) / rate
            why = f"needed {needs_s * 1e3:.0f} ms of the link, found {had_s * 1e3:.0f} ms between collectives"
            self._say(why, sending.order[1])

    def _say(self, why: str, step: int) -> None:
        self.short = f"step {step} {why}" if why else ""

    def allow(self, now: float, sending: Sending, asked: int, stream: int, queued: int, held_s: float) -> Answer:
        """Decide how many of the bytes that one stream wants to send may go now.

        Args:
            asked: Bytes that the stream has at hand, > 0.
            queued: Bytes that its kernel holds and nobody has acknowledged.
            held_s: How long the chunk at hand has been under way.
        """
        room_s = self.room_s(now)
        if room_s is None:
            return self._go(now, sending, asked)
        sending.is_released |= now - sending.began_s > self.hold_s
        if sending.is_released or held_s > CHUNK_HOLD_S:
            sending.spilled_bytes += asked
            self.spilled_bytes += asked
            return self._go(now, sending, asked)
        if not self._take_turn(now, stream):
            return Answer(0, LOOK_S)
        self._measure(now, queued)
        link = self.link
        nbytes = piece_bytes(room_s - queued / link.rate, asked, link)
        if not nbytes:
            return Answer(0, LOOK_S)
        if queued > link.piece_bytes:
            return Answer(0, min(LOOK_S, max(PIECE_S / 8, (queued - link.piece_bytes / 2) / link.rate)))
        return self._go(now, sending, nbytes)

    def _go(self, now: float, sending: Sending, nbytes: int) -> Answer:
        if not self._sample_bytes:
            self._sample_s = now
        self._sample_bytes += nbytes
        sending.sent_bytes += nbytes
        return Answer(nbytes)

    def leave(self, stream: int) -> None:
        """A stream has given its kernel all it had: it is another one's turn."""
        if self._stream == stream:
            self._stream = self._sample_bytes = 0

    def room_s(self, now: float) -> float | None:
        """Return the safe share of what is left of the present idle span; None if no rank's marks say anything."""
        return min((r.room_s(now, SAFE_SHARE) for r in self.ranks.values() if not _hangs(r, now)), default=None)


def _hangs(spans: IdleSpans, now: float) -> bool:
    """Say whether a rank has not marked anything yet, or has been in one collective for too long to be at work."""
    return spans.marked_s == -math.inf or (spans.is_busy and now - spans.since_s > BUSY_MAX_S)

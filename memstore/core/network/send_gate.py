"""May the next bytes of a copy go now? Not while a rank of this host has a collective under way (D87). Pure.

    begin --> held piece by piece into idle spans --> end
        '--> let go: a newer put of the rank begins, or `hold_s` have passed; the rest spills over, and is reported

The gate runs Algorithm 2 (`chunk_fit.py`) as it goes: a span's room is what the profile (`idle_profile.py`) leaves of
it now, less what still waits in the kernel. Without marks all goes at once. Nothing here holds a restore or a repair.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from memstore.core.network.chunk_fit import PIECE_MIN_BYTES, SAFE_SHARE, LinkSpeed, piece_bytes
from memstore.core.network.idle_profile import BUSY_MAX_S, IdleSpans

PIECE_S = 0.002  # time of a piece on the link; at most two are under way when a collective begins early
STARTUP_S = 0.0002  # from the decision until the first byte is on the wire
FIRST_RATE = 125e6  # bytes per second, until one was measured
RATES_KEPT = 16
RATE_KEPT_S = 10.0  # a rate that is older is forgotten: one too low would let nothing go, and so never be corrected
SAMPLE_S = 0.005  # a rate is measured over this time, or until a piece has arrived
LOOK_S = 0.002  # between two looks of a stream that waits for an idle span
TURN_S = 0.05  # a stream that has not asked for this long, or whose peer took nothing, loses its turn
CHUNK_HOLD_S = 10.0  # a chunk that has begun waits no longer: its receiver gives up after 30 s

Order = tuple[int, int]  # attempt and step


class Answer(NamedTuple):
    """So many bytes may go now; if 0, ask again after `wait_s`."""

    nbytes: int
    wait_s: float = 0.0


@dataclass(slots=True, eq=False)
class Sending:
    """One push of one put."""

    putter: Putter
    order: Order
    began_s: float
    sent_bytes: int = 0
    spilled_bytes: int = 0


@dataclass(slots=True, eq=False)
class Putter:
    """A rank that puts: copies of its puts below `newest` are held no longer; why its last copy spilled, or ""."""

    newest: Order = (0, 0)
    short: str = ""


class SendSchedule:
    """All pushes of puts of one host, and the marks of its ranks."""

    def __init__(self, hold_s: float) -> None:
        self.hold_s = hold_s
        self.ranks: dict[str, IdleSpans] = {}  # by process
        self.spilled_bytes = 0  # sent beside collectives, or regardless of them
        self._putters: dict[tuple[str, int], Putter] = {}  # by job and rank
        self._rates: deque[tuple[float, float]] = deque(maxlen=RATES_KEPT)  # (when, bytes per second)
        self._stream = 0  # whose turn it is: one stream at a time, so that what waits in the kernel is known
        self._moved_s = -math.inf  # when it last asked without being stuck
        self._unacked = 0  # what it had sent then without an acknowledgement
        self._sample_s = 0.0  # when the present sample of its rate began
        self._sample_bytes = 0  # given to the kernel since, and in the kernel then

    # -- the link -------------------------------------------------------------------------------

    @property
    def link(self) -> LinkSpeed:
        """Return the present cost of sending, by the fastest of the last samples: slower ones shared the link."""
        rate = max((rate for _, rate in self._rates), default=FIRST_RATE)
        return LinkSpeed(rate, STARTUP_S, max(PIECE_MIN_BYTES, int(rate * PIECE_S)))

    def _take_turn(self, now: float, stream: int, unacked: int) -> bool:
        """Say whether it is this stream's turn; one whose peer takes nothing loses it to the next that asks."""
        if self._stream != stream:
            if self._stream and now - self._moved_s < TURN_S:
                return False
            self._stream, self._moved_s = stream, now
            self._sample_s, self._sample_bytes = now, unacked
        elif not unacked or unacked != self._unacked:
            self._moved_s = now
        self._unacked = unacked
        return True

    def _measure(self, now: float, unacked: int) -> None:
        """Take how many bytes were acknowledged since the sample began; few or none say nothing of the link."""
        took_s, acked = now - self._sample_s, self._sample_bytes - unacked
        if took_s >= SAMPLE_S or not unacked:
            # Less than a whole piece may have passed in a burst that the link allows once.
            if took_s > 0 and acked >= (PIECE_MIN_BYTES if took_s >= SAMPLE_S else self.link.piece_bytes):
                self._rates.append((now, acked / took_s))
            elif unacked:
                return
            self._sample_s, self._sample_bytes = now, unacked

    # -- pushes ---------------------------------------------------------------------------------

    def release(self, job: str, rank: int, order: Order) -> Putter:
        """Begin a put: copies of older ones of its rank are held no longer."""
        putter = self._putters.setdefault((job, rank), Putter())
        putter.newest = max(putter.newest, order)
        return putter

    def begin(self, now: float, job: str, rank: int, order: Order) -> Sending:
        """Begin to send a put's copy to one target."""
        while self._rates and now - self._rates[0][0] > RATE_KEPT_S:
            self._rates.popleft()
        return Sending(self.release(job, rank, order), order, now)

    def end(self, sending: Sending) -> None:
        """End a push; report what it could not fit, until a push of the rank fits."""
        sending.putter.short = ""
        if sending.spilled_bytes:
            rate = self.link.rate
            needs_s, had_s = sending.sent_bytes / rate, (sending.sent_bytes - sending.spilled_bytes) / rate
            sending.putter.short = (
                f"step {sending.order[1]} needed {needs_s * 1e3:.0f} ms of the link, "
                f"found {had_s * 1e3:.0f} ms between collectives"
            )

    @property
    def short(self) -> str:
        """Return why idle time does not suffice; "" while it does."""
        return next((putter.short for putter in list(self._putters.values()) if putter.short), "")

    def forget(self, job: str, rank: int) -> None:
        """Forget a rank that is gone, and its shortage."""
        if (job, rank) in self._putters:
            self._putters[job, rank].short = ""

    def allow(
        self, now: float, sending: Sending, asked: int, stream: int, unacked: int, held_s: float, rtt_s: float = 0.0
    ) -> Answer:
        """Decide how many of the bytes that one stream wants to send may go now.

        Args:
            asked: Bytes that the stream has at hand, > 0.
            unacked: Bytes that its kernel holds and the peer has not acknowledged.
            held_s: How long the chunk at hand has been under way.
            rtt_s: How long an acknowledgement takes on a link without a queue: so much is on its way, not waiting.
        """
        room_s = self.room_s(now)
        is_late = sending.order < sending.putter.newest or now - sending.began_s > self.hold_s or held_s > CHUNK_HOLD_S
        if room_s is None or is_late:
            if room_s is not None:
                sending.spilled_bytes += asked
                self.spilled_bytes += asked
            sending.sent_bytes += asked
            return Answer(asked)
        if not self._take_turn(now, stream, unacked):
            return Answer(0, LOOK_S)
        self._measure(now, unacked)
        link = self.link
        queued = max(0.0, unacked - rtt_s * link.rate)
        nbytes = piece_bytes(room_s - queued / link.rate, asked, link)
        if not nbytes:
            return Answer(0, LOOK_S)
        if queued > link.piece_bytes:
            return Answer(0, min(LOOK_S, max(PIECE_S / 8, (queued - link.piece_bytes / 2) / link.rate)))
        if not self._sample_bytes:
            self._sample_s = now
        self._sample_bytes += nbytes
        sending.sent_bytes += nbytes
        return Answer(nbytes)

    def leave(self, stream: int) -> None:
        """Pass the turn on: a stream has given its kernel all its bytes."""
        if self._stream == stream:
            self._stream = self._sample_bytes = 0

    def room_s(self, now: float) -> float | None:
        """Return the safe share of the rest of the present idle span; None if no rank marks its collectives."""
        return min((r.room_s(now, SAFE_SHARE) for r in self.ranks.values() if not _hangs(r, now)), default=None)


def _hangs(spans: IdleSpans, now: float) -> bool:
    """Say whether a rank has not marked anything yet, or has been in one collective for too long to be at work."""
    return spans.marked_s == -math.inf or (spans.is_busy and now - spans.since_s > BUSY_MAX_S)

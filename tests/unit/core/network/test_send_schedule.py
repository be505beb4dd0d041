"""Copies travel between collectives: the profile, pieces for its spans, and the gate that sends them (D87)."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memstore.core.network.chunk_fit import PIECE_MIN_BYTES, LinkSpeed, piece_bytes
from memstore.core.network.idle_profile import BUSY_MAX_S, LEARN_MIN, WINDOW, IdleSpans, Kind
from memstore.core.network.send_gate import CHUNK_HOLD_S, PIECE_S, RATE_KEPT_S, TURN_S, SendSchedule

RATE = 100e6
LINK = LinkSpeed(RATE, 0.0002, 1 << 20)


class Rank:
    """A rank that computes and reduces in turns, on a clock of its own: tells the gate's profile what it does."""

    def __init__(self, gate: SendSchedule, pattern: list[tuple[float, float]], jitter: float = 0.0, seed: int = 0):
        self.pattern, self.jitter, self.random = pattern, jitter, random.Random(seed)
        self.spans = gate.ranks.setdefault("rank", IdleSpans())
        self.marks = self._marks()
        self.next = next(self.marks)
        self.iterations = 0

    def _marks(self):
        now = 0.0
        while True:
            yield now, Kind.ITERATION
            for idle_s, busy_s in self.pattern:
                now += idle_s * self.random.uniform(1 - self.jitter, 1 + self.jitter)
                yield now, Kind.BUSY
                now += busy_s
                yield now, Kind.IDLE

    def until(self, now: float) -> None:
        """Mark everything that happens up to now."""
        while self.next[0] <= now:
            at_s, kind = self.next
            self.spans.mark(kind, at_s)
            self.iterations += kind is Kind.ITERATION
            self.next = next(self.marks)

    def run(self, iterations: int) -> float:
        """Go to the beginning of an iteration; return its time."""
        while self.iterations < iterations:
            self.until(self.next[0])
        return self.spans.marked_s


def push(gate: SendSchedule, rank: Rank, now: float, nbytes: int, step: int, limit_s: float = 1e9):
    """Send one put over a link of RATE; return (when the kernel took the last byte, bytes on the wire while busy)."""
    sending = gate.begin(now, "job", 0, (1, step))
    left, wire_free_s, beside = nbytes, now, 0
    end_s = now + limit_s
    while left and now < end_s:
        rank.until(now)
        queued = int(max(0.0, wire_free_s - now) * RATE)
        answer = gate.allow(now, sending, left, 1, queued, 0.0)
        if answer.nbytes:
            assert 0 < answer.nbytes <= left
            left -= answer.nbytes
            wire_free_s = max(now, wire_free_s) + answer.nbytes / RATE
            room_s = rank.next[0] - now if not rank.spans.is_busy else 0.0
            if rank.next[1] is Kind.ITERATION:
                room_s += rank.pattern[0][0] * (1 - rank.jitter)
            beside += int(max(0.0, wire_free_s - now - room_s) * RATE)
            now += 1e-5
        else:
            assert answer.wait_s > 0
            now += answer.wait_s
    assert sending.sent_bytes == nbytes - left
    gate.leave(1)
    gate.end(sending)
    return now, beside


# -- pieces -----------------------------------------------------------------------------------------


@given(st.floats(0, 1), st.integers(1, 1 << 26))
def test_a_piece_is_worth_its_cost_or_the_last(room_s, left) -> None:
    """No crumbs: a piece that is not the last is of the least size or larger, and fits."""
    size = piece_bytes(room_s, left, LINK)
    assert size == 0 or LINK.cost_s(size) <= room_s + 1e-6
    assert size == 0 or size == left or size >= PIECE_MIN_BYTES


# -- the profile ------------------------------------------------------------------------------------


def test_a_profile_is_learned_after_a_few_iterations_and_is_a_low_quantile() -> None:
    """Jitter of a tenth: four in five spans are at least as long as expected."""
    gate = SendSchedule(60.0)
    rank = Rank(gate, [(0.05, 0.02), (0.03, 0.01)], jitter=0.1)
    rank.run(LEARN_MIN)
    assert rank.spans.expected == ()
    rank.run(WINDOW + 2)
    first, second, last = rank.spans.expected
    assert 0.045 <= first <= 0.05
    assert 0.027 <= second <= 0.03
    assert last == 0.0


def test_a_new_pattern_is_learned_again() -> None:
    """Another number of collectives: the old profile is dropped at once, the new one is there as soon as learned."""
    gate = SendSchedule(60.0)
    rank = Rank(gate, [(0.05, 0.02)])
    rank.run(10)
    assert len(rank.spans.expected) == 2
    rank.pattern = [(0.02, 0.01), (0.03, 0.01)]
    rank.run(12)
    assert rank.spans.expected == ()
    rank.run(10 + LEARN_MIN + 1)
    assert rank.spans.expected == pytest.approx((0.02, 0.03, 0.0))


def test_a_span_that_grew_or_shrank_is_learned_within_the_window() -> None:
    """The same pattern, other lengths."""
    gate = SendSchedule(60.0)
    rank = Rank(gate, [(0.05, 0.02)])
    rank.run(20)
    rank.pattern = [(0.01, 0.02)]
    rank.run(26)
    assert rank.spans.expected[0] == pytest.approx(0.01)


def test_lost_marks_teach_nothing() -> None:
    """A gap in the marks ends the iteration's lesson, not the profile."""
    spans = IdleSpans()
    for at_s in range(8):
        spans.mark(Kind.ITERATION, at_s)
        spans.mark(Kind.BUSY, at_s + 0.5)
        spans.mark(Kind.IDLE, at_s + 0.6)
    spans.lose()
    spans.mark(Kind.ITERATION, 8.0)
    assert spans.expected == pytest.approx((0.5, 0.4))


# -- the gate ---------------------------------------------------------------------------------------


PATTERNS = st.lists(st.tuples(st.floats(0.02, 0.1), st.floats(0.005, 0.05)), min_size=1, max_size=6)


@given(PATTERNS, st.floats(0.1, 0.6), st.integers(0, 5))
def test_nothing_goes_beside_a_collective_while_idle_time_suffices(pattern, load, seed) -> None:
    """Jitter of a twentieth: each put ends within its iteration, next to nothing is sent into a busy span."""
    gate = SendSchedule(60.0)
    rank = Rank(gate, pattern, jitter=0.05, seed=seed)
    nbytes = int(load * sum(idle_s for idle_s, _ in pattern) * RATE)
    total = 0
    for step in range(12):
        now = rank.run(WINDOW + step)
        end_s, beside = push(gate, rank, now, nbytes, step)
        total += beside
        assert end_s - now <= 1.1 * (sum(idle_s + busy_s for idle_s, busy_s in pattern))
    assert gate.spilled_bytes == 0
    assert total <= 0.02 * 12 * nbytes


@given(PATTERNS)
def test_a_put_without_enough_idle_time_ends_when_the_next_begins_and_is_reported(pattern) -> None:
    """Twice what fits: released by the next put, so it ends soon after; the reason names what is needed and found."""
    gate = SendSchedule(60.0)
    rank = Rank(gate, pattern)
    now = rank.run(10)
    idle_s = sum(idle for idle, _ in pattern)
    nbytes = int(2 * idle_s * RATE)
    sending = gate.begin(now, "job", 0, (1, 1))
    assert gate.allow(now, sending, nbytes, 1, 0, 0.0).nbytes < nbytes
    gate.release("job", 0, (1, 2))
    left = nbytes - sending.sent_bytes
    assert gate.allow(now, sending, left, 1, 0, 0.0).nbytes == left
    gate.end(sending)
    assert gate.spilled_bytes == left
    assert "step 1 needed" in gate.short
    late = gate.begin(now, "job", 0, (1, 1))
    assert gate.allow(now, late, nbytes, 1, 0, 0.0).nbytes == nbytes


def test_what_is_short_is_reported_until_a_put_of_that_rank_fits() -> None:
    """Not by the other rank's puts, not by one that had nothing to send, not after the rank is gone."""
    gate = SendSchedule(3.0)
    gate.ranks["rank"] = IdleSpans()
    gate.ranks["rank"].mark(Kind.BUSY, 0.0)
    for step in (1, 2):
        late, other = gate.begin(0.0, "job", 0, (1, step)), gate.begin(0.0, "job", 1, (1, step))
        gate.allow(3.1, late, 1 << 20, 1, 0, 0.0)
        for sending in (late, other):
            gate.end(sending)
        assert gate.short.startswith(f"step {step} needed")
    gate.end(gate.begin(4.0, "job", 0, (1, 3)))
    assert gate.short == ""
    gate.end(gate.begin(4.0, "job", 0, (1, 4)))
    again = gate.begin(4.0, "job", 0, (1, 5))
    gate.allow(7.1, again, 1 << 20, 1, 0, 0.0)
    gate.end(again)
    assert gate.short
    gate.forget("job", 0)
    assert gate.short == ""


def test_no_profile_sends_when_not_busy() -> None:
    """The first iterations: pieces go while no collective is under way, and none while one is."""
    gate = SendSchedule(60.0)
    spans = gate.ranks["rank"] = IdleSpans()
    spans.mark(Kind.IDLE, 0.0)
    sending = gate.begin(0.0, "job", 0, (1, 0))
    first = gate.allow(0.0, sending, 1 << 20, 1, 0, 0.0)
    assert first.nbytes == int(125e6 * PIECE_S)
    spans.mark(Kind.BUSY, 0.001)
    assert gate.allow(0.001, sending, 1 << 20, 1, 0, 0.0).nbytes == 0


def test_what_waits_in_the_kernel_bounds_what_goes() -> None:
    """A collective that begins unforeseen waits for two pieces at most."""
    gate = SendSchedule(60.0)
    gate.ranks["rank"] = IdleSpans()
    gate.ranks["rank"].mark(Kind.IDLE, 0.0)
    sending = gate.begin(0.0, "job", 0, (1, 0))
    queued, now = {1: 0, 2: 0}, 0.0
    for turn in range(100):
        stream = 1 + turn % 2
        now += 1e-6
        queued[stream] += gate.allow(now, sending, 1 << 30, stream, queued[stream], 0.0).nbytes
    assert queued[2] == 0
    assert gate.link.piece_bytes < queued[1] <= 2 * gate.link.piece_bytes
    gate.leave(1)
    assert gate.allow(now, sending, 1 << 30, 2, 0, 0.0).nbytes > 0


def test_a_stream_that_is_stuck_loses_its_turn() -> None:
    """Its peer is gone, and its thread waits in the kernel: the others go on."""
    gate = SendSchedule(60.0)
    gate.ranks["rank"] = IdleSpans()
    gate.ranks["rank"].mark(Kind.IDLE, 0.0)
    sending = gate.begin(0.0, "job", 0, (1, 0))
    assert gate.allow(0.0, sending, 1 << 20, 1, 0, 0.0).nbytes > 0
    assert gate.allow(TURN_S / 2, sending, 1 << 20, 2, 0, 0.0).nbytes == 0
    assert gate.allow(TURN_S * 2, sending, 1 << 20, 2, 0, 0.0).nbytes > 0


@pytest.mark.parametrize("way", ["hold", "hang", "chunk", "silence", "none"])
def test_marks_hold_nothing_for_ever(way: str) -> None:
    """A put too old, a collective that hangs, a chunk under way, marks that ceased, no marks: the bytes go."""
    gate = SendSchedule(3.0)
    spans = IdleSpans()
    sending = gate.begin(0.0, "job", 0, (1, 0))
    now, held_s = 0.001, 0.0
    if way != "none":
        gate.ranks["rank"] = spans
        spans.mark(Kind.BUSY, 0.0)
        assert gate.allow(now, sending, 1 << 20, 1, 0, 0.0).nbytes == 0
    if way == "hold":
        now = 3.1
    elif way == "hang":
        gate.hold_s, now = 60.0, BUSY_MAX_S + 0.1
    elif way == "chunk":
        gate.hold_s, held_s = 60.0, CHUNK_HOLD_S + 0.1
    elif way == "silence":
        gate.hold_s = 60.0
        for at_s in itertools.chain(range(1, 8)):
            spans.mark(Kind.IDLE, at_s)
            spans.mark(Kind.ITERATION, at_s + 0.1)
            spans.mark(Kind.BUSY, at_s + 0.9)
        spans.mark(Kind.IDLE, 8.0)
        assert gate.allow(8.9, sending, 1 << 20, 1, 0, 0.0).nbytes == 0
        now = 10.0
    assert gate.allow(now, sending, 1 << 20, 1, 0, held_s).nbytes > 0


def test_the_rate_is_measured_from_what_was_acknowledged() -> None:
    """Ten times slower or faster than first guessed, the pieces follow: each holds the link for PIECE_S."""
    for rate in (12.5e6, 1.25e9):
        gate = SendSchedule(60.0)
        gate.ranks["rank"] = IdleSpans()
        gate.ranks["rank"].mark(Kind.IDLE, 0.0)
        sending = gate.begin(0.0, "job", 0, (1, 0))
        now = free_s = 0.0
        for _ in range(3000):
            answer = gate.allow(now, sending, 1 << 30, 1, int(max(0.0, free_s - now) * rate), 0.0)
            free_s = max(now, free_s) + answer.nbytes / rate
            now += answer.wait_s or 1e-5
        assert gate.link.rate == pytest.approx(rate, rel=0.2)
        assert gate.link.piece_bytes == pytest.approx(max(PIECE_MIN_BYTES, rate * PIECE_S), rel=0.2)


def test_a_link_that_stalls_is_not_measured_as_one_without_a_rate() -> None:
    """A peer's kernel acknowledges nothing for a second: nothing fails, and then the bytes go on."""
    gate = SendSchedule(60.0)
    gate.ranks["rank"] = IdleSpans()
    gate.ranks["rank"].mark(Kind.IDLE, 0.0)
    sending = gate.begin(0.0, "job", 0, (1, 0))
    unacked = 0
    for look in range(500):
        unacked += gate.allow(look * 0.002, sending, 1 << 30, 1, unacked, 0.0).nbytes
    assert unacked <= 2 * gate.link.piece_bytes
    assert gate.allow(1.0, sending, 1 << 30, 1, 0, 0.0).nbytes >= PIECE_MIN_BYTES
    gate.leave(1)
    assert gate.allow(1.1, gate.begin(1.1, "job", 0, (1, 1)), 1 << 30, 2, 0, 0.0).nbytes >= PIECE_MIN_BYTES


def test_a_rate_too_low_is_forgotten() -> None:
    """Pieces that no span has room for would never be sent, nor measured."""
    gate = SendSchedule(60.0)
    spans = Rank(gate, [(0.02, 0.01)]).spans
    spans.mark(Kind.IDLE, 0.0)
    sending = gate.begin(0.0, "job", 0, (1, 0))
    assert gate.allow(0.0, sending, 1 << 20, 1, 0, 0.0).nbytes
    gate.allow(2.0, sending, 1 << 20, 1, 0, 0.0)
    assert gate.link.rate < 1e6
    gate.begin(RATE_KEPT_S + 2.1, "job", 0, (1, 1))
    assert gate.link.rate == 125e6


def test_what_goes_beside_does_not_count_for_the_rate() -> None:
    """A copy that is let go fills its own kernel's queue at once; the other one's pieces stay small."""
    gate = SendSchedule(60.0)
    gate.ranks["rank"] = IdleSpans()
    gate.ranks["rank"].mark(Kind.IDLE, 0.0)
    old, new = gate.begin(0.0, "job", 0, (1, 0)), gate.begin(0.0, "job", 0, (1, 1))
    now = free_s = 0.0
    for look in range(2000):
        if look % 50 == 0:
            assert gate.allow(now, old, 16 << 20, 2, 0, 0.0).nbytes == 16 << 20
        answer = gate.allow(now, new, 1 << 30, 1, int(max(0.0, free_s - now) * RATE), 0.0)
        free_s = max(now, free_s) + answer.nbytes / RATE
        now += answer.wait_s or 1e-5
    assert gate.link.rate == pytest.approx(RATE, rel=0.2)


def test_a_stream_whose_peer_takes_nothing_loses_its_turn() -> None:
    """It goes on asking; the others go on sending."""
    gate = SendSchedule(60.0)
    gate.ranks["rank"] = IdleSpans()
    gate.ranks["rank"].mark(Kind.IDLE, 0.0)
    sending = gate.begin(0.0, "job", 0, (1, 0))
    stuck, sent, free_s = 0, 0, 0.0
    for look in range(1000):
        now = look * 0.001
        stuck += gate.allow(now, sending, 1 << 30, 1, stuck, 0.0).nbytes
        nbytes = gate.allow(now, sending, 1 << 30, 2, int(max(0.0, free_s - now) * RATE), 0.0).nbytes
        free_s, sent = max(now, free_s) + nbytes / RATE, sent + nbytes
    assert sent >= 0.5 * RATE * 1.0


@pytest.mark.parametrize("rtt_s", [0.0, 0.002, 0.02])
def test_a_long_way_does_not_starve_a_copy(rtt_s: float) -> None:
    """What is on its way does not wait: most of an idle link is used, however late acknowledgements come."""
    gate = SendSchedule(60.0)
    gate.ranks["rank"] = IdleSpans()
    gate.ranks["rank"].mark(Kind.IDLE, 0.0)
    sending = gate.begin(0.0, "job", 0, (1, 0))
    now = free_s = 0.0
    unacked: list[tuple[float, int]] = []  # (when it is acknowledged, bytes), packet by packet
    while now < 2.0:
        unacked = [(at_s, nbytes) for at_s, nbytes in unacked if at_s > now]
        waiting = sum(nbytes for _, nbytes in unacked)
        answer = gate.allow(now, sending, 1 << 30, 1, waiting, 0.0, rtt_s)
        free_s = max(now, free_s)
        for nbytes in [9000] * (answer.nbytes // 9000) + [answer.nbytes % 9000]:
            free_s += nbytes / RATE
            unacked.append((free_s + rtt_s, nbytes))
        now += answer.wait_s or 1e-5
    assert sending.sent_bytes >= 0.7 * 2.0 * RATE
    assert gate.link.rate == pytest.approx(RATE, rel=0.3)


def test_a_burst_that_the_link_allows_once_is_not_its_rate() -> None:
    """Few bytes pass a token bucket at once, and are acknowledged at the next look."""
    gate = SendSchedule(60.0)
    gate.ranks["rank"] = IdleSpans()
    gate.ranks["rank"].mark(Kind.IDLE, 0.0)
    sending = gate.begin(0.0, "job", 0, (1, 0))
    for look in range(100):
        assert gate.allow(look * 0.01, sending, PIECE_MIN_BYTES, 1, 0, 0.0).nbytes == PIECE_MIN_BYTES
        assert gate.allow(look * 0.01 + 1e-4, sending, PIECE_MIN_BYTES, 1, 0, 0.0).nbytes == PIECE_MIN_BYTES
        gate.leave(1)
    assert gate.link.rate == 125e6

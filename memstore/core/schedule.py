"""How often to put, and how often to write to durable storage.

Ranks, the controller and the durable room ask it. Policy on numbers alone: it knows no job and no host.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from memstore.errors import ConfigError
from memstore.intervals import STEPS_MAX, Every, parse_every
from recovery.inventory import StepId

# -- durable interval ---------------------------------------------------------------------------------
# When to write a committed step to durable storage, and which durable steps may go (R31). Pure policy.
#
# Values in, decision with its reason out; `memstore/core/durable/storage_ports.py` has what carries it out.


UNMEASURED_S = 1800.0  # between durable steps under "auto" until a write has finished
LATE_TIMES = 2.0  # of what a write may be expected to take: no two take the same
_PATIENCE_DOUBLINGS = 16  # 65536 intervals: longer than any write; keeps the arithmetic finite


@dataclass(frozen=True, slots=True)
class Decision:
    """Which step is due to be written now, if any."""

    start: StepId | None
    why: str


def optimal_interval_s(cost_s: float, mtbf_s: float) -> float:
    """Return the time between checkpoints that wastes least: computing time, the checkpoint's own excluded.

    Args:
        cost_s: Seconds that one checkpoint stops training.
        mtbf_s: Mean seconds between failures, exponentially distributed.

    Source: J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, FGCS 22 (2006),
    eq. 37; its first term is Young's, A first order approximation to the optimum checkpoint interval, CACM 17 (1974).
    """
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def optimal_every(write_s: float | None, mtbf_s: float) -> Every:
    """Return the distance that wastes least (`optimal_interval_s`), never less than a write takes.

    No put waits for a durable write, so its real cost is a share of the network and the storage for that time:
    all of its time counts, as if training stood still, and every failure, as if RAM never survived one. Both are upper
    bounds, and the optimum grows with the one and shrinks with the other.

    Args:
        write_s: Seconds that the last write took, from its order to its marker; None: none has finished yet.
        mtbf_s: Mean seconds between failures.
    """
    if write_s is None:
        return Every(interval_s=UNMEASURED_S)
    return Every(interval_s=max(write_s, optimal_interval_s(write_s, mtbf_s)))


def next_durable(
    now: float,
    *,
    last_started_s: float | None,
    last_durable_step: StepId | None,
    committed: Sequence[StepId],
    every: str | int | Every | None,
    in_progress: StepId | None = None,
    last_started_step: StepId | None = None,
    abandoned_in_a_row: int = 0,
) -> Decision:
    """Decide whether a durable write is due now; whether it may begin is said below.

    The first committed step of an attempt goes at once, then the newest one each time `every` has passed.
    Each write abandoned in a row doubles the distance until one finishes: without that, storage slower than
    `every` would abandon every write and never hold a single step.

    Args:
        now: Seconds on the clock of `last_started_s`.
        last_started_s: Start of the last write, finished or not; None if not known.
        last_durable_step: Newest step of the lineage that has a marker.
        committed: Committed steps of the lineage that are still held; any order.
        in_progress: Newest step of the writes that have not finished.
        last_started_step: Step of the last write, so that one which failed is not started again and again.
        abandoned_in_a_row: Writes abandoned since the last one that finished.
    """
    spacing = every if isinstance(every, Every) else parse_every(every)
    if not committed:
        return Decision(None, "no step is committed yet")
    newest = max(committed)
    known = [step for step in (in_progress, last_durable_step, last_started_step) if step is not None]
    base = max(known, default=None)
    if base is not None and newest <= base:
        return Decision(None, f"nothing newer than step {base.step} of attempt {base.attempt} is committed")
    why = _why_due(now, last_started_s, base, newest, spacing, 1 << min(abandoned_in_a_row, _PATIENCE_DOUBLINGS))
    if why is None:
        return Decision(None, f"step {newest.step} is not due yet")
    return Decision(newest, why)


def _why_due(
    now: float, last_started_s: float | None, base: StepId | None, newest: StepId, spacing: Every, patience: int
) -> str | None:
    """Say why `newest` is due, or None."""
    if base is None or (base.attempt != newest.attempt and last_started_s is None):
        return f"step {newest.step} is the first committed step of attempt {newest.attempt}"
    if spacing.interval_s is not None:
        limit_s = spacing.interval_s * patience
        if last_started_s is None or now - last_started_s >= limit_s:
            return f"step {newest.step}: the last write started {limit_s:g} s ago or earlier"
    elif spacing.steps is not None:
        limit = spacing.steps * patience
        if newest.step - base.step >= limit:
            return f"step {newest.step} is {newest.step - base.step} steps after step {base.step}, of {limit}"
        if newest.step <= base.step:
            # A newer attempt at a smaller step went back along the lineage; counting on from `base` would
            # leave it without a durable step until it has caught up.
            return f"step {newest.step} of attempt {newest.attempt} goes back behind step {base.step}"
    return None


def is_late(now: float, since_s: float, moved_s: float, write_s: float | None) -> bool:
    """Return whether an unfinished write makes way for a newer one that is due.

    It has had twice as long as the last one that finished, and stands still for twice as long as it had moved. So a
    write that gets on ends, however slow storage is: what it has written is not thrown away.

    Args:
        now: Seconds on the clock of the others.
        since_s: When it began.
        moved_s: When a part of it was last reported as written; `since_s` if none was.
        write_s: Duration of the last write that finished; None if there was none.

    >>> is_late(60.0, 0.0, 0.0, None), is_late(60.0, 0.0, 50.0, None), is_late(60.0, 0.0, 0.0, 40.0)
    (True, False, False)
    """
    has_had_its_time = now - since_s >= LATE_TIMES * (write_s or 0.0)
    return has_had_its_time and now - moved_s >= LATE_TIMES * (moved_s - since_s)


def ends_in_time(now: float, since_s: float, write_s: float | None, until_s: float) -> bool:
    """Return whether an unfinished write ends before a newer one needs its room, if it takes as long as the last one.

    >>> ends_in_time(60.0, 0.0, 80.0, 90.0), ends_in_time(60.0, 0.0, 80.0, 70.0), ends_in_time(60.0, 0.0, 50.0, 90.0)
    (True, False, False)
    """
    return write_s is not None and now <= since_s + write_s <= until_s


def paced(now: float, free_s: float, nbytes: int, bytes_per_s: int | None) -> tuple[float, float]:
    """Return (when a write of `nbytes` may begin, when the next one may), so that the average keeps to the rate.

    >>> paced(10.0, 12.0, 100, 50)
    (12.0, 14.0)
    """
    start_s = max(now, free_s) if bytes_per_s else now
    return start_s, start_s + nbytes / bytes_per_s if bytes_per_s else now


def take_turn(free_s: dict[str, float], job: str, now: float, nbytes: int, bytes_per_s: int | None) -> float:
    """Return the seconds until a job's next write may begin; `free_s` keeps for each job when the one after it may."""
    start_s, free_s[job] = paced(now, free_s.get(job, now), nbytes, bytes_per_s)
    return start_s - now


def retire(durable_steps: Mapping[StepId, str], keep: int, key: str = "") -> tuple[StepId, ...]:
    """Return the steps of one lineage that `durable_keep` lets go, oldest first; never the newest.

    Steps under another key than `key` are not counted as kept: they go once `keep` newer ones are under it.

    Args:
        durable_steps: Step -> the name of its key.
        keep: How many steps under `key` stay.
        key: The present key's name.

    Raises:
        ConfigError: `keep` is below 1.

    >>> retire({StepId(1, 30): "", StepId(1, 10): "", StepId(2, 20): ""}, 2)
    (StepId(attempt=1, step=10),)
    """
    if keep < 1:
        raise ConfigError(f"durable_keep={keep}: at least 1 step must be kept, or set durable=None")
    kept = sorted(step for step, name in durable_steps.items() if name == key)[-keep:]
    return tuple(sorted(step for step in durable_steps if step < kept[0])) if len(kept) == keep else ()


# -- step pace ----------------------------------------------------------------------------------------
# How long a step of training takes, how far apart puts are, and when they are late. Pure (R12, D283).


PACE_STEPS = 9  # newest steps remembered: one pause among eight intervals moves the median little
MOMENTS = 64  # remembered to say since when some rank is beyond a step, at least MOMENTS_APART_S apart
MOMENTS_APART_S = 1.0
LATE_MIN_S, LATE_INTERVALS, LATE_PAUSES = 30.0, 3.0, 2.0
LATE_UNPACED_S = 600.0  # where nothing is known of the pace: a first compilation takes minutes
LAG_MIN_S, LAG_STEPS = 15.0, 10.0


class Pace:
    """The pace of one attempt, by the controller's monotonic clock."""

    def __init__(self) -> None:
        self._reached: deque[tuple[int, float]] = deque(maxlen=PACE_STEPS)  # step, when the first rank was there
        self._moments: deque[tuple[int, float]] = deque(maxlen=MOMENTS)  # some of these, over a longer time
        self._longest_s = 0.0  # between two of them, ever

    def reached(self, step: int, now: float) -> None:
        """Take that a rank is at a step now; only the first rank at a newer one than before counts."""
        if self._reached and step <= self._reached[-1][0]:
            return
        if self._reached:
            self._longest_s = max(self._longest_s, now - self._reached[-1][1])
        self._reached.append((step, now))
        if not self._moments or now - self._moments[-1][1] >= MOMENTS_APART_S:
            self._moments.append((step, now))

    @property
    def last(self) -> tuple[int, float] | None:
        """The newest step and when the first rank was there."""
        return self._reached[-1] if self._reached else None

    def passed_s(self, step: int, now: float) -> float | None:
        """Return for how long some rank has been beyond a step, to about a second; None if none is."""
        return next((now - at for seen, at in (*self._moments, *self._reached) if seen > step), None)

    def interval_s(self) -> float | None:
        """Return how far apart newer steps usually are reported."""
        intervals = [at - before_at for (_, before_at), (_, at) in pairwise(self._reached)]
        return median(intervals) if intervals else None

    def late_after_s(self) -> float:
        """Return after how many seconds without a newer step something is wrong.

        Three times the usual distance, and twice the longest pause so far: what pauses for an evaluation now and then
        may do so again. At least half a minute.

        >>> pace = Pace()
        >>> pace.late_after_s()
        600.0
        >>> for step, now in ((1, 0.0), (2, 20.0), (3, 40.0), (4, 110.0), (5, 130.0)):
        ...     pace.reached(step, now)
        >>> pace.late_after_s()
        140.0
        """
        interval_s = self.interval_s()
        if interval_s is None:
            return LATE_UNPACED_S
        return max(LATE_MIN_S, LATE_INTERVALS * interval_s, LATE_PAUSES * self._longest_s)

    def lags_after_s(self) -> float:
        """Return how long one rank may be behind another: the ranks of a launch train the same step."""
        step_s = self.step_s()
        return LATE_UNPACED_S if step_s is None else max(LAG_MIN_S, LAG_STEPS * step_s)

    def step_s(self) -> float | None:
        """Return how long a step takes, those without a put included; None until two were reported."""
        intervals = [(at - before_at) / (step - before) for (before, before_at), (step, at) in pairwise(self._reached)]
        return median(intervals) if intervals else None

    def steps_within(self, span_s: float) -> int | None:
        """Return how many steps last at least `span_s`; None while the pace is unknown.

        >>> pace = Pace()
        >>> pace.steps_within(60.0)
        >>> for step, now in ((10, 0.0), (11, 25.0), (13, 75.0)):
        ...     pace.reached(step, now)
        >>> pace.step_s(), pace.steps_within(60.0)
        (25.0, 3)
        """
        step_s = self.step_s()
        if step_s is None:
            return None
        return math.ceil(span_s / max(step_s, 1e-6))


# -- put interval -------------------------------------------------------------------------------------
# How often to put, and how all ranks come to the same steps. Pure (R33).
#
#     controller   commit of S: `n` steps lie between puts from lead_end(S) on
#     rank         put S ... put ... put ... put | lead_end(S): not without the commit of S
#
# A distance is decided with a commit only, and holds from the step's lead on. A rank passes the lead of no put whose
# commit it may have missed. So two ranks that have come to a step know the same distance for it, whatever was sent
# when.


LEAD_PUTS = 4  # for no more have arenas room before a commit (in_flight): no healthy rank waits
PUTS_MEASURED = 5  # committed at one distance before it changes: the first put costs more than others
PUTS_KEPT = 9  # newest ones that count
NOISE = 0.1  # of a step's time


@dataclass(frozen=True, slots=True)
class Measured:
    """What the slowest rank saw: medians, in seconds; 0 where nothing was seen."""

    step_s: float  # of training, without stalls
    stall_s: float  # that a put blocked
    commit_s: float  # from a put until its step was committed


class PutCosts:
    """What the puts of one attempt cost at the distance that holds, by the controller's monotonic clock."""

    def __init__(self, first: int = 0) -> None:
        self._first = first  # from this step on the distance holds
        self._open: dict[int, tuple[float, float]] = {}  # step -> when its first put began, its longest stall
        self._committed: deque[tuple[int, float, float, float]] = deque(maxlen=PUTS_KEPT)  # step, ..., to commit

    def put(self, step: int, began_s: float, stall_s: float) -> None:
        """Take one rank's put of a step."""
        first_s, longest_s = self._open.get(step, (began_s, 0.0))
        self._open[step] = (min(first_s, began_s), max(longest_s, stall_s))

    def committed(self, step: int, now: float) -> None:
        """Take a commit; puts before it come to nothing."""
        if step in self._open and step >= self._first:
            began_s, stall_s = self._open[step]
            self._committed.append((step, began_s, stall_s, now - began_s))
        self._open = {later: put for later, put in self._open.items() if later > step}

    def measured(self) -> Measured | None:
        """Return the medians, or None while there are too few puts."""
        if len(self._committed) < PUTS_MEASURED:
            return None
        steps_s = [(b[1] - a[1] - a[2]) / (b[0] - a[0]) for a, b in pairwise(self._committed)]
        _, _, stalls_s, commits_s = zip(*self._committed, strict=True)
        return Measured(*(max(0.0, statistics.median(each)) for each in (steps_s, stalls_s, commits_s)))


def decide_steps(every: Every, measured: Measured, mtbf_s: float, last: int = 1) -> int:
    """Return how many steps from one put to the next, by the slowest rank; never so few that commits lag behind.

    Seconds, percent and the optimum are rounded to the nearest step, up for percent: it is a budget. The `last`
    distance stays where nothing was measured that they need, or a step that is a `NOISE` longer or shorter has it.
    """
    if every.steps is not None:
        return every.steps
    if measured.step_s <= 0 or (every.interval_s is None and measured.stall_s <= 0):
        return last
    fewest, found, most = (
        _steps(every, measured, measured.step_s * part, mtbf_s) for part in (1 + NOISE, 1, 1 - NOISE)
    )
    return last if fewest <= last <= most else found


def _steps(every: Every, measured: Measured, step_s: float, mtbf_s: float) -> int:
    stall_s = measured.stall_s
    if every.interval_s is not None:
        steps = round(min(every.interval_s / step_s, STEPS_MAX))
    elif every.overhead is not None:
        steps = math.ceil(stall_s / (every.overhead * step_s))
    else:
        steps = round(optimal_interval_s(stall_s, mtbf_s) / step_s)
    return min(max(1, steps, math.ceil(measured.commit_s / step_s)), STEPS_MAX)


def lead_end(step: int, before: int, steps: int) -> int:
    """Return from which step on a decision with the commit of `step` counts.

    Args:
        step: That was put.
        before: The put before it, or an older one: where steps count samples, they are far apart.
        steps: The distance that holds at it.
    """
    return step + LEAD_PUTS * max(steps, step - before)


class EarlyPut:
    """One rank's part in the agreement on a put ahead of its turn.

    The controller asks all ranks for one step, and decides when all have said that they have not come to it. Each rank
    waits there for the decision, so that no rank puts alone.
    """

    def __init__(self) -> None:
        self._seen = self._put = -1
        self._asked: tuple[int, bool | None] | None = None  # the step, and what was decided

    def offered(self, step: int) -> bool:
        """Take the question; return whether this step, or the first one after it, may be put."""
        if step <= self._seen or (self._asked is not None and self._asked[1]):
            return False
        self._asked = step, None
        return True

    def decided(self, step: int, *, is_agreed: bool) -> None:
        """Take the decision."""
        if self._asked is not None and self._asked[0] == step:
            self._asked = (step, True) if is_agreed else None

    def asks(self, step: int) -> bool | None:
        """Return whether to put this step, to which the rank has come; None: the decision is to be waited for."""
        self._seen = max(self._seen, step)
        if self._asked is None or step < self._asked[0]:
            return step == self._put
        if self._asked[1]:
            self._asked, self._put = None, step
        return None if self._asked is not None else True

    def give_up(self) -> None:
        """Wait no longer for a decision."""
        self._asked = None


class Schedule:
    """One rank's due steps, by what it has learned. Used by the training thread, but for `learn`."""

    def __init__(self, every: Every, base_step: int | None) -> None:
        self.is_epoch, self.is_fixed = every.is_epoch, every.steps is not None or every.is_epoch
        self._known = (every.steps or 1, 0, every.steps or 1)  # the distance before a step, that step, and from it on
        self.go_on_from(base_step)

    def go_on_from(self, base_step: int | None) -> None:
        """Note the step that was restored; None: training goes on from the first step it comes to."""
        self._last_due, self._seen = base_step, -1 if base_step is None else base_step

    def learn(self, first: int, steps: int) -> None:
        """Take a distance and the step from which it holds; any thread. Old news changes nothing."""
        _, known_first, known_steps = self._known
        if first > known_first and not self.is_fixed:
            self._known = (known_steps, first, steps)

    def awaited(self, step: int, uncommitted: Iterable[tuple[int, int]]) -> int | None:
        """Return the put whose commit may have changed what holds at `step`, or None.

        Args:
            uncommitted: This rank's puts that may still be committed, or are and it does not know; each with the put
                before it.
        """
        _, first, steps = self._known
        if self.is_fixed:
            return None
        return next((put for put, before in uncommitted if put >= first and lead_end(put, before, steps) <= step), None)

    def due(self, step: int, *, is_epoch_end: bool = False) -> bool:
        """Say whether the step is to be put: it is far enough from the last one that was, or ends an epoch."""
        if self._last_due is None:
            self._last_due = step - 1
        if step <= self._seen:
            return step <= self._last_due  # asked again; or it went back, and put() says so
        earlier, first, later = self._known
        self._seen = step
        is_due = is_epoch_end if self.is_epoch else step >= self._last_due + (later if step >= first else earlier)
        if not is_due:
            return False
        self._last_due = step
        return True

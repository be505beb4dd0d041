"""When to write a committed step to durable storage, and which durable steps may go (R31). Pure policy.

Values in, decision with its reason out; `memstore/core/durable/storage_ports.py` has what carries it out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memstore.errors import ConfigError
from memstore.intervals import Every, parse_every
from recovery.inventory import StepId

UNMEASURED_S = 1800.0  # between durable steps under "auto" until a write has finished
_PATIENCE_DOUBLINGS = 16  # 65536 intervals: longer than any write; keeps the arithmetic finite


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now. `abandon` is set only beside `start`: it makes way and is counted (R31)."""

    start: StepId | None
    abandon: StepId | None
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
    """Decide whether a durable write starts now, and which unfinished one makes way for it.

    The first committed step of an attempt goes at once, then the newest one each time `every` has passed.
    Each write abandoned in a row doubles the distance until one finishes: without that, storage slower than
    `every` would abandon every write and never hold a single step.

    Args:
        now: Seconds on the clock of `last_started_s`.
        last_started_s: Start of the last write, finished or not; None if not known.
        last_durable_step: Newest step of the lineage that has a marker.
        committed: Committed steps of the lineage that are still held; any order.
        in_progress: Step of the write that has not finished.
        last_started_step: Step of the last write, so that one which failed is not started again and again.
        abandoned_in_a_row: Writes abandoned since the last one that finished.
    """
    spacing = every if isinstance(every, Every) else parse_every(every)
    if not committed:
        return Decision(None, None, "no step is committed yet")
    newest = max(committed)
    known = [step for step in (in_progress, last_durable_step, last_started_step) if step is not None]
    base = max(known, default=None)
    if base is not None and newest <= base:
        return Decision(None, None, f"nothing newer than step {base.step} of attempt {base.attempt} is committed")
    why = _why_due(now, last_started_s, base, newest, spacing, 1 << min(abandoned_in_a_row, _PATIENCE_DOUBLINGS))
    if why is None:
        return Decision(None, None, f"step {newest.step} is not due yet")
    if in_progress is not None:
        why += f"; step {in_progress.step} of attempt {in_progress.attempt} is unfinished and makes way"
    return Decision(newest, in_progress, why)


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

"""Puts whose stall is bounded, on a machine that others may load: the bound grows by what the machine overslept."""

from __future__ import annotations

import time
from collections.abc import Sequence

from memstore.testing.nemesis.checks import LATE_FACTOR
from memstore.testing.nemesis.load_meter import LoadMeter
from memstore.testing.ranks.rank_process import RankProcess, together


def put_within(ranks: Sequence[RankProcess], meter: LoadMeter, step: int, limit_s: float) -> None:
    """Put a step on all ranks: none raises, and none blocks longer than the limit, but for the machine's own delays."""
    began_s = time.monotonic()
    replies = together(ranks, "put", step=step)
    late_s = meter.late_s(began_s, time.monotonic())
    longest_s = max(reply["stall_s"] for reply in replies)
    assert longest_s < limit_s + LATE_FACTOR * late_s, f"step {step}: {replies}; the machine was {late_s:.2f} s late"

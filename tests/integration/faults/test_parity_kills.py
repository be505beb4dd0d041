"""Hosts are killed at random moments of a job with parity, and every step that was committed comes back (R37)."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
from parity_kills import KINDS, ParityRound, draw

from memstore.testing.ranks.rank_process import RankNursery

pytestmark = pytest.mark.drill
ROUNDS, KILLS = 40, 5  # 200 kills


@pytest.mark.parametrize(("seed", "spare"), [(1, 1), (2, 1), (3, 2), (4, 2)])
def test_a_kill_at_any_moment_costs_no_committed_step(
    tmp_path: Path, nursery: RankNursery, seed: int, spare: int
) -> None:
    """One host is lost, or two at once, or holders are killed and start again; the job goes on with all its parity."""
    counts = ParityRound(draw(seed, kills_count=3, spare=spare), tmp_path, nursery).play()
    assert sum(counts[name] for name in counts if name.split(",")[0] in KINDS) == 3
    assert sum(counts[name] for name in counts if name.startswith("too many lost")) == 1


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("spare", [1, 2])
def test_two_hundred_kills_cost_no_committed_step(tmp_path: Path, nursery: RankNursery, spare: int) -> None:
    """Rounds of all kinds, new ones in every run: the seed is in the message of a failure."""
    first, counts = random.SystemRandom().getrandbits(32), Counter[str]()
    for seed in range(first, first + ROUNDS):
        scenario = draw(seed, kills_count=KILLS, spare=spare)
        counts += ParityRound(scenario, tmp_path / str(seed), nursery).play()
        nursery.kill_all()
    assert sum(counts[name] for name in counts if name.split(",")[0] in KINDS) == ROUNDS * KILLS, counts
    assert sum(counts[name] for name in counts if name.startswith("too many lost")) == ROUNDS, counts

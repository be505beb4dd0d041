"""Which committed steps stay in RAM. Pure (R19)."""

from __future__ import annotations

from collections.abc import Iterable

from recovery.inventory import StepId


def kept_steps(committed: Iterable[StepId], *, keep: int) -> frozenset[StepId]:
    """Return the newest `keep` committed steps of the lineage.

    The caller passes only committed steps of the newest attempt's lineage, so an older step can
    leave this set only because a newer one was committed by a fact.

    >>> sorted(s.step for s in kept_steps([StepId(1, 4), StepId(1, 5), StepId(2, 6)], keep=2))
    [5, 6]
    """
    return frozenset(sorted(committed, reverse=True)[:keep])

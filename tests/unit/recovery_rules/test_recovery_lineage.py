"""What belongs to a run's past (R22)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recovery import AttemptFact, Span, StepId, in_lineage, lineage


def facts(*rows: tuple[int, int | None, int | None]) -> dict[int, AttemptFact]:
    return {attempt: AttemptFact(attempt, parent, step, 2) for attempt, parent, step in rows}


def test_bounds_accumulate_along_the_chain() -> None:
    """What a rewind hid stays hidden in every older attempt."""
    table = facts((1, None, None), (2, 1, 100), (3, 2, 50), (4, 3, None))
    assert lineage(table, 4) == (Span(4, None), Span(3, None), Span(2, 50), Span(1, 50))
    assert lineage(table, 2) == (Span(2, None), Span(1, 100))


def test_a_fresh_attempt_has_no_past() -> None:
    """connect(fresh=True) opens an attempt without parent."""
    assert lineage(facts((1, None, None), (2, None, None)), 2) == (Span(2, None),)


def test_a_branch_is_outside_the_lineage() -> None:
    """An attempt that a rewind went around contributes nothing."""
    spans = lineage(facts((1, None, None), (2, 1, 90), (3, 1, 40)), 3)
    assert in_lineage(spans, StepId(1, 40))
    assert in_lineage(spans, StepId(3, 7))
    assert not in_lineage(spans, StepId(1, 41))
    assert not in_lineage(spans, StepId(2, 10))


def test_a_parent_without_a_fact_ends_the_chain_with_its_own_steps() -> None:
    """A lost fact of an old attempt does not take the attempts after it away."""
    assert lineage(facts((5, 4, 30)), 5) == (Span(5, None), Span(4, 30))


def test_contradictions_are_refused() -> None:
    """An unknown newest attempt, and parents that are not older, are the caller's mistakes."""
    with pytest.raises(ValueError, match="attempt 2 has no fact"):
        lineage(facts((1, None, None)), 2)
    with pytest.raises(ValueError, match="older"):
        lineage(facts((1, 2, 5), (2, 1, 5)), 2)


@given(st.lists(st.tuples(st.integers(0, 5), st.none() | st.integers(0, 9)), min_size=1, max_size=6), st.data())
def test_lineage_matches_a_walk_per_step(rows, data) -> None:
    """A step is in the lineage if and only if every bound on the way down to its attempt admits it."""
    table = {}
    for attempt, (parent, bound) in enumerate(rows):
        table[attempt] = AttemptFact(attempt, parent if parent < attempt else None, bound, 2)
    newest = len(rows) - 1
    step = StepId(data.draw(st.integers(0, newest)), data.draw(st.integers(0, 9)))
    expected, at = False, newest
    while True:
        if at == step.attempt:
            expected = True
            break
        fact = table[at]
        if fact.parent is None or (fact.parent_step is not None and step.step > fact.parent_step):
            break
        at = fact.parent
    assert in_lineage(lineage(table, newest), step) == expected

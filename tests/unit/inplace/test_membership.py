"""No rank goes home while another one waits for it, in whatever order they return and are lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from memstore.inplace.membership import Membership, is_over_for_all
from memstore.testing.simulator.rank.in_place import SimBoard

RANKS = 3


@given(st.lists(st.integers(-1, RANKS - 1), max_size=30))
def test_all_ranks_of_a_generation_go_home_or_none_does(order: list[int]) -> None:
    """-1 is a loss; a rank's number is its next look: the first says that it is done, the others ask for the rest."""
    board = SimBoard()
    server = Membership(board, RANKS)
    server.begin(0)
    done: dict[int, int] = {}
    ends: dict[int, bool] = {}
    for who in [*order, *range(RANKS), *range(RANKS)]:
        if who < 0:
            server.mark_broken()
        elif who not in ends:
            done[who] = board.count("done/0", 0 if who in done else 1)
            end = is_over_for_all(board, 0, done[who], RANKS)
            if end is not None:
                ends[who] = end
    assert len(ends) == RANKS
    assert len(set(ends.values())) == 1
    assert server.is_done() == ends[0]
    assert (server.broken == 0) == (not ends[0])


def test_before_the_first_generation_no_rank_is_done() -> None:
    """Else Ray Train's ranks would wait for a generation that does not begin."""
    server = Membership(SimBoard(), RANKS)
    assert not server.is_done()
    server.begin(0)
    assert not server.is_done()

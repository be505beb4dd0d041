"""No rank goes home while another one waits for it, in whatever order they return and are lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memstore.core.cluster.text import listed
from memstore.errors import GatherTimeout
from memstore.inplace.membership import (
    ANSWER_S,
    NONE,
    QUIET_S,
    Closing,
    Coming,
    Inquiry,
    Membership,
    is_asked,
    is_over_for_all,
    note_waiting,
)
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


@given(st.sets(st.integers(0, 99), min_size=1, max_size=99))
def test_a_meeting_that_fails_names_the_ranks_that_have_not_come(came: set[int]) -> None:
    """Of any number of ranks."""
    board = SimBoard()
    Membership(board, 100).begin(0)
    comings = [
        Coming(board, rank=rank, life=NONE, world_size=100, after=NONE, meet_s=60.0, now=0.0) for rank in sorted(came)
    ]  # fmt: skip
    assert [coming.look(1.0) for coming in comings] == [None] * len(came)
    with pytest.raises(GatherTimeout) as caught:
        comings[0].look(61.0)
    absent = sorted(set(range(100)) - came)
    assert f"{len(came)} of 100 ranks came to the start within 60 s; rank" in str(caught.value)
    assert f" {listed(absent)} ha" in str(caught.value)


@given(st.sets(st.integers(0, 69), max_size=70))
def test_ranks_that_do_not_come_to_a_collective_are_lost_unless_none_or_all_are(waiting: set[int]) -> None:
    """A rank whose collective timed out asks; those that wait as well, or have left, say so."""
    board = SimBoard()
    server = Membership(board, 70)
    server.begin(3)
    assert not is_asked(board, 3)
    inquiry = Inquiry(board, 3, 70, 10.0)
    assert is_asked(board, 3)
    for rank in waiting:
        note_waiting(board, 3, rank)
    absent = sorted(set(range(70)) - waiting)
    assert inquiry.look(10.0) == (None if absent else [])
    assert inquiry.look(10.0 + ANSWER_S) == absent
    assert server.take_absent() == (absent if waiting and absent else [])
    assert server.take_absent() == []


def test_what_a_former_generation_lacked_is_no_loss_of_this_one() -> None:
    """The ranks were replaced for another reason meanwhile."""
    board = SimBoard()
    server = Membership(board, 2)
    server.begin(0)
    inquiry = Inquiry(board, 0, 2, 0.0)
    note_waiting(board, 0, 0)
    server.begin(1)
    assert inquiry.look(ANSWER_S) == [1]
    assert server.take_absent() == []


def test_a_rank_waits_until_all_but_the_lost_one_have_closed_their_stores() -> None:
    """Before that one of them could put what an aborted collective left it with."""
    board, now = SimBoard(), 7.0
    first = Closing(board, 4, 4, now)
    assert not first.look(now)
    second = Closing(board, 4, 4, now)
    assert [first.look(now), second.look(now)] == [False, False]
    third = Closing(board, 4, 4, now)
    assert [first.look(now), second.look(now), third.look(now)] == [True, True, True]


def test_a_second_lost_rank_is_not_waited_for_for_long() -> None:
    """Which ranks are lost may not be known yet; the wait begins again with every rank that closes its store."""
    board = SimBoard()
    first = Closing(board, 0, 4, 0.0)
    assert not first.look(QUIET_S - 0.01)
    second = Closing(board, 0, 4, QUIET_S - 0.01)
    assert not first.look(QUIET_S)
    assert not first.look(2 * QUIET_S - 0.02)
    assert first.look(2 * QUIET_S)
    assert not second.look(2 * QUIET_S - 0.02)
    assert second.look(2 * QUIET_S)
    assert not Closing(board, 1, 4, 0.0).look(0.0), "of another generation"

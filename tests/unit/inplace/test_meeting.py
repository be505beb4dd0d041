"""Ranks meet at the generation that is wanted, and go on to the next one if a rank is lost meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from memstore.core.cluster.text import listed
from memstore.core.wire.calls import RankLoss
from memstore.errors import FencedError, GatherTimeout
from memstore.inplace import meeting as meeting_file
from memstore.inplace.meeting import Meeting, MeetingPlace, MeetingServer
from memstore.inplace.membership import (
    ANSWER_S,
    NONE,
    QUIET_S,
    Closing,
    Coming,
    Failures,
    Inquiry,
    RankMembership,
    failure_of,
    is_asked,
    is_over_for_all,
    note_waiting,
)
from memstore.testing.clusters.processes import wait_for
from memstore.testing.faults.fault_proxy import FaultProxy
from memstore.testing.simulator.rank.in_place import SimBoard

WAIT_S = 30.0


@pytest.fixture
def server() -> Iterator[MeetingServer]:
    made = MeetingServer(2)
    assert [made.register(number) for number in range(2)] == [1, 1]
    yield made
    made.close()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.fixture
def proxy(server: MeetingServer) -> Iterator[FaultProxy]:
    with FaultProxy(lambda: ("127.0.0.1", server.port)) as made:
        yield made


def reset(proxy: FaultProxy) -> None:
    """Reset what is open; return once another connection has gone through."""
    before = proxy.connections_count
    proxy.reset_all()
    wait_for(lambda: proxy.connections_count > before, "a connection after the reset", WAIT_S)


def rank(
    server: MeetingServer, number: int, *, life: int = 1, meet_s: float = WAIT_S, proxy: FaultProxy | None = None
) -> Meeting:
    """Return a rank's way to a meeting of two."""
    port = server.port if proxy is None else proxy.port
    place = MeetingPlace(
        address="127.0.0.1",
        port=port,
        run="run",
        rank=number,
        life=life,
        first=0,
        world_size=2,
        launcher="launcher",
        backend="gloo",
        collective_timeout_s=60.0,
        meet_s=meet_s,
    )
    return Meeting(place)


def test_ranks_meet_once_all_of_them_have_come(server: MeetingServer, threads: ThreadPoolExecutor) -> None:
    """None goes on alone, and all go on with one number."""
    first = threads.submit(rank(server, 0).meet, NONE)
    server.begin(0)
    assert not first.done()
    assert rank(server, 1).meet(NONE) == 0
    assert first.result(WAIT_S) == 0


def test_a_loss_during_a_meeting_makes_all_wait_for_the_next_generation(
    server: MeetingServer, threads: ThreadPoolExecutor
) -> None:
    """The survivor has come to generation 1, whose other rank died on its way: it counts in generation 2 again."""
    server.begin(1)
    survivor = threads.submit(rank(server, 0).meet, 0)
    looks = rank(server, 0)
    wait_for(lambda: looks.board.count("here/1") == 1, "the survivor")
    server.mark_broken()
    assert server.register(1) == 2
    server.begin(2)
    assert rank(server, 1, life=2).meet(1) == 2
    assert survivor.result(WAIT_S) == 2


def test_a_generation_is_over_when_it_has_lost_a_rank_or_a_newer_one_is_wanted(server: MeetingServer) -> None:
    """A rank that looks only afterwards finds it over all the same."""
    meeting = rank(server, 0)
    server.begin(0)
    assert not meeting.is_over(0)
    server.mark_broken()
    wait_for(lambda: meeting.is_over(0), "the loss")  # the store answers a set before all of its clients see it
    assert not meeting.is_over(1)
    server.begin(1)
    assert (meeting.is_over(0), meeting.is_over(1)) == (True, False)


def test_a_rank_that_is_done_waits_for_the_others(server: MeetingServer, threads: ThreadPoolExecutor) -> None:
    """If one of them is lost, its replacement needs the ranks that were done."""
    server.begin(0)
    done = threads.submit(rank(server, 0).is_over_for_all, 0)
    looks = rank(server, 1)
    wait_for(lambda: looks.board.count("done/0") == 1, "the first rank")
    assert not done.done()
    server.mark_broken()
    assert done.result(WAIT_S) is False
    server.begin(1)
    done = threads.submit(rank(server, 0).is_over_for_all, 1)
    assert looks.is_over_for_all(1)
    assert done.result(WAIT_S) is True


def test_a_process_whose_place_was_taken_does_not_meet(server: MeetingServer) -> None:
    """It was frozen, and is awake again: two processes would believe to be rank 1."""
    assert server.register(1) == 2
    server.begin(1)
    with pytest.raises(FencedError, match="rank 1: process 2 has taken the place of this one, which is process 1"):
        rank(server, 1, life=1).meet(0)
    assert rank(server, 0).board.count("here/1") == 0


def test_all_are_done_once_the_function_has_returned_on_each_rank(
    server: MeetingServer, threads: ThreadPoolExecutor
) -> None:
    """A process that ends from then on is no loss."""
    server.begin(0)
    first = threads.submit(rank(server, 0).is_over_for_all, 0)
    assert not server.is_done()
    assert rank(server, 1).is_over_for_all(0)
    assert first.result(WAIT_S)
    assert server.is_done()


def test_a_meeting_to_which_a_rank_does_not_come_has_an_end(server: MeetingServer) -> None:
    """The error says who came, and what started the ranks restarts all of them."""
    server.begin(1)
    why = (
        r"^rank 0: a rank of generation 0 was lost, and 1 of 2 ranks came to generation 1 within 0\.2 s; rank 1 has not"
    )
    with pytest.raises(GatherTimeout, match=why):
        rank(server, 0, meet_s=0.2).meet(0)
    with pytest.raises(GatherTimeout, match=r"nothing replaced it within 0\.2 s"):
        rank(server, 0, meet_s=0.2).meet(1)


def test_a_start_to_which_a_rank_does_not_come_speaks_of_no_loss(server: MeetingServer) -> None:
    """There was no generation before it. The error names who is missing."""
    with pytest.raises(
        GatherTimeout, match=r"^rank 0: the ranks were not asked to start within 0\.2 s: all ranks must"
    ):
        rank(server, 0, meet_s=0.2).meet(NONE)
    server.begin(0)
    why = r"^rank 0: 1 of 2 ranks came to the start within 0\.2 s; rank 1 has not come: all ranks must be restarted$"
    with pytest.raises(GatherTimeout, match=why):
        rank(server, 0, meet_s=0.2).meet(NONE)


def test_a_process_that_replaces_a_rank_after_all_had_returned_meets_no_one(server: MeetingServer) -> None:
    """The others have gone home: it would wait for them in vain."""
    server.begin(0)
    for number in range(2):
        rank(server, number).board.count("done/0", 1)
    server.mark_broken()
    assert server.is_done()
    assert server.register(1) == 2
    assert rank(server, 1, life=2).meet(0) == NONE


def test_a_rank_that_waits_for_the_others_outlives_a_reset_of_its_connection(
    server: MeetingServer, threads: ThreadPoolExecutor, proxy: FaultProxy
) -> None:
    """It has come once: it counts no more because it asks over another connection."""
    server.begin(0)
    waits = threads.submit(rank(server, 0, proxy=proxy).meet, NONE)
    looks = rank(server, 1)
    wait_for(lambda: looks.board.count("here/0") == 1, "the first rank")
    reset(proxy)
    assert looks.board.count("here/0") == 1
    assert looks.meet(NONE) == 0
    assert waits.result(WAIT_S) == 0


def test_a_rank_that_is_done_outlives_a_reset_of_its_connection(
    server: MeetingServer, threads: ThreadPoolExecutor, proxy: FaultProxy
) -> None:
    """Before it says so, as the connection was idle for hours, and while it waits: it is counted once."""
    server.begin(0)
    done, looks = rank(server, 0, proxy=proxy), rank(server, 1)
    assert not done.is_over(0)
    proxy.reset_all()
    wait_for(lambda: not proxy.is_open, "the reset", WAIT_S)
    waits = threads.submit(done.is_over_for_all, 0)
    wait_for(lambda: looks.board.count("done/0") == 1, "the first rank")
    reset(proxy)
    assert looks.board.count("done/0") == 1
    assert looks.is_over_for_all(0)
    assert waits.result(WAIT_S)


def test_a_meeting_whose_server_is_gone_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """What started the ranks has ended: another connection is tried for no longer than a first one."""
    monkeypatch.setattr(meeting_file, "CALL_S", 0.5)
    server = MeetingServer(2)
    meeting = rank(server, 0)
    server.close()
    with pytest.raises(dist.DistError):
        meeting.is_over(0)


def test_ranks_learn_who_was_replaced_before_their_generation(server: MeetingServer) -> None:
    """A process that is lost without a word of its watchdog is lost by what Ray says; a later loss is a later line."""
    server.begin(0)
    assert rank(server, 0).losses(0) == ()
    assert server.register(1, is_spare=True) == 2
    server.begin(1)
    assert server.register(0) == 2
    first, second = RankLoss(1, 1, "ray", True, 0.0), RankLoss(0, 2, "ray", False, 0.0)
    assert rank(server, 1, life=2).losses(1) == (first,)
    assert rank(server, 1, life=2).losses(2) == (first, second)


# -- test failures ------------------------------------------------------------------------------------
# Which failures of the training function end the job: those that come again at the same step.


def raised(kind: type[Exception] = ValueError, *, elsewhere: bool = False) -> Exception:
    """Return an exception that was raised at one line, or at another one."""
    try:
        if elsewhere:
            raise kind("a bug")
        raise kind("a bug")
    except kind as error:
        return error


def hopeless(*failures: tuple[Exception, int, int | None]) -> list[bool]:
    """Take failures, each an exception, its generation and its step."""
    known = Failures()
    return [
        known.is_hopeless(failure_of(error, run="run", generation=generation, rank=0, step=step))
        for error, generation, step in failures
    ]


def test_the_third_equal_failure_at_one_step_is_hopeless() -> None:
    """The first two may have come of something that passes."""
    assert hopeless(*((raised(), generation, 7) for generation in range(4))) == [False, False, True, True]


@pytest.mark.parametrize(
    "other", [(raised(TypeError), 2, 7), (raised(elsewhere=True), 2, 7), (raised(), 2, 8), (raised(), 1, 7)]
)
def test_another_failure_is_not_the_same(other: tuple[Exception, int, int | None]) -> None:
    """Of another class, from another line, after another step, or on another rank of the same generation."""
    assert hopeless((raised(), 0, 7), (raised(), 1, 7), other) == [False, False, False]


def test_the_text_has_the_users_traceback() -> None:
    """It is what the job's error shows."""
    failure = failure_of(raised(), run="run", generation=0, rank=3, step=None)
    assert failure.text.endswith("ValueError: a bug\n")
    assert "in raised" in failure.text
    assert failure.kind.startswith("ValueError in ")


# -- test membership ----------------------------------------------------------------------------------
# No rank goes home while another one waits for it, in whatever order they return and are lost.


RANKS = 3


@given(st.lists(st.integers(-1, RANKS - 1), max_size=30))
def test_all_ranks_of_a_generation_go_home_or_none_does(order: list[int]) -> None:
    """-1 is a loss; a rank's number is its next look: the first says that it is done, the others ask for the rest."""
    board = SimBoard()
    server = RankMembership(board, RANKS)
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
    server = RankMembership(SimBoard(), RANKS)
    assert not server.is_done()
    server.begin(0)
    assert not server.is_done()


@given(st.sets(st.integers(0, 99), min_size=1, max_size=99))
def test_a_meeting_that_fails_names_the_ranks_that_have_not_come(came: set[int]) -> None:
    """Of any number of ranks."""
    board = SimBoard()
    RankMembership(board, 100).begin(0)
    comings = [
        Coming(board, rank=rank, life=NONE, world_size=100, after=NONE, meet_s=60.0, now=0.0) for rank in sorted(came)
    ]
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
    server = RankMembership(board, 70)
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
    server = RankMembership(board, 2)
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

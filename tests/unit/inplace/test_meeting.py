"""Ranks meet at the generation that is wanted, and go on to the next one if a rank is lost meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from memstore.core.wire.calls import RankLoss
from memstore.errors import FencedError, GatherTimeout
from memstore.inplace import meeting as meeting_file
from memstore.inplace.meeting import Meeting, MeetingServer, Place
from memstore.inplace.membership import NONE
from memstore.testing.clusters.processes import wait_for
from memstore.testing.faults.fault_proxy import FaultProxy

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
    place = Place(
        address="127.0.0.1", port=port, run="run", rank=number, life=life, first=0, world_size=2, launcher="launcher",
        backend="gloo", collective_timeout_s=60.0, meet_s=meet_s,
    )  # fmt: skip
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

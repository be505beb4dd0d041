"""Which ranks count as lost by how their watchdogs' connections ended."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memstore.inplace.lifelines import LATE_S, UNWATCHED_S, End, Lifelines, Roll, parse_hello
from memstore.inplace.watchdog import ALIVE, BYE, FROZEN, GONE
from memstore.testing.clusters.processes import wait_for

HANG_S = 3.0


def test_a_rank_whose_process_ended_is_lost_at_once_and_named_once() -> None:
    """Its watchdog has said so."""
    roll = Roll(HANG_S)
    roll.hello((0, 1), 0.0)
    roll.ended((0, 1), End.GONE, 5.0)
    assert roll.take_lost({0: 1, 1: 1}, 5.0) == {0: End.GONE}
    assert roll.take_lost({0: 1, 1: 1}, 500.0) == {}


@pytest.mark.parametrize(("end", "limit_s"), [(End.BROKEN, UNWATCHED_S), (End.SILENT, HANG_S / 2)])
def test_a_rank_whose_connection_broke_is_lost_only_if_no_other_comes(end: End, limit_s: float) -> None:
    """A rank starts another watchdog, if it lives; a watchdog connects again after a short break of the network."""
    roll = Roll(HANG_S)
    for rank in range(2):
        roll.hello((rank, 1), 0.0)
        roll.ended((rank, 1), end, 5.0)
    assert roll.take_lost({0: 1, 1: 1}, 4.9 + limit_s) == {}
    roll.hello((0, 1), 0.0)
    assert roll.take_lost({0: 1, 1: 1}, 5.1 + limit_s) == {1: end}
    assert roll.take_lost({0: 1, 1: 1}, 500.0) == {}


@pytest.mark.parametrize("end", [End.BROKEN, End.SILENT])
def test_the_late_end_of_an_old_connection_is_no_loss(end: End) -> None:
    """The watchdog has connected again before this process saw the old connection's end."""
    roll = Roll(HANG_S)
    roll.hello((0, 1), 0.0)
    roll.hello((0, 1), 0.0)
    roll.ended((0, 1), end, 5.0)
    assert roll.take_lost({0: 1}, 500.0) == {}
    roll.ended((0, 1), end, 500.0)
    assert roll.take_lost({0: 1}, 600.0) == {0: end}


@given(st.sampled_from(End), st.integers(1, 5), st.integers(1, 5))
def test_the_end_of_a_former_process_is_not_that_of_the_rank(end: End, life: int, now_life: int) -> None:
    """A replacement takes seconds to start, and says hello later."""
    roll = Roll(HANG_S)
    roll.hello((0, life), 0.0)
    roll.ended((0, life), end, 0.0)
    assert (roll.take_lost({0: now_life}, 2 * UNWATCHED_S) == {0: end}) == (life == now_life)


def watched(processes: int, *, silent: int, until: float) -> Roll:
    """Return a roll of processes that all spoke at 0 s; some fell silent, and the others spoke every second."""
    roll = Roll(HANG_S)
    for rank in range(processes):
        roll.hello((rank, 1), 0.0)
    for now in range(1, int(until) + 1):
        for rank in range(silent, processes):
            roll.spoke((rank, 1), float(now))
    return roll


def test_a_watchdog_that_is_silent_while_others_speak_is_frozen_with_its_rank() -> None:
    """A kernel answers for it, so its connection does not break."""
    lives = dict.fromkeys(range(3), 1)
    assert watched(3, silent=2, until=HANG_S + LATE_S - 1).take_lost(lives, 500.0) == {}
    roll = watched(3, silent=2, until=HANG_S + LATE_S)
    assert roll.take_lost(lives, 5.0) == {0: End.FROZEN, 1: End.FROZEN}
    assert roll.take_lost(lives, 500.0) == {}


def test_no_rank_is_lost_because_nothing_comes_from_any() -> None:
    """The process that reads them was paused, or the network to it is cut: that is no word of a single rank."""
    roll = watched(3, silent=3, until=0.0)
    assert roll.take_lost(dict.fromkeys(range(3), 1), 500.0) == {}
    assert watched(1, silent=1, until=0.0).take_lost({0: 1}, 500.0) == {}


def test_a_rank_that_has_left_may_be_silent() -> None:
    """Its watchdog ended with its function."""
    roll = watched(2, silent=1, until=1.0)
    roll.left((0, 1))
    roll.spoke((1, 1), 100.0)
    assert roll.take_lost({0: 1, 1: 1}, 100.0) == {}


def test_a_process_that_begins_and_gets_no_watchdog_is_frozen() -> None:
    """It was stopped before it could start one; one that is there, or has been, is not."""
    roll = Roll(HANG_S)
    for rank in range(3):
        roll.expect((rank, 1), 60.0)
    roll.hello((1, 1), 30.0)
    roll.hello((2, 1), 30.0)
    roll.left((2, 1))
    roll.expect((2, 1), 60.0)
    assert roll.take_lost(dict.fromkeys(range(3), 1), 59.0) == {}
    roll.spoke((1, 1), 60.0)
    assert roll.take_lost(dict.fromkeys(range(3), 1), 60.0) == {0: End.FROZEN}


@pytest.mark.parametrize(
    "line",
    [b"", b"\n", b"run 1\n", b"run 1 1", b"run -1 1\n", b"run 1 x\n", b"run 1 1 1\n", b"\xff\xfe 1 1\n", b"x" * 300],
)
def test_a_line_that_is_no_watchdogs_is_dropped(line: bytes) -> None:
    """Any process can connect."""
    assert parse_hello(line) is None


class Ranks:
    """Connections as a watchdog makes them."""

    def __init__(self, lifelines: Lifelines) -> None:
        self.lifelines = lifelines
        self.found: dict[int, End] = {}

    def connect(self, line: bytes) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self.lifelines.port), timeout=30.0)
        sock.sendall(line)
        return sock

    def look(self) -> dict[int, End]:
        """Return all ranks that were found lost, those of earlier looks too."""
        self.found |= self.lifelines.take_lost({0: 1, 1: 1, 2: 1}, 0.0)
        return self.found


def test_the_last_line_of_a_connection_says_what_its_end_means() -> None:
    """A rank whose watchdog says `bye` is not lost, nor is one by the connection of a stranger."""
    ranks = Ranks(Lifelines("run", 60.0))
    lines = (b"run 0 1\n", b"run 1 1\n", b"run 2 1\n", b"old 2 1\n")
    left, gone, frozen, stranger = map(ranks.connect, lines)
    assert ranks.look() == {}
    wait_for(lambda: ranks.look() == {} and stranger.recv(1) == b"", "the stranger to be sent away")
    for sock in (left, gone, frozen):
        sock.sendall(2 * ALIVE)
    assert ranks.look() == {}
    left.sendall(BYE)
    gone.sendall(ALIVE + GONE)
    frozen.sendall(FROZEN)
    wait_for(lambda: ranks.look() == {1: End.GONE, 2: End.FROZEN}, "the ends of ranks 1 and 2")
    assert left.recv(1) == gone.recv(1) == frozen.recv(1) == b""
    ranks.lifelines.close()
    for sock in (left, gone, frozen, stranger):
        sock.close()


def test_all_lines_may_come_at_once_or_in_parts() -> None:
    """This process looks late, or the network divides what a watchdog sent."""
    ranks = Ranks(Lifelines("run", 60.0))
    at_once, in_parts = ranks.connect(b"run 0 1\ngone\n"), ranks.connect(b"run 1")
    wait_for(lambda: ranks.look() == {0: End.GONE}, "the end of rank 0")
    in_parts.sendall(b" 1\ngo")
    assert 1 not in ranks.look()
    in_parts.sendall(b"ne\n")
    wait_for(lambda: ranks.look() == {0: End.GONE, 1: End.GONE}, "the end of rank 1")
    ranks.lifelines.close()
    at_once.close()
    in_parts.close()

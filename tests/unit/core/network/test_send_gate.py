"""Marks hold copies back, and never for ever; between them two pieces wait in the kernel at most (D87)."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memstore.core.send_gate import (
    AVOID_S,
    HOLD_MAX_S,
    LOOK_S,
    MARK_MAX_S,
    PIECE_FIRST_BYTES,
    PIECE_MAX_BYTES,
    PIECE_MIN_BYTES,
    PIECE_S,
    EndpointChoice,
    Sending,
    is_held,
)
from memstore.core.wire.ids import Endpoint

ORDER = (1, 7)


def sent(rate: float, seconds: float, rtt_s: float = 0.0) -> tuple[int, int, Sending]:
    """Send over a link for a while; return the bytes, the most that waited in the kernel at last, and the push."""
    sending, now, free_s, total, waited = Sending(("job", 0), ORDER, 0.0), 0.0, 0.0, 0, 0
    unacked: list[tuple[float, int]] = []  # (when it is acknowledged, bytes), packet by packet
    while now < seconds:
        unacked = [(at_s, nbytes) for at_s, nbytes in unacked if at_s > now]
        nbytes = sending.piece(now, 1 << 30, sum(nbytes for _, nbytes in unacked), rtt_s)
        packet = max(9000, nbytes // 100)
        free_s = max(now, free_s)
        for part in [packet] * (nbytes // packet) + [nbytes % packet]:
            free_s += part / rate
            unacked.append((free_s + rtt_s, part))
        total += nbytes
        if now > seconds / 2:
            waited = max(waited, int((free_s - now) * rate))
        now += 1e-5 if nbytes else LOOK_S
    return total, waited, sending


@pytest.mark.parametrize("rate", [12.5e6, 125e6, 1.25e9, 5e9])
def test_a_link_is_used_and_a_collective_meets_two_pieces_at_most(rate: float) -> None:
    """Ten times slower or forty times faster than first guessed, pieces follow, down to the least size."""
    total, waited, sending = sent(rate, 1.0)
    assert total >= 0.7 * rate
    assert waited <= max(2.5 * PIECE_MIN_BYTES, 2.5 * PIECE_S * rate)
    assert PIECE_MIN_BYTES <= sending.piece_bytes <= PIECE_MAX_BYTES


@pytest.mark.parametrize("rtt_s", [0.0005, 0.002, 0.02])
def test_a_long_way_does_not_starve_a_copy(rtt_s: float) -> None:
    """What is on its way does not wait."""
    total, _, _ = sent(125e6, 1.0, rtt_s)
    assert total >= 0.6 * 125e6


def test_a_link_that_stalls_gets_no_more_and_then_goes_on() -> None:
    """A peer's kernel acknowledges nothing for a second."""
    sending, unacked = Sending(("job", 0), ORDER, 0.0), 0
    for look in range(2000):
        unacked += sending.piece(look * LOOK_S, 1 << 30, unacked, 0.0)
    assert unacked <= 2 * PIECE_FIRST_BYTES
    assert sending.piece(1.0, 1 << 30, 0, 0.0) >= PIECE_MIN_BYTES


def test_small_pieces_do_not_say_that_a_link_is_fast() -> None:
    """The last piece of each frame, and its header, are acknowledged at once."""
    sending = Sending(("job", 0), ORDER, 0.0)
    for look in range(100):
        sending.piece(look * LOOK_S, 100, 0, 0.0)
    assert sending.piece_bytes == PIECE_FIRST_BYTES


@given(st.integers(1, 1 << 26))
def test_no_more_goes_than_is_there(asked: int) -> None:
    """The last piece is what is left."""
    assert Sending(("job", 0), ORDER, 0.0).piece(0.0, asked, 0, 0.0) == min(asked, PIECE_FIRST_BYTES)


@pytest.mark.parametrize(
    ("now", "newest", "marks_s", "frame_s", "held"),
    [
        (1.0, ORDER, [], 0.0, False),
        (1.0, ORDER, [0.5], 0.0, True),
        (1.0, ORDER, [2.0], 0.0, False),  # of no clock of this host
        (MARK_MAX_S + 1, ORDER, [0.5], 0.0, False),  # its rank hangs or is frozen
        (MARK_MAX_S + 1, ORDER, [0.5, MARK_MAX_S], 0.0, True),  # and another's is under way
        (1.0, ORDER, [0.5], MARK_MAX_S + 0.1, None),  # the receiver would give the frame up
        (HOLD_MAX_S + 0.1, ORDER, [HOLD_MAX_S], 0.0, None),
        (1.0, (1, 8), [0.5], 0.0, None),  # the rank's next put has begun
        (1.0, (2, 0), [0.5], 0.0, None),
    ],
)
def test_a_mark_holds_a_copy_back_and_never_for_ever(now, newest, marks_s, frame_s, held) -> None:
    """A collective under way holds; no hang, no pause and no number of collectives holds beyond a limit."""
    assert is_held(now, Sending(("job", 0), ORDER, 0.0), newest, marks_s, frame_s) is held


# -- test endpoint choice -----------------------------------------------------------------------------
# Connections are spread over a host's networks, and those that failed lately are tried last.


A, B, C = (Endpoint(f"10.0.{n}.1", 7000) for n in range(3))


def open_one(endpoints: EndpointChoice, now: float = 0.0) -> Endpoint:
    chosen = endpoints.order(now)[0]
    endpoints.opened(chosen)
    return chosen


def test_connections_are_spread_in_the_order_in_which_the_host_names_its_networks() -> None:
    endpoints = EndpointChoice([A, B, C])
    assert [open_one(endpoints) for _ in range(6)] == [A, B, C, A, B, C]
    endpoints.closed(B)
    assert endpoints.order(0.0)[0] == B


def test_what_failed_is_last_until_its_time_is_over_and_used_where_nothing_else_is_left() -> None:
    endpoints = EndpointChoice([A, B])
    endpoints.failed(A, 10.0)
    assert [open_one(endpoints, 10.0) for _ in range(3)] == [B, B, B]
    assert endpoints.has_another(10.0)
    endpoints.failed(B, 11.0)
    assert not endpoints.has_another(11.0)
    assert set(endpoints.order(11.0)) == {A, B}
    assert endpoints.order(10.0 + AVOID_S)[0] == A, "its time is over, and it has fewer connections"


def test_a_network_without_connections_is_used_again_once_its_time_is_over() -> None:
    """A pool that was refilled from another network would keep to that one for ever."""
    endpoints = EndpointChoice([A, B])
    endpoints.failed(A, 10.0)
    for _ in range(2):
        open_one(endpoints, 10.0)
    assert not endpoints.is_uneven(11.0), "it is avoided still"
    assert endpoints.is_uneven(10.0 + AVOID_S)
    assert open_one(endpoints, 10.0 + AVOID_S) == A
    assert not endpoints.is_uneven(10.0 + AVOID_S)


def test_one_connection_has_no_other_side() -> None:
    endpoints = EndpointChoice([A, B])
    open_one(endpoints)
    assert not endpoints.is_uneven(0.0)


def test_a_single_network_has_no_other() -> None:
    endpoints = EndpointChoice([A])
    assert not endpoints.has_another(0.0)
    endpoints.failed(A, 0.0)
    assert endpoints.order(1.0) == [A]


@given(
    st.lists(st.tuples(st.sampled_from(["open", "close", "fail"]), st.integers(0, 2), st.floats(0, 100)), max_size=60)
)
def test_the_order_is_always_all_of_them_the_good_ones_first_the_idler_before_the_busier(
    steps: list[tuple[str, int, float]],
) -> None:
    endpoints, opened, now = EndpointChoice([A, B, C]), Counter[Endpoint](), 0.0
    for what, number, later_s in steps:
        now += later_s
        each = (A, B, C)[number]
        if what == "open":
            endpoints.opened(each)
            opened[each] += 1
        elif what == "close" and opened[each]:
            endpoints.closed(each)
            opened[each] -= 1
        elif what == "fail":
            endpoints.failed(each, now)
        order = endpoints.order(now)
        ranks = [(endpoints.is_avoided(found, now), opened[found]) for found in order]
        assert {*order} == {A, B, C}
        assert len(order) == 3
        assert ranks == sorted(ranks)

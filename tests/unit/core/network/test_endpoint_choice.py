"""Connections are spread over a host's networks, and those that failed lately are tried last."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from memstore.core.network.send_gate import AVOID_S, EndpointChoice
from memstore.core.wire.ids import Endpoint

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

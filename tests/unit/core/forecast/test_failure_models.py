"""How failures are drawn, and the trace that is replayed."""

from __future__ import annotations

import json
from collections import Counter
from importlib import resources

import numpy as np
import pytest

from memstore.core.forecast import FailureTrace, JobHosts, draw_failures
from placement.rates import DAY_S, PRESETS, Rates


def trace() -> FailureTrace:
    """Return the table of the package."""
    body = json.loads(resources.files("memstore.core").joinpath("stepfun.json").read_text(encoding="utf-8"))
    assert body["license"] == "Apache-2.0"
    assert "stepfun-ai/InfiniteHBD-Trace" in body["source"]
    assert "Derived" in body["changes"]
    return FailureTrace(body["servers"], body["days"], body["rows"])


def test_a_trace_of_as_many_hosts_is_replayed_whole() -> None:
    """Every row once, from a day of its own, and the days add up."""
    seen, span_s = trace(), 349 * DAY_S
    failures = draw_failures(PRESETS["stepfun-trace"], JobHosts(400), span_s, np.random.default_rng(1), seen)
    assert [each.at_s for each in failures] == sorted(each.at_s for each in failures)
    assert Counter((each.replaced, len(each.lost)) for each in failures) == Counter(
        (b + c, c) for _, _, b, c in seen.rows
    )
    assert all(len(set(each.lost)) == len(each.lost) for each in failures)


def test_a_trace_is_replayed_for_more_and_for_fewer_hosts_and_longer() -> None:
    """In proportion to both."""
    rows = len(trace().rows)
    for hosts, years, expected in ((4000, 1, 10 * rows), (100, 4, rows), (400, 3, 3 * rows)):
        failures = draw_failures(
            PRESETS["stepfun-trace"], JobHosts(hosts), years * 349 * DAY_S, np.random.default_rng(2), trace()
        )
        assert len(failures) == pytest.approx(expected, rel=0.1)
        assert max(max(each.lost, default=0) for each in failures) < hosts


def test_what_is_known_of_the_trace_is_what_it_says() -> None:
    """The rate, the shares and the bursts of the models are counted from its rows."""
    rows, rates = trace().rows, PRESETS["stepfun-bursts"]
    bursts = Counter(sum(row[1:]) for row in rows)
    assert tuple(bursts[size] for size in range(1, 10)) == rates.burst_weights
    hosts = sum(sum(row[1:]) for row in rows)
    assert rates.failures_per_1000_host_days == pytest.approx(hosts / (400 * 349) * 1000, rel=0.01)
    assert rates.memory_share == pytest.approx(sum(row[3] for row in rows) / hosts)
    assert rates.process_share == pytest.approx(sum(row[1] for row in rows) / hosts)


@pytest.mark.parametrize("name", ["llama3", "rsc", "stepfun-bursts", "gemini"])
def test_as_many_hosts_fail_as_the_rate_says(name: str) -> None:
    """In bursts as without, each with its share of memory that is lost and of hosts that stay."""
    rates, site = PRESETS[name], JobHosts(2048)
    failures = draw_failures(rates, site, 900 * DAY_S, np.random.default_rng(4))
    hosts = len(failures) * float(np.average(np.arange(1, len(rates.burst_weights) + 1), weights=rates.burst_weights))
    assert hosts == pytest.approx(2048 * 900 * rates.failures_per_1000_host_days / 1000, rel=0.05)
    assert sum(bool(each.lost) for each in failures) / len(failures) == pytest.approx(rates.memory_share, abs=0.02)
    stay = sum(each.replaced == 0 for each in failures) / len(failures)
    assert stay == pytest.approx(rates.process_share, abs=0.02)
    assert rates.source


def test_another_rate_stretches_the_same_gaps() -> None:
    """So that policies, and rates, are compared on the same luck."""
    first, second = (
        draw_failures(Rates(rate), JobHosts(1000), 50 * DAY_S, np.random.default_rng(9)) for rate in (4.0, 8.0)
    )
    assert [each.at_s / 2 for each in first] == pytest.approx([each.at_s for each in second[: len(first)]])


def test_nothing_fails_at_a_rate_of_zero() -> None:
    """Nor in a time in which nothing is expected."""
    assert draw_failures(Rates(0.0), JobHosts(1000), DAY_S, np.random.default_rng(1)) == []


def test_a_replay_without_a_trace_is_refused() -> None:
    """It has no failures of its own."""
    with pytest.raises(ValueError, match="none is given"):
        draw_failures(PRESETS["stepfun-trace"], JobHosts(400), DAY_S, np.random.default_rng(1))


def test_a_burst_of_more_hosts_than_there_are_takes_them_all() -> None:
    """In a rack, too."""
    for site in (JobHosts(3), JobHosts(3, 2, is_burst_in_rack=True)):
        assert sorted(site.pick(9, np.random.default_rng(1))) == [0, 1, 2]

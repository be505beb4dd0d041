"""The benchmarks of controller and planner at tiny size: what they report, and that a wrong plan is no number."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from benchmarks.cases import bench_catalog, bench_controller, bench_placement, bench_planner
from benchmarks.report import targets
from benchmarks.report.harness import Options
from memstore.core.wire import codec
from placement import place
from recovery.lineage import Span
from recovery.simulate import what_if

TINY = Options(rounds=1, warmups=1)


def test_the_catalogs_record_answers_both_of_its_lines() -> None:
    """A step's seconds, their growth with the ranks, what waiting costs, what is kept."""
    record = bench_catalog.measure((32, 64), TINY)
    assert [ratio.target for ratio in record.ratios[:2]] == [targets.CATALOG, targets.CATALOG_GROWTH]
    assert set(record.seconds) == {"32 ranks", "64 ranks"}
    assert all(value > 0 for ratio in record.ratios for value in ratio.values)


def test_the_controllers_record_tells_what_all_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a real controller's sessions.

    What goes to all is packed once, of a moment's suspicion no process learns.
    """
    real, packed = codec.encode, Counter[str]()

    def encode(message: codec.Message) -> bytes:
        packed[codec.tag_of(message)] += 1
        return real(message)

    monkeypatch.setattr(codec, "encode", encode)
    costs = bench_controller.episodes(8)
    assert costs["a host is suspected"].orders == 0
    assert costs["a commit"].orders == 8 * 3  # the fact, its word, and what it lets go
    assert costs["a successor starts"].received_bytes > costs["a successor starts"].sent_bytes
    # The fact of each commit, of the attempts and of room once; hosts' own journals at each of two starts.
    assert 0 < packed["journal"] <= 2 * 8 + 10
    # For a rack of two: each greeted, the first reported at once, the other in turn.
    assert 0 < packed["all_hosts"] + packed["host_news"] <= 6 + 3 * 2
    figures = bench_controller.record(8, costs).ratios
    assert len(figures) == 4 * len(costs)


def test_the_planners_record_answers_both_of_its_lines() -> None:
    """Seconds where the lost hosts lie apart, and where whole pairs are gone; memory per host."""
    record = bench_planner.measure((32, 64), 8, TINY)
    held = [ratio.target for ratio in record.ratios if ratio.target is not None]
    assert held == [targets.PLANNER, targets.PLANNER_MEMORY]
    assert len(record.seconds) == 4


def test_the_placements_record_answers_both_of_its_lines() -> None:
    """Seconds of the large cluster, and how they grew from the small one; a wrong placement is no number."""
    record = bench_placement.measure((3, 6), TINY)
    assert [ratio.target for ratio in record.ratios] == [targets.PLACEMENT, targets.PLACEMENT_GROWTH]
    topology = bench_placement.topology_of(3)
    placement = place(topology, replicas=bench_placement.REPLICAS)
    bench_placement.check(placement, topology)
    owner, held = next(iter(placement.targets.items()))
    with pytest.raises(RuntimeError, match="the placement is wrong"):
        bench_placement.check(replace(placement, targets={**placement.targets, owner: held[:1]}), topology)


def test_a_plan_that_reads_from_a_dead_host_stops_the_benchmark() -> None:
    """No number is reported for a plan that could not be carried out."""
    inventory, hosts = bench_planner.survivors(8)
    plan = what_if(inventory, (Span(1, None),), [hosts[3]], world_size=8, rank_hosts=dict(enumerate(hosts)))
    bench_planner.check(plan, hosts, [hosts[3]], "peer")
    with pytest.raises(RuntimeError, match="the plan is wrong"):
        bench_planner.check(plan, hosts, [hosts[2]], "peer")
    with pytest.raises(RuntimeError, match="the plan is wrong"):
        bench_planner.check(replace(plan, transfers=plan.transfers[1:]), hosts, [hosts[3]], "peer")

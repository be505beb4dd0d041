"""Dry runs, metrics, and the planner at scale."""

from __future__ import annotations

import pytest

from recovery import (
    CommitFact,
    Copy,
    Event,
    Inventory,
    ShardId,
    ShardSpec,
    Span,
    StepId,
    ettr,
    expected_ettr,
    lose,
    relaunch,
    what_if,
)


def ring(hosts_count: int, ranks_per_host: int, chunks: int = 4) -> tuple[Inventory, dict[int, str]]:
    """Return a committed step with two copies, on each host and its successor."""
    world_size = hosts_count * ranks_per_host
    names = [f"h{host:06}" for host in range(hosts_count)]
    specs = [ShardSpec(f"d{rank}", chunks * 10, 10, chunks, world_size) for rank in range(world_size)]
    pairs = [(names[host], names[(host + 1) % hosts_count]) for host in range(hosts_count)]
    copies = tuple(
        Copy(ShardId("job", 1, 5, rank), specs[rank], name)
        for rank in range(world_size)
        for name in pairs[rank // ranks_per_host]
    )
    digests = {rank: spec.digest for rank, spec in enumerate(specs)}
    fact = CommitFact(StepId(1, 5), world_size, digests, {r: pairs[r // ranks_per_host] for r in digests})
    return Inventory("job", copies, (fact,)), {rank: names[rank // ranks_per_host] for rank in digests}


def test_lost_hosts_lose_their_copies_and_are_not_waited_for() -> None:
    """A lost host is known dead: its copies go, facts stay, and the plan does not wait (R24)."""
    inventory, _ = ring(3, 1)
    inventory = Inventory("job", inventory.copies, inventory.commits, silent_hosts=frozenset({"h000001", "z"}))
    after = lose(inventory, ["h000001"])
    assert {copy.host for copy in after.copies} == {"h000000", "h000002"}
    assert (after.commits, after.silent_hosts) == (inventory.commits, {"z"})


def test_ranks_of_lost_hosts_go_to_the_least_loaded_survivors() -> None:
    """Relaunch keeps the others in place and evens the counts out."""
    hosts = {0: "a", 1: "a", 2: "b", 3: "b", 4: "c", 5: "d", 6: "d"}
    assert relaunch(hosts, ["b"]) == {0: "a", 1: "a", 2: "c", 3: "a", 4: "c", 5: "d", 6: "d"}
    assert relaunch(hosts, "abcd") == hosts


def test_what_if_follows_a_given_mapping() -> None:
    """A caller that knows where ranks will run says so, and the plan sends there."""
    inventory, hosts = ring(3, 1)
    found = what_if(inventory, (Span(1, None),), ["h000000"], world_size=3, rank_hosts=hosts, relaunched={0: "spare"})
    assert [(t.rank, t.source, t.target_host) for t in found.transfers if t.tier == "peer"] == [(0, "h000001", "spare")]
    default = what_if(inventory, (Span(1, None),), ["h000000"], world_size=3, rank_hosts=hosts)
    assert default.verdict == "local", "rank 0 restarts on the host that holds its copy"


def test_a_step_that_ran_twice_is_productive_once() -> None:
    """What counts is its last run, in the order of time."""
    steps = [Event(10.0, "step", 2, 1.0), Event(1.0, "step", 0, 1.0), Event(2.1, "step", 1, 1.0)]
    timeline = [*steps, Event(3.4, "step", 2, 4.0), Event(4.0, "failed")]
    assert ettr(timeline, wall_s=10.0) == pytest.approx(0.3)
    with pytest.raises(ValueError, match="wall_s"):
        ettr(timeline, wall_s=0)


def test_expected_ettr_matches_the_published_illustration() -> None:
    """2,048 hosts at 6.5 failures per 1000 node-days: durable only gives 0.76, 90 s restarts every 30 s give 0.974."""
    rate = 6.5 / 1000 / 86400
    durable = expected_ettr(hosts_count=2048, failures_per_host_s=rate, restart_s=600, interval_s=1800, blocking_s=20)
    memory = expected_ettr(hosts_count=2048, failures_per_host_s=rate, restart_s=90, interval_s=30, blocking_s=0.3)
    assert durable == pytest.approx(0.76, abs=0.005)
    assert memory == pytest.approx(0.974, abs=0.0005)
    with pytest.raises(ValueError, match="simulate"):
        expected_ettr(hosts_count=10**6, failures_per_host_s=rate, restart_s=90, interval_s=1800, blocking_s=1)
    with pytest.raises(ValueError, match="interval_s"):
        expected_ettr(hosts_count=1, failures_per_host_s=rate, restart_s=90, interval_s=0, blocking_s=1)


def test_sixteen_thousand_hosts_are_planned_for() -> None:
    """131,072 ranks on 16,384 hosts with 64 apart lost: one object per unmoved rank, chunks never enumerated."""
    inventory, hosts = ring(16_384, 8, chunks=10_000)
    lost = [f"h{host:06}" for host in range(0, 16_384, 256)]
    found = what_if(inventory, (Span(1, None),), lost, world_size=131_072, rank_hosts=hosts)
    assert found.step == StepId(1, 5)
    assert len(found.transfers) == 131_072
    assert found.bytes_peer + found.bytes_local == 131_072 * 100_000

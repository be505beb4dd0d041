"""Status names the ranks that lack copies, where the rest lies and where repair goes, or why it does not (R18, R29)."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from memstore.core.report.status import RANKS_NAMED_MAX
from memstore.testing.controller.trained import trained
from memstore.testing.controller.world import ControllerWorld
from recovery.inventory import ShardId


def status(world: ControllerWorld) -> tuple[dict[str, Any], str]:
    """The job's part of the status answer, and the cause of its first problem about copies."""
    body = world.status()
    causes = [row["cause"] for row in body["problems"] if "copies" in row["cause"] and row["about"] == "train"]
    return body["jobs"][0], next(iter(causes), "")


def test_the_ranks_that_a_dead_host_leaves_short_are_named_with_their_targets() -> None:
    """First repair waits for the host, which may be back with its copies; then the copies go where it said."""
    world, _ = trained(4, 3)
    job, cause = status(world)
    assert (job["short"], job["short_shards"], cause) == ([], 0, "")
    world.kill_host("h1")
    world.run(1.0)
    job, cause = status(world)
    assert job["short_shards"] == job["missing_copies"] > 0
    assert sorted(rank for row in job["short"] for rank in row["ranks"]) == [
        rank for rank in range(3) if len(world.holders_of(_step(world), rank)) < 2
    ]
    for row in job["short"]:
        assert (row["attempt"], row["step"]) == (1, 1)
        assert all(row["hosts"] == world.holders_of(_step(world), rank) for rank in row["ranks"])
        assert len(row["targets"]) == 1
        assert "h1 died within 5 s and may be back" in row["why_not"]
    first = job["short"][0]
    assert f"rank 0 on h0 only, to be rebuilt on {first['targets'][0]} (h1 died within 5 s" in cause
    world.run(10.0)
    assert status(world)[0]["short"] == []
    assert all(
        set(row["targets"]) <= set(world.holders_of(_step(world), rank))
        for row in job["short"]
        for rank in row["ranks"]
    )


def test_a_refusal_and_a_missing_host_are_the_reason_why_nothing_is_rebuilt() -> None:
    """No third host: nothing may hold the copy. A host that refuses it is named with its reason."""
    world, _ = trained(2, 2)
    world.kill_host("h1")
    world.run(10.0)
    job, cause = status(world)
    [row] = job["short"]
    assert (row["ranks"], row["hosts"], row["targets"], row["why_not"]) == (
        [0, 1],
        ["h0"],
        [],
        "no other host may hold it",
    )
    assert "ranks 0, 1 on h0 only, not rebuilt: no other host may hold it" in cause
    world, _ = trained(4, 3)
    with patch.object(world.served.parts.repair, "consider", lambda now, job: None):
        world.kill_host("h1")
        world.run(10.0)
        for rank in range(3):
            for host in world.holders:
                world.job().refusals[ShardId("train", 1, 1, rank), host] = "no room"
        job, cause = status(world)
    assert [(row["ranks"], row["hosts"], row["targets"]) for row in job["short"]] == [
        ([0], ["h0"], []),
        ([1], ["h2"], []),
    ]
    assert [row["why_not"] for row in job["short"]] == ["h3: no room", "h0: no room"]
    assert "rank 0 on h0 only, not rebuilt: h3: no room" in cause


def test_the_list_of_ranks_is_bounded() -> None:
    """Of thousands of short ranks the first are named, so that a status stays small; the count is of all."""
    world, _ = trained(2, 2)
    world.kill_host("h1")
    world.run(10.0)
    rows = world.served.parts.status.short_rows(world.job(), dict.fromkeys(range(5000), 1))
    assert sum(len(row.ranks) for row in rows) == RANKS_NAMED_MAX


def _step(world: ControllerWorld) -> Any:
    return world.job().newest_committed

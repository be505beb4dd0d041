"""The numbers for Prometheus follow from the controller's own account.

Right values, few series, nothing left behind.
"""

from __future__ import annotations

from collections import Counter

from msgspec.structs import replace

from memstore.core.report.metrics import (
    METRICS,
    Sample,
    counted,
    exported_names,
    holder_gauges,
    holder_growth,
    status_gauges,
)
from memstore.testing.controller.holder import host_stats
from memstore.testing.controller.world import JOB, ControllerWorld, trained

SERIES_OF_A_JOB = 64  # a store of a hundred jobs is some thousand series, for any number of ranks


def gauges(world: ControllerWorld) -> dict[str, float]:
    """Where the gauges stand now, those of the job and of the store."""
    samples = status_gauges(world.served.parts.status.answer(), 0)
    assert len({(s.name, s.tags) for s in samples}) == len(samples)
    return {"/".join((s.name.removeprefix("memstore_"), *(t for t in s.tags if t != JOB))): s.value for s in samples}


def totals(world: ControllerWorld) -> Counter[str]:
    """What all events add up to, by metric and tags; histograms by their number of observations and sum."""
    found: Counter[str] = Counter()
    for event in world.served.parts.recorder.recent_events.since(0):
        for sample in counted(event):
            metric = METRICS[sample.name]
            assert len(sample.tags) == len(metric.tags)
            key = "/".join((sample.name.removeprefix("memstore_"), *sample.tags))
            found[key] += 1 if metric.kind == "histogram" else sample.value  # type: ignore[assignment]
    return found


def test_gauges_of_a_healthy_job() -> None:
    """The newest commit and its age in seconds and steps; nothing short, nothing late."""
    world, ranks = trained(3, last=4)
    world.put(ranks[0], 6)
    world.run(5.0)
    now = gauges(world)
    assert (now["job_running"], now["committed_step"], now["commit_age_steps"]) == (1, 4, 2)
    assert 4.5 <= now["commit_age_seconds"] <= 5.5
    assert (now["hosts/live"], now["hosts/dead"], now["controller_term"]) == (3, 0, 1)
    assert now["shards_below_replicas"] == now["degraded_seconds"] == now["durable_lag_steps"] == 0


def test_gauges_while_copies_are_missing_and_after_the_repair() -> None:
    """Shards below replicas count shards, not copies; the clock starts with the loss and goes back to 0."""
    world, _ = trained(4, world_size=3)
    world.kill_host("h0")
    world.run(3.0)
    short = gauges(world)
    assert (short["shards_below_replicas"], short["hosts/dead"]) == (2, 1)
    assert 1.0 <= short["degraded_seconds"] <= 3.2
    assert world.run_until(lambda: gauges(world)["degraded_seconds"] == 0, 60.0)
    assert gauges(world)["shards_below_replicas"] == 0
    assert (totals(world)["repaired_copies_total/train"], totals(world)["host_deaths_total/h0"]) == (2, 1)


def test_a_job_that_is_closed_or_removed_rings_no_alarm() -> None:
    """Its commit grows no older; removed, it has no series any more, and the shell sets those it had to 0."""
    world, ranks = trained(2)
    for rank in ranks:
        world.call(rank, "close")
    world.run(60.0)
    now = gauges(world)
    assert (now["job_running"], now["commit_age_seconds"], now["commit_age_steps"]) == (0, 0, 0)
    world.call(ranks[0], "rm", force=True)
    world.run(1.0)
    assert "job_running" not in gauges(world)


def test_durable_lag_in_steps_and_seconds() -> None:
    """While the newest durable step is behind: since the last write that went well, never for a job without durable."""
    world, ranks = trained(2, durable="/durable", durable_every=1)
    world.run(3.0)
    assert (gauges(world)["durable_lag_steps"], gauges(world)["durable_lag_seconds"]) == (0, 0)
    world.durable.problem = "no space left"
    assert world.put_all(ranks, 4)
    world.run(30.0)
    late = gauges(world)
    assert late["durable_lag_steps"] == 3
    assert 30.0 <= late["durable_lag_seconds"] <= 36.0
    counts = totals(world)
    assert (counts["durable_writes_total/train/written"], counts["durable_writes_total/train/abandoned"]) == (1, 0)
    assert counts["durable_writes_total/train/failed"] >= 1


def test_counters_of_puts_skips_and_restores() -> None:
    """Every step, skip and restore counts once for all its ranks; bytes are those of the states."""
    world, ranks = trained(4, world_size=3, last=2)
    world.call(ranks[1], "skip", step=3, why="no room", stall_s=5.0)
    world.run(2.0)
    world.put(ranks[0], 5)
    world.run(1.0)
    world.kill_host(ranks[2].host_id)
    again = world.launch(3)
    world.get(again)
    counts = totals(world)
    assert counts["commits_total/train/no"] == counts["time_to_commit_seconds/train"] == 2
    assert counts["time_to_redundant_seconds/train"] == 2
    assert counts["put_bytes_total/train"] == 2 * 3 * 256
    assert counts["skips_total/train"] == 1
    assert counts[f"put_stall_seconds/train/{ranks[1].host_id}"] == 1
    assert (counts["restores_total/train/none"], counts["restores_total/train/peer"]) == (1, 1)
    assert (counts["restored_bytes_total/train/local"], counts["restored_bytes_total/train/peer"]) == (512, 256)
    assert counts["restore_seconds/train"] == 1
    assert world.put_all(again, 3)
    world.run(1.0)
    counts = totals(world)
    assert counts["steps_lost_total/train/failure"] == 3  # step 5 was seen, step 2 was whole
    assert counts["outages_total/train/failure"] == 1
    assert counts["outage_seconds_total/train/restart"] > 0


def test_what_a_holder_exports_follows_from_its_heartbeat() -> None:
    """Gauges as they stand; counters by what grew since the last look, which starts again with every holder."""
    stats = host_stats(
        used_bytes=5, reserved_bytes=6, claimed_bytes=7, limit_bytes=8, scrub=2, digest_errors=1, broken_frames=3
    )
    assert Sample("memstore_arena_used_bytes", 5, ("h1",)) in holder_gauges("h1", stats)
    first = holder_growth("h1", None, stats)
    assert {s.name: s.value for s in first} == {"memstore_scrub_findings_total": 2, "memstore_link_damage_total": 4}
    assert holder_growth("h1", stats, replace(stats, scrub=3)) == [Sample("memstore_scrub_findings_total", 1, ("h1",))]
    assert holder_growth("h1", stats, stats) == []


def test_the_table_of_metrics_keeps_prometheus_conventions() -> None:
    """Units last, counters end in _total, no tag is one that Prometheus gives itself, and the series stay few."""
    for metric in METRICS.values():
        assert metric.name.startswith("memstore_")
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert not {"job", "instance", "le"} & set(metric.tags)
        assert metric.text.endswith(".")
        assert bool(metric.buckets) == (metric.kind == "histogram")
    assert exported_names(METRICS["memstore_hosts"]) == ("ray_memstore_hosts",)
    series = [
        len(metric.buckets) + 3 if metric.buckets else 1 for metric in METRICS.values() if "host" not in metric.tags
    ]
    assert sum(series) <= SERIES_OF_A_JOB + 23

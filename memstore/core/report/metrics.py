"""The numbers of a store for Prometheus, each derived from a status or a store event. Pure.

Ray exports them with `ray_` before the name; `memstore/grafana/` draws and watches them. The tag of a job is
`job_name`: in Prometheus `job` is the scrape's own label. Every metric also has the tag `store`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from memstore.core.report.event_ring import StoreEvent
from memstore.core.wire.replies import Status
from memstore.core.wire.status_rows import AttemptStatus, HostStats

JOB, HOST = ("job_name",), ("host",)
STALL_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
COMMIT_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
RESTORE_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
RECOVERY_S = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric; `source` is the kind of actor that exports it: "controller" or "holder"."""

    name: str
    kind: str  # gauge, counter or histogram
    source: str
    text: str
    tags: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """A value for one metric: a gauge's level, a counter's increment, or a histogram's observation."""

    name: str
    value: float
    tags: tuple[str, ...] = ()  # values, in the order of the metric's tags


Row = tuple[str, tuple[str, ...], str]  # name, tags, description
_GAUGES: tuple[Row, ...] = (
    ("controller_term", (), "Term of the controller that serves; absent while none does."),
    ("hosts", ("state",), "Hosts by state: live, suspect, dead, draining."),
    ("problems", ("kind", "severity"), "Rows of `memstore status` about what is wrong, by kind and severity."),
    ("events_unwritten", (), "Events that the log or the counters missed since the controller started."),
    ("job_running", JOB, "1 while an attempt of the job is open and not all of its processes have ended."),
    (
        "training_stopped_seconds",
        JOB,
        "For how long a job that is not closed has not trained, or committed; 0: it does.",
    ),
    ("job_generation", JOB, "Generation of recovery in place that runs; 0: an ordinary launch."),
    ("committed_step", JOB, "Newest committed step of the lineage."),
    ("commit_age_seconds", JOB, "Age of the newest commit of a running job: what a death of all ranks would cost."),
    ("commit_age_steps", JOB, "Steps put after the newest commit of a running job."),
    ("shards_below_replicas", JOB, "Shards of the newest commit with fewer whole copies than asked."),
    ("degraded_seconds", JOB, "How long the newest commit has had too few or too near copies."),
    ("durable_lag_steps", JOB, "Steps that the newest durable step is behind the newest commit."),
    ("durable_lag_seconds", JOB, "Since the last durable write (or the controller's start) while it is behind."),
)
_COUNTERS: tuple[Row, ...] = (
    ("put_bytes_total", JOB, "Bytes of steps that all ranks had put."),
    ("commits_total", (*JOB, "degraded"), "Steps committed, by whether with fewer or nearer copies than asked."),
    ("skips_total", JOB, "Times that all ranks gave steps up because one had no room or failed."),
    ("unchanged_puts_total", JOB, "Times that ranks began to put the same bytes again, by rank."),
    ("replicas_differ_total", JOB, "Times that two ranks of one shard began to put different bytes."),
    ("superseded_total", JOB, "Steps that a newer commit overtook."),
    ("restores_total", (*JOB, "verdict"), "Restores by verdict: local, peer, mixed, durable, none, failed."),
    ("restored_bytes_total", (*JOB, "tier"), "Bytes restored, by the tier they came from."),
    ("steps_lost_total", JOB, "Steps known to be trained that restores went back behind: at least so many."),
    (
        "replaced_ranks_total",
        (*JOB, "cause"),
        "Ranks replaced in place: ended, frozen, silent, unwatched, absent, ray.",
    ),
    ("recovery_phase_seconds_total", (*JOB, "phase"), "Seconds of recoveries in place, by phase."),
    ("repaired_copies_total", JOB, "Copies that repair made."),
    ("repaired_bytes_total", JOB, "Bytes of the copies that repair made."),
    ("durable_writes_total", (*JOB, "outcome"), "Durable writes by outcome: written, failed, abandoned."),
    ("host_deaths_total", HOST, "Deaths of holders, or of their hosts."),
)
_DURATIONS: tuple[tuple[str, tuple[float, ...], str], ...] = (
    ("time_to_commit_seconds", COMMIT_S, "From the first rank's put to the commit."),
    ("time_to_redundant_seconds", COMMIT_S, "From the first rank's put to all copies asked for."),
    ("restore_seconds", RESTORE_S, "From the first rank's get to the release of all ranks."),
    ("recovery_seconds", RECOVERY_S, "From the loss of a rank to the first commit after its replacement in place."),
)
_ARENA: tuple[Row, ...] = (
    ("arena_used_bytes", HOST, "Arena bytes in use."),
    ("arena_reserved_bytes", HOST, "Arena bytes that jobs have reserved."),
    ("arena_claimed_bytes", HOST, "Arena bytes that are allocated and pre-faulted."),
    ("arena_limit_bytes", HOST, "Arena bytes allowed."),
)
_DAMAGE: tuple[Row, ...] = (
    ("scrub_findings_total", HOST, "Damaged slots found in the arena, and manifests beside it."),
    ("link_damage_total", HOST, "Chunks or frames that arrived damaged."),
    ("received_bytes_total", HOST, "Bytes of copies that peers pushed to the host."),
    ("spilled_bytes_total", HOST, "Bytes of copies that were held for too long and sent beside collectives."),
)
_STALL = Metric(
    "memstore_put_stall_seconds", "histogram", "holder", "How long puts blocked their ranks.", (*JOB, *HOST), STALL_S
)


def _table() -> Iterator[Metric]:
    for rows, kind, source in (
        (_GAUGES, "gauge", "controller"), (_COUNTERS, "counter", "controller"), (_ARENA, "gauge", "holder"),
        (_DAMAGE, "counter", "holder"),
    ):  # fmt: skip
        yield from (Metric(f"memstore_{name}", kind, source, text, tags) for name, tags, text in rows)
    for name, buckets, text in _DURATIONS:
        yield Metric(f"memstore_{name}", "histogram", "controller", text, JOB, buckets)
    yield _STALL


METRICS: dict[str, Metric] = {metric.name: metric for metric in _table()}


def exported_names(metric: Metric) -> tuple[str, ...]:
    """Return the names under which Prometheus knows a metric."""
    name = f"ray_{metric.name}"
    return tuple(f"{name}{end}" for end in ("_bucket", "_sum", "_count")) if metric.kind == "histogram" else (name,)


# -- gauges ---------------------------------------------------------------------------------------


def status_gauges(status: Status, unwritten_count: int) -> list[Sample]:
    """Return where every gauge of the controller stands, from what `memstore status` shows."""
    states = dict.fromkeys(("live", "suspect", "dead", "draining"), 0)
    for host in status.hosts:
        states[host.status] += 1
        states["draining"] += host.drains_s is not None and host.status != "dead"
    samples = [Sample("memstore_hosts", count, (state,)) for state, count in states.items()]
    rows = Counter((row.kind, row.severity) for row in status.problems)
    samples += [Sample("memstore_problems", count, about) for about, count in rows.items()]
    samples.append(Sample("memstore_controller_term", status.term))
    samples.append(Sample("memstore_events_unwritten", unwritten_count))
    for job in status.jobs:
        if job.newest is not None:
            gauges = _job_gauges(job.newest, status.serving_s)
            samples += [Sample(f"memstore_{name}", value, (job.job,)) for name, value in gauges.items()]
    return samples


def _job_gauges(newest: AttemptStatus, serving_s: float) -> dict[str, float]:
    step, durable_step = newest.committed_step, newest.durable_step
    is_running = newest.phase != "closed"
    is_behind = newest.durable is not None and step is not None and (durable_step is None or durable_step < step)
    lag_s = newest.durable_s if newest.durable_s is not None else serving_s
    newest_step = -1 if step is None else step
    training = newest.training
    has_ranks = training is not None and training.ended.count < newest.world_size
    return {
        "job_running": float(is_running and has_ranks),
        "training_stopped_seconds": training.stopped_s if training is not None else 0.0,
        "job_generation": newest.generation,
        "committed_step": newest_step,
        "commit_age_seconds": newest.committed_s if is_running and newest.committed_s is not None else 0.0,
        "commit_age_steps": max(0, newest.training_step - newest_step) if is_running else 0,
        "shards_below_replicas": newest.short_shards,
        "degraded_seconds": newest.short_s or 0.0,
        "durable_lag_steps": newest_step - (-1 if durable_step is None else durable_step) if is_behind else 0,
        "durable_lag_seconds": lag_s if is_behind else 0.0,
    }


def holder_gauges(host: str, stats: HostStats) -> list[Sample]:
    """Return where the gauges of one holder stand, from what its heartbeat carries."""
    return [
        Sample("memstore_arena_used_bytes", stats.used_bytes, (host,)),
        Sample("memstore_arena_reserved_bytes", stats.reserved_bytes, (host,)),
        Sample("memstore_arena_claimed_bytes", stats.claimed_bytes, (host,)),
        Sample("memstore_arena_limit_bytes", stats.limit_bytes, (host,)),
    ]


def holder_growth(host: str, before: HostStats | None, stats: HostStats) -> list[Sample]:
    """Return the increments of one holder's counters between two heartbeats; None: since it began."""
    then, now = _counters(before) if before is not None else {}, _counters(stats)
    grown = {name: value - then.get(name, 0) for name, value in now.items()}
    return [Sample(name, value, (host,)) for name, value in grown.items() if value > 0]


def _counters(stats: HostStats) -> dict[str, int]:
    return {
        "memstore_scrub_findings_total": stats.scrub,
        "memstore_link_damage_total": stats.digest_errors + stats.broken_frames,
        "memstore_received_bytes_total": stats.received_bytes,
        "memstore_spilled_bytes_total": stats.spilled_bytes,
    }


# -- what happened --------------------------------------------------------------------------------


def counted(event: StoreEvent) -> list[Sample]:
    """Return an event's values for the controller's counters and histograms."""
    count = _COUNTED.get(event.kind)
    return [] if count is None else [sample for sample in count(event, event.fields) if sample is not None]


def _one(name: str, h: StoreEvent, *more: str, value: float = 1) -> Sample | None:
    return Sample(f"memstore_{name}", value, (h.job, *more)) if value > 0 else None


def _took(name: str, h: StoreEvent, phase: str) -> Sample | None:
    return _one(name, h, value=h.fields["seconds"][phase]) if phase in h.fields["seconds"] else None


def _commit(h: StoreEvent, fields: Mapping[str, Any]) -> list[Sample | None]:
    return [
        _one("commits_total", h, "yes" if fields["degraded"] else "no"),
        _took("time_to_commit_seconds", h, "committed"),
        _took("time_to_redundant_seconds", h, "redundant"),
    ]


def _restore(h: StoreEvent, fields: Mapping[str, Any]) -> list[Sample | None]:
    samples = [_one("restores_total", h, fields["verdict"])]
    if fields["verdict"] != "none":
        samples += [_one("restored_bytes_total", h, tier, value=count) for tier, count in fields["bytes"].items()]
        samples.append(_one("steps_lost_total", h, value=fields["steps_lost"] if fields["adopted"] else 0))
        samples.append(_one("restore_seconds", h, value=sum(fields["seconds"].values())))
    return samples


def _replaced(h: StoreEvent, fields: Mapping[str, Any]) -> list[Sample | None]:
    causes = Counter(row["cause"] for row in fields["replaced"])
    return [_one("replaced_ranks_total", h, cause, value=count) for cause, count in causes.items()]


def _recovered(h: StoreEvent, fields: Mapping[str, Any]) -> list[Sample | None]:
    phases = [_one("recovery_phase_seconds_total", h, phase, value=s) for phase, s in fields["seconds"].items()]
    return [_one("recovery_seconds", h, value=sum(fields["seconds"].values())), *phases]


def _skip(h: StoreEvent, fields: Mapping[str, Any]) -> list[Sample | None]:
    samples = [_one("skips_total", h)]
    if fields.get("stall_s"):  # a put that was skipped has no seal that could carry how long it blocked
        samples.append(Sample("memstore_put_stall_seconds", fields["stall_s"], (h.job, h.host)))
    return samples


_COUNTED: dict[str, Callable[[StoreEvent, Mapping[str, Any]], list[Sample | None]]] = {
    "put": lambda h, f: [_one("put_bytes_total", h, value=f["nbytes"])],
    "commit": _commit,
    "redundant": lambda h, f: [_took("time_to_redundant_seconds", h, "redundant")],
    "skip": _skip,
    "unchanged": lambda h, f: [_one("unchanged_puts_total", h, value=f["count"])],
    "replicas_differ": lambda h, f: [_one("replicas_differ_total", h)],
    "superseded": lambda h, f: [_one("superseded_total", h)],
    "restore": _restore,
    "replaced": _replaced,
    "recovered": _recovered,
    "restore_failed": lambda h, f: [_one("restores_total", h, "failed")],
    "repaired": lambda h, f: [
        _one("repaired_copies_total", h, value=f["shards"]),
        _one("repaired_bytes_total", h, value=f["nbytes"]),
    ],
    "durable": lambda h, f: [_one("durable_writes_total", h, "written")],
    "durable_failed": lambda h, f: [_one("durable_writes_total", h, "failed")],
    "durable_abandoned": lambda h, f: [_one("durable_writes_total", h, "abandoned")],
    "host_dead": lambda h, f: [Sample("memstore_host_deaths_total", 1, (h.host,))],
}

"""The numbers of a store for Prometheus, each one row: its name, what it says, and how it follows. Pure.

A gauge follows from a status or a heartbeat, a counter of a holder from two heartbeats, a counter or histogram of the
controller from store events. Ray exports them with `ray_` before the name; `memstore/grafana/` draws and watches them.
The tag of a job is `job_name`: in Prometheus `job` is the scrape's own label. Every metric also has the tag `store`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from memstore.core.wire.replies import Status
from memstore.core.wire.status_rows import AttemptStatus, EventRow, GoodputRow, HostStats

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


Fields = Mapping[str, Any]
Count = float | Mapping[str, float] | None
"""What an event adds: a number, one for each value of the metric's last tag, or nothing."""

# -- gauges: name, text, value --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JobNow:
    """What gauges of a job follow from."""

    newest: AttemptStatus
    serving_s: float
    goodput: GoodputRow | None = None

    @property
    def is_running(self) -> bool:
        return self.newest.phase != "closed"

    @property
    def has_ranks(self) -> bool:
        training = self.newest.training
        return training is not None and training.ended.count < self.newest.world_size

    @property
    def step(self) -> int:
        return -1 if self.newest.committed_step is None else self.newest.committed_step

    @property
    def lag_steps(self) -> int:
        """Steps that durable storage is behind."""
        newest = self.newest
        is_asked = newest.durable is not None and newest.committed_step is not None
        return max(0, self.step - (-1 if newest.durable_step is None else newest.durable_step)) if is_asked else 0

    @property
    def lag_s(self) -> float:
        return self.serving_s if self.newest.durable_s is None else self.newest.durable_s


_STORE: tuple[tuple[str, tuple[str, ...], str], ...] = (  # each has a line in `status_gauges`
    ("controller_term", (), "Term of the controller that serves; absent while none does."),
    ("hosts", ("state",), "Hosts by state: live, suspect, dead, draining."),
    ("problems", ("kind", "severity"), "Rows of `memstore status` about what is wrong, by kind and severity."),
    ("events_unwritten", (), "Events that the log or the counters missed since the controller started."),
)
_JOB: tuple[tuple[str, str, Callable[[JobNow], float | None]], ...] = (  # None: there is no number
    (
        "goodput_ratio",
        "Share of a job's time, since it or the controller began, in steps that stay; absent until one is trained.",
        lambda job: job.goodput.kept_s / job.goodput.total_s if job.goodput and job.goodput.total_s else None,
    ),
    (
        "job_running",
        "1 while an attempt of the job is open and not all of its processes have ended.",
        lambda job: float(job.is_running and job.has_ranks),
    ),
    (
        "training_stopped_seconds",
        "For how long a job that is not closed has not trained, or committed; 0: it does.",
        lambda job: job.newest.training.stopped_s if job.newest.training is not None else 0.0,
    ),
    (
        "job_generation",
        "Generation of recovery in place that runs; 0: an ordinary launch.",
        lambda job: job.newest.generation,
    ),
    ("committed_step", "Newest committed step of the lineage.", lambda job: job.step),
    (
        "commit_age_seconds",
        "Age of the newest commit of a running job: what a death of all ranks would cost.",
        lambda job: (job.newest.committed_s or 0.0) if job.is_running else 0.0,
    ),
    (
        "commit_age_steps",
        "Steps put after the newest commit of a running job.",
        lambda job: max(0, job.newest.training_step - job.step) if job.is_running else 0,
    ),
    (
        "shards_below_replicas",
        "Shards of the newest commit with fewer whole copies than asked.",
        lambda job: job.newest.short_shards,
    ),
    (
        "degraded_seconds",
        "How long the newest commit has had too few or too near copies.",
        lambda job: job.newest.short_s or 0.0,
    ),
    ("durable_lag_steps", "Steps that the newest durable step is behind the newest commit.", lambda job: job.lag_steps),
    (
        "durable_lag_seconds",
        "Since the last durable write (or the controller's start) while it is behind.",
        lambda job: job.lag_s if job.lag_steps else 0.0,
    ),
)
_ARENA: tuple[tuple[str, str, Callable[[HostStats], int]], ...] = (
    ("arena_used_bytes", "Arena bytes in use.", lambda stats: stats.used_bytes),
    ("arena_reserved_bytes", "Arena bytes that jobs have reserved.", lambda stats: stats.reserved_bytes),
    ("arena_claimed_bytes", "Arena bytes that are allocated and pre-faulted.", lambda stats: stats.claimed_bytes),
    ("arena_limit_bytes", "Arena bytes allowed.", lambda stats: stats.limit_bytes),
)
_GROWTH: tuple[tuple[str, str, Callable[[HostStats], int]], ...] = (
    ("scrub_findings_total", "Damaged slots found in the arena, and manifests beside it.", lambda stats: stats.scrub),
    (
        "link_damage_total",
        "Chunks or frames that arrived damaged.",
        lambda stats: stats.digest_errors + stats.broken_frames,
    ),
    ("received_bytes_total", "Bytes of copies that peers pushed to the host.", lambda stats: stats.received_bytes),
    (
        "spilled_bytes_total",
        "Bytes of copies that were held for too long and sent beside collectives.",
        lambda stats: stats.spilled_bytes,
    ),
)

# -- what happened: name, tags, text, what each kind of event adds --------------------------------


def _one(_fields: Fields) -> Count:
    return 1


def _took(phase: str) -> Callable[[Fields], Count]:
    return lambda e: e["seconds"].get(phase)


def _by(e: Fields) -> str:
    return "choice" if e["is_chosen"] else "failure"


def _in_all(e: Fields) -> Count:
    """Return the seconds of all phases; a restore of nothing has none."""
    return sum(e["seconds"].values()) if "seconds" in e else None


_EVENTS: tuple[tuple[str, tuple[str, ...], str, Mapping[str, Callable[[Fields], Count]]], ...] = (
    ("put_bytes_total", JOB, "Bytes of steps that all ranks had put.", {"put": lambda e: e["nbytes"]}),
    (
        "commits_total", (*JOB, "degraded"), "Steps committed, by whether with fewer or nearer copies than asked.",
        {"commit": lambda e: {"yes" if e["degraded"] else "no": 1}},
    ),
    ("skips_total", JOB, "Times that all ranks gave steps up because one had no room or failed.", {"skip": _one}),
    (
        "unchanged_puts_total", JOB, "Times that ranks began to put the same bytes again, by rank.",
        {"unchanged": lambda e: e["count"]},
    ),
    (
        "replicas_differ_total", JOB, "Times that two ranks of one shard began to put different bytes.",
        {"replicas_differ": _one},
    ),
    ("superseded_total", JOB, "Steps that a newer commit overtook.", {"superseded": _one}),
    (
        "restores_total", (*JOB, "verdict"), "Restores by verdict: local, peer, mixed, durable, none, failed.",
        {"restore": lambda e: {e["verdict"]: 1}, "restore_failed": lambda e: {"failed": 1}},
    ),
    (
        "restored_bytes_total", (*JOB, "tier"), "Bytes restored, by the tier they came from.",
        {"restore": lambda e: e.get("bytes")},
    ),
    (
        "steps_lost_total", (*JOB, "by"), "Steps known to be trained that failures took, or a person took back.",
        {"outage": lambda e: {_by(e): e["steps_lost"]}},
    ),
    ("outages_total", (*JOB, "by"), "Times that training went on after an outage.", {"outage": lambda e: {_by(e): 1}}),
    (
        "outage_seconds_total", (*JOB, "phase"),
        "Seconds of outages: detection, restart, restore, first_step; lost_steps: that these had taken.",
        {"outage": lambda e: {**e["seconds"], "lost_steps": e["lost_s"]}},
    ),
    (
        "replaced_ranks_total", (*JOB, "cause"),
        "Ranks replaced in place: ended, frozen, silent, unwatched, absent, ray.",
        {"replaced": lambda e: Counter(row["cause"] for row in e["replaced"])},
    ),
    (
        "recovery_phase_seconds_total", (*JOB, "phase"), "Seconds of recoveries in place, by phase.",
        {"recovered": lambda e: e["seconds"]},
    ),
    ("repaired_copies_total", JOB, "Copies that repair made.", {"repaired": lambda e: e["shards"]}),
    ("repaired_bytes_total", JOB, "Bytes of the copies that repair made.", {"repaired": lambda e: e["nbytes"]}),
    (
        "durable_writes_total", (*JOB, "outcome"), "Durable writes by outcome: written, failed, abandoned.",
        {
            "durable": lambda e: {"written": 1}, "durable_failed": lambda e: {"failed": 1},
            "durable_abandoned": lambda e: {"abandoned": 1},
        },
    ),
    ("host_deaths_total", HOST, "Deaths of holders, or of their hosts.", {"host_dead": _one}),
    ("time_to_commit_seconds", JOB, "From the first rank's put to the commit.", {"commit": _took("committed")}),
    (
        "time_to_redundant_seconds", JOB, "From the first rank's put to all copies asked for.",
        {"commit": _took("redundant"), "redundant": _took("redundant")},
    ),
    ("restore_seconds", JOB, "From the first rank's get to the release of all ranks.", {"restore": _in_all}),
    (
        "recovery_seconds", JOB, "From the loss of a rank to the first commit after its replacement in place.",
        {"recovered": _in_all},
    ),
    (  # of a put that was skipped; others come with the seal, from the holder
        "put_stall_seconds", (*JOB, *HOST), "How long puts blocked their ranks.", {"skip": lambda e: e.get("stall_s")},
    ),
)  # fmt: skip
_BUCKETS = {
    "time_to_commit_seconds": COMMIT_S,
    "time_to_redundant_seconds": COMMIT_S,
    "restore_seconds": RESTORE_S,
    "recovery_seconds": RECOVERY_S,
    "put_stall_seconds": STALL_S,
}


def _table() -> Iterator[Metric]:
    yield from (Metric(f"memstore_{name}", "gauge", "controller", text, tags) for name, tags, text in _STORE)
    yield from (Metric(f"memstore_{name}", "gauge", "controller", text, JOB) for name, text, _ in _JOB)
    yield from (Metric(f"memstore_{name}", "gauge", "holder", text, HOST) for name, text, _ in _ARENA)
    yield from (Metric(f"memstore_{name}", "counter", "holder", text, HOST) for name, text, _ in _GROWTH)
    for name, tags, text, _ in _EVENTS:
        kind = "histogram" if name in _BUCKETS else "counter"
        source = "holder" if tags == (*JOB, *HOST) else "controller"
        yield Metric(f"memstore_{name}", kind, source, text, tags, _BUCKETS.get(name, ()))


METRICS: dict[str, Metric] = {metric.name: metric for metric in _table()}


def exported_names(metric: Metric) -> tuple[str, ...]:
    """Return the names under which Prometheus knows a metric."""
    name = f"ray_{metric.name}"
    return tuple(f"{name}{end}" for end in ("_bucket", "_sum", "_count")) if metric.kind == "histogram" else (name,)


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
    for row in status.jobs:
        if row.newest is not None:
            job = JobNow(row.newest, status.serving_s, row.goodput)
            values = [(name, value(job)) for name, _, value in _JOB]
            samples += [Sample(f"memstore_{name}", value, (row.job,)) for name, value in values if value is not None]
    return samples


def holder_gauges(host: str, stats: HostStats) -> list[Sample]:
    """Return where the gauges of one holder stand, from what its heartbeat carries."""
    return [Sample(f"memstore_{name}", value(stats), (host,)) for name, _, value in _ARENA]


def holder_growth(host: str, before: HostStats | None, stats: HostStats) -> list[Sample]:
    """Return the increments of one holder's counters between two heartbeats; None: since it began."""
    grown = {name: value(stats) - (value(before) if before is not None else 0) for name, _, value in _GROWTH}
    return [Sample(f"memstore_{name}", value, (host,)) for name, value in grown.items() if value > 0]


def counted(event: EventRow) -> list[Sample]:
    """Return an event's values for the controller's counters and histograms."""
    samples = []
    for name, tags, _, kinds in _EVENTS:
        found = kinds[event.event](event.fields) if event.event in kinds else None
        about = tuple(event.host if tag == "host" else event.job for tag in tags if tag in (*JOB, *HOST))
        by_tag = found.items() if isinstance(found, Mapping) else [(None, found)]
        for tag, value in by_tag:
            if value is not None and value > 0:
                samples.append(Sample(f"memstore_{name}", value, (*about, tag) if tag is not None else about))
    return samples

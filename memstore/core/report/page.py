"""What `memstore page` draws: one JSON document made of a status and of the events that are remembered. Pure.

The words are those of `memstore status`, `events` and `plan`. The names of hosts and jobs in them are anybody's: the
page sets them as text, never as markup.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import convert

from memstore.core.cluster.text import phases_text, replaced_text
from memstore.core.report.cells import (
    JOB_HEADS,
    by_cause,
    goodput_text,
    holds_text,
    job_cells,
    outcome,
    plan_lines,
    problem_line,
    state_text,
)
from memstore.core.report.event_kinds import event_fields, event_text, level_of
from memstore.core.wire.replies import Plan, Status
from memstore.core.wire.status_rows import EventRow, HostRow, JobRow, ReplacedRow
from placement.topology import HOST_LEVEL, levels_of

Json = dict[str, Any]
STEPS_MAX = 120  # of one job, in its plot
LINES_MAX = 300  # of events at once
LAST_MAX = 5  # recoveries of a job, and drills


def status_view(status: Status) -> Json:
    """Return what the page draws of a status: hosts by their finest domain, jobs, problems."""
    levels = [each for each in levels_of(status.failure_domains)[:-1] if any(each in h.labels for h in status.hosts)]
    heads = [head.removeprefix(">").lower() for head in JOB_HEADS]
    rows = job_cells(status.jobs, status.launches)
    goodput = {row.job: goodput_text(row.goodput) or "-" for row in status.jobs}
    return {
        "level": levels[-1] if levels else "",
        "groups": host_groups(status.hosts, levels),
        "jobs": [{**dict(zip(heads, cells, strict=True)), "goodput": goodput.get(cells[0], "-")} for cells in rows],
        "problems": [{"severity": row.severity, "text": problem_line(row)[2:]} for row in by_cause(status.problems)],
    }


def news_view(events: Sequence[EventRow], after_seq: int, jobs: Sequence[JobRow]) -> Json:
    """Return what the page draws of events after one: their lines, and what they changed of plots and drills.

    Args:
        events: All that are remembered, oldest first: plots, recoveries and drills are made of all of them.
        after_seq: The number of the newest that was shown.
        jobs: The rows of the newest status.
    """
    fresh = [row for row in events if row.seq > after_seq]
    rows, changed = {row.job: row for row in jobs}, {row.job for row in fresh}
    changed |= {row.job for row in jobs if row.newest is not None and row.newest.replaced}
    return {
        "events": [event_line(row) for row in fresh[-LINES_MAX:]],
        "told": {job: _job_view(rows.get(job), [row for row in events if row.job == job]) for job in changed if job},
        "drills": drills(events) if any(row.event == "drill" for row in fresh) else None,
    }


def _job_view(job: JobRow | None, events: Sequence[EventRow]) -> Json:
    return {"steps": step_times(events), "recoveries": recoveries(job, events)}


def host_groups(hosts: Iterable[HostRow], levels: Sequence[str]) -> list[Json]:
    """Return the hosts by their domain of the last level, each with what it holds; "" has those without a label."""
    found: dict[str, Json] = {}
    for host in hosts:
        *wider, name = ["", *(host.labels.get(level, "") for level in levels)]
        within = ", ".join(f"{level} {each}" for level, each in zip(levels, wider[1:], strict=False) if each)
        group = found.setdefault(name, {"name": name, "within": within, "hosts": []})
        group["hosts"].append(_host(host))
    return sorted(found.values(), key=lambda group: (group["name"] == "", len(group["name"]), group["name"]))


def _host(host: HostRow) -> Json:
    stats = host.stats if host.status != "dead" else None
    state = state_text(host)
    return {
        "host": host.host,
        "look": "dead" if host.status == "dead" else "odd" if state != "ok" else "ok",
        "state": state,
        "used": stats.used_bytes if stats is not None else None,
        "limit": stats.limit_bytes if stats is not None else None,
        "holds": holds_text(host),
    }


def step_times(events: Iterable[EventRow]) -> list[Json]:
    """Return the last steps of a job, oldest first, each with its seconds; `skip` says why one was given up.

    `stall` is for how long the slowest rank was blocked; `sealed`, `committed` and `durable` count from the begin of
    the put, on the controller's clock. A durable step whose put is forgotten has no point.
    """
    found: dict[tuple[int, int], Json] = {}
    began_s: dict[tuple[int, int], float] = {}
    for row in events:
        if row.event not in ("put", "commit", "durable", "skip") or row.attempt is None or row.step is None:
            continue
        key, fields = (row.attempt, row.step), event_fields(row)
        step = found.setdefault(key, {"attempt": row.attempt, "step": row.step})
        if row.event == "put":
            step["stall"], step["sealed"] = fields["stall_s"]["max"], fields["seconds"]["sealed"]
            began_s[key] = row.wall_s - step["sealed"]
        elif row.event == "commit":
            step["committed"] = fields["seconds"].get("committed")
        elif row.event == "durable" and key in began_s:
            step["durable"] = max(0.0, row.wall_s - began_s[key])
        elif row.event == "skip":
            step["skip"] = fields["why"]
    return [found[key] for key in sorted(found)[-STEPS_MAX:]]


def recoveries(job: JobRow | None, events: Iterable[EventRow]) -> list[Json]:
    """Return the job's last recoveries in place, newest first: who was replaced, and the seconds of each phase so far.

    Args:
        job: Its row; the newest recovery may be under way.
        events: Those of the job.
    """
    found: dict[int, Json] = {}

    def of(generation: int) -> Json:
        return found.setdefault(generation, {"generation": generation, "who": "", "seconds": {}, "is_over": False})

    for row in events:
        fields = event_fields(row) if row.event in ("replaced", "recovered") else {}
        if row.event == "replaced":
            of(fields["generation"])["who"] = replaced_text(convert(fields["replaced"], list[ReplacedRow]))
        elif row.event == "recovered":
            of(fields["generation"]).update(seconds=fields["seconds"], is_over=True)
    newest = job.newest if job is not None else None
    if newest is not None and newest.replaced and not of(newest.generation)["is_over"]:
        is_over = "first_step" in newest.recovery_s
        of(newest.generation).update(
            who=replaced_text(newest.replaced), seconds=dict(newest.recovery_s), is_over=is_over
        )
    for each in found.values():
        each["text"] = phases_text(each["seconds"])
    return [found[generation] for generation in sorted(found, reverse=True)[:LAST_MAX]]


def drills(events: Iterable[EventRow]) -> list[Json]:
    """Return the last drills on this store, newest first, each with what it told so far: (when, phase, text)."""
    found: dict[str, Json] = {}
    for row in events:
        if row.event == "drill":
            fields = event_fields(row)
            drill = found.pop(row.job, {"job": row.job, "told": []})
            drill["told"].append([row.wall_s, fields["phase"], fields["text"]])
            found[row.job] = drill
    return list(reversed(found.values()))[:LAST_MAX]


def event_line(row: EventRow) -> Json:
    """Return one line of the account of events."""
    about = row.job or row.host or "store"
    return {"seq": row.seq, "wall_s": row.wall_s, "level": level_of(row.event), "about": about, "text": event_text(row)}


def hosts_of(status: Status, level: str, name: str) -> list[str]:
    """Return the hosts of a domain; of the level "host" the one of this name."""
    return [row.host for row in status.hosts if (row.host if level == HOST_LEVEL else row.labels.get(level)) == name]


def loss_view(plans: Iterable[Plan]) -> list[Json]:
    """Return what jobs would lose, and from where it would come back: the words of `memstore plan JOB --lose h3`."""
    return [{"job": plan.job, "outcome": outcome(plan), "lines": plan_lines(plan)} for plan in plans]

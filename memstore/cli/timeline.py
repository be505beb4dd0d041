"""`memstore ls`: the timeline of each job, newest first, its lineage drawn at the left (R22).

*   a step or an attempt that the newest one goes on from
| o one that a rewind or a fresh start left behind
-   where an attempt begins
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

import click

from memstore.cli.options import Where, address_option, store_options
from memstore.cli.output import age_text, count_text, data_console, plain_table, plural, print_json, say, size_text
from memstore.config import Config

AWAITED_SHOWN_MAX = 5
KEYS = ("job", "attempt", "replicas", "keep_steps", "origin", "pins", "attempts", "steps", "gone")


@click.command(short_help="The timeline of a job: attempts, steps, pins, forks.")
@click.argument("job", required=False)
@address_option
@store_options
def ls(config: Config, address: str | None, job: str | None, as_json: bool) -> None:
    """Draw the timeline of JOB, or of every job, newest first: steps, and where each attempt began.

    "*" is the lineage that get() and training go on from; "| o" are steps that a rewind or a fresh start left behind.
    """
    status = Where(config, address).status(job)
    jobs = [{key: row.get(key) for key in KEYS} for row in status["jobs"] if job in (None, row["job"])]
    if as_json:
        print_json({"jobs": jobs})
    elif not jobs:
        say("the store holds no job yet")
    console = data_console()
    for row in [] if as_json else jobs:
        console.print(job_line(row))
        console.print(_table(row))


def job_line(job: dict[str, Any]) -> str:
    """Return a job's first line: its newest attempt, its kept steps, its origin if it is a fork."""
    parts = [job["job"]]
    if job["attempts"]:
        newest = job["attempts"][0]
        parts += [f"attempt {newest['attempt']}", plural(newest["world_size"], "rank")]
    if job["replicas"] is not None:
        parts += [plural(job["replicas"], "copy"), f"keep_steps {job['keep_steps']}"]
    if job["origin"] is not None:
        parts.append(f"forked from {origin_text(job['origin'])}")
    return " · ".join(parts)


def origin_text(origin: dict[str, Any]) -> str:
    """Return "base@400": the job and step that a fork began with."""
    return f"{origin['job']}@{origin['step']}"


def _table(job: dict[str, Any]) -> Any:
    table = plain_table("", ">STEP", "STATE", "COPIES", ">RANKS", ">BYTES", ">AGE", "HOSTS")
    for graph, row in timeline_rows(job):
        if "first" in row:
            table.add_row(graph, "", gone_text(row), "", "", "", "", "")
            continue
        if "state" not in row:
            table.add_row(graph, "", attempt_text(job, row), "", "", "", age_text(row["age_s"]), "")
            continue
        table.add_row(
            graph, count_text(row["step"]), step_text(row),
            f"{row['copies']} of {job['replicas']}" if row["committed"] else "-",
            f"{row['shards']}/{row['world_size'] or '?'}", size_text(row["nbytes"]) if row["shards"] else "-",
            age_text(row["age_s"]), ", ".join(row["hosts"]) or "-",
        )  # fmt: skip
    return table


def timeline_rows(job: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return (what is drawn at the left, row of a step or an attempt), newest first; an attempt follows its steps.

    Attempts without a step are left out, but for the newest. Steps that are gone, and those that the same hosts are
    awaited for, have one row for each run of them.
    """
    drawn: list[tuple[str, dict[str, Any]]] = []
    attempts = {row["attempt"]: row for row in job["attempts"]}
    rows = [*_awaited_runs(job["steps"]), *job["gone"]]
    numbers = {*(row["attempt"] for row in rows), *list(attempts)[:1]}
    for number in sorted(numbers, reverse=True):
        steps = [row for row in rows if row["attempt"] == number]
        steps.sort(key=lambda row: row["last"] if "last" in row else row["step"], reverse=True)
        drawn += [("*" if step["in_lineage"] else "| o", step) for step in steps]
        if number in attempts:
            row = attempts[number]
            drawn.append(("*-" if row["in_lineage"] else "| o-", row))
    return drawn


def _awaited_runs(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with one for each run of steps of one attempt for which the same hosts are awaited."""
    rows = []
    for _, run in groupby(steps, lambda s: (s["attempt"], s["in_lineage"], s["waiting_for"] or s["step"])):
        same = list(run)
        span = {"attempt": same[0]["attempt"], "in_lineage": same[0]["in_lineage"], "state": "waiting"}
        span |= {"first": same[-1]["step"], "last": same[0]["step"], "count": len(same)}
        span |= {"pins": sorted(name for step in same for name in step["pins"]), "waiting_for": same[0]["waiting_for"]}
        rows.append(span if same[0]["waiting_for"] else same[0])
    return rows


def gone_text(span: dict[str, Any]) -> str:
    """Return a line for a run of steps that are gone: "steps 0 to 17 (attempt 1): gone, no copy in any tier"."""
    first, last, count = span["first"], span["last"], span["count"]
    if count == 1:
        steps = f"step {last:,}"
    elif count == last - first + 1:
        steps = f"steps {first:,} to {last:,}"
    else:
        steps = f"{count:,} steps from {first:,} to {last:,}"
    what = "gone, no copy in any tier"
    if span["state"] == "waiting":
        shown, more = span["waiting_for"][:AWAITED_SHOWN_MAX], len(span["waiting_for"]) - AWAITED_SHOWN_MAX
        what = f"no copy here, waiting for {', '.join(shown)}" + (f" and {more} more" if more > 0 else "")
    pins = f", pinned {', '.join(span['pins'])}" if span["pins"] else ""
    away = "" if span["in_lineage"] else ", not in the lineage"
    return f"{steps} (attempt {span['attempt']}): {what}{pins}{away}"


def attempt_text(job: dict[str, Any], row: dict[str, Any]) -> str:
    """Return where an attempt began: "attempt 3 from step 4 of attempt 1, abandoned 7, 6"."""
    if row["is_fork"]:
        words = f"attempt {row['attempt']} forked from {origin_text(job['origin'])}"
    elif row["parent"] is None:
        words = f"attempt {row['attempt']} from nothing" + (" (fresh)" if row["is_fresh"] else "")
    else:
        step = f"step {row['parent_step']:,} of " if row["parent_step"] is not None else ""
        words = f"attempt {row['attempt']} from {step}attempt {row['parent']}"
    if row["abandoned"]:
        words += f", abandoned {', '.join(f'{n:,}' for n in row['abandoned'][:5])}"
    return words


def step_text(step: dict[str, Any]) -> str:
    """Return a step's state in words: "committed, durable, pinned best", "degraded: why", "retired: why"."""
    why = step["retired"] if step["state"] == "retired" else step["degraded"]
    words = [f"{step['state']}: {why}" if step["state"] in ("retired", "degraded") else step["state"]]
    words += ["durable"] if step["durable"] and step["state"] != "durable" else []
    words += [f"pinned {', '.join(step['pins'])}"] if step["pins"] else []
    words += [f"forked to {', '.join(step['forks'])}"] if step["forks"] else []
    words += [] if step["in_lineage"] else ["not in the lineage"]
    return ", ".join(words)

"""`memstore ls`: the timeline of each job, newest first, its lineage drawn at the left (R22).

*   a step or an attempt that the newest one goes on from
| o one that a rewind or a fresh start left behind
-   where an attempt begins
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import click
from rich.table import Table

from memstore.cli.offline import offline_option, show_offline
from memstore.cli.options import Where, where_options
from memstore.cli.output import age_text, count_text, data_console, plain_table, plural, print_json, say, size_text
from memstore.core.wire.replies import job_fields
from memstore.core.wire.status_rows import AttemptRow, GoneRow, JobRow, OriginRow, StepRow

AWAITED_SHOWN_MAX = 5
KEYS = ("job", "attempt", "replicas", "keep_steps", "in_flight", "origin", "pins", "attempts", "steps", "gone")


@click.command(short_help="The timeline of a job: attempts, steps, pins.")
@click.argument("job", required=False)
@offline_option
@where_options
@click.pass_context
def ls(ctx: click.Context, where: Where, job: str | None, offline: bool, as_json: bool) -> None:
    """Draw the timeline of JOB, or of every job, newest first: steps, and where each attempt began.

    "*" is the lineage that get() and training go on from; "| o" are steps that a rewind or a fresh start left behind.
    """
    if offline:
        ctx.exit(show_offline(where.config, job, as_json))
    jobs = [row for row in where.status(job).jobs if job in (None, row.job)]
    if as_json:
        print_json({"jobs": [{key: fields.get(key) for key in KEYS} for fields in map(job_fields, jobs)]})
    elif not jobs:
        say("the store holds no job yet")
    console = data_console()
    for row in [] if as_json else jobs:
        console.print(job_line(row))
        console.print(_table(row))


def job_line(job: JobRow) -> str:
    """Return a job's first line: its newest attempt, its kept steps, the step of another job it began with."""
    parts = [job.job]
    if job.attempts:
        parts += [f"attempt {job.attempts[0].attempt}", plural(job.attempts[0].world_size, "rank")]
    if job.newest is not None:
        kept = f"parity {job.newest.parity}" if job.newest.parity else plural(job.newest.replicas, "copy")
        parts += [kept, f"keep_steps {job.newest.keep_steps}"]
        parts += [f"in_flight {job.newest.in_flight}"] if job.newest.in_flight > 1 else []
    if job.origin is not None:
        parts.append(f"began with {origin_text(job.origin)}")
    return " · ".join(parts)


def origin_text(origin: OriginRow) -> str:
    """Return "base@400"."""
    return f"{origin.job}@{origin.step}"


def _table(job: JobRow) -> Table:
    table = plain_table("", ">STEP", "STATE", "COPIES", ">RANKS", ">BYTES", ">AGE", "HOSTS")
    for graph, row in timeline_rows(job):
        if isinstance(row, GoneRow | AwaitedRun):
            table.add_row(graph, "", run_text(row), "", "", "", "", "")
        elif isinstance(row, AttemptRow):
            table.add_row(graph, "", attempt_text(row), "", "", "", age_text(row.age_s), "")
        else:
            replicas = job.newest.replicas if job.newest is not None else None
            is_away = row.state == "durable"  # in no host's RAM: all its ranks' shards are in storage
            shards = row.world_size if is_away else row.shards
            table.add_row(
                graph,
                count_text(row.step),
                step_text(row),
                "storage" if is_away else f"{row.copies} of {replicas}" if row.committed else "-",
                f"{shards}/{row.world_size or '?'}",
                size_text(row.nbytes) if shards else "-",
                age_text(row.age_s),
                ", ".join(row.hosts) or "-",
            )
    return table


@dataclass(frozen=True, slots=True)
class AwaitedRun:
    """A run of steps of one attempt for which the same hosts are awaited."""

    attempt: int
    first: int
    last: int
    count: int
    in_lineage: bool
    pins: list[str]
    waiting_for: list[str]


Drawn = StepRow | GoneRow | AwaitedRun | AttemptRow


def timeline_rows(job: JobRow) -> list[tuple[str, Drawn]]:
    """Return (what is drawn at the left, row of a step or an attempt), newest first; an attempt follows its steps.

    Attempts without a step are left out, but for the newest. Steps that are gone, and those that the same hosts are
    awaited for, have one row for each run of them.
    """
    drawn: list[tuple[str, Drawn]] = []
    attempts = {row.attempt: row for row in job.attempts}
    rows = [*_awaited_runs(job.steps), *job.gone]
    numbers = {*(row.attempt for row in rows), *list(attempts)[:1]}
    for number in sorted(numbers, reverse=True):
        steps = [row for row in rows if row.attempt == number]
        steps.sort(key=lambda row: row.step if isinstance(row, StepRow) else row.last, reverse=True)
        drawn += [("*" if step.in_lineage else "| o", step) for step in steps]
        if number in attempts:
            drawn.append(("*-" if attempts[number].in_lineage else "| o-", attempts[number]))
    return drawn


def _awaited_runs(steps: list[StepRow]) -> list[StepRow | GoneRow | AwaitedRun]:
    """Return the rows with one for each run of steps of one attempt for which the same hosts are awaited."""
    rows: list[StepRow | GoneRow | AwaitedRun] = []
    for _, run in groupby(steps, lambda row: (row.attempt, row.in_lineage, row.waiting_for or row.step)):
        newest, *_ = same = list(run)
        if not newest.waiting_for:
            rows.append(newest)
            continue
        pins = sorted(name for row in same for name in row.pins)
        span = (newest.attempt, same[-1].step, newest.step, len(same))
        rows.append(AwaitedRun(*span, newest.in_lineage, pins, newest.waiting_for))
    return rows


def run_text(span: GoneRow | AwaitedRun) -> str:
    """Return a line for a run of steps: "steps 0 to 17 (attempt 1): gone, no copy in any tier"."""
    first, last, count = span.first, span.last, span.count
    if count == 1:
        steps = f"step {last:,}"
    elif count == last - first + 1:
        steps = f"steps {first:,} to {last:,}"
    else:
        steps = f"{count:,} steps from {first:,} to {last:,}"
    what = "gone, no copy in any tier"
    if isinstance(span, AwaitedRun):
        shown, more = span.waiting_for[:AWAITED_SHOWN_MAX], len(span.waiting_for) - AWAITED_SHOWN_MAX
        what = f"no copy here, waiting for {', '.join(shown)}" + (f" and {more} more" if more > 0 else "")
    pins = f", pinned {', '.join(span.pins)}" if span.pins else ""
    away = "" if span.in_lineage else ", not in the lineage"
    return f"{steps} (attempt {span.attempt}): {what}{pins}{away}"


def attempt_text(row: AttemptRow) -> str:
    """Return where an attempt began: "attempt 3 from step 4 of attempt 1, abandoned 7, 6"."""
    if row.origin is not None:
        words = f"attempt {row.attempt} from {origin_text(row.origin)}"
    elif row.parent is None:
        words = f"attempt {row.attempt} from nothing" + (" (fresh)" if row.is_fresh else "")
    else:
        step = f"step {row.parent_step:,} of " if row.parent_step is not None else ""
        words = f"attempt {row.attempt} from {step}attempt {row.parent}"
    if row.abandoned:
        words += f", abandoned {', '.join(f'{n:,}' for n in row.abandoned[:5])}"
    return words


def step_text(step: StepRow) -> str:
    """Return a step's state in words: "committed, durable, pinned best", "degraded: why", "retired: why"."""
    why = step.retired if step.state == "retired" else step.degraded
    words = [f"{step.state}: {why}" if step.state in ("retired", "degraded") else step.state]
    words += ["durable"] if step.durable and step.state != "durable" else []
    words += [f"pinned {', '.join(step.pins)}"] if step.pins else []
    words += [] if step.in_lineage else ["not in the lineage"]
    return ", ".join(words)


VERBS = (ls,)

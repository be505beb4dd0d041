"""`memstore events`: what happened, one line each, as a person on call wants to read it."""

from __future__ import annotations

import time

import click

from memstore.cli.options import Where, where_options
from memstore.cli.output import data_stream, plural, print_json, say
from memstore.config import WHOLE_LIMIT
from memstore.core.report.event_kinds import LEVELS, event_fields, event_text, level_of
from memstore.core.wire.calls import AskEvents
from memstore.core.wire.replies import Events
from memstore.core.wire.status_rows import EventRow
from memstore.errors import MemstoreError

POLL_S = 0.5


@click.command(short_help="What happened: restores, deaths, repairs, and why; with --level routine every put.")
@click.argument("job", required=False)
@click.option("--follow", is_flag=True, help="Go on with what happens next, until Ctrl-C.")
@click.option("--since", default="0", metavar="WHEN", help='A number: only what came after it. "10m", "2h": no older.')
@click.option("--tail", "-n", type=click.IntRange(min=0), metavar="N", help="Only the newest N.  [default: all]")
@click.option(
    "--level",
    type=click.Choice(LEVELS),
    default="notable",
    show_default=True,
    help="routine: puts, commits and durable writes as well. problem: only what needs attention.",
)
@where_options
def events(
    where: Where, job: str | None, follow: bool, since: str, tail: int | None, level: str, as_json: bool
) -> None:
    """Print what happened to JOB, or to all jobs, oldest first; --json prints one document a line.

    The controller remembers the newest 2,048 puts, commits and durable writes, and as many of everything else, since it
    started. MEMSTORE_EVENTS=FILE in its environment makes it write all of them to a file. Events of a job that was
    removed can be read by its name.
    """
    number, age_s = since_when(since)
    is_first, words = True, ""
    while True:
        try:
            rows, caveat, number = _read(where, job, number, age_s)
        except MemstoreError as error:
            if not follow:
                raise
            words = _say_once(words, f"memstore: {error}")
            time.sleep(POLL_S)
            continue
        if is_first and job is not None and all(row.job != job for row in rows):
            where.status(job)
        words = _say_once(words, caveat)
        shown = [row for row in rows if LEVELS.index(level_of(row.event)) >= LEVELS.index(level)]
        for row in shown[max(0, len(shown) - tail) :] if is_first and tail is not None else shown:
            print_json(event_fields(row)) if as_json else click.echo(line(row), file=data_stream())
        if not follow:
            return
        is_first, age_s = False, None
        time.sleep(POLL_S)


def _read(where: Where, job: str | None, since: int, age_s: float | None) -> tuple[list[EventRow], str, int]:
    """Return the events after a number, no older than an age, a note of missing ones, and the number to resume at."""
    rows: list[EventRow] = []
    while True:
        page = where.ask(AskEvents(job=job, since=since))
        rows += [row for row in page.events if age_s is None or row.wall_s >= page.wall_s - age_s]
        since = page.next
        if not page.has_more:
            return rows, _caveat(page), since


def since_when(text: str) -> tuple[int, float | None]:
    """Read --since: "1000000042" is a number, "10m" an age in seconds; ages have the units s, m, h and d."""
    if text.isascii() and text.isdigit() and int(text) < WHOLE_LIMIT:
        return int(text), None
    count, unit = text[:-1], text[-1:]
    if unit not in _UNITS or not (count.isascii() and count.isdigit()):
        raise click.UsageError(f"--since {text!r} is neither an event's number nor an age such as 30s, 10m, 2h, 1d")
    return 0, int(count) * _UNITS[unit]


_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def _say_once(before: str, words: str) -> str:
    if words and words != before:
        say(words)
    return words


def _caveat(page: Events) -> str:
    """Return a note of the events not shown and why, or ""."""
    gap = "memstore: some events after --since are not remembered any more" if page.is_gap else ""
    lost = page.unwritten
    dropped = f"memstore: {plural(lost, 'event')} could not be written to the log or counted" if lost else ""
    return "; ".join(filter(None, (gap, dropped)))


def line(row: EventRow) -> str:
    """Return "11-22 12:03:09.120  llama3-8b  step 41 committed ..."."""
    clock = time.strftime("%m-%d %H:%M:%S", time.localtime(row.wall_s)) + f".{int(row.wall_s % 1 * 1000):03d}"
    return f"{clock}  {row.job or row.host or 'store':<12} {event_text(row)}"


VERBS = (events,)

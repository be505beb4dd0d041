"""`memstore events`: what happened, one line each, as a person on call wants to read it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import click
from msgspec import convert

from memstore.cli.options import Where, address_option, store_options
from memstore.cli.output import age_text, data_stream, plural, print_json, say, size_text
from memstore.config import WHOLE_LIMIT, Config
from memstore.core.cluster.text import lost_text, phases_text, replaced_text
from memstore.core.report.event_ring import PROBLEMS, ROUTINE
from memstore.core.report.json_rows import event_fields
from memstore.core.report.problems import drain_text
from memstore.core.wire.calls import AskEvents
from memstore.core.wire.replies import Events
from memstore.core.wire.status_rows import DurableStep, EventRow, ReplacedRow, ShortStep
from memstore.errors import MemstoreError

POLL_S = 0.5
Event = dict[str, Any]
"""The fields of an event as `--json` prints them: each kind has its own, and only its line reads them."""

LEVELS = ("routine", "notable", "problem")


@click.command(short_help="What happened: restores, deaths, repairs, and why; with --level routine every put.")
@click.argument("job", required=False)
@click.option("--follow", is_flag=True, help="Go on with what happens next, until Ctrl-C.")
@click.option("--since", default="0", metavar="WHEN", help='A number: only what came after it. "10m", "2h": no older.')
@click.option("--tail", "-n", type=click.IntRange(min=0), metavar="N", help="Only the newest N.  [default: all]")
@click.option(
    "--level", type=click.Choice(LEVELS), default="notable", show_default=True,
    help="routine: puts, commits and durable writes as well. problem: only what needs attention.",
)  # fmt: skip
@address_option
@store_options
def events(
    config: Config, address: str | None, job: str | None, follow: bool, since: str, tail: int | None, level: str,
    as_json: bool,
) -> None:  # fmt: skip
    """Print what happened to JOB, or to all jobs, oldest first; --json prints one document a line.

    The controller remembers the newest 2,048 puts, commits and durable writes, and as many of everything else, since it
    started. MEMSTORE_EVENTS=FILE in its environment makes it write all of them to a file. Events of a job that was
    removed can be read by its name.
    """
    where = Where(config, address)
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
        shown = [row for row in rows if is_shown(row, level)]
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


def is_shown(row: EventRow, level: str) -> bool:
    """Return whether an event is of the level asked for or above it."""
    return {"routine": True, "notable": row.event not in ROUTINE, "problem": row.event in PROBLEMS}[level]


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


# -- one line -----------------------------------------------------------------------------------


def line(row: EventRow) -> str:
    """Return "11-22 12:03:09.120  llama3-8b  step 41 committed ..."; an unknown kind shows its fields."""
    clock = time.strftime("%m-%d %H:%M:%S", time.localtime(row.wall_s)) + f".{int(row.wall_s % 1 * 1000):03d}"
    about = row.job or row.host or "store"
    text = LINES.get(row.event, _unknown)(event_fields(row))
    return f"{clock}  {about:<12} {text}"


def _unknown(e: Event) -> str:
    rest = {k: v for k, v in e.items() if k not in ("seq", "event", "wall_s", "job")}
    return f"{e['event']} {rest}"


def _took(e: Event, phase: str) -> str:
    """Return " in 0.21 s", or "" if it was not measured."""
    value = e["seconds"].get(phase)
    return "" if value is None else f" in {fine(value)}"


def fine(value_s: float) -> str:
    """Return seconds as a person compares them: "0.0123 s", "0.21 s", "12 s", "3 min"."""
    return f"{value_s:.4f} s" if value_s < 0.1 else f"{value_s:.2f} s" if value_s < 10 else age_text(value_s)


def _put(e: Event) -> str:
    slowest = f", at most {fine(e['stall_s']['max'])} (rank {e['rank']} on {e['host']})" if e["ranks"] > 1 else ""
    return (
        f"step {e['step']} put by {plural(e['ranks'], 'rank')}: {size_text(e['nbytes'])}, blocked "
        f"{fine(e['stall_s']['median'])}{slowest}; sealed{_took(e, 'sealed')}"
    )


def _commit(e: Event) -> str:
    degraded = f"; DEGRADED: {e['degraded']}" if e["degraded"] else ""
    return f"step {e['step']} committed{_took(e, 'committed')}: {plural(e['copies'], 'copy')}{degraded}"


def _skip(e: Event) -> str:
    who = f" by rank {e['rank']} on {e['host']}" if "rank" in e else ""
    until = f"; all put again from step {e['resume']}" if e["resume"] else ""
    return f"step {e['step']} SKIPPED{who}: {e['why']}{until}"


def _restore(e: Event) -> str:
    if e["verdict"] == "none":
        return f"attempt {e['attempt']} restored nothing: {e['why']}"
    tiers = ", ".join(f"{size_text(nbytes)} {tier}" for tier, nbytes in e["bytes"].items() if nbytes)
    spent = ", ".join(f"{phase} {fine(value)}" for phase, value in e["seconds"].items())
    lost = lost_text(e["steps_lost"]) if e["adopted"] else "only read"
    of = f" of {e['of_job']}" if e["of_job"] != e["job"] else ""
    unused = f"; not used: {'; '.join(e['not_used'])}" if e["not_used"] else ""
    return f"step {e['step']}{of} RESTORED by attempt {e['attempt']}: {e['verdict']}, {tiers}; {spent}; {lost}{unused}"


def _attempt(e: Event) -> str:
    after = f", continues attempt {e['parent']}" if e["parent"] is not None else ""
    fresh = ", fresh" if e["fresh"] else ""
    return f"attempt {e['attempt']} opened: {plural(e['ranks'], 'rank')} on {', '.join(e['hosts'])}{after}{fresh}"


def _replaced(e: Event) -> str:
    return f"generation {e['generation']}: {replaced_text(convert(e['replaced'], list[ReplacedRow]))}"


def _recovered(e: Event) -> str:
    spent = f"back after {sum(e['seconds'].values()):.2f} s: {phases_text(e['seconds'])}"
    return f"generation {e['generation']}: {spent}; the last was rank {e['rank']} on {e['host']}"


def _repaired(e: Event) -> str:
    left = f"; {plural(e['missing'], 'copy')} still missing" if e["missing"] else ""
    return f"repair ended: {plural(e['shards'], 'copy')}, {size_text(e['nbytes'])}{_took(e, 'repair')}{left}"


def _degraded(e: Event) -> str:
    short = f"{plural(e['shards'], 'shard')} below replicas, {plural(e['missing'], 'copy')} missing: "
    return f"step {e['step']} DEGRADED: {short if e['missing'] else ''}{e['why']}"


def _host(word: str) -> Callable[[Event], str]:
    def text(e: Event) -> str:
        held = (
            f"; it held {plural(e['shards'], 'shard')} of the newest commits" if e["shards"] and word == "DEAD" else ""
        )
        return f"{word}: {e['why']}{held}"

    return text


def _rank_gone(what: str) -> Callable[[Event], str]:
    def text(e: Event) -> str:
        put = f"; it had put step {e['step']}" if e["step"] >= 0 else "; it had put nothing"
        why = f" by {e['why']}" if "why" in e else ""
        return f"rank {e['rank']} of attempt {e['attempt']} on {e['host']} {what}{why} (pid {e['pid']}){put}"

    return text


def _unchanged(e: Event) -> str:
    who = f"rank {e['rank']}" if e["count"] == 1 else f"{plural(e['count'], 'rank')} (first {e['rank']})"
    return f"step {e['step']} UNCHANGED: {who} put the bytes of step {e['before']} again: {e['why']}"


def _replicas_differ(e: Event) -> str:
    where = ", ".join(e["names"]) or plural(e["chunks"], "chunk")
    return f"step {e['step']}: ranks {e['ranks'][0]} and {e['ranks'][1]} of shard {e['shard']} DIFFER in {where}"


LINES: dict[str, Callable[[Event], str]] = {
    "put": _put,
    "commit": _commit,
    "redundant": lambda e: f"step {e['step']} has all {e['copies']} copies now{_took(e, 'redundant')}",
    "superseded": lambda e: f"step {e['step']} superseded: {e['why']}",
    "skip": _skip,
    "unchanged": _unchanged,
    "replicas_differ": _replicas_differ,
    "replicas_agree": lambda e: f"ranks {e['ranks'][0]} and {e['ranks'][1]} put equal bytes again at step {e['step']}",
    "degraded": _degraded,
    "whole": lambda e: f"every shard has its copies again, after {fine(e['seconds']['degraded'])}",
    "restore": _restore,
    "restore_failed": lambda e: f"restore of attempt {e['attempt']} FAILED ({e['phase']}): {e['error']}: {e['why']}",
    "attempt": _attempt,
    "replaced": _replaced,
    "recovered": _recovered,
    "members": lambda e: f"attempt {e['attempt']}: some of its ranks were replaced, it is on {', '.join(e['hosts'])}",
    "branched": lambda e: (
        f"attempt {e['attempt']} begins with step {e['step']} of {e['from_job']} (attempt {e['from_attempt']})"
    ),
    "pinned": lambda e: f"step {e['step']} pinned as {e['name']}",
    "unpinned": lambda e: f"pin {e['name']} taken back",
    "closed": lambda e: f"attempt {e['attempt']} closed by all its ranks",
    "ended": lambda e: f"attempt {e['attempt']} ENDED by {e['why']}",
    "removed": lambda e: "removed with all its copies in RAM",
    "dropped": lambda e: f"DROPPED: {e['why']}",
    "retired": lambda e: f"step {e['step']} (attempt {e['attempt']}) RETIRED: {e['why']}",
    "lifted": lambda e: f"step {e['step']} (attempt {e['attempt']}) may be restored again: verify was asked for it",
    "rank_dead": _rank_gone("is DEAD"),
    "rank_ended": _rank_gone("was ENDED"),
    "rank_left": _rank_gone("left because another rank is lost"),
    "host_joined": lambda e: "joined",
    "host_live": _host("live"),
    "host_suspect": _host("suspect"),
    "host_dead": _host("DEAD"),
    "drain": lambda e: f"is to go in {e['due_s']:.0f} s: its copies are made elsewhere",
    "drained": lambda e: (
        ("must NOT go yet: " if e["short"] else "can go: ")
        + drain_text(convert(e["short"], list[ShortStep]), convert(e["durable"], list[DurableStep]))
    ),
    "drain_over": lambda e: "is not to go any more, or has gone",
    "repair": lambda e: f"repair began: {plural(e['missing'], 'copy')} missing",
    "repaired": _repaired,
    "durable": lambda e: f"step {e['step']} durable{_took(e, 'write')}",
    "durable_failed": lambda e: f"durable write of step {e['step']} FAILED: {e['why']}",
    "not_expired": lambda e: f"closed and over, and its RAM is kept: {e['why']}",
    "durable_abandoned": lambda e: f"durable write of step {e['step']} abandoned: {e['why']}",
    "scrub": lambda e: (
        f"scrub found {plural(e['found'], 'damaged piece')}, chunks or manifests, to be replaced from a copy"
    ),
    "files_lost": lambda e: f"files of its arena's folder were REMOVED while its holder ran: {e['what']}",
    "term": lambda e: f"controller of term {e['term']} serves: hosts {', '.join(e['hosts'])}{_took(e, 'settling')}",
}

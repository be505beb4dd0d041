"""Every kind of store event: how much it matters, and its line of text. Pure.

A place that decides notes `Effects.note(kind, ...)`; what a person reads follows from this table, in `memstore events`
and in the controller's log. A new kind is one row here, and one call where it happens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from msgspec import convert

from memstore.core.cluster.text import fine_text, lost_text, phases_text, plural, replaced_text, size_text
from memstore.core.report.problems import drain_text
from memstore.core.wire.codec import fields_of
from memstore.core.wire.status_rows import DurableStep, EventRow, ReplacedRow, ShortStep

ROUTINE: Final = "routine"  # one or two for every step; one for every rank
NOTABLE: Final = "notable"
PROBLEM: Final = "problem"
LEVELS = (ROUTINE, NOTABLE, PROBLEM)
Event = dict[str, Any]
"""The fields of an event as `--json` prints them: each kind has its own, and only its line reads them."""


class EventKind(NamedTuple):
    """One kind of event; `is_logged`: its line is a warning in the controller's log as well."""

    level: str
    text: Callable[[Event], str]
    is_logged: bool = False


def event_fields(row: EventRow) -> Event:
    """Return plain values of an event; what its kind lacks is left out."""
    fields = fields_of(row)
    own = fields.pop("fields")
    return {**{name: value for name, value in fields.items() if value not in (None, "")}, **own}


def event_text(row: EventRow) -> str:
    """Return "step 41 committed ..."; an unknown kind shows its fields."""
    fields = event_fields(row)
    if row.event in KINDS:
        return KINDS[row.event].text(fields)
    return f"{row.event} { ({k: v for k, v in fields.items() if k not in ('seq', 'event', 'wall_s', 'job')}) }"


def level_of(kind: str) -> str:
    """Return the level of a kind, also of one that a newer controller has."""
    return KINDS[kind].level if kind in KINDS else NOTABLE


def _took(e: Event, phase: str) -> str:
    """Return " in 0.21 s", or "" if it was not measured."""
    value = e["seconds"].get(phase)
    return "" if value is None else f" in {fine_text(value)}"


def _put(e: Event) -> str:
    stall_s, slowest = e["stall_s"], f"(rank {e['rank']} on {e['host']})"
    most = f", at most {fine_text(stall_s['max'])} {slowest}" if e["ranks"] > 1 else ""
    who = f"step {e['step']} put by {plural(e['ranks'], 'rank')}: {size_text(e['nbytes'])}"
    return f"{who}, blocked {fine_text(stall_s['median'])}{most}; sealed{_took(e, 'sealed')}"


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
    spent = ", ".join(f"{phase} {fine_text(value)}" for phase, value in e["seconds"].items())
    lost = lost_text(e["steps_lost"]) if e["adopted"] else "only read"
    of = f" of {e['of_job']}" if e["of_job"] != e["job"] else ""
    unused = f"; not used: {'; '.join(e['not_used'])}" if e["not_used"] else ""
    return f"step {e['step']}{of} RESTORED by attempt {e['attempt']}: {e['verdict']}, {tiers}; {spent}; {lost}{unused}"


def _attempt(e: Event) -> str:
    after = f", continues attempt {e['parent']}" if e["parent"] is not None else ""
    fresh = ", fresh" if e["fresh"] else ""
    where = f"{plural(e['ranks'], 'rank')} on {', '.join(e['hosts'])}"
    return f"attempt {e['attempt']} opened: {where}{after}{fresh}{_taken(e)}"


def _taken(e: Event) -> str:
    """Return from which processes the job was taken, as far as they were alive: "; TAKEN from rank 0 on h1 (pid 7)"."""
    more = f" and {plural(e['taken']['others'], 'other')}" if e["taken"] and e["taken"]["others"] else ""
    return "; TAKEN from rank {rank} on {host} (pid {pid})".format(**e["taken"]) + more if e["taken"] else ""


def _recovered(e: Event) -> str:
    spent = f"back after {sum(e['seconds'].values()):.2f} s: {phases_text(e['seconds'])}"
    return f"generation {e['generation']}: {spent}; the last was rank {e['rank']} on {e['host']}"


def _repaired(e: Event) -> str:
    left = f"; {plural(e['missing'], 'copy')} still missing" if e["missing"] else ""
    return f"repair ended: {plural(e['shards'], 'copy')}, {size_text(e['nbytes'])}{_took(e, 'repair')}{left}"


def _degraded(e: Event) -> str:
    short = f"{plural(e['shards'], 'shard')} below replicas, {plural(e['missing'], 'copy')} missing: "
    return f"step {e['step']} DEGRADED: {short if e['missing'] else ''}{e['why']}"


def _host_dead(e: Event) -> str:
    held = f"; it held {plural(e['shards'], 'shard')} of the newest commits" if e["shards"] else ""
    return f"DEAD: {e['why']}{held}"


def _rank_gone(e: Event, what: str) -> str:
    put = f"; step {e['step']} of it was sealed by then" if e["step"] >= 0 else "; no step of it was sealed by then"
    return f"rank {e['rank']} of attempt {e['attempt']} on {e['host']} {what} (pid {e['pid']}){put}"


def _unchanged(e: Event) -> str:
    who = f"rank {e['rank']}" if e["count"] == 1 else f"{plural(e['count'], 'rank')} (first {e['rank']})"
    return f"step {e['step']} UNCHANGED: {who} put the bytes of step {e['before']} again: {e['why']}"


def _replicas_differ(e: Event) -> str:
    where = ", ".join(e["names"]) or plural(e["chunks"], "chunk")
    return f"step {e['step']}: ranks {e['ranks'][0]} and {e['ranks'][1]} of shard {e['shard']} DIFFER in {where}"


def _not_expired(e: Event) -> str:
    return f"closed and over, and its RAM is kept: step {e['step']}: {e['why']}"


def _drained(e: Event) -> str:
    left = drain_text(convert(e["short"], list[ShortStep]), convert(e["durable"], list[DurableStep]))
    return ("must NOT go yet: " if e["short"] else "can go: ") + left


def _outage(e: Event) -> str:
    what = "a rewind, or get(trusted=True)" if e["is_chosen"] else e["why"] or "a new launch; no loss was seen"
    spent = ", ".join(f"{phase.replace('_', ' ')} {fine_text(took_s)}" for phase, took_s in e["seconds"].items())
    steps = f"at least {plural(e['steps_lost'], 'step')} ({fine_text(e['lost_s'])}) trained"
    lost = f"{steps} and {'taken back' if e['is_chosen'] else 'lost'}" if e["steps_lost"] else lost_text(0)
    down = f"down for {fine_text(sum(e['seconds'].values()))} by {what}: {spent}"
    return f"trains again at step {e['step']}, {down}; {lost}; goodput {100 * e['goodput']:.1f} %"


def _precaution(e: Event) -> str:
    put = f"step {e['step']} is asked for ahead of its turn" if "step" in e else f"no early put: {e['why_not']}"
    write = "a committed step is written to durable storage" if e["durable"] else "no durable storage is configured"
    return f"sign of a coming failure on {e['host']}: {e['why']}; {put}; {write}"


def _early_put(e: Event) -> str:
    what = f"is NOT put ahead of its turn: {e['why_not']}" if e["why_not"] else "is put by all ranks ahead of its turn"
    return f"step {e['step']} {what} ({e['why']})"


KINDS: Mapping[str, EventKind] = {
    "put": EventKind(ROUTINE, _put),
    "commit": EventKind(ROUTINE, _commit),
    "redundant": EventKind(
        NOTABLE, lambda e: f"step {e['step']} has all {e['copies']} copies now{_took(e, 'redundant')}"
    ),
    "superseded": EventKind(NOTABLE, lambda e: f"step {e['step']} superseded: {e['why']}"),
    "skip": EventKind(PROBLEM, _skip),
    "unchanged": EventKind(PROBLEM, _unchanged, is_logged=True),
    "nonfinite": EventKind(
        PROBLEM, lambda e: f"step {e['step']}: rank {e['rank']} has NaN or infinity in {', '.join(e['names'])}"
    ),
    "finite": EventKind(NOTABLE, lambda e: f"step {e['step']}: all numbers of rank {e['rank']} are finite again"),
    "replicas_differ": EventKind(PROBLEM, _replicas_differ, is_logged=True),
    "replicas_agree": EventKind(
        NOTABLE, lambda e: f"ranks {e['ranks'][0]} and {e['ranks'][1]} put equal bytes again at step {e['step']}"
    ),
    "degraded": EventKind(PROBLEM, _degraded),
    "whole": EventKind(
        NOTABLE, lambda e: f"every shard has its copies again, after {fine_text(e['seconds']['degraded'])}"
    ),
    "restore": EventKind(NOTABLE, _restore),
    "restore_failed": EventKind(
        PROBLEM, lambda e: f"restore of attempt {e['attempt']} FAILED ({e['phase']}): {e['error']}: {e['why']}"
    ),
    "attempt": EventKind(NOTABLE, _attempt),
    "replaced": EventKind(
        NOTABLE, lambda e: f"generation {e['generation']}: {replaced_text(convert(e['replaced'], list[ReplacedRow]))}"
    ),
    "recovered": EventKind(NOTABLE, _recovered),
    "members": EventKind(
        NOTABLE, lambda e: f"attempt {e['attempt']}: some of its ranks were replaced, it is on {', '.join(e['hosts'])}"
    ),
    "branched": EventKind(
        NOTABLE,
        lambda e: (
            f"attempt {e['attempt']} begins with step {e['step']} of {e['from_job']} (attempt {e['from_attempt']})"
        ),
    ),
    "pinned": EventKind(NOTABLE, lambda e: f"step {e['step']} pinned as {e['name']}"),
    "unpinned": EventKind(NOTABLE, lambda e: f"pin {e['name']} taken back"),
    "precaution": EventKind(NOTABLE, _precaution, is_logged=True),
    "early_put": EventKind(NOTABLE, _early_put),
    "outage": EventKind(NOTABLE, _outage),
    "closed": EventKind(NOTABLE, lambda e: f"attempt {e['attempt']} closed by all its ranks"),
    "ended": EventKind(PROBLEM, lambda e: f"attempt {e['attempt']} ENDED by {e['why']}"),
    "removed": EventKind(NOTABLE, lambda e: f"removed with all its copies in RAM{_taken(e)}"),
    "leases_ended": EventKind(
        NOTABLE, lambda e: f"leases of {plural(e['readers'], 'reader')} ENDED: puts of {e['of_job']} need their room"
    ),
    "dropped": EventKind(PROBLEM, lambda e: f"DROPPED: {e['why']}"),
    "retired": EventKind(PROBLEM, lambda e: f"step {e['step']} (attempt {e['attempt']}) RETIRED: {e['why']}"),
    "lifted": EventKind(
        NOTABLE, lambda e: f"step {e['step']} (attempt {e['attempt']}) may be restored again: verify was asked for it"
    ),
    "rank_dead": EventKind(PROBLEM, lambda e: _rank_gone(e, "is DEAD")),
    "rank_ended": EventKind(PROBLEM, lambda e: _rank_gone(e, f"was ENDED by {e['why']}")),
    "rank_left": EventKind(ROUTINE, lambda e: _rank_gone(e, "left because another rank is lost")),
    "host_joined": EventKind(NOTABLE, lambda e: "joined"),
    "host_live": EventKind(NOTABLE, lambda e: f"live: {e['why']}"),
    "host_suspect": EventKind(PROBLEM, lambda e: f"suspect: {e['why']}"),
    "host_dead": EventKind(PROBLEM, _host_dead),
    "drain": EventKind(NOTABLE, lambda e: f"is to go in {e['due_s']:.0f} s: its copies are made elsewhere"),
    "drained": EventKind(NOTABLE, _drained),
    "drain_over": EventKind(NOTABLE, lambda e: "is not to go any more, or has gone"),
    "repair": EventKind(NOTABLE, lambda e: f"repair began: {plural(e['missing'], 'copy')} missing"),
    "repaired": EventKind(NOTABLE, _repaired),
    "durable": EventKind(ROUTINE, lambda e: f"step {e['step']} durable{_took(e, 'write')}"),
    "durable_failed": EventKind(PROBLEM, lambda e: f"durable write of step {e['step']} FAILED: {e['why']}"),
    "durable_abandoned": EventKind(PROBLEM, lambda e: f"durable write of step {e['step']} abandoned: {e['why']}"),
    "not_expired": EventKind(PROBLEM, _not_expired, is_logged=True),
    "scrub": EventKind(
        PROBLEM,
        lambda e: f"scrub found {plural(e['found'], 'damaged piece')}, chunks or manifests, to be replaced from a copy",
    ),
    "files_lost": EventKind(
        PROBLEM, lambda e: f"files of its arena's folder were REMOVED while its holder ran: {e['what']}"
    ),
    "drill": EventKind(NOTABLE, lambda e: f"drill, {e['phase']}: {e['text']}"),
    "term": EventKind(
        NOTABLE, lambda e: f"controller of term {e['term']} serves: hosts {', '.join(e['hosts'])}{_took(e, 'settling')}"
    ),
}

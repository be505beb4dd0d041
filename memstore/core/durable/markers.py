"""Markers: what makes a durable step count, and which of them a host listed of a job (R31). Pure.

A marker is three lines of text that carry their own digest.

    memstore-marker 4
    {"job": ..., "attempt": ..., "step": ..., "world_size": ..., "key": ..., "lineage": {...}, "parts": [[digest, ...]],
     "uses": {rank: ["tag,tag,...", [[attempt, step, digest, "tag,-,..."] of every older step that a slice reads]]},
     "trusted": true}
    <hex xxh3-128 of the two lines above>

Text, because a person who finds the folder years later reads it with `cat`. The digest finds faults, not forgers (R14),
so every field is checked as well. The planner reads the result as `recovery.inventory.DurableMarker`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec
import xxhash
from msgspec import Meta

from memstore.core.cluster import text
from memstore.core.cluster.effects import Effects
from memstore.core.cluster.job import Job
from memstore.core.cluster.state import ClusterState
from memstore.core.durable.slice_format import slices_count
from memstore.core.durable.states import DurableStates
from memstore.core.format.releases import reader_of
from memstore.core.wire.ids import Positive, Unsigned, WireSpec, WireStep, WireUse, WireUses
from memstore.core.wire.orders import DurablePlace, Lineage, ListMarkers
from memstore.core.wire.reports import MarkerRow, MarkersListed
from memstore.errors import ConfigError, IntegrityError
from recovery.inventory import DurableMarker, SliceUse, StepId
from recovery.lineage import AttemptFact

MARKER_LIMIT_BYTES = 32 << 20  # about 80 bytes a rank: four hundred thousand ranks
VERSION = 4
_FIRST_LINE = b"memstore-marker %d\n" % VERSION
_ANY_FIRST_LINE = re.compile(rb"memstore-marker ([0-9]{1,9})\n")
_DIGEST_NBYTES = 33  # 32 hex digits and the newline


class _Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The second line."""

    job: str
    attempt: Unsigned
    step: Unsigned
    world_size: Positive
    key: Annotated[str, Meta(pattern=r"^(?:[0-9a-f]{16})?\Z")]
    lineage: Lineage
    parts: tuple[WireSpec, ...]
    uses: WireUses = {}
    trusted: bool = False


_BODY = msgspec.json.Decoder(_Body)


@dataclass(frozen=True, slots=True)
class MarkerRecord:
    """A decoded marker: the step's parts, and where its attempt came from (R22)."""

    job: str
    marker: DurableMarker
    lineage: Lineage

    @property
    def row(self) -> MarkerRow:
        """Return the marker as a holder reports it."""
        specs = {rank: WireSpec.of(spec) for rank, spec in sorted(self.marker.specs.items())}
        step, uses = WireStep.of(self.marker.step), wire_uses(self.marker)
        return MarkerRow(step, specs, uses, self.marker.key, self.lineage, self.marker.is_trusted)


def wire_uses(marker: DurableMarker) -> WireUses:
    """Return how the slices of a step lie there, as it travels."""
    return {rank: WireUse.of(uses) for rank, uses in sorted(marker.uses.items())}


def slice_uses(uses: WireUses) -> dict[int, tuple[SliceUse, ...]]:
    """Return how the slices of a step lie there."""
    return {rank: row.uses for rank, row in uses.items()}


def encode_marker(job: str, marker: DurableMarker, lineage: Lineage) -> bytes:
    """Return the marker file's bytes.

    Raises:
        ConfigError: a part is missing or contradicts its own sizes, the lineage is of another attempt, or the record
            exceeds MARKER_LIMIT_BYTES.
    """
    step, parts = marker.step, tuple(WireSpec.of(spec) for _, spec in sorted(marker.specs.items()))
    if sorted(marker.specs) != list(range(marker.world_size)):
        raise ConfigError(
            f"marker of {job} attempt {step.attempt} step {step.step} lists "
            f"{len(marker.specs)} parts that are not the ranks 0 to {marker.world_size - 1}"
        )
    uses = wire_uses(marker)
    head = (job, step.attempt, step.step, marker.world_size, marker.key, lineage)
    text = msgspec.json.encode(_Body(*head, parts, uses, marker.is_trusted))
    try:
        _record(text)
    except (ValueError, msgspec.MsgspecError) as exc:
        raise ConfigError(f"marker of {job} {step} cannot be written: {exc!r}") from exc
    record = _FIRST_LINE + text + b"\n"
    if len(record) + _DIGEST_NBYTES > MARKER_LIMIT_BYTES:
        raise ConfigError(f"marker of {job} {step}: {len(record)} bytes, the limit is {MARKER_LIMIT_BYTES}")
    return record + xxhash.xxh3_128_hexdigest(record).encode() + b"\n"


def decode_marker(data: bytes) -> MarkerRecord:
    """Return the record, or raise IntegrityError for anything that is not exactly what `encode_marker` wrote."""
    if len(data) > MARKER_LIMIT_BYTES:
        raise IntegrityError(f"marker of {len(data)} bytes, the limit is {MARKER_LIMIT_BYTES}")
    record, digest = data[:-_DIGEST_NBYTES], data[-_DIGEST_NBYTES:]
    actual = xxhash.xxh3_128_hexdigest(record)
    if digest != actual.encode() + b"\n":
        raise IntegrityError(f"marker of {len(data)} bytes is torn or altered: its text has digest {actual}")
    found = _ANY_FIRST_LINE.match(record)
    if found is not None and int(found[1]) != VERSION:
        raise IntegrityError(
            f"marker format {int(found[1])}, this memstore reads {VERSION}: {reader_of('marker', int(found[1]))}"
        )
    if not record.startswith(_FIRST_LINE):
        raise IntegrityError(f"marker starts with {record[:24]!r} instead of {_FIRST_LINE!r}")
    try:
        return _record(record[len(_FIRST_LINE) :])
    except (ValueError, msgspec.MsgspecError, RecursionError) as exc:
        raise IntegrityError(f"marker has a sound digest and bad contents: {exc!r}") from exc


def _record(text: bytes) -> MarkerRecord:
    """Decode the second line; ValueError or MsgspecError if its fields are bad, or contradict one another."""
    body = _BODY.decode(text)
    if len(body.parts) != body.world_size:
        raise ValueError(f"{len(body.parts)} parts for world size {body.world_size}")
    if body.lineage.attempt != body.attempt:
        raise ValueError(f"lineage of attempt {body.lineage.attempt} in a marker of attempt {body.attempt}")
    for rank, part in enumerate(body.parts):
        if part.world_size != body.world_size:
            raise ValueError(f"rank {rank} was put by world size {part.world_size}, the marker says {body.world_size}")
        chunks_count = -(-part.nbytes // part.chunk_bytes) if part.chunk_bytes else 0
        if (part.nbytes and not part.chunk_bytes) or part.chunks_count != chunks_count:
            raise ValueError(f"rank {rank} has {part.nbytes} bytes in {part.chunks_count} chunks of {part.chunk_bytes}")
    specs, step = {rank: part.spec for rank, part in enumerate(body.parts)}, StepId(body.attempt, body.step)
    for rank, row in body.uses.items():
        count = slices_count(specs[rank]) if rank in specs else 0
        if any(len(tags.split(",")) != count for tags in (row.tags, *(base.tags for base in row.bases))):
            raise ValueError(f"rank {rank} has {count} slices, and others are named")
        if any(StepId(base.attempt, base.step) >= step for base in row.bases):
            raise ValueError(f"rank {rank} reads slices of no older step")
    marker = DurableMarker(step, body.world_size, specs, body.key, slice_uses(body.uses), body.trusted)
    return MarkerRecord(body.job, marker, body.lineage)


# -- marker listing -----------------------------------------------------------------------------------
# What durable storage holds of a job, as a host listed it: its markers, and those that are left alone. Pure (R31).


class DurableMarkers:
    """Requests to hosts for a job's markers, and their answers."""

    def __init__(self, state: ClusterState, out: Effects, states: DurableStates) -> None:
        self.state, self.out, self.states = state, out, states

    def ask(self, host: str, name: str, durable: DurablePlace) -> int:
        """Have a host list the markers of a job; return the number of the question, for `listed` of who asks.

        Args:
            host: Asked. If it dies there is no answer: the caller keeps the deadline.
            name: Of the job; it need not be known yet.
            durable: The storage, as `place_of` returns it.
        """
        call = self.states.next_call()
        self.out.send(host, ListMarkers(job=name, durable=durable, call=call))
        return call

    def listed(self, report: MarkersListed) -> str:
        """Take a host's list of a job's markers as the present content of durable storage. Return why not, or "".

        Where all are damaged it holds what no reader can use: that is no reason to start from nothing (R23).
        """
        name, call = report.job, report.call
        state = self.states.of(name)
        found = report.found
        if found is None:
            state.unread = report.problem
            return state.unread
        damaged = found.damaged
        state.is_listed = not damaged
        if damaged and damaged != state.unread:
            self.out.log(f"job {name!r}: durable storage: {damaged}", "warning")
        state.unread = damaged
        job = self.state.job(name) if found.markers else self.state.jobs.get(name)
        if job is None:
            return damaged
        known = dict(job.markers)
        job.markers.clear()
        others = set[int]()
        for row in found.markers:
            table = {rank: spec.spec for rank, spec in row.specs.items()}
            step, lineage = row.step.id, row.lineage
            if step in job.torn:  # its removal failed, or a late write came after it: once more
                self.states.take_back_again(name, step)
                continue
            past = AttemptFact(step.attempt, lineage.parent_attempt, lineage.parent_step, len(table))
            job.past[step.attempt] = past
            named = dict(lineage.attempts)
            if _is_of_another_run(job, named):
                others.add(step.attempt)
                continue
            job.past_opened_s.update(named)
            uses = slice_uses(row.uses)
            job.markers[step] = DurableMarker(step, len(table), table, row.key, uses, row.is_trusted)
        for step in [step for step, count in state.changed.items() if count >= call]:
            job.markers.pop(step, None)  # written or removed after the question: the list may not show it
            if step in known:
                job.markers[step] = known[step]
        state.seen_s = {step: seen_s for step, seen_s in state.seen_s.items() if step in job.markers}
        state.changed = {s: count for s, count in state.changed.items() if s in job.markers or count >= call}
        if others - state.left_alone:
            self.out.log(
                f"job {name!r}: durable storage has attempts {text.listed(sorted(others))} of another, older run "
                "of this name: they are left alone and are not restored",
                "warning",
            )
        state.left_alone = others
        job.prove()
        return "" if found.markers else damaged


def _is_of_another_run(job: Job, named: Mapping[int, float]) -> bool:
    """Return whether a marker names an attempt that RAM knows with another opening time, so another one (R31).

    The moments only tell attempts apart: of two clocks either may be wrong. Such a run was forgotten: its
    RAM was lost, and the job of its name was started without `durable=`, or elsewhere.
    """
    known = {
        attempt_number: attempt.opened_s
        for attempt_number, attempt in job.attempts.items()
        if attempt.opened_s is not None
    }
    return any(known.get(attempt_number, opened_s) != opened_s for attempt_number, opened_s in named.items())

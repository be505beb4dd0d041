"""The marker that makes a durable step count: three lines of text that carry their own digest (R31). Pure.

    memstore-marker 3
    {"job": ..., "attempt": ..., "step": ..., "world_size": ..., "key": ..., "lineage": {...}, "parts": [[digest, ...]]}
    <hex xxh3-128 of the two lines above>

Text, because a person who finds the folder years later reads it with `cat`. The digest finds faults, not forgers (R14),
so every field is checked as well. The planner reads the result as `recovery.inventory.DurableMarker`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

import msgspec
import xxhash
from msgspec import Meta

from memstore.core.wire.ids import Positive, Unsigned, WireSpec, WireStep
from memstore.core.wire.orders import Lineage
from memstore.core.wire.reports import MarkerRow
from memstore.errors import ConfigError, IntegrityError
from recovery.inventory import DurableMarker, StepId

MARKER_LIMIT_BYTES = 32 << 20  # about 80 bytes a rank: four hundred thousand ranks
VERSION = 3
_FIRST_LINE = b"memstore-marker %d\n" % VERSION
_ANY_FIRST_LINE = re.compile(rb"memstore-marker ([0-9]{1,9})\n")
_DIGEST_NBYTES = 33  # 32 hex digits and the newline


class _Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The second line."""

    job: str
    attempt: Unsigned
    step: Unsigned
    world_size: Positive
    key: Annotated[str, Meta(pattern=r"^(?:[0-9a-f]{16})?\Z")]
    lineage: Lineage
    parts: tuple[WireSpec, ...]


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
        return MarkerRow(WireStep.of(self.marker.step), specs, self.marker.key, self.lineage)


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
    text = msgspec.json.encode(_Body(job, step.attempt, step.step, marker.world_size, marker.key, lineage, parts))
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
            f"marker format {int(found[1])}, this memstore reads {VERSION}: read it with its writer's version"
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
    specs = {rank: part.spec for rank, part in enumerate(body.parts)}
    marker = DurableMarker(StepId(body.attempt, body.step), body.world_size, specs, body.key)
    return MarkerRecord(body.job, marker, body.lineage)

"""The marker that makes a durable step count: three lines of text that carry their own digest (R31). Pure.

    memstore-marker 3
    {"job": ..., "attempt": ..., "step": ..., "world_size": ..., "key": ..., "lineage": {...}, "parts": [[digest, ...]]}
    <hex xxh3-128 of the two lines above>

Text, because a person who finds the folder years later reads it with `cat`. The digest finds faults, not forgers (R14),
so every field is checked as well. The planner reads the result as `recovery.inventory.DurableMarker`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import xxhash

from memstore.core.wire.ids import UNSIGNED_LIMIT, WireSpec, WireStep
from memstore.core.wire.orders import Lineage
from memstore.core.wire.reports import MarkerRow
from memstore.errors import ConfigError, IntegrityError
from recovery.inventory import DurableMarker, ShardSpec, StepId

MARKER_LIMIT_BYTES = 32 << 20  # about 80 bytes a rank: four hundred thousand ranks
VERSION = 3
_FIRST_LINE = b"memstore-marker %d\n" % VERSION
_ANY_FIRST_LINE = re.compile(rb"memstore-marker ([0-9]{1,9})\n")
_DIGEST_NBYTES = 33  # 32 hex digits and the newline
_HEX = re.compile(r"[0-9a-f]{32}\Z")
_KEY = re.compile(r"(?:[0-9a-f]{16})?\Z")


@dataclass(frozen=True, slots=True)
class MarkerRecord:
    """A decoded marker: the step's parts, and where its attempt came from (R22)."""

    job: str
    marker: DurableMarker
    lineage: Mapping[str, Any]  # attempt, parent_attempt, parent_step, and what else the writer added


def encode_marker(job: str, marker: DurableMarker, lineage: Mapping[str, Any]) -> bytes:
    """Return the marker file's bytes.

    Raises:
        ConfigError: a part is missing or contradicts its own sizes, the lineage lacks a key or is not plain
            JSON, or the record exceeds MARKER_LIMIT_BYTES.
    """
    body = {
        "job": job,
        "attempt": marker.step.attempt,
        "step": marker.step.step,
        "world_size": marker.world_size,
        "key": marker.key,
        "lineage": dict(lineage),
        "parts": [
            [spec.digest, spec.nbytes, spec.chunk_bytes, spec.chunks_count, spec.world_size]
            for _, spec in sorted(marker.specs.items())
        ],
    }
    if sorted(marker.specs) != list(range(marker.world_size)):
        raise ConfigError(
            f"marker of {job} attempt {marker.step.attempt} step {marker.step.step} lists "
            f"{len(marker.specs)} parts that are not the ranks 0 to {marker.world_size - 1}"
        )
    try:
        text = json.dumps(body, allow_nan=False)
        _record_from_body(json.loads(text))
    except (ValueError, TypeError, KeyError, RecursionError) as exc:
        raise ConfigError(f"marker of {job} {marker.step} cannot be written: {exc!r}") from exc
    record = _FIRST_LINE + text.encode() + b"\n"
    if len(record) + _DIGEST_NBYTES > MARKER_LIMIT_BYTES:
        raise ConfigError(f"marker of {job} {marker.step}: {len(record)} bytes, the limit is {MARKER_LIMIT_BYTES}")
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
        return _record_from_body(json.loads(record[len(_FIRST_LINE) :]))
    except (ValueError, TypeError, KeyError, RecursionError) as exc:
        raise IntegrityError(f"marker has a sound digest and bad contents: {exc!r}") from exc


def row_of(record: MarkerRecord) -> MarkerRow:
    """Return a marker as a holder reports it, without what its writer added to the lineage."""
    marker, lineage = record.marker, record.lineage
    named = lineage.get("attempts")
    rows = [tuple(row) for row in named if isinstance(row, list | tuple)] if isinstance(named, list | tuple) else []
    return MarkerRow(
        WireStep.of(marker.step),
        {rank: WireSpec.of(spec) for rank, spec in sorted(marker.specs.items())},
        marker.key,
        Lineage(
            attempt=lineage["attempt"], parent_attempt=lineage["parent_attempt"], parent_step=lineage["parent_step"],
            attempts=tuple(row for row in rows if _is_moment(row)),
        ),
    )  # fmt: skip


def _is_moment(row: tuple[Any, ...]) -> TypeGuard[tuple[int, float]]:
    return [type(value) for value in row] == [int, float] and 0 <= row[0] < UNSIGNED_LIMIT


def _record_from_body(body: dict[str, Any]) -> MarkerRecord:
    """Check every field; ValueError, TypeError or KeyError for a bad one."""
    step = StepId(_count(body["attempt"], "attempt"), _count(body["step"], "step"))
    world_size = _count(body["world_size"], "world_size")
    job, parts, lineage, key = body["job"], body["parts"], body["lineage"], body["key"]
    if not isinstance(job, str) or not isinstance(parts, list) or not isinstance(lineage, dict):
        raise TypeError("job, parts and lineage must be a string, a list and a map")
    if not isinstance(key, str) or not _KEY.match(key):
        raise ValueError(f"key {key!r} is no key's name")
    if world_size < 1 or len(parts) != world_size:
        raise ValueError(f"{len(parts)} parts for world size {world_size}")
    if _count(lineage["attempt"], "attempt") != step.attempt:
        raise ValueError(f"lineage of attempt {lineage['attempt']} in a marker of attempt {step.attempt}")
    for name in ("parent_attempt", "parent_step"):
        if lineage[name] is not None:
            _count(lineage[name], name)
    specs = {rank: _spec(part, rank, world_size) for rank, part in enumerate(parts)}
    return MarkerRecord(job, DurableMarker(step, world_size, specs, key), lineage)


def _spec(part: list[Any], rank: int, world_size: int) -> ShardSpec:
    """Check one part's line: what it says about chunks must follow from its sizes."""
    digest, *numbers = part
    nbytes, chunk_bytes, chunks_count, part_world_size = (_count(number, f"rank {rank}") for number in numbers)
    if not isinstance(digest, str) or not _HEX.match(digest):
        raise ValueError(f"rank {rank} has digest {digest!r}")
    if part_world_size != world_size:
        raise ValueError(f"rank {rank} was put by world size {part_world_size}, the marker says {world_size}")
    if (nbytes and not chunk_bytes) or chunks_count != (-(-nbytes // chunk_bytes) if nbytes else 0):
        raise ValueError(f"rank {rank} has {nbytes} bytes in {chunks_count} chunks of {chunk_bytes}")
    return ShardSpec(digest, nbytes, chunk_bytes, chunks_count, world_size)


def _count(value: Any, name: str) -> int:
    """Return a whole number that is below 2**62; bools and floats are not numbers here."""
    if type(value) is not int or not 0 <= value < UNSIGNED_LIMIT:
        raise ValueError(f"{name} is {value!r}, not a whole number from 0")
    return value

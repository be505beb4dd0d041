"""The record files: one JSON file for each benchmark, merged record by record, so that each can be measured alone."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import harness
from benchmarks.report.harness import Options, Ratio, Record, Target
from benchmarks.report.targets import TARGETS

FOLDER = Path(__file__).resolve().parents[1] / "results"


def about(options: Options, size: str) -> dict[str, Any]:
    """Return what every record of a run says about how it was taken.

    Raises:
        ValueError: The environment changes glibc's copies, as no Ray worker's does.
    """
    tunables = os.environ.get("GLIBC_TUNABLES")
    if tunables:
        raise ValueError(f"GLIBC_TUNABLES is {tunables!r}: ranks of users run without it, so unset it first")
    return {
        "size": size,
        "rounds": options.rounds,
        "warmups": options.warmups,
        "chunk_bytes": options.chunk_bytes,
        "machine": harness.machine(),
    }


def merge(name: str, records: Sequence[Record], folder: Path) -> Path:
    """Write the records into NAME.json; records of other names that are there already stay. Return the path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    kept = {record.name: record for record in load(path)} if path.exists() else {}
    kept.update({record.name: record for record in records})
    body = {"records": [_to_dict(record) for record in kept.values()]}
    path.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    return path


def load(path: Path) -> list[Record]:
    """Return the records of a file as they were written, each figure held against the promise as it is now."""
    body = json.loads(path.read_text(encoding="utf-8"))
    return [_record(found) for found in body["records"]]


def _to_dict(record: Record) -> dict[str, Any]:
    rates = {k: record.nbytes / statistics.median(v) / 1e9 for k, v in record.seconds.items() if record.nbytes}
    ratios = [{**dataclasses.asdict(r), "median": r.median, "is_met": r.is_met} for r in record.ratios]
    return {**dataclasses.asdict(record), "gb_per_s_median": rates, "ratios": ratios}


def _record(found: dict[str, Any]) -> Record:
    ratios = [Ratio(r["name"], r["values"], _target(r["target"]), r["unit"], r["judged_by"]) for r in found["ratios"]]
    # A file that was written before the record had a field lacks it.
    fields = {field.name: found[field.name] for field in dataclasses.fields(Record) if field.name in found}
    return Record(**{**fields, "ratios": ratios})


def _target(found: list[Any] | None) -> Target | None:
    """Return what a figure is held against now: a promise may have changed since it was measured, or be gone."""
    if found is None:
        return None
    target = Target(*found)
    return TARGETS.get(target.line) if target.line else target

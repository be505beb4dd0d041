"""The file of records, by benchmark: merged record by record, so that each can be measured alone."""

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
RECORDS = "records.json"


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


def merge(name: str, records: Sequence[Record], folder: Path) -> None:
    """Write the records of a benchmark into the folder's file; what else is there already stays.

    Args:
        name: Of the benchmark.
        records: Each replaces the benchmark's record of the same name.
        folder: It is made where there is none.
    """
    folder.mkdir(parents=True, exist_ok=True)
    body = _read(folder)
    kept = {found["name"]: found for found in body.get(name, ())}
    body[name] = list({**kept, **{record.name: _to_dict(record) for record in records}}.values())
    written = folder / f"{RECORDS}.{os.getpid()}"
    written.write_text(json.dumps(dict(sorted(body.items())), indent=1) + "\n", encoding="utf-8")
    written.replace(folder / RECORDS)  # a reader, or a kill meanwhile, finds a whole file


def load(folder: Path = FOLDER) -> dict[str, list[Record]]:
    """Return the records by benchmark as they were written, each figure held against the promise as it is now."""
    return {name: [_record(found) for found in records] for name, records in _read(folder).items()}


def _read(folder: Path) -> dict[str, list[dict[str, Any]]]:
    path = folder / RECORDS
    found: dict[str, list[dict[str, Any]]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def _to_dict(record: Record) -> dict[str, Any]:
    rates = {k: record.nbytes / statistics.median(v) / 1e9 for k, v in record.seconds.items() if record.nbytes}
    ratios = [{**dataclasses.asdict(r), "median": r.median, "is_met": r.is_met} for r in record.ratios]
    return {**dataclasses.asdict(record), "gb_per_s_median": rates, "ratios": ratios}


def _record(found: dict[str, Any]) -> Record:
    ratios = [Ratio(r["name"], r["values"], _target(r["target"]), r["unit"], r["judged_by"]) for r in found["ratios"]]
    # A record that was written before it had a field lacks it.
    fields = {field.name: found[field.name] for field in dataclasses.fields(Record) if field.name in found}
    return Record(**{**fields, "ratios": ratios})


def _target(found: list[Any] | None) -> Target | None:
    """Return what a figure is held against now: a promise may have changed since it was measured, or be gone."""
    if found is None:
        return None
    target = Target(*found)
    return TARGETS.get(target.line) if target.line else target

"""The record of a campaign that is played in parts: a JSON file, one entry for each run of seeds on one commit.

    {"parts": [{"commit": .., "date": .., "first_seed": .., "last_seed": .., "seeds": .., "virtual_h": .., ...}]}

A part begins where the one before ended, so the next call goes on where the last one was stopped. The file is written
again after every few seeds, so a process that is killed loses only the newest of them.
"""

from __future__ import annotations

import datetime
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memstore.testing.part_records import parts_of, source_commit, write_parts
from memstore.testing.simulator.run.campaign import RunOutcome, Summary, run
from memstore.testing.simulator.world.scenario import Scenario

BATCH_SEEDS = 50
Body = dict[str, Any]


def unplayed(parts: list[Body], first: int, count: int) -> tuple[int, int]:
    """Return the next run of seeds in `first` to `first + count - 1` that no part has: its first seed, its length."""
    end, next_seed = first + count, first
    for part in sorted(parts, key=lambda part: int(part["first_seed"])):
        if part["first_seed"] <= next_seed <= part["last_seed"]:
            next_seed = int(part["last_seed"]) + 1
    later = [int(part["first_seed"]) for part in parts if part["first_seed"] >= next_seed]
    return next_seed, max(0, min([end, *later]) - next_seed)


def add(path: Path, summary: Summary, commit: str) -> None:
    """Append a summary; add it to the last part if that ended just before it, on the same commit and day."""
    date = datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat()
    last_seed = summary.first_seed + summary.seeds - 1
    part: Body = {"commit": commit, "date": date, **summary.to_dict(), "last_seed": last_seed}
    parts = parts_of(path)
    before = parts[-1] if parts else None
    is_next = before is not None and before["last_seed"] + 1 == part["first_seed"]
    if before is not None and is_next and (before["commit"], before["date"]) == (commit, date):
        parts[-1] = _joined(before, part)
    else:
        parts.append(part)
    write_parts(path, parts)


def _joined(before: Body, part: Body) -> Body:
    """Return two parts as one: numbers and faults added up, violations in a row."""
    joined = {key: before[key] + part[key] for key in part if isinstance(part[key], int | float)}
    faults: Counter[str] = Counter(before["faults"]) + Counter(part["faults"])
    return {
        **part,
        **joined,
        "first_seed": before["first_seed"],
        "last_seed": part["last_seed"],
        "faults": dict(sorted(faults.items())),
        "violations": [*before["violations"], *part["violations"]],
    }


def play_on(
    path: Path,
    first: int,
    count: int,
    *,
    jobs: int = 0,
    minutes: float | None = None,
    on_outcome: Callable[[RunOutcome], None] = lambda outcome: None,
) -> Summary:
    """Play the seeds of a range that the record lacks and add them to it; return the summary of this call."""
    commit, total, limit_s = source_commit() or "unknown", Summary(first_seed=first), (minutes or 0) * 60
    while True:
        next_seed, left = unplayed(parts_of(path), first, count)
        left_s = limit_s - total.wall_s
        if not left or (minutes is not None and left_s <= 0):
            return total
        summary = run(
            next_seed,
            min(left, BATCH_SEEDS),
            jobs=jobs,
            minutes=None if minutes is None else left_s / 60,
            on_outcome=on_outcome,
        )
        if not summary.seeds:
            return total
        add(path, summary, commit)
        total.join(summary)


# -- corpus -------------------------------------------------------------------------------------------
# The corpus: every scenario that ever failed, one line of JSON each. The tests play them for ever.
#
# The commit is the one at which the scenario failed. What it draws is stored, not the seed: so `draw` may change.


CORPUS = Path("tests/simulator/corpus.jsonl")


@dataclass(frozen=True)
class CorpusRow:
    """One scenario that failed."""

    rule: str
    date: str
    commit: str
    why: str
    scenario: Scenario


def read_corpus(path: Path = CORPUS) -> list[CorpusRow]:
    """Return the rows of a corpus file; raise ValueError with the number of a line that is no row."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            found = json.loads(line)
            scenario = Scenario.from_json(json.dumps(found.pop("scenario")))
            rows.append(CorpusRow(**found, scenario=scenario))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path.name}:{number} is no row of a corpus: {error}") from error
    return rows


def add_to_corpus(row: CorpusRow, path: Path = CORPUS) -> bool:
    """Append a row unless its scenario is there; return whether it was new."""
    if path.exists() and any(known.scenario == row.scenario for known in read_corpus(path)):
        return False
    found = {"rule": row.rule, "date": row.date, "commit": row.commit, "why": " ".join(row.why.split())[:160]}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({**found, "scenario": json.loads(row.scenario.to_json())}) + "\n")
    return True

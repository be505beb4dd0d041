"""The corpus: every scenario that ever failed, one line of JSON each. The tests play them for ever.

The commit is the one at which the scenario failed. What it draws is stored, not the seed: so `draw` may change.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from memstore.testing.simulator.world.scenario import Scenario

DEFAULT = Path("tests/simulator/corpus.jsonl")


@dataclass(frozen=True)
class CorpusRow:
    """One scenario that failed."""

    rule: str
    date: str
    commit: str
    why: str
    scenario: Scenario


def read(path: Path = DEFAULT) -> list[CorpusRow]:
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


def record(row: CorpusRow, path: Path = DEFAULT) -> bool:
    """Append a row unless its scenario is there; return whether it was new."""
    if path.exists() and any(known.scenario == row.scenario for known in read(path)):
        return False
    found = {"rule": row.rule, "date": row.date, "commit": row.commit, "why": " ".join(row.why.split())[:160]}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({**found, "scenario": json.loads(row.scenario.to_json())}) + "\n")
    return True

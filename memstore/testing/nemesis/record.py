"""The record of all runs: a JSON file to which every part is appended, with sums over all parts."""

from __future__ import annotations

import datetime
from collections import Counter
from pathlib import Path
from typing import Any

from memstore.testing.nemesis.ledger import Story
from memstore.testing.nemesis.schedule import NemesisScenario
from memstore.testing.part_records import parts_of, source_commit, write_parts

STORY_LINES_MAX = 120


class RecordPart:
    """A part of the record: one run of the program."""

    def __init__(self, seed: int) -> None:
        self.body: dict[str, Any] = {
            "commit": source_commit() or "unknown",
            "date": datetime.datetime.now(tz=datetime.timezone.utc).isoformat(timespec="seconds"),
            "seed": seed,
            "rounds": 0,
            "clean_rounds": 0,
            "seconds": 0.0,
            "seconds_clean": 0.0,
            "shapes": {},
            "faults": {},
            "counts": {},
            "violations": [],
        }

    def add(self, scenario: NemesisScenario, story: Story, seconds: float, load: float) -> None:
        """Add a round."""
        body = self.body
        body["rounds"] += 1
        body["seconds"] = round(body["seconds"] + seconds, 1)
        body["load"] = round(load, 3)  # share of the time that the load meter overslept
        for name, counts in (("shapes", Counter([scenario.shape])), ("faults", story.faults), ("counts", story.counts)):
            body[name] = dict(sorted((Counter(body[name]) + counts).items()))
        if not story.violations:
            body["clean_rounds"] += 1
            body["seconds_clean"] = round(body["seconds_clean"] + seconds, 1)
            return
        body["violations"].append(
            {
                "seed": scenario.seed,
                "shape": scenario.shape,
                "after_s": body["seconds"],
                "broken": [f"{v.kind}: {v.text}" for v in story.violations],
                "story": shortened(story.lines),
            }
        )


def shortened(lines: list[str]) -> list[str]:
    """Return a story that is not too long: its beginning, and the lines around violations."""
    if len(lines) <= STORY_LINES_MAX:
        return list(lines)
    at = next((i for i, line in enumerate(lines) if "VIOLATION" in line), len(lines))
    first = max(2, at - STORY_LINES_MAX // 2)
    cut = lines[first : first + STORY_LINES_MAX - 2]
    return [*lines[:2], f"... {first - 2} lines left out", *cut]


def append(path: Path, part: RecordPart) -> dict[str, Any]:
    """Write the record with this part at its end, or in place of its former state; return the sums."""
    parts = [known for known in parts_of(path) if known["date"] != part.body["date"]]
    parts.append(part.body)
    faults, counts = Counter[str](), Counter[str]()
    for known in parts:
        faults.update(known["faults"])
        counts.update(known["counts"])
    total = {
        "rounds": sum(known["rounds"] for known in parts),
        "clean_rounds": sum(known["clean_rounds"] for known in parts),
        "hours": round(sum(known["seconds"] for known in parts) / 3600, 3),
        "hours_clean": round(sum(known["seconds_clean"] for known in parts) / 3600, 3),
        "violations": sum(len(known["violations"]) for known in parts),
        "faults": dict(sorted(faults.items())),
        "counts": dict(sorted(counts.items())),
    }
    write_parts(path, parts, total=total)
    return total

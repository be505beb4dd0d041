"""All planted bugs, and their table for the documentation."""

from __future__ import annotations

from memstore.testing.simulator.planted import decisions, holder_steps, in_place, parity, shared_shards, stored_bytes
from memstore.testing.simulator.planted.bug import PlantedBug

FILES = (stored_bytes, decisions, holder_steps, shared_shards, in_place, parity)
BUGS: dict[str, PlantedBug] = {
    bug.name: bug
    for file in FILES
    for found in vars(file).values()
    for bug in (found if isinstance(found, tuple) else (found,))
    if isinstance(bug, PlantedBug)
}


def table() -> str:
    """Return every bug with the rule that it breaks and the rule that found it, as a table."""
    rows = ["| name | planted bug | breaks | found by | faults it needs |", "|---|---|---|---|---|"]
    for bug in BUGS.values():
        outcome, _ = bug.hunt()
        kinds = ", ".join(dict.fromkeys(fault.kind for fault in bug.scenario.faults)) or "none"
        rows.append(f"| {bug.name} | {bug.what} | {bug.breaks} | {outcome.rule or 'nothing'} | {kinds} |")
    return "\n".join(rows)

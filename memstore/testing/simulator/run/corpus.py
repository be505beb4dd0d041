"""The corpus: every seed that ever failed, one line each. The tests play them for ever.

    seed rule date commit why

The commit is the one at which the seed failed. If a later commit draws another scenario for the number, the old one
can still be played there.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

DEFAULT = Path("tests/simulator/corpus.txt")


@dataclass(frozen=True)
class Row:
    """One seed that failed."""

    seed: int
    rule: str
    date: str
    commit: str
    why: str


def read(path: Path = DEFAULT) -> list[Row]:
    """Return the rows of a corpus file; raise ValueError with the number of a line that is no row."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        words = line.split(None, 4)
        if len(words) != 5 or not words[0].isdigit():
            raise ValueError(f"{path.name}:{number}: not `seed rule date commit why`: {line[:80]!r}")
        rows.append(Row(int(words[0]), *words[1:]))
    return rows


def record(row: Row, path: Path = DEFAULT) -> bool:
    """Append a row unless its seed is there; return whether it was new."""
    if path.exists() and any(known.seed == row.seed for known in read(path)):
        return False
    with path.open("a", encoding="utf-8") as file:
        why = " ".join(row.why.split())[:160]
        file.write(f"{row.seed} {row.rule} {row.date} {row.commit} {why}\n")
    return True

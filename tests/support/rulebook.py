"""The numbered texts of the repository, read into values: rules of PROTOCOL.md and their clauses."""

from __future__ import annotations

import re
from dataclasses import dataclass

from repository import ROOT

PROTOCOL = ROOT / "memstore/PROTOCOL.md"
RULE = re.compile(r"### (R\d+) \S.*")
CLAUSE = re.compile(r"- \*\*(R\d+\.\d+)\*\* (.+)")


@dataclass(frozen=True, slots=True)
class Passage:
    """One piece of the protocol that is read at a time: a rule's statement, a clause, or when the rule breaks."""

    number: str  # of the clause, else of the rule
    text: str
    is_clause: bool = False

    @property
    def words_count(self) -> int:
        """Return how many words it has; punctuation that stands alone is none."""
        return sum(any(char.isalnum() for char in word) for word in self.text.split())


def rules(text: str) -> dict[str, list[Passage]]:
    """Return the passages of every rule of a protocol text, in the order in which they stand.

    A number that stands twice raises: a citation of it would name two rules.
    """
    found: dict[str, list[Passage]] = {}
    passages: list[Passage] | None = None
    for line in text.splitlines():
        if heading := RULE.fullmatch(line):
            if heading[1] in found:
                raise ValueError(f"{heading[1]} stands twice")
            passages = found[heading[1]] = []
        elif line.startswith("#"):
            passages = None
        elif passages is not None and line:
            clause = CLAUSE.fullmatch(line)
            rule = next(reversed(found))
            passages.append(Passage(clause[1], clause[2], is_clause=True) if clause else Passage(rule, line))
    return found


def numbers(text: str) -> set[str]:
    """Return every number that a citation may name: of rules (`R12`) and of clauses (`R12.3`)."""
    found = rules(text)
    return set(found) | {passage.number for passages in found.values() for passage in passages}

"""The numbered texts of the repository, read into values: the protocol's rules and the decisions."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from repository import ROOT

PROTOCOL = ROOT / "memstore/PROTOCOL.md"
DECISIONS = ROOT / "docs/decisions"
RULE = re.compile(r"### (R\d+) \S.*")
CLAUSE = re.compile(r"- \*\*(R\d+\.\d+)\*\* (.+)")
DECISION = re.compile(r"## (D\d+)\. (\S.*)")


@dataclass(frozen=True, slots=True)
class Passage:
    """One piece of the protocol that is read at a time: a rule's statement, a clause, or when the rule breaks."""

    number: str  # of the clause, else of the rule
    text: str
    is_clause: bool = False


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


@dataclass(frozen=True, slots=True)
class Decision:
    """One entry of a chapter of decisions."""

    number: str
    text: str
    page: str  # the chapter's file


def decisions(pages: Iterable[Path]) -> list[Decision]:
    """Return the decisions of some chapters, in the order in which they stand."""
    found = []
    for page in pages:
        _, *entries = re.split(r"^(?=## )", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
        for entry in entries:
            heading, _, body = entry.partition("\n")
            known = DECISION.fullmatch(heading)
            if known is None:
                raise ValueError(f"{page.name}: {heading!r} is no number and title of a decision")
            found.append(Decision(known[1], body.strip(), page.name))
    return found


def chapters() -> list[Path]:
    """Return the pages that decisions stand on."""
    return sorted(page for page in DECISIONS.glob("*.md") if page.name != "README.md")


def anchor(title: str) -> str:
    """Return what a link calls a heading: in lower case, words joined by dashes."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")

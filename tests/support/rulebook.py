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
PART = re.compile(r"\*\*(Status|Context|Decision|Rejected|Consequence|Revisit when)\.?\*\* ")


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
    title: str
    parts: tuple[str, ...]  # names of its parts, in their order
    status: str  # "" where it has none
    page: str  # the chapter's file
    chapter: str  # and its title

    @property
    def successors(self) -> list[str]:
        """Return the decisions that its status says took its place, in whole or in part."""
        return re.findall(r"D\d+", re.sub(r"\([^)]*\)", "", self.status))


def decisions(pages: Iterable[Path]) -> list[Decision]:
    """Return the decisions of some chapters, in the order in which they stand."""
    found = []
    for page in pages:
        head, *entries = re.split(r"^(?=## )", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
        chapter = head.partition("\n")[0].removeprefix("# ")
        for entry in entries:
            heading, _, body = entry.partition("\n")
            known = DECISION.fullmatch(heading)
            if known is None:
                raise ValueError(f"{page.name}: {heading!r} is no number and title of a decision")
            begun = [part for part in map(PART.match, re.split(r"\n\n+", body.strip())) if part]
            texts = {part[1]: part.string[part.end() :] for part in begun}
            status = " ".join(texts.get("Status", "").split())
            found.append(Decision(known[1], known[2], tuple(part[1] for part in begun), status, page.name, chapter))
    return found


def chapters() -> list[Path]:
    """Return the pages that decisions stand on."""
    return sorted(page for page in DECISIONS.glob("*.md") if page.name != "README.md")


def anchor(title: str) -> str:
    """Return what a link calls a heading: in lower case, words joined by dashes."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def index_line(decision: Decision) -> str:
    """Return a decision's line in the index."""
    place = f"{decision.page}#{anchor(f'{decision.number}. {decision.title}')}"
    status = re.sub(r" \([^)]*\)", "", decision.status).removesuffix(".").lower().replace(" d", " D")
    return f"| [{decision.number}]({place}) | {decision.title} | {status} | {decision.chapter} |"

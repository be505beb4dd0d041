"""What the texts cite is in the repository: rules, decisions, files and headings that links name."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from repository import ROOT

# -- rulebook -----------------------------------------------------------------------------------------
# The numbered texts of the repository, read into values: the protocol's rules and the decisions.


PROTOCOL = ROOT / "memstore/PROTOCOL.md"
DECISIONS = ROOT / "docs/decisions"
HEADING_RULE = re.compile(r"### (R\d+) \S.*")
CLAUSE = re.compile(r"- \*\*(R\d+\.\d+)\*\* (.+)")
HEADING_DECISION = re.compile(r"## (D\d+)\. (\S.*)")


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
        if heading := HEADING_RULE.fullmatch(line):
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
            known = HEADING_DECISION.fullmatch(heading)
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


# -- citations ----------------------------------------------------------------------------------------


RULE, DECISION = re.compile(r"\bR\d+(?:\.\d+)?\b"), re.compile(r"\bD[1-9]\d{0,2}\b")
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
TEXTS = (".py", ".md", ".toml", ".yaml", "Makefile", ".ci/run")
ABSENT = re.compile(r"\bDESIGN(?:'s)?\b")  # of a document that the repository does not have
ENTRY_LINES = range(1, 9)
CHAPTER_LINES_MAX = 150


def tracked(*endings: str) -> list[Path]:
    """Return the tracked files of these endings, but for this one, whose patterns cite nothing."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = [ROOT / name for name in listed.split("\0") if name.endswith(endings)]
    return [path for path in names if path.is_file() and path != Path(__file__).resolve()]


def anchors(text: str) -> set[str]:
    """Return what links call the headings of a page."""
    return set(map(anchor, re.findall(r"^#+ (.*)$", text, re.MULTILINE)))


def uncited(text: str, rules: set[str], known: set[str]) -> set[str]:
    """Return the rules, clauses and decisions that a text cites and the lists lack, and documents that are not here."""
    return (set(RULE.findall(text)) - rules) | (set(DECISION.findall(text)) - known) | set(ABSENT.findall(text))


def links_astray(page: Path, text: str) -> list[str]:
    """Return the links of a page that lead to no file, or to no heading of one."""
    astray = []
    for name, heading in LINK.findall(text):
        target = page.parent / name if name else page
        if not target.exists() or (heading and heading not in anchors(target.read_text(encoding="utf-8"))):
            astray.append(f"{name}#{heading}" if heading else name)
    return astray


def faults(found: Sequence[Decision]) -> list[str]:
    """Return what is wrong with the decisions of some chapters: numbers that stand twice, entries that are too long."""
    known = [decision.number for decision in found]
    wrong = [f"{number} stands twice" for number in sorted(set(known)) if known.count(number) > 1]
    lengths = {decision.number: len(decision.text.splitlines()) for decision in found}
    limit = ENTRY_LINES[-1]
    return wrong + [f"{each} has {n} lines, not 1 to {limit}" for each, n in lengths.items() if n not in ENTRY_LINES]


def test_every_rule_and_decision_that_is_cited_is_there() -> None:
    """A reader who follows a number finds what it stands for, and is sent to no document that is not here."""
    rules = numbers(PROTOCOL.read_text(encoding="utf-8"))
    known = {decision.number for decision in decisions(chapters())}
    assert len(known) > 100
    texts = {path: path.read_text(encoding="utf-8") for path in tracked(*TEXTS)}
    found = {str(path.relative_to(ROOT)): uncited(text, rules, known) for path, text in texts.items()}
    assert {name: missing for name, missing in found.items() if missing} == {}


def test_decisions_are_short_and_stand_once() -> None:
    """A reader has what was decided, why and what was refused in a minute."""
    assert faults(decisions(chapters())) == []


def test_every_chapter_of_decisions_is_listed() -> None:
    """And is read in ten minutes."""
    listed = set(re.findall(r"\]\((\w+\.md)\)", (DECISIONS / "README.md").read_text(encoding="utf-8")))
    assert listed == {page.name for page in chapters()}
    lengths = {page.name: len(page.read_text(encoding="utf-8").splitlines()) for page in chapters()}
    assert {name: lines for name, lines in lengths.items() if lines > CHAPTER_LINES_MAX} == {}


def test_every_link_leads_somewhere() -> None:
    """Links within the repository name files that are there, and headings that these have."""
    found = {page: links_astray(page, page.read_text(encoding="utf-8")) for page in tracked(".md")}
    assert {str(page.relative_to(ROOT)): astray for page, astray in found.items() if astray} == {}


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("as it must be (R2, R2.1, D7)", set()),
        ("R99 says", {"R99"}),
        ("(R2.12)", {"R2.12"}),
        ("see R2.1.", set()),
        ("D300 says", {"D300"}),
        ("DESIGN 5", {"DESIGN"}),
    ],
)
def test_a_citation_of_nothing_is_seen(text: str, missing: set[str]) -> None:
    """The check of citations accepts those that exist and names the others."""
    assert uncited(text, {"R2", "R2.1"}, {"D7"}) == missing


ENTRY = "# Chapter\n\n## D3. It is so\n\nSo it is.\n"


@pytest.mark.parametrize(
    ("more", "wrong"),
    [
        ("\n## D4. It is more so\n\nMore.\n", []),
        ("\n## D3. It is so\n\nAgain.\n", ["D3 stands twice"]),
        ("\n## D4. It is more so\n", ["D4 has 0 lines, not 1 to 8"]),
        ("\nAnd so on.\n" * 4, ["D3 has 9 lines, not 1 to 8"]),
    ],
)
def test_a_fault_of_a_decision_is_seen(tmp_path: Path, more: str, wrong: list[str]) -> None:
    """Each kind of fault is named, and no other one with it; a sound entry has none."""
    page = tmp_path / "chapter.md"
    page.write_text(ENTRY + more)
    assert faults(decisions([page])) == wrong


def test_a_heading_without_a_number_is_refused(tmp_path: Path) -> None:
    """A chapter has decisions only: what has no number could not be cited."""
    page = tmp_path / "chapter.md"
    page.write_text("# Chapter\n\n## It is so\n")
    with pytest.raises(ValueError, match=r"chapter\.md: '## It is so' is no number and title"):
        decisions([page])


def test_a_link_astray_is_seen(tmp_path: Path) -> None:
    """A link to no file, and one to no heading, are named; one to a heading that is there is not."""
    page = tmp_path / "page.md"
    page.write_text("# Faults: noticed and `recovered`\n")
    text = "[a](gone.md) [b](#faults-noticed-and-recovered) [c](page.md#faults) [d](https://example.org/x)"
    assert links_astray(page, text) == ["gone.md", "page.md#faults"]


# -- protocol -----------------------------------------------------------------------------------------
# The protocol keeps its form: rules and clauses are numbered without gaps, each rule has a statement first.


RULES_COUNT = 41  # numbers of rules stay: a rule that goes leaves a line that says so


def protocol_faults(text: str) -> list[str]:
    """Return what is wrong with the form of a protocol text."""
    found, wrong = rules(text), []
    order = sorted(found, key=lambda rule: int(rule[1:]))
    if order != [f"R{number}" for number in range(1, len(order) + 1)]:
        wrong.append(f"the rules are not numbered from R1 without gaps: {order}")
    for rule, passages in found.items():
        clauses = [passage.number for passage in passages if passage.is_clause]
        if clauses != [f"{rule}.{number}" for number in range(1, len(clauses) + 1)]:
            wrong.append(f"the clauses of {rule} are not numbered from {rule}.1 in order: {clauses}")
        if not passages or passages[0].is_clause:
            wrong.append(f"{rule} does not begin with its statement")
        if strays := [p.text for p in passages[1:] if not p.is_clause and not p.text.startswith("*Breaks when* ")]:
            wrong.append(f"{rule} has text that no citation can name: {strays}")
    return wrong


def test_the_protocol_is_numbered() -> None:
    """A reader finds a cited rule by its number."""
    text = PROTOCOL.read_text(encoding="utf-8")
    assert len(rules(text)) == RULES_COUNT
    assert protocol_faults(text) == []


GOOD = "### R1 One\n\nIt is so.\n\n- **R1.1** First.\n- **R1.2** Second.\n\n*Breaks when* it rains.\n"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (GOOD + "\n### R3 Three\n\nIt is.\n", "without gaps: ['R1', 'R3']"),
        (GOOD.replace("R1.2", "R1.3"), "in order: ['R1.1', 'R1.3']"),
        (GOOD.replace("R1.2", "R2.2"), "in order: ['R1.1', 'R2.2']"),
        (GOOD.replace("It is so.\n\n", ""), "does not begin with its statement"),
        (GOOD + "\nAnd so on.\n", "no citation can name: ['And so on.']"),
    ],
)
def test_a_fault_of_form_is_seen(text: str, fault: str) -> None:
    """Each kind of fault is named; the text without it has none."""
    assert protocol_faults(GOOD) == []
    (found,) = protocol_faults(text)
    assert fault in found


def test_a_number_that_stands_twice_is_refused() -> None:
    """A citation would not say which of the two it means."""
    with pytest.raises(ValueError, match="R1 stands twice"):
        rules(GOOD + GOOD)

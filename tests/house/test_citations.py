"""What the texts cite is in the repository: rules, decisions, files and headings that links name."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from repository import ROOT
from rulebook import DECISIONS, PROTOCOL, Decision, anchor, chapters, decisions, index_line, numbers

RULE, DECISION = re.compile(r"\bR\d+(?:\.\d+)?\b"), re.compile(r"\bD[1-9]\d{0,2}\b")
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
TEXTS = (".py", ".md", ".toml", ".yaml", "Makefile", ".ci/run")
ABSENT = re.compile(r"\bDESIGN(?:'s)?\b")  # of a document that the repository does not have
PARTS = ("Status", "Context", "Decision", "Rejected", "Consequence", "Revisit when")
STATUS = re.compile(r"Accepted\.|Superseded by D\d+\.|Partly superseded by D\d+ \([^)]+\)(?: and D\d+ \([^)]+\))*\.")


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
    """Return what is wrong with the decisions of some chapters: numbers, parts, status."""
    wrong, known = [], [decision.number for decision in found]
    wrong += [f"{number} stands twice" for number in sorted(set(known)) if known.count(number) > 1]
    for decision in found:
        name, parts, number = decision.number, decision.parts, int(decision.number[1:])
        if list(parts) != [part for part in PARTS if part in parts] or not set(parts).issuperset(PARTS[:3]):
            wrong.append(f"{name} has the parts {parts}, not {PARTS}, of which the first three are needed")
        if "Status" in parts and not STATUS.fullmatch(decision.status):
            wrong.append(f"the status of {name} is not understood: {decision.status!r}")
        if astray := [later for later in decision.successors if later not in known or int(later[1:]) <= number]:
            wrong.append(f"{name} is superseded by {', '.join(astray)}, which is no later decision")
    return wrong


def test_every_rule_and_decision_that_is_cited_is_there() -> None:
    """A reader who follows a number finds what it stands for, and is sent to no document that is not here."""
    rules = numbers(PROTOCOL.read_text(encoding="utf-8"))
    known = {decision.number for decision in decisions(chapters())}
    assert len(known) > 100
    texts = {path: path.read_text(encoding="utf-8") for path in tracked(*TEXTS)}
    found = {str(path.relative_to(ROOT)): uncited(text, rules, known) for path, text in texts.items()}
    assert {name: missing for name, missing in found.items() if missing} == {}


def test_every_decision_has_a_status_and_its_parts() -> None:
    """A reader sees of each decision whether it still holds, and which one took its place."""
    assert faults(decisions(chapters())) == []


def test_the_index_names_every_decision() -> None:
    """The index has one line for each decision, in the order of their numbers, as the chapters have it."""
    lines = (DECISIONS / "README.md").read_text(encoding="utf-8").splitlines()
    found = [line for line in lines if line.startswith("| [D")]
    assert found == [index_line(each) for each in sorted(decisions(chapters()), key=lambda each: int(each.number[1:]))]


def test_every_link_leads_somewhere() -> None:
    """Links within the repository name files that are there, and headings that these have."""
    found = {page: links_astray(page, page.read_text(encoding="utf-8")) for page in tracked(".md")}
    assert {str(page.relative_to(ROOT)): astray for page, astray in found.items() if astray} == {}


@pytest.mark.parametrize(
    ("text", "missing"),
    [("as it must be (R2, R2.1, D7)", set()), ("R99 says", {"R99"}), ("(R2.12)", {"R2.12"}), ("see R2.1.", set()),
     ("D300 says", {"D300"}), ("DESIGN 5", {"DESIGN"})],
)  # fmt: skip
def test_a_citation_of_nothing_is_seen(text: str, missing: set[str]) -> None:
    """The check of citations accepts those that exist and names the others."""
    assert uncited(text, {"R2", "R2.1"}, {"D7"}) == missing


ENTRY = "# Chapter\n\n## D3. It is so\n\n**Status.** {}\n\n**Context.** It was not.\n\n**Decision.** So it is.\n"
LATER = "\n## D4. It is more so\n\n**Status.** Accepted.\n\n**Context.** It was.\n\n**Decision.** More.\n"


@pytest.mark.parametrize("status", ["Accepted.", "Superseded by D4.", "Partly superseded by D4 (more)."])
def test_a_decision_is_read(tmp_path: Path, status: str) -> None:
    """A sound entry has no fault, and its line in the index links to its heading."""
    page = tmp_path / "chapter.md"
    page.write_text(ENTRY.format(status) + LATER)
    found = decisions([page])
    assert faults(found) == []
    word = status.removesuffix(".").replace(" (more)", "").lower().replace("d4", "D4")
    assert index_line(found[0]) == f"| [D3](chapter.md#d3-it-is-so) | It is so | {word} | Chapter |"
    assert links_astray(page, index_line(found[0])) == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (ENTRY.format("Perhaps."), "the status of D3 is not understood: 'Perhaps.'"),
        (ENTRY.format("Partly superseded by D4."), "is not understood"),
        (ENTRY.format("Superseded by D9."), "superseded by D9, which is no later decision"),
        (ENTRY.format("Superseded by D3."), "superseded by D3, which is no later decision"),
        (ENTRY.replace("**Status.** {}\n\n", ""), "has the parts ('Context', 'Decision')"),
        (ENTRY.format("Accepted.") + "\n**Rejected.** No.\n\n**Context.** Again.\n", "has the parts"),
        (ENTRY.format("Accepted.") + LATER.replace("D4", "D3"), "D3 stands twice"),
    ],
)
def test_a_fault_of_a_decision_is_seen(tmp_path: Path, text: str, fault: str) -> None:
    """Each kind of fault is named, and no other one with it."""
    page = tmp_path / "chapter.md"
    page.write_text(text if "by D4" not in text else text + LATER)
    (found,) = faults(decisions([page]))
    assert fault in found


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

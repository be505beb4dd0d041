"""What the texts cite is in the repository: rules, decisions, files and headings that links name."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from repository import ROOT
from rulebook import PROTOCOL, numbers

RULE, DECISION = re.compile(r"\bR\d+(?:\.\d+)?\b"), re.compile(r"\bD[1-9]\d{0,2}\b")
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
TEXTS = (".py", ".md", ".toml", ".yaml", "Makefile", ".ci/run")
ABSENT = re.compile(r"\bDESIGN(?:'s)?\b")  # of a document that the repository does not have


def tracked(*endings: str) -> list[Path]:
    """Return the tracked files of these endings, but for this one, whose patterns cite nothing."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = [ROOT / name for name in listed.split("\0") if name.endswith(endings)]
    return [path for path in names if path.is_file() and path != Path(__file__).resolve()]


def anchors(text: str) -> set[str]:
    """Return what links call the headings of a page: in lower case, words joined by dashes."""
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def uncited(text: str, rules: set[str], decisions: set[str]) -> set[str]:
    """Return the rules, clauses and decisions that a text cites and the lists lack, and documents that are not here."""
    return (set(RULE.findall(text)) - rules) | (set(DECISION.findall(text)) - decisions) | set(ABSENT.findall(text))


def links_astray(page: Path, text: str) -> list[str]:
    """Return the links of a page that lead to no file, or to no heading of one."""
    astray = []
    for name, heading in LINK.findall(text):
        target = page.parent / name if name else page
        if not target.exists() or (heading and heading not in anchors(target.read_text(encoding="utf-8"))):
            astray.append(f"{name}#{heading}" if heading else name)
    return astray


def test_every_rule_and_decision_that_is_cited_is_there() -> None:
    """A reader who follows a number finds what it stands for, and is sent to no document that is not here."""
    rules = numbers(PROTOCOL.read_text(encoding="utf-8"))
    pages = [*(ROOT / "docs/decisions").glob("*.md"), ROOT / "memstore/DECISIONS.md"]
    headings = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    decisions = set(re.findall(r"^## (D\d+)\.", headings, re.MULTILINE))
    assert len(decisions) > 100
    texts = {path: path.read_text(encoding="utf-8") for path in tracked(*TEXTS)}
    found = {str(path.relative_to(ROOT)): uncited(text, rules, decisions) for path, text in texts.items()}
    assert {name: missing for name, missing in found.items() if missing} == {}


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
    """The look at citations takes what is there and names what is not."""
    assert uncited(text, {"R2", "R2.1"}, {"D7"}) == missing


def test_a_link_astray_is_seen(tmp_path: Path) -> None:
    """A link to no file, and one to no heading, are named; one to a heading that is there is not."""
    page = tmp_path / "page.md"
    page.write_text("# Faults: noticed and `recovered`\n")
    text = "[a](gone.md) [b](#faults-noticed-and-recovered) [c](page.md#faults) [d](https://example.org/x)"
    assert links_astray(page, text) == ["gone.md", "page.md#faults"]

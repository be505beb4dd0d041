"""Private words stay out of prose, names and file names; the glossary has the words to use."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = ("placement", "recovery", "memstore")
OTHER_CODE = ("tests", "examples")
GLOSSARY = ROOT / "docs" / "glossary.md"
HISTORY = ROOT / "docs" / "decisions"  # says what things were called when
GENERATED = ROOT / "docs" / "internals" / "wire.md"  # from docstrings, which are looked at, and names of types
UNUSED = "## Words that are not used"  # the glossary's table of them: the one list

# Where another project's word stands, or a text whose change would deal every recorded seed anew.
FOREIGN = {
    "hollow": ("adapters/megatron", "test_adapter_megatron", "benchmarks/peers"),  # Megatron's own word
    "natural": ("simulator/rank/dealing.py",),
    "twins": ("simulator/world/scenario.py",),
    "shelf": ("test_store_settings.py",),  # a level of failure domains
    "catalog": ("test_benchmarks_scale.py",),  # a benchmark whose records are kept under this name
    "catalogs": ("test_benchmarks_scale.py",),
}
CODE_IN_TEXT = re.compile(r"`[^`\n]*`|\{[^{}\n]*\}|\]\([^)\n]*\)")  # names in backticks, values in f-strings, links


@cache
def words() -> dict[str, str]:
    """Return the words that are not used, each with what to write."""
    found = {}
    for line in GLOSSARY.read_text(encoding="utf-8").partition(UNUSED)[2].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and len(cells) == 2 and cells[0] != "not":
            found.update(dict.fromkeys(cells[0].split(", "), cells[1]))
    return found


@cache
def pattern(is_name: bool) -> re.Pattern[str]:
    """Return the pattern of all words: in prose, or as a part of a name."""
    one = "|".join(re.escape(word) for word in sorted(words(), key=len, reverse=True) if not (is_name and " " in word))
    return re.compile(rf"(?:^|_)({one})(?=_|$)" if is_name else rf"(?<![\w-])({one})(?![\w-])", re.IGNORECASE)


def prose_of(source: str) -> Iterator[tuple[int, str]]:
    """Yield the comments and sentences of a module by line. A string without a blank is a key or a name, no prose."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_text = token.type == tokenize.STRING or tokenize.tok_name[token.type] == "FSTRING_MIDDLE"
        if token.type == tokenize.COMMENT or (is_text and " " in token.string.strip()):
            yield from enumerate(CODE_IN_TEXT.sub("", token.string).split("\n"), token.start[0])


def names_of(source: str) -> Iterator[tuple[int, str]]:
    """Yield the identifiers of a module by line, with classes' names split into words."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME:
            yield token.start[0], re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", token.string).replace("__", "_")


def page_of(text: str) -> Iterator[tuple[int, str]]:
    """Yield a page's lines without what is quoted as code."""
    for number, line in enumerate(text.split("\n"), 1):
        yield number, CODE_IN_TEXT.sub("", line)


def private_words(lines: Iterator[tuple[int, str]], name: str, *, is_name: bool = False) -> list[str]:
    """Return "file:line: word: what to write" for every word that is not used."""
    return [
        f"{name}:{number}: {found.group(1)!r}: write {words()[found.group(1).lower()]}"
        for number, line in lines
        for found in pattern(is_name).finditer(line)
        if not any(part in name for part in FOREIGN.get(found.group(1).lower(), ()))
    ]


def modules(*tops: str) -> list[Path]:
    return [path for top in tops for path in sorted((ROOT / top).rglob("*.py")) if path != Path(__file__)]


def pages() -> list[Path]:
    found = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    found += [path for top in CODE for path in (ROOT / top).rglob("*.md")]
    return sorted(path for path in found if HISTORY not in path.parents and path not in (GENERATED, GLOSSARY))


def test_the_glossary_names_words_that_are_not_used() -> None:
    """The one list of them is found, and no word of it is explained as one to use."""
    text = GLOSSARY.read_text(encoding="utf-8").partition(UNUSED)[0]
    used = {line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")}
    assert len(words()) > 50
    assert used.isdisjoint(words())


def test_comments_and_texts_have_no_private_words() -> None:
    """A stranger reads docstrings, comments, errors and log lines without a dictionary of ours."""
    found = []
    for path in modules(*CODE, *OTHER_CODE):
        found += private_words(prose_of(path.read_text(encoding="utf-8")), str(path.relative_to(ROOT)))
    assert found == []


def test_names_have_no_private_words() -> None:
    """Classes, functions, attributes and variables have the field's names."""
    found = []
    for path in modules(*CODE, *OTHER_CODE):
        lines = names_of(path.read_text(encoding="utf-8"))
        found += private_words(lines, str(path.relative_to(ROOT)), is_name=True)
    assert found == []


def test_pages_have_no_private_words() -> None:
    """README, manual, protocol and the rooms' pages are held to the same words."""
    found = []
    for path in pages():
        found += private_words(page_of(path.read_text(encoding="utf-8")), str(path.relative_to(ROOT)))
    assert found == []


def test_names_of_files_have_no_private_words() -> None:
    """A file is found by the word that the field has for what it does."""
    found = []
    for path in modules(*CODE, *OTHER_CODE):
        found += private_words(iter([(0, path.stem)]), str(path.relative_to(ROOT)), is_name=True)
    assert found == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('"""Whoever asks is told."""\n', ["'Whoever'", "'told'"]),
        ("x = 1  # nobody asks `told`\n", ["'nobody'"]),
        ('log(f"{told} of {shelf}")\n', []),
        ('raise ValueError(f"host {host} was put anew")\n', ["'anew'"]),
        ('told = row["told"]\nhurt: set[str] = set()\n', []),
        ('"""One.\n\nTwo, and the herald of it.\n"""\n', ["m.py:3: 'herald'"]),
    ],
)
def test_a_private_word_is_seen_in_prose(source: str, found: list[str]) -> None:
    """The search sees every kind of prose, with its line; keys and identifiers are another test's."""
    seen = private_words(prose_of(source), "m.py")
    assert len(seen) == len(found)
    assert all(part in line for part, line in zip(found, seen, strict=True))


def test_a_private_word_is_seen_in_a_name() -> None:
    """In any of its parts, whether they are joined by underscores or by capitals; not inside of another word."""
    source = "class TwinsHeld:\n    seat_count = retold\n\ndef is_told(): ...\n"
    seen = private_words(names_of(source), "m.py", is_name=True)
    assert [line.split(": write")[0] for line in seen] == ["m.py:1: 'Twins'", "m.py:2: 'seat'", "m.py:4: 'told'"]


def test_a_page_may_quote_code() -> None:
    """Names of code stand in backticks."""
    assert private_words(page_of("The `vault` of `a.py`.\n"), "p.md") == []
    assert len(private_words(page_of("\nThe vault.\n"), "p.md")) == 1

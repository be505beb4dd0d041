"""Private words stay out of prose; each has the plain word to use."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = ("placement", "recovery", "memstore")
HISTORY = ROOT / "docs" / "decisions"  # says what things were called when
GENERATED = ROOT / "docs" / "internals" / "wire.md"  # from docstrings, which are looked at, and names of types

# A private word, as a pattern of whole words, and what to write. A word is listed once the prose is free of it.
WORDS = {
    "whoever": "name the actor: the rank, the holder, the caller",
    "whatever": "any, or the things themselves",
    "nobody": "no rank, no holder, no caller; or say it positively",
    "somebody|anybody|everybody|someone|anyone": "the rank, a process, all hosts",
    "happenings?": "event",
    "chronicles?": "event ring",
    "excerpts?": "partial read",
    "no one": "no rank, no holder, no caller",
    "anew": "again",
    "hears?|heard": "gets, receives, learns",
    "told": "sent, notified, reported, ordered",
    "vaults?": "replica store",
    "shelf|shelves|shelved": "replica index; stored",
    "heralds?": "notifier",
    "lendings?|unlend|lend|lends|lent": "offer, withdraw",
    "goodbyes?|farewells?": "`bye`, the message",
    "condemn|condemns|condemned": "quarantine",
    "hurts?": "damages, harms",
    "mend|mends|mended|mending": "repair, fix",
}  # fmt: skip
PRIVATE = {word: re.compile(rf"(?<![\w-])(?:{word})(?![\w-])", re.IGNORECASE) for word in WORDS}
CODE_IN_TEXT = re.compile(r"`[^`\n]*`|\{[^{}\n]*\}")  # names in backticks, values in f-strings
FILE_NAMES = {word: re.compile(rf"(?:^|_)(?:{word})(?:_|\.|$)") for word in WORDS}


def prose_of(source: str) -> Iterator[tuple[int, str]]:
    """Yield the comments and sentences of a module by line. A string without a blank is a key or a name, no prose."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_text = token.type == tokenize.STRING or tokenize.tok_name[token.type] == "FSTRING_MIDDLE"
        if token.type == tokenize.COMMENT or (is_text and " " in token.string.strip()):
            yield from enumerate(CODE_IN_TEXT.sub("", token.string).split("\n"), token.start[0])


def page_of(text: str) -> Iterator[tuple[int, str]]:
    """Yield a page's lines without what is quoted as code."""
    for number, line in enumerate(text.split("\n"), 1):
        yield number, CODE_IN_TEXT.sub("", line)


def private_words(lines: Iterator[tuple[int, str]], name: str) -> list[str]:
    """Return "file:line: word: what to write" for every private word."""
    return [
        f"{name}:{number}: {found.group()!r}: write {WORDS[word]}"
        for number, line in lines
        for word, pattern in PRIVATE.items()
        for found in pattern.finditer(line)
    ]


def modules() -> list[Path]:
    return [path for top in CODE for path in sorted((ROOT / top).rglob("*.py"))]


def pages() -> list[Path]:
    found = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    found += [path for top in CODE for path in (ROOT / top).rglob("*.md")]
    return sorted(path for path in found if HISTORY not in path.parents and path != GENERATED)


def test_comments_and_texts_have_no_private_words() -> None:
    """A stranger reads docstrings, comments, errors and log lines without a dictionary of ours."""
    found = []
    for path in modules():
        found += private_words(prose_of(path.read_text(encoding="utf-8")), str(path.relative_to(ROOT)))
    assert found == []


def test_pages_have_no_private_words() -> None:
    """README, manual, protocol and the rooms' pages are held to the same words."""
    found = []
    for path in pages():
        found += private_words(page_of(path.read_text(encoding="utf-8")), str(path.relative_to(ROOT)))
    assert found == []


def test_names_of_files_have_no_private_words() -> None:
    """A file is found by the word that the field has for what it does."""
    found = [
        f"{path.relative_to(ROOT)}: {word!r}: write {WORDS[word]}"
        for path in modules()
        for word, pattern in FILE_NAMES.items()
        if pattern.search(path.name)
    ]
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
def test_a_private_word_is_seen_in_prose_alone(source: str, found: list[str]) -> None:
    """The search sees every kind of prose, with its line; keys and identifiers are the renames' business."""
    seen = private_words(prose_of(source), "m.py")
    assert len(seen) == len(found)
    assert all(part in line for part, line in zip(found, seen, strict=True))


def test_a_page_may_quote_code() -> None:
    """Names of code stand in backticks until they are renamed."""
    assert private_words(page_of("The `vault` of `a.py`.\n"), "p.md") == []
    assert len(private_words(page_of("\nThe vault.\n"), "p.md")) == 1

"""Every promise of the threat model, docs/operate/security.md, names tests that exist."""

from __future__ import annotations

import re

from repository import ROOT


def test_every_promise_names_its_tests() -> None:
    """Each row of the table of promises has a test, each test that is named is there, and the README leads here."""
    text = (ROOT / "docs/operate/security.md").read_text(encoding="utf-8")
    promises = text.partition("## What we promise")[2].partition("\n## ")[0]
    rows = [line for line in promises.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 8
    assert all("`test_" in row for row in rows)
    named = set(re.findall(r"`(test_\w+)`", text))
    written = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    }
    assert named - written == set()
    assert "(docs/operate/security.md)" in (ROOT / "README.md").read_text(encoding="utf-8")

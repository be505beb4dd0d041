"""The name of the distribution: ours alone, and no text tells a user to install another project's package."""

from __future__ import annotations

import re
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest
from repository import ROOT

import memstore.distribution
from memstore.distribution import DISTRIBUTION, installed_version

# What pip takes for the package of that name: `memstore`, `memstore[extra]`, `memstore==1`, but no path or import name.
INSTALL = re.compile(r"(?:pip install|requirements?:?)[^\n#]*[\s'\"]memstore(?![\w./-])")


def test_the_distribution_is_named_once() -> None:
    """pyproject.toml and the code agree, and the name is not the one that another project has on PyPI."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert re.findall(r'^name = "(.*)"$', text, re.MULTILINE) == [DISTRIBUTION]
    assert DISTRIBUTION != "memstore"
    assert installed_version() == version(DISTRIBUTION)


def test_a_bare_source_tree_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an installed distribution the version is unknown, never that of another project's `memstore`."""
    monkeypatch.setattr(memstore.distribution, "DISTRIBUTION", "ray-memstore-absent")
    assert installed_version() == "unknown"


def test_no_text_installs_the_other_project() -> None:
    """Docs, errors, the cluster file and CI never install `memstore` by name."""
    assert INSTALL.search("pip install 'memstore[objects]'")
    assert INSTALL.search("pip install --quiet torch==2.13.0 memstore")
    assert not INSTALL.search("pip install ~/memstore-source")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = {Path(name) for name in listed.split("\0") if name and not name.endswith(".json")}
    found = []
    for name in sorted(names - {Path("tests/house/test_distribution.py")}):
        lines = (ROOT / name).read_text(encoding="utf-8", errors="replace").splitlines()
        found += [f"{name}:{number}: {line}" for number, line in enumerate(lines, 1) if INSTALL.search(line)]
    assert not found

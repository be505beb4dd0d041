"""The manual as a site: links out of docs/ lead to copies in the site, and every external link is well formed.

`make docs` builds the site and checks every link and anchor of it; links in a checkout: test_citations.py.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml
from repository import ROOT
from test_citations import tracked

EXTERNAL = re.compile(r"(?<![\w`])(https?://[^\s)>`\"'\]|]+)")
pytest.importorskip("mkdocs")
_spec = importlib.util.spec_from_file_location("docs_hook", ROOT / "docs" / "hook.py")
assert _spec is not None
assert _spec.loader is not None
hook = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(hook)


def malformed(text: str) -> list[str]:
    """Return the external links of a text that are no https address of a host with a dot."""
    links = [link.rstrip(".,;:") for link in EXTERNAL.findall(text)]
    return [link for link in links if urlsplit(link).scheme != "https" or "." not in (urlsplit(link).hostname or "")]


def test_external_links_are_well_formed() -> None:
    """Nothing is asked: no test needs another host."""
    found = {str(page.relative_to(ROOT)): malformed(page.read_text(encoding="utf-8")) for page in tracked(".md")}
    assert {page: links for page, links in found.items() if links} == {}
    assert malformed("[a](http://example.org/x), https://example.org, https://nowhere/x") == [
        "http://example.org/x", "https://nowhere/x",
    ]  # fmt: skip


def test_every_page_is_in_the_sites_menu() -> None:
    """Decisions have a page of their own that lists them."""
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    listed = set(re.findall(r"([\w/-]+\.md)", nav))
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert {page for page in pages if not page.startswith("decisions/")} - listed == set()
    assert listed - pages == set()
    assert yaml.safe_load(f"nav:{nav}")["nav"]


@pytest.mark.parametrize(
    ("page", "target", "place"),
    [
        ("docs/README.md", "../README.md", "repository/README.md"),
        ("docs/guide/dcp.md", "elastic.md", "guide/elastic.md"),
        ("docs/guide/dcp.md", "../../memstore/client/dcp/CASES.md", "repository/memstore/client/dcp/CASES.md"),
        ("docs/guide/dcp.md", "../../examples/torchrun.py", "repository/examples/torchrun.py.md"),
        ("benchmarks/README.md", "results", "repository/benchmarks/results/index.md"),
        ("benchmarks/README.md", "plots/wire.svg", "repository/benchmarks/plots/wire.svg"),
        ("README.md", "docs/concepts.md", "concepts.md"),
    ],
)
def test_a_link_leads_to_the_sites_copy(page: str, target: str, place: str) -> None:
    """Pages of docs/ as they are, all else below repository/."""
    assert hook.in_site(hook.in_repository(page, target)) == place


def test_a_link_out_of_the_repository_is_refused() -> None:
    """It would work on one machine only."""
    with pytest.raises(ValueError, match="outside the repository"):
        hook.in_repository("docs/README.md", "../../elsewhere.md")


def test_code_is_no_link() -> None:
    """What stands in a block or a span stays as it is."""
    text = "[a](x.md) `[b](y.md)`\n```\n[c](z.md)\n```\n[d](https://example.org) [e](#here)\n"
    assert list(hook.links_of(text)) == ["x.md"]


def test_a_copy_of_source_is_a_page_and_a_folder_is_a_list() -> None:
    """So that a reader of the site sees what a link names."""
    assert hook.copy_of("examples/torchrun.py").startswith("# examples/torchrun.py\n\n````python\n")
    assert "- `wire.json`" in hook.copy_of("benchmarks/results")
    assert Path(hook.ROOT) == ROOT

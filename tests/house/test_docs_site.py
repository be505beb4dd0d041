"""The manual as a site: links out of docs/ lead to copies in the site, and every external link is well formed.

`make docs` builds the site and checks every link and anchor of it; links in a checkout: test_citations.py.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import markdown
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
        "http://example.org/x",
        "https://nowhere/x",
    ]


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
        ("benchmarks/README.md", "results/records.json", "repository/benchmarks/results/records.json"),
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
    assert "- `records.json`" in hook.copy_of("benchmarks/results")
    assert Path(hook.ROOT) == ROOT


def test_an_option_without_a_default_has_none_on_the_site() -> None:
    """click 8.3 has an object for it, whose name mkdocs-click prints."""
    source = "::: mkdocs-click\n    :module: memstore.cli\n    :command: main\n    :style: table\n    :depth: 2\n"
    html = markdown.markdown(source, extensions=["mkdocs-click", "tables"])
    shown = hook.on_page_content(html, page_of("operate/cli.md"), None, None)
    assert "--keep-steps" in shown
    assert "UNSET" not in shown


def test_the_pages_of_the_interface_have_no_rule_numbers() -> None:
    """They are for who changes the code; what a docstring names as a file of the manual is a link."""
    text = "<p>Join a job (R20). As R7 says (R4, D161), see docs/operate/troubleshooting.md.</p>"
    shown = hook.on_page_content(text, page_of("reference/api.md"), None, None)
    link = '<a href="../operate/troubleshooting.html#errors">troubleshooting</a>'
    assert shown == f"<p>Join a job. As R7 says, see {link}.</p>"


def page_of(place: str) -> Any:
    """A page of the site, as the hook is given it."""
    return SimpleNamespace(file=SimpleNamespace(src_uri=place))


# Public members that no page names and a user may want all the same.
BESIDES = {
    "is_over",
    "fraction",
    "has_failed",
    "is_ready",
    "shared_shard",
    "to_dict",
    "on_exception",
    "on_fit_start",
    "find_latest",
    "on_train_batch_end",
    "on_train_start",
    "on_step_end",
    "on_train_begin",
    "teardown",
}


def members(target: str) -> set[str]:
    """Return the methods and properties that the site shows of a directive's class, or of a module's classes."""
    module, _, name = target.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name, None) or importlib.import_module(target)
    except ImportError as error:
        if (error.name or "").startswith("memstore"):
            raise
        return set()  # an adapter of a framework that is not installed here
    classes = [found] if inspect.isclass(found) else []
    if inspect.ismodule(found):
        classes = [
            c for c in vars(found).values() if inspect.isclass(c) and c.__module__ == target and c.__name__[0] != "_"
        ]
    return {
        key
        for c in classes
        for key, value in vars(c).items()
        if inspect.isfunction(value) or isinstance(value, property)
    }


def test_the_page_of_the_interface_shows_what_users_call() -> None:
    """mkdocs.yml leaves out what only memstore's own parts call; what it shows is named by a page."""
    filters = re.findall(r'^ {14}- "!(.*)"$', (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(filters) > 1
    pages = [
        *(ROOT / "docs" / "guide").glob("*.md"),
        *(ROOT / "docs" / "operate").glob("*.md"),
        ROOT / "docs/concepts.md",
    ]
    pages += [ROOT / "README.md", ROOT / "docs/reference/config.md", *(ROOT / "examples").glob("*.py")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    directives = re.findall(r"^::: (\S+)", (ROOT / "docs/reference/api.md").read_text(encoding="utf-8"), re.MULTILINE)
    shown = {key for target in directives for key in members(target) if not any(re.search(f, key) for f in filters)}
    assert {"put", "get", "wait_newer", "wait"} <= shown
    assert {key for key in shown - BESIDES if not re.search(rf"\b{key}\b", text)} == set()

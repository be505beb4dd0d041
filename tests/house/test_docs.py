"""The manual says what the code says: generated parts, errors, settings, public names, the functions of the tour."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import re
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
from repository import ROOT

import memstore
from memstore import errors
from memstore.config import Config

README_LINES_MAX = 200
DOCS = ROOT / "docs"


def tool(name: str) -> ModuleType:
    """Return a script of docs/, which is no package, as a module."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GENERATE = tool("generate")


def page(name: str) -> str:
    """Return the text of a page of the manual."""
    return (DOCS / name).read_text(encoding="utf-8")


def test_the_readme_is_short() -> None:
    """A newcomer reads it in five minutes; the rest is in docs/."""
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= README_LINES_MAX


@pytest.mark.parametrize("path", [path for path in GENERATE.pages() if "<!-- generated:" in path.read_text()], ids=str)
def test_generated_parts_are_current(path: Path) -> None:
    """After a change of a setting, or of the rooms: `python docs/generate.py`, and commit the page."""
    text = path.read_text(encoding="utf-8")
    assert GENERATE.written(text) == text


def test_every_generated_part_stands_in_one_page() -> None:
    """None is generated for nothing."""
    found = [name for path in GENERATE.pages() for name in GENERATE.PART.findall(path.read_text(encoding="utf-8"))]
    assert sorted(found) == sorted(GENERATE.PARTS)


def test_every_setting_says_what_it_does() -> None:
    """Each field of Config has a comment, which becomes its line in the table."""
    comments = GENERATE.field_comments()
    assert [field.name for field in dataclasses.fields(Config) if len(comments.get(field.name, "")) < 10] == []


def test_every_error_has_a_cause_and_a_remedy() -> None:
    """In the order of errors.py, with what to do about each."""
    tree = ast.parse(Path(errors.__file__).read_text(encoding="utf-8"))
    defined = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    sections = re.split(r"^### ", page("operate/troubleshooting.md"), flags=re.MULTILINE)[1:]
    assert [section.split()[0] for section in sections] == defined
    for section in sections:
        cause, remedy = re.findall(r"^- \*\*(?:Cause|Remedy)\.\*\* (.*)$", section, re.MULTILINE)
        assert len(cause) > 20, section
        assert len(remedy) > 10, section


def test_every_public_name_has_its_docstring_on_the_page() -> None:
    """Errors have a page of their own."""
    text = page("reference/api.md")
    own_page = {name for name in memstore.__all__ if name in vars(errors)} | {"errors", "__version__"}
    assert {f"memstore.{name}" for name in memstore.__all__ if name not in own_page} == set(
        re.findall(r"^## (memstore\.\w+)$", text, re.MULTILINE)
    )
    for place in re.findall(r"^::: (\S+)$", text, re.MULTILINE):
        assert is_defined(*split(place)), place


def split(place: str) -> tuple[Path, str]:
    """Return the file and the name in it of a dotted place."""
    parts = place.split(".")
    for end in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:end]).with_suffix(".py")
        if path.exists():
            return path, ".".join(parts[end:])
    raise AssertionError(f"{place} is in no file")


@cache
def names_of(path: Path) -> frozenset[str]:
    """Return the functions, classes and methods of a file: "Store", "Store.put", "connect"."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {
                f"{node.name}.{part.name}"
                for part in node.body
                if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)
            }
    return frozenset(found)


def is_defined(path: Path, name: str) -> bool:
    """Return whether a file has a function, class or method of this name; "" is the file itself."""
    return not name or name in names_of(path)


def cited(text: str) -> list[tuple[str, str]]:
    """Return the files and functions that a table names: | `client/store.py` | `Store.put` | ..."""
    return re.findall(r"^\| `([\w/]+\.py)` \| `([\w.]+)` \|", text, re.MULTILINE)


def astray(text: str) -> list[str]:
    """Return the functions that a table names and that are not where it says."""
    found = []
    for file, name in cited(text):
        base = ROOT if file.split("/")[0] in ("placement", "recovery") else ROOT / "memstore"
        if not (base / file).is_file() or not is_defined(base / file, name):
            found.append(f"{file} {name}")
    return found


def test_every_function_of_the_tour_is_where_it_says() -> None:
    """A reader who follows the tour finds each one."""
    text = page("internals/source-tour.md")
    assert len(cited(text)) > 50
    assert astray(text) == []
    files = re.findall(r"`((?:\w+/)*\w+\.py)`", text)
    assert [file for file in files if not any((base / file).is_file() for base in (ROOT, ROOT / "memstore"))] == []


def test_a_function_that_is_not_there_is_seen() -> None:
    """One that was renamed, and one whose file moved."""
    there = "| `client/store.py` | `Store.put` | |"
    rows = f"{there}\n| `client/store.py` | `Store.gone` | |\n| `client/gone.py` | `f` | |\n"
    assert astray(rows) == ["client/store.py Store.gone", "client/gone.py f"]

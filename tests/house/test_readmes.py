"""Every room has a README that is read in a minute: at most 40 lines, and it names every file of its folder."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest
from repository import ROOT
from test_rooms import DRAWN, README_LINES_MAX

PAGES = ("simulator", "nemesis")  # rooms whose README has more to tell than what its files have
ROOMS = (
    *(
        f"memstore/{name}"
        for name in ("admin", "adapters", "cli", "client", "client/dcp", "demo", "exchange", "grafana")
    ),
    *(f"memstore/{name}" for name in ("", "core", "shell")),
    *(f"benchmarks/{name}" for name in ("cases", "gpu", "notes", "peers", "report", "rigs")),
    *(f"tests/{name}" for name in ("drills", "house", "integration", "on_ray", "rig", "simulator", "support", "unit")),
    "memstore/drills",
    *(f"{package.replace('.', '/')}/{room}" for package, rooms in DRAWN.items() for room in rooms if room not in PAGES),
)
UNSAID = ("__init__.py", "README.md", "py.typed")


def lacking(folder: Path, text: str) -> list[str]:
    """Return what is wrong with a folder's README: its length, files that it does not name, names of no file."""
    lines = len(text.splitlines())
    found = [f"{lines} lines, at most {README_LINES_MAX}"] if lines > README_LINES_MAX else []
    here = {path.name for path in folder.iterdir() if path.is_file() and path.name not in UNSAID}
    here = {name for name in here if not name.endswith(".so")}  # built
    here |= {f"{path.name}/" for path in folder.iterdir() if path.is_dir() and any(path.glob("**/*.py"))}
    named = re.findall(r"`([^`\s]+)`", text)  # `scenes_*.py` names a family
    found += [f"`{name}` is not named" for name in sorted(here) if not any(fnmatch(name, each) for each in named)]
    rows = set(re.findall(r"^\| `([\w.-]+(?:/|\.\w+))` \|", text, re.MULTILINE))
    return found + [f"`{name}` is not here" for name in sorted(rows - here) if not (folder / name).exists()]


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_has_a_readme_that_names_its_files(room: str) -> None:
    """A file that comes gets its line, one that goes loses it."""
    folder = ROOT / room
    assert lacking(folder, (folder / "README.md").read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("part", ["core", "shell"])
def test_a_readme_names_the_rooms_that_its_room_may_import(part: str) -> None:
    """As test_rooms.py draws them."""
    for room, below in DRAWN[f"memstore.{part}"].items():
        text = (ROOT / "memstore" / part / room / "README.md").read_text(encoding="utf-8")
        [line] = re.findall(r"^May import: (.*)$", text, re.MULTILINE)
        assert set(re.findall(r"`(\w+)`", line)) - {part} == set(below.split()), f"{part}/{room}: {line}"


def test_what_a_readme_lacks_is_seen(tmp_path: Path) -> None:
    """A file without a line, a line without a file, and too many lines."""
    for name in ("a.py", "b.py", "__init__.py"):
        (tmp_path / name).touch()
    text = "# room\n\n| file | what |\n|---|---|\n| `a.py` | one |\n| `gone.py` | two |\n"
    assert lacking(tmp_path, text) == ["`b.py` is not named", "`gone.py` is not here"]
    assert lacking(tmp_path, "\n" * 41)[0] == "41 lines, at most 40"

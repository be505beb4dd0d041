"""Rooms and arrows: which sub-package may import which, no circles between files, no crowded folder.

Imports under TYPE_CHECKING count: a file that names a type depends on it. A room imports itself and what is drawn above
it. test_architecture.py has the arrows between the top-level rooms.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest
from repository import ROOT

FOLDER_FILES_MAX = 25
DOCSTRING_LINES = range(3, 21)

# A room and the rooms that it may import beside itself: always some that stand above it in the list.
CORE: dict[str, str] = {
    "format": "",
    "wire": "",
    "arena": "format wire",
    "send_gate": "wire",
    "schedule": "",
    "forecast": "schedule",
    "cluster": "schedule wire",
    "journal": "cluster format wire",
    "targets": "cluster journal wire",
    "capacity": "cluster journal targets wire",
    "commits": "capacity cluster journal schedule targets wire",
    "repair": "capacity cluster commits targets wire",
    "durable": "capacity cluster commits format schedule targets wire",
    "holder": "arena cluster durable format journal wire",
    "attempts": "cluster durable journal targets wire",
    "restore": "capacity cluster durable journal repair targets wire",
    "history": "attempts capacity cluster durable journal restore targets wire",
    "report": "attempts capacity cluster commits durable history journal repair restore schedule targets wire",
    "controller": ("attempts capacity cluster commits durable history journal repair report restore targets wire"),
    "salvage": "arena cluster controller format journal",
}
SHELL: dict[str, str] = {
    "threads": "",
    "identity": "",
    "native": "",
    "tensors": "native threads",
    "net": "native",
    "arena": "identity native threads",
    "device": "arena native tensors threads",
    "codec": "device native tensors threads",
    "durable": "",
    "page": "",
    "rank": "arena codec device identity net tensors threads",
    "peer": "arena net threads",
    "holder": "arena durable identity native net peer threads",
    "controller": "net",
    "on_ray": "arena controller durable holder identity net rank",
}
DRILLS: dict[str, str] = {
    "model": "",
    "ranks": "",
    "sites": "model ranks",
    "scenes": "model ranks sites",
    "run": "model ranks scenes sites",
}
TESTING: dict[str, str] = {
    "faults": "",
    "clusters": "faults",
    "ranks": "clusters",
    "fuzz": "",
    "simulator": "faults",
    "controller": "simulator",
    "nemesis": "clusters faults ranks",
}
SIMULATOR: dict[str, str] = {
    "world": "",
    "checks": "world",
    "rank": "checks world",
    "host": "checks world",
    "run": "checks host rank world",
    "planted": "host rank run world",
}
BENCHMARKS: dict[str, str] = {
    "report": "",
    "rigs": "report",
    "cases": "report rigs",
    "gpu": "report rigs",
    "peers": "report rigs",
}
DRAWN = {
    "memstore.core": CORE,
    "memstore.shell": SHELL,
    "memstore.drills": DRILLS,
    "memstore.testing": TESTING,
    "memstore.testing.simulator": SIMULATOR,
    "benchmarks": BENCHMARKS,
}


def module_of(path: Path) -> str:
    """Return the dotted name of a file of the repository."""
    return path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")


def entrance(folder: Path, room: str) -> Path:
    """Return the file in which a room begins: a room is a sub-package, or one file."""
    package = folder / room / "__init__.py"
    return package if package.exists() else folder / f"{room}.py"


@cache
def modules(package: str) -> dict[str, Path]:
    """Return module -> file of a package of the repository."""
    return {module_of(path): path for path in sorted((ROOT / package.replace(".", "/")).rglob("*.py"))}


def imports(text: str) -> Iterator[tuple[str, str]]:
    """Yield (module, name in it or "") of what a source imports, wherever the import stands."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((node.module, alias.name) for alias in node.names)


@cache
def imports_of(path: Path) -> frozenset[tuple[str, str]]:
    """Return the imports of a file, which lies in several packages."""
    return frozenset(imports(path.read_text(encoding="utf-8")))


def imported(found: Iterable[tuple[str, str]], known: Collection[str]) -> Iterator[str]:
    """Yield which of the known modules imports name; a package's file is reported from a name in it."""
    for module, name in found:
        whole = f"{module}.{name}"
        target = whole if whole in known else module
        if target in known:
            yield target


@cache
def arrows(package: str) -> dict[str, frozenset[str]]:
    """Return module -> the modules of the package that it imports."""
    found = modules(package)
    return {name: frozenset(imported(imports_of(path), found)) - {name} for name, path in found.items()}


def room_of(module: str, package: str) -> str:
    """Return the room of a module in a package, or "" for the package itself."""
    return module.removeprefix(package).removeprefix(".").split(".")[0]


def undrawn(package: str, rooms: Mapping[str, str]) -> dict[str, set[str]]:
    """Return file -> rooms that it imports and that are not drawn for its own room."""
    found: dict[str, set[str]] = {}
    for module, targets in arrows(package).items():
        room = room_of(module, package)
        for target in targets:
            other = room_of(target, package)
            if room in rooms and other in rooms and other not in (room, *rooms[room].split()):
                path = modules(package)[module].relative_to(ROOT / "memstore").as_posix()
                found.setdefault(path, set()).add(f"{package.removeprefix('memstore.')}.{other}")
    return found


def circles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Return the sets of modules that import one another in a circle, largest first (Tarjan 1972)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    open_: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        open_.append(name)
        for other in graph[name]:
            if other not in order:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in open_:
                low[name] = min(low[name], order[other])
        if low[name] == order[name]:
            at = open_.index(name)
            members = sorted(open_[at:])
            del open_[at:]
            if len(members) > 1:
                found.append(members)

    for name in graph:
        if name not in order:
            visit(name)
    return sorted(found, key=lambda members: (-len(members), members))


@pytest.mark.parametrize("package", DRAWN)
def test_rooms_are_drawn_from_the_ground_up(package: str) -> None:
    """Every sub-package is drawn, and imports only what is drawn above it, as a file does that is a room: no circle."""
    rooms = DRAWN[package]
    folder = ROOT / package.replace(".", "/")
    assert set(rooms) >= {path.parent.name for path in folder.glob("*/__init__.py")}
    assert [room for room in rooms if not entrance(folder, room).exists()] == []
    seen: set[str] = set()
    for room, below in rooms.items():
        assert set(below.split()) <= seen, room
        seen.add(room)


@pytest.mark.parametrize("package", DRAWN)
def test_every_room_is_explained_where_it_begins(package: str) -> None:
    """A stranger reads in half a minute what lives in a room, who calls it and what it must not know."""
    folder = ROOT / package.replace(".", "/")
    lengths = {}
    for room in DRAWN[package]:
        docstring = ast.get_docstring(ast.parse(entrance(folder, room).read_text(encoding="utf-8"))) or ""
        lengths[room] = len(docstring.splitlines())
    assert {room: lines for room, lines in lengths.items() if lines not in DOCSTRING_LINES} == {}


@pytest.mark.parametrize("package", DRAWN)
def test_arrows_are_as_drawn(package: str) -> None:
    """A file imports only rooms that are drawn for its own."""
    assert undrawn(package, DRAWN[package]) == {}


@pytest.mark.parametrize("top", ["placement", "recovery", "memstore", "benchmarks"])
def test_no_files_import_one_another_in_circles(top: str) -> None:
    """Of any length, with the imports for type checking counted."""
    assert circles(arrows(top)) == []


def test_a_circle_is_found() -> None:
    """Of any length, with what leads to it and from it left out."""
    graph = {"a": "b", "b": "c", "c": "b d", "d": "", "e": "f", "f": "g", "g": "e"}
    assert circles({name: targets.split() for name, targets in graph.items()}) == [["e", "f", "g"], ["b", "c"]]


def test_imports_for_type_checking_count() -> None:
    """A name is imported wherever the import stands; a package's file is reported from a name in it."""
    text = "if TYPE_CHECKING:\n    from a.b import c\ndef f():\n    from a import b\n    import a.d\nfrom x import y"
    assert set(imported(imports(text), ["a.b", "a.b.c", "a.d", "a"])) == {"a.b", "a.d", "a.b.c"}


@pytest.mark.parametrize("top", ["placement", "recovery", "memstore", "tests", "benchmarks", "examples"])
def test_no_folder_is_crowded(top: str) -> None:
    """A stranger finds a file by its name among at most 25."""
    folders = [ROOT / top, *(path for path in (ROOT / top).rglob("*") if path.is_dir())]
    counts = {folder.relative_to(ROOT).as_posix(): len(list(folder.glob("*.py"))) for folder in folders}
    assert {folder: count for folder, count in counts.items() if count > FOLDER_FILES_MAX} == {}

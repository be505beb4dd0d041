"""The house rules as a test: import arrows, purity, lengths, names, the drawn tree of errors.

The rules are functions from a source text to a list of complaints, so that the tests below can feed them bad sources.
"""

from __future__ import annotations

import ast
import importlib
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache, lru_cache

import pytest
from repository import ROOT

from memstore import errors
from memstore.errors import MemstoreError

PACKAGES = ("placement", "recovery", "memstore")

# A module imports from its own layer's part or from a lower number, never from a higher one or a sibling.
LAYERS = {
    "placement": 0,
    "recovery": 1,
    "memstore.errors": 2,
    "memstore.distribution": 2,
    "memstore.intervals": 3,
    "memstore.config": 3,
    "memstore.core": 4,
    "memstore.shell": 5,
    "memstore.admin": 6,
    "memstore.client": 7,
    "memstore.inplace": 8,
    "memstore.exchange": 8,
    "memstore.adapters": 9,
    "memstore.cli": 10,
    "memstore.testing": 10,
    "memstore.drills": 11,  # its commands are verbs of the command line
    "memstore.demo": 11,
}
ERRORS_LAYER, CLIENT_LAYER = LAYERS["memstore.errors"], LAYERS["memstore.client"]

PURE = ("placement", "recovery", "memstore.core")
_PORT = "a Protocol in memstore/core/durable/storage_ports.py, implemented in memstore/shell"
_ACTION = "return an action; memstore/shell carries it out"
_CLOCK = "take `now` in seconds as an argument"
# What a pure module may not import, and what to do instead.
BANNED = {
    "torch": "plain values; the torch edge is in memstore/shell",
    "ray": _ACTION,
    "socket": _ACTION,
    "ssl": _ACTION,
    "select": _ACTION,
    "selectors": _ACTION,
    "threading": "state that one thread drives; the shell owns the thread",
    "multiprocessing": _ACTION,
    "concurrent": _ACTION,
    "subprocess": _ACTION,
    "signal": _ACTION,
    "asyncio": "plain functions; the shell awaits",
    "time": _CLOCK,
    "datetime": _CLOCK,
    "os": _PORT,
    "sys": _PORT,
    "io": _PORT,
    "pathlib": _PORT,
    "shutil": _PORT,
    "tempfile": _PORT,
    "glob": _PORT,
    "mmap": _PORT,
    "fcntl": _PORT,
    "ctypes": _PORT,
    "secrets": "take random bytes as an argument",
    "uuid": "take the id as an argument",
    "logging": "return the reason; the shell logs it",
}
BANNED_CALLS = {"open": _PORT, "input": _PORT, "print": "return the text", "breakpoint": "remove it"}
PICKLES = {
    **dict.fromkeys(("pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"), "import"),
    **dict.fromkeys(("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"), "call"),
}
# Transformers reads the folder it resumes from with torch.load(weights_only=True); nothing of ours reads it.
# The objects of an export are by definition what torch.save writes.
WRITES_TORCH_FILES = {"memstore/adapters/transformers.py", "memstore/exchange/step_items.py"}
# What a user asks to import: DCP's metadata, under a list of classes.
READS_PICKLES = {("memstore/exchange/importing.py", "pickle")}
BANNED_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}

# folder -> longest file, longest function, in lines
LENGTHS = {**dict.fromkeys((*PACKAGES, "benchmarks", "examples"), (1000, 60)), "tests": (1000, 80)}


def sources(*folders: str) -> Iterator[tuple[str, str]]:
    """Yield (path from the root, text) of every Python file in `folders`."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


@lru_cache(maxsize=1)
def parsed(text: str) -> ast.Module:
    """Return the tree of a source; all rules look at one source before the next."""
    return ast.parse(text)


def module_name(path: str) -> str:
    """Return the dotted name of a file: "memstore/core/wire/frame.py" is memstore.core.wire.frame."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def part(module: str) -> str:
    """Return the part of the drawing a module belongs to: "memstore.core.wire.frame" is in memstore.core."""
    return ".".join(module.split(".")[:2]) if module.startswith("memstore.") else module.split(".")[0]


def layer(module: str) -> int:
    """Return the layer of a module; a file directly in memstore/ that has no number of its own sits with the client."""
    return LAYERS.get(part(module), CLIENT_LAYER)


def imports(path: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, module) for every import, wherever it stands, relative ones resolved."""
    package = module_name(path).split(".")
    if not path.endswith("__init__.py"):
        package = package[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            base = ".".join(filter(None, (base, node.module)))
            if base == "memstore":  # `from memstore import config` imports the module memstore.config
                yield from ((node.lineno, f"memstore.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, base


def arrow_complaints(path: str, text: str) -> list[str]:
    """Imports must point down the drawing, by LAYERS."""
    module, found = module_name(path), []
    if module == "memstore":
        return []  # the lazy public face may name everything
    for line, target in imports(path, parsed(text)):
        if target.split(".")[0] not in PACKAGES:
            continue
        is_public_face = target == "memstore" and layer(module) > CLIENT_LAYER  # who uses the store as users do
        is_forbidden = (layer(target) > layer(module) or target == "memstore") and not is_public_face
        if part(target) != part(module) and layer(module) == ERRORS_LAYER:
            is_forbidden = True
        if is_forbidden:
            found.append(f"{path}:{line}: {module} may not import {target}: arrows point from cli down to placement")
    return found


def purity_complaints(path: str, text: str) -> list[str]:
    """A pure module imports nothing that acts, and draws no random numbers of its own."""
    module, tree, found = module_name(path), parsed(text), []
    if part(module) not in PURE:
        return []
    for line, target in imports(path, tree):
        instead = BANNED.get(target.split(".")[0])
        if instead is not None:
            found.append(f"{path}:{line}: pure module imports {target}; instead: {instead}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BANNED_CALLS:
            found.append(f"{path}:{node.lineno}: pure module calls {node.func.id}(); {BANNED_CALLS[node.func.id]}")
        is_random = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "random"
        names = [node.attr] if is_random and isinstance(node, ast.Attribute) else []
        if isinstance(node, ast.ImportFrom) and node.module == "random":
            names = [alias.name for alias in node.names]
        found += [
            f"{path}:{node.lineno}: pure module uses random.{name}; instead: take a random.Random as an argument"
            for name in names
            if name != "Random"
        ]
        if isinstance(node, ast.Call) and not node.args and ast.unparse(node.func) in ("random.Random", "Random"):
            found.append(f"{path}:{node.lineno}: random.Random() seeds itself from the system; give it a seed")
    return found


def pickle_complaints(path: str, text: str) -> list[str]:
    """Nothing that came from a peer or a disk is ever unpickled, so nothing is pickled."""
    tree = parsed(text)
    named = [(line, name) for line, name in imports(path, tree) if (path, name) not in READS_PICKLES]
    found = [f"{path}:{line}: imports {name}" for line, name in named if name.split(".")[0] in PICKLES]
    for node in ast.walk(tree):
        name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if (name == "torch.save" and path in WRITES_TORCH_FILES) or (path, name) in READS_PICKLES:
            continue
        if name in ("torch.load", "torch.save", "np.load", "numpy.load") or name.rpartition(".")[2] in PICKLES:
            found.append(f"{path}:{node.lineno}: calls {name}, which pickles")  # type: ignore[attr-defined]
    return [f"{complaint}; instead: msgpack with explicit types, or raw bytes" for complaint in found]


def length_complaints(path: str, text: str) -> list[str]:
    """Files and functions stay short enough to be read at once."""
    file_limit, function_limit = LENGTHS[path.split("/")[0]]
    lines = len(text.splitlines())
    found = [] if lines <= file_limit else [f"{path}: {lines} lines, at most {file_limit}: split it by noun"]
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > function_limit:
                found.append(f"{path}:{node.lineno}: {node.name}() has {length} lines, at most {function_limit}")
    return found


def name_complaints(path: str, text: str) -> list[str]:
    """A file is named after what it is about, and says so in its first line."""
    parts = [*path.split("/")[:-1], path.split("/")[-1].removesuffix(".py").removeprefix("test_")]
    found = [f"{path}: {name!r} says nothing; name it by its noun" for name in parts if name in BANNED_NAMES]
    if text.strip() and not ast.get_docstring(parsed(text)):
        found.append(f"{path}: no module docstring")
    return found


def drawn_tree(docstring: str) -> dict[str, str]:
    """Return child -> parent of the tree drawn with ├─ and └─; the root has no entry."""
    stack: dict[int, str] = {}
    found = {}
    for line in docstring.splitlines():
        match = re.match(r"^((?:[│ ] {2})*[├└]─ |(?=MemstoreError\())(\w+)", line.removeprefix("    "))
        if match:
            depth = len(match[1]) // 3
            stack[depth] = match[2]
            if depth:
                found[match[2]] = stack[depth - 1]
    return found


def error_definitions(texts: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the classes that descend, by name, from MemstoreError -> the file that defines them."""
    may_define = [(path, text) for path, text in texts if re.search(r"^\s*class \w+\(", text, re.MULTILINE)]
    nodes = [(path, node) for path, text in may_define for node in ast.walk(parsed(text))]
    classes = [
        (node.name, path, {ast.unparse(base).rpartition(".")[2] for base in node.bases})
        for path, node in nodes
        if isinstance(node, ast.ClassDef)
    ]
    known, before = {"MemstoreError": ""}, 0
    while len(known) > before:
        before = len(known)
        known |= {name: path for name, path, bases in classes if bases & set(known) and name != "MemstoreError"}
    del known["MemstoreError"]
    return known


ERRORS = error_definitions(sources("memstore"))  # once: it parses every source
Rule = Callable[[str, str], list[str]]
RULES: dict[str, tuple[Rule, tuple[str, ...]]] = {
    "arrows": (arrow_complaints, PACKAGES),
    "purity": (purity_complaints, PACKAGES),
    "pickle": (pickle_complaints, PACKAGES),
    "length": (length_complaints, tuple(LENGTHS)),
    "names": (name_complaints, tuple(LENGTHS)),
}


@cache
def complaints() -> dict[str, list[str]]:
    """Return rule -> what it says of all sources."""
    found: dict[str, list[str]] = {rule: [] for rule in RULES}
    for path, text in sources(*LENGTHS):
        for rule, (check, folders) in RULES.items():
            if path.split("/")[0] in folders:
                found[rule] += check(path, text)
    return found


@pytest.mark.parametrize("rule", RULES)
def test_every_source_keeps_the_rule(rule: str) -> None:
    """No file breaks the rule; the failure says what to do instead."""
    found = complaints()[rule]
    assert not found, "\n" + "\n".join(found)


def test_only_a_few_tables_are_laid_out_by_hand() -> None:
    """What ruff would take apart and a person reads as a table stays as it is, at twenty places."""
    marked = [f"{path}: {text.count(mark)}" for path, text in sources(*LENGTHS) if (mark := "# fmt: " + "skip") in text]
    assert sum(int(row.rpartition(" ")[2]) for row in marked) <= 20, marked


BAD_SOURCES = [
    (arrow_complaints, "placement/x.py", "import recovery.planner", "recovery.planner"),
    (arrow_complaints, "recovery/x.py", "from memstore.errors import ConfigError", "memstore.errors"),
    (arrow_complaints, "memstore/core/x.py", "def f():\n    from memstore.shell import arena", "memstore.shell"),
    (arrow_complaints, "memstore/core/x.py", "from ..shell.arena import Arena", "memstore.shell.arena"),
    (arrow_complaints, "memstore/core/x.py", "from memstore import client", "memstore.client"),
    (arrow_complaints, "memstore/shell/x.py", "import memstore", "may not import memstore"),
    (arrow_complaints, "memstore/shell/x.py", "import memstore.testing.cluster", "memstore.testing.cluster"),
    (arrow_complaints, "memstore/errors.py", "import recovery", "recovery"),
    (arrow_complaints, "memstore/client/x.py", "import memstore.drills.run.runner", "memstore.drills.run.runner"),
    (arrow_complaints, "memstore/cli/x.py", "import memstore.drills.run.runner", "memstore.drills.run.runner"),
    (purity_complaints, "memstore/core/x.py", "import time", "take `now`"),
    (purity_complaints, "placement/x.py", "def f():\n    import os.path", "storage_ports.py"),
    (purity_complaints, "recovery/x.py", "import random\nx = random.random()", "random.Random as an argument"),
    (purity_complaints, "recovery/x.py", "from random import shuffle", "random.shuffle"),
    (purity_complaints, "recovery/x.py", "import random\nr = random.Random()", "give it a seed"),
    (purity_complaints, "memstore/core/x.py", "f = open('x')", "open()"),
    (pickle_complaints, "memstore/x.py", "import pickle", "msgpack"),
    (pickle_complaints, "memstore/shell/x.py", "import torch\ntorch.load('x')", "torch.load"),
    (pickle_complaints, "memstore/shell/x.py", "dist.broadcast_object_list([])", "broadcast_object_list"),
    (length_complaints, "memstore/x.py", "\n" * 1001, "1001 lines"),
    (length_complaints, "placement/x.py", "def f():\n" + "    x = 1\n" * 60, "f() has 61 lines"),
    (length_complaints, "tests/test_x.py", "async def f():\n" + "    x = 1\n" * 80, "f() has 81 lines"),
    (name_complaints, "memstore/core/utils.py", '"""Doc."""', "'utils'"),
    (name_complaints, "memstore/common/x.py", '"""Doc."""', "'common'"),
    (name_complaints, "memstore/x.py", "x = 1", "no module docstring"),
]


@pytest.mark.parametrize(("check", "path", "text", "expected"), BAD_SOURCES)
def test_a_bad_source_is_caught(check: Rule, path: str, text: str, expected: str) -> None:
    """Each rule catches the source it was written for, and its complaint names the fault and the file."""
    found = check(path, text)
    assert len(found) == 1
    assert expected in found[0]
    assert path in found[0]


GOOD_SOURCES = [
    (arrow_complaints, "memstore/shell/x.py", "from memstore.core import wire\nimport placement, recovery, torch"),
    (arrow_complaints, "memstore/cli/x.py", "from memstore.exchange import importing\nfrom memstore import client"),
    (arrow_complaints, "memstore/config.py", "from memstore.errors import ConfigError"),
    (arrow_complaints, "memstore/client/x.py", "from memstore.client.store import Store"),
    (purity_complaints, "memstore/core/x.py", "import random\ndef f(r: random.Random): return random.Random(7)"),
    (purity_complaints, "memstore/shell/x.py", "import time, os, random\nx = random.random()"),
    (length_complaints, "memstore/x.py", "\n" * 1000),
]


@pytest.mark.parametrize(("check", "path", "text"), GOOD_SOURCES)
def test_a_good_source_passes(check: Rule, path: str, text: str) -> None:
    """A rule does not complain about what it allows."""
    assert check(path, text) == []


def test_every_error_is_in_the_drawn_tree() -> None:
    """The tree at the top of errors.py has every MemstoreError, wherever it is defined, under its real parent."""
    drawn = drawn_tree(errors.__doc__ or "")
    assert set(drawn) == set(ERRORS)
    for name, path in ERRORS.items():
        error = getattr(importlib.import_module(module_name(path)), name)
        assert drawn[name] in {base.__name__ for base in error.__bases__}, name


def test_a_tree_that_lacks_an_error_is_noticed() -> None:
    """The reader of the drawing and the collector of classes see what is there, to any depth."""
    tree = "    MemstoreError(Exception)  x\n    ├─ A   x\n    │  └─ B   x\n    └─ C   x"
    assert drawn_tree(tree) == {"A": "MemstoreError", "B": "A", "C": "MemstoreError"}
    text = "class B(A): ...\nclass A(errors.MemstoreError): ...\nclass X(ValueError): ..."
    assert error_definitions([("memstore/x.py", text)]) == {"A": "memstore/x.py", "B": "memstore/x.py"}


@pytest.mark.parametrize("name", ["MemstoreError", *ERRORS])
def test_every_error_survives_pickling(name: str) -> None:
    """Message and context arrive on the other side of an actor boundary as they were."""
    path = ERRORS.get(name, "memstore/errors.py")
    error = getattr(importlib.import_module(module_name(path)), name)("no room on h1", host="h1", limit_bytes=7)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert isinstance(copy, MemstoreError)
    assert (copy.args, str(copy), vars(copy)) == (error.args, str(error), vars(error))
    assert (copy.host, copy.limit_bytes) == ("h1", 7)  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("module", ["memstore", "memstore.errors", "memstore.config", "placement", "recovery"])
def test_importing_is_light(module: str) -> None:
    """In a fresh interpreter neither the public face nor a pure package imports torch, ray or numpy."""
    code = f"import {module}, sys; print(sorted({{'torch', 'ray', 'numpy'}} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_class_has_a_name_of_its_own() -> None:
    """A search for a class finds one; two adapters have the name that its framework's users look for."""
    places: dict[str, list[str]] = {}
    for path, text in sources(*PACKAGES):
        for name in re.findall(r"^ *class (\w+)[(:]", text, re.MULTILINE):
            places.setdefault(name, []).append(path)
    shared = {name for name, found in places.items() if len(found) > 1}
    assert shared == {"MemstoreCallback", "Config"}, {name: places[name] for name in shared}

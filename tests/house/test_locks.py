"""Every lock, thread and pool of the product stands in the tables of docs/internals/architecture.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from repository import ROOT

LOCKS = ("Lock", "RLock", "Condition", "SafeCondition", "allocate_lock")
THREADS = ("Thread", "SafeThread", "ThreadPoolExecutor", "OwnThreads", "start_new_thread")
PRIMITIVES = ("shell/threads/safe_condition.py", "shell/threads/answers.py")  # what others make their locks of
ROOMS = ("shell", "client", "admin", "inplace", "adapters", "exchange", "cli")


def sources() -> Iterator[tuple[str, ast.Module]]:
    """Yield (path from memstore/, tree) of every file that may make locks and threads."""
    for room in ROOMS:
        for path in sorted((ROOT / "memstore" / room).rglob("*.py")):
            yield path.relative_to(ROOT / "memstore").as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def called(node: ast.AST) -> str:
    """Return the last part of what a call calls, or of a `default_factory=`; "" for anything else."""
    if isinstance(node, ast.keyword) and node.arg == "default_factory":
        return ast.unparse(node.value).rpartition(".")[2]
    return ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""


def assigned(node: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    """Yield (name, value) of an assignment: `self.lock = ...`, `lock: Lock = ...`, `a, b = ..., ...`."""
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        yield ast.unparse(node.target).rpartition(".")[2], node.value
    elif isinstance(node, ast.Assign):
        target, value = node.targets[0], node.value
        is_pair = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
        pairs = zip(target.elts, value.elts, strict=True) if is_pair else [(target, value)]  # type: ignore[attr-defined]
        yield from ((ast.unparse(name).rpartition(".")[2], part) for name, part in pairs)


def locks(tree: ast.AST) -> set[str]:
    """Return the names under which a source keeps the locks and conditions that it makes."""
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    return {
        name
        for statement in statements
        for name, value in assigned(statement)
        if any(called(node) in LOCKS for node in ast.walk(value))
    }


def threads(tree: ast.AST) -> int:
    """Return how many places of a source start threads or make pools of them."""
    return sum(called(node) in THREADS for node in ast.walk(tree) if isinstance(node, ast.Call))


def table(heading: str) -> str:
    """Return the section of the page under a heading."""
    text = (ROOT / "docs/internals/architecture.md").read_text(encoding="utf-8")
    return text.partition(f"\n### {heading}\n")[2].partition("\n### ")[0].partition("\n## ")[0]


def test_every_lock_is_in_the_table() -> None:
    """With what it guards, and what may be taken while it is held."""
    made = {(file, name) for file, tree in sources() if file not in PRIMITIVES for name in locks(tree)}
    rows = re.findall(r"^\| `([\w/]+\.py)` \| `(\w+)` \|", table("Locks"), re.MULTILINE)
    assert len(made) > 20
    assert made - set(rows) == set()
    assert set(rows) - made == set()
    assert len(rows) == len(set(rows))


def test_every_thread_is_in_the_table() -> None:
    """A file's line says how many places start threads: one that comes is explained."""
    made = {file: count for file, tree in sources() if (count := threads(tree))}
    rows = re.findall(r"^\| `([\w/]+\.py)` \| (\d+) \|", table("Threads"), re.MULTILINE)
    assert {file: sum(int(count) for name, count in rows if name == file) for file, _ in rows} == made


def test_a_lock_is_found_however_it_is_made() -> None:
    """As an attribute, in a pair, as a field of a dataclass, behind a type."""
    source = (
        "self.lock = threading.RLock()\nself.a, self.b = Lock(), 1\n"
        "grants: threading.Lock = field(default_factory=threading.Lock)\nx = Event()\nself.c: Any = SafeCondition()\n"
    )
    assert locks(ast.parse(source)) == {"lock", "a", "grants", "c"}
    assert threads(ast.parse("threading.Thread(target=f).start()\nself.p = ThreadPoolExecutor(4)")) == 2

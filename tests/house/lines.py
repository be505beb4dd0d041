"""Counts the lines of the product and of its kit, room by room: `make lines`.

The product is what users run; the kit is what breaks and proves it: drills, demo and test support.
"""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KIT = ("memstore/drills", "memstore/testing", "memstore/demo")
PRODUCT = ("placement", "recovery", "memstore")
LIMITS = {"product": 43_000, "kit": 16_000}


def lines_count(text: str) -> int:
    """Return the lines of a Python file, with its docstrings, comments and empty lines."""
    return len(text.splitlines())


def code_count(text: str) -> int:
    """Return the lines of a Python file without docstrings, comments and empty lines."""
    prose = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            prose.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(text.splitlines(), 1)
    return sum(bool(line.strip()) and not line.lstrip().startswith("#") for n, line in lines if n not in prose)


def room_of(path: Path) -> tuple[str, str]:
    """Return whether a file is of the product or of the kit, and its room: two folders of `memstore`, one of others."""
    name = path.relative_to(ROOT).as_posix()
    folders = name.split("/")[:-1]
    return "kit" if name.startswith(KIT) else "product", "/".join(
        folders[: 3 if folders[1:2] in (["core"], ["shell"]) else 2]
    )


def counts() -> tuple[Counter[str], Counter[str], Counter[tuple[str, str]]]:
    """Return the lines of product and kit, how many of them are code, and the lines of each room."""
    total, code, rooms = Counter[str](), Counter[str](), Counter[tuple[str, str]]()
    for path in (path for top in PRODUCT for path in (ROOT / top).rglob("*.py")):
        text, (part, room) = path.read_text(encoding="utf-8"), room_of(path)
        total[part] += lines_count(text)
        code[part] += code_count(text)
        rooms[part, room] += lines_count(text)
    return total, code, rooms


if __name__ == "__main__":
    lines_of, code_of, by_room = counts()
    for part, limit in LIMITS.items():
        print(f"{part}: {lines_of[part]:,} lines, the aim is at most {limit:,}; {code_of[part]:,} of them are code")
        for (owner, room), count in by_room.most_common():
            if owner == part:
                print(f"  {count:6,}  {room}")

"""Counts the lines of the product and of its kit: `make lines`.

The product is what users run; the kit is what breaks and proves it: drills, demo and test support.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KIT = ("memstore/drills", "memstore/testing", "memstore/demo")
PRODUCT = ("placement", "recovery", "memstore")
LIMITS = {"product": 32_000, "kit": 11_500}


def lines_count(path: Path) -> int:
    """Return the lines of a Python file, with its docstrings, comments and empty lines."""
    return len(path.read_text(encoding="utf-8").splitlines())


def counts() -> dict[str, int]:
    """Return the lines of product and kit."""
    found = dict.fromkeys(LIMITS, 0)
    for top in PRODUCT:
        for path in (ROOT / top).rglob("*.py"):
            is_kit = path.relative_to(ROOT).as_posix().startswith(KIT)
            found["kit" if is_kit else "product"] += lines_count(path)
    return found


if __name__ == "__main__":
    for part, count in counts().items():
        print(f"{part}: {count:,} lines, the aim is at most {LIMITS[part]:,}")

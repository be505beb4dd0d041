"""Write the generated parts of the manual and of the room READMEs: `python docs/generate.py`, after a change of theirs.

A generated part stands in its page between `<!-- generated: NAME -->` and `<!-- end -->`, committed, so that it can be
read in a checkout. tests/house/test_docs.py fails if one is not what its source says.

In the README of a room of core or shell, the line of what it may import is written from the drawing. In the README of
any room, a Python file without a line gets one from its docstring, to be edited, and one that is gone loses its line.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import tokenize
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from memstore import config
from memstore.config import GIB, KIB, MIB, Config

ROOT = Path(__file__).resolve().parents[1]
ROW, TABLE = re.compile(r"\| `([^`]+\.py|[^`]+/)` \|.*"), "\n| file | what it has |\n"
PART = re.compile(r"<!-- generated: (\w+) -->\n.*?<!-- end -->", re.DOTALL)
# What a field may be where that is no range of numbers.
VALUES = {
    "store": "1 to 64 letters, digits, `.`, `_`, `-`",
    "arena_dir": "an absolute path",
    "arena_bytes": '`"auto"`, bytes, or text such as `"64GiB"`',
    "failure_domains": "names of node labels",
    "interface": '`eth2`, `10.20.0.0/16`, an address, a list of these (`["ib0", "ib1"]`), or None',
    "tls_cert": "an absolute path or None",
    "tls_key": "an absolute path or None",
    "tls_ca": "an absolute path or None",
    "put_every": '`"step"`, a number, `"30s"`, `"2%"`, `"auto"`',
    "placement": '`"mixed"`, `"group"`, `"ring"`',
    "durable": "an absolute path, a URL, or None",
    "durable_every": '`"30min"`, a number of steps, `"auto"`',
    "durable_compression": '`"none"`, `"auto"`',
    "durable_key_file": "an absolute path or None",
}
BEYOND = 1 << 50  # an upper limit that only keeps numbers sane


def field_comments() -> dict[str, str]:
    """Return what the comment behind each field of Config says."""
    found = {}
    with Path(config.__file__).open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT and (field := re.match(r"    (\w+): ", token.line)):
                found[field[1]] = token.string.removeprefix("# ")
    return found


def _amount(name: str, value: Any) -> str:
    """Return a default or limit as a person would write it."""
    if isinstance(value, tuple):
        return ", ".join(f"`{part}`" for part in value)
    if name.endswith(("bytes", "bytes_per_s")) and isinstance(value, int) and value:
        unit, text = next(((u, t) for u, t in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")) if value % u == 0), (1, "B"))
        return f"{value // unit:,} {text}"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:,.10g}" + (" s" if name.endswith("_s") and not name.endswith("per_s") else "")
    return f"`{value!r}`".replace("'", '"') if value is not None else "None"


def _row(field: dataclasses.Field[Any], comment: str, ranges: Mapping[str, tuple[float, float]]) -> str:
    name = field.name
    if name in ranges:
        low, high = ranges[name]
        limits = f"{_amount(name, low)} to {_amount(name, high)}" if high < BEYOND else f"from {_amount(name, low)}"
    else:
        limits = VALUES[name]
    return f"| `{name}` | {_amount(name, field.default)} | {limits} | {comment.replace('|', chr(92) + '|')} |"


def config_table(is_store: bool) -> str:
    """Return the table of the fields that belong to the store, or to a job."""
    comments = field_comments()
    ranges = {name: (low, high) for name, low, high in config._RANGES}
    fields = [field for field in dataclasses.fields(Config) if (field.name in config.STORE_FIELDS) == is_store]
    rows = [_row(field, comments[field.name], ranges) for field in fields]
    return "\n".join(["| field | default | range | what it does |", "|---|---|---|---|", *rows])


def drawn_rooms() -> dict[str, dict[str, list[str]]]:
    """Return package -> room -> rooms that it may import, as tests/house/test_rooms.py draws them."""
    tree = ast.parse((ROOT / "tests/house/test_rooms.py").read_text(encoding="utf-8"))
    found = {
        node.target.id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(node.value, ast.Dict)
    }
    return {
        name.lower(): {room: below.split() for room, below in rooms.items()}
        for name, rooms in found.items()
        if name in ("CORE", "SHELL", "DRILLS", "TESTING")
    }


def purpose_of(folder: Path) -> str:
    """Return the first sentence of a room's README, or of its package's docstring."""
    readme = folder / "README.md"
    blocks = readme.read_text(encoding="utf-8").split("\n\n") if readme.exists() else []
    if len(blocks) > 1 and blocks[1][0].isalpha():  # no list, no table
        return blocks[1].replace("\n", " ").partition(". ")[0].rstrip(".")
    docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0].rstrip(".")


def rooms_table(package: str) -> str:
    """Return a picture of a package's rooms, floor by floor, and the table of what each may import."""
    rooms = drawn_rooms()[package]
    floor: dict[str, int] = {}
    for room, below in rooms.items():
        floor[room] = 1 + max((floor[other] for other in below), default=-1)
    picture = [
        f"{number:>2}  {'   '.join(room for room in rooms if floor[room] == number)}"
        for number in range(max(floor.values()), -1, -1)
    ]
    rows = [
        f"| `{room}` | {' '.join(f'`{other}`' for other in below) or 'nothing of this package'} | "
        f"{purpose_of(ROOT / 'memstore' / package / room)} |"
        for room, below in rooms.items()
    ]
    head = ["| room | may import | what lives there |", "|---|---|---|"]
    return "\n".join(["```", *picture, "```", "", *head, *rows])


PARTS: dict[str, Callable[[], str]] = {
    "config_store": lambda: config_table(is_store=True),
    "config_job": lambda: config_table(is_store=False),
    "rooms_core": lambda: rooms_table("core"),
    "rooms_shell": lambda: rooms_table("shell"),
    "rooms_drills": lambda: rooms_table("drills"),
    "rooms_testing": lambda: rooms_table("testing"),
}


def written(text: str) -> str:
    """Return a page with its generated parts as their sources say."""
    return PART.sub(lambda found: f"<!-- generated: {found[1]} -->\n{PARTS[found[1]]()}\n<!-- end -->", text)


def with_lines_of_files(folder: Path, text: str) -> str:
    """Return a room's README with a line for each Python file of its folder, and none for one that is gone."""
    here = {path.name for path in folder.glob("*.py")} - {"__init__.py"}
    rows = [row for row in text.splitlines() if not (found := ROW.match(row)) or found[1] in here or "/" in found[1]]
    named = [at for at, row in enumerate(rows) if ROW.match(row)]
    missing = sorted(here - {ROW.sub(r"\1", rows[at]) for at in named})
    if named:
        rows[named[-1] + 1 : named[-1] + 1] = [f"| `{name}` | {described(folder / name)} |" for name in missing]
    return "\n".join(rows) + "\n"


def described(path: Path) -> str:
    """Return the first sentence of a file's docstring, without rules and such."""
    line = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or path.stem).partition("\n")[0]
    return re.sub(r"\s*\([^()]*\)|\.? Pure\.?$", "", line.partition(". ")[0]).rstrip(".").replace("|", "\\|")


def room_readmes() -> Iterator[tuple[Path, str]]:
    """Yield each room's README with what it should say."""
    drawn = {ROOT / "memstore" / part / room: (part, below) for part in ("core", "shell")
             for room, below in drawn_rooms()[part].items()}  # fmt: skip
    for top in ("memstore", "benchmarks", "tests"):
        for page in sorted((ROOT / top).rglob("README.md")):
            text = page.read_text(encoding="utf-8")
            if page.parent in drawn:
                part, below = drawn[page.parent]
                rooms = ", ".join(f"`{room}`" for room in below) or "nothing else"
                text = re.sub(r"^May import: .*$", f"May import: {rooms} of `{part}`.", text, flags=re.MULTILINE)
            if TABLE in text:
                yield page, with_lines_of_files(page.parent, text)


def pages() -> list[Path]:
    """Return the pages of the manual."""
    return sorted((ROOT / "docs").rglob("*.md"))


if __name__ == "__main__":
    for page, new in room_readmes():  # first: the tables of rooms have their first sentences
        if new != page.read_text(encoding="utf-8"):
            page.write_text(new, encoding="utf-8")
            print(f"written: {page.relative_to(ROOT)}: read the new lines, and say what the files have in plain words")
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if (new := written(text)) != text:
            page.write_text(new, encoding="utf-8")
            print(f"written: {page.relative_to(ROOT)}")

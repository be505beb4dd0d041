"""Write the generated parts of the manual: `python docs/generate.py`, after a change of settings or rooms.

A generated part stands in its page between `<!-- generated: NAME -->` and `<!-- end -->`, committed, so that it can be
read in a checkout. tests/house/test_docs.py fails if one is not what its source says.
"""

from __future__ import annotations

import ast
import dataclasses
import io
import re
import tokenize
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from click.testing import CliRunner
from rich.console import Console

from memstore import config
from memstore.cli import main
from memstore.cli.bill import Terms, show_bill
from memstore.config import GIB, KIB, MIB, Config
from memstore.testing.faults.catalogue import KINDS
from placement import Host, Topology
from placement.bill import bill

ROOT = Path(__file__).resolve().parents[1]
PART = re.compile(r"<!-- generated: (\w+) -->\n.*?<!-- end -->", re.DOTALL)
# What a field may be where that is no range of numbers.
VALUES = {
    "store": "1 to 64 letters, digits, `.`, `_`, `-`",
    "arena_dir": "an absolute path",
    "arena_bytes": '`"auto"`, bytes, or text such as `"64GiB"`',
    "quota": '`"64GiB"`, bytes, a list of these and `"JOB=SIZE"`, or None',
    "failure_domains": "names of node labels",
    "interface": '`eth2`, `10.20.0.0/16`, an address, a list of these (`["ib0", "ib1"]`), or None',
    "detect": '`"fast"`, `"normal"`, `"slow"`, or 0.1 s to 3,600 s',
    "tls_dir": "an absolute path or None",
    "put_every": '`"step"`, a number, `"30s"`, `"2%"`, `"epoch"`, `"auto"`',
    "on_nonfinite": '`"ignore"`, `"warn"`, `"skip"`',
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


def purpose_of(room: Path) -> str:
    """Return the first line of a room's docstring; a room is a folder, or one file."""
    file = room / "__init__.py" if room.is_dir() else room.with_suffix(".py")
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0].rstrip(".")


def faults_table() -> str:
    """Return which engine and which drills play each kind of fault."""
    rows = ["| kind | what it breaks | simulator | processes | Ray | drills |", "|---|---|:-:|:-:|:-:|---|"]
    for name, kind in KINDS.items():
        engines = ("x" if weight is not None else "" for weight in (kind.simulator, kind.processes, kind.ray))
        drills = ", ".join(f"`{drill}`" for drill in kind.drills.split())
        rows.append(f"| `{name}` | {kind.breaks} | {' | '.join(engines)} | {drills} |")
    return "\n".join(rows)


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


def bill_screen() -> str:
    """Return what `memstore plan --bill` prints for twelve hosts in each of ten racks."""
    screen, terms = io.StringIO(), Terms()
    hosts = (Host(f"h{at}", {"rack": f"r{at % 10}"}) for at in range(120))
    rows = bill(Topology.of(hosts), terms.scheme, versions=terms.versions)
    show_bill(Console(file=screen, width=80), rows, terms)
    return "\n".join(["```text", *map(str.rstrip, screen.getvalue().splitlines()), "```"])


def verb_screen(*args: str) -> str:
    """Return what a verb prints on a screen of 80 columns."""
    screen = CliRunner().invoke(main, args, env={"COLUMNS": "80"}).stdout
    return "\n".join(["```text", *map(str.rstrip, screen.splitlines()), "```"])


PARTS: dict[str, Callable[[], str]] = {
    "config_store": lambda: config_table(is_store=True),
    "config_job": lambda: config_table(is_store=False),
    "rooms_core": lambda: rooms_table("core"),
    "rooms_shell": lambda: rooms_table("shell"),
    "rooms_drills": lambda: rooms_table("drills"),
    "rooms_testing": lambda: rooms_table("testing"),
    "faults": faults_table,
    "bill": bill_screen,
    "odds": lambda: verb_screen("odds", "--hosts", "32", "--racks", "4"),
    "fit": lambda: verb_screen("fit", "--params", "70e9", "--hosts", "32", "--racks", "8", "--parity", "4"),
    "simulate": lambda: verb_screen("simulate"),
}


def written(text: str) -> str:
    """Return a page with its generated parts as their sources say."""
    return PART.sub(lambda found: f"<!-- generated: {found[1]} -->\n{PARTS[found[1]]()}\n<!-- end -->", text)


def pages() -> list[Path]:
    """Return the pages of the manual."""
    return sorted((ROOT / "docs").rglob("*.md"))


if __name__ == "__main__":
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if (new := written(text)) != text:
            page.write_text(new, encoding="utf-8")
            print(f"written: {page.relative_to(ROOT)}")

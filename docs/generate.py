"""Write the generated parts and plots of the manual: `python docs/generate.py`, after a change of settings or rooms.

A generated part stands in its page between `<!-- generated: NAME -->` and `<!-- end -->`, committed, so that it can be
read in a checkout; a plot is an SVG file beside its page. tests/house/test_docs.py fails if one is not what its source
says.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import io
import json
import math
import random
import re
import tempfile
import tokenize
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from click.testing import CliRunner
from rich.console import Console

from memstore import config
from memstore.cli import main
from memstore.cli.bill import Terms, show_bill
from memstore.cli.odds import even_topology
from memstore.cli.output import size_text
from memstore.config import GIB, KIB, MIB, Config
from memstore.testing.faults.catalogue import KINDS
from placement import Host, Topology, survival_odds
from placement.bill import SCHEMES, Scheme, bill
from placement.rates import DAY_S, PRESETS

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


# -- racks --------------------------------------------------------------------------------------------


RACKS, RACK_HOSTS = 10, 12
LOST_RACKS = (1, 2, 3)


def rack_odds(scheme: Scheme, *, is_labelled: bool) -> list[float]:
    """Return the share of the sets of 1, 2 and 3 racks whose loss takes a step along."""
    hosts = [f"h{number:03d}" for number in range(RACKS * RACK_HOSTS)]
    random.Random(1).shuffle(hosts)  # names of hosts say nothing of their racks
    rack = {host: number // RACK_HOSTS for number, host in enumerate(hosts)}
    bonds = scheme.bonds(Topology.of(Host(host, {"rack": f"r{rack[host]}"} if is_labelled else {}) for host in hosts))
    found = []
    for count in LOST_RACKS:
        sets = [frozenset(h for h in hosts if rack[h] in lost) for lost in combinations(range(RACKS), count)]
        found.append(sum(any(bond.kills(lost) for bond in bonds) for lost in sets) / len(sets))
    return found


def racks_table() -> str:
    """Return what the loss of racks takes along, of each scheme, with labels and without."""
    head = ["| scheme | labels | 1 rack lost | 2 racks | 3 racks |", "|---|---|---:|---:|---:|"]
    rows = [
        f"| {scheme.name} | {'`rack`' if is_labelled else 'none'} | "
        + " | ".join(f"{100 * share:.0f} %" for share in rack_odds(scheme, is_labelled=is_labelled))
        + " |"
        for scheme in SCHEMES
        for is_labelled in (True, False)
        if scheme.name in ("2 copies", "3 copies", "parity 4+1", "parity 8+2")
    ]
    return "\n".join([*head, *rows])


def feeds_screen() -> str:
    """Return what `memstore odds` prints for racks that share switches and feeds of power."""
    labels = [{"rack": f"r{n // 8}", "switch": f"s{n // 16}", "power": f"p{n // 8 % 2}"} for n in range(32)]
    body = {"hosts": [{"host": f"h{n:02d}", "labels": each} for n, each in enumerate(labels)]}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({**body, "failure_domains": ["rack"]}, file)
        file.flush()
        return verb_screen("odds", "--topology", file.name)


# -- size ---------------------------------------------------------------------------------------------


SIZES = (512, 2_048, 8_192, 32_768, 131_072)
MOMENTS = ("all hosts join", "all ranks connect", "a commit", "a host is lost", "it comes back", "a successor starts")


def records(name: str) -> dict[str, Any]:
    """Return the newest record of a benchmark."""
    body = json.loads((ROOT / "benchmarks/results/records.json").read_text(encoding="utf-8"))
    found: dict[str, Any] = body[name][-1]
    return found


def controller_table() -> str:
    """Return what the controller of 16,384 ranks computes and sends, as measured."""
    figures = {ratio["name"]: ratio["median"] for ratio in records("controller")["ratios"]}
    head = ["| with 2,048 hosts and 16,384 ranks | core seconds | sent to all hosts together |", "|---|---:|---:|"]
    rows = [
        f"| {moment} | {figures[f'{moment}: core seconds']:.1f} | {size_text(int(figures[f'{moment}: sent']))} |"
        for moment in MOMENTS
    ]
    return "\n".join([*head, *rows])


def growth_table() -> str:
    """Return how much longer pure decisions take with more ranks or hosts, as measured."""
    head = ["| what | of | seconds |", "|---|---:|---:|"]
    names = {
        "catalog": "all seals of a step, until it is committed",
        "placement": "three copies are placed",
        "planner": "a restore is planned, one host of 1,024 lost",
    }
    rows = [
        f"| {what} | {size} | {sorted(seconds)[len(seconds) // 2]:.2f} |"
        for name, what in names.items()
        for size, seconds in records(name)["seconds"].items()
        if "pairs" not in size
    ]
    return "\n".join([*head, *rows])


@functools.cache
def outlook(hosts: int) -> dict[str, Any]:
    """Return what `memstore simulate` says of a job on so many hosts; the more hosts, the fewer runs suffice."""
    words = ("simulate", "--hosts", str(hosts), "--days", "7", "--runs", str(max(1, 16_384 // hosts)), "--json")
    found: dict[str, Any] = json.loads(CliRunner().invoke(main, words).stdout)
    return found


def sizes_table() -> str:
    """Return how much of its time a job trains, by its hosts."""
    policies = ("memstore in place", "memstore restarted", "Gemini", "CheckFreq", "durable only")
    rows = [f"| hosts (GPUs) | a failure each | {' | '.join(policies)} |", f"|---|{'---:|' * (1 + len(policies))}"]
    for hosts in SIZES:
        body = outlook(hosts)
        shares = {row["policy"]: f"{100 * row['trains']:.1f} %" for row in body["policies"]}
        trained = " | ".join(shares[name] for name in policies)
        rows.append(f"| {hosts:,} ({8 * hosts:,}) | {body['mtbf_s'] / 60:.3g} min | {trained} |")
    return "\n".join(rows)


# -- plots --------------------------------------------------------------------------------------------


COLOURS = ("#3949ab", "#00796b", "#ef6c00", "#8e24aa", "#6d4c41", "#c62828", "#546e7a", "#558b2f")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 360, 70, 170, 40, 52
Points = Sequence[tuple[float, float]]


class Axis(NamedTuple):
    """An axis with its words; it reaches from the first tick to the last."""

    words: str
    ticks: Mapping[float, str]
    is_log: bool = False

    def share(self, value: float) -> float:
        """Return where a value lies: 0 at the first tick, 1 at the last."""
        scale: Callable[[float], float] = math.log if self.is_log else float
        low, high = scale(min(self.ticks)), scale(max(self.ticks))
        return (scale(value) - low) / (high - low)


def plot(title: str, across: Axis, up: Axis, lines: Mapping[str, Points]) -> str:
    """Return an SVG file: a line with dots for each name, which stands behind its last dot."""

    def x(value: float) -> float:
        return round(LEFT + across.share(value) * (WIDTH - LEFT - RIGHT), 1)

    def y(value: float) -> float:
        return round(HEIGHT - BOTTOM - up.share(value) * (HEIGHT - TOP - BOTTOM), 1)

    left, right, top, bottom = LEFT, WIDTH - RIGHT, TOP, HEIGHT - BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="13" role="img">',
        f"<title>{title}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#fff"/>',
        f'<text x="{left}" y="24" font-weight="bold" fill="#222">{title}</text>',
        f'<text x="{(left + right) / 2:g}" y="{HEIGHT - 10}" text-anchor="middle" fill="#555">{across.words}</text>',
        f'<text transform="translate(18 {(top + bottom) / 2:g}) rotate(-90)" text-anchor="middle" fill="#555">'
        f"{up.words}</text>",
    ]
    for value, text in across.ticks.items():
        parts.append(f'<path d="M{x(value)} {top}V{bottom}" stroke="#eceff1"/>')
        parts.append(f'<text x="{x(value)}" y="{bottom + 18}" text-anchor="middle" fill="#555">{text}</text>')
    for value, text in up.ticks.items():
        parts.append(f'<path d="M{left} {y(value)}H{right}" stroke="#eceff1"/>')
        parts.append(f'<text x="{left - 8}" y="{y(value) + 4}" text-anchor="end" fill="#555">{text}</text>')
    names: list[tuple[float, float, str]] = []  # height, place across, and the text
    for (name, points), colour in zip(lines.items(), COLOURS, strict=False):
        dots = [(x(at), y(value)) for at, value in points]
        if len(dots) > 1:
            way = "L".join(f"{at} {height}" for at, height in dots)
            parts.append(f'<path d="M{way}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{at}" cy="{height}" r="3.5" fill="{colour}"/>' for at, height in dots]
        names.append((dots[-1][1] + 4, dots[-1][0] + 9, f'fill="{colour}">{name}</text>'))
    taken: list[tuple[float, float]] = []
    for height, at, text in sorted(names, reverse=True):  # from below: a name that finds its place taken moves up
        while any(abs(at - other) < 90 and abs(height - line) < 15 for line, other in taken):
            height -= 1
        taken.append((height, at))
        parts.append(f'<text x="{at:g}" y="{height:g}" {text}')
    return "\n".join([*parts, "</svg>", ""])


def counts(values: Iterable[float]) -> dict[float, str]:
    """Return ticks of whole numbers."""
    return {value: f"{value:,.0f}" for value in values}


def percents(*values: float) -> dict[float, str]:
    """Return ticks of percents."""
    return {value: f"{value:g} %" for value in values}


def copies_plot() -> str:
    """Draw the odds of lost hosts for one, two and three copies."""
    topology = even_topology(32, 4)
    lines = {}
    for scheme in (Scheme(1, 0), Scheme(1, 1), Scheme(1, 2)):
        odds = survival_odds(scheme.bonds(topology), 32, 8)
        lines[scheme.name] = [(float(lost), 100 * float(1 - each.chance)) for lost, each in enumerate(odds)]
    across = Axis("hosts lost at once, of 32 in 4 racks", counts(range(9)))
    return plot("How likely the loss takes a step along", across, Axis("", percents(0, 20, 40, 60, 80, 100)), lines)


def bill_plot() -> str:
    """Draw memory against the odds of three lost hosts, of each scheme."""
    hosts = Topology.of(Host(f"h{at}", {"rack": f"r{at % 10}"}) for at in range(120))
    rows = bill(hosts, Terms().scheme, versions=Terms().versions)
    lines = {row.scheme.name: [(float(row.memory), 100 * float(row.fatal[3] or 0))] for row in rows}
    across = Axis("memory, times the bytes put", counts(range(2, 7)))
    up = Axis("3 random hosts lost at once are fatal", percents(0.01, 0.1, 1, 10, 100), is_log=True)
    return plot("Copies and parity, 120 hosts in 10 racks", across, up, lines)


def interval_plot() -> str:
    """Draw what saves and work done again cost, by the distance of saves, for a cheap save and a dear one."""
    mtbf_s = DAY_S / (PRESETS["llama3"].failures_per_1000_host_days / 1000 * 2_048)
    lines = {}
    distances_s = [10 * 2 ** (step / 2) for step in range(19)]
    for name, stall_s in (("a put of 0.26 s", 0.26), ("a write of 26 s", 26.0)):
        costs = (
            (every_s, 100 * (1 - every_s / mtbf_s / math.expm1((every_s + stall_s) / mtbf_s)))
            for every_s in distances_s
        )
        lines[name] = [(every_s, cost) for every_s, cost in costs if cost <= 32]
    ticks = {10.0: "10 s", 60.0: "1 min", 600.0: "10 min", 3600.0: "1 h", 7200.0: "2 h"}
    across = Axis("from one save to the next", ticks, is_log=True)
    up = Axis("time lost to saves and work done again", percents(0, 8, 16, 24, 32))
    return plot(f"A failure in {mtbf_s / 3600:.1f} h, 2,048 hosts", across, up, lines)


def racks_plot() -> str:
    """Draw the odds of lost racks, with labels and without."""
    lines = {
        f"{scheme.name}{'' if is_labelled else ', no label'}": [
            (float(lost), 100 * share)
            for lost, share in zip(LOST_RACKS, rack_odds(scheme, is_labelled=is_labelled), strict=True)
        ]
        for scheme, is_labelled in (
            (Scheme(1, 1), False),
            (Scheme(1, 1), True),
            (Scheme(4, 1), True),
            (Scheme(1, 2), True),
            (Scheme(8, 2), True),
        )
    }
    across = Axis(f"racks lost at once, of {RACKS} with {RACK_HOSTS} hosts each", counts(LOST_RACKS))
    return plot("How likely lost racks take a step along", across, Axis("", percents(0, 25, 50, 75, 100)), lines)


def sizes_plot() -> str:
    """Draw how much of its time a job trains, by its hosts and by policy."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for hosts in SIZES:
        for row in outlook(hosts)["policies"]:
            lines.setdefault(row["policy"], []).append((float(hosts), 100 * row["trains"]))
    across = Axis("hosts of 8 GPUs", counts(SIZES), is_log=True)
    up = Axis("of its time a job trains", percents(0, 20, 40, 60, 80, 100))
    return plot("Failures as with Llama 3", across, up, lines)


PLOTS: dict[str, Callable[[], str]] = {
    "guide/how-many-copies.svg": copies_plot,
    "guide/copies-or-parity.svg": bill_plot,
    "guide/which-interval.svg": interval_plot,
    "guide/lose-a-rack.svg": racks_plot,
    "guide/how-large.svg": sizes_plot,
}

# -- the pages ----------------------------------------------------------------------------------------


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
    "racks": racks_table,
    "feeds": feeds_screen,
    "controller": controller_table,
    "growth": growth_table,
    "sizes": sizes_table,
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
    for name, draw in PLOTS.items():
        file = ROOT / "docs" / name
        if not file.exists() or file.read_text(encoding="utf-8") != draw():
            file.write_text(draw(), encoding="utf-8")
            print(f"written: docs/{name}")

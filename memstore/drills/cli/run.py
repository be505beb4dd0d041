"""`memstore drill run`: a suite of drills, one report for machines, one page for people.

Exit codes: 0 every promise kept, 1 a promise was broken or a drill did not work, 2 wrong usage.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memstore.cli.options import Seconds
from memstore.cli.output import data_console, plain_table, print_json, say
from memstore.config import MIB, Config
from memstore.drills.model.promises import EMBEDDED, IN_PLACE, NAMESPACES, RAY_NAMESPACES, RUNNING, TIGHT
from memstore.drills.model.report import PASS
from memstore.drills.run.page import HEADS, cells, page, title_of
from memstore.drills.sites.site_options import (
    line_printer,
    options_from,
    own_site,
    place_problem,
    play_options,
    prepare_ray,
    quiet,
    running_site,
)

if TYPE_CHECKING:
    from memstore.drills.sites.site import Site

RECORD_NAME, PAGE_NAME = "drills.json", "drills.html"
TIMEOUT_S = 1800.0
SUITES = ("standard", "full", IN_PLACE)


@click.command("run", short_help="A suite of drills, one after the other; writes a report and a page.")
@click.option(
    "--suite",
    type=click.Choice(SUITES),
    default=SUITES[0],
    show_default=True,
    help="full: every drill there is, and every play beyond; in-place: recovery in place.",
)
@click.option(
    "--out",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help=f"Where to write {RECORD_NAME} and {PAGE_NAME}; default: nowhere.",
)
@click.option(
    "--timeout-s", type=Seconds(1.0), default=TIMEOUT_S, show_default=True, help="No drill is begun after this."
)
@play_options
def run(suite: str, out: Path | None, timeout_s: float, config: Config, as_json: bool, **given: Any) -> None:
    """Play a suite of drills. One that fails does not stop the others; those that cannot be played here are named."""
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    if given["embedded"]:
        prepare_ray()
    print_line = line_printer(as_json)
    with quiet():
        found = _play(suite, timeout_s, config, given, print_line)
    if out is not None:
        (out / RECORD_NAME).write_text(json.dumps(found, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        (out / PAGE_NAME).write_text(page(found), encoding="utf-8")
    if as_json:
        print_json(found)
    else:
        show(found)
    if out is not None:
        say(f"written: {out / RECORD_NAME}, {out / PAGE_NAME}")
    click.get_current_context().exit(0 if found["outcome"] == PASS else 1)


def _play(
    suite: str, timeout_s: float, config: Config, given: dict[str, Any], print_line: Callable[[str], None]
) -> dict[str, Any]:
    """Open the clusters, play the suite, and return the record."""
    from memstore.drills.run.suite import Suite, plays_of
    from memstore.drills.run.suite_record import record

    plays, nbytes = plays_of(suite), given["mbytes"] * MIB

    @contextlib.contextmanager
    def running() -> Iterator[Site]:
        touches = "; ".join(f"{play.drill.name}: {play.drill.touches}" for play in plays if RUNNING in play.places)
        with running_site(config, given, touches) as site:
            given["yes"] = True  # the user has agreed for the whole suite, also if the site is opened again
            yield site

    openers: dict[str, Callable[[], contextlib.AbstractContextManager[Site]]] = {RUNNING: running}
    problems: dict[str, str] = {}
    if given["embedded"]:
        found = {place: place_problem(place) for place in (EMBEDDED, NAMESPACES, RAY_NAMESPACES, TIGHT)}
        problems = {place: why for place, why in found.items() if why is not None}
        openers = {place: partial(own_site, place, given, nbytes) for place in found if place not in problems}
    else:
        with running():  # without a cluster, a store or the user's consent each drill would end by the same error
            pass
    with contextlib.ExitStack() as stack:
        durable = given["durable"]
        if durable is None and given["embedded"]:
            durable = stack.enter_context(tempfile.TemporaryDirectory(prefix="memstore-drill-"))
        runner = Suite(
            openers,
            options_from(given, config),
            durable=durable,
            timeout_s=timeout_s,
            print_line=print_line,
            named_durable=given["durable"],
            problems=problems,
        )
        result = runner.run(plays)
    return record(suite, given["seed"], result, nbytes=nbytes)


def show(found: dict[str, Any]) -> None:
    """Print a record as a table."""
    table = plain_table(*HEADS)
    for row in found["drills"]:
        table.add_row(*cells(row))
    console = data_console()
    console.print(table)
    for row in found["drills"]:
        if row["outcome"] != PASS:
            console.print(f"! {title_of(row)}: {row['words']}  again: {row['replay']}")
    counts = ", ".join(f"{count} {name}" for name, count in found["counts"].items())
    console.print(
        f"{found['outcome']}  suite {found['suite']}, seed {found['seed']}: {counts}, {len(found['skipped'])} not "
        f"played, {found['seconds']:g} s"
    )

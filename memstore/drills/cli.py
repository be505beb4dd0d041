"""`memstore drill`: list the faults, play one, or play a suite.

One command for each drill of the catalogue, `list`, and `memstore drill run` for a suite. A command imports Ray only
when it plays. Exit codes of a drill: 0 the promised outcome, 1 it did not work or was refused, 2 wrong usage, 3 a
broken promise, 130 Ctrl-C; of `run`: 0 all kept, 1 otherwise. Lines for people go to stdout; with `--json` to stderr.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import math
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memstore.cli.options import Seconds
from memstore.cli.output import data_console, plain_table, print_json, say
from memstore.config import MIB, Config
from memstore.drills.model.catalogue import (
    AFTERWARDS,
    APART,
    DRILLS,
    EMBEDDED,
    FAMILIES,
    IN_PLACE,
    KEPT_HEAD,
    NAMESPACES,
    PLACES,
    RAY_NAMESPACES,
    RUNNING,
    TIGHT,
    Drill,
    find,
    rows,
)
from memstore.drills.model.report import EXIT_CODES, PASS
from memstore.drills.run.page import HEADS, cells, page, title_of
from memstore.drills.sites.site_options import (
    check_usage,
    durable_directory,
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


# -- run ----------------------------------------------------------------------------------------------
# `memstore drill run`: a suite of drills, one report for machines, one page for people.
#
# Exit codes: 0 every promise kept, 1 a promise was broken or a drill did not work, 2 wrong usage.


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
        found = _play_suite(suite, timeout_s, config, given, print_line)
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


def _play_suite(
    suite: str, timeout_s: float, config: Config, given: dict[str, Any], print_line: Callable[[str], None]
) -> dict[str, Any]:
    """Open the clusters, play the suite, and return the record."""
    from memstore.drills.run.suite import Suite, plays_of, record

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
        own_places = (EMBEDDED, APART, KEPT_HEAD, NAMESPACES, RAY_NAMESPACES, TIGHT)
        found = {place: place_problem(place) for place in own_places}
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


# -- group --------------------------------------------------------------------------------------------


class Drills(click.Group):
    """The group of commands: list, run, and one command for every drill of the catalogue."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands, then those of the drills."""
        return [*self.commands, *DRILLS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of a name, or the command that plays the drill of that name."""
        if cmd_name not in self.commands and cmd_name in DRILLS:
            return _play_command(cmd_name)
        return super().get_command(ctx, cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command of the first argument; for a wrong name, fail with the nearest names, or with all."""
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            known = self.list_commands(ctx)
            near = difflib.get_close_matches(args[0], known, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else f"it is not one of {', '.join(known)}."
            ctx.fail(f"no drill is called {args[0]!r}: {hint} `memstore drill list` says what each one breaks")
        return super().resolve_command(ctx, args)


@click.group(cls=Drills, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
def drill() -> None:
    """Break something, wait until it is broken, recover, and compare every byte with states made without the store.

    Without --embedded a drill plays with a scratch job on your running store, says first what it will touch, and asks.
    """


@drill.command("list", short_help="Every fault: what it breaks, what it touches, what is promised, where it runs.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def list_drills(as_json: bool) -> None:
    """Show every fault with what it does, its blast radius, the promised outcome and its play beyond the tolerance."""
    if as_json:
        print_json(rows())
        return
    for family in FAMILIES:
        for entry in (d for d in DRILLS.values() if d.family == family):
            places = "; ".join(PLACES[place] for place in entry.runs_on)
            click.echo(f"{entry.name}  ({family}; {AFTERWARDS[entry.flow]})")
            lines = [("breaks", entry.breaks), ("touches", entry.touches), ("promised", entry.promise.words)]
            if entry.beyond:
                lines.append(("beyond", f"{entry.beyond}; promised: a refusal, or the durable step"))
            lines.append(("runs on", places + (", where --victim names the host" if entry.needs_victim else "")))
            for what, text in lines:
                click.echo(f"  {what:<10}{text}")


drill.add_command(run)


def _play_command(name: str) -> click.Command:
    """Return the command that plays one drill."""
    entry = find(name)

    def play(config: Config, as_json: bool, **given: Any) -> None:
        row = _play(entry, config, given, as_json=as_json)
        if as_json:
            click.echo(json.dumps(row, ensure_ascii=False))
        click.get_current_context().exit(EXIT_CODES[row["outcome"]])

    beyond = click.option(
        "--beyond", is_flag=True, help="Lose more than is tolerated: a refusal (or the durable step) is promised."
    )
    help_text = f"Break {entry.breaks}.\n\nTouches: {entry.touches}.\n\nPromised: {entry.promise.words}."
    return click.command(name, help=help_text, short_help=entry.breaks)(beyond(play_options(play)))


def _play(entry: Drill, config: Config, given: dict[str, Any], *, as_json: bool) -> dict[str, Any]:
    """Play one drill on the cluster that was asked for; return its row of a suite's record."""
    check_usage(entry, given)
    print_line = line_printer(as_json)
    if given["embedded"]:
        prepare_ray()
        place = (entry.beyond_runs_on if given["beyond"] else entry.runs_on)[0]
        opened = own_site(place, given, given["mbytes"] * MIB, name=entry.name)
    else:
        touches = f"{entry.touches}; besides, room for a scratch job of {given['mbytes']} MiB per rank"
        place, opened = RUNNING, running_site(config, given, touches)
    with quiet(), durable_directory(given, is_needed=entry.needs_durable) as durable, opened as site:
        from memstore.drills.run.suite import Play, Suite

        suite = Suite(
            {place: lambda: contextlib.nullcontext(site)},
            options_from(given, site.config, durable=durable),
            durable=durable,
            timeout_s=math.inf,
            print_line=print_line,
            named_durable=given["durable"],
        )
        played = suite.run([Play(entry, given["beyond"])]).drills
    if not played:  # a suite reports the drills before a Ctrl-C; here there are none
        raise click.Abort
    return played[0]

"""`memstore drill`: list the faults, play one, or play a suite.

Exit codes: 0 the promised outcome, 1 the drill did not work, 2 wrong usage, 3 the promise is broken, 130 Ctrl-C.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import math
from typing import Any

import click

from memstore.cli.output import print_json
from memstore.config import MIB, Config
from memstore.drills.cli.run import run
from memstore.drills.model.catalogue import DRILLS, find, rows
from memstore.drills.model.promises import AFTERWARDS, FAMILIES, PLACES, RUNNING, Drill
from memstore.drills.model.report import EXIT_CODES
from memstore.drills.sites.site_options import (
    check_usage,
    durable_directory,
    line_printer,
    options_from,
    own_site,
    play_options,
    prepare_ray,
    quiet,
    running_site,
)


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

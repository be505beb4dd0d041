"""`memstore rehearse`: would a fresh process take this training state? Before the first failure, without a store."""

from __future__ import annotations

import click

from memstore.cli.options import json_option
from memstore.cli.output import ExitCode, print_json


@click.command(short_help="Ask whether a fresh process would take the state that your code builds.")
@click.argument("target", metavar="FILE.py:FUNCTION")
@click.option("--steps", default=2, show_default=True, help="Steps to train before the state is taken.")
@click.option("--timeout-s", default=600.0, show_default=True, help="Seconds for each of the two processes.")
@json_option
@click.pass_context
def rehearse(ctx: click.Context, target: str, steps: int, timeout_s: float, as_json: bool) -> None:
    """Build the training state twice in fresh processes, and take it from one into the other.

    FUNCTION returns the state as it is given to put(), or the state and a function that trains one step and returns
    the loss. Every value that would not come back is named by its path; the losses of the next step are compared bit
    for bit. Exits with 0 if all is equal, else with 1.
    """
    from memstore.client.rehearsal import rehearse_alone

    found = rehearse_alone(target, steps, timeout_s)
    if as_json:
        print_json({**vars(found), "is_equal": found.is_equal})
    else:
        click.echo(str(found))
    ctx.exit(ExitCode.FINE if found.is_equal else ExitCode.ERROR)

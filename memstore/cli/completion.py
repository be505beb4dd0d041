"""`memstore completion`: the script that completes verbs and options in a shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command(short_help="The script that completes verbs and options in a shell.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script of SHELL: `eval "$(memstore completion bash)"` in its start file."""
    made = get_completion_class(shell)
    if made is None:
        raise click.UsageError(f"the installed click completes nothing in {shell}")
    click.echo(made(ctx.find_root().command, {}, "memstore", "_MEMSTORE_COMPLETE").source())

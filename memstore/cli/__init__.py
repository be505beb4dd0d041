"""The `memstore` command: `memstore.cli:main`.

Every verb: data on stdout, words on stderr, `--json` for one JSON document, of an error too. Exit codes are the
contract of `output.ExitCode`. Nothing here imports torch or ray; the verbs do, when they run, so that `--help` is
instant. Each file lists its `VERBS`; here are those that are about no store (`config.py` names them, too).
Read `status.py` next.
"""

from __future__ import annotations

import importlib
import traceback
from typing import Any

import click
from click.shell_completion import get_completion_class

from memstore.cli import (
    doctor,
    events,
    exchange,
    jobs,
    lifecycle,
    metrics,
    odds,
    offline,
    page,
    plan,
    simulate,
    status,
    timeline,
    verify,
)
from memstore.cli.options import is_debug, is_json, json_option
from memstore.cli.output import ExitCode, for_this_store, print_json, say
from memstore.distribution import VERSION
from memstore.errors import MemstoreError


def error_body(error: Exception, message: str) -> dict[str, Any]:
    """Return what --json prints of an error: its kind, its words, and the values that it names, such as `field`."""
    named = {} if isinstance(error, click.ClickException) else vars(error)
    plain = {key: value for key, value in named.items() if isinstance(value, str | int | float | None)}
    return {"error": {**plain, "kind": type(error).__name__, "message": message}}


class Verbs(click.Group):
    """A group that turns what went wrong into one clear line and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the verbs file by file, those of a cluster first."""
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a verb; an error of ours is a message, never a traceback (unless --debug)."""
        failure: Exception
        wants_json = "--json" in ctx.args  # an unparsable command has not set it
        try:
            return super().invoke(ctx)
        except click.exceptions.Exit:
            raise
        except click.ClickException as error:
            if wants_json or is_json(ctx):
                print_json(error_body(error, error.format_message()))
            raise
        except (click.Abort, KeyboardInterrupt):
            ctx.exit(ExitCode.INTERRUPTED)
        except (MemstoreError, OSError) as error:
            if isinstance(error, BrokenPipeError):
                raise  # `memstore ls | head`: click ends quietly
            failure, problem = error, str(error) or type(error).__name__
        except Exception as error:
            failure = error
            problem = f"internal error, please report it with the output of --debug: {type(error).__name__}: {error}"
        problem = for_this_store(problem)
        if is_debug(ctx):
            traceback.print_exception(failure)
        say(f"memstore: {problem}")
        if is_json(ctx):
            print_json(error_body(failure, problem))
        ctx.exit(ExitCode.ERROR)


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(VERSION, prog_name="memstore")
def main() -> None:
    """Checkpoints of every step, in the memory of the training hosts, replicated to peers.

    Exit codes: 0 fine, 1 operating error, 2 wrong usage, 3 something committed cannot be recovered, 4 degraded,
    5 a job does not train (status --check), 130 Ctrl-C.
    """


def _passed_on(name: str, module: str, short_help: str, extra: str) -> click.Command:
    """Return a verb that lives in a module of its own and is imported only when it runs."""

    @click.command(
        name,
        short_help=short_help,
        add_help_option=False,
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    @click.pass_context
    def run(ctx: click.Context, arguments: tuple[str, ...]) -> None:
        try:
            command = getattr(importlib.import_module(module), name)
        except ImportError as error:
            raise MemstoreError(
                f"`memstore {name}` cannot run in this installation: {error}. It needs {extra}"
            ) from error
        code = command.main(args=list(arguments), prog_name=f"memstore {name}", standalone_mode=False)
        if isinstance(code, int) and code:
            ctx.exit(code)

    return run


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


@click.command(short_help="The script that completes verbs and options in a shell.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script of SHELL: `eval "$(memstore completion bash)"` in its start file."""
    made = get_completion_class(shell)
    if made is None:
        raise click.UsageError(f"the installed click completes nothing in {shell}")
    click.echo(made(ctx.find_root().command, {}, "memstore", "_MEMSTORE_COMPLETE").source())


_RUN, _SEEN = (lifecycle, doctor), (status, page, events, timeline, jobs)
_ASKED, _BYTES = (plan, odds, simulate), (verify, metrics, exchange, offline)
for _module in (*_RUN, *_SEEN, *_ASKED, *_BYTES):
    for _verb in _module.VERBS:
        main.add_command(_verb)
for _verb in (rehearse, completion):
    main.add_command(_verb)
main.add_command(
    _passed_on(
        "demo",
        "memstore.demo.cli",
        "Train a small model on four hosts of this machine, kill one, compare every loss.",
        "Ray Train and matplotlib: pip install 'ray[train]' matplotlib",
    )
)
main.add_command(
    _passed_on(
        "drill",
        "memstore.drills.cli",
        "Break a cluster in a chosen way and prove the promise on the bytes.",
        "the whole memstore wheel: reinstall it",
    )
)

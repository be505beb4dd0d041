"""`memstore export` and `memstore import`: steps as files of stock libraries, and a DCP directory as a job."""

from __future__ import annotations

import contextlib
import importlib
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from memstore.cli.options import Where, WholeNumber, config_or_usage, step_or_pin, store_options
from memstore.cli.output import ExitCode, plural, print_json, progress_bar, say, size_text
from memstore.config import Config

if TYPE_CHECKING:
    from memstore.shell.durable.tier import PartsTier

NAMES_SHOWN = 10


def _folder(_ctx: click.Context, _param: click.Parameter, text: str) -> Path:
    """Read DIRECTORY; "" is no name, as of a variable that is not set."""
    if not text:
        raise click.UsageError("DIRECTORY '' names no folder")
    return Path(text).absolute()


def _format(_ctx: click.Context, _param: click.Parameter, text: str) -> str:
    if text not in ("dcp", "safetensors"):
        raise click.UsageError(
            f"--format {text!r} is neither dcp nor safetensors; a DCP directory becomes one file of torch.save by "
            "`python -m torch.distributed.checkpoint.format_utils dcp_to_torch DIRECTORY FILE`"
        )
    return text


@click.command(short_help="Write a committed step as files that stock libraries read.")
@click.argument("job")
@click.argument("step", callback=step_or_pin)
@click.argument("directory", callback=_folder)
@click.option("--format", "as_format", required=True, callback=_format, metavar="NAME", help="dcp or safetensors.")
@click.option("--rank", type=WholeNumber(), metavar="R", help="Only what this rank put.")
@click.option("--attempt", type=WholeNumber(), metavar="N", help="Whose step, where several have one of that number.")
@click.option("--prefix", default="", metavar="TEXT", help="safetensors: names that begin with TEXT, without it.")
@click.option("--with", "module", metavar="MODULE", help="Import a module that calls memstore.register() first.")
@store_options
def export(
    config: Config,
    job: str,
    step: int | str | None,
    directory: Path,
    as_format: str,
    rank: int | None,
    attempt: int | None,
    prefix: str,
    module: str | None,
    as_json: bool,
) -> None:
    """Write STEP of JOB (a number, "latest", or a pin's name) into the new folder DIRECTORY, while training goes on.

    DIRECTORY appears when it is whole. Parts that the format cannot hold are named, here and in memstore.json.
    """
    where = Where(config)
    where.status(job)
    number, attempt = where.named_step(job, step, attempt)
    from memstore.client.reader import reader
    from memstore.exchange.exporting import export_step

    if module is not None:
        importlib.import_module(module)
    with contextlib.ExitStack() as stack:  # SIGTERM removes partial results, as Ctrl-C does
        before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        stack.callback(signal.signal, signal.SIGTERM, before)
        source = stack.enter_context(reader(job, config=config))
        tell = stack.enter_context(progress_bar("exporting"))
        note = export_step(source, number, directory, as_format, tell, rank=rank, attempt=attempt, prefix=prefix)
    if as_json:
        print_json(note)
        return
    say(
        f"step {note['step']:,} of {job} (attempt {note['attempt']}, {plural(note['world_size'], 'rank')}) is in "
        f"{directory}: {as_format}, {size_text(note['nbytes'])}, every digest ok"
    )
    if note["not_kept"]:
        say(f"it could have been dropped meanwhile: {note['not_kept']}")
    for what, names in (("differs between ranks", note["per_rank"]), ("not in it", note.get("left_out", []))):
        for name in names[:NAMES_SHOWN]:
            say(f"  {what}: {name}")
        if len(names) > NAMES_SHOWN:
            say(f"  {what}: {len(names) - NAMES_SHOWN} more, see memstore.json there")


@click.command("import", short_help="Make a job out of a DCP directory, or of what hosts salvaged.")
@click.argument("job")
@click.argument("directories", metavar="DIRECTORY...", nargs=-1, required=True)
@click.option("--step", type=WholeNumber(), metavar="N", help="Its number.  [default: as exported, else 0]")
@click.option("--replicas", type=int, metavar="N", help="Copies of each shard.  [default: the store's]")
@click.option("--durable", metavar="DIR", help="Durable storage of the job; waits until the step is there.")
@click.option("--uncommitted", is_flag=True, help="Salvaged: also take a whole step that was never committed.")
@store_options
@click.pass_context
def import_(
    ctx: click.Context,
    config: Config,
    job: str,
    directories: tuple[str, ...],
    step: int | None,
    replicas: int | None,
    durable: str | None,
    uncommitted: bool,
    as_json: bool,
) -> None:
    """Commit the DCP directory DIRECTORY as a step of the new JOB, for `dcp.load` and `store.dcp_reader()`.

    Of folders that `memstore salvage` wrote (or one in which they lie), the newest whole step of JOB goes into the
    durable storage --durable, whatever only parity has decoded; no store is needed. Any launch with that storage
    restores it. Exits with 4 if the step has fewer copies than asked.
    """
    from memstore.exchange.salvaging import places_in

    for name in directories:
        if "://" not in name and not Path(name).is_dir():
            raise click.UsageError(f"Directory {name!r} does not exist.")
    if places := places_in(job, directories):
        if durable is None or (step, replicas) != (None, None):
            raise click.UsageError("what hosts salvaged goes into storage: give --durable, no --step or --replicas")
        _merge(job, places, durable, uncommitted, as_json)
        return
    if len(directories) > 1 or uncommitted:
        raise click.UsageError(
            f"none of the folders has what hosts salvaged of job {job!r}, and a DCP directory is one"
        )
    from memstore.exchange.importing import import_job

    fields = {name: value for name, value in (("replicas", replicas), ("durable", durable)) if value is not None}
    given = config_or_usage(store=config.store, arena_dir=config.arena_dir, **fields)
    with progress_bar("importing") as tell:
        made = import_job(job, Path(directories[0]), config=given, step=step, progress=tell)
    if as_json:
        print_json(made)
    else:
        say(f"step {made['step']:,} of {job} is {made['level']}: {size_text(made['nbytes'])}, for dcp.load")
        if made["degraded"]:
            say(f"degraded: {made['degraded']}")
    ctx.exit(ExitCode.DEGRADED if made["degraded"] else ExitCode.FINE)


def _merge(job: str, places: list[PartsTier], durable: str, has_uncommitted: bool, as_json: bool) -> None:
    from memstore.exchange.salvaging import merge, open_place

    with progress_bar("writing") as progress:
        made = merge(job, places, open_place(durable), has_uncommitted=has_uncommitted, progress=progress)
    if as_json:
        print_json(made)
        return
    state = "committed" if made["is_committed"] else "never committed"
    say(
        f"step {made['step']:,} of {job} (attempt {made['attempt']}, {plural(made['world_size'], 'rank')}, {state}) is "
        f"whole in {made['durable']}: {size_text(made['nbytes'])}, {plural(made['decoded'], 'chunk')} decoded from "
        f'parity, every digest ok. `connect({job!r}, durable="{made["durable"]}")` restores it'
    )
    say(made["why"])


VERBS = (export, import_)

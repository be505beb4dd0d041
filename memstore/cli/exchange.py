"""`memstore export` and `memstore import`: steps as files of stock libraries, and such files as a job."""

from __future__ import annotations

import contextlib
import importlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from memstore.cli.options import Where, Whole, config_or_usage, step_or_pin, store_options
from memstore.cli.output import ExitCode, plural, print_json, say, size_text
from memstore.config import Config, bytes_from_text
from memstore.errors import ConfigError

FORMAT = click.Choice(["dcp", "torch", "safetensors"])
NAMES_SHOWN = 10


def _named_folder(_ctx: click.Context, _param: click.Parameter, text: str) -> Path:
    """Read DIRECTORY; "" is no name, as of a variable that is not set."""
    if not text:
        raise click.UsageError("DIRECTORY '' names no folder")
    return Path(text)


@click.command(short_help="Write a committed step as files that stock libraries read.")
@click.argument("job")
@click.argument("step", callback=step_or_pin)
@click.argument("directory", callback=_named_folder)
@click.option("--format", "as_format", type=FORMAT, required=True, help="What the files are.")
@click.option("--rank", type=Whole(), metavar="R", help="Only what this rank put.")
@click.option("--attempt", type=Whole(), metavar="N", help="Whose step, where several have one of that number.")
@click.option("--prefix", default="", metavar="TEXT", help="safetensors: names that begin with TEXT, without it.")
@click.option("--file-bytes", default="5GB", show_default=True, metavar="SIZE", help="safetensors: size of a file.")
@click.option("--with", "module", metavar="MODULE", help="Import a module that calls memstore.register() first.")
@store_options
def export(
    config: Config, job: str, step: int | str | None, directory: Path, as_format: str, rank: int | None,
    attempt: int | None, prefix: str, file_bytes: str, module: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Write STEP of JOB (a number, "latest", or a pin's name) into the new folder DIRECTORY, while training goes on.

    DIRECTORY appears when it is whole. Parts that the format cannot hold are named, here and in memstore.json.
    """
    try:
        limit = bytes_from_text("file_bytes", file_bytes)
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    where = Where(config)
    where.status(job)
    number, attempt = where.named_step(job, step, attempt)
    from memstore.client.reader import reader
    from memstore.exchange.exporting import export_step

    if module is not None:
        importlib.import_module(module)
    with _ends_on_sigterm(), reader(job, config=config) as source:
        note = export_step(
            source, number, directory.absolute(), as_format, rank=rank, attempt=attempt, prefix=prefix,
            file_bytes=limit,
        )  # fmt: skip
    if as_json:
        print_json(note)
        return
    for line in _export_lines(note):
        say(line)


@contextlib.contextmanager
def _ends_on_sigterm() -> Iterator[None]:
    """Let SIGTERM end the process as Ctrl-C does: partial results are removed."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _export_lines(note: dict[str, Any]) -> list[str]:
    """Return the notes of an export for people; the JSON has all of them."""
    lines = [
        f"step {note['step']:,} of {note['job']} (attempt {note['attempt']}, {plural(note['world_size'], 'rank')}) is "
        f"in {note['directory']}: {note['format']}, {size_text(note['nbytes'])}, every digest ok"
    ]
    if note["not_pinned"]:
        lines.append(f"it could have been dropped meanwhile: {note['not_pinned']}")
    left_out = list(note.get("left_out", {}).items())
    lines += [f"  differs between ranks: {name}" for name in note.get("per_rank", ())[:NAMES_SHOWN]]
    lines += [f"  not in it: {name}: {why}" for name, why in left_out[:NAMES_SHOWN]]
    for file in note.get("files", ()) if isinstance(note.get("files"), list) else ():
        if file["dtensors"]:
            lines.append(f"  {file['file']}: {plural(file['dtensors'], 'DTensor')} as this rank's own parts")
        if file["unsafe_globals"]:
            lines.append(f"  {file['file']}: weights_only=True refuses {', '.join(file['unsafe_globals'])}")
    more = max(len(note.get("per_rank", ())), len(left_out)) - NAMES_SHOWN
    return [*lines, "  and more: see memstore.json there"] if more > 0 else lines


@click.command("import", short_help="Make a new job out of a DCP directory, torch rank files or safetensors.")
@click.argument("job")
@click.argument("directory", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--format", "as_format", type=FORMAT, help="What the files are.  [default: as they look]")
@click.option("--step", type=Whole(), metavar="N", help="Its number.  [default: as exported, else 0]")
@click.option("--ranks", type=click.IntRange(min=1), metavar="N", help="World size of the step; not for rank files.")
@click.option("--replicas", type=int, metavar="N", help="Copies of each shard.  [default: the store's]")
@click.option("--durable", metavar="DIR", help="Durable storage of the job; waits until the step is there.")
@click.option("--prefix", default="", metavar="TEXT", help="safetensors: put TEXT before every name.")
@click.option("--allow-pickle", is_flag=True, help="torch: run what the files pickle. Only if you trust them.")
@store_options
@click.pass_context
def import_(
    ctx: click.Context, config: Config, job: str, directory: Path, as_format: str | None, step: int | None,
    ranks: int | None, replicas: int | None, durable: str | None, prefix: str, allow_pickle: bool, as_json: bool,
) -> None:  # fmt: skip
    """Commit the files in DIRECTORY as a step of the new JOB.

    Rank files become a step for `store.get()` with as many ranks; all else one for `dcp.load` and `store.dcp_reader()`.
    Started on several hosts at once with RANK and WORLD_SIZE, each host holds its share. Exits with 4 if the step has
    fewer copies than asked.
    """
    from memstore.exchange.importing import import_job, place_from_environment

    given = {"replicas": replicas, "durable": durable}
    fields = {name: value for name, value in given.items() if value is not None}
    made = import_job(
        job, directory, as_format, config=config_or_usage(store=config.store, arena_dir=config.arena_dir, **fields),
        step=step, ranks=ranks, prefix=prefix, allow_pickle=allow_pickle, place=place_from_environment(),
    )  # fmt: skip
    if as_json:
        print_json(made)
    else:
        way = "store.get()" if made["made_by"] == "put" else "dcp.load and store.dcp_reader()"
        say(f"step {made['step']:,} of {job} is {made['level']}: {plural(made['world_size'], 'rank')}, "
            f"{size_text(made['nbytes'])}, for {way}")  # fmt: skip
        if made["degraded"]:
            say(f"degraded: {made['degraded']}")
    ctx.exit(ExitCode.DEGRADED if made["degraded"] else ExitCode.FINE)

"""What the arenas of this machine hold, without Ray: `--offline` of three verbs, and `memstore salvage` (R6, R7).

Neither controller nor holder is asked: files are read, nothing is changed, and no lock is taken.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from memstore.cli.options import store_options
from memstore.cli.output import ExitCode, age_text, data_console, plain_table, print_json, progress_bar, say, size_text
from memstore.config import Config
from memstore.core.cluster.job import Job
from memstore.core.cluster.text import listed, plural
from memstore.errors import ConfigError
from recovery.inventory import Copy, StepId

if TYPE_CHECKING:
    from memstore.shell.arena.offline import OfflineArena

offline_option = click.option(
    "--offline", is_flag=True, help="Read this machine's arenas: needs no Ray, controller or holder."
)


@contextlib.contextmanager
def arenas_here(config: Config) -> Iterator[list[OfflineArena]]:
    """Open the arenas of a store on this machine; ConfigError if there is none."""
    from memstore.shell.arena.offline import OfflineArena, arena_folders

    folders = arena_folders(config)
    if not folders:
        from memstore.admin.stores import others_here

        others = others_here(config, "")
        raise ConfigError(
            f"no arena of store {config.store!r} lies under {config.arena_dir} on this machine: name the store and its "
            f"memory file system (--store, --arena-dir){'; ' + others if others else ''}"
        )
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(OfflineArena(folder)) for folder in folders]


def show_offline(config: Config, job: str | None, as_json: bool, *, has_digests: bool = False) -> ExitCode:
    """Print what lies here of each step, what of it is not whole, and what a get from this machine alone would return.

    Returns:
        4 if something is not whole, 1 if nothing is.
    """
    from memstore.core.salvage import choose, jobs_of

    with arenas_here(config) as arenas:
        held = [(arena, each) for arena in arenas for each in arena.shards if job in (None, each.manifest.shard.job)]
        found: list[tuple[OfflineArena, Copy]] = []
        lacking: list[str] = []
        with progress_bar("digesting", sum(each.spec.nbytes for _, each in held)) as progress:
            for arena, each in held:
                progress(each.spec.nbytes)
                copy = arena.copy(each, arena.chunk if has_digests else arena.is_listed)
                if copy.missing and arena.is_dropped(each):
                    continue
                found.append((arena, copy))
                if copy.missing:
                    lacking.append(f"{arena.host}: {each}: {len(copy.missing)} of {copy.spec.chunks_count} chunks lack")
    jobs = jobs_of([arena.entries for arena in arenas], [copy for _, copy in found])
    rows = _step_rows(found, jobs)
    problems = [f"{arena.host}: {problem}" for arena in arenas for problem in arena.problems] + lacking
    outlook = {name: choose(each).why for name, each in sorted(jobs.items()) if job in (None, name)}
    code = ExitCode.DEGRADED if problems else ExitCode.FINE
    code = code if any(row["ranks"] or row["parity_of"] for row in rows) else ExitCode.ERROR
    if as_json:
        hosts = {arena.host: {"folder": str(arena.folder), "is_held": arena.is_held} for arena in arenas}
        body = {"store": config.store, "hosts": hosts, "steps": rows, "here_alone": outlook, "problems": problems}
        print_json({**body, "ok": code == ExitCode.FINE})
        return code
    console = data_console()
    table = plain_table("JOB", ">ATT", ">STEP", "STATE", "HOST", "RANKS", "PARITY OF", ">WHOLE", ">AGE")
    for row in rows:
        first = (row["job"], str(row["attempt"]), f"{row['step']:,}", row["state"], row["host"])
        ranks = f"{listed(row['ranks']) or 'none'} of {row['world_size']}{' !' if row['not_whole'] else ''}"
        table.add_row(*first, ranks, listed(row["parity_of"]) or "-", size_text(row["nbytes"]), age_text(row["age_s"]))
    console.print(table)
    for words in (*(f"! {each}" for each in problems), *(f"{name}, here alone: {outlook[name]}" for name in outlook)):
        console.print(words)
    looked = "every byte that counts matches its digest" if has_digests else "`memstore verify --offline` digests it"
    alive = sum(arena.is_held for arena in arenas)
    if code == ExitCode.ERROR:
        say(f"nothing{f' of job {job!r}' if job else ''} is whole here")
    say(f"{plural(len(arenas), 'arena')} read, {alive} of live holders; {looked}; `memstore salvage --to DIR` saves it")
    return code


def _step_rows(found: list[tuple[OfflineArena, Copy]], jobs: dict[str, Job]) -> list[dict[str, Any]]:
    """Return what each host has of each step, the newest first."""
    by_step: dict[tuple[str, int, int, str], list[tuple[OfflineArena, Copy]]] = {}
    for arena, copy in found:
        key = (copy.shard.job, -copy.shard.attempt, -copy.shard.step, copy.host)
        by_step.setdefault(key, []).append((arena, copy))
    rows: list[dict[str, Any]] = []
    for (name, attempt, step, host), same in sorted(by_step.items(), key=lambda item: item[0]):
        whole, job = [copy for _, copy in same if not copy.missing], jobs.get(name)
        rows.append(
            {
                "job": name,
                "attempt": -attempt,
                "step": -step,
                "state": _state(job, StepId(-attempt, -step)),
                "host": host,
                "ranks": sorted(copy.shard.rank for copy in whole if not copy.shard.is_parity),
                "parity_of": sorted({each.rank for copy in whole for each in copy.spec.summands}),
                "not_whole": len(same) - len(whole),
                "world_size": same[0][1].spec.world_size,
                "nbytes": sum(copy.spec.nbytes for copy in whole),
                "age_s": min(arena.age_s[copy.spec.digest] for arena, copy in same),
            }
        )
    return rows


def _state(job: Job | None, step: StepId) -> str:
    if job is None:
        return "removed"
    if step in job.retired:
        return "retired"
    if step in job.commits:
        return "committed"
    return "uncommitted" if step in job.copies or step in job.parity else "given up"


@click.command(short_help="Write what this machine's arenas hold into a folder, without Ray.")
@click.option("--to", "url", required=True, metavar="DIR", help="Folder, or a URL of s3://, gs:// or az://.")
@click.option("--job", metavar="JOB", help="Only this job.  [default: all]")
@store_options
@click.pass_context
def salvage(ctx: click.Context, config: Config, url: str, job: str | None, as_json: bool) -> None:
    """Write every shard, and all parity, that is whole on this machine into DIR; for when Ray does not work.

    Run it on every host, into one DIR or one each, then `memstore import JOB DIR... --durable PLACE` once. Run again,
    it writes only what lacks. Exits with 4 if something was not whole and left out, with 1 if nothing is whole.
    """
    from memstore.exchange.salvaging import open_place
    from memstore.exchange.salvaging import salvage as write_out

    if not url:
        raise click.UsageError("--to '' names no folder")
    with arenas_here(config) as arenas:
        place, shards = open_place(url), [each for arena in arenas for each in arena.shards]
        place.files.probe()
        total = sum(each.spec.nbytes for each in shards if job in (None, each.manifest.shard.job))
        with progress_bar("writing", total) as progress:
            found = [{**write_out(arena, place, job, progress), "problems": arena.problems} for arena in arenas]
    left_out = [f"{each['host']}: {words}" for each in found for words in (*each["torn"], *each["problems"])]
    alive = [arena.host for arena in arenas if arena.is_held]
    if left_out and alive:
        left_out.append(f"a holder lives on {', '.join(alive)}, and may have written meanwhile: end training first")
    code = ExitCode.DEGRADED if left_out else ExitCode.FINE
    code = code if any(each["whole"] for each in found) else ExitCode.ERROR
    if as_json:
        print_json({"to": place.files.where, "hosts": found})
    else:
        for each in found:
            count = f"{plural(each['whole'] - each['parity'], 'shard')}, parity of {plural(each['parity'], 'rank')}"
            say(f"{each['host']}: {count} whole in {place.files.where}, {size_text(each['nbytes'])} written now")
        for words in left_out:
            say(f"! {words}")
        if code == ExitCode.ERROR:
            say(f"nothing{f' of job {job!r}' if job else ''} is whole here")
    ctx.exit(code)


VERBS = (salvage,)

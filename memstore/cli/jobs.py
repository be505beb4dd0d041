"""`memstore pin`, `trust`, `unpin`, `persist` and `rm`: what stays of a job's steps, and what goes (R19, R31)."""

from __future__ import annotations

import click

from memstore.cli.options import ASK_S, Where, WholeNumber, step_or_latest, where_options
from memstore.cli.output import ExitCode, plural, print_json, say
from memstore.core.cluster.job import TRUSTED
from memstore.core.durable.checks import CHECK_DEADLINE_S
from memstore.core.durable.persist import WITHIN_MAX_S
from memstore.core.wire.calls import AskLastCopies, PersistStep, PinStep, RemoveJob, UnpinStep
from memstore.core.wire.codec import fields_of
from memstore.errors import CapacityError

CLAIM_S = 60.0  # every host claims room, and may have to grow its arena
ATTEMPT = click.option(
    "--attempt",
    type=WholeNumber(),
    metavar="N",
    help="The attempt that put it, where several have a step of that number.",
)


@click.command(short_help="Keep a committed step in RAM under a name.")
@click.argument("job")
@click.argument("step", callback=step_or_latest)
@click.argument("name")
@ATTEMPT
@where_options
def pin(where: Where, job: str, step: int | None, name: str, attempt: int | None, as_json: bool) -> None:
    """Keep STEP of JOB (a number, or "latest") in RAM as NAME, exempt from retention, until `memstore unpin`.

    It takes room of its own.
    """
    where.status(job)
    answer = where.ask(PinStep(job=job, step=step, name=name, of_attempt=attempt), CLAIM_S)
    if as_json:
        print_json(fields_of(answer))
        return
    say(f"step {answer.step:,} of {job} (attempt {answer.attempt}) is pinned as {name}")


@click.command(short_help="Say that a committed step was found good.")
@click.argument("job")
@click.argument("step", callback=step_or_latest)
@ATTEMPT
@where_options
def trust(where: Where, job: str, step: int | None, attempt: int | None, as_json: bool) -> None:
    """Keep STEP of JOB (a number, or "latest") for `get(trusted=True)`, in the place of the step trusted before.

    It takes room of its own. `memstore unpin JOB trusted` takes it back.
    """
    where.status(job)
    answer = where.ask(PinStep(job=job, step=step, name=TRUSTED, of_attempt=attempt), CLAIM_S)
    if as_json:
        print_json(fields_of(answer))
        return
    newer = "" if step in (None, answer.step) else f": it is newer than step {step:,}, nothing has changed"
    say(f"step {answer.step:,} of {job} (attempt {answer.attempt}) is trusted{newer}")


@click.command(short_help="Take a pin back.")
@click.argument("job")
@click.argument("name")
@where_options
def unpin(where: Where, job: str, name: str, as_json: bool) -> None:
    """Take the pin NAME of JOB back: retention decides about its step again."""
    where.status(job)
    answer = where.ask(UnpinStep(job=job, name=name))
    if as_json:
        print_json(fields_of(answer))
        return
    say(f"step {answer.step:,} of {job} is not pinned as {name} any more")


@click.command(short_help="Write a committed step to durable storage now.")
@click.argument("job")
@click.argument("step", callback=step_or_latest, default="latest")
@click.option("--within", "within_s", type=float, default=300.0, show_default=True, metavar="SECONDS", help="Wait.")
@where_options
@click.pass_context
def persist(ctx: click.Context, where: Where, job: str, step: int | None, within_s: float, as_json: bool) -> None:
    """Write STEP of JOB (a number, or "latest", the default) to durable storage now, ahead of the schedule.

    Exit code 0 once it is there, 4 if it is not within the time (the write goes on), 1 if it cannot be.
    """
    if not 0 < within_s <= WITHIN_MAX_S:
        raise click.UsageError(f"--within {within_s:g}: the write must have some time, at most {WITHIN_MAX_S:g} s")
    where.status(job)
    answer = where.ask(PersistStep(job=job, step=step, within_s=within_s), within_s + CLAIM_S)
    if as_json:
        print_json(fields_of(answer))
    elif answer.is_durable:
        say(f"step {answer.step:,} of {job} (attempt {answer.attempt}) is durable")
    else:
        say(f"step {answer.step:,} of {job} is not durable after {within_s:g} s: {answer.problem}")
    ctx.exit(ExitCode.FINE if answer.is_durable else ExitCode.DEGRADED)


@click.command(short_help="Drop every copy of a job in RAM.")
@click.argument("job")
@click.option("--yes", is_flag=True, help="Even if its newest committed step, or a pinned one, is only in RAM.")
@click.option("--force", is_flag=True, help="Even while a rank of it is alive, and with its pins.")
@where_options
def rm(where: Where, job: str, yes: bool, force: bool, as_json: bool) -> None:
    """Drop every copy of JOB in RAM, and its records in the store; durable steps stay where they are.

    Durable storage is checked first: the steps that replace the copies must be there now.
    The memory that no other job has reserved goes back to the machine.
    """
    row = next(row for row in where.status(job).jobs if row.job == job)
    lost = [] if yes else where.ask(AskLastCopies(job=job), CHECK_DEADLINE_S + ASK_S).lost.get(job)
    if lost:
        needs_force = force or row.pins or (row.newest is not None and row.newest.ranks_alive)
        command = f"`memstore rm {job} --yes --force`" if needs_force else f"`memstore rm {job} --yes`"
        raise CapacityError(
            f"job {job!r}: {' and '.join(lost)}. Dropping it would lose that for good: if it is not needed, {command}"
        )
    answer = where.ask(RemoveJob(job=job, force=force))
    durable = row.newest.durable if row.newest is not None else None
    if as_json:
        print_json({**fields_of(answer), "durable": durable})
        return
    kept = f"; its durable steps stay in {durable}" if durable else ""
    kept += "".join(f"; pin {name} of step {pin.step:,} is gone" for name, pin in answer.pins.items())
    say(f"dropped job {job}: {plural(answer.shards, 'shard')} in RAM{kept}")


VERBS = (pin, trust, unpin, persist, rm)

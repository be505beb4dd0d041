"""`memstore pin`, `unpin` and `persist`: steps that stay (R19, R31)."""

from __future__ import annotations

import click

from memstore.cli.options import Where, Whole, address_option, step_or_latest, store_options
from memstore.cli.output import ExitCode, print_json, say
from memstore.config import Config
from memstore.core.durable.persist import WITHIN_MAX_S
from memstore.core.wire.calls import PersistStep, PinStep, UnpinStep
from memstore.core.wire.codec import fields_of

CLAIM_S = 60.0  # every host claims room, and may have to grow its arena
ATTEMPT = click.option(
    "--attempt", type=Whole(), metavar="N", help="The attempt that put it, where several have a step of that number."
)


@click.command(short_help="Keep a committed step in RAM under a name.")
@click.argument("job")
@click.argument("step", callback=step_or_latest)
@click.argument("name")
@ATTEMPT
@address_option
@store_options
def pin(
    config: Config, address: str | None, job: str, step: int | None, name: str, attempt: int | None, as_json: bool
) -> None:
    """Keep STEP of JOB (a number, or "latest") in RAM as NAME, exempt from retention, until `memstore unpin`.

    It takes room of its own.
    """
    where = Where(config, address)
    where.status(job)
    answer = where.ask(PinStep(job=job, step=step, name=name, of_attempt=attempt), CLAIM_S)
    if as_json:
        print_json(fields_of(answer))
        return
    say(f"step {answer.step:,} of {job} (attempt {answer.attempt}) is pinned as {name}")


@click.command(short_help="Take a pin back.")
@click.argument("job")
@click.argument("name")
@address_option
@store_options
def unpin(config: Config, address: str | None, job: str, name: str, as_json: bool) -> None:
    """Take the pin NAME of JOB back: retention decides about its step again."""
    where = Where(config, address)
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
@address_option
@store_options
@click.pass_context
def persist(
    ctx: click.Context, config: Config, address: str | None, job: str, step: int | None, within_s: float, as_json: bool
) -> None:
    """Write STEP of JOB (a number, or "latest", the default) to durable storage now, ahead of the schedule.

    Exit code 0 once it is there, 4 if it is not within the time (the write goes on), 1 if it cannot be.
    """
    if not 0 < within_s <= WITHIN_MAX_S:
        raise click.UsageError(f"--within {within_s:g}: the write must have some time, at most {WITHIN_MAX_S:g} s")
    where = Where(config, address)
    where.status(job)
    answer = where.ask(PersistStep(job=job, step=step, within_s=within_s), within_s + CLAIM_S)
    if as_json:
        print_json(fields_of(answer))
    elif answer.is_durable:
        say(f"step {answer.step:,} of {job} (attempt {answer.attempt}) is durable")
    else:
        say(f"step {answer.step:,} of {job} is not durable after {within_s:g} s: {answer.problem}")
    ctx.exit(ExitCode.FINE if answer.is_durable else ExitCode.DEGRADED)

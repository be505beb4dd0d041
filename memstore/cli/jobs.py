"""`memstore rm`: drop all that the store holds of a job."""

from __future__ import annotations

import click

from memstore.cli.options import ASK_S, Where, address_option, store_options
from memstore.cli.output import plural, print_json, say
from memstore.config import Config
from memstore.core.durable.checks import CHECK_DEADLINE_S
from memstore.core.wire.calls import AskLastCopies, RemoveJob
from memstore.core.wire.codec import fields_of
from memstore.errors import CapacityError


@click.command(short_help="Drop every copy of a job in RAM.")
@click.argument("job")
@click.option("--yes", is_flag=True, help="Even if its newest committed step, or a pinned one, is only in RAM.")
@click.option("--force", is_flag=True, help="Even while a rank of it is alive, and with its pins.")
@address_option
@store_options
def rm(config: Config, address: str | None, job: str, yes: bool, force: bool, as_json: bool) -> None:
    """Drop every copy of JOB in RAM, and its records in the store; durable steps stay where they are.

    Durable storage is checked first: the steps that replace the copies must be there now.
    The memory that no other job has reserved goes back to the machine.
    """
    where = Where(config, address)
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
    kept += "".join(f"; pin {pin.name} of step {pin.step:,} is gone" for pin in answer.pins)
    say(f"dropped job {job}: {plural(answer.shards, 'shard')} in RAM{kept}")

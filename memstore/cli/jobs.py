"""`memstore ls` and `memstore rm`: the steps a job has, and dropping them."""

from __future__ import annotations

from typing import Any

import click

from memstore.cli.options import Where, address_option, check_job, store_options
from memstore.cli.output import age_text, count_text, data_console, plain_table, plural, print_json, say, size_text
from memstore.config import Config


@click.command(short_help="The steps of a job, newest first.")
@click.argument("job", required=False)
@address_option
@store_options
def ls(config: Config, address: str | None, job: str | None, as_json: bool) -> None:
    """List the steps of JOB, or of every job, newest first."""
    status = Where(config, address).status()
    if job is not None:
        check_job(status, job)
    jobs = [
        {"job": row["job"], "attempt": row["attempt"], "replicas": row.get("replicas"), "steps": row["steps"]}
        for row in status["jobs"]
        if job in (None, row["job"])
    ]
    if as_json:
        print_json({"jobs": jobs})
        return
    if not jobs:
        say("the store holds no job yet")
        return
    table = plain_table("JOB", ">ATT", ">STEP", "STATE", "COPIES", ">RANKS", ">BYTES", ">AGE", "HOSTS")
    for row in jobs:
        for step in row["steps"]:
            size = step["world_size"] or "?"
            table.add_row(
                row["job"], str(step["attempt"]), count_text(step["step"]), step_state(step),
                f"{step['copies']} of {row['replicas']}" if step["committed"] else "-", f"{step['shards']}/{size}",
                size_text(step["nbytes"]) if step["shards"] else "-", age_text(step["age_s"]),
                ", ".join(step["hosts"]) or "-",
            )  # fmt: skip
    data_console().print(table)


def step_state(step: dict[str, Any]) -> str:
    """Return what a step is, in words: "committed, durable", "degraded: why", "open", "retired: why"."""
    if step["retired"]:
        return f"retired: {step['retired']}"
    words = []
    if step["committed"]:
        words.append(f"degraded: {step['degraded']}" if step["degraded"] else "committed")
    if step["durable"]:
        words.append("durable")
    if not words:
        words.append("open")
    if not step["in_lineage"]:
        words.append("not in the lineage")
    return ", ".join(words)


@click.command(short_help="Drop every copy of a job in RAM.")
@click.argument("job")
@click.option("--force", is_flag=True, help="Even while a rank of it is alive.")
@address_option
@store_options
def rm(config: Config, address: str | None, job: str, force: bool, as_json: bool) -> None:
    """Drop every copy of JOB in RAM, and what the store knows of it; durable steps stay where they are."""
    where = Where(config, address)
    status = where.status()
    check_job(status, job)
    durable = next(row.get("durable") for row in status["jobs"] if row["job"] == job)
    answer = where.ask("rm", {"job": job, "force": force})
    if as_json:
        print_json({**answer, "durable": durable})
        return
    kept = f"; its durable steps stay in {durable}" if durable else ""
    say(f"dropped job {job}: {plural(answer['shards'], 'shard')} in RAM{kept}")

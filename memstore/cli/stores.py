"""`memstore stores`: this user's stores on this machine, live or left over."""

from __future__ import annotations

import click

from memstore.cli.options import store_options
from memstore.cli.output import count_text, data_console, plain_table, print_json, say, size_text
from memstore.config import Config


@click.command(short_help="This user's stores on this machine, live or left over.")
@store_options
def stores(config: Config, as_json: bool) -> None:
    """List this user's stores on this machine, with the jobs and newest committed steps of live ones.

    What a left-over one holds shows once `memstore up` has adopted it. --store is not used: all are listed.
    """
    from memstore.admin.stores import stores_here

    found = stores_here(config)
    if as_json:
        print_json({"stores": [store.to_dict() for store in found]})
        return
    if not found:
        say(f"no store of this user lies under {config.arena_dir}")
        return
    table = plain_table("STORE", "STATE", "HOSTS", ">BYTES", "JOBS (newest committed step)")
    for store in found:
        jobs = ", ".join(f"{job} ({count_text(step)})" for job, step in store.jobs.items()) or "-"
        if not store.is_live:
            jobs = config.with_fields({"store": store.store}).commands("not known until `memstore up` adopts it")
        state = "live" if store.is_live else "left over"
        table.add_row(store.store, state, ", ".join(store.hosts), size_text(store.nbytes), jobs)
    data_console().print(table)

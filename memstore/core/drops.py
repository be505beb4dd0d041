"""Dropping one copy of one shard because somebody asks: never the last whole one. Pure (R7, R19).

For `memstore drill canary`, which proves on its own job that a lost copy is no loss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memstore.core.events import shard_to_wire
from memstore.core.job import Call, Job
from recovery.inventory import ShardId, StepId

if TYPE_CHECKING:
    from memstore.core.catalog import Catalog


def drop_copy(catalog: Catalog, job: Job | None, call: Call) -> None:
    """Drop the copy of a shard of a committed step on a host; repair leaves that host alone for a moment (R29).

    Refused if no other live host has a whole copy with the committed digest: then this one is the last.
    `job` None: refused already.
    """
    if job is None:
        return
    body, host = call.body, str(call.body["host"])
    shard = ShardId(job.name, int(body["attempt"]), int(body["step"]), int(body["rank"]))
    step = StepId(shard.attempt, shard.step)
    commit, copies = job.commits.get(step), job.copies.get(step, {}).get(shard.rank, {})
    if commit is None or host not in copies:
        where = ", ".join(sorted(copies)) or "no host"
        what = "is not committed" if commit is None else f"is held by {where}, not by {host}"
        catalog.refuse(call, "CommitError", f"rank {shard.rank} of step {shard.step} of job {job.name!r} {what}")
        return
    others = sorted(
        h
        for h, copy in copies.items()
        if h != host
        and catalog.hosts.is_answering(h)
        and not copy.missing
        and copy.spec.digest == commit.digests[shard.rank]
    )
    if step in catalog.steps_in_use(job) or catalog.queries.is_read(shard):
        catalog.refuse(
            call, "CommitError",
            f"the copy of rank {shard.rank}, step {shard.step} of job {job.name!r} on {host} is being restored, read "
            "or written to durable storage: ask again when that is over (`memstore status`)",
        )  # fmt: skip
        return
    if not others:
        catalog.refuse(
            call, "CapacityError",
            f"the copy of rank {shard.rank}, step {shard.step} of job {job.name!r} on {host} is the last whole one: "
            "dropping it would lose the step. Wait until repair has made another (`memstore status`)",
        )  # fmt: skip
        return
    catalog.repair.refused_s[shard, host] = catalog.now  # else repair would fill it before anybody saw the gap
    catalog.tell(host, "drop", {"shards": [shard_to_wire(shard)]})
    dropped = copies[host]
    job.drop_copy(shard, host)
    catalog.answer(call, {"host": host, "left_on": others, "nbytes": dropped.spec.nbytes})

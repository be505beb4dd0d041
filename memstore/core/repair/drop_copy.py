"""Copies that hosts are told to free, and do not count from then on. Pure (R7, R19).

counted --drop ordered--> ordered --the host says that it is freed--> free, and counted again if it is made anew

A host's inventory or report that crosses the order on the way still names the copy, and must not have it counted. An
order may also outlive the session in which it was given: the host says then, too, that the copy is freed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from memstore.core.cluster.job import Call, Job
from memstore.core.wire.messages import Body, shard_from_wire, shard_to_wire
from recovery.inventory import ShardId, StepId

if TYPE_CHECKING:
    from memstore.core.controller.machine import Catalog


class Drops:
    """Orders to free copies, until each is obeyed."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self._ordered: dict[str, dict[ShardId, set[int]]] = {}  # host -> copy -> numbers of the orders it has to obey
        self._given_count = 0

    def order(self, host: str, shards: Sequence[ShardId]) -> None:
        """Tell a host to free copies; the caller takes them off the job."""
        self._given_count += 1
        ordered = self._ordered.setdefault(host, {})
        for shard in shards:
            ordered.setdefault(shard, set()).add(self._given_count)
        number = [self.catalog.log.term, self._given_count]
        self.catalog.tell(host, "drop", {"shards": [shard_to_wire(shard) for shard in shards], "number": number})

    def freed(self, host: str, body: Body) -> None:
        """A host has obeyed an order, of an earlier session or controller perhaps: it has these copies no more."""
        term, number = body["number"] or (0, 0)
        ordered = self._ordered.get(host, {})
        for shard in map(shard_from_wire, body["shards"]):
            numbers = ordered.get(shard, set())
            if term == self.catalog.log.term:
                numbers.discard(number)
            if not numbers:
                ordered.pop(shard, None)
            self._uncount(shard, host)

    def _uncount(self, shard: ShardId, host: str) -> None:
        """Take a copy off its job, if it was counted in an inventory while an older order was still to be obeyed."""
        job = self.catalog.jobs.get(shard.job)
        step = StepId(shard.attempt, shard.step)
        if job is not None and host in job.copies.get(step, {}).get(shard.rank, {}):
            job.drop_copy(shard, host)

    def is_ordered(self, host: str, shard: ShardId) -> bool:
        """Tell whether a host has yet to free a copy: what it reports of it was so before."""
        return shard in self._ordered.get(host, ())

    def forget_host(self, host: str) -> None:
        """A new session begins with what is there; orders of an older one may never have come."""
        self._ordered.pop(host, None)


def drop_copy(catalog: Catalog, job: Job | None, call: Call) -> None:
    """Drop the copy of a shard of a committed step on a host; repair leaves that host alone for a moment (R29).

    For `memstore drill canary`, which proves on its own job that a lost copy is no loss. Refused if no other live host
    has a whole copy with the committed digest: then this one is the last.
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
    catalog.drops.order(host, [shard])
    dropped = copies[host]
    job.drop_copy(shard, host)
    catalog.answer(call, {"host": host, "left_on": others, "nbytes": dropped.spec.nbytes})

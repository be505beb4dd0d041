"""One copy that a drill drops on purpose, to prove that a lost copy is no loss. Pure (R29)."""

from __future__ import annotations

from memstore.core.capacity.drop_orders import Drops
from memstore.core.cluster.effects import Effects
from memstore.core.cluster.job import Call, Job
from memstore.core.cluster.state import ClusterState
from memstore.core.wire.calls import DropCopy
from memstore.core.wire.replies import CopyDropped
from recovery.inventory import ShardId, StepId


def drop_copy(
    state: ClusterState, out: Effects, drops: Drops, refused_s: dict[tuple[ShardId, str], float], job: Job,
    call: Call[DropCopy],
) -> None:  # fmt: skip
    """Drop the copy of a shard of a committed step on a host; repair leaves that host alone for a moment (R29).

    For `memstore drill canary`, which proves on its own job that a lost copy is no loss. Refused if no other live host
    has a whole copy with the committed digest: then this one is the last.

    Args:
        state: Of the store.
        out: Takes the order and the answer.
        drops: The orders to free copies.
        refused_s: Of repair: (shard, host) that it leaves alone, and since when.
        job: Of the shard.
        call: Names the copy.
    """
    request, host = call.request, call.request.host
    shard = ShardId(job.name, request.attempt, request.step, request.rank)
    step = StepId(shard.attempt, shard.step)
    commit, copies = job.commits.get(step), job.copies.get(step, {}).get(shard.rank, {})
    if commit is None or host not in copies:
        where = ", ".join(sorted(copies)) or "no host"
        what = "is not committed" if commit is None else f"is held by {where}, not by {host}"
        out.refuse(call, "CommitError", f"rank {shard.rank} of step {shard.step} of job {job.name!r} {what}")
        return
    others = sorted(
        h
        for h, copy in copies.items()
        if h != host
        and state.hosts.is_answering(h)
        and not copy.missing
        and copy.spec.digest == commit.digests[shard.rank]
    )
    if step in state.holds.in_use(job) or state.is_read(shard):
        out.refuse(
            call, "CommitError",
            f"the copy of rank {shard.rank}, step {shard.step} of job {job.name!r} on {host} is being restored, read "
            "or written to durable storage: ask again when that is over (`memstore status`)",
        )  # fmt: skip
        return
    if not others:
        out.refuse(
            call, "CapacityError",
            f"the copy of rank {shard.rank}, step {shard.step} of job {job.name!r} on {host} is the last whole one: "
            "dropping it would lose the step. Wait until repair has made another (`memstore status`)",
        )  # fmt: skip
        return
    refused_s[shard, host] = state.now  # else repair would fill the gap before it was reported
    drops.order(host, [shard])
    dropped = copies[host]
    job.drop_copy(shard, host)
    out.answer(call, CopyDropped(host=host, left_on=others, nbytes=dropped.spec.nbytes))

"""Planted bugs around ranks with equal state: the choice of writers, offers that wait, reports, restores (R34)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from msgspec.structs import replace

from memstore.core.attempts.join import Attempts
from memstore.core.holder.puts import equal_ranks, seal
from memstore.core.holder.puts.shared_shards import HolderSharedShards
from memstore.core.restore.rounds import Rounds
from memstore.core.restore.single_read import SingleReads
from memstore.core.targets import shared_shards as core_shared_shards
from memstore.core.targets.shared_shards import SharedShards
from memstore.core.wire.calls import ReadStep
from memstore.core.wire.replies import SharedShardPlace
from memstore.testing.faults.catalogue import Fault
from memstore.testing.simulator.host.virtual_io import VirtualIo
from memstore.testing.simulator.planted.bug import planted, row
from recovery.inventory import ShardId

DDP: dict[str, Any] = {"shards": 1}
HYBRID: dict[str, Any] = {"shards": 2, "world_size": 6}
RESTART = Fault(5.0, "kill-rank")


@planted("writers-in-one-domain", "R34", "R34", world_size=6, **DDP, at=(core_shared_shards, "choose_writers"))
def writers_in_one_domain(real: Any, shard_of: Any, hosts: Any, *_: Any, replicas: int, **more: Any) -> Any:
    """The writers are the lowest ranks of one host."""
    return tuple([rank for rank, host in enumerate(hosts) if host == hosts[0]][:replicas])


@planted(
    "writers-chosen-again",
    "R34",
    "R34",
    Fault(2.0, "kill-rank"),
    Fault(5.0, "kill-rank"),
    **DDP,
    at=(Attempts, "_replace_member"),
)
def writers_chosen_again(real: Any, self: Attempts, name: str, attempt: Any, call: Any) -> None:
    """After a process has taken a rank's place, other ranks are writers."""
    record = self.journal.record
    others = tuple(rank for rank in range(attempt.world_size) if rank not in attempt.writers)
    with patch.object(self.journal, "record", lambda fact: record(replace(fact, writers=others))):
        real(self, name, attempt, call)


@planted("writers-not-written", "R34", "R34", Fault(2.0, "kill-rank"), **DDP, at=(SharedShards, "joined"))
def writers_not_written(real: Any, self: SharedShards, attempt: Any, rank: int) -> Any:
    """Writers are chosen each time a rank asks, among the hosts that live then, and recorded in no fact."""
    count = len(self.state.hosts.live_ids())
    ranks = range(attempt.world_size)
    table = {shard: [r for r in ranks if attempt.shard_of[r] == shard][-count:] for shard in attempt.shard_of}
    mine = attempt.shard_of[rank]
    writers_by_shard = tuple(tuple(table[shard]) for shard in sorted(table)) if rank == 0 else ()
    return SharedShardPlace(mine, len(table), tuple(table[mine]), writers_by_shard)


@planted("shared-part-of-another-step", "R34", "R34", RESTART, keep_steps=2, **DDP, at=(SingleReads, "read"))
def shared_part_of_another_step(real: Any, self: SingleReads, call: Any, asked: ReadStep, *more: Any) -> None:
    """A read brings the oldest step instead of the one that was named."""
    job = self.state.jobs[call.request.job]
    step = min(s for s in job.commits if job.copies.get(s))
    real(self, call, replace(asked, step=step.step, of_attempt=step.attempt), *more)


@planted(
    "another-shard-restored",
    "R34",
    "R34",
    RESTART,
    Fault(7.0, "kill-rank"),
    Fault(9.0, "kill-rank"),
    at=(Rounds, "staged"),
    **HYBRID,
)
def another_shard_restored(real: Any, self: Rounds, now: float, report: Any) -> Any:
    """A round goes on although a rank refuses the shard that was staged for it."""
    return real(self, now, replace(report, refusal=None))


@planted("writers-wait-for-one-another", "R34", "R34", **DDP)
@contextmanager
def writers_wait_for_one_another() -> Iterator[None]:
    """A host digests its rank's put after the other writer's copy has come, whose offer waits for that digest."""
    digest, row_of, rows = VirtualIo.digest_and_store, HolderSharedShards._row, dict[ShardId, Any]()

    def noted(self: HolderSharedShards, shard: ShardId) -> Any:
        rows[shard] = row_of(self, shard)
        return rows[shard]

    async def late(self: VirtualIo, shard: ShardId, *rest: Any) -> Any:  # its own offers are made
        row = rows.get(shard)
        for other_rank in row.other_writers if row is not None else ():
            theirs = ShardId(shard.job, shard.attempt, shard.step, other_rank)
            await self.wait_for(lambda: self.replicas.index.find(theirs) is not None, 8.0)  # noqa: B023
        return await digest(self, shard, *rest)

    with patch.object(VirtualIo, "digest_and_store", late), patch.object(HolderSharedShards, "_row", noted):
        yield


ROWS = (
    row("copies-of-writers-go-anywhere", "R34", "R34", (SharedShards, "targets"),
        lambda self, job, attempt, rank, owner, ordinary: [h for h in ordinary if h != owner],
        "A writer's copies go to its host's ordinary targets, not to the hosts of its shard's other writers.",
        hosts=4, world_size=4, **DDP),
    row("writer-not-waited-for", "R34", "R34", (HolderSharedShards, "is_over"), lambda self, shard, own: True,
        "An offer of equal chunks is answered while this host digests its own.", **DDP),
    row("late-writer-awaited-again", "R34", "R34", (HolderSharedShards, "gave_up"), lambda self, shard, own: None,
        "An offer waits for a rank although an earlier offer has waited for it in vain.",
        Fault(4.0, "freeze-rank", rank=0, for_s=9.0),
        Fault(3.9, "slow-link", (1,), for_s=4.0, count=8), replicas=3, step_s=0.8, **DDP),
    row("wait-without-end", "R34", "R34", (equal_ranks, "WRITER_WAIT_S"), 60.0,
        "An offer waits for the local writer's put without a limit.",
        Fault(4.0, "freeze-rank", rank=0, for_s=9.0), **DDP),
    row("own-state-compared", "R34", "R34", (seal, "shared_count"), lambda ready: len(ready.slots),
        "Writers are reported to differ in the chunks that are each one's own.", **DDP),
    row("differing-writers-unreported", "R34", "R34", (HolderSharedShards, "compare"), lambda self, own, other: None,
        "Copies are not compared with the local writer's put.", Fault(4.0, "differ", rank=1, count=99), **DDP),
)  # fmt: skip

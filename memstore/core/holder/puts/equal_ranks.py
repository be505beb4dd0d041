"""Lets an offer of an equal shard wait for this host's own; compares shards of ranks with equal state (R13, R34).

    offered --no rank here has its equal, or that one is sealed or late--> answered
       '--waits--> the rank sealed it, or went on past it, or 3 s are over: the rank is late--> answered

An offer of an equal shard may come while this host still digests its own rank's. The answer waits for that, so that
equal chunks do not travel. The digesting itself waits for no offer, so two hosts never wait for one another.
"""

from __future__ import annotations

from memstore.core.holder.holder_io import HolderIo
from memstore.core.holder.state import HolderState
from recovery.inventory import ShardId

WRITER_WAIT_S = 3.0  # longest wait of an offer for this host's own put of the step, which may never come


async def await_own(io: HolderIo, state: HolderState, shard: ShardId) -> None:
    """Wait, for a limited time, until this host has sealed its own equal of an offered shard, or gone on past it."""
    known = state.shared_shards
    own = known.own_of(shard)
    if own is None or known.is_over(shard, own):
        return
    if not await io.wait_for(lambda: state.is_stopping() or known.is_over(shard, own), WRITER_WAIT_S):
        known.gave_up(shard, own)


async def compare(io: HolderIo, state: HolderState, shard: ShardId) -> None:
    """Compare a shard that was sealed here with the others of its step; notify ranks that differ, or no longer do."""
    known = state.shared_shards
    puts = [put for put in known.newest.values() if put.shared_count is not None and _step(put.shard) == _step(shard)]
    if not puts:
        return  # no rank here has a shard as others do: most jobs, at every seal
    with state.store.lock:
        copies = [each for each in state.store.index.shards.values() if _step(each.shard) == _step(shard)]
    for copy in copies:
        for put in puts:
            event = known.compare(put, copy) if shard in (put.shard, copy.shard) else None
            if event is None:
                continue
            for link in state.ranks.of_job(shard.job):
                if (link.rank, link.attempt) == (put.shard.rank, put.shard.attempt):
                    await io.send_to_rank(link, event)


def _step(shard: ShardId) -> tuple[str, int, int]:
    return shard.job, shard.attempt, shard.step

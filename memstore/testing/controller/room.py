"""The memory limit of a holder without an arena: it counts copies of peers as the real index does (R10)."""

from __future__ import annotations

from collections.abc import Iterable

from memstore.core.wire.orders import Grow, Reserve
from recovery.inventory import ShardId


def peer_refusal(room: Reserve | Grow | None, held: Iterable[ShardId], shard: ShardId, chunks: int) -> str:
    """Say why a peer's copy of `chunks` slots does not fit the reservation of its job here, or ""."""
    if room is None:
        return f"no room is reserved for job {shard.job!r} here"
    ranks = {row.rank for row in room.ranks}
    if shard.rank in ranks:
        return ""
    used, limit = chunks * sum(s.job == shard.job and s.rank not in ranks for s in held), room.peer_slots
    return f"peer share full: {used} of {limit} slots used, {chunks} needed" if used + chunks > limit else ""

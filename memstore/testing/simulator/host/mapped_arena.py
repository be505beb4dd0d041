"""Finds slots that a rank has mapped in another arena than its holder's (R8).

It mirrors the welcome of shell/holder/rank_server.py and the sample of shell/arena/slot_sample.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from memstore.core.wire.rank_messages import SlotSample
from memstore.testing.simulator.world.processes import Holder, Rank


def confirm(holder: Holder, rank: Rank) -> list[int]:
    """Return the slots that a rank holds and that are not its own: all of them if it has mapped another arena."""
    held, is_ours = rank.held(), rank.mapping is holder.memory.slots
    _, stale = holder.replicas.table.confirm(rank.owner, held if is_ours else [])
    return stale if is_ours else held


def are_seen(holder: Holder, slots: Sequence[int], seen: SlotSample) -> bool:
    """Say whether the holder sees in the slots what the rank that hands them over sees there."""
    return b"".join(bytes(holder.replicas.arena.view(number)) for number in slots) == seen.digests

"""Planted bugs in recovery in place: who is a rank, what a generation goes on from, what a process leaves behind."""

from __future__ import annotations

from typing import Any

from memstore.core.holder import ranks
from memstore.core.holder.reads import ready
from memstore.core.holder.state import HolderState
from memstore.core.restore.rounds import Rounds
from memstore.inplace.membership import Closing, Coming
from memstore.testing.faults.catalogue import Fault
from memstore.testing.simulator.host.context import RankLink
from memstore.testing.simulator.planted.bug import nothing, planted, row

LOST = tuple(Fault(4.0 + 2.0 * n, "kill-rank", rank=n) for n in range(4))
ZOMBIE = Fault(5.0, "zombie-rank", rank=1, for_s=2.5)
# Copies do not come through, so no step is committed between one loss and the next.
LOST_AGAIN = (
    Fault(6.0, "silent-peers", (0, 1, 2), for_s=40.0),
    *(Fault(8.0 + 4.0 * n, "kill-rank", rank=n) for n in range(8)),
)
LOST_IN_STEP = tuple(Fault(4.0 + 2.3 * n, "kill-rank", rank=n % 3) for n in range(16))
LOST_WITH_HOLDER = tuple(Fault(4.0 + 4.0 * n, "lose-both", rank=n) for n in range(3))
# Survivors wait in their connect(), with the store that they left still open, while a holder restarts.
LOST_WHILE_AWAY = (
    Fault(4.0, "controller-in-recovery", count=4, for_s=3.0),
    *(Fault(4.0, "holder-in-recovery", (n,), rank=1, count=8) for n in range(3)),
    Fault(4.1, "kill-rank", rank=1),
)


def _swap(state: HolderState, link: RankLink, read: int, *, is_newest: bool) -> None:
    """Put the newest or the oldest other shard of the rank that lies whole here in the place of what was brought."""
    mine = [
        replica
        for replica in state.store.index.shards.values()
        if (replica.shard.job, replica.shard.rank) == (link.job, link.rank) and not replica.missing
    ]
    brought = state.reads.ready.get(read)
    if not mine or brought is None:
        return
    chosen = sorted(mine, key=lambda replica: (replica.shard.attempt, replica.shard.step))[-1 if is_newest else 0]
    count, name = len(chosen.slots), ready.name_of(read)
    state.store.abort_incoming(name, brought.replica.shard)
    sizes = [chosen.spec.chunk_nbytes(index) for index in range(count)]
    brought.manifest = state.store.manifest(chosen)
    brought.replica = state.store.open_incoming(
        name, chosen.shard, chosen.digests, sizes, chosen.shard.attempt, tuple(range(count))
    )


@planted("survivor-keeps-its-own-step", "R23", "I24", *LOST, is_in_place=True, step_s=0.15, at=(ready, "place"))
async def survivor_keeps_its_own_step(real: Any, io: Any, state: HolderState, link: RankLink, reply: Any) -> Any:
    """A rank that was there before a loss is given the newest step that it has put, committed or not."""
    if reply.report is not None and link.owner.link > 1:
        _swap(state, link, reply.read, is_newest=True)
    return await real(io, state, link, reply)


@planted(
    "spare-with-an-old-shard",
    "R23",
    "I24",
    *LOST,
    is_in_place=True,
    has_spares=True,
    hosts=4,
    keep_steps=2,
    step_s=0.4,
    at=(ready, "place"),
)
async def spare_with_an_old_shard(real: Any, io: Any, state: HolderState, link: RankLink, reply: Any) -> Any:
    """A process that takes a lost rank's place is given the oldest shard of the rank that its host has."""
    if reply.report is not None and link.owner.link == 1:
        _swap(state, link, reply.read, is_newest=False)
    return await real(io, state, link, reply)


@planted(
    "former-store-taken",
    "R20",
    "R20",
    *LOST_WHILE_AWAY,
    is_in_place=True,
    step_s=0.15,
    world_size=6,
    at=(ranks, "join"),
)
async def former_store_taken(real: Any, io: Any, state: HolderState, link: Any, hello: Any, *ended: Any) -> None:
    """A former store's link that comes back takes the place of the newest one's."""
    state.ranks.stores.clear()
    await real(io, state, link, hello, *ended)


ROWS = (
    row("replaced-process-meets", "R20", "I25", (Coming, "_check_life"), lambda self: None,
        "A process that was taken for lost, and replaced, meets the others as the same rank.",
        ZOMBIE, is_in_place=True),
    row("aborts-before-stores-are-closed", "R11", "I26", (Closing, "look"), lambda self, now: True,
        "A rank aborts its collectives while another one may still put what it computes from them.",
        *LOST_IN_STEP, is_in_place=True, step_s=1.2, world_size=3, duration_s=45.0),
    row("losses-count-as-crashes", "R25", "R25 I1", (Rounds, "_is_no_verdict"),
        staticmethod(lambda attempt: attempt is not None and attempt.phase == "closed"),
        "Restores in place count for the crash loop, so losses one after another retire a good step.",
        *LOST_AGAIN, is_in_place=True, keep_steps=2, step_s=0.8, duration_s=42.0),
    row("closed-stores-keep-leases", "R8", "I13", (ranks, "_forget_ended"), nothing,
        "What a closed store was leased is not freed if its bye met no holder, for as long as its process lives.",
        *LOST_WITH_HOLDER, is_in_place=True, step_s=0.15, world_size=6, duration_s=40.0),
)  # fmt: skip

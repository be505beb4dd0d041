"""Reports what a host stores: all of it as a session begins, a job's at a fence, one copy as it changes (R4, R16, R21).

Each list is made and queued under the store's lock, as drops are: so the controller gets these reports in the order
in which they were true.
"""

from __future__ import annotations

from collections.abc import Sequence

from memstore.core.arena.replica_index import StoredReplica
from memstore.core.holder.state import HolderState
from memstore.core.wire.ids import WireCopy
from memstore.core.wire.reports import Fenced, HostInventory, PutTimes, Sealed
from recovery.inventory import Copy


def inventory(state: HolderState, journal: Sequence[bytes]) -> HostInventory:
    """Return what a controller must know of this host first."""
    info = state.info
    return HostInventory(
        incarnation=info.incarnation,
        endpoints=info.endpoints,
        machine=info.machine,
        is_explicit=info.is_explicit,
        labels=dict(info.labels),
        limit_bytes=info.limit_bytes,
        copies=_copies(state),
        journal=tuple(journal),
        ranks=tuple(sorted(state.ranks.owners)),
        up_s=state.now() - state.began_s,
        idle_s=state.idle_s,
    )


def report_copy(state: HolderState, copy: Copy | StoredReplica, put: PutTimes | None = None) -> None:
    """Report a copy as it is now, whole or with the chunks it lacks; nothing if it was dropped meanwhile.

    Any thread may call it. `put`: the times of the put that made it.
    """
    state.idle_s = 0.0
    with state.store.lock:
        stored = state.store.index.find(copy.shard, copy.spec.digest)
        if stored is not None and not stored.is_doomed:
            held = Copy(stored.shard, stored.spec, state.host_id, stored.missing)
            state.report(Sealed(copy=WireCopy.of(held), put=put))


def answer_fence(state: HolderState, job: str, attempt: int) -> None:
    """Report that older attempts are refused, and the job's copies; what is sealed later is reported later."""
    with state.store.lock:
        state.report(Fenced(job=job, attempt=attempt, copies=_copies(state, job)))


def _copies(state: HolderState, job: str | None = None) -> tuple[WireCopy, ...]:
    with state.store.lock:
        return tuple(map(WireCopy.of, state.store.index.copies(state.host_id, job)))

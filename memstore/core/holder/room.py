"""Claims room for jobs as the controller orders (R9, R10).

These run one after another, in the order in which they came: so an older share never replaces a newer one.
"""

from __future__ import annotations

import contextlib
from functools import partial

from memstore.core.arena.share import share_of
from memstore.core.holder import ranks
from memstore.core.holder.effects import BeginConnect, ClaimRoom, OnStore, Procedure, Unexpected, WaitFor
from memstore.core.holder.state import HolderState
from memstore.core.wire.orders import Grow, Reserve
from memstore.core.wire.reports import Reserved
from memstore.errors import CapacityError

CONNECT_S = 1.0  # room is not withheld for longer because a target does not answer


def reserve(state: HolderState, order: Reserve) -> Procedure[None]:
    """Claim a share and report it, or report why not, with numbers: all ranks wait for the report."""
    job, problem = order.job, None
    is_connected = yield BeginConnect(job)  # meanwhile: a first put that has to connect finds nothing warm
    try:
        yield ClaimRoom(job, share_of(order))
    except CapacityError as exc:
        problem = str(exc)
    except Exception as exc:
        yield Unexpected(f"room for job {job}", exc)
        problem = f"its holder failed to claim room ({exc!r}): its log says where; put again then"
    yield WaitFor(is_connected, CONNECT_S)
    state.report(Reserved(job=job, attempt=order.attempt, call=order.call, problem=problem))
    yield from ranks.grant_job(state, job)


def grow(state: HolderState, order: Grow) -> Procedure[None]:
    """Have memory and streams for the puts that may follow a restore; this claims nothing."""
    yield BeginConnect(order.job)
    with contextlib.suppress(CapacityError):
        yield OnStore(partial(state.store.room.prepare, order.job, share_of(order)))

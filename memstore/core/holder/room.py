"""Claims room for jobs as the controller orders (R9, R10).

These run one after another, in the order in which they came: so an older share never replaces a newer one.
"""

from __future__ import annotations

import contextlib
from functools import partial

from memstore.core.arena.share import share_from_wire
from memstore.core.holder import ranks
from memstore.core.holder.effects import BeginConnect, ClaimRoom, OnStore, Steps, Unexpected, WaitFor
from memstore.core.holder.state import HolderState
from memstore.core.wire.messages import Body
from memstore.errors import CapacityError

CONNECT_S = 1.0  # room is not withheld for longer because a target does not answer


def reserve(state: HolderState, body: Body) -> Steps[None]:
    """Claim a share and report it, or report why not, with numbers: all ranks wait for the report."""
    job, why = str(body["job"]), ""
    is_connected = yield BeginConnect(job)  # meanwhile: a first put that has to connect finds nothing warm
    try:
        yield ClaimRoom(job, share_from_wire(body))
    except CapacityError as exc:
        why = str(exc)
    except Exception as exc:
        yield Unexpected(f"room for job {job}", exc)
        why = f"its holder failed to claim room ({exc!r}): its log says where; put again then"
    yield WaitFor(is_connected, CONNECT_S)
    reply = {"job": job, "attempt": body["attempt"], "call": body.get("call", 0), "ok": not why, "why": why}
    state.report("reserved", reply)
    yield from ranks.grant_job(state, job)


def grow(state: HolderState, body: Body) -> Steps[None]:
    """Have memory and streams for the puts that may follow a restore; this claims nothing."""
    yield BeginConnect(str(body["job"]))
    with contextlib.suppress(CapacityError):
        yield OnStore(partial(state.store.prepare_room, str(body["job"]), share_from_wire(body)))

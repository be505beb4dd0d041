"""Claims room for jobs as the controller orders (R9, R10).

These run one after another, in the order in which they came: so an older share never replaces a newer one.
"""

from __future__ import annotations

import contextlib
import errno
from functools import partial

from memstore.core.arena.share import share_of
from memstore.core.holder import ranks
from memstore.core.holder.effects import BeginConnect, ClaimRoom, OnStore, Procedure, Sleep, Unexpected, WaitFor
from memstore.core.holder.state import HolderState
from memstore.core.wire.orders import Grow, Reserve
from memstore.core.wire.reports import Reserved
from memstore.errors import CapacityError

DESCRIPTORS_S, RETRY_S = 10.0, 0.25  # for file descriptors to become free: a first put may wait that long
TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)
CONNECT_S = 1.0  # room is not withheld for longer because a target does not answer


def reserve(state: HolderState, order: Reserve) -> Procedure[None]:
    """Claim a share and report it, or report why not, with numbers: all ranks wait for the report."""
    job, problem = order.job, None
    is_connected = yield BeginConnect(job)  # meanwhile: a first put that has to connect finds nothing warm
    is_fault, deadline_s = False, state.now() + DESCRIPTORS_S
    while True:
        try:
            yield ClaimRoom(job, share_of(order))
        except CapacityError as exc:
            problem = str(exc)
        except Exception as exc:
            is_short = any(getattr(each, "errno", None) in TOO_MANY_FILES for each in (exc, exc.__cause__))
            if is_short and state.now() < deadline_s:
                yield Sleep(RETRY_S)
                continue
            yield Unexpected(f"room for job {job}", exc)
            is_fault, problem = True, f"its holder failed to claim room ({exc!r}): its log says where; put again then"
            if is_short:
                problem = (
                    f"its holder had no file descriptor left for {DESCRIPTORS_S:g} s ({exc}): raise its limit, "
                    "`memstore status` shows how, and put again"
                )
        break
    yield WaitFor(is_connected, CONNECT_S)
    state.report(Reserved(job=job, attempt=order.attempt, call=order.call, problem=problem, is_fault=is_fault))
    yield from ranks.grant_job(state, job)


def grow(state: HolderState, order: Grow) -> Procedure[None]:
    """Have memory and streams for the puts that may follow a restore; this claims nothing."""
    yield BeginConnect(order.job)
    with contextlib.suppress(CapacityError):
        yield OnStore(partial(state.store.room.prepare, order.job, share_of(order)))

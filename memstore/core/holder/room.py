"""Claims room for jobs as the controller orders (R9, R10).

These run one after another, in the order in which they came: so an older share never replaces a newer one.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Collection
from functools import partial

from memstore.core.arena.share import share_of
from memstore.core.holder import ranks
from memstore.core.holder.holder_io import HolderIo
from memstore.core.holder.state import HolderState
from memstore.core.wire.orders import Reserve
from memstore.core.wire.reports import Reserved
from memstore.errors import CapacityError

DESCRIPTORS_S, RETRY_S = 10.0, 0.25  # for file descriptors to become free: a first put may wait that long
TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)
CONNECT_S = 1.0  # room is not withheld for longer because a target does not answer


async def reserve(io: HolderIo, state: HolderState, order: Reserve) -> None:
    """Claim a share and report it, or report why not, with numbers: all ranks wait for the report."""
    job, problem = order.job, None
    is_connected = await io.begin_connect(job)  # meanwhile: a first put that has to connect finds nothing warm
    is_fault, deadline_s = False, state.now() + DESCRIPTORS_S
    while True:
        try:
            await io.claim_room(job, share_of(order))
        except CapacityError as exc:
            problem = str(exc)
        except Exception as exc:
            is_short = any(getattr(each, "errno", None) in TOO_MANY_FILES for each in (exc, exc.__cause__))
            if is_short and state.now() < deadline_s:
                await io.sleep(RETRY_S)
                continue
            await io.unexpected(f"room for job {job}", exc)
            is_fault, problem = True, f"its holder failed to claim room ({exc!r}): its log says where; put again then"
            if is_short:
                problem = (
                    f"its holder had no file descriptor left for {DESCRIPTORS_S:g} s ({exc}): raise its limit, "
                    "`memstore status` shows how, and put again"
                )
        break
    await io.wait_for(is_connected, CONNECT_S)
    state.report(Reserved(job=job, attempt=order.attempt, number=order.number, problem=problem, is_fault=is_fault))
    await ranks.grant_job(io, state, job)


async def grow(io: HolderIo, state: HolderState, order: Reserve) -> None:
    """Have memory and streams for the puts that may follow a restore; this claims nothing."""
    await io.begin_connect(order.job)
    with contextlib.suppress(CapacityError):
        await io.on_store(partial(state.store.room.prepare, order.job, share_of(order)))


async def keep_shares(io: HolderIo, state: HolderState, jobs: Collection[str]) -> None:
    """Give back the shares of jobs that the controller does not know and that have nothing here."""
    await io.on_store(partial(state.store.room.keep_shares, jobs))


async def release(io: HolderIo, state: HolderState) -> None:
    """Give back what no job has reserved."""
    await io.on_store(state.store.room.release)

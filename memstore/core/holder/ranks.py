"""Links of a host's ranks: which leases go on, which link is sent what, what a process that is gone leaves (R4, R8).

    link:     hello --leases confirmed--> welcomed --> in the table --ended, or the same process comes back--> gone
    process:  known by its first hello --sent `bye`, or proved dead--> forgotten, its leases are free

A rank's life is its process, not its link: leases outlive links.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from memstore.core.arena.slot_table import Owner
from memstore.core.holder.holder_io import HolderIo, Link
from memstore.core.holder.reads import ready
from memstore.core.holder.state import HolderState
from memstore.core.wire.calls import EndLease, LeaseStep, RankCall
from memstore.core.wire.codec import encode
from memstore.core.wire.orders import CallAnswered, PutEarly, StepLevel
from memstore.core.wire.rank_messages import AttemptFenced, RankHello, ToolHello
from memstore.core.wire.replies import Joined, ShardReady, StepLeased, decode_passed
from memstore.core.wire.reports import ProcessGone, RankArrived
from memstore.errors import IntegrityError
from recovery.inventory import ShardId

BYE_WAIT_S = 10.0  # longest wait for submissions of a process that sends `bye`


async def join(
    io: HolderIo, state: HolderState, link: Link, hello: RankHello | ToolHello, ended: Sequence[Owner] = ()
) -> None:
    """Take a link, and send the rank the slots that are still its own; the process's older link gets nothing more.

    Of a store's links the one that was accepted last is taken, whichever thread runs first: the process has given up
    the others, also those of an earlier try to connect. So an older one is ended, even if the newer one is over. Of a
    process's stores the newest is taken: a former one's link is only welcomed then, so that its `bye` can come.

    Args:
        state: The holder's.
        link: The new link.
        hello: What came on it first.
        ended: Stores of the process that it says to have closed.
    """
    table, process = state.ranks, state.ranks.process_of(link)
    if isinstance(hello, RankHello):
        state.idle_s = 0.0
        await _report_ended(io, state)  # or its launch would be refused for ranks that ended just now
    store = (*process, hello.life)
    if link.order < table.newest.get(store, link.order):
        await _retire(io, link)  # its thread ran late: the slots that its rank held then say nothing of now
        return
    await _forget_ended(io, state, ended)
    if table.has_newer_store(process, hello.life):
        await _welcome(io, state, link, hello)
        return
    table.newest[store] = link.order
    if not await _greet(io, state, link, hello):
        await _retire(io, link)
        return
    if table.has_newer_store(process, hello.life):
        return  # its link was taken while this one was welcomed
    table.stores[process] = (hello.life, link.owner)
    table.links[link.nonce] = link
    if isinstance(hello, RankHello):
        is_new, table.owners[link.nonce] = link.nonce not in table.owners, link.owner
        if is_new:
            # Reported after it is in the table, so a new session has it in its inventory or in this report.
            state.report(RankArrived(nonce=link.nonce))
    committed = table.committed.get(link.job)
    if link.attempt and state.fences.is_fenced(link.job, link.attempt):
        await io.send_to_rank(link, _fenced(state, link))
    elif committed is not None and committed.attempt == link.attempt:
        await io.send_to_rank(link, committed)
    if (check := state.reads.check_of(link)) is not None:
        await io.send_to_rank(link, check)
    await io.grant(link)


async def _greet(io: HolderIo, state: HolderState, link: Link, hello: RankHello | ToolHello) -> bool:
    """Retire the process's older link, then welcome it; return whether no newer link of it has arrived meanwhile."""
    table, store = state.ranks, (*state.ranks.process_of(link), hello.life)
    older = table.links.get(link.nonce)
    if older is not None and older.owner == link.owner:
        del table.links[link.nonce]  # now: no grant may go there after the leases are confirmed
        await _retire(io, older)
        if table.newest.get(store) != link.order:
            return False  # the newer link has its leases confirmed: doing it again would free what it was granted
    await _welcome(io, state, link, hello)
    return table.newest.get(store) == link.order


async def _welcome(io: HolderIo, state: HolderState, link: Link, hello: RankHello | ToolHello) -> None:
    held: Sequence[int] = hello.held if isinstance(hello, RankHello) else ()
    # A rank filled the slots that it holds of another arena there, so none of them is its own here.
    is_ours = isinstance(hello, ToolHello) or hello.arena == state.store.arena_identity
    stale = state.store.confirm(link.owner, held if is_ours else ())
    await io.send_welcome(link, stale if is_ours else held)


async def _retire(io: HolderIo, link: Link) -> None:
    """End a link whose process came back on another one: what it submitted and is not begun comes again there."""
    link.is_retired = True
    await io.close_link(link)


def end(state: HolderState, link: Link) -> bool:
    """Forget a link that has ended, and what it had pinned; False if its process is connected by another one."""
    is_current = state.ranks.is_current(link)
    if is_current:
        del state.ranks.links[link.nonce]  # first: from now on no pin is kept for it
    while link.pins:
        link.pins.popitem()[1]()
    return is_current


# -- leases -------------------------------------------------------------------------------------------


def lease(state: HolderState, link: Link) -> list[int]:
    """Lease a rank what its share allows; nothing on a link that has ended, or to a process that is refused."""
    table = state.ranks
    if not table.is_current(link) or not link.is_open or not link.job:
        return []
    if state.fences.is_fenced(link.job, link.attempt):
        return []
    return state.store.lease(link.owner, link.job, link.rank, link.attempt)


async def grant_job(io: HolderIo, state: HolderState, job: str) -> None:
    """Lease a job's ranks what their shares allow: room may have become free."""
    for link in state.ranks.of_job(job):
        await io.grant(link)


# -- notices to ranks ---------------------------------------------------------------------------------


async def send_level(io: HolderIo, state: HolderState, link: Link, level: StepLevel) -> None:
    """Tell a store the level of one of its tickets, on its newest link."""
    current = state.ranks.current(link)
    if current is not None:
        await io.send_to_rank(current, level)


async def send_replicated(io: HolderIo, state: HolderState, shard: ShardId) -> None:
    """Tell the rank that put a shard that every one of its targets has sealed it (R15)."""
    level = StepLevel(job=shard.job, attempt=shard.attempt, step=shard.step, level="replicated")
    for link in state.ranks.of_job(shard.job):
        if (link.rank, link.attempt) == (shard.rank, shard.attempt):
            await send_level(io, state, link, level)


async def send_to_attempt(io: HolderIo, state: HolderState, level: StepLevel | PutEarly) -> None:
    """Tell a job's ranks the level of a step; the last commit is kept for links that come back."""
    if isinstance(level, StepLevel) and level.level in ("committed", "durable"):
        state.ranks.committed[level.job] = level
    for link in state.ranks.of_job(level.job):
        if link.attempt == level.attempt:
            await io.send_to_rank(link, level)


async def send_fenced(io: HolderIo, state: HolderState, job: str, first: int, members: Collection[str] = ()) -> None:
    """Tell processes of attempts before one that they are refused.

    A process of `members` goes on in the new attempt: it asked for it by a rewind (R22).
    """
    with state.store.lock:
        state.store.index.end_preparation(job, before=first)
    for link in state.ranks.of_job(job):
        if 0 < link.attempt < first and link.nonce not in members:
            await io.send_to_rank(link, _fenced(state, link))


def _fenced(state: HolderState, link: Link) -> AttemptFenced:
    fences = state.fences
    return AttemptFenced(attempt=fences.first(link.job), is_removed=fences.is_removed(link.job))


# -- processes that are gone --------------------------------------------------------------------------


async def await_owner(io: HolderIo, state: HolderState, owner: Owner, limit_s: float) -> bool:
    """Wait until nothing that one process submitted is unfinished; False if it took too long."""
    pending = state.puts.pending
    return await io.wait_for(lambda: not any(process == owner for _, _, process in pending), limit_s)


async def leave(io: HolderIo, state: HolderState, link: Link, *, has_left: bool = False) -> None:
    """Free the slots that a process leased and did not submit, once it has sent `bye`, and report that it is gone.

    A rank that closes its store says so to the controller too; but not if it has no controller then, or has failed to
    join. Unreported, it would count as alive for as long as its holder lives, and its open steps as going on.

    Args:
        state: The holder's.
        link: Over which it said so.
        has_left: Whether it left because another rank is lost, and lives.
    """
    await await_owner(io, state, link.owner, BYE_WAIT_S)
    table = state.ranks
    is_gone = table.is_current(link)
    if table.stores.get(table.process_of(link), (0, None))[1] == link.owner:
        del table.stores[table.process_of(link)]  # a former store that is still open is the process's only one now
    if is_gone:
        del table.links[link.nonce]
        table.owners.pop(link.nonce, None)
        # In this step: the process may connect again during the next effect.
        state.report(ProcessGone(nonce=link.nonce, has_left=has_left))
        _end_preparation(state, link.job)
    await _forget(io, state, link.owner)


def _end_preparation(state: HolderState, job: str) -> None:
    """Keep no more room for the first put of a job whose last rank here is gone."""
    if not any(state.is_alive(link.owner) for link in state.ranks.of_job(job)):
        with state.store.lock:
            state.store.index.end_preparation(job)


async def _forget(io: HolderIo, state: HolderState, owner: Owner) -> None:
    """Free what a process that is gone has leased."""
    state.store.reclaim(owner)
    await io.forget_process(owner)


async def _forget_ended(io: HolderIo, state: HolderState, owners: Sequence[Owner]) -> None:
    """Free what closed stores of a living process have: their `bye` met no holder, or one that died with it."""
    for owner in owners:
        if not any(process == owner for _, _, process in state.puts.pending):  # else its `bye` comes after these
            await _forget(io, state, owner)


async def reap(io: HolderIo, state: HolderState) -> None:
    """Reclaim the leases of processes that are proved dead, and report these processes (R8, R20)."""
    await _report_ended(io, state)
    table = state.ranks
    table.newest = {store: order for store, order in table.newest.items() if state.is_alive(Owner(*store[1:3], 0))}
    table.stores = {process: newest for process, newest in table.stores.items() if state.is_alive(newest[1])}
    state.store.reclaim_dead(set(table.owners.values()), state.is_alive)
    for job in sorted({link.job for link in table.links.values() if link.job}):
        await grant_job(io, state, job)


async def _report_ended(io: HolderIo, state: HolderState) -> None:
    """Report the ranks whose processes are proved dead, and free what they leased."""
    table = state.ranks
    for nonce, owner in list(table.owners.items()):
        if not state.is_alive(owner) and table.owners.get(nonce) == owner:
            del table.owners[nonce]
            state.report(ProcessGone(nonce=nonce))
            if (link := table.links.get(nonce)) is not None:
                _end_preparation(state, link.job)
            await _forget(io, state, owner)
            if (link := table.links.get(nonce)) is not None:
                await io.close_link(link)


# -- answers ------------------------------------------------------------------------------------------
# Passes the controller's answer to a rank's call on, with the place of the bytes if it is a read (R4, R7).


@dataclass(frozen=True)
class ForwardedCall:
    """A call; `owner` is None for the holder's own."""

    owner: Owner | None
    nonce: str
    rank_id: int  # the rank's own number of it
    request: RankCall


async def pass_on(
    io: HolderIo, state: HolderState, call: ForwardedCall, data: bytes, error: tuple[str, str] | None
) -> None:
    """Send the process that asked what the controller answered: a reply, or the name and the text of an error."""
    link = state.ranks.links.get(call.nonce)
    if link is None or link.owner != call.owner:
        _end_lease(state, call)
        return
    try:
        answer = await _answer(io, state, link, call, data, error)
    except IntegrityError as exc:
        answer = CallAnswered(id=call.rank_id, reply=b"", error=("RecoveryError", str(exc)))
    except Exception as exc:  # the call is taken out: without an answer its rank would wait for its whole limit
        await io.unexpected(f"host {state.host_id}: an answer of the controller cannot be passed on", exc)
        answer = CallAnswered(id=call.rank_id, reply=b"", error=("InternalError", f"{type(exc).__name__}: {exc}"))
    await io.send_to_rank(link, answer)


def _end_lease(state: HolderState, call: ForwardedCall) -> None:
    """End the lease that a call asked for, if it did (R36)."""
    if isinstance(call.request, LeaseStep):
        state.ask(EndLease(job=call.request.job, lease=call.request.lease))


async def _answer(
    io: HolderIo, state: HolderState, link: Link, call: ForwardedCall, data: bytes, error: tuple[str, str] | None
) -> CallAnswered:
    if error is not None:
        return CallAnswered(id=call.rank_id, reply=b"", error=error)
    reply = decode_passed(call.request, data)
    if isinstance(reply, Joined):
        link.attempt, link.rank = reply.attempt, reply.rank
    if isinstance(reply, ShardReady):
        reply = await ready.place(io, state, link, reply)
    elif isinstance(reply, StepLeased):
        reply = replace(reply, pin=ready.hold(state, link, partial(_end_lease, state, call)))
    return CallAnswered(id=call.rank_id, reply=encode(reply))

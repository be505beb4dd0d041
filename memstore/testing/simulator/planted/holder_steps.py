"""Planted bugs in a holder's steps: leases, terms, levels of the simulated one, fences of core/holder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from memstore.core.arena.replica_store import ReplicaStore, Store
from memstore.core.history import job_removal
from memstore.core.holder import ranks, succession
from memstore.core.holder.puts import seal
from memstore.core.holder.sessions import JobFences, Sessions
from memstore.core.holder.state import HolderState, SubmittedPut
from memstore.core.wire.orders import StepLevel
from memstore.testing.faults.catalogue import Fault
from memstore.testing.simulator.planted.bug import nothing, planted, row
from memstore.testing.simulator.run.cluster import SimCluster

SET_BACK = Fault(4.0, "step-clock", (1,), rank=2, for_s=0.3, count=2)  # by an hour
LINKS_AT_ONCE = [Fault(2.0 + 0.9 * n + again, "break-link", rank=n % 3) for n in range(10) for again in (0.0, 0.3)]
LATE_HELLOS = [Fault(2.0 + 0.9 * n, "late-hello", rank=n % 3, for_s=0.3) for n in range(10)]
ZOMBIE = Fault(5.0, "leave-rank", rank=1, for_s=5.0)
# With all ranks of an attempt again and again, about every third seed has a submission in the very moment of a fence.
ZOMBIES = [Fault(at_s, "leave-rank", rank=n, for_s=2.0) for at_s in (2.0, 5.0, 8.0, 11.0, 14.0) for n in (0, 1, 2)]
UNNOTIFIED = patch.object(ranks, "send_fenced", nothing)  # no process learns that it is fenced


@planted("lease-freed-by-timeout", "R8", "R8", Fault(3.0, "freeze-rank", rank=1, for_s=4.0), at=(ranks, "reap"))
async def lease_freed_by_timeout(real: Any, io: Any, state: HolderState) -> None:
    """Leases of a rank that has been silent for a while are given to others."""
    for link in list(state.ranks.links.values()):
        process: Any = link
        if process.process.is_frozen:
            state.store.reclaim(link.owner)
    await real(io, state)


@planted("lease-freed-by-a-broken-link", "R8", "R8", Fault(3.0, "kill-holder", (0,)), at=(ReplicaStore, "confirm"))
def lease_freed_by_a_broken_link(real: Any, self: Store, owner: Any, held: Any) -> Any:
    """Leases end with the link, and a rank that comes back still uses its slots."""
    self.reclaim(owner)
    return []


@planted("older-link-taken", "R8", "R8 I16", *LINKS_AT_ONCE, step_s=0.1, at=(ranks, "_greet"))
async def older_link_taken(real: Any, *arrival: Any) -> bool:
    """Of two links of a process that come at once the one whose welcome is late is taken, although it has ended."""
    await real(*arrival)
    return True


@planted("late-hello-taken", "R8", "R8 I16", *LATE_HELLOS, step_s=0.1)
def late_hello_taken() -> Any:
    """A link that its process gave up before it was served is taken, and frees the slots that the newer one got."""

    async def taken(io: Any, state: HolderState, link: Any, hello: Any, ended: Any = ()) -> None:
        state.ranks.newest.pop((*state.ranks.process_of(link), hello.life), None)
        await join(io, state, link, hello, ended)

    join = ranks.join
    return patch.object(ranks, "join", taken)


@planted("fence-not-kept", "R21", "R21", ZOMBIE, step_s=0.15)
@contextmanager
def fence_not_kept() -> Iterator[None]:
    """A holder answers a fence and goes on as before."""
    with patch.object(JobFences, "open", lambda self, job, attempt: None), UNNOTIFIED:
        yield


@planted("seal-ignores-fence", "R21", "R21", ZOMBIE, step_s=0.8)
@contextmanager
def seal_ignores_fence() -> Iterator[None]:
    """A holder seals what a rank of a fenced attempt submits."""
    add = seal.add

    def unfenced(state: HolderState, link: Any, ready: Any) -> SubmittedPut | None:
        put = add(state, link, ready)
        return replace(put, fence=0) if put is not None else None

    with patch.object(seal, "add", unfenced), UNNOTIFIED:
        yield


@planted(
    "lower-term-obeyed",
    "R17",
    "R17 R16 I1 I2 I16",
    Fault(4.0, "second-controller", (0,), for_s=3.0),
    at=(Sessions, "begin"),
)
def lower_term_obeyed(real: Any, self: Sessions[Any], session: Any, term: int) -> Any:
    """A holder obeys the controller that dialed it last, of any term."""
    self.term = 0
    return real(self, session, term)


@planted("level-before-the-fact", "R15", "R16 I4 R18", at=(seal, "StepLevel"))
def level_before_the_fact(real: Any, **fields: Any) -> Any:
    """A ticket is set to committed as soon as its own copies are there."""
    return StepLevel(**{**fields, "level": "committed" if fields["level"] == "sealed" else fields["level"]})


@planted("incarnation-by-the-clock", "R3", "I16", SET_BACK)
@contextmanager
def incarnation_by_the_clock() -> Iterator[None]:
    """A holder's incarnation is the time of its start, also if the controller names a higher one."""
    take, wall_s = SimCluster.take_incarnation, 0.0

    def timed(self: SimCluster, name: str, above: int = 0) -> int:
        nonlocal wall_s
        wall_s = 1e9 + self.now + self.memories[name].clock_ahead_s  # where the product's code would look
        return take(self, name, above)

    by_the_clock = patch.object(succession, "following", lambda last, above: int(1e9 * wall_s))
    with patch.object(SimCluster, "take_incarnation", timed), by_the_clock:
        yield


@planted("use-is-a-connect", "R5", "I1 I2 I16 R19 R23", Fault(5.0, "days-pass"), step_s=0.4)
@contextmanager
def use_is_a_connect() -> Iterator[None]:
    """Only a connect counts as use of an arena, so after days of training without one the job goes as forgotten."""
    with patch.object(succession, "is_due", lambda *_: False), patch.object(job_removal, "GRACE_S", 0.0):
        yield


ROWS = (
    row(
        "fence-answered-early",
        "R21",
        "R21",
        (seal, "FENCE_DRAIN_S"),
        0.0,
        "A fence is answered before the shards that were submitted in time are sealed.",
        *ZOMBIES,
        step_s=0.05,
    ),
)

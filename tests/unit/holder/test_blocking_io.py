"""Procedures on threads: one step at a time, calls side by side, errors where they belong."""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from memstore.core.holder.holder_io import HolderIo, Lane
from memstore.errors import PeerUnreachable
from memstore.shell.holder.blocking_io import BlockingIo
from memstore.testing.clusters.two_holders import two_holders

WAIT_S = 60.0


@pytest.fixture
def io() -> Iterator[BlockingIo]:
    """The port of a real holder, with another one beside it."""
    with two_holders(1 << 16) as (holder, _):
        yield holder.io


@dataclass
class Counter:
    """A count that is read and written in two operations."""

    value: int = 0
    inside: list[int] = field(default_factory=list)


def together(io: BlockingIo, *procedures: Callable[[HolderIo], Coroutine[Any, Any, Any]]) -> list[Any]:
    """Run procedures on a thread each and return their results."""
    with ThreadPoolExecutor(len(procedures)) as pool:
        return [future.result(WAIT_S) for future in [pool.submit(io.run, each) for each in procedures]]


def is_free(io: BlockingIo) -> bool:
    """Say whether another thread can have the state now."""

    def taken() -> bool:
        if not io._changed.acquire(blocking=False):
            return False
        io._changed.release()
        return True

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(taken).result(WAIT_S)


def test_one_procedure_at_a_time_touches_the_state(io: BlockingIo) -> None:
    """Eight procedures count in steps of many instructions: none of the counts is lost, and no two are inside."""
    counter, barrier = Counter(), threading.Barrier(8)

    async def count(io: HolderIo) -> None:
        await io.on_store(lambda: barrier.wait(WAIT_S))
        for _ in range(50):
            assert not counter.inside
            counter.inside.append(1)
            before = counter.value
            for _ in range(200):
                pass
            counter.value = before + 1
            counter.inside.pop()
            await io.wait_for(lambda: True, 0.0)

    together(io, *[count] * 8)
    assert counter.value == 8 * 50


def test_calls_run_side_by_side(io: BlockingIo) -> None:
    """Each waits for the other inside its call: with the lock held there, neither would end."""
    barrier = threading.Barrier(2)

    async def meet(io: HolderIo) -> int:
        return await io.on_store(lambda: barrier.wait(WAIT_S))

    assert sorted(together(io, meet, meet)) == [0, 1]

    async def both(io: HolderIo) -> list[int]:
        return await io.together([meet(io), meet(io)])

    assert sorted(io.run(both)) == [0, 1]


def test_a_procedure_that_waits_sees_what_another_changes(io: BlockingIo) -> None:
    """It is woken by the step that makes its condition true, and by a change from outside of all procedures."""
    found: list[str] = []

    async def wait(io: HolderIo) -> list[bool]:
        return [
            await io.wait_for(lambda: "step" in found, WAIT_S),
            await io.wait_for(lambda: "outside" in found, WAIT_S),
        ]

    async def change(io: HolderIo) -> None:
        found.append("step")

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(io.run, wait)
        io.start(Lane("drop"), change)
        with io.state():
            found.append("outside")
        assert waiting.result(WAIT_S) == [True, True]


def test_a_wait_ends_at_its_limit(io: BlockingIo) -> None:
    """What never comes is waited for no longer, and the procedure learns that."""

    async def wait(io: HolderIo) -> bool:
        return await io.wait_for(lambda: False, 0.01)

    assert io.run(wait) is False


def test_an_error_of_a_call_is_raised_where_the_procedure_waits_for_it(io: BlockingIo) -> None:
    """The procedure may repair it; what it lets go of in `finally` is let go under the lock."""
    freed: list[bool] = []

    async def repair(io: HolderIo) -> str:
        try:
            await io.reach("nowhere")
        except PeerUnreachable as exc:
            return str(exc)
        finally:
            freed.append(is_free(blocking))
        return ""

    blocking = io
    assert "nowhere" in io.run(repair)
    assert freed == [False], "another thread had the state while this procedure was in its step"


def test_an_error_that_a_procedure_does_not_repair_is_the_callers(io: BlockingIo) -> None:
    """It ends the procedure, and the lock is free again."""

    async def fail(io: HolderIo) -> None:
        await io.reach("nowhere")

    with pytest.raises(PeerUnreachable, match="nowhere"):
        io.run(fail)
    assert is_free(io)


def test_a_procedure_that_awaits_something_else_is_an_error(io: BlockingIo) -> None:
    """Nothing would ever go on with it: it ends at once, and the lock is free again."""

    class Elsewhere:
        def __await__(self) -> Iterator[None]:
            yield

    async def wander(io: HolderIo) -> None:
        await Elsewhere()

    with pytest.raises(RuntimeError, match="not of its port"):
        io.run(wander)
    assert is_free(io)

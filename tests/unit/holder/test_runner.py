"""The runner of a holder's procedures: one step at a time, effects side by side, errors where they belong."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from memstore.core.holder.effects import Effect, Procedure, Sleep, WaitFor
from memstore.errors import PeerUnreachable
from memstore.shell.holder.runner import Runner

WAIT_S = 60.0


@dataclass(frozen=True)
class Meet(Effect):
    """Wait until so many procedures carry out an effect at the same moment."""

    barrier: threading.Barrier


@dataclass
class Counter:
    """A count that is read and written in two operations."""

    value: int = 0
    inside: list[int] = field(default_factory=list)


def perform(effect: Effect) -> Any:
    """Carry out what these tests yield."""
    if isinstance(effect, Meet):
        return effect.barrier.wait(WAIT_S)
    raise PeerUnreachable(f"no {type(effect).__name__} here")


def together(runner: Runner, *procedures: Procedure[Any]) -> list[Any]:
    """Run procedures on a thread each and return their results."""
    with ThreadPoolExecutor(len(procedures)) as pool:
        return [future.result(WAIT_S) for future in [pool.submit(runner.run, each) for each in procedures]]


def test_one_procedure_at_a_time_touches_the_state() -> None:
    """Eight procedures count in steps of many instructions: none of the counts is lost, and no two are inside."""
    counter, barrier = Counter(), threading.Barrier(8)

    def count() -> Procedure[None]:
        yield Meet(barrier)
        for _ in range(50):
            assert not counter.inside
            counter.inside.append(1)
            before = counter.value
            for _ in range(200):
                pass
            counter.value = before + 1
            counter.inside.pop()
            yield WaitFor(lambda: True, 0.0)

    together(Runner(perform, threading.Condition(threading.RLock())), *(count() for _ in range(8)))
    assert counter.value == 8 * 50


def test_effects_run_side_by_side() -> None:
    """Each waits for the other inside its effect: with the lock held there, neither would end."""
    barrier = threading.Barrier(2)

    def meet() -> Procedure[int]:
        return (yield Meet(barrier))

    assert sorted(together(Runner(perform, threading.Condition(threading.RLock())), meet(), meet())) == [0, 1]


def test_a_procedure_that_waits_sees_what_another_changes() -> None:
    """It is woken by the step that makes its condition true, and by a change from outside of all procedures."""
    found: list[str] = []
    runner = Runner(perform, threading.Condition(threading.RLock()))

    def wait() -> Procedure[list[bool]]:
        return [(yield WaitFor(lambda: "step" in found, WAIT_S)), (yield WaitFor(lambda: "outside" in found, WAIT_S))]

    def change() -> Procedure[None]:
        found.append("step")
        yield WaitFor(lambda: True, 0.0)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(runner.run, wait())
        runner.run(change())
        with runner.state():
            found.append("outside")
        assert waiting.result(WAIT_S) == [True, True]


def test_a_wait_ends_at_its_limit() -> None:
    """What never comes is waited for no longer, and the procedure learns that."""

    def wait() -> Procedure[bool]:
        return (yield WaitFor(lambda: False, 0.01))

    assert Runner(perform, threading.Condition(threading.RLock())).run(wait()) is False


def test_an_error_of_an_effect_is_raised_where_the_procedure_waits_for_it() -> None:
    """The procedure may repair it; what it lets go of in `finally` is let go under the lock."""
    runner, freed = Runner(perform, threading.Condition(threading.RLock())), list[bool]()

    def repair() -> Procedure[str]:
        try:
            yield Sleep(1.0)
        except PeerUnreachable as exc:
            return str(exc)
        finally:
            with ThreadPoolExecutor(1) as pool:
                freed.append(pool.submit(runner._changed.acquire, blocking=False).result(WAIT_S))
        return ""

    assert runner.run(repair()) == "no Sleep here"
    assert freed == [False], "another thread had the state while this procedure was in its step"


def test_an_error_that_a_procedure_does_not_repair_is_the_callers() -> None:
    """It ends the procedure, and the lock is free again."""
    runner = Runner(perform, threading.Condition(threading.RLock()))

    def fail() -> Procedure[None]:
        yield Sleep(1.0)

    with pytest.raises(PeerUnreachable, match="no Sleep here"):
        runner.run(fail())
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(runner._changed.acquire, blocking=False).result(WAIT_S)

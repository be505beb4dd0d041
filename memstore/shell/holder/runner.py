"""Runs the procedures of core/holder on threads: one at a time touches the state; effects of several run in parallel.

A procedure runs on the thread of its caller. The lock is held from one yield to the next and released while an effect
is carried out; every step wakes the procedures that wait for a change of the state.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from memstore.core.holder.effects import Effect, Procedure, Together, WaitFor
from memstore.shell.threads.pool_work import await_ended

T = TypeVar("T")
SIDE_THREADS = 8


class Runner:
    """The lock of one holder's state, and the calls that carry out the effects of its procedures."""

    def __init__(self, perform: Callable[[Effect], Any], changed: threading.Condition) -> None:
        """Run procedures on a state.

        Args:
            perform: Carries out one effect by a call that blocks; all but WaitFor and Together.
            changed: The lock of the state; woken after every step.
        """
        self._perform, self._changed = perform, changed
        self._calls: dict[type[Effect], Callable[[Any], Any]] = {}
        self._beside = ThreadPoolExecutor(SIDE_THREADS, thread_name_prefix="memstore-source")

    def extended(self, calls: Mapping[type[Effect], Callable[[Any], Any]]) -> Runner:
        """Return a runner of the same state that carries out more kinds of effects."""
        other = copy.copy(self)
        other._calls = {**self._calls, **calls}
        return other

    @contextmanager
    def state(self) -> Iterator[None]:
        """Hold the lock for a moment, to read or change the state between the steps of procedures."""
        with self._changed:
            try:
                yield
            finally:
                self._changed.notify_all()

    def wake(self) -> None:
        """Let procedures look again at what they wait for: something other than the state has changed."""
        with self.state():
            pass

    def run(self, steps: Procedure[T]) -> T:
        """Run a procedure to its end and return its result; raise its errors here."""
        value: Any = None
        error: BaseException | None = None
        while True:
            try:
                with self.state():
                    effect = steps.send(value) if error is None else steps.throw(error)
            except StopIteration as end:
                return cast(T, end.value)
            value, error = None, None
            try:
                value = self._do(effect)
            except BaseException as exc:  # raised inside the procedure, which releases its resources
                error = exc

    def close(self) -> None:
        """Stop running procedures side by side."""
        self._beside.shutdown(wait=False, cancel_futures=True)

    def _do(self, effect: Effect) -> Any:
        if isinstance(effect, WaitFor):
            with self._changed:
                return self._changed.wait_for(effect.is_there, effect.limit_s)
        if isinstance(effect, Together):
            return self._together(effect)
        return self._calls.get(type(effect), self._perform)(effect)

    def _together(self, effect: Together) -> list[Any]:
        """Run procedures on other threads until all have ended.

        Returning earlier would let one still running write into an incoming replica that was given up.
        """
        futures = [self._beside.submit(self.run, steps) for steps in effect.procedures]
        await_ended(futures)
        return [future.result() for future in futures]

"""A guard against a verb that a signal's handler, or code of the state, calls inside another one.

The outer verb holds locks and slots, and goes on only after the inner one has returned; the inner one would wait for
them for ever, or overwrite the slots. Other threads are not affected: they wait for their turn.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from types import FrameType

from memstore.errors import ConfigError


class ReentrancyGuard:
    """The verbs of one store that are under way, by thread."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._verbs: dict[int, tuple[str, FrameType]] = {}  # with the call that it belongs to

    def refuse(self, verb: str) -> None:
        """Raise ConfigError if another verb is under way in this thread."""
        outer, call = self._verbs.get(threading.get_ident(), ("", None))
        if call is not None and is_running(call):  # else a signal's handler has ended it by an exception
            raise ConfigError(
                f"{verb} of job {self._job!r} was called in the middle of {outer}, in the same thread: by a signal's "
                "handler, or by code of the state itself (a state_dict, a tensor's class). Let the handler set a flag, "
                f"and call {verb} when {outer} has returned",
                verb=verb, outer=outer,
            )  # fmt: skip

    @contextlib.contextmanager
    def only(self, verb: str) -> Iterator[None]:
        """Have this verb under way in this thread; ConfigError if another one is."""
        self.refuse(verb)
        thread = threading.get_ident()
        try:
            self._verbs[thread] = verb, sys._getframe(2)  # the frame of the caller
            yield
        finally:
            self._verbs.pop(thread, None)


def is_running(call: FrameType) -> bool:
    """Return whether this thread is in the middle of a call."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame is not call:
        frame = frame.f_back
    return frame is not None

"""What a thread is in the middle of: a verb that a signal's handler, or code of the state, calls inside another one.

The outer verb has locks and room, and goes on only when the inner one has returned, which would wait for them for ever,
or take the room that is being filled. Other threads are no concern: they wait for their turn.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from memstore.errors import ConfigError


class UnderWay:
    """The verbs of one store that are under way, by thread."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._verbs: dict[int, str] = {}

    def refuse(self, verb: str) -> None:
        """Raise ConfigError if another verb is under way in this thread."""
        outer = self._verbs.get(threading.get_ident())
        if outer is not None:
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
            self._verbs[thread] = verb
            yield
        finally:
            self._verbs.pop(thread, None)

"""Calls that are answered once the fact that they led to is true. Pure (R16).

    recorded --the fact has reached enough journals, and every part has made it true--> answered
       '--its job is removed before--> refused, or answered where nothing is left to do

Before that a successor may know nothing of the fact, and the caller would have to ask again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from memstore.core.cluster.collective import job_removed
from memstore.core.cluster.effects import Effects
from memstore.core.cluster.facts import Fact, JobRemoved
from memstore.core.cluster.job import Call
from memstore.core.wire.replies import Reply


@dataclass(slots=True)
class Waiting:
    """One call, the fact that it waits for, and its answer."""

    fact: Fact
    call: Call[Any]
    reply: Reply
    is_done_by_removal: bool  # the end of its job is as good as the fact


class Waiters:
    """The calls that wait: few, and facts are compared, since one that holds a configuration has no hash."""

    def __init__(self, out: Effects) -> None:
        self.out = out
        self._waiting: list[Waiting] = []

    def add(self, fact: Fact, call: Call[Any], reply: Reply, *, is_done_by_removal: bool = False) -> None:
        """Answer a call once a fact that was recorded is true.

        Args:
            fact: Recorded by the caller.
            call: To be answered.
            reply: It may be filled until then.
            is_done_by_removal: Answer, rather than refuse, if the job is removed before.
        """
        self._waiting.append(Waiting(fact, call, reply, is_done_by_removal))

    def is_awaited(self, fact: Fact) -> bool:
        """Return whether some call waits for this very fact."""
        return any(waiting.fact == fact for waiting in self._waiting)

    def applied(self, fact: Fact) -> None:
        """Answer the calls that waited for a fact."""
        for waiting in self._taken(lambda awaited: awaited == fact):
            self.out.answer(waiting.call, waiting.reply)

    def fill(self, fact: Fact, **values: object) -> None:
        """Add late fields to the answers of the calls that wait for a fact."""
        for waiting in self._waiting:
            if waiting.fact == fact:
                waiting.reply = replace(waiting.reply, **values)

    def refuse(self, fact: Fact, error: str, message: str) -> None:
        """Refuse the calls that waited for a fact which will not be recorded."""
        for waiting in self._taken(lambda awaited: awaited == fact):
            self.out.refuse(waiting.call, error, message)

    def forget(self, name: str) -> None:
        """End the wait of every call about a job that was removed, but for those that asked for its removal."""
        for waiting in self._taken(lambda fact: getattr(fact, "job", "") == name and not isinstance(fact, JobRemoved)):
            if waiting.is_done_by_removal:
                self.out.answer(waiting.call, waiting.reply)
            else:
                self.out.refuse(waiting.call, *job_removed(name))

    def _taken(self, is_due: Callable[[Fact], bool]) -> list[Waiting]:
        """Take the calls out whose fact is due, in the order in which they came."""
        taken = [waiting for waiting in self._waiting if is_due(waiting.fact)]
        if taken:
            self._waiting = [waiting for waiting in self._waiting if not is_due(waiting.fact)]
        return taken

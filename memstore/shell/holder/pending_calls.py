"""Keeps questions of this host's ranks, and of the holder itself, until the controller has answered them (R4, R12).

asked --relayed, again after every new session or link--> answered, or the process that asked is gone
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable

from memstore.core.arena.slot_table import Owner
from memstore.core.holder.ranks import ForwardedCall
from memstore.core.wire.calls import RankCall
from memstore.core.wire.ids import WireStep


class Calls:
    """The open questions of one holder, by the holder's own numbers; any thread may use it."""

    def __init__(self, relay: Callable[[int, RankCall], None], first: int | None = None) -> None:
        """`relay`: sends the controller a question by its number; the numbers begin after `first`."""
        self._relay = relay
        self._lock = threading.Lock()
        self._waiting: dict[int, ForwardedCall] = {}
        # A former life's questions may still be answered, so no number comes twice.
        self._count = secrets.randbits(60) if first is None else first

    def ask(self, call: ForwardedCall) -> None:
        """Send a question. One that is asked again on a new link is the same question: its first answer ends it."""
        with self._lock:
            known = (n for n, c in self._waiting.items() if c.owner is not None and c.owner == call.owner)
            number = next((n for n in known if self._waiting[n].rank_id == call.rank_id), None)
            if number is None:
                self._count += 1
                number = self._count
            self._waiting[number] = call
        self._relay(number, call.request)

    def ask_own(self, request: RankCall) -> None:
        """Send a question of the holder's own."""
        self.ask(ForwardedCall(None, "", 0, request))

    def ask_again(self) -> None:
        """Send the questions that are not answered to the controller whose session has begun."""
        with self._lock:
            waiting = sorted(self._waiting.items())
        for number, call in waiting:
            self._relay(number, call.request)

    def take(self, number: int) -> ForwardedCall | None:
        """Return the question that was answered; None if no process waits for it."""
        with self._lock:
            return self._waiting.pop(number, None)

    def forget(self, owner: Owner) -> None:
        """Forget the questions of a process or store that is gone."""
        with self._lock:
            self._waiting = {n: call for n, call in self._waiting.items() if call.owner != owner}


# -- trained steps ------------------------------------------------------------------------------------
# Remembers the newest step that this host's ranks trained, put or not, for the controller (client/steps.py).


class TrainedSteps:
    """The newest trained step of each job, from any of its ranks here; it stays when they die."""

    def __init__(self) -> None:
        self._newest: dict[str, tuple[int, int]] = {}

    def report(self, job: str, attempt: int, step: int) -> None:
        """Note a step that a rank has trained."""
        self._newest[job] = max((attempt, step), self._newest.get(job, (0, -1)))

    def forget(self, job: str) -> None:
        """Forget a removed job."""
        self._newest.pop(job, None)

    def newest(self) -> dict[str, WireStep]:
        """Return the newest step of each job, for a heartbeat."""
        return {job: WireStep(*newest) for job, newest in list(self._newest.items())}

"""What one event makes the controller do. Parts write here; the machine hands the actions to the shell (R17).

send, answer, refuse, log --> actions, in order
emit --> the reactions to what happened, at once (controller/reactions.py)
note --> the store events that people and metrics see (report/event_kinds.py)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memstore.core.cluster.events import Happened
from memstore.core.cluster.job import Call
from memstore.core.wire.messages import Action, AnswerCall, LogLine, SendOrder
from memstore.core.wire.orders import Order
from memstore.core.wire.replies import Reply


def _nothing() -> None:
    """Do nothing, as long as there is no journal."""


def _ignore(_happened: Happened) -> None:
    """Do nothing, as long as there is no machine."""


def _forget(_kind: str, **_told: Any) -> None:
    """Do nothing, as long as nobody records."""


class Effects:
    """The actions of one event, collected while it is handled."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.before_answer: Callable[[], None] = _nothing  # the journal's: a fact is on its way before its answer
        self.react: Callable[[Happened], None] = _ignore  # the machine's
        #: Note a store event: its kind, `job`, `attempt`, `step`, `rank`, `host`, and what only its kind has; the
        #: recorder's.
        self.note: Callable[..., None] = _forget

    def send(self, host: str, order: Order) -> None:
        """Send an order to a holder."""
        self.actions.append(SendOrder(host, order))

    def answer(self, call: Call[Any], reply: Reply) -> None:
        """Answer a call; facts that were recorded for it are sent first."""
        self.before_answer()
        self.actions.append(AnswerCall(call.host_id, call.call_id, reply))

    def refuse(self, call: Call[Any], error: str, message: str) -> None:
        """Answer a call with an error: the name of a class of `memstore.errors`, and its message."""
        self.actions.append(AnswerCall(call.host_id, call.call_id, None, (error, message)))

    def log(self, text: str, level: str = "info") -> None:
        """Write a line to the controller's log."""
        self.actions.append(LogLine(text, level))

    def emit(self, happened: Happened) -> None:
        """Have every part react that has a reaction; returns when all have."""
        self.react(happened)

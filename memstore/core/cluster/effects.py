"""What one event makes the controller do. Parts write here; the machine hands the actions to the shell (R17).

send, answer, refuse, log --> actions, in order
emit --> the reactions to what happened, at once (controller/reactions.py)
note --> the store events that people and metrics see (report/event_kinds.py)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from msgspec import structs

from memstore.core.cluster.job import AttemptMember, Call, Job
from memstore.core.wire.messages import Action, AnswerCall, LogLine, SendOrder
from memstore.core.wire.orders import Order, PushTargets, Reserve, TermNumber
from memstore.core.wire.replies import Reply

# -- events -------------------------------------------------------------------------------------------
# What happened inside the controller, for parts that stand above the one that did it. Plain data.


@dataclass(frozen=True, slots=True)
class CommitApplied:
    """A step's commit has reached enough journals."""

    job: Job


@dataclass(frozen=True, slots=True)
class DrainChanged:
    """A host has notice of its end, or has it no more."""

    host: str


@dataclass(frozen=True, slots=True)
class PersistAsked:
    """A person or a script wants a step on durable storage now."""

    job: Job


@dataclass(frozen=True, slots=True)
class AttemptBegun:
    """An attempt's fact has reached enough journals: older attempts are over."""

    job: str
    attempt: int


@dataclass(frozen=True, slots=True)
class AttemptUnfenced:
    """Every live host refuses ranks of older attempts, and has sent its inventory."""

    job: str


@dataclass(frozen=True, slots=True)
class RankGone:
    """The process of a rank of the newest attempt has said bye, or is dead."""

    job: Job
    member: AttemptMember


@dataclass(frozen=True, slots=True)
class JobForgotten:
    """A job's removal has reached enough journals: nothing of it is known any more."""

    job: str


Happened = CommitApplied | DrainChanged | PersistAsked | AttemptBegun | AttemptUnfenced | RankGone | JobForgotten


# -- effects ------------------------------------------------------------------------------------------


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


# -- sent orders --------------------------------------------------------------------------------------
# Remembers the last order of each kind that a host was sent for a job: an equal one is not sent again (R10, R13).


JobOrder = Reserve | PushTargets


class SentOrders:
    """The orders sent last, by host, kind and job. A host that begins a session, or refused an order, has none."""

    def __init__(self) -> None:
        self._orders: dict[str, dict[tuple[type[JobOrder], str], JobOrder]] = {}

    def is_known(self, host: str, order: JobOrder) -> bool:
        """Return whether a host has this very order already, whatever its number."""
        known = self._orders.get(host, {}).get((type(order), order.job))
        return known is not None and _unnumbered(known) == _unnumbered(order)

    def note(self, host: str, order: JobOrder) -> None:
        """Note the order that a host is sent now."""
        self._orders.setdefault(host, {})[type(order), order.job] = order

    def refused(self, host: str, kind: type[JobOrder], job: str) -> None:
        """Forget an order that a host refused, so that it is sent again."""
        self._orders.get(host, {}).pop((kind, job), None)

    def forget_host(self, host: str) -> None:
        """Forget the orders of a host that died, or has begun a new session."""
        self._orders.pop(host, None)

    def forget(self, name: str) -> None:
        """Forget the orders of a removed job."""
        for orders in self._orders.values():
            for key in [key for key in orders if key[1] == name]:
                del orders[key]


def _unnumbered(order: JobOrder) -> JobOrder:
    return structs.replace(order, number=TermNumber(0, 0)) if isinstance(order, Reserve) else order

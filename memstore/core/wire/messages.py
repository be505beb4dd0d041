"""Every event that can reach the controller's machine and every action it can order. Pure.

The controller is a state machine: `handle(now, event) -> list[Action]`. The controller actor feeds it
from sockets and a clock; a simulator feeds it from a seeded schedule. What travels: `reports.py`, `orders.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from memstore.core.wire import reports
from memstore.core.wire.ids import Endpoint
from memstore.core.wire.orders import Order
from memstore.core.wire.replies import Reply
from memstore.core.wire.status_rows import HostStats
from recovery.inventory import Copy

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class HostInfo:
    """Who a holder is: announced when its session with the controller starts."""

    host_id: str
    incarnation: int
    endpoints: tuple[Endpoint, ...]  # where its holder listens, the first for sessions too; none before it listens
    machine: str = ""
    is_explicit: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    limit_bytes: int = 0


@dataclass(frozen=True, slots=True)
class HostUp:
    """A holder's session began: its verified copies and its journal come with it (R16)."""

    info: HostInfo
    copies: tuple[Copy, ...] = ()
    journal: tuple[bytes, ...] = ()
    ranks: tuple[str, ...] | None = None  # nonces of the processes that live there; None: not reported
    asked_s: float = -math.inf  # by the controller's clock, when it asked for this session (R17)
    up_s: float = 0.0  # how long its holder had been up then, by its own clock
    # For how long no holder had run there before it; 0 once a rank has joined or a copy was reported: put, from a peer,
    # or damaged.
    idle_s: float = 0.0

    @classmethod
    def of(cls, host: str, sent: reports.HostInventory, asked_s: float) -> HostUp:
        """Return the event of a holder's inventory, in a session that was asked for at that moment."""
        info = HostInfo(
            host, sent.incarnation, sent.endpoints, sent.machine, sent.is_explicit, sent.labels, sent.limit_bytes
        )
        copies = tuple(copy.on(host) for copy in sent.copies)
        return cls(info, copies, sent.journal, sent.ranks, asked_s, sent.up_s, sent.idle_s)


@dataclass(frozen=True, slots=True)
class HostBeat:
    """A heartbeat; it echoes the last `clock` that the host was sent in this session."""

    host_id: str
    stats: HostStats | None = None
    clock_s: float = -math.inf
    trained: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # job -> attempt, newest step trained there


@dataclass(frozen=True, slots=True)
class HostLost:
    """A reset connection or Ray's notice: the holder process is gone (R28)."""

    host_id: str
    why: str


@dataclass(frozen=True, slots=True)
class Received:
    """A holder's message: a report of something it did, or a call of a rank or tool, answered once by `AnswerCall`."""

    host_id: str
    message: reports.Report


@dataclass(frozen=True, slots=True)
class LeaseRenewed:
    """The controller's term was confirmed: it may record facts until `until_s` (R17)."""

    until_s: float


@dataclass(frozen=True, slots=True)
class DrainsSeen:
    """The cluster manager will take these hosts away, each at its moment (wall clock)."""

    until_s: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; which hosts sent something meanwhile, unless each was an event of its own."""

    heartbeats: tuple[HostBeat, ...] = ()


Event = HostUp | HostBeat | HostLost | Received | LeaseRenewed | DrainsSeen | Tick


@dataclass(frozen=True, slots=True)
class SendOrder:
    """Send an order to one holder."""

    host_id: str
    order: Order


@dataclass(frozen=True, slots=True)
class AnswerCall:
    """Answer a call; `error` is (class name, message) of the memstore error to raise there."""

    host_id: str
    call_id: int
    reply: Reply | None
    error: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line for the log; `level` is "info" or "warning"."""

    text: str
    level: str = "info"


Action = SendOrder | AnswerCall | LogLine

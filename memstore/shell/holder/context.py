"""The context that all parts of one holder share.

It refers to no part, so parts cannot depend on one another through it.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memstore.config import Config
from memstore.core.arena.slot_table import Owner
from memstore.core.holder import ranks
from memstore.core.holder.sessions import JobFences
from memstore.core.holder.state import HolderState, SubmittedPut
from memstore.core.wire.frame import Kind
from memstore.core.wire.ids import Endpoint
from memstore.core.wire.orders import HostNews
from memstore.core.wire.rank_messages import HolderEvent, SlotsLeased, Welcome
from memstore.core.wire.reports import Report
from memstore.errors import PeerUnreachable, TransportError
from memstore.shell.arena.arena import HostStore
from memstore.shell.net.channel import Channel
from memstore.shell.peer.client import PeerClient

# -- peer table ---------------------------------------------------------------------------------------
# The other holders of the controller's present view, each with its pool of connections (R3).


class PeerTable:
    """The peers of one holder; any thread may use it."""

    def __init__(self, host_id: str, connect: Callable[[str, tuple[Endpoint, ...]], PeerClient]) -> None:
        """`connect`: makes the pool for a host and where it listens."""
        self._host_id, self._connect = host_id, connect
        self._peers: dict[str, PeerClient] = {}
        self._lock = threading.Lock()

    def peer(self, host_id: str) -> PeerClient:
        """Return the connection pool to a peer of the present view."""
        with self._lock:
            peer = self._peers.get(host_id)
        if peer is None:
            raise PeerUnreachable(f"host {host_id} is not in the store's view: it is dead or unknown", host=host_id)
        return peer

    def set_view(self, view: HostNews) -> set[str]:
        """Take the addresses of hosts, and return the hosts now known; one that moved gets new connections (R3)."""
        with self._lock:
            seen = {row.host: row.endpoints for row in view.hosts if row.host != self._host_id}
            gone = view.gone if view.gone is not None else self._peers.keys() - seen.keys()
            dead = self._peers.keys() & set(gone)
            moved = [h for h, p in self._peers.items() if h in seen and seen[h] != p.endpoints]
            for host in (*dead, *moved):
                self._peers.pop(host).close()
            for host, endpoints in seen.items():
                if host not in self._peers:
                    self._peers[host] = self._connect(host, endpoints)
            return set(self._peers)

    def forget(self) -> None:
        """Close every connection and forget the view; the controller's next session brings it again."""
        with self._lock:
            while self._peers:
                self._peers.popitem()[1].close()

    def close(self) -> None:
        """Close every connection; transfers under way fail."""
        with self._lock:
            for peer in self._peers.values():
                peer.close()


# -- context ------------------------------------------------------------------------------------------


log = logging.getLogger("memstore")


@dataclass
class HolderContext:
    """One holder's identity, memory and ways out: to its controller, to its peers, and to its end."""

    state: HolderState  # what the procedures of core/holder share
    config: Config
    folder: Path
    replicas: HostStore
    peers: PeerTable
    on_fatal: Callable[[str], None]
    stopping: threading.Event
    # The lock of `state`: held while a procedure runs, given up while a call of its port blocks; every step wakes all.
    # Locks are taken in this order: a claim of memory, a link's `grants`, this one, `replicas.lock`, single objects (a
    # channel, an outbox, SendGate). So the lock of SendGate may be taken under this one, and never this one under it.
    # What may take long is done without this lock: by calls of the port, and on the store by `on_store`.
    changed: threading.Condition = field(default_factory=lambda: threading.Condition(threading.RLock()))

    @property
    def host_id(self) -> str:
        """Return the name of the host."""
        return self.state.host_id

    @property
    def fences(self) -> JobFences:
        """Return the fences of the jobs here."""
        return self.state.fences

    def report(self, report: Report) -> None:
        """Queue a report to the controller; without a session it is dropped."""
        self.state.report(report)

    def logged(self, work: Callable[..., None], *args: Any) -> None:
        """Do some work; a failure is logged and ends nothing."""
        try:
            work(*args)
        except Exception:
            log.exception("host %s: order %s failed", self.host_id, work.__name__)


# -- rank connections ---------------------------------------------------------------------------------
# The link of a rank's process to this holder, and what is sent on links (R4, R8, R15).


SEND_S = 10.0  # a rank that does not read for this long (frozen) loses its link, never its leases


@dataclass
class RankConnection:
    """One process of a rank (or a tool) on this host."""

    channel: Channel
    owner: Owner
    nonce: str = ""
    job: str = ""  # "": a tool's
    rank: int = 0
    attempt: int = 0
    pins: dict[int, Callable[[], None]] = field(default_factory=dict)  # what this reader holds -> how to let go of it
    submitted_puts: queue.Queue[SubmittedPut | None] = field(default_factory=queue.Queue)
    grants: threading.Lock = field(default_factory=threading.Lock)  # orders messages about a rank's leases
    is_retired: bool = False  # the same store came back on another link and sends again what was not sealed

    @property
    def order(self) -> int:
        """Return the number of its channel: a listener makes channels in the order in which it accepts connections."""
        return self.channel.number

    @property
    def is_open(self) -> bool:
        """Say whether it can be sent anything."""
        return not self.channel.is_closed

    def send(self, message: Welcome | HolderEvent) -> None:
        """Send one event; a link that cannot take it ends, and will come back.

        If the process has closed it, its `bye` may be unread: the thread that reads the link ends it after that.
        """
        try:
            self.channel.send(Kind.EVENT, 0, message, deadline_s=SEND_S)
        except PeerUnreachable:
            return
        except TransportError:
            self.channel.close()


class RankConnections:
    """What is sent on the links of one holder beside the procedures of core/holder/ranks.py, which keep them."""

    def __init__(self, context: HolderContext) -> None:
        self.context, self.state = context, context.state

    def grant(self, link: RankConnection) -> None:
        """Lease a rank what its share allows, and send it the slots."""
        with link.grants:
            with self.context.changed:
                slots = ranks.lease(self.state, link)
            if slots:
                link.send(SlotsLeased(slots=tuple(slots)))

"""The link of a rank's process to this holder, and what is sent on links (R4, R8, R15)."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from memstore.core.arena.slot_table import Owner
from memstore.core.holder import ranks
from memstore.core.holder.state import SubmittedPut
from memstore.core.wire.frame import Kind
from memstore.core.wire.rank_messages import HolderEvent, SlotsLeased, Welcome
from memstore.errors import PeerUnreachable, TransportError
from memstore.shell.holder.context import HolderContext
from memstore.shell.net.channel import Channel

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

"""The other holders of the controller's present view, each with its pool of connections (R3)."""

from __future__ import annotations

import threading
from collections.abc import Callable

from memstore.core.wire.ids import Endpoint
from memstore.core.wire.orders import HostNews
from memstore.errors import PeerUnreachable
from memstore.shell.peer.client import PeerClient


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

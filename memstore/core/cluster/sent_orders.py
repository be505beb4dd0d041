"""Keeps the orders that hosts were sent last of every job, so that only changes are sent. Pure (R10, R13)."""

from __future__ import annotations

from memstore.core.wire.messages import Body


class SentOrders:
    """The orders sent last, by host, kind and job. A host that begins a session, or refused an order, has none."""

    def __init__(self) -> None:
        self._bodies: dict[str, dict[tuple[str, str], Body]] = {}

    def is_known(self, host: str, kind: str, body: Body) -> bool:
        """Return whether a host has this very order already."""
        return self._bodies.get(host, {}).get((kind, str(body["job"]))) == body

    def note(self, host: str, kind: str, body: Body) -> None:
        """Note the order that a host is sent now."""
        self._bodies.setdefault(host, {})[kind, str(body["job"])] = body

    def refused(self, host: str, kind: str, job: str) -> None:
        """Forget an order that a host refused, so that it is sent again."""
        self._bodies.get(host, {}).pop((kind, job), None)

    def forget_host(self, host: str) -> None:
        """Forget the orders of a host that died, or has begun a new session."""
        self._bodies.pop(host, None)

    def forget(self, name: str) -> None:
        """Forget the orders of a removed job."""
        for bodies in self._bodies.values():
            for key in [key for key in bodies if key[1] == name]:
                del bodies[key]

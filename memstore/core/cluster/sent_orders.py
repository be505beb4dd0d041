"""Remembers the last order of each kind that a host was sent for a job: an equal one is not sent again (R10, R13)."""

from __future__ import annotations

from msgspec import structs

from memstore.core.wire.orders import PushTargets, Reserve, TermNumber

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

"""Which of a host's networks the next connection goes to: the one with the fewest, but none that failed lately. Pure.

A host with several network cards listens on each. Connections are spread over them, so that copies use all; where one
fails, its share goes to the others until it is tried again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from memstore.core.wire.ids import Endpoint

AVOID_S = 30.0  # after a failure; what failed is used all the same where nothing else is left


class EndpointChoice:
    """The endpoints of one host. For several threads under their owner's lock."""

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        """Take them in the order in which the host names them, one at least."""
        self.all = tuple(endpoints)
        self._open: Counter[Endpoint] = Counter()
        self._failed_s: dict[Endpoint, float] = {}

    def order(self, now: float) -> list[Endpoint]:
        """Return the endpoints in the order in which a connection is to be tried."""
        return sorted(self.all, key=lambda each: (self.is_avoided(each, now), self._open[each]))

    def is_avoided(self, endpoint: Endpoint, now: float) -> bool:
        """Say whether it failed lately."""
        failed_s = self._failed_s.get(endpoint)
        return failed_s is not None and now < failed_s + AVOID_S

    def has_another(self, now: float) -> bool:
        """Say whether one of several did not fail lately."""
        return len(self.all) > 1 and not all(self.is_avoided(each, now) for each in self.all)

    def is_uneven(self, now: float) -> bool:
        """Say whether a network that may be used has no connection while another has several."""
        idle = [each for each in self.all if not self._open[each] and not self.is_avoided(each, now)]
        return bool(idle) and max(self._open.values(), default=0) > 1

    def opened(self, endpoint: Endpoint) -> None:
        """Count a connection."""
        self._open[endpoint] += 1

    def closed(self, endpoint: Endpoint) -> None:
        """Count a connection no more."""
        self._open[endpoint] -= 1

    def failed(self, endpoint: Endpoint, now: float) -> None:
        """Note that it could not be reached, or that a connection to it broke."""
        self._failed_s[endpoint] = now

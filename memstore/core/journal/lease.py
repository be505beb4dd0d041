"""How long a controller may take itself for the newest one, and record facts (R17). Pure.

Two things say so: the membership confirmed the term, or every registered host was with this controller lately. Both
count from the question, never from the answer's arrival: what a socket kept while this process stood still was said
before that. So hosts are sent this controller's clock and echo it in heartbeats: a host was here at the time it echoes.
The hosts are asked only while the membership lease is about to expire.
"""

from __future__ import annotations

import math

from memstore.core.cluster.effects import Effects
from memstore.core.cluster.state import ClusterState
from memstore.core.wire.orders import EchoClock


class TermLease:
    """The lease of one controller term."""

    def __init__(self, state: ClusterState, out: Effects) -> None:
        self.state, self.out = state, out
        self.until_s = state.now  # by the membership's confirmation
        self.is_outranked = False  # some holder obeys a higher term: nothing is recorded under this one any more
        self._asked_s = -math.inf

    def renew(self, until_s: float) -> None:
        """Extend the lease: the membership confirmed the term."""
        self.until_s = max(self.until_s, until_s)

    def may_record(self) -> bool:
        """Return whether the membership's confirmation holds, or every registered holder was here within a lease.

        A holder that fell silent may obey a newer controller on the far side of a partition; one that is gone does not.
        """
        if self.is_outranked:
            return False
        now = self.state.now
        return now <= self.until_s or self.state.hosts.was_with_all(now - self.state.rules.lease_s)

    def tick(self) -> None:
        """Have every host echo the present time while the membership lease is about to expire."""
        now, lease_s = self.state.now, self.state.rules.lease_s
        if now < self.until_s - lease_s / 2 or now < self._asked_s + lease_s / 6:
            return
        self._asked_s = now
        order = EchoClock(clock_s=now)
        for host in self.state.hosts.live_ids():
            self.out.send(host, order)

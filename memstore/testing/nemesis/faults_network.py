"""Faults of links and of durable storage, and questions to readers and the command line in between."""

from __future__ import annotations

import random
import time

from memstore.testing.nemesis.fault_base import FaultBase
from memstore.testing.nemesis.schedule import Planned


class NetworkFaults(FaultBase):
    """The methods of `Faults` for links and storage."""

    def cut_link(self, rng: random.Random, planned: Planned) -> None:
        """Lose or hold back what peers send to a host, or what it answers, for a while."""
        host = self._proxied(rng, planned)
        if not host:
            return
        proxy = self.hosts.cluster.proxies[host]
        lanes = rng.choice(((proxy.up,), (proxy.down,), (proxy.up, proxy.down)))
        field = rng.choice(("drop", "stall"))
        self.story.fault("cut_link", f"{host}: {len(lanes)} directions {field} for {planned.for_s:g} s")
        self.hosts.cut.add(host)
        self.hosts.mark_away(host)
        for lane in lanes:
            setattr(lane, field, True)

        def restore() -> None:
            for lane in lanes:
                setattr(lane, field, False)
            self.hosts.cut.discard(host)

        self.later(planned, restore)

    def slow_link(self, rng: random.Random, planned: Planned) -> None:
        """Make a host's link late and slow for a while."""
        host = self._proxied(rng, planned)
        if not host:
            return
        lane = self.hosts.cluster.proxies[host].up
        lane.delay_s, lane.rate_bytes_per_s = rng.choice((0.0, 0.05, 0.3)), rng.choice((0.0, 2e5, 2e6))
        self.story.fault(
            "slow_link", f"{host}: {lane.delay_s:g} s late, {lane.rate_bytes_per_s:g} B/s, {planned.for_s:g} s"
        )

        def restore() -> None:
            lane.delay_s = lane.rate_bytes_per_s = 0.0

        self.later(planned, restore)

    def reset_links(self, rng: random.Random, planned: Planned) -> None:
        """Reset every connection of peers to a host, or flip a bit of the next large payload."""
        host = self._proxied(rng, planned)
        if not host:
            return
        proxy = self.hosts.cluster.proxies[host]
        if rng.random() < 0.5:
            self.story.fault("reset_links", f"{host}: all reset")
            proxy.reset_all()
        else:
            self.story.fault("reset_links", f"{host}: a bit flips")
            proxy.up.flip("payload", rng.randrange(4096), payload_min=4096, bit=rng.randrange(8))

    def _proxied(self, rng: random.Random, planned: Planned) -> str:
        host = self.up(rng, planned)
        return host if host in self.hosts.cluster.proxies and host not in self.hosts.cut else ""

    def break_storage(self, rng: random.Random, planned: Planned) -> None:
        """Let durable storage fail, hang up or be away for a while."""
        what, undo = self.storage.damage(rng)
        self.story.fault("break_storage", f"{what}, for {planned.for_s:g} s")
        began_s = time.monotonic()
        self.ledger.lost_storage(began_s)

        def restore() -> None:
            undo()
            self.ledger.lost_storage(began_s, time.monotonic())

        self.later(planned, restore)

    def read(self, rng: random.Random, planned: Planned) -> None:
        """Let a reader read shards on some host."""
        host = self.up(rng, planned)
        if host:
            self.reading.begin_read(host, rng)

    def ask_cli(self, rng: random.Random, planned: Planned) -> None:
        """Ask one verb of the command line, as a person does."""
        self.reading.begin_cli(rng)

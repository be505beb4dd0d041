"""Faults of links and of durable storage, and the questions that are asked while everything breaks."""

from __future__ import annotations

import random
import time

from memstore.testing.nemesis.fault_base import FaultBase
from memstore.testing.nemesis.schedule import Planned


class NetworkFaults(FaultBase):
    """A part of `Faults`."""

    def cut_link(self, rng: random.Random, planned: Planned) -> None:
        """What peers send to a host, or what it answers, is lost or not taken for a while."""
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
        """A link is late and slow for a while."""
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
        """Every connection of peers to a host is reset, or a bit of the next large payload is flipped on its way."""
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
        """Durable storage fails, hangs up or is away for a while."""
        what, undo = self.storage.damage(rng)
        self.story.fault("break_storage", f"{what}, for {planned.for_s:g} s")
        began_s = time.monotonic()
        self.ledger.lost_storage(began_s)

        def restore() -> None:
            undo()
            self.ledger.lost_storage(began_s, time.monotonic())

        self.later(planned, restore)

    def read(self, rng: random.Random, planned: Planned) -> None:
        """A reader that joins nothing reads shards on some host."""
        host = self.up(rng, planned)
        if host:
            self.reading.begin_read(host, rng)

    def ask_cli(self, rng: random.Random, planned: Planned) -> None:
        """A person asks."""
        self.reading.begin_cli(rng)

"""The base of all faults: the parts of the round, the choice of a victim, and the limit on memory that may go."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from memstore.testing.nemesis.hosts import Hosts
from memstore.testing.nemesis.ledger import Ledger
from memstore.testing.nemesis.reading import Reading
from memstore.testing.nemesis.schedule import Planned, Scenario
from memstore.testing.nemesis.storage import Storage
from memstore.testing.nemesis.story import Story

if TYPE_CHECKING:
    from memstore.testing.nemesis.job import Job


class FaultBase:
    """The state of the faults of one round."""

    def __init__(
        self, scenario: Scenario, hosts: Hosts, job: Job, ledger: Ledger, story: Story, reading: Reading,
        storage: Storage,
    ) -> None:  # fmt: skip
        self.scenario, self.hosts, self.job = scenario, hosts, job
        self.ledger, self.story, self.reading, self.storage = ledger, story, reading, storage
        self.undo: list[tuple[float, int, Callable[[], None]]] = []
        self.order = 0
        self.last_s = time.monotonic()  # when a fault last began or ended
        self.held_for_restart = False  # the job is dead until every host is back

    def later(self, planned: Planned, action: Callable[[], None]) -> None:
        """Do something when the fault's time is over."""
        raise NotImplementedError

    def start(self, host: str) -> None:
        """Start a host's holder unless it was started meanwhile."""
        raise NotImplementedError

    def up(self, rng: random.Random, planned: Planned) -> str:
        """Return the planned host, or one whose holder runs; "" if there is none."""
        running = [h for h in self.hosts if h not in self.hosts.down and h not in self.hosts.stopped]
        running = [h for h in running if self.hosts.pid(h) is not None]
        wanted = planned.values.get("host")
        if wanted is not None:
            return wanted if wanted in running else ""
        return rng.choice(running) if running else ""

    def expendable(self, rng: random.Random, planned: Planned) -> str:
        """Return a host whose memory may go within the promise; "" if its loss would be one too many."""
        host = self.up(rng, planned)
        if not host or host in self.hosts.undying:
            return ""
        with self.ledger.lock:
            newest = self.ledger.newest_commit()
            if newest is None:
                return ""
            since_s = self.ledger.commits[newest].safe_since_s
            open_rot = {h.domain for h in self.ledger.harms if h.kind.startswith("rot") and not h.is_mended}
            floor_s = self.job_complete_s() if since_s is None else since_s
            hurt = {h.domain for h in self.ledger.harms
                    if h.at_s >= floor_s or (h.kind == "away" and h.until_s is None)}  # fmt: skip
        hurt |= open_rot | {self.hosts.domain[host]}
        if len(hurt) >= self.scenario.replicas:
            return ""
        return host

    def job_complete_s(self) -> float:
        """Return when copies were last seen complete; 0 for never."""
        return self.reading.observer.complete_s

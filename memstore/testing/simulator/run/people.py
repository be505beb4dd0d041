"""What people and readers ask for in the middle of a run: pins and leases, and their end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memstore.testing.faults.catalogue import Fault
from memstore.testing.simulator.rank.rank import SimRank
from memstore.testing.simulator.run.cluster import SimCluster
from memstore.testing.simulator.world.processes import CallFailed
from memstore.testing.simulator.world.virtual_time import Endless, Thread
from recovery.inventory import StepId

KINDS = ("pin-step", "unpin-step", "lease-step")
STEPS_MAX = 4  # one of so many newest steps is pinned


class People:
    """The requests of one simulation, each asked through a living rank."""

    def __init__(self, cluster: SimCluster) -> None:
        self.cluster, self.promises = cluster, cluster.checker.promises
        self.count = 0

    def ask(self, fault: Fault) -> None:
        """Do one of `KINDS`, if there is a rank to ask through and something to ask for."""
        living = [r for r in self.cluster.ranks if not r.is_dead and r.holder is not None]
        if not living:
            return
        rank, number = living[fault.rank % len(living)], fault.count - 1
        pins = self.promises.pins
        committed = sorted(self.cluster.checker.observed.acked, reverse=True)
        self.count += 1
        if fault.kind == "pin-step" and committed:
            self._pin(rank, committed[number % min(STEPS_MAX, len(committed))], f"p{self.count}")
        elif fault.kind == "lease-step" and committed:
            self._lease(rank, f"l{self.count}", fault.for_s)
        elif fault.kind == "unpin-step" and pins:
            name = sorted(pins)[number % len(pins)]
            del pins[name]
            self._ask(rank, "unpin", lambda: None, name=name)

    def _pin(self, rank: SimRank, step: StepId, name: str) -> None:
        self._ask(
            rank,
            "pin",
            lambda: self.promises.pins.update({name: step}),
            step=step.step,
            of_attempt=step.attempt,
            name=name,
        )

    def _lease(self, rank: SimRank, name: str, for_s: float) -> None:
        """Lease the newest step, and end that, unless the rank's process or link does it first."""
        self._ask(rank, "lease_step", lambda: None, step=None, lease=name, limit_s=600.0)
        if for_s:
            self.cluster.at(for_s, lambda: self._ask(rank, "end_lease", lambda: None, lease=name))

    def _ask(self, rank: SimRank, verb: str, done: Callable[[], object], **body: Any) -> None:
        call_id = rank.ask(verb, **body)

        def wait() -> Thread:
            yield lambda: call_id in rank.replies or rank.is_dead
            answer = rank.replies.pop(call_id, None)
            what = "no answer" if answer is None else answer.error if isinstance(answer, CallFailed) else "done"
            self.cluster.note(f"rank {rank.rank}: {verb} {body.get('name') or body}: {what}")
            if what == "done":
                done()

        self.cluster.spawn(wait(), Endless())

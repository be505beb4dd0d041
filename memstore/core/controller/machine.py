"""The controller's machine: one pure state machine that decides for all jobs of a store.

    handle(now, event) -> actions

`parts.py` builds its parts, `inputs.py` gives each event to one of them, `reactions.py` has the reactions.
The controller actor and the simulator are two shells around it (R16, R17).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from memstore.core.cluster import facts as f
from memstore.core.cluster.effects import Effects
from memstore.core.cluster.events import Happened
from memstore.core.cluster.hosts import HostTable
from memstore.core.cluster.job import Job
from memstore.core.cluster.state import ClusterState, Rules
from memstore.core.controller.inputs import Inputs
from memstore.core.controller.membership import Membership
from memstore.core.controller.parts import Parts
from memstore.core.controller.queries import Queries
from memstore.core.controller.reactions import facts, reactions
from memstore.core.controller.takeover import Takeover
from memstore.core.journal.lease import TermLease
from memstore.core.wire.messages import Action, Event


class ControllerMachine:
    """The machine of one controller term."""

    def __init__(
        self, *, term: int, now: float, wall_offset_s: float, rules: Rules, expected_hosts: Iterable[str] = ()
    ) -> None:
        self.state = ClusterState(rules=rules, now=now, wall_offset_s=wall_offset_s, expected_hosts=expected_hosts)
        self.out = Effects()
        self.parts = Parts(self.state, self.out, term)
        queries = Queries(self.parts)
        membership = Membership(self.parts, queries)
        self.takeover = Takeover(self.parts, membership, lambda fact: self.apply(fact, is_replay=True))
        self._inputs = Inputs(self.parts, membership, queries, self.takeover)
        self._facts, self._reactions = facts(self.parts), reactions(self.parts, membership)
        self.out.react = self._react

    # -- what shells look at ------------------------------------------------------------------

    @property
    def jobs(self) -> Mapping[str, Job]:
        """The jobs that the controller knows, by name."""
        return self.state.jobs

    @property
    def hosts(self) -> HostTable:
        """The hosts that the controller knows."""
        return self.state.hosts

    @property
    def lease(self) -> TermLease:
        """The time until which this controller may record facts."""
        return self.parts.journal.lease

    @property
    def actions(self) -> list[Action]:
        """The actions ordered so far by the event being handled (or by the last one)."""
        return self.out.actions

    @property
    def is_settled(self) -> bool:
        """Whether the past is known and calls are served."""
        return self.takeover.is_settled

    # -- events -------------------------------------------------------------------------------

    def handle(self, now: float, event: Event) -> list[Action]:
        """Handle one event at time `now` (monotonic seconds); return the actions."""
        self.state.now = max(self.state.now, now)
        self.out.actions = []
        if self.is_settled:
            self._inputs.handle(event)
        else:
            for waiting in self.takeover.collect_inventories(event):
                self._inputs.handle(waiting)
            for job in self.state.jobs.values():
                self.parts.steps.evaluate_all(job)
        self._apply_replicated()
        self.parts.journal.send_facts()
        return self.out.actions

    def _react(self, happened: Happened) -> None:
        for reaction in self._reactions[type(happened)]:
            reaction(happened)

    # -- facts --------------------------------------------------------------------------------

    def _apply_replicated(self) -> None:
        while True:
            ready = self.parts.journal.log.replicated(self._is_enough) if self.is_settled else []
            if not ready:
                return
            for fact in ready:
                self.apply(fact, is_replay=False)

    def _is_enough(self, hosts: list[str], fact: f.Fact) -> bool:
        job = self.state.jobs.get(getattr(fact, "job", ""))
        replicas = job.newest.replicas if job is not None and job.newest is not None else 2
        if isinstance(fact, f.AttemptOpened):
            replicas = int(fact.config["replicas"])
        table = self.state.hosts
        have = table.domains(h for h in hosts if table.is_live(h))
        return bool(have) and len(have) >= table.live_domains_count(replicas)

    def apply(self, fact: f.Fact, *, is_replay: bool) -> None:
        """Make a fact true: it has reached enough journals, or it is of the past."""
        if self.parts.job_removal.is_void(fact):
            return
        if not is_replay:
            self.parts.recorder.fact(fact)
        self.parts.repair.fact(getattr(fact, "job", ""))
        for part in self._facts[type(fact)]:
            part(fact, is_replay)
        if not is_replay:
            self.parts.waiters.applied(fact)

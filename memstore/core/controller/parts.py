"""Every part of the controller's machine, built from the ground up: a part is given only parts built before it.

This is the one place where parts meet. `reactions.py` has each part's reaction to an event of a part below it.
"""

from __future__ import annotations

from memstore.core.attempts.join import Attempts
from memstore.core.attempts.rewind import Rewinds
from memstore.core.capacity import Drops, Reservations, Retention
from memstore.core.cluster.effects import Effects, SentOrders
from memstore.core.cluster.state import ClusterState
from memstore.core.commits import StepCommits
from memstore.core.durable.checks import DurableChecks, DurableLooks
from memstore.core.durable.departures import Departures, LastCopyFinder
from memstore.core.durable.markers import DurableMarkers
from memstore.core.durable.persist import Persists
from memstore.core.durable.states import DurableStates
from memstore.core.durable.writes import DurableOrders
from memstore.core.history.job_removal import JobRemoval, Orphans
from memstore.core.history.pins import Pins, Retirement
from memstore.core.journal.replication import Journal, Waiters
from memstore.core.precautions import Precautions
from memstore.core.repair import Repair
from memstore.core.report.dry_run import DryRuns
from memstore.core.report.recorder import EventRecorder
from memstore.core.report.status import StatusReport
from memstore.core.restore.followers import Followers
from memstore.core.restore.rounds import Rounds
from memstore.core.restore.single_read import SingleReads
from memstore.core.targets.drain import Drains
from memstore.core.targets.targets import ClusterView


class Parts:
    """The parts, in the order of the rooms of core/."""

    def __init__(self, state: ClusterState, out: Effects, term: int) -> None:
        self.state, self.out, self.term = state, out, term
        # cluster, journal
        self.sent_orders = SentOrders()
        self.journal = Journal(state, out, term)
        self.waiters = Waiters(out)
        # targets
        self.drains = Drains(state, out, self.journal)
        self.view = ClusterView(state, out, self.sent_orders, self.drains)
        # capacity
        self.drops = Drops(state, out, term)
        self.retention = Retention(state, self.journal, self.drops)
        self.room = Reservations(state, out, self.journal, self.sent_orders, self.view, self.retention)
        # commit, repair
        self.steps = StepCommits(state, out, self.journal, self.view, self.drops, self.room, self.retention)
        self.reads = SingleReads(state, out, term)
        self.repair = Repair(state, out, self.view, self.drops, self.room, self.steps, self.reads.rebuild)
        # durable
        self.durable_states = DurableStates(state)
        markers = self.durable_markers = DurableMarkers(state, out, self.durable_states)
        self.durable_checks = DurableChecks(state, out, self.durable_states)
        self.durable_looks = DurableLooks(state, self.durable_states, self.durable_checks)
        self.last_copies = LastCopyFinder(state, out, self.durable_checks)
        self.persists = Persists(state, out, self.durable_states, self.durable_checks)
        self.durable = DurableOrders(
            state, out, self.view, self.steps, self.retention, self.durable_states, self.persists
        )
        self.departures = Departures(state, out, self.durable_checks, self.persists)
        self.precautions = Precautions(state, out, self.persists, term)
        # attempts
        self.attempts = Attempts(state, out, self.journal, self.view, markers)
        self.rewinds = Rewinds(state, out, self.view, self.attempts)
        # restore
        self.followers = Followers(state, out, self.room, self.retention)
        self.rounds = Rounds(
            state, out, self.journal, self.view, self.room, self.repair, markers, self.reads, self.followers
        )
        # history
        self.pins = Pins(state, out, self.journal, self.waiters, self.room, self.retention)
        self.job_removal = JobRemoval(state, out, self.journal, self.waiters, self.durable_checks, self.attempts)
        self.orphans = Orphans(state, out, self.journal, self.job_removal)
        self.retirement = Retirement(state, out, self.journal, self.waiters, self.rounds)
        # report
        self.recorder = EventRecorder(state, out, self.repair.pushes, self.departures, term)
        self.status = StatusReport(
            state,
            term,
            self.view,
            self.drains,
            self.room,
            self.repair.pushes,
            self.durable_states,
            self.departures,
            self.attempts,
            self.recorder.watch,
            self.recorder.accounts,
        )
        self.dry_runs = DryRuns(state, out, self.durable_states, self.durable_looks)

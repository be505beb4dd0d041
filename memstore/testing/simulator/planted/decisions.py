"""Planted bugs in the controller's decisions: commit rule, facts, retention, repair, planner, placement, terms."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import PropertyMock, patch

from msgspec import structs

from memstore.core import repair
from memstore.core.attempts.join import Attempts
from memstore.core.capacity import Retention
from memstore.core.cluster.facts import ByRank
from memstore.core.cluster.job import TRUSTED, Call, Job, LeaseRoom
from memstore.core.cluster.reading import Round
from memstore.core.cluster.state import Holds
from memstore.core.cluster.step_lookup import kept_steps
from memstore.core.commits import StepCommits
from memstore.core.controller.machine import ControllerMachine
from memstore.core.durable.states import MARKER
from memstore.core.durable.writes import DurableOrders
from memstore.core.history.pins import Pins
from memstore.core.holder.reads import ready
from memstore.core.holder.state import HolderState
from memstore.core.journal.fact_log import FactLog
from memstore.core.journal.records import Entry
from memstore.core.journal.replication import Journal
from memstore.core.repair import Repair
from memstore.core.restore import rounds
from memstore.core.restore.followers import Followers
from memstore.core.targets import targets
from memstore.core.targets.targets import ClusterView
from memstore.core.wire.calls import ShardLoaded
from memstore.core.wire.ids import WireShard, WireSpec, WireStep
from memstore.core.wire.messages import SendOrder
from memstore.core.wire.orders import Bring, Run
from memstore.core.wire.replies import Noted, Skipped
from memstore.core.wire.reports import SliceWritten
from memstore.shell.durable.tier import PartsTier
from memstore.testing.faults.catalogue import Fault
from memstore.testing.simulator.planted.bug import BETWEEN_STEPS, planted, row
from placement.scatter import scattered
from placement.topology import Host
from recovery.inventory import ShardId, StepId
from recovery.planner import plan

COMMIT_RULE = StepCommits.commit_rule
HOSTS_AWAY = (  # both hosts of a shard are away while a launch has its get, within recovery_grace_s (R24)
    Fault(5.0, "kill-rank"),
    *(Fault(at_s, "kill-holder", (host,)) for at_s in (5.6, 6.65) for host in (0, 1)),
)
LATE_ALONE = (  # a step is committed on one host alone, which is the last one to come back (R20)
    Fault(5.0, "kill-holder", (1,)),
    Fault(5.4, "reboot-all", (0,), for_s=4.0),
)
SPARE_HOST_LOST = Fault(8.0, "kill-host", (2,), for_s=2.0)  # it has no ranks of its own, so no launch follows


def _as_whole(fact: Any) -> Any:
    return None if fact is None else structs.replace(fact, is_degraded=False, reason="")


def _commit_without(self: StepCommits, job: Job, world_size: int, step: StepId) -> Any:
    """Return what the commit rule says if every copy that is not there counts as refused."""
    kept = job.refusals
    shards = [ShardId(job.name, step.attempt, step.step, rank) for rank in range(world_size)]
    job.refusals = {(shard, host): "" for shard in shards for host in self.state.hosts.live_ids()}
    try:
        return COMMIT_RULE(self, job, world_size, step)
    finally:
        job.refusals = kept


@planted("commit-names-targets", "R18", "I4", at=(StepCommits, "commit_rule"))
def commit_names_targets(real: Any, self: StepCommits, job: Job, world_size: int, step: StepId) -> Any:
    """A commit counts the hosts that were to get a copy, not those that sealed one."""
    fact, placement = _commit_without(self, job, world_size, step), self.view.placement(job)
    if fact is None or placement is None or job.newest is None:
        return fact
    owners = [self.view.owner_host(job, job.newest, rank) for rank in range(world_size)]
    digests = ByRank.of(list(fact.digests), [(o, *placement.targets.get(o, ())) for o in owners])
    return _as_whole(structs.replace(fact, digests=digests))


@planted("hosts-counted-as-racks", "R18", "R18", hosts=4, racks=2, world_size=4)
@contextmanager
def hosts_counted_as_racks() -> Iterator[None]:
    """Placement puts both copies into one rack, and the commit rule counts one domain twice."""
    with one_rack.plant(), patch.object(Host, "domain", lambda self, level: self.host_id):
        yield


@planted("placement-in-one-rack", "R18", "I16", hosts=4, racks=2, world_size=4)
@contextmanager
def one_rack() -> Iterator[None]:
    """Placement puts both copies of a shard into the same rack."""

    def near(placed: Any) -> Any:
        hosts = sorted(placed.targets)
        return replace(placed, targets={h: (hosts[(i + 2) % len(hosts)],) for i, h in enumerate(hosts)}, unmet=())

    with patch.object(targets, "scattered", lambda *args, **kwargs: near(scattered(*args, **kwargs))):
        yield


@planted("groups-ignored", "R18", "R29 I16", hosts=4, racks=2, groups=2, world_size=4, at=(targets, "with_groups"))
def groups_ignored(real: Any, topology: Any, numbers: Any) -> Any:
    """Placement forgets the groups of ranks that are lost as one."""
    return topology


@planted(
    "level-forgotten",
    "R18",
    "R18",
    Fault(4.0, "kill-host", (1,), for_s=6.0),
    hosts=4,
    racks=2,
    world_size=2,
    at=(ClusterView, "asked_level"),
)
def level_forgotten(real: Any, self: ClusterView, rank_hosts: Any, replicas: int, before: Any) -> Any:
    """A launch that sits in one rack asks for hosts alone, although the attempt before it asked for racks."""
    return real(self, rank_hosts, replicas, ())


@planted(
    "commit-without-a-rank",
    "R12",
    "I4 R12",
    Fault(4.0, "memory-full", (1,), for_s=3.0),
    at=(StepCommits, "commit_rule"),
)
def commit_without_a_rank(real: Any, self: StepCommits, job: Job, world_size: int, step: StepId) -> Any:
    """A step that one rank skipped is committed with that rank's older shard."""
    ranks = job.copies.get(step, {})
    gaps = [r for r in range(world_size) if r not in ranks]
    for rank in gaps if len(gaps) < world_size else ():
        older = [s for s in sorted(job.copies) if s < step and rank in job.copies[s]]
        if older:
            ranks[rank] = dict(job.copies[older[-1]][rank])
    return real(self, job, world_size, step)


@planted("reports-counted-twice", "R18", "I4", Fault(2.0, "double-reports", count=200), at=(StepCommits, "sealed"))
def reports_counted_twice(real: Any, self: StepCommits, now: float, copy: Any, put: Any) -> None:
    """A seal that is reported twice counts as two copies."""
    job = self.state.jobs.get(copy.shard.job)
    step = StepId(copy.shard.attempt, copy.shard.step)
    known = job.copies.get(step, {}).get(copy.shard.rank, {}) if job is not None else {}
    if job is not None and known.get(copy.host) == copy and step not in job.commits:
        for host in self.state.hosts.live_ids():
            job.add_copy(copy._replace(host=host))
    real(self, now, copy, put)


@planted("fact-not-written", "R16", "R16")
@contextmanager
def fact_not_written() -> Iterator[None]:
    """A fact takes effect before any journal has it."""

    def replicated(self: FactLog, is_enough: Any) -> list[Any]:
        ready = [entry.fact for entry in self.pending]
        self.applied_seq = max([self.applied_seq, *(entry.seq for entry in self.pending)])
        return ready

    send, flush = Journal.send_facts, Journal.record_waiting

    def flushed(self: Journal) -> None:
        send(self)
        flush(self)

    late = patch.multiple(Journal, send_facts=lambda self: None, record_waiting=flushed)
    with patch.object(FactLog, "replicated", replicated), late:
        yield


@planted("evicted-early", "R19", "R19", at=(StepCommits, "sealed"))
def evicted_early(real: Any, self: StepCommits, now: float, copy: Any, put: Any) -> None:
    """The last committed step is dropped when a newer one is put, before that is committed."""
    real(self, now, copy, put)
    job = self.state.jobs[copy.shard.job]
    for step in [s for s in job.copies if s in job.commits and s < StepId(copy.shard.attempt, copy.shard.step)]:
        self.retention._drop_step(job, step)


@planted("everything-freed", "R19", "R19 I1", Fault(5.0, "kill-rank"), at=(Retention, "free_unrestorable"))
def everything_freed(real: Any, self: Retention, job: Job) -> None:
    """A new attempt's first put frees all steps of older attempts, the restored one too."""
    for step in [s for s in job.copies if job.newest is not None and s.attempt < job.newest.attempt_number]:
        self._drop_step(job, step)


@planted("skip-not-reported", "R12", "I16 R12", Fault(4.0, "memory-full", (1,), for_s=3.0))
def skip_not_reported() -> Any:
    """The other ranks are not sent a skipped step, and their copies of it fill the memory."""
    return patch.multiple(
        StepCommits,
        skip=lambda self, call: self.out.answer(call, Skipped(resume=0)),
        _give_up_passed=lambda *a: None,
        _give_up_if_passed=lambda *a: None,
    )


@planted(
    "damaged-copy-counted",
    "R29",
    "R29",
    Fault(8.0, "flip-at-rest", (0,), count=16),
    **BETWEEN_STEPS,
    at=(Repair, "_consider_step"),
)
def damaged_copy_counted(
    real: Any, self: Repair, now: float, job: Job, attempt: Any, step: StepId, **how: bool
) -> None:
    """Repair counts a copy that lacks chunks as whole."""
    kept = job.copies[step]
    job.copies[step] = {
        rank: {host: copy._replace(missing=frozenset()) for host, copy in hosts.items()} for rank, hosts in kept.items()
    }
    try:
        real(self, now, job, attempt, step, **how)
    finally:
        job.copies[step] = kept


@planted("late-host-ignored", "R24", "I1", *HOSTS_AWAY)
def late_host_ignored() -> Any:
    """A get does not wait for hosts that had the newest step and are away for a few seconds."""
    return patch.object(ClusterView, "silent_hosts", lambda self, job: set())


@planted(
    "launch-without-late-host",
    "R20",
    "I1",
    *LATE_ALONE,
    hosts=2,
    world_size=1,
    step_s=0.15,
    at=(Attempts, "_late_hosts"),
)
def launch_without_late_host(real: Any, *args: Any) -> frozenset[str]:
    """A launch after a restart of everything does not wait for a late host that may have gone on alone."""
    return frozenset()


@planted("none-on-history", "R23", "I1", *HOSTS_AWAY)
@contextmanager
def none_on_history() -> Iterator[None]:
    """get() returns None on a job with history when nothing is whole at the moment."""
    nothing = patch.object(Job, "has_history", PropertyMock(return_value=False))
    with nothing, late_host_ignored.plant():
        yield


@planted("older-step-restored", "R24", "I1", Fault(5.0, "kill-rank"), keep_steps=2, at=(rounds, "plan"))
def older_step_restored(real: Any, inventory: Any, *args: Any, **kwargs: Any) -> Any:
    """The planner chooses the oldest whole step of the lineage."""
    first = min(
        (
            c.step
            for c in inventory.commits
            if any(StepId(x.shard.attempt, x.shard.step) == c.step for x in inventory.copies)
        ),
        default=None,
    )
    found = plan(inventory, *args, **{**kwargs, "only_step": first})
    return found if found.step is not None else plan(inventory, *args, **kwargs)


@planted("steps-mixed", "R23", "I3 I2", Fault(5.0, "kill-rank"), keep_steps=2, at=(rounds.Rounds, "_stage"))
def steps_mixed(real: Any, self: rounds.Rounds, now: float, active: Any) -> None:
    """Rank 0 is given an older step than the others."""
    first = len(self.out.actions)
    real(self, now, active)
    job = self.state.jobs[active.job]
    chosen = active.plan.step
    older = [s for s in sorted(job.copies) if s < chosen and job.copies[s].get(0)]
    for number, action in enumerate(self.out.actions[first:], first):
        if (
            older
            and isinstance(action, SendOrder)
            and isinstance(order := action.order, Bring)
            and order.shard.rank == 0
        ):
            copy = sorted(job.copies[older[-1]][0].values(), key=lambda c: c.host)[0]
            hosts = sorted(job.copies[older[-1]][0])
            order = structs.replace(
                order,
                shard=WireShard.of(copy.shard),
                spec=WireSpec.of(copy.spec),
                holders=tuple(hosts),
                runs=(Run("peer", copy.host, 0, copy.spec.chunks_count),),
            )
            self.out.actions[number] = SendOrder(action.host_id, order)


@planted(
    "marker-before-parts",
    "R31",
    "R31",
    Fault(1.0, "durable-slow", for_s=9.0),
    has_durable=True,
    at=(DurableOrders, "_start"),
)
def marker_before_parts(
    real: Any, self: DurableOrders, now: float, job: Job, attempt: Any, state: Any, step: Any
) -> None:
    """The durable marker is ordered together with the slices."""
    real(self, now, job, attempt, state, step)
    state.active.phase = "marking"
    self._order_marker(job, sorted(state.active.waits.values())[0], state.active)


@planted("keys-not-compared", "R31", "R31", Fault(4.0, "rotate-key", for_s=20.0), has_durable=True)
def keys_not_compared() -> Any:
    """Each host writes its slices under its own key, and the key in a report is not checked."""
    order, written = DurableOrders._order_slices, DurableOrders.slice_written

    def ordered(self: DurableOrders, job: Job, write: Any, pieces: Any) -> None:
        key, write.key = write.key, None
        order(self, job, write, pieces)
        write.key = key

    def reported(self: DurableOrders, host_id: str, report: SliceWritten) -> None:
        write = self.states.of(report.job).active
        written(self, host_id, structs.replace(report, key=write.key or report.key) if write else report)

    return patch.multiple(DurableOrders, _order_slices=ordered, slice_written=reported)


@planted(
    "slices-of-the-dead-forgotten",
    "R31",
    "R31",
    Fault(5.0, "durable-slow", for_s=9.0),
    Fault(6.5, "flap-host", for_s=6.0),
    has_durable=True,
    at=(DurableOrders, "host_died"),
)
def slices_of_the_dead_forgotten(real: Any, self: DurableOrders, job: Job, host_id: str) -> None:
    """When a writer of durable slices dies, its unwritten slices count as written."""
    write = self.states.of(job.name).active
    owed = [piece for piece, host in write.waits.items() if host == host_id] if write is not None else []
    if write is None or MARKER in owed or len(owed) == len(write.waits):
        real(self, job, host_id)
        return
    for piece in owed:
        del write.waits[piece]


@planted(
    "slices-of-another-write",
    "R31",
    "R31",
    has_durable=True,
    durable_every=1,
    durable_s=0.25,
    keep_steps=3,
    at=(DurableOrders, "slice_written"),
)
def slices_of_another_write(real: Any, self: DurableOrders, host_id: str, report: SliceWritten) -> None:
    """Of two steps that are written at once the newer gets the older's slices credited."""
    writes = self.states.of(report.job).writes
    newest = max(writes, default=report.step.id)
    real(self, host_id, structs.replace(report, step=WireStep.of(newest)))


@planted("bases-removed", "R31", "R31", has_durable=True, at=(PartsTier, "_needed"))
def bases_removed(real: Any, self: PartsTier, job: str, since: Any) -> Any:
    """A step is removed from durable storage with the slices that newer steps read."""
    return {}


@planted(
    "journals-not-read", "R16", "I1 I2 I16 I18 R16 R17", Fault(5.0, "kill-controller", for_s=1.0), at=(FactLog, "adopt")
)
def journals_not_read(real: Any, self: FactLog, journals: Any) -> Any:
    """A new controller begins with the inventories alone and reads no journal."""
    return real(self, [])


@planted("open-steps-first", "R29", "R29", Fault(17.07, "slow-link", (0,), for_s=9.0, count=2),
         Fault(18.43, "wear-rack", (2,), for_s=2.5, count=8), Fault(23.96, "end-job"), duration_s=26.0, hosts=4,
         racks=2, world_size=4, keep_steps=2, step_s=0.8, has_durable=True, is_strict=False)  # fmt: skip
def open_steps_first() -> Any:
    """Copies of steps that no rank will finish are rebuilt before those of a kept step, and take its memory."""
    return patch.multiple(Repair, _is_ended=lambda self, attempt: False, _make_room=lambda self, *refused: None)


ROWS = (
    row("commit-before-the-ack", "R18", "R18", (StepCommits, "commit_rule"), lambda *a: _as_whole(_commit_without(*a)),
        "A step is committed, and not called degraded, when its owners alone have sealed it."),
    row("degraded-reported-whole", "R18", "R18", (StepCommits, "commit_rule"), lambda *a: _as_whole(COMMIT_RULE(*a)),
        "A degraded commit is reported as whole.", Fault(5.0, "kill-host", (1,), for_s=5.0), hosts=2, world_size=2),
    row("fact-not-replicated", "R16", "R16", (ControllerMachine, "_is_enough"), lambda self, hosts, fact: bool(hosts),
        "A fact takes effect when the first journal has it.",
        Fault(3.0, "slow-link", (1,), for_s=6.0, count=8), Fault(3.0, "slow-link", (2,), for_s=6.0, count=8)),
    row("digests-not-kept", "R16", "R16", (Entry, "part"), lambda self, host: None,
        "A host's journal has the root digest of a step, and not the digests of the copies that it holds."),
    row("ghost-copies", "R21", "R29", (Job, "drop_host"), lambda self, host_id: None,
        "A host that comes back with empty memory counts as holding its old copies.",
        SPARE_HOST_LOST, replicas=3, world_size=2, **BETWEEN_STEPS),
    row("repair-waits-for-ever", "R29", "R29", (Repair, "_may_come_back"), lambda *a: True,
        "Repair goes on waiting for a host that came back without its memory.",
        SPARE_HOST_LOST, replicas=3, world_size=2, **BETWEEN_STEPS),
)  # fmt: skip


LOAD_FAILS = Fault(4.0, "load-fails", rank=1)


@planted("adopts-before-loaded", "R23", "R23", LOAD_FAILS, at=(rounds.Rounds, "_answer"))
def adopts_before_loaded(real: Any, self: rounds.Rounds, now: float, active: Round) -> Any:
    """A step counts as adopted when its bytes are handed out, not when every rank has loaded them."""
    report = real(self, now, active)
    self.state.jobs[active.job].attempts[active.attempt].is_released = True
    return report


@planted("get-returns-alone", "R23", "R23", LOAD_FAILS, at=(rounds.Rounds, "loaded"))
def get_returns_alone(real: Any, self: rounds.Rounds, now: float, call: Call[ShardLoaded]) -> Any:
    """A rank's get returns once it has loaded itself, whatever becomes of the others."""
    return real(self, now, call) if call.request.problem else self.out.answer(call, Noted())


# -- pins ---------------------------------------------------------------------------------------------
# Planted bugs in pins and leases: steps and slots that must be kept.


PINNED = Fault(4.0, "pin-step")
BROKEN_LINKS = [Fault(2.0 + 0.4 * n, "break-link", rank=n % 3) for n in range(24)]


@planted("retention-ignores-pins", "R19", "R19", PINNED)
@contextmanager
def retention_ignores_pins() -> Iterator[None]:
    """Retention drops a step although it is pinned."""

    def nothing(*_: Any) -> set[StepId]:
        return set()

    with patch.object(Pins, "_held", nothing), patch.object(Job, "pinned_steps", nothing):
        yield


TRUSTED_TWICE = (Fault(4.0, "trust-step"), Fault(7.0, "trust-step"))


@planted("trust-lets-go-first", "R38", "R19", *TRUSTED_TWICE, step_s=0.2, at=(Pins, "pin"))
def trust_lets_go_first(real: Any, self: Pins, job: Job, call: Any) -> None:
    """The step that was trusted is let go of when a newer one is to be trusted, before that one is kept."""
    if job.pins.pop(TRUSTED, None) is not None:
        self.retention.retain(job)
    real(self, job, call)


LEASED = Fault(4.0, "lease-step", for_s=6.0)


@planted("retention-ignores-leases", "R36", "R36", LEASED, step_s=0.2, at=(Holds, "steps"))
def retention_ignores_leases(real: Any, self: Any, job: Job) -> set[StepId]:
    """Retention drops a step although a reader has leased it."""
    return real(self, job) - job.leased.keys()  # type: ignore[no-any-return]


@planted("leases-without-room", "R36", "I16", Fault(4.0, "lease-step", for_s=0.0), at=(Followers, "_claim"))
def leases_without_room(real: Any, self: Any, job: Job, call: Any, step: StepId) -> None:
    """A step is leased before its room is claimed: puts lack theirs for as long as its reader reads."""
    job.lease_room = LeaseRoom((1 << 20,) * job.commits[step].world_size, 1)
    self._take(job, call, step)


@planted(
    "pins-numbered-by-link", "R7", "R7", *BROKEN_LINKS, reads_ranges=True, reads_shards=True, reads_every=1, step_s=0.2
)
def pins_numbered_by_link() -> Any:
    """Readers' pins are numbered from 1 on each link, so a late unpin of an older link frees another reader's pin."""
    counts: Counter[Any] = Counter()

    def numbered(state: HolderState, link: Any, release: Callable[[], None]) -> int:
        counts[link] += 1
        return hold(replace(state, pin_numbers=itertools.count(counts[link])), link, release)

    hold = ready.hold
    return patch.object(ready, "hold", numbered)


PIN_ROWS = (
    row(
        "pins-not-repaired",
        "R29",
        "I16",
        (repair, "redundant_steps"),
        kept_steps,
        "Repair looks only at steps that retention keeps, so pinned steps stay without copies.",
        PINNED,
        Fault(6.0, "kill-host", (1,), for_s=2.0),
    ),
)

"""The controller's state of one job: attempts, rank placement, steps, copies. Pure data, no decisions.

State of a step in an attempt:

    open --every shard on enough domains--> committing --fact replicated--> committed
      |--some rank skipped--> abandoned     (R12)
      '--a newer step committed--> superseded
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby, repeat, zip_longest
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

from memstore.core.cluster.facts import (
    AttemptOpened,
    ByRank,
    JobBranched,
    StepCommitted,
    StepPinned,
    StepRetired,
    kept_by,
)
from memstore.core.schedule import Pace, PutCosts
from memstore.core.wire.codec import Request
from memstore.core.wire.orders import Lineage
from memstore.core.wire.replies import Reply
from memstore.core.wire.status_rows import NonfiniteRow, ReplacedRow
from placement.groups import Placement
from recovery.inventory import CommitFact, Copy, DurableMarker, Inventory, ShardId, ShardSpec, StepId
from recovery.lineage import AttemptFact, Span, in_lineage, lineage
from recovery.parity import ParitySet, set_of

# -- recovery -----------------------------------------------------------------------------------------
# A recovery in place: who was replaced, and how long its phases took. Plain data.


@dataclass(slots=True)
class Recovery:
    """From a loss to the first commit of the generation after it.

    Up to its join the rank measures the phases on its clock, then the controller on its own: no phase is a difference
    between two clocks.
    """

    replaced: tuple[ReplacedRow, ...]
    rank: int  # the last to join: the phases are those that it waited for
    host: str
    since_s: float  # on the controller's clock: when the newest phase ended
    seconds: dict[str, float] = field(default_factory=dict)  # by phase, in their order

    def end_phase(self, phase: str, now: float) -> None:
        """Add the time since the phase before."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + max(0.0, now - self.since_s)
        self.since_s = max(now, self.since_s)

    @property
    def is_over(self) -> bool:
        """Return whether the generation has committed a step."""
        return "first_step" in self.seconds


# -- step phases --------------------------------------------------------------------------------------
# The phases of one attempt's steps, with what every seal asks of them at hand. Pure.


StepPhase = Literal["open", "committing", "committed", "abandoned", "superseded"]


class StepPhases(dict[int, StepPhase]):
    """Step -> phase. Every step gets thousands of seals, so no seal may look at all steps that are remembered."""

    def __init__(self) -> None:
        super().__init__()
        self.open: set[int] = set()  # steps whose phase is "open"
        self.newest_decided = -1  # the newest step that was ever committing or committed; -1 if none

    def __setitem__(self, step: int, phase: StepPhase) -> None:
        super().__setitem__(step, phase)
        if phase == "open":
            self.open.add(step)
            return
        self.open.discard(step)
        if phase in ("committing", "committed"):
            self.newest_decided = max(self.newest_decided, step)

    def __delitem__(self, step: int) -> None:
        super().__delitem__(step)
        self.open.discard(step)

    def begin(self, step: int) -> None:
        """Open a step, unless its phase is known."""
        if step not in self:
            self[step] = "open"


# -- job ----------------------------------------------------------------------------------------------


TRUSTED = "trusted"  # the pin that moves on, to the newest step that an evaluation found good (R38)
PUT_STEPS_KEPT = 3  # of each rank, to say who puts what


@dataclass(slots=True)
class AttemptMember:
    """A rank's place in an attempt."""

    rank: int
    host_id: str
    nonce: str
    pid: int = 0
    is_gone: bool = False
    last_active_s: float = 0.0
    step: int = -1  # newest step that it reported
    sealed_step: int = -1  # newest step that its own host sealed, which does so in the order of its puts
    put_s: float | None = None  # when that was
    put_steps: tuple[int, ...] = ()  # the newest ones
    ended_s: float | None = None  # since when it is gone, if this controller saw it
    has_closed: bool = False  # it is gone because it closed its store

    @property
    def is_alive(self) -> bool:
        """Return whether it is neither gone nor missed: unknown to its host after a restart (`Takeover`)."""
        return not self.is_gone and self.last_active_s > -math.inf

    def put(self, step: int, now: float) -> None:
        """Take that its own host has sealed a step of it."""
        if step > self.sealed_step:
            self.sealed_step, self.put_s = step, now
            self.put_steps = (*self.put_steps[1 - PUT_STEPS_KEPT :], step)

    def end(self, now: float, *, has_closed: bool) -> None:
        """Take that its process has ended, or has closed its store."""
        self.has_closed = self.has_closed or has_closed
        self.ended_s = now if not self.is_gone else self.ended_s
        self.is_gone = True


@dataclass(slots=True)
class Attempt:
    """One launch of the job's worker group; `attempt_number` fences the older ones (R20, R21)."""

    attempt_number: int
    world_size: int
    key: str | None
    launcher: str
    is_fresh: bool
    parent: int | None
    level_asked: str
    config: Mapping[str, Any]
    members: dict[int, AttemptMember]
    parent_step: int | None = None  # set when a restore is decided; bounds the parent's steps
    branched: JobBranched | None = None  # its ranks have loaded a step of another job, and none of this one (R32)
    phase: Literal["fencing", "open", "closed"] = "fencing"
    ended_by: str = ""  # the exception by which its first rank left, and that rank; "": none has
    has_restored: bool = False  # its get decided, or it is a rewind
    is_released: bool = False  # and every rank has loaded the decided step
    failed_load: tuple[int, str] | None = None  # the last get() that failed once its bytes were handed out: round, why
    has_put: bool = False
    move_until_s: float = 0.0  # ranks with parity have moved: for so long repair waits for their first put
    has_freed_unrestorable: bool = False  # at its first put: older steps that no rank can restore are freed (R10)
    rounds_count: int = 0
    steps: StepPhases = field(default_factory=StepPhases)
    damaged_s: dict[int, float] = field(default_factory=dict)  # open step -> since when no copy has some chunk
    needs: dict[int, int] = field(default_factory=dict)  # rank -> slots of one version (R10)
    #: By rank, decided with the room for its first put. Of the shards of other ranks there are copies.
    parity_sets: dict[int, ParitySet] = field(default_factory=dict)
    in_flight: int = field(init=False)  # versions of uncommitted steps: as asked, or for how many its hosts have room
    in_flight_why: str = ""  # which host has no room for more
    put_interval: tuple[int, int] = (0, 1)  # from a step on, so many lie between two puts (R33)
    put_costs: PutCosts = field(default_factory=PutCosts)
    resume_step: int = 0  # ranks skip steps below it (R12)
    resume_gap: int = 1
    pace: Pace = field(default_factory=Pace)  # of its puts
    progress: Pace = field(default_factory=Pace)  # of its puts, and of the steps that ranks say they train between them
    committed_s: float | None = None  # when the newest commit was, if this controller made it
    closed_s: float = 0.0  # when it was closed, or this controller learned of it
    skipped_s: float | None = None  # when a step was last given up
    passed_count: int = 0  # steps in a row that were given up since some rank passed over them
    abandoned_ranges: list[tuple[int, int]] = field(default_factory=list)  # abandoned by skips: first step, end (R12)
    skip_reasons: dict[int, str] = field(default_factory=dict)  # skipped step -> which rank and why, until sent to all
    skip_why: str = ""  # which rank skipped the newest skipped step and why; "" if another controller got it
    is_skip_for_room: bool = False
    nonfinite: dict[int, NonfiniteRow] = field(default_factory=dict)  # by rank: what was last found in a put (R39)
    shard_of: tuple[int, ...] = ()  # by rank: as in AttemptOpened
    writers: tuple[int, ...] = ()
    generation: int = 0  # of recovery in place; 0: an ordinary launch
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # by name and rank (R18.8)
    recovery: Recovery | None = None  # before it, if this controller has seen it
    opened_s: float | None = None  # wall clock
    trained_step: int = -1  # newest that is known to be trained, put or not; ranks may have come further
    moves_count: int = 0
    #: The members by host, once they are asked for.
    _on_host: dict[str, list[AttemptMember]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.in_flight = int(self.config["in_flight"])

    @property
    def origin(self) -> JobBranched | None:
        """The step of another job with which it begins; None once it has restored one of its own."""
        return self.branched if self.parent_step is None else None

    def is_moving(self, now: float) -> bool:
        """Return whether parity that moves with its ranks waits for a first put, whose rows take the same room."""
        return now < self.move_until_s and not self.has_put

    @property
    def in_flight_lack(self) -> str:
        """Return how many versions in flight are claimed of those asked for, and what lacks; "" if it is all."""
        asked, why = int(self.config["in_flight"]), f": no room for more on {self.in_flight_why}"
        words = f"in_flight={asked} is asked for, {self.in_flight} is claimed on all hosts"
        return "" if self.in_flight == asked else words + (why if self.in_flight_why else "")

    @property
    def has_ended_well(self) -> bool:
        """Return whether all its ranks closed it, none by an exception."""
        return self.phase == "closed" and not self.ended_by

    @property
    def is_in_place(self) -> bool:
        """Return whether its launch kept the processes that were left."""
        return self.generation > 0

    @property
    def replicas(self) -> int:
        """Return how many copies are asked for, the owner's own included."""
        return int(self.config["replicas"])

    @property
    def parity(self) -> int:
        """Return how many shards are added into one row of parity at most; 0: there are copies alone."""
        return int(self.config["parity"])

    @property
    def scatter(self) -> int:
        """Return how many placements the ranks of a host take by turns."""
        return int(self.config["scatter"])

    def place(self, members: dict[int, AttemptMember]) -> None:
        """Take other members, or the same on other hosts."""
        self.members, self._on_host = members, {}
        self.moves_count += 1

    def members_on(self, host: str) -> Sequence[AttemptMember]:
        """Return the members of a host; all hosts ask at once when a controller begins."""
        if not self._on_host:
            for member in self.members.values():
                self._on_host.setdefault(member.host_id, []).append(member)
        return self._on_host.get(host, ())

    def saw(self, member: AttemptMember, step: int) -> None:
        """Take that a rank has trained a step, as a copy of it shows."""
        member.step = max(member.step, step)
        self.trained_step = max(self.trained_step, step)

    @property
    def has_lost_ranks(self) -> bool:
        """Return whether some rank is gone or missed."""
        # Every tick asks: of thousands of members no property is looked at one by one.
        return any(m.is_gone or m.last_active_s == -math.inf for m in self.members.values())

    @property
    def hosts(self) -> Collection[str]:
        """Return the hosts of its members."""
        self.members_on("")
        return self._on_host.keys()

    def written_again(self, job: str, wall_s: float) -> AttemptOpened:
        """Return the fact of this attempt with its present members."""
        members = [self.members[rank] for rank in range(self.world_size)]
        return AttemptOpened(
            job,
            self.attempt_number,
            self.world_size,
            self.parent,
            self.key,
            self.is_fresh,
            self.level_asked,
            self.config,
            kept_by([member.nonce for member in members], [member.host_id for member in members]),
            tuple(member.host_id for member in members),
            self.launcher,
            wall_s if self.opened_s is None else self.opened_s,
            self.shard_of,
            self.writers,
            self.generation,
            {name: group_runs(numbers) for name, numbers in self.groups.items()},
        )

    def group_levels(self) -> dict[str, dict[str, set[int]]]:
        """Return, by level of placement and by host, the groups that ranks there are in."""
        hosts = [self.members[rank].host_id for rank in range(self.world_size)] if self.groups else []
        return group_levels(self.groups, hosts)


def group_runs(numbers: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Return the groups of ranks in order as [group, ranks in a row in it].

    >>> group_runs([0, 0, 1])
    ((0, 2), (1, 1))
    """
    return tuple((number, sum(1 for _ in row)) for number, row in groupby(numbers))


def group_numbers(runs: Mapping[str, Iterable[tuple[int, int]]]) -> dict[str, tuple[int, ...]]:
    """Return the groups by name and rank, of what `group_runs` has made."""
    return {name: tuple(n for number, count in rows for n in repeat(number, count)) for name, rows in runs.items()}


def group_levels(groups: Mapping[str, Sequence[int]], hosts: Sequence[str]) -> dict[str, dict[str, set[int]]]:
    """Return, by level of placement and by host, the groups of the ranks there; both arguments are by rank."""
    found: dict[str, dict[str, set[int]]] = {}
    for name, numbers in groups.items():
        by_host = found[f"{name} group"] = {}
        for host, number in zip(hosts, numbers, strict=False):
            by_host.setdefault(host, set()).add(number)
    return found


Q_co = TypeVar("Q_co", bound=Request[Any], covariant=True)


@dataclass(frozen=True, slots=True)
class Call(Generic[Q_co]):
    """A request that waits for its answer."""

    host_id: str
    call_id: int
    request: Q_co
    since_s: float


@dataclass(frozen=True, slots=True)
class ReadLease:
    """A reader that has leased a step (R36)."""

    host_id: str  # its own
    until_s: float


@dataclass(frozen=True, slots=True)
class LeaseRoom:
    """What every host has claimed for leased steps."""

    needs: tuple[int, ...] = ()  # slots by rank of one step
    versions: int = 0

    def has_place_for(self, needs: tuple[int, ...]) -> bool:
        """Return whether a step of this size fits in the place of one."""
        return self.grown(needs, self.versions) == self

    def grown(self, needs: tuple[int, ...], versions: int) -> LeaseRoom:
        """Return room for so many steps, each as large as the largest."""
        sizes = zip_longest(self.needs, needs, fillvalue=0)
        return LeaseRoom(tuple(max(mine, others) for mine, others in sizes), max(self.versions, versions))


@dataclass(frozen=True, slots=True)
class Restore:
    """An attempt adopted a step, at this wall time (R25)."""

    step: StepId
    attempt: int
    wall_s: float


class Held(NamedTuple):
    """One shard with enough copies: its entry in the commit fact, and why it is degraded, if it is."""

    digest: str
    hosts: tuple[str, ...]
    reasons: tuple[str, ...]
    is_in_place: bool = False  # its copies are on the hosts that are to have them, and nowhere else


@dataclass(frozen=True, slots=True)
class HeldRanks:
    """The ranks of a step that were found with enough copies, for this placement on these hosts."""

    placed: tuple[object, ...]
    ranks: dict[int, Held] = field(default_factory=dict)


@dataclass(slots=True)
class Job:
    """The controller's state of one job."""

    name: str
    attempts: dict[int, Attempt] = field(default_factory=dict)
    newest: Attempt | None = None  # the newest of these
    copies: dict[StepId, dict[int, dict[str, Copy]]] = field(default_factory=dict)  # step -> rank -> host
    on_host: dict[str, dict[StepId, set[int]]] = field(default_factory=dict)  # the same by host: step -> ranks
    #: Step -> rank -> host that keeps the rank's parity.
    parity: dict[StepId, dict[int, dict[str, Copy]]] = field(default_factory=dict)
    commits: dict[StepId, StepCommitted] = field(default_factory=dict)
    #: Commits of which no journal here has every digest, and a rank whose digest is nowhere, as far as is known.
    unproven: dict[StepId, int] = field(default_factory=dict)
    retired: dict[StepId, str] = field(default_factory=dict)
    torn: set[StepId] = field(default_factory=set)  # retired for good: whole by every digest, but of two moments
    markers: dict[StepId, DurableMarker] = field(default_factory=dict)
    restores: list[Restore] = field(default_factory=list)  # newest last (R25)
    past: dict[int, AttemptFact] = field(default_factory=dict)  # attempts known only from durable markers (R31)
    past_opened_s: dict[int, float] = field(default_factory=dict)  # by their number: wall clocks, to tell them apart
    pins: dict[str, StepPinned] = field(default_factory=dict)  # by name
    pin_asked: StepPinned | None = None  # its room is being claimed, or its fact is on its way
    distrusted: set[StepId] = field(default_factory=set)  # their trust was taken back; a marker may not say so yet
    leased: dict[StepId, dict[str, ReadLease]] = field(default_factory=dict)  # steps kept for readers -> by lease
    lease_room: LeaseRoom = LeaseRoom()
    lease_used_s: float = 0.0  # when a leased step was let go of last
    placement: Placement | None = None
    #: Of that placement, by level: the group of ranks that a host is in. No copies lie all in one if it can be helped.
    group_domains: list[Mapping[str, str]] = field(default_factory=list)
    groups_said: list[str] = field(default_factory=list)  # what is logged of them
    # the last one that copies were moved for: the next moves as little from it as can be
    last_copied_placement: Placement | None = None
    # draining host -> the host whose targets its ranks use
    substitute_for: dict[str, str] = field(default_factory=dict)
    refusals: dict[tuple[ShardId, str], str] = field(default_factory=dict)  # (shard, host) -> why a push failed
    changes: dict[StepId, int] = field(default_factory=dict)  # `changes_count` when the copies of a step last changed
    changes_count: int = 0  # of copies, over all steps
    _older_sets: dict[StepId, tuple[int | None, Mapping[int, ParitySet]]] = field(default_factory=dict)
    settled: dict[StepId, int] = field(default_factory=dict)  # `changes` of a step that needed no repair then
    damaged: set[StepId] = field(default_factory=set)  # steps of which some copy came with chunks missing
    short: dict[StepId, int] = field(default_factory=dict)  # the first rank found without enough copies to commit
    #: Of open steps: of a rank until another copy of its shard comes, of all until one goes.
    held: dict[StepId, HeldRanks] = field(default_factory=dict)

    def begin(self, attempt: Attempt) -> None:
        """Take an attempt that was opened; a late host may bring an older one."""
        self.attempts[attempt.attempt_number] = attempt
        self.newest = self.attempts[max(self.attempts)]

    @property
    def present_number(self) -> int | None:
        """The newest attempt, or else the newest that durable markers tell of; None if there is neither."""
        return self.newest.attempt_number if self.newest is not None else max(self.past, default=None)

    @property
    def newest_committed(self) -> StepId | None:
        """The newest committed step of the lineage, or None."""
        spans = self.spans(self.newest.attempt_number) if self.newest is not None else ()
        return max((step for step in self.commits if in_lineage(spans, step)), default=None)

    @property
    def newest_durable(self) -> StepId | None:
        """The newest step of the lineage that has a marker, or None."""
        spans = self.spans(self.newest.attempt_number) if self.newest is not None else ()
        return max((step for step in self.markers if in_lineage(spans, step)), default=None)

    @property
    def origin(self) -> JobBranched | None:
        """The step of another job with which the newest attempt's lineage begins, or None (R32)."""
        spans = self.spans(self.newest.attempt_number) if self.newest is not None else ()
        attempts = [self.attempts[span.attempt] for span in spans if span.attempt in self.attempts]
        return next((attempt.origin for attempt in attempts if attempt.origin is not None), None)

    @property
    def has_history(self) -> bool:
        """Return whether something was ever committed, or copies tell of attempts that no fact knows (R19, R23).

        An attempt that committed nothing leaves no history: the next attempt starts from the same step.
        """
        strangers = any(step.attempt not in self.attempts for step, ranks in self.copies.items() if ranks)
        return bool(self.commits or self.markers or strangers)

    def holders_for(self, host_id: str) -> set[str]:
        """Return the hosts with a copy of the newest shard of some rank of that host."""
        attempt = self.newest
        if attempt is None or not self.copies:
            return set()
        ranks = self.copies[max(self.copies)]
        return {h for rank, member in attempt.members.items() if member.host_id == host_id for h in ranks.get(rank, ())}

    def pinned_steps(self) -> set[StepId]:
        """Return the steps that a pin keeps."""
        return {StepId(pin.attempt, pin.step) for pin in self.pins.values()}

    def pins_and_asked(self) -> dict[StepId, StepPinned]:
        """Return one pin of every step that is pinned, or about to be."""
        pins = [*self.pins.values(), *([self.pin_asked] if self.pin_asked is not None else [])]
        return {StepId(pin.attempt, pin.step): pin for pin in pins}

    def pinned_rooms(self) -> list[list[StepPinned]]:
        """Return the pins by their room: each step has its own, but two between which a pin moves share one."""
        asked = self.pin_asked
        stays = {
            StepId(pin.attempt, pin.step): pin for name, pin in self.pins.items() if asked is None or name != asked.name
        }
        pair = (self.pins.get(asked.name), asked) if asked is not None else ()
        moving = [pin for pin in pair if pin is not None and StepId(pin.attempt, pin.step) not in stays]
        return [*([pin] for pin in stays.values()), moving]

    @property
    def trusted_steps(self) -> set[StepId]:
        """The steps that are trusted: the newest of them is pinned, older ones may be on durable storage (R38)."""
        pin = self.pins.get(TRUSTED)
        durable = {step for step, marker in self.markers.items() if marker.is_trusted} - self.distrusted
        return durable | ({StepId(pin.attempt, pin.step)} if pin is not None else set())

    def names_of(self, step: StepId) -> list[str]:
        """Return the names of a step's pins; one that is trusted, pinned or not, has that among them."""
        names = {name for name, pin in self.pins.items() if (pin.attempt, pin.step) == (step.attempt, step.step)}
        marker = self.markers.get(step)
        is_trusted = marker is not None and marker.is_trusted and step not in self.distrusted
        return sorted(names | ({TRUSTED} if is_trusted else set()))

    @property
    def newest_number(self) -> int:
        """Return the highest attempt that a fact, a copy or a marker names; 0 if there is none."""
        return max((*self.attempts, *self.past, *(s.attempt for s in (*self.copies, *self.markers))), default=0)

    def opened_moments(self, attempt_number: int) -> list[tuple[int, float]]:
        """Return when each attempt up to this one was opened, if known: it tells runs of one name apart (R31)."""
        own = {a.attempt_number: a.opened_s for a in self.attempts.values() if a.opened_s is not None}
        return [(n, opened_s) for n, opened_s in sorted({**self.past_opened_s, **own}.items()) if n <= attempt_number]

    def lineage_of(self, attempt_number: int) -> Lineage:
        """Return what a marker says of an attempt; of one that no fact or marker knows its number alone."""
        attempt = self.attempts.get(attempt_number) or self.past.get(attempt_number)
        parent, parent_step = (attempt.parent, attempt.parent_step) if attempt is not None else (None, None)
        return Lineage(attempt_number, parent, parent_step, tuple(self.opened_moments(attempt_number)))

    def is_abandoned(self, step: StepId) -> bool:
        """Return whether some rank skipped the step, or a skip made all ranks pass over it (R12)."""
        attempt = self.attempts.get(step.attempt)
        return attempt is not None and any(first <= step.step < end for first, end in attempt.abandoned_ranges)

    def retire(self, fact: StepRetired) -> None:
        """Take back the offer of a step, or offer it again; a step that is known to be torn stays torn (R25)."""
        step = StepId(fact.attempt, fact.step)
        if fact.is_torn:
            self.torn.add(step)
            self.retired[step] = fact.reason
        elif step in self.torn:
            return
        elif fact.reason:
            self.retired[step] = fact.reason
        else:
            self.retired.pop(step, None)
            self.restores = [r for r in self.restores if r.step != step]  # or the crash loop would retire it at once

    def newest_commit(self, attempt_number: int) -> int:
        """Return the newest step that this attempt committed, or -1."""
        return max((s.step for s in self.commits if s.attempt == attempt_number), default=-1)

    def spans(self, attempt_number: int | None) -> tuple[Span, ...]:
        """Return the lineage seen from attempt `attempt_number`, newest first; () for no attempt (R22)."""
        if attempt_number is None:
            return ()
        own = {
            a.attempt_number: AttemptFact(a.attempt_number, a.parent, a.parent_step, a.world_size)
            for a in self.attempts.values()
        }
        return lineage({**self.past, **own}, attempt_number)

    def spans_to_read(self, attempt_number: int | None, only: StepId | None) -> tuple[Span, ...]:
        """Return the lineage, and the one step that a reader names, of any lineage: reading adopts nothing (R22)."""
        spans = self.spans(attempt_number)
        return spans if only is None or in_lineage(spans, only) else (*spans, Span(only.attempt, only.step))

    def put_in_vain(self, attempt: Attempt) -> str:
        """Return what the newest earlier attempt that put something put, for one that finds nothing; "" if fresh."""
        for number in sorted((n for n in self.attempts if n < attempt.attempt_number), reverse=True):
            older = self.attempts[number]
            newest = max((*older.steps, *(first for first, _ in older.abandoned_ranges)), default=None)
            if newest is not None and not attempt.is_fresh:
                why = older.skip_why or "no step had a copy of every rank's shard when the attempt ended"
                return f"attempt {number} put steps up to {newest}, and none was committed: {why}"
        return ""

    def parent_for_next(self) -> int | None:
        """The attempt a new one continues: the newest, unless that was a fresh start that left nothing (R22).

        One that only durable storage remembers is newer where the hosts that knew it are gone and an older one is back.
        An attempt that began before a late host brought newer history, and committed nothing, gives way to that.
        """
        committed = {step.attempt for step in (*self.commits, *self.markers)}
        for attempt_number in sorted({*self.attempts, *self.past}, reverse=True):
            attempt = self.attempts.get(attempt_number)
            has_adopted = attempt is not None and attempt.parent is not None and attempt.has_restored
            if attempt_number in committed or has_adopted:
                return attempt_number
            before = max((number for number in committed if number < attempt_number), default=None)
            if attempt is None or attempt.is_fresh:
                continue
            if before is None or before in {span.attempt for span in self.spans(attempt_number)}:
                return attempt_number
        return self.newest_number if self.newest is None and self.newest_number else None

    def add_copy(self, copy: Copy) -> None:
        """Record a verified copy, or parity, replacing the last report of that shard on that host."""
        step = StepId(copy.shard.attempt, copy.shard.step)
        table = self.parity if copy.shard.is_parity else self.copies
        hosts = table.setdefault(step, {}).setdefault(copy.shard.rank, {})
        hosts[copy.host] = copy
        if step in self.held:
            for rank in (copy.shard.rank, *(each.rank for each in copy.spec.summands)):
                self.held[step].ranks.pop(rank, None)
        if not copy.shard.is_parity:
            self.on_host.setdefault(copy.host, {}).setdefault(step, set()).add(copy.shard.rank)
            if copy.missing:
                self.damaged.add(step)
        self._changed(step)

    def prove(self) -> None:
        """Look in copies, parity and markers for digests of commits that no journal here has (R16)."""
        for step, lacking in list(self.unproven.items()):
            commit = self.commits.get(step)
            if commit is None:
                del self.unproven[step]
                continue
            digests, options = commit.digests, dict[int, set[str]]()
            # Nearly always the rank that lacked is lacking still; then nothing else is looked at.
            for rank in chain(range(lacking, digests.count), range(lacking)):
                if rank not in digests.values:
                    options[rank] = self._digests_of(step, rank)
                    if not options[rank]:
                        self.unproven[step] = rank
                        break
            else:
                if digests.complete(options):
                    del self.unproven[step]
                    self._changed(step)

    def _digests_of(self, step: StepId, rank: int) -> set[str]:
        """Return the digests under which a rank's shard of a step is found."""
        marker, ranks = self.markers.get(step), self.parity_sets(step).get(rank)
        found = {copy.spec.digest for copy in self.copies.get(step, {}).get(rank, {}).values()}
        for other in ranks.others(rank) if ranks is not None else ():
            rows = self.parity.get(step, {}).get(other, {}).values()
            found.update(each.digest for copy in rows for each in copy.spec.summands if each.rank == rank)
        return found | ({marker.specs[rank].digest} if marker is not None and rank in marker.specs else set())

    def _changed(self, step: StepId) -> None:
        self.changes_count += 1
        self.changes[step] = self.changes_count

    def drop_copy(self, shard: ShardId, host_id: str) -> None:
        """Forget one copy."""
        step = StepId(shard.attempt, shard.step)
        self._changed(step)
        self.held.pop(step, None)
        if shard.is_parity:
            self._drop_parity(step, shard.rank, host_id)
            return
        hosts = self.copies.get(step, {}).get(shard.rank, {})
        if hosts.pop(host_id, None) is not None:
            ranks = self.on_host[host_id][step]
            ranks.discard(shard.rank)
            if not ranks:
                del self.on_host[host_id][step]
        if not hosts:
            self.copies.get(step, {}).pop(shard.rank, None)
        if not self.copies.get(step, True):
            del self.copies[step]

    def _drop_parity(self, step: StepId, rank: int, host_id: str) -> None:
        ranks = self.parity.get(step, {})
        ranks.get(rank, {}).pop(host_id, None)
        if rank in ranks and not ranks[rank]:
            del ranks[rank]
        if step in self.parity and not ranks:
            del self.parity[step]

    def has_copy(self, shard: ShardId, host_id: str) -> bool:
        """Return whether a host has a copy of a shard, or parity."""
        table = self.parity if shard.is_parity else self.copies
        return host_id in table.get(StepId(shard.attempt, shard.step), {}).get(shard.rank, {})

    def has_just(self, host_id: str, copies: Sequence[Copy]) -> bool:
        """Return whether these copies are known, and no others on a host; False also if that takes long to say."""
        on_host = self.on_host.get(host_id, {})
        if self.parity or sum(map(len, on_host.values())) != len(copies):
            return False
        known = (
            self.copies.get(StepId(each.shard.attempt, each.shard.step), {}).get(each.shard.rank, {}).get(host_id)
            for each in copies
        )
        return all(map(operator.eq, known, copies))

    def parity_sets(self, step: StepId) -> Mapping[int, ParitySet]:
        """Return, by rank, the sets in which a step's shards are added into one another's parity.

        Of a step of an older attempt they are seen from the parity that is left.
        """
        attempt = self.attempts.get(step.attempt)
        if attempt is not None and attempt is self.newest:
            return attempt.parity_sets
        when, known = self.changes.get(step), self._older_sets.get(step)
        if known is not None and known[0] == when:
            return known[1]
        found: dict[int, ParitySet] = {}
        for hosts in self.parity.get(step, {}).values():
            for copy in hosts.values():
                ranks = set_of(copy.shard, copy.spec)
                found.update(dict.fromkeys(ranks.ranks, ranks))
        self._older_sets = {each: sets for each, sets in self._older_sets.items() if each in self.parity}
        self._older_sets[step] = when, found
        return found

    def parity_hosts(self, step: StepId, rank: int) -> dict[int, list[str]]:
        """Return, by the other ranks of a rank's set, the hosts with that rank's whole parity, its own shard in it."""
        commit, found, ranks = self.commits.get(step), dict[int, list[str]](), self.parity_sets(step).get(rank)
        for other in ranks.others(rank) if ranks is not None else ():
            found[other] = [
                host
                for host, copy in self.parity.get(step, {}).get(other, {}).items()
                for each in copy.spec.summands
                if each.rank == rank and not copy.missing and (not commit or each.digest == commit.digests[rank])
            ]
        return found

    def parity_members(self, step: StepId, rank: int) -> list[str]:
        """Return a host of a rank's shard and, of each other rank of its set, one that has it in its parity."""
        kept = [min(hosts) for hosts in self.parity_hosts(step, rank).values() if hosts]
        own = [host for host, copy in self.copies.get(step, {}).get(rank, {}).items() if not copy.missing]
        return [min(own), *kept] if own else []

    def parity_copies(self, step: StepId, rank: int, among: Collection[str] | None = None) -> int:
        """Return for how many copies of a shard its parity on some hosts stands: one fewer for each that lacks."""
        hosts, ranks = self.parity_hosts(step, rank).values(), self.parity_sets(step).get(rank)
        lacking = sum(all(among is not None and host not in among for host in each) for each in hosts)
        return max(0, ranks.spare - lacking) if ranks is not None else 0

    def in_parity(self, step: StepId) -> dict[int, set[str]]:
        """Return, by rank, the hosts in whose parity of a step its shard is, also where rows are lost."""
        found: dict[int, set[str]] = {}
        for host, copy in (item for hosts in self.parity.get(step, {}).values() for item in hosts.items()):
            for summand in copy.spec.summands:
                found.setdefault(summand.rank, set()).add(host)
        return found

    def shards_on(self, step: StepId) -> dict[str, list[ShardId]]:
        """Return, by host, the copies and the parity of a step."""
        found: dict[str, list[ShardId]] = {}
        for is_parity, ranks in ((False, self.copies.get(step, {})), (True, self.parity.get(step, {}))):
            for rank, hosts in ranks.items():
                for host in hosts:
                    shard = ShardId(self.name, step.attempt, step.step, rank, is_parity)
                    found.setdefault(host, []).append(shard)
        return found

    def hosts_of(self, step: StepId) -> set[str]:
        """Return the hosts with copies or parity of a step."""
        having = {host for host, steps in self.on_host.items() if step in steps}
        return having.union(*self.parity.get(step, {}).values())

    def drop_step(self, step: StepId) -> None:
        """Forget every copy of a step, and its parity."""
        self.parity.pop(step, None)
        self.copies.pop(step, None)
        self.held.pop(step, None)
        for steps in self.on_host.values():
            steps.pop(step, None)

    def drop_step_on(self, host_id: str, step: StepId) -> None:
        """Forget every copy, and all parity, of a step on a host."""
        for rank in [rank for rank, hosts in self.parity.get(step, {}).items() if host_id in hosts]:
            self.drop_copy(ShardId(self.name, step.attempt, step.step, rank, is_parity=True), host_id)
        for rank in list(self.on_host.get(host_id, {}).get(step, ())):
            self.drop_copy(ShardId(self.name, step.attempt, step.step, rank), host_id)

    def drop_host(self, host_id: str) -> None:
        """Forget every copy, and all parity, on a host."""
        for step in {*self.parity, *self.on_host.get(host_id, ())}:
            self.drop_step_on(host_id, step)
        self.on_host.pop(host_id, None)
        self.drop_refusals(host_id)

    def drop_refusals(self, host_id: str) -> None:
        """Forget why pushes to a host failed."""
        self.refusals = {key: why for key, why in self.refusals.items() if key[1] != host_id}

    def spec(self, shard: ShardId) -> ShardSpec | None:
        """Return the spec of a shard: the committed digest's if there is one, else any copy's."""
        step = StepId(shard.attempt, shard.step)
        if shard.is_parity:
            return next((copy.spec for copy in self.parity.get(step, {}).get(shard.rank, {}).values()), None)
        commit = self.commits.get(step)
        for copy in self.copies.get(step, {}).get(shard.rank, {}).values():
            if commit is None or copy.spec.digest == commit.digests[shard.rank]:
                return copy.spec
        return None

    def commit_of(
        self, step: StepId, shards: Sequence[tuple[str, tuple[str, ...]]], level: str, reason: str, wall_s: float
    ) -> StepCommitted:
        """Return the fact that a step is committed.

        Args:
            step: Of which attempt it is need not be known here.
            shards: By rank: its digest, and the hosts with a copy, or with it in their parity.
            level: Of the domains that copies are spread over.
            reason: Why it is degraded; "": it is not.
            wall_s: When, for people.
        """
        digests = ByRank.of([digest for digest, _ in shards], [hosts for _, hosts in shards])
        having = set[str]().union(*{hosts for _, hosts in shards})
        others = tuple(sorted(having - self._attempt_hosts(step.attempt)))
        return StepCommitted(
            self.name, step.attempt, step.step, len(shards), digests, level, bool(reason), reason, wall_s, others=others
        )

    def committed_on(self, step: StepId) -> set[str]:
        """Return the hosts that may have had a part of a committed step.

        A journal names only those that keep its digests there, so all hosts of its attempt count (R24).
        """
        fact = self.commits[step]
        named = {host for hosts in fact.digests.keepers.values() for host in hosts}
        return named.union(fact.others, self._attempt_hosts(step.attempt))

    def _attempt_hosts(self, number: int) -> set[str]:
        return set(self.attempts[number].hosts) if number in self.attempts else set()

    def _commit_fact(self, step: StepId) -> CommitFact:
        fact = self.commits[step]
        digests = fact.digests
        return CommitFact(
            step, fact.world_size, digests.values, digests.keepers, fact.is_degraded, frozenset(self.committed_on(step))
        )

    def inventory(
        self, *, live: Iterable[str], silent: Iterable[str], gone: frozenset[StepId] = frozenset()
    ) -> Inventory:
        """Freeze what answering hosts hold, plus facts and markers, for the planner (R21, R24)."""
        answering = set(live)
        by_step = (*self.copies.values(), *self.parity.values())
        by_shard = (hosts for ranks in by_step for hosts in ranks.values())
        return Inventory(
            job=self.name,
            copies=tuple(copy for hosts in by_shard for copy in hosts.values() if copy.host in answering),
            commits=tuple(self._commit_fact(step) for step in self.commits),
            markers=tuple(self.markers.values()),
            retired=dict(self.retired),
            gone=gone,
            silent_hosts=frozenset(silent),
        )


# -- rank calls ---------------------------------------------------------------------------------------
# The calls of one collective call, by rank. Plain data; read `collective.py` for the rules.


Q = TypeVar("Q", bound=Request[Any])


class Replies(Protocol):
    """Takes the replies to calls."""

    def answer(self, call: Call[Any], reply: Reply) -> None:
        """Answer a call."""

    def refuse(self, call: Call[Any], error: str, message: str) -> None:
        """Answer a call with an error."""


class RankCalls(dict[int, Call[Q]], Generic[Q]):
    """Rank -> its call."""

    def answer_all(self, out: Replies, reply: Reply) -> None:
        """Answer every rank alike."""
        for call in self.values():
            out.answer(call, reply)

    def refuse_all(self, out: Replies, error: str, message: str) -> None:
        """Refuse every rank alike."""
        for call in self.values():
            out.refuse(call, error, message)

"""R12, R16, R17, R18, R21 and I4: a step is reported as committed only if its copies and its fact are there."""

from __future__ import annotations

import functools

from memstore.core.attempts.join import LEFT_FREE
from memstore.core.cluster.facts import AttemptOpened, StepCommitted
from memstore.core.journal.records import entry_from_record, is_part, part_from_record, place_of_record
from memstore.testing.simulator.checks.observed import Observed, racks_of
from memstore.testing.simulator.checks.parity import LossCheck
from memstore.testing.simulator.checks.shared_shards import SharedShardCheck
from memstore.testing.simulator.world.world import AnyHolder, AnyRank, Violation, World
from recovery.inventory import ShardId, StepId

NEWCOMER_S = 2.0  # a host that joined this lately may lack a fact that was replicated before
_entry = functools.lru_cache(1 << 14)(entry_from_record)  # a whole journal is read after each of its writes


class Commits:
    """The facts in journals, and the commits that tickets are sent."""

    def __init__(self, world: World, observed: Observed, shared_shards: SharedShardCheck, losses: LossCheck) -> None:
        self.world, self.observed, self.shared_shards, self.losses = world, observed, shared_shards, losses
        self._terms: dict[StepId, int] = {}  # commit -> the term that wrote it
        self._whole: dict[tuple[int, int], StepCommitted] = {}  # by place: commits with every rank's digest
        self._journals: dict[StepId, set[str]] = {}  # commit -> hosts that ever had its fact
        self._asked: dict[int, str] = {}  # attempt -> the spread level that it asks for
        self._is_narrow: dict[int, bool] = {}  # attempt -> it asks for hosts alone, and may

    def journalled(self, holder: AnyHolder) -> None:
        """Read a journal that was written to: its last fact must not have a lower term than one before it (R17)."""
        terms = [place_of_record(record)[0] for record in holder.memory.journal]
        if terms and terms[-1] < max(terms):
            raise Violation("R17", f"{holder.host_id} took a fact of term {terms[-1]} after one of {max(terms)}")
        parts = {place_of_record(r): part_from_record(r) for r in holder.memory.journal if is_part(r)}
        for entry in (_entry(record) for record in holder.memory.journal if not is_part(record)):
            fact = entry.fact
            self.shared_shards.journalled(holder.host_id, fact)
            if isinstance(fact, AttemptOpened) and fact.job == self.world.scenario.job:
                self._opened(fact)
            if isinstance(fact, StepCommitted) and fact.job == self.world.scenario.job:
                step, place = StepId(fact.attempt, fact.step), (entry.term, entry.seq)
                whole = self._with_digests(holder, place, fact)
                self._look_at_part(holder, step, entry.term, whole, parts.get(place, {}))
                self.observed.facts[step], self._terms[step] = whole, entry.term
                self._journals.setdefault(step, set()).add(holder.host_id)

    def _with_digests(self, holder: AnyHolder, place: tuple[int, int], fact: StepCommitted) -> StepCommitted:
        """Return the fact with every rank's digest: the controller that decided has them, a record only their root."""
        known = holder.session.controller.machine.parts.journal.log.at(place) if holder.session is not None else None
        if known is not None and isinstance(known.fact, StepCommitted) and known.fact.digests.is_known:
            self._whole.setdefault(place, known.fact)
        return self._whole.get(place, fact)

    def _look_at_part(
        self, holder: AnyHolder, step: StepId, term: int, fact: StepCommitted, part: dict[int, str]
    ) -> None:
        """Demand that a host has the digests of its own copies beside a commit (R16)."""
        own = {rank for rank, hosts in fact.digests.keepers.items() if holder.host_id in hosts}
        is_of_session = holder.session is not None and holder.session.controller.term == term  # a later one knows less
        if is_of_session and not own <= part.keys():
            raise Violation("R16", f"{holder.host_id} has {step} in its journal, and not the digests of its own copies")

    def _opened(self, fact: AttemptOpened) -> None:
        """Note whether a launch may ask for no racks (R18).

        Its own hosts must be too few, and leave living ones out: lost racks count only if it spreads over every live
        host. And no attempt before it that was known may have asked for racks; one whose numbers are left free knew
        none (R20).
        """
        if fact.attempt in self._asked:
            return
        self._asked[fact.attempt] = fact.level_asked
        controller = self.world.served()
        machine = controller.machine if controller is not None else None
        live = set(machine.hosts.live_ids()) if machine is not None else set()
        job = machine.jobs.get(fact.job) if machine is not None else None
        older = [number for number in job.attempts if number < fact.attempt] if job is not None else []
        knew = older if fact.attempt - max(older, default=0) <= LEFT_FREE else []
        asked = [number for number in knew if self._asked.get(number, "host") != "host"]
        if fact.level_asked == "host" and asked:
            raise Violation("R18", f"attempt {fact.attempt} asks for hosts alone, attempt {asked[-1]} asked for racks")
        is_short = len(racks_of(self.world, live.intersection(fact.hosts))) < self.world.scenario.racks_wanted
        self._is_narrow[fact.attempt] = fact.level_asked == "host" and is_short and not live.issubset(fact.hosts)

    def commit_reported(self, rank: AnyRank, step_number: int, *, is_degraded: bool) -> None:
        """Look at a commit that a ticket is sent for the first time."""
        step = StepId(rank.attempt, step_number)
        if step in self.observed.acked or step_number not in rank.tickets:
            return
        fact = self.observed.facts.get(step)
        if fact is None:
            raise Violation("R16", f"rank {rank.rank} was sent that {step} is committed; no journal knows it")
        self._look_at_journals(rank, step)
        self._look_at_copies(rank.job, step, fact)
        self._look_at_other_ranks(rank, step)
        self._look_at_newer_attempts(step)
        self.observed.acked.add(step)
        self.observed.starts_over = False
        self.observed.acked_after_heal += self.observed.is_healed
        self.observed.degraded = fact.reason if is_degraded else ""
        self.shared_shards.committed(step, fact)
        self.losses.committed(step, fact)

    def _look_at_journals(self, rank: AnyRank, step: StepId) -> None:
        """Demand that the fact of a commit is in enough journals (R16)."""
        controller = rank.holder.session.controller if rank.holder and rank.holder.session else None
        sessions = controller.sessions if controller is not None else {}
        joined = controller.machine.hosts.live_ids() if controller is not None else ()  # a hello may be under way
        live = sum(self.world.now - sessions[host].opened_s > NEWCOMER_S for host in joined if host in sessions)
        # A successor acts on what its predecessor wrote, and sends it first in every session, in order.
        is_inherited = controller is not None and self._terms[step] < controller.term
        if not is_inherited and len(self._journals[step]) < min(self.world.scenario.replicas, live):
            have = sorted(self._journals[step])
            raise Violation("R16", f"{step} was acknowledged with its fact on {have} only, {live} hosts live")

    def _look_at_copies(self, job: str, step: StepId, fact: StepCommitted) -> None:
        """Demand that every copy that the fact names was there (I4), and that they are enough unless degraded (R18)."""
        scenario = self.world.scenario
        for rank, digest in enumerate(fact.digests):
            hosts = fact.digests.keepers.get(rank, ())
            shard = ShardId(job, step.attempt, step.step, rank)
            ever = self.observed.ever.get((shard, digest), set())
            if ever:  # parity names hosts beside that of a copy
                ever = ever | self.observed.ever_added.get((shard, digest), set())
            never = sorted(set(hosts) - ever)
            if never:
                raise Violation("I4", f"{step} was committed with copies of rank {rank} that never were on {never}")
            if not fact.is_degraded and len(set(hosts)) < scenario.replicas:
                raise Violation("R18", f"{step} says it is not degraded, rank {rank} has copies on {list(hosts)}")
            racks, is_narrow = racks_of(self.world, hosts), self._is_narrow.get(step.attempt, False)
            if not fact.is_degraded and not is_narrow and len(racks) < scenario.racks_wanted:
                raise Violation("R18", f"{step} says it is not degraded, rank {rank} has copies in {racks}")

    def _look_at_other_ranks(self, rank: AnyRank, step: StepId) -> None:
        """Demand that no rank of the attempt has skipped the step (R12)."""
        for other in self.world.ranks:
            if other.attempt == rank.attempt and other.tickets.get(step.step) in ("skipped", "failed"):
                raise Violation("R12", f"{step} was committed, but rank {other.rank}'s put was not done")

    def _look_at_newer_attempts(self, step: StepId) -> None:
        """Demand that no newer attempt has restored an older step (R21)."""
        for (attempt, _), restored in self.observed.decided.items():
            if attempt > step.attempt and self.world.scenario.is_strict and (restored is None or restored < step):
                raise Violation("R21", f"{step} was committed after attempt {attempt} had restored {restored}")

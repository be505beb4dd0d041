"""When a step is committed, and when it is given up on all ranks.

The controller's machine hands it seals and skips.

    open --every shard sealed on enough domains--> committing --fact spread--> committed [degraded]
      |--a rank skipped, or can never be whole--> abandoned       degraded --copies rebuilt--> committed
      '--a newer step committed--> superseded

Seals, the commit rule and skips; `capacity.py` has the effect of a commit on older steps. Pure (R12, R15, R18).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Literal

from msgspec.structs import replace

from memstore.core.capacity import Drops, Reservations, Retention
from memstore.core.cluster.collective import attempt_of
from memstore.core.cluster.effects import CommitApplied, Effects
from memstore.core.cluster.facts import StepCommitted, StepSkipped
from memstore.core.cluster.job import Attempt, AttemptMember, Call, Held, HeldRanks, Job
from memstore.core.cluster.state import ClusterState, mtbf_s
from memstore.core.journal.replication import Journal
from memstore.core.schedule import PutCosts, decide_steps, lead_end
from memstore.core.targets.targets import ClusterView
from memstore.core.wire.calls import ReportNonfinite, SkipStep
from memstore.core.wire.ids import WireShard
from memstore.core.wire.orders import DropJob, FreeCopies, StepLevel
from memstore.core.wire.replies import Noted, Skipped
from memstore.core.wire.reports import PutTimes, seconds
from memstore.core.wire.status_rows import NonfiniteRow
from memstore.intervals import parse_put_every
from placement.groups import Placement
from placement.topology import is_finer
from recovery.inventory import Copy, ShardId, StepId

SKIPPED = "another rank gave it up"
WHY_CHARS_MAX = 400
NAMED_MAX = 11  # tensors that one rank names, with "and 5 more"
RESUME_GAP_MAX = 64  # steps; the gap doubles with every skip until a commit lands (R12)
RESUME_SPAN_S = 60.0  # and a gap lasts at most about this long, because nothing is committed meanwhile
RESUME_GAP_UNPACED = 4  # steps; the most while it is unknown how long one takes
PASSED_OFTEN = 3  # steps in a row: not one rank that was late to learn of a skip


class CommitRule:
    """The rule for the shards of one step, as the cluster is now.

    `held` runs about once per seal, so it must be cheap.
    """

    def __init__(
        self,
        state: ClusterState,
        view: ClusterView,
        room: Reservations,
        job: Job,
        attempt: Attempt,
        step: StepId,
        placement: Placement,
    ) -> None:
        """Prepare to look at a step; `attempt` is the newest: its members decide where the copies go (R22)."""
        self.view, self.job, self.attempt, self.step = view, job, attempt, step
        self.copies, self.parity = job.copies.get(step, {}), job.parity.get(step, {})
        self.parity_sets = job.parity_sets(step)
        self.commit = job.commits.get(step)  # if it is committed already: its digests are the truth (R14)
        self.placement, self.domains = placement, state.hosts.live_domains(placement.level)
        self.replicas, self.min_copies = attempt.replicas, int(attempt.config["min_copies"])
        # Hosts without room for the job that refused a shard lately: not waited for, they would refuse after 10 s.
        unroomed = room.unroomed
        self.full = {h for _, h in job.refusals if (job.name, h) in unroomed} if unroomed else set()
        #: A rank's place, and the hosts with its copies, where these were enough: they are for the other ranks there.
        #: And whether they are just those that are asked for.
        self.whole: dict[tuple[object, ...], tuple[tuple[str, ...], bool]] = {}

    def held(self, rank: int) -> Held | None:
        """Return the copies of a rank's shard, or None while it is not on enough domains."""
        job, domains, truth = self.job, self.domains, self.commit
        digest, hosts = truth.digests[rank] if truth is not None else "", list[str]()
        for host, copy in self.copies.get(rank, {}).items():
            if copy.missing or host not in domains or (truth is not None and copy.spec.digest != digest):
                continue
            digest = digest or copy.spec.digest
            if copy.spec.digest != digest:
                return None
            hosts.append(host)
        if not hosts:
            return None
        if rank in self.parity_sets:
            return self._held_with_parity(rank, digest, hosts)
        place = None if job.refusals else self.view.place_of(self.placement, self.attempt, rank)
        here = (place, *hosts)
        is_all = len(hosts) == len(self.copies[rank])
        if place and here in self.whole:
            found, is_in_place = self.whole[here]
            return Held(digest, found, (), is_in_place and is_all)
        wanted = self.view.wanted(job, self.attempt, rank, self.step)
        refused: dict[str, str] = {}
        if job.refusals:
            shard = ShardId(job.name, self.step.attempt, self.step.step, rank)
            refused = {h: job.refusals[shard, h] for h in wanted if (shard, h) in job.refusals}
        have = {domains[h] for h in hosts}
        awaited = [h for h in wanted if h in domains and (h in hosts or (h not in refused and h not in self.full))]
        if len(have) < max(len({domains[h] for h in awaited}), self.min_copies):
            return None
        for group in job.group_domains:  # all in one group, and a copy outside of it is to come (R18.8)
            if len({group.get(h, h) for h in hosts}) == 1 < len({group.get(h, h) for h in awaited}):
                return None
        reasons = [f"{host}: {why}" for host, why in refused.items()]
        if len(have) < self.replicas:
            reasons.insert(0, f"rank {rank} has {len(have)} of {self.replicas} copies")
        found, is_in_place = tuple(sorted(hosts)), {*hosts} == {*wanted}
        if place and not reasons:
            self.whole[here] = found, is_in_place
        return Held(digest, found, tuple(reasons), bool(place) and not reasons and is_in_place and is_all)

    def _held_with_parity(self, rank: int, digest: str, hosts: list[str]) -> Held | None:
        """Return a shard whose own copy is there, if every other rank of its set has it in its parity."""
        found, reasons = list(hosts), list[str]()
        for other in self.parity_sets[rank].others(rank):
            keeping = [
                host for host, copy in self.parity.get(other, {}).items() if self._keeps(host, copy, rank, digest)
            ]
            host = self.attempt.members[other].host_id if other in self.attempt.members else ""
            parity = ShardId(self.job.name, self.step.attempt, self.step.step, other, is_parity=True)
            why = self.job.refusals.get((parity, host))
            if not keeping and why is None and host not in self.full:
                return None
            found += keeping
            reasons += [] if keeping else [f"{host}: {why or 'no room for parity'}"]
        if reasons:
            reasons.insert(0, f"rank {rank} has 1 of {self.replicas} copies")
        elif len({self.domains[host] for host in (hosts[0], *found[len(hosts) :])}) < len(self.parity_sets[rank].ranks):
            reasons.append(f"parity of rank {rank} shares a failure domain with it")
        if reasons and self.min_copies > len(hosts):
            return None
        return Held(digest, tuple(sorted({*found})), tuple(reasons))

    def _keeps(self, host: str, parity: Copy, rank: int, digest: str) -> bool:
        is_in = any((each.rank, each.digest) == (rank, digest) for each in parity.spec.summands)
        return host in self.domains and not parity.missing and is_in


class StepCommits:
    """Decides when steps of the current attempts are committed, abandoned or superseded."""

    def __init__(
        self,
        state: ClusterState,
        out: Effects,
        journal: Journal,
        view: ClusterView,
        drops: Drops,
        room: Reservations,
        retention: Retention,
    ) -> None:
        self.state, self.out, self.journal = state, out, journal
        self.view, self.drops, self.room, self.retention = view, drops, room, retention

    # -- events -------------------------------------------------------------------------------

    def take_copy(self, copy: Copy) -> bool:
        """Count a reported copy; return False if it is to be freed, as one of a skipped step (R12)."""
        shard, state = copy.shard, self.state
        if self.drops.is_ordered(copy.host, shard):
            return False
        removed = state.removed.get(shard.job, 0)
        step = StepId(shard.attempt, shard.step)
        if shard.attempt <= removed and not state.is_back(shard.job, step):
            # The host was out of reach when the job was removed, so it still reserves room for it: order it to drop
            # the job.
            order = DropJob(job=shard.job, attempt=removed, shards=(WireShard.of(shard),))
            self.out.send(copy.host, order)
            return False
        job = state.job(shard.job)
        owner = job.commits.get(step) or job.attempts.get(shard.attempt)
        if owner is not None and shard.rank >= owner.world_size:
            # The attempt has no such rank.
            self.out.send(copy.host, FreeCopies(shards=(WireShard.of(shard),), number=None))
            return False
        is_over = step not in job.commits and self._is_given_up(job, step)
        # A get may bring back a step from durable storage that is older than the newest commit and whose commit fact
        # is gone.
        if is_over and step not in state.holds.in_use(job):
            if isinstance(owner, Attempt) and self._is_skip_recording(job, step):
                # The order is the fact's effect, on all hosts. If the fact is lost, a successor may commit the step.
                owner.steps[step.step] = "abandoned"
                return False
            level: Literal["skipped", "superseded"] = "skipped" if job.is_abandoned(step) else "superseded"
            self.out.send(copy.host, self._abandon_order(job, step, level, "the step was given up"))
            return False
        job.add_copy(copy)
        return True

    def _is_given_up(self, job: Job, step: StepId) -> bool:
        """Return whether a step can never be committed.

        It was skipped or superseded, is older than a commit of its attempt, or is of an older attempt, whose steps were
        freed when the newest attempt made its first put.
        """
        newest = job.newest
        if newest is not None and newest.has_freed_unrestorable and step.attempt < newest.attempt_number:
            return True  # the copy, of a late host or a push under way, arrived after older attempts' steps were freed
        attempt = job.attempts.get(step.attempt)
        if attempt is None:
            return False
        is_over = attempt.steps.get(step.step) in ("abandoned", "superseded")
        return is_over or job.is_abandoned(step) or step.step < job.newest_commit(step.attempt)

    def sealed(self, now: float, copy: Copy, put: PutTimes | None = None) -> None:
        """Take a host's report of a verified copy, whole or with chunks missing; `put`: of a rank's own put."""
        if not self.take_copy(copy):
            return
        shard = copy.shard
        job = self.state.jobs[shard.job]
        attempt = job.attempts.get(shard.attempt)
        if attempt is None or copy.missing:
            return  # what lacks a chunk is repaired or given up
        job.refusals.pop((shard, copy.host), None)
        if attempt is job.newest:
            attempt.has_put = True
            member = attempt.members.get(shard.rank) if not shard.is_parity else None
            if member is not None:
                attempt.saw(member, shard.step)
                if member.is_alive:  # a copy that a host lists again says nothing of a process that is missed
                    member.last_active_s = now
                if copy.host == member.host_id:
                    attempt.pace.reached(shard.step, now)
                    attempt.progress.reached(shard.step, now)
                    member.put(shard.step, now)
                    if put is not None:
                        attempt.put_costs.put(shard.step, now - seconds(put.age_s), seconds(put.stall_s))
                    self._give_up_passed(job, attempt, shard)
            if shard.step not in attempt.steps:
                attempt.steps.begin(shard.step)
                self._give_up_if_passed(job, attempt, shard.step)
        step = StepId(shard.attempt, shard.step)
        # Otherwise the rank that was short at the last look is still short: nothing to evaluate.
        short, added = job.short.get(step), [each.rank for each in copy.spec.summands]
        if short is None or short in (added or (shard.rank,)):
            self.evaluate(job, step)

    def _give_up_passed(self, job: Job, attempt: Attempt, shard: ShardId) -> None:
        """Give up older open steps that lack this rank, which has sealed a newer one (R12).

        Its host seals in order, so those steps can never be complete. No rank skipped them (a copy failed, or a rank
        never put), and they would hold the other ranks' room for ever.
        """
        for number in sorted(n for n in attempt.steps.open if n < shard.step):
            step = StepId(attempt.attempt_number, number)
            if shard.rank not in job.copies.get(step, {}) and not job.is_abandoned(step):
                self._pass_over(job, attempt, number, attempt.members[shard.rank])

    def _give_up_if_passed(self, job: Job, attempt: Attempt, number: int) -> None:
        """Give an open step up if some rank's host has sealed a newer step of that rank, and never this one (R12).

        This is the check of `_give_up_passed` for a step that opens late, when that rank has passed it already, and
        for all open ones when inventories were taken.
        Otherwise ranks that each hold an open step which another rank passed over would wait for one another's puts.
        """
        step = StepId(attempt.attempt_number, number)
        held = job.copies.get(step, {})
        passed = next((s for s in attempt.members.values() if s.sealed_step > number and s.rank not in held), None)
        if passed is not None and not job.is_abandoned(step):
            self._pass_over(job, attempt, number, passed)

    def _pass_over(self, job: Job, attempt: Attempt, number: int, passed: AttemptMember) -> None:
        """Give up a step that a rank has passed over; say who puts what where that goes on."""
        attempt.passed_count += 1
        why = f"rank {passed.rank} put step {passed.sealed_step} without having put it"
        held = job.copies.get(StepId(attempt.attempt_number, number), {})
        other = next((member for rank, member in attempt.members.items() if rank in held), None)
        if attempt.passed_count >= PASSED_OFTEN and other is not None:
            both = (f"rank {each.rank} puts {', '.join(map(str, each.put_steps))}" for each in (other, passed))
            why += f". Every rank has to put the same steps, and {' but '.join(both)}"
        self._give_up(job, attempt, number, why)

    def give_up_damaged(self, now: float, job: Job, attempt: Attempt, number: int) -> None:
        """Give up an open step with a chunk that no copy has: it would never be whole, and keep its room (R12).

        Only after `dead_after_s`: a report of another copy may be under way, a host that has one may come back.
        """
        ranks = job.copies.get(StepId(attempt.attempt_number, number), {}).values()
        if not any(frozenset.intersection(*(c.missing for c in copies.values())) for copies in ranks if copies):
            attempt.damaged_s.pop(number, None)
        elif now - attempt.damaged_s.setdefault(number, now) >= self.state.rules.dead_after_s:
            self._give_up(job, attempt, number, "no copy has all chunks of some rank's shard")

    def _give_up(self, job: Job, attempt: Attempt, number: int, why: str) -> None:
        attempt.skip_reasons[number] = attempt.skip_why = f"step {number} was given up: {why}"
        attempt.is_skip_for_room, attempt.skipped_s = False, self.state.now
        attempt.steps[number] = "abandoned"
        attempt.abandoned_ranges.append((number, number + 1))
        self.journal.record(StepSkipped(job.name, attempt.attempt_number, number, number + 1))

    def inventory(self, host: str, name: str, copies: list[Copy]) -> None:
        """Take a host's answer to a fence: everything it has of a job (R21)."""
        job = self.state.jobs.get(name)
        if job is not None and job.has_just(host, copies):
            job.drop_refusals(host)
            copies = []
        elif job is not None:
            job.drop_host(host)
        for copy in copies:
            self.take_copy(copy)
        if job is not None:
            self.adopt(job, host)
            self.evaluate_all(job)

    def adopt(self, job: Job, host: str | None = None) -> None:
        """Open again the newest attempt's steps in inventories (all, or a host's) that no fact has ended.

        Those that a rank has passed over are given up: else they stay open until that rank puts once more.
        """
        attempt = job.newest
        if attempt is None:
            return
        for step, ranks in (job.copies if host is None else job.on_host.get(host, {})).items():
            if step.attempt != attempt.attempt_number:
                continue
            attempt.has_put = True
            attempt.steps.begin(step.step)
            for rank in ranks:
                member = attempt.members.get(rank)
                if member is not None:
                    attempt.saw(member, step.step)
                    if member.host_id in job.copies[step][rank]:
                        member.put(step.step, self.state.now)
        for number in sorted(attempt.steps.open):
            self._give_up_if_passed(job, attempt, number)

    def trained(self, reported: Mapping[str, tuple[int, int]]) -> None:
        """Take a host's report of the step that its ranks of a job train, put or not."""
        for name, (attempt_number, step) in reported.items():
            job = self.state.jobs.get(name)
            attempt = job.attempts.get(attempt_number) if job is not None else None
            if attempt is not None:
                attempt.trained_step = max(attempt.trained_step, step)
                attempt.progress.reached(step, self.state.now)

    def send_initial_state(self, job: Job, host: str) -> None:
        """Send a host's ranks the newest commit and skip again: a dead controller or holder may not have sent them."""
        attempt = job.newest
        if attempt is None:
            return
        fact = job.commits.get(StepId(attempt.attempt_number, job.newest_commit(attempt.attempt_number)))
        if fact is not None:
            self.out.send(host, self._committed_order(job, attempt, fact))
        skipped = [StepId(attempt.attempt_number, first) for first, _ in attempt.abandoned_ranges]
        step = next((step for step in reversed(skipped) if not self._is_skip_recording(job, step)), None)
        if step is not None:
            self.out.send(host, self._abandon_order(job, step, "skipped", SKIPPED))

    def evaluate_all(self, job: Job) -> None:
        """Look again at every step that is not finished, oldest first, and at degraded commits."""
        attempt = job.newest
        if attempt is not None:
            for number in sorted(attempt.steps.open):
                self.evaluate(job, StepId(attempt.attempt_number, number))
        for step, commit in list(job.commits.items()):
            if commit.is_degraded:
                self.evaluate(job, step)

    def evaluate(self, job: Job, step: StepId) -> None:
        """Commit the step if the rule holds now; commit again a degraded one that has become whole."""
        commit = job.commits.get(step)
        if commit is not None:
            fact = self.commit_rule(job, commit.world_size, step) if commit.is_degraded else None
            if fact is not None and not fact.is_degraded and not self._is_recording(fact):
                self.journal.record(replace(fact, put_from=commit.put_from, put_steps=commit.put_steps))
            return
        attempt = job.attempts.get(step.attempt)
        if attempt is None or attempt is not job.newest:
            return
        if attempt.steps.get(step.step) != "open":
            return
        if step.step < attempt.steps.newest_decided:
            return  # commits only go forward: the newer one supersedes this one
        fact = self.commit_rule(job, attempt.world_size, step)
        if fact is not None:
            attempt.steps[step.step] = "committing"
            put_from, put_steps = self._put_interval(job, attempt, step.step)
            self.journal.record(replace(fact, put_from=put_from, put_steps=put_steps))

    def _put_interval(self, job: Job, attempt: Attempt, step: int) -> tuple[int, int]:
        """Decide with the commit of a step how far puts lie apart, for steps that no rank reaches without it (R33)."""
        unapplied = [fact for fact in self.journal.log.unapplied() if isinstance(fact, StepCommitted)]
        sent = [f for f in unapplied if (f.job, f.attempt) == (job.name, attempt.attempt_number)]
        first, steps = max([attempt.put_interval, *((f.put_from, f.put_steps) for f in sent)])
        every = parse_put_every(attempt.config.get("put_every", "step"))
        attempt.put_costs.committed(step, self.state.now)
        measured = attempt.put_costs.measured()
        if every.steps is not None or every.is_epoch or measured is None or step < first:
            return first, steps
        failure_s = mtbf_s(self.state, job)
        found = decide_steps(every, measured, failure_s, steps)
        if found == steps:
            return first, steps
        self.out.log(
            f"job {job.name!r}: every {found} steps are put ({attempt.config['put_every']}): a step takes "
            f"{measured.step_s:.3g} s, a put blocks {measured.stall_s:.3g} s, is committed after "
            f"{measured.commit_s:.3g} s, a failure every {failure_s / 3600:.3g} h"
        )
        first = lead_end(step, job.newest_commit(attempt.attempt_number), steps)
        attempt.put_costs = PutCosts(first)
        return first, found

    def _is_recording(self, fact: StepCommitted) -> bool:
        """Return whether a commit fact of the same step is not replicated yet."""
        key = (fact.job, fact.attempt, fact.step)
        unapplied = self.journal.log.unapplied()
        return any(isinstance(p, StepCommitted) and (p.job, p.attempt, p.step) == key for p in unapplied)

    def _is_skip_recording(self, job: Job, step: StepId) -> bool:
        """Return whether the step was given up by a fact that is not replicated yet."""
        skips = [fact for fact in self.journal.log.unapplied() if isinstance(fact, StepSkipped)]
        return any(
            (fact.job, fact.attempt) == (job.name, step.attempt)
            and fact.step <= step.step < max(fact.resume, fact.step + 1)
            for fact in skips
        )

    # -- the rule -----------------------------------------------------------------------------

    def commit_rule(self, job: Job, world_size: int, step: StepId) -> StepCommitted | None:
        """Return the commit fact if every shard is on as many domains as the cluster now allows (R18).

        Starts with the rank that was short at the last look, so each rank is looked at about once per step. What was
        found whole counts until a copy goes or hosts change. A degraded commit is replaced by a whole one only.
        """
        if self.state.is_placement_stale:
            return None  # evaluated again with the next tick, when the placement is known
        newest, commit, placement = job.newest, job.commits.get(step), self.view.placement(job)
        if newest is None or placement is None:
            return None
        reasons: list[str] = []
        if is_finer(placement.level, newest.level_asked, self.state.hosts.failure_domains):
            reasons.append(f"copies are spread over {placement.level}s, not {newest.level_asked}s")
        if commit is not None and reasons:
            return None  # no copy more brings it a level further
        rule = CommitRule(self.state, self.view, self.room, job, newest, step, placement)
        held = self._known_held(job, newest, step, rule)
        first = min(job.short.get(step, 0), world_size)
        for rank in chain(range(first, world_size), range(first)):
            if rank in held:
                continue
            found = rule.held(rank)
            if found is None or (commit is not None and found.reasons):
                job.short[step] = rank
                return None
            held[rank] = found
        job.short.pop(step, None)
        shards = [held[rank] for rank in range(world_size)]
        reasons += [why for shard in shards for why in shard.reasons]
        copies = [(shard.digest, shard.hosts) for shard in shards]
        return job.commit_of(step, copies, placement.level, "; ".join(reasons[:3]), self.state.wall_s)

    def _known_held(self, job: Job, attempt: Attempt, step: StepId, rule: CommitRule) -> dict[int, Held]:
        """Return the ranks that earlier looks found with enough copies, if nothing that they looked at has changed."""
        if rule.commit is not None or job.refusals or self.state.draining:
            return {}
        placed = self._placed(attempt, rule.placement)
        known = job.held.get(step)
        if known is None or known.placed != placed:
            known = job.held[step] = HeldRanks(placed)
        return known.ranks

    def _placed(self, attempt: Attempt, placement: Placement) -> tuple[object, ...]:
        """Return what decides, beside copies, which of them are enough."""
        domains = self.state.hosts.live_domains(placement.level)
        return domains, placement, attempt.attempt_number, attempt.moves_count

    def was_in_place(self, job: Job, step: StepId, world_size: int) -> bool:
        """Return whether all copies of a step, when it was to be committed and still, are where they are to be.

        To be asked once: what was found is forgotten then.
        """
        known, newest = job.held.pop(step, None), job.newest
        if known is None or newest is None or job.refusals or self.state.draining or self.state.is_placement_stale:
            return False
        placement = self.view.placement(job)  # not asked while a successor reads old facts: hosts are still to come
        if placement is None:
            return False
        is_known = len(known.ranks) == world_size and known.placed == self._placed(newest, placement)
        return is_known and all(each.is_in_place for each in known.ranks.values())

    # -- facts applied ------------------------------------------------------------------------

    def apply_committed(self, now: float, fact: StepCommitted, *, is_replay: bool) -> None:
        """The commit is replicated: notify the ranks, supersede older steps, let retention drop."""
        job = self.state.job(fact.job)
        step = StepId(fact.attempt, fact.step)
        job.commits[step] = fact
        if not fact.digests.is_known:
            job.unproven[step] = 0
        # A commit of a newer step ends a crash loop. Committing the restored step again does not (R25).
        job.restores = [r for r in job.restores if r.step >= step]
        attempt = job.attempts.get(fact.attempt)
        if attempt is not None:
            attempt.steps[fact.step] = "committed"
            attempt.has_put, attempt.resume_gap, attempt.passed_count = True, 1, 0
            attempt.put_interval = max(attempt.put_interval, (fact.put_from, fact.put_steps))
        if is_replay:
            return
        if attempt is not None:
            attempt.committed_s = now
        if attempt is not None and attempt is job.newest:
            self._raise_level(attempt, self._committed_order(job, attempt, fact))
            for number in [n for n in attempt.steps.open if n < fact.step]:
                attempt.steps[number] = "superseded"
                self._forget(
                    job, StepId(attempt.attempt_number, number), "superseded", f"step {fact.step} was committed"
                )
        self.retention.retain(job)
        self.out.emit(CommitApplied(job))

    def apply_abandoned(self, fact: StepSkipped, *, is_replay: bool) -> None:
        """Void the step, and all steps up to the one where all put again."""
        job = self.state.job(fact.job)
        attempt = job.attempts.get(fact.attempt)
        if attempt is None:
            return
        end = max(fact.resume, fact.step + 1)
        if (fact.step, end) not in attempt.abandoned_ranges:
            attempt.abandoned_ranges.append((fact.step, end))
        attempt.resume_step = max(attempt.resume_step, end)
        attempt.skipped_s = self.state.now if attempt.skipped_s is None else attempt.skipped_s
        why = attempt.skip_reasons.pop(fact.step, SKIPPED)
        numbers = {fact.step, *attempt.steps, *(s.step for s in job.copies if s.attempt == fact.attempt)}
        for number in sorted(n for n in numbers if fact.step <= n < end):
            if attempt.steps.get(number) not in ("committing", "committed"):
                attempt.steps[number] = "abandoned"
                # A late host's fact may name a step whose copies are counted already: elsewhere they go now.
                if not is_replay or StepId(fact.attempt, number) in job.copies:
                    self._forget(job, StepId(fact.attempt, number), "skipped", why)

    @staticmethod
    def _committed_order(job: Job, attempt: Attempt, fact: StepCommitted) -> StepLevel:
        return StepLevel(
            job=job.name,
            attempt=attempt.attempt_number,
            step=fact.step,
            level="committed",
            reason=fact.reason,
            degraded=fact.is_degraded,
            put_from=attempt.put_interval[0],
            put_steps=attempt.put_interval[1],
        )

    def _raise_level(self, attempt: Attempt, order: StepLevel) -> None:
        for host in sorted(attempt.hosts):
            self.out.send(host, order)

    def send_durable(self, job: Job, step: StepId) -> None:
        """Raise the tickets of a step on durable storage to that level."""
        attempt = job.attempts.get(step.attempt)
        if attempt is not None and attempt is job.newest:
            order = StepLevel(
                job=job.name,
                attempt=attempt.attempt_number,
                step=step.step,
                level="durable",
                put_from=attempt.put_interval[0],
                put_steps=attempt.put_interval[1],
            )
            self._raise_level(attempt, order)

    def _abandon_order(self, job: Job, step: StepId, level: Literal["skipped", "superseded"], reason: str) -> StepLevel:
        attempt = job.attempts.get(step.attempt)
        return StepLevel(
            job=job.name,
            attempt=step.attempt,
            step=step.step,
            level=level,
            reason=reason,
            resume=attempt.resume_step if attempt is not None else 0,
        )

    def _forget(self, job: Job, step: StepId, level: Literal["skipped", "superseded"], reason: str) -> None:
        order = self._abandon_order(job, step, level, reason)
        for host in self.state.hosts.live_ids():
            self.out.send(host, order)
        job.drop_step(step)

    # -- skip ---------------------------------------------------------------------------------

    def nonfinite(self, call: Call[ReportNonfinite]) -> None:
        """Take which tensors of a rank's put have numbers that are not finite, or that all are finite again (R39)."""
        request, found = call.request, attempt_of(self.state, self.out, call)
        if found is None:
            return
        self.out.answer(call, Noted())
        job, attempt = found
        names = [name[:WHY_CHARS_MAX] for name in request.names[:NAMED_MAX]]
        if names:
            attempt.nonfinite[request.rank] = NonfiniteRow(rank=request.rank, step=request.step, names=names)
        else:
            attempt.nonfinite.pop(request.rank, None)
        place = {"job": job.name, "attempt": attempt.attempt_number, "step": request.step, "rank": request.rank}
        self.out.note("nonfinite" if names else "finite", **place, names=names)

    def skip(self, call: Call[SkipStep]) -> None:
        """Abandon a step on all ranks: one found no free slots within its stall budget (R12)."""
        request, found = call.request, attempt_of(self.state, self.out, call)
        if found is None:
            return
        job, attempt = found
        step = StepId(attempt.attempt_number, request.step)
        if attempt.steps.newest_decided > step.step:
            if step.step not in attempt.steps:
                attempt.steps[step.step] = "superseded"  # a newer step is whole: nothing to give up
        elif attempt.steps.get(step.step) not in ("committing", "committed") and not job.is_abandoned(step):
            attempt.pace.reached(step.step, call.since_s)
            attempt.progress.reached(step.step, call.since_s)
            attempt.skipped_s = self.state.now
            for number in sorted(n for n in attempt.steps.open if n < step.step):
                self._give_up_if_passed(job, attempt, number)  # an earlier controller may have died before it did
            if (
                request.is_failed
            ):  # it says nothing of room: the next step is as good as any, also where ranks put it before
                attempt.resume_step = max(attempt.resume_step, step.step + 1)
            else:
                newest_seen = max([step.step, *attempt.steps, *(member.step for member in attempt.members.values())])
                # As long as it takes ranks to learn of it: seconds, not minutes of training.
                gap = min(attempt.resume_gap, attempt.pace.steps_within(RESUME_SPAN_S) or RESUME_GAP_UNPACED)
                attempt.resume_step = max(attempt.resume_step, newest_seen + gap)
                attempt.resume_gap = min(attempt.resume_gap * 2, RESUME_GAP_MAX)
            # At once, so that no copy still under way makes it whole; tickets are updated when the fact is replicated.
            attempt.abandoned_ranges.append((step.step, attempt.resume_step))
            for number in [n for n in attempt.steps.open if step.step <= n < attempt.resume_step]:
                attempt.steps[number] = "abandoned"
            why = request.why[:WHY_CHARS_MAX]
            why += "" if request.is_failed else self._held_up_by(job, attempt)
            attempt.skip_reasons[step.step] = attempt.skip_why = f"rank {request.rank} gave up step {step.step}: {why}"
            attempt.is_skip_for_room = not request.is_failed
            self.journal.record(StepSkipped(job.name, attempt.attempt_number, step.step, attempt.resume_step))
        # If an order to drop died with a controller, or a read held a step then, its room is still taken.
        if attempt.has_freed_unrestorable and not request.is_failed:
            self.retention.free_unrestorable(job)
        self.retention.retain(job)
        self.out.answer(call, Skipped(resume=attempt.resume_step))

    @staticmethod
    def _held_up_by(job: Job, attempt: Attempt) -> str:
        """Return "; rank 1 has put nothing since step 13" for a rank that the oldest open step lacks, or ""."""
        number = min(attempt.steps.open, default=None)
        held = job.copies.get(StepId(attempt.attempt_number, number), {}) if number is not None else {}
        lacking = next((member for rank, member in attempt.members.items() if held and rank not in held), None)
        return f"; {put_since_text(lacking)}" if lacking is not None else ""


def put_since_text(member: AttemptMember) -> str:
    """Return what became of a rank that puts no more: "rank 1 has closed its store after step 13"."""
    if member.is_gone:
        how = "closed its store" if member.has_closed else "ended"
        return f"rank {member.rank} has {how}" + (f" after step {member.sealed_step}" if member.put_steps else "")
    return f"rank {member.rank} has put nothing" + (f" since step {member.sealed_step}" if member.put_steps else "")

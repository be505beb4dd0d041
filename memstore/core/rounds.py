"""A get is one numbered round for all ranks alike. Pure (R23, R24, R25, R26, R27).

    gathering --all ranks--> listing (durable markers) --> planning --fact spread--> staging
        |                                                    |  ^                       |
        |                                             wait for hosts (grace)   a source failed: next plan
        '--deadline--> failed                                                           v
                                       released <--every rank's check passed-- checking (into=)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from memstore.core.attempts import listed
from memstore.core.events import Body, shard_to_wire, spec_to_wire
from memstore.core.facts import RestoreDecided, StepCommitted, StepRetired
from memstore.core.job import Attempt, Call, Job, Restore
from memstore.core.steps import ADOPTED
from recovery.inventory import Copy, ShardId, StepId
from recovery.planner import RecoveryPlan, plan

if TYPE_CHECKING:
    from memstore.core.catalog import Catalog

Phase = Literal["gathering", "listing", "waiting", "deciding", "staging", "checking"]
MARKERS_DEADLINE_S = 15.0  # a durable store that does not list its markers by then is left out, with a note
STAGE_STALL_S = 60.0  # a host that reports no end of staging for this long after the others is planned around


@dataclass(slots=True)
class Round:
    """One get of one attempt."""

    job: str
    attempt: int
    number: int
    only_step: int | None
    since_s: float
    calls: dict[int, Call] = field(default_factory=dict)
    phase: Phase = "gathering"
    phase_since_s: float = 0.0
    plan: RecoveryPlan | None = None
    staged: dict[int, Body] = field(default_factory=dict)
    checked: set[int] = field(default_factory=set)
    failed_steps: dict[StepId, str] = field(default_factory=dict)
    planned_s: float = 0.0
    notes: list[str] = field(default_factory=list)
    markers_call: int = 0

    @property
    def is_adopting(self) -> bool:
        """A get without a step adopts what it returns; get(step=S) only reads (R22)."""
        return self.only_step is None


class Rounds:
    """The rounds of all jobs, for the catalog."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.active: dict[str, Round] = {}
        self.markers_calls = 0

    # -- gathering ----------------------------------------------------------------------------

    def get(self, now: float, call: Call) -> None:
        """A rank called get(); the round closes for all ranks at once."""
        body, name = call.body, str(call.body["job"])
        job = self.catalog.jobs[name]
        attempt = job.newest
        if attempt is None or attempt.ordinal != body["attempt"]:
            self.catalog.refuse(call, "FencedError", f"job {name!r}: a newer attempt was opened")
            return
        only_step = body.get("step")
        if only_step is None and attempt.has_put:
            self.catalog.refuse(
                call, "RecoveryError",
                f"job {name!r}: get() after this attempt's first put would go back in time: use store.rewind(step) to "
                "continue from an older step, or get(step=S) to read one",
            )  # fmt: skip
            return
        active = self.active.get(name)
        if active is None or active.attempt != attempt.ordinal:
            attempt.rounds_count += 1
            active = self.active[name] = Round(name, attempt.ordinal, attempt.rounds_count, only_step, now)
        if active.only_step != only_step:
            self.catalog.refuse(
                call, "RecoveryError",
                f"job {name!r}: this rank asks for step {only_step}, the ranks waiting ask for {active.only_step}: "
                "all ranks must pass the same step to get()",
            )  # fmt: skip
            return
        active.calls[int(body["rank"])] = call
        if active.phase == "gathering" and len(active.calls) == attempt.world_size:
            self._list_markers(now, active, job, attempt)

    def _enter(self, now: float, active: Round, phase: Phase) -> None:
        active.phase, active.phase_since_s = phase, now

    def _list_markers(self, now: float, active: Round, job: Job, attempt: Attempt) -> None:
        hosts = [h for h in self.catalog.hosts.live_ids() if self.catalog.hosts.is_answering(h)]
        if attempt.config.get("durable") is None or not hosts:
            self._plan(now, active)
            return
        self._enter(now, active, "listing")
        self.markers_calls += 1
        active.markers_call = self.markers_calls
        body = {"job": job.name, "durable": attempt.config["durable"], "call": active.markers_call}
        self.catalog.tell(attempt.seats[0].host_id, "markers", body)

    def markers_listed(self, now: float, job: str, call: int) -> None:
        """The durable markers of the job are in the catalog now."""
        active = self.active.get(job)
        if active is not None and active.phase == "listing" and call == active.markers_call:
            self._plan(now, active)

    # -- planning -----------------------------------------------------------------------------

    def _plan(self, now: float, active: Round, *, is_grace_over: bool = False) -> None:
        job = self.catalog.jobs[active.job]
        attempt = job.attempts[active.attempt]
        inventory = job.inventory(
            live=self.catalog.hosts.live_ids(),
            silent=() if is_grace_over else self.catalog.silent_hosts(now),
        )
        spans = job.spans(attempt.ordinal)
        only = None
        if active.only_step is not None:
            known = {*job.copies, *job.commits, *job.markers}
            only = max((s for s in known if s.step == active.only_step), default=None)
            if only is None:
                have = sorted({s.step for s in known})
                self._fail(active, "RecoveryError", f"job {job.name!r} has no step {active.only_step}: {listed(have)}")
                return
        result = plan(
            inventory,
            spans,
            world_size=attempt.world_size,
            rank_hosts={rank: seat.host_id for rank, seat in attempt.seats.items()},
            only_step=only,
            not_steps=tuple(active.failed_steps),
        )
        active.plan, active.planned_s = result, now
        if result.verdict == "wait":
            if active.phase != "waiting":
                self.catalog.note(f"job {job.name!r}: get waits for hosts {', '.join(sorted(result.wait_for))}: they hold the newest commit")
            self._enter_once(now, active, "waiting")
        elif result.verdict == "none" and not is_grace_over and self.catalog.silent_hosts(now):
            # Whoever has not answered may know the job: None is for a job that nobody knows (R23).
            self._enter_once(now, active, "waiting")
        elif result.verdict == "none":
            self._nothing(now, active, job, result)
        else:
            self._decide(now, active, job, attempt, result)

    def _enter_once(self, now: float, active: Round, phase: Phase) -> None:
        if active.phase != phase:
            self._enter(now, active, phase)

    def _nothing(self, now: float, active: Round, job: Job, result: RecoveryPlan) -> None:
        if result.has_history or job.has_history:
            lines = [f"step {r.step.step} (attempt {r.step.attempt}): {r.reason}" for r in result.rejected[:10]]
            lines += [f"step {s.step} (attempt {s.attempt}): {why}" for s, why in active.failed_steps.items()]
            self._fail(
                active, "RecoveryError",
                f"job {job.name!r} has history but no whole step, neither in RAM nor on durable storage:\n  "
                + "\n  ".join(lines)
                + "\nBring the named hosts back and call get() again, or start over with connect(..., fresh=True)",
            )  # fmt: skip
            return
        self._enter(now, active, "deciding")
        self.catalog.record(
            RestoreDecided(job.name, active.attempt, active.number, None, None, self.catalog.wall_s)
        )

    def _decide(self, now: float, active: Round, job: Job, attempt: Attempt, result: RecoveryPlan) -> None:
        step = result.step
        if step is None:
            raise ValueError("a plan with a verdict has a step")
        if result.world_size != attempt.world_size:
            self._fail(
                active, "WorldSizeError",
                f"job {job.name!r}: step {step.step} was put by {result.world_size} ranks, this attempt has "
                f"{attempt.world_size}. Start {result.world_size} ranks, or read single shards with get(step, rank=r)",
            )  # fmt: skip
            return
        if active.is_adopting and self._is_crash_looping(job, attempt, step):
            config = attempt.config
            reason = (
                f"restored {config['max_restores']} times within {config['crash_window_s']:g} s and no newer step was "
                "committed since: the training dies of it"
            )
            self.catalog.record(StepRetired(job.name, step.attempt, step.step, reason))
            active.failed_steps[step] = reason
            self._plan(now, active)
            return
        self._enter(now, active, "deciding")
        if not active.is_adopting:
            self.start_staging(now, active)
            return
        if step not in job.commits:
            digests = tuple(result.digests[r] for r in range(result.world_size))
            hosts = tuple(tuple(sorted(job.copies.get(step, {}).get(r, {}))) for r in range(result.world_size))
            self.catalog.record(
                StepCommitted(
                    job.name, step.attempt, step.step, result.world_size, digests, hosts, attempt.level_asked, True,
                    ADOPTED, self.catalog.wall_s,
                )  # fmt: skip
            )
        self.catalog.record(
            RestoreDecided(job.name, active.attempt, active.number, step.attempt, step.step, self.catalog.wall_s)
        )

    def _is_crash_looping(self, job: Job, attempt: Attempt, step: StepId) -> bool:
        window_s = float(attempt.config["crash_window_s"])
        recent = [r for r in job.restores if r.step == step and self.catalog.wall_s - r.wall_s <= window_s]
        return len(recent) >= int(attempt.config["max_restores"])

    def apply_decided(self, now: float, fact: RestoreDecided, *, is_replay: bool) -> None:
        """The decision has spread: bind the lineage, then stage (R22, R23)."""
        job = self.catalog.jobs.get(fact.job)
        attempt = job.attempts.get(fact.attempt) if job is not None else None
        if job is None or attempt is None:
            return
        if fact.step is not None and fact.from_attempt is not None:
            attempt.parent, attempt.parent_step = fact.from_attempt, fact.step
            if fact.round > 0 and not any(r.attempt == fact.attempt for r in job.restores):
                job.restores.append(Restore(StepId(fact.from_attempt, fact.step), fact.attempt, fact.wall_s))
        attempt.has_restored = True
        attempt.rounds_count = max(attempt.rounds_count, fact.round)
        active = self.active.get(fact.job)
        if is_replay or active is None or active.number != fact.round or active.phase != "deciding":
            return
        if fact.step is None:
            del self.active[fact.job]
            for call in active.calls.values():
                self.catalog.answer(call, {"step": None})
        else:
            self.start_staging(now, active)

    # -- staging ------------------------------------------------------------------------------

    def start_staging(self, now: float, active: Round) -> None:
        """Order every host to bring its ranks' shards together and verify them."""
        job, result = self.catalog.jobs[active.job], active.plan
        if result is None or result.step is None:
            raise ValueError("staging needs a plan")
        self._enter(now, active, "staging")
        active.staged.clear()
        active.checked.clear()
        runs: dict[int, list[list[Any]]] = {}
        for t in result.transfers:
            runs.setdefault(t.rank, []).append([t.tier, t.source, t.first_chunk, t.chunks_count])
        durable = job.attempts[active.attempt].config.get("durable")
        for rank, call in sorted(active.calls.items()):
            shard = ShardId(job.name, result.step.attempt, result.step.step, rank)
            holders = [h for h in job.copies.get(result.step, {}).get(rank, {}) if self.catalog.hosts.is_live(h)]
            body = {
                "job": job.name, "round": active.number, "rank": rank, "shard": shard_to_wire(shard),
                "spec": spec_to_wire(result.specs[rank]), "runs": runs.get(rank, []), "durable": durable,
                "holders": sorted(holders), "attempt": active.attempt,
            }  # fmt: skip
            self.catalog.tell(call.host_id, "stage", body)

    def staged(self, now: float, host_id: str, body: Body) -> None:
        """A host staged one rank's shard, or says which chunks it could not get (R25)."""
        active = self._current(body)
        if active is None or active.phase != "staging" or active.plan is None:
            return
        rank = int(body["rank"])
        if not body["ok"]:
            self._source_failed(now, active, host_id, body)
            return
        active.staged[rank] = body
        if len(active.staged) == len(active.calls):
            self._enter(now, active, "checking")
            for r, call in active.calls.items():
                self.catalog.tell(call.host_id, "check", {"job": active.job, "round": active.number, "rank": r})

    def _source_failed(self, now: float, active: Round, host_id: str, body: Body) -> None:
        """Take the failed chunks out of the inventory on evidence, then plan anew; else fail the step."""
        job, result = self.catalog.jobs[active.job], active.plan
        if result is None or result.step is None:
            return
        step, rank, progress = result.step, int(body["rank"]), False
        for source, chunks in body.get("bad", {}).items():
            copy = job.copies.get(step, {}).get(rank, {}).get(source)
            if copy is not None and not set(chunks) <= copy.missing:
                job.add_copy(Copy(copy.shard, copy.spec, copy.host, copy.missing | frozenset(int(i) for i in chunks)))
                progress = True
        active.notes.append(f"rank {rank}: {body['why']}")
        if not progress:
            active.failed_steps[step] = str(body["why"])
        attempt = job.attempts[active.attempt]
        attempt.rounds_count += 1
        active.number = attempt.rounds_count
        self._plan(now, active)

    def checked(self, now: float, body: Body) -> None:
        """A rank compared `into=` with the manifest (R26)."""
        active = self._current(body)
        if active is None or active.phase != "checking":
            return
        if not body["ok"]:
            self._fail(active, str(body["error"][0]), f"rank {body['rank']}: {body['error'][1]}")
            return
        active.checked.add(int(body["rank"]))
        if len(active.checked) == len(active.calls):
            self._release(now, active)

    def _current(self, body: Body) -> Round | None:
        active = self.active.get(str(body["job"]))
        return active if active is not None and active.number == body["round"] else None

    def _release(self, now: float, active: Round) -> None:
        job, result = self.catalog.jobs[active.job], active.plan
        if result is None or result.step is None:
            raise ValueError("a release needs a plan")
        del self.active[active.job]
        attempt = job.attempts[active.attempt]
        newest_seen = max((s.step for s in (*job.copies, *job.commits)), default=result.step.step)
        for seat in attempt.seats.values():
            seat.last_active_s = now
        shared = {
            "step": result.step.step, "attempt": result.step.attempt, "verdict": result.verdict, "why": result.why,
            "round": active.number, "ranks_moved": list(result.ranks_moved),
            "bytes": {"local": result.bytes_local, "peer": result.bytes_peer, "durable": result.bytes_durable},
            "rejected": [[r.step.attempt, r.step.step, r.reason] for r in result.rejected[:10]],
            "steps_lost": max(0, newest_seen - result.step.step), "newest_seen": newest_seen,
            "seconds": {
                "gather": active.planned_s - active.since_s,
                "transfer": now - active.planned_s,
            },
            "notes": active.notes[:10],
        }  # fmt: skip
        for rank, call in active.calls.items():
            staged = active.staged[rank]
            self.catalog.answer(call, {**shared, "shard": staged["shard"], "digest": staged["digest"]})
        self.catalog.repair.consider(now, job)

    # -- ends ---------------------------------------------------------------------------------

    def _fail(self, active: Round, name: str, message: str) -> None:
        self.active.pop(active.job, None)
        for call in active.calls.values():
            self.catalog.refuse(call, name, message)

    def abort(self, job: str, name: str, message: str) -> None:
        """End a round that can no longer mean anything."""
        if job in self.active:
            self._fail(self.active[job], name, message)

    def withdraw(self, call: Call) -> None:
        """A rank's deadline passed: it leaves if nothing is decided yet, else it takes the result (R23)."""
        active = self.active.get(str(call.body["job"]))
        self.catalog.answer(call, {})
        if active is None or active.phase not in ("gathering", "listing", "waiting"):
            return
        gone = active.calls.pop(int(call.body["rank"]), None)
        attempt = self.catalog.jobs[active.job].attempts[active.attempt]
        missing = [r for r in range(attempt.world_size) if r not in active.calls and r != int(call.body["rank"])]
        if gone is not None:
            self.catalog.refuse(
                gone, "GatherTimeout",
                f"get() of job {active.job!r}: after {call.body['timeout_s']:g} s ranks {listed(missing)} of "
                f"{attempt.world_size} have not called get(). Every rank must call get()",
            )  # fmt: skip
        if not active.calls:
            del self.active[active.job]
        elif active.phase != "gathering":
            active.phase = "gathering"

    def tick(self, now: float) -> None:
        """Deadlines of listing and of the grace for late hosts; hosts lost while staging."""
        for active in list(self.active.values()):
            waited_s = now - active.phase_since_s
            if active.phase == "listing" and waited_s > MARKERS_DEADLINE_S:
                active.notes.append(f"durable storage did not list its markers within {MARKERS_DEADLINE_S:g} s")
                self._plan(now, active)
            elif active.phase == "waiting":
                self._plan(now, active, is_grace_over=waited_s > self.catalog.recovery_grace_s)
            elif active.phase in ("staging", "checking"):
                dead = [c.host_id for c in active.calls.values() if not self.catalog.hosts.is_live(c.host_id)]
                if dead:
                    self._fail(active, "RecoveryError", f"host {dead[0]} died while the step was being restored: restart")

    def source_died(self, now: float, host_id: str) -> None:
        """A host died: rounds that fetch from it are planned again."""
        for active in list(self.active.values()):
            if active.phase != "staging" or active.plan is None:
                continue
            if any(t.source == host_id and t.tier == "peer" for t in active.plan.transfers):
                attempt = self.catalog.jobs[active.job].attempts[active.attempt]
                attempt.rounds_count += 1
                active.number = attempt.rounds_count
                self._plan(now, active)

"""What was decided is brought to every rank's host, verified, checked and adopted; then all hear of it. Pure (R23-R26).

staging --every rank's shard verified--> checking (into=) --all agree--> releasing --fact spread--> answered
   '--a source lacks chunks--> planned again under a new number (`rounds.py`)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from memstore.core.cluster.facts import RestoreReleased, StepCommitted
from memstore.core.cluster.job import Call
from memstore.core.durable.paths import place_of
from memstore.core.wire.messages import Body, shard_to_wire, spec_to_wire
from recovery.inventory import Copy, ShardId, StepId
from recovery.planner import RecoveryPlan

if TYPE_CHECKING:
    from memstore.core.controller.machine import Catalog

ADOPTED = "adopted by a restore"  # a whole step without a commit fact that a restore chose
CHECK_AGAIN_S = 2.0  # an order given to a rank whose link is down is lost
Phase = Literal["gathering", "listing", "waiting", "deciding", "staging", "checking", "releasing"]


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
    check_again_s: float = 0.0  # when ranks that have not answered are asked again
    failed_steps: dict[StepId, str] = field(default_factory=dict)
    planned_s: float = 0.0
    notes: list[str] = field(default_factory=list)
    markers_call: int = 0
    withdrawn: set[int] = field(default_factory=set)  # ranks that asked and could not wait
    ran_out_on: str = ""  # what was awaited, all ranks having asked, when the first of them withdrew
    is_agreement: bool = False  # all ranks ask for the step and for no bytes: it may have another world size (R27)
    homes: dict[int, str] = field(default_factory=dict)  # rank of the step -> the host that brings its shard together
    unread: str = ""  # why durable storage could not say what it has: then nothing is certain to be missing

    def enter(self, now: float, phase: Phase) -> None:
        """Begin a phase: its deadline counts from now."""
        self.phase, self.phase_since_s = phase, now

    @property
    def is_adopting(self) -> bool:
        """A get without a step adopts what it returns; get(step=S) only reads (R22)."""
        return self.only_step is None


class Staging:
    """Rounds that have decided, for the catalog."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog

    def is_due(self, job: str) -> bool:
        """True from the moment when all ranks of a job's round have asked until it is over."""
        active = self.catalog.rounds.active.get(job)
        return active is not None and active.phase != "gathering"

    # -- staging ------------------------------------------------------------------------------

    def start(self, now: float, active: Round) -> None:
        """Order every host to bring its ranks' shards together and verify them."""
        job, result = self.catalog.jobs[active.job], active.plan
        if result is None or result.step is None:
            raise ValueError("staging needs a plan")
        needed = {str(t.source) for t in result.transfers if t.tier == "peer"}
        needed |= set(active.homes.values()) if active.is_agreement else set()  # perhaps where no rank sits
        if not all(self.catalog.hosts.is_live(host) for host in needed):
            self.catalog.rounds.plan_again(now, active)
            return
        active.enter(now, "staging")
        active.staged.clear()
        active.checked.clear()
        runs: dict[int, list[list[Any]]] = {}
        for t in result.transfers:
            runs.setdefault(t.rank, []).append([t.tier, t.source, t.first_chunk, t.chunks_count])
        durable = place_of(job.attempts[active.attempt].config, job.markers.get(result.step))
        for rank, home in sorted(active.homes.items()):
            shard = ShardId(job.name, result.step.attempt, result.step.step, rank)
            holders = [h for h in job.copies.get(result.step, {}).get(rank, {}) if self.catalog.hosts.is_live(h)]
            body = {
                "job": job.name, "round": active.number, "rank": rank, "shard": shard_to_wire(shard),
                "spec": spec_to_wire(result.specs[rank]), "runs": runs.get(rank, []), "durable": durable,
                "holders": sorted(holders), "attempt": active.attempt,
            }  # fmt: skip
            self.catalog.tell(home, "stage", body)

    def staged(self, now: float, body: Body) -> None:
        """A host staged one rank's shard, or says which chunks their sources lack (R25)."""
        active = self._current(body)
        if active is None or active.phase != "staging" or active.plan is None:
            return
        rank = int(body["rank"])
        if not body["ok"]:
            self._staging_failed(now, active, body)
            return
        active.staged[rank] = body
        if len(active.staged) < len(active.homes):
            return
        if active.is_agreement:
            self._adopt(now, active)
        else:
            active.enter(now, "checking")
            self._order_checks(now, active)

    def _staging_failed(self, now: float, active: Round, body: Body) -> None:
        """Plan anew without the chunks that their sources say they lack; anything else fails the get, never the step.

        A broken connection, a deadline or a lack of room says nothing about the bytes (R25).
        """
        job, result = self.catalog.jobs[active.job], active.plan
        if result is None or result.step is None:
            return
        step, rank, bad = result.step, int(body["rank"]), body.get("bad", {})
        if not bad:
            self.catalog.rounds.fail(
                active, "RecoveryError",
                f"step {step.step} (attempt {step.attempt}) could not be brought to rank {rank} on host "
                f"{active.homes[rank]}: {body['why']}. Nothing is known to be lost and no older step was "
                "taken: call get() again once the cause is gone",
            )  # fmt: skip
            return
        for source, chunks in bad.items():
            copy = job.copies.get(step, {}).get(rank, {}).get(source)
            if copy is None:
                continue
            missing = copy.missing | frozenset(int(i) for i in chunks)
            if len(missing) >= copy.spec.chunks_count:
                job.drop_copy(copy.shard, source)
            else:
                job.add_copy(Copy(copy.shard, copy.spec, copy.host, missing))
        active.notes.append(f"rank {rank}: {body['why']}")
        if set(bad) == {"durable"}:  # the plan turns to it only for what is nowhere else
            active.failed_steps[step] = str(body["why"])
        self.catalog.rounds.plan_again(now, active)

    def tick(self, now: float, active: Round) -> None:
        """A rank whose link was down has not heard its check order: give it again, it may be repeated."""
        if now >= active.check_again_s:
            self._order_checks(now, active)

    def _order_checks(self, now: float, active: Round) -> None:
        active.check_again_s = now + CHECK_AGAIN_S
        for rank, call in active.calls.items():
            if rank not in active.checked:
                self.catalog.tell(call.host_id, "check", {"job": active.job, "round": active.number, "rank": rank})

    def checked(self, now: float, body: Body) -> None:
        """A rank compared `into=` with the manifest (R26)."""
        active = self._current(body)
        if active is None or active.phase != "checking":
            return
        if not body["ok"]:
            self.catalog.rounds.fail(active, str(body["error"][0]), f"rank {body['rank']}: {body['error'][1]}")
            return
        active.checked.add(int(body["rank"]))
        if len(active.checked) == len(active.calls):
            self._adopt(now, active)

    def _current(self, body: Body) -> Round | None:
        active = self.catalog.rounds.active.get(str(body["job"]))
        return active if active is not None and active.number == body["round"] else None

    def _adopt(self, now: float, active: Round) -> None:
        """Every byte is there and verified: the step becomes this attempt's own, then all ranks hear of it (R22)."""
        job, result = self.catalog.jobs[active.job], active.plan
        attempt = job.attempts[active.attempt]
        if result is None or result.step is None:
            raise ValueError("an adoption needs a plan")
        active.enter(now, "releasing")
        if not active.is_adopting:
            self._release(now, active)
            return
        step = result.step
        if step not in job.commits:
            ranks = range(len(result.specs))
            digests = tuple(result.digests[r] for r in ranks)
            hosts = tuple(tuple(sorted(job.copies.get(step, {}).get(r, {}))) for r in ranks)
            fact = StepCommitted(
                job.name, step.attempt, step.step, len(ranks), digests, hosts, attempt.level_asked, True,
                ADOPTED, self.catalog.wall_s,
            )  # fmt: skip
            self.catalog.record(fact)
        self.catalog.record(RestoreReleased(job.name, attempt.ordinal))

    def apply_released(self, now: float, fact: RestoreReleased, *, is_replay: bool) -> None:
        """The word has spread that everything was staged: from here on no rank can get another step (R23)."""
        job = self.catalog.jobs.get(fact.job)
        if job is not None and fact.attempt in job.attempts:
            job.attempts[fact.attempt].is_released = True
        active = self.catalog.rounds.active.get(fact.job)
        if not is_replay and active is not None and active.attempt == fact.attempt and active.phase == "releasing":
            self._release(now, active)

    def _release(self, now: float, active: Round) -> None:
        job, result = self.catalog.jobs[active.job], active.plan
        if result is None or result.step is None:
            raise ValueError("a release needs a plan")
        del self.catalog.rounds.active[active.job]
        attempt = job.attempts[active.attempt]
        before = job.attempts.get(attempt.parent) if attempt.parent is not None else None
        trained_step = before.trained_step if before is not None else -1  # no copy may be left of it
        trained_step = max((trained_step, *(s.step for s in (*job.copies, *job.commits))))
        for seat in attempt.seats.values():
            seat.last_active_s = now
        shared = {
            "step": result.step.step, "attempt": result.step.attempt, "verdict": result.verdict, "why": result.why,
            "round": active.number, "ranks_moved": list(result.ranks_moved),
            "moved_bytes": result.moved_bytes,
            "bytes": {"local": result.bytes_local, "peer": result.bytes_peer, "durable": result.bytes_durable},
            "rejected": [[r.step.attempt, r.step.step, r.reason] for r in result.rejected[:10]],
            "steps_lost": max(0, trained_step - result.step.step),
            "seconds": {
                "gather": active.planned_s - active.since_s,
                "transfer": now - active.planned_s,
            },
            "notes": active.notes[:10],
        }  # fmt: skip
        self.catalog.observer.restored(active, shared)
        for rank, call in active.calls.items():
            staged = {} if active.is_agreement else active.staged[rank]
            self.catalog.answer(call, {**shared, **{key: staged[key] for key in ("shard", "digest") if key in staged}})
        if active.is_adopting and not active.is_agreement:
            self.catalog.room.grow(job, attempt)
        self.catalog.repair.consider(now, job)

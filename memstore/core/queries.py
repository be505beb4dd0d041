"""What people and readers may ask: status, steps, dry runs, single shards, removal. Pure; changes no attempt (R27)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from memstore.core.drops import drop_copy
from memstore.core.events import Body, shard_to_wire, spec_to_wire
from memstore.core.facts import JobRemoved, StepRetired
from memstore.core.job import Call, Job
from memstore.core.problems import problems
from memstore.core.survival import counted_odds, held_for, survival
from placement.domains import is_finer
from placement.odds import survival_odds
from recovery.inventory import ShardId, StepId
from recovery.lineage import in_lineage
from recovery.planner import plan
from recovery.simulate import what_if

if TYPE_CHECKING:
    from memstore.core.catalog import Catalog

ASK_DEADLINE_S = 300.0  # re-digesting a large host takes a while; a host that answers later is left out


@dataclass(slots=True)
class Ask:
    """A question put to every live host."""

    call: Call
    waits: set[str]
    answers: dict[str, Any] = field(default_factory=dict)


class Queries:
    """Answers for the catalog."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.asks: dict[int, Ask] = {}
        self.reads: dict[int, tuple[Call, ShardId, Body]] = {}
        self.count = 0

    def ask(self, verb: str, call: Call) -> None:
        """Dispatch one question."""
        handlers: dict[str, Callable[[Call], None]] = {
            "status": self._status,
            "steps": self._steps,
            "plan": self._plan,
            "read": self._read,
            "verify": self._verify,
            "rm": self._remove,
            "retire": self._retire,
            "drop": lambda call: drop_copy(self.catalog, self._job(call), call),
        }
        if verb in handlers:
            handlers[verb](call)
        else:
            self.catalog.refuse(call, "ProtocolError", f"the controller does not know the verb {verb!r}")

    def _job(self, call: Call) -> Job | None:
        name = str(call.body.get("job", ""))
        job = self.catalog.jobs.get(name)
        if job is None:
            have = ", ".join(sorted(self.catalog.jobs)) or "none"
            self.catalog.refuse(call, "RecoveryError", f"the store holds no job {name!r}: it has {have}")
        return job

    # -- status -------------------------------------------------------------------------------

    def _status(self, call: Call) -> None:
        now = self.catalog.now
        hosts, holds = [], self._holds()
        for host, state in sorted(self.catalog.hosts.states.items()):
            info = state.info
            hosts.append(
                {
                    "host": host, "labels": dict(info.labels), "address": f"{info.address}:{info.port}",
                    "status": state.status, "why": state.why, "status_s": now - state.since_s,
                    "heard_s": now - state.last_heard_s, "stats": dict(state.stats), "machine": info.machine,
                    "is_explicit": info.is_explicit, "holds": holds.get(host, []),
                    "drains_s": self.catalog.drains.due_s(host), "drain_left": self.catalog.drains.left(host),
                    "is_on_probation": self.catalog.hosts.is_on_probation(now, host),
                    "up_s": max(0.0, self.catalog.wall_s - info.incarnation / 1e9),  # it is its start (R3)
                    "pushes": sum(1 for s, _ in self.catalog.repair.pushes.values() if s == host),
                }
            )  # fmt: skip
        body: Body = {
            "term": self.catalog.log.term,
            "hosts": hosts,
            "failure_domains": list(self.catalog.rules.failure_domains),
            "jobs": [self._job_status(job) for _, job in sorted(self.catalog.jobs.items())],
        }
        self.catalog.answer(call, {**body, "problems": problems(body)})

    def _newest_commit(self, job: Job) -> StepId | None:
        """The newest committed step of the lineage."""
        spans = job.spans(job.newest.ordinal) if job.newest is not None else ()
        return max((s for s in job.commits if in_lineage(spans, s)), default=None)

    def _holds(self) -> dict[str, list[str]]:
        """Host -> hosts whose ranks' newest committed shards lie there, over all jobs; itself first."""
        table: dict[str, dict[str, None]] = {}
        for job in self.catalog.jobs.values():
            newest, attempt = self._newest_commit(job), job.newest
            if newest is not None and attempt is not None:
                rank_hosts = {rank: seat.host_id for rank, seat in attempt.seats.items()}
                for host, owners in held_for(rank_hosts, job.copies.get(newest, {}), self.catalog.hosts.states).items():
                    table.setdefault(host, {}).update(dict.fromkeys(owners))
        return {host: sorted(owners, key=lambda owner: (owner != host, owner)) for host, owners in table.items()}

    def _survives(self, job: Job, step: StepId) -> list[Body]:
        """What may be lost now with every shard of the step keeping a copy, per level of failure domains."""
        commit, ranks = job.commits[step], job.copies.get(step, {})
        shards = [
            [c for c in ranks.get(rank, {}).values() if c.spec.digest == commit.digests[rank]]
            for rank in range(commit.world_size)
        ]
        topology = self.catalog.hosts.topology(self.catalog.hosts.live_ids())
        return [
            {"level": row.level, "tolerated": row.tolerated_count, "fatal": list(row.fatal)}
            for row in survival(shards, topology)
        ]

    def _job_status(self, job: Job) -> Body:
        attempt = job.newest
        body: Body = {"job": job.name, "attempt": None, "steps": self._step_rows(job)}
        if attempt is None:
            return body
        spans = job.spans(attempt.ordinal)
        newest = self._newest_commit(job)
        placement = self.catalog.placement(job)
        durable = self.catalog.durable.state(job.name)
        copies = self._fewest_copies(job, newest) if newest is not None else 0
        body.update(
            attempt=attempt.ordinal,
            phase=attempt.phase,
            world_size=attempt.world_size,
            ranks_alive=sum(not s.is_gone and self.catalog.hosts.is_live(s.host_id) for s in attempt.seats.values()),
            rank_hosts={str(rank): seat.host_id for rank, seat in attempt.seats.items()},
            training_step=max((seat.step for seat in attempt.seats.values()), default=-1),
            committed_step=newest.step if newest is not None else None,
            committed_attempt=newest.attempt if newest is not None else None,
            committed_s=self.catalog.wall_s - job.commits[newest].wall_s if newest is not None else None,
            degraded=job.commits[newest].reason if newest is not None and job.commits[newest].is_degraded else "",
            copies=copies,
            missing_copies=self._missing_copies(job, newest, attempt.replicas) if newest is not None else 0,
            replicas=attempt.replicas,
            survives=self._survives(job, newest) if newest is not None else [],
            refusals=sorted({f"{host}: {why}" for (_, host), why in job.refusals.items()})[:5],
            parent=attempt.parent,
            parent_step=attempt.parent_step,
            level=placement.level if placement is not None else None,
            level_asked=attempt.level_asked,
            is_level_finer=placement is not None
            and is_finer(placement.level, attempt.level_asked, self.catalog.hosts.failure_domains),
            targets={h: list(t) for h, t in placement.targets.items()} if placement is not None else {},
            warnings=list(placement.warnings) if placement is not None else [],
            unmet=[f"{u.owner} -> {u.target}: {u.why}" for u in placement.unmet] if placement is not None else [],
            odds_one_more=self._odds(placement, attempt.replicas),
            durable=attempt.config.get("durable"),
            durable_step=max((s.step for s in job.markers if in_lineage(spans, s)), default=None),
            durable_problem=durable.problem,
            durable_abandoned=durable.abandoned_count,
            durable_s=self.catalog.now - durable.last_done_s if durable.last_done_s is not None else None,
            resume_step=attempt.resume_step,
            is_restoring=job.name in self.catalog.rounds.active,
            skipped=sum(phase == "abandoned" for phase in attempt.steps.values()),
        )
        return body

    def _odds(self, placement: Any, lost_count: int) -> float | None:
        """Chance that losing `lost_count` hosts at once leaves every shard a copy."""
        if placement is None or len(placement.targets) < lost_count:
            return None
        try:
            return float(survival_odds(placement, lost_count))
        except ValueError:
            return None

    def _odds_table(self, job: Job, replicas: int) -> list[list[float]]:
        """Rows [hosts lost at once, chance that every shard of the newest committed step keeps a copy]."""
        step, hosts = self._newest_commit(job), self.catalog.hosts.live_ids()
        if step is None:
            return []
        ranks = job.copies.get(step, {})
        shards = [
            [h for h, c in ranks.get(rank, {}).items() if h in hosts and not c.missing]
            for rank in range(job.commits[step].world_size)
        ]
        table = [(lost, counted_odds(shards, hosts, lost)) for lost in range(1, replicas + 2)]
        return [[lost, chance] for lost, chance in table if chance is not None]

    def _fewest_copies(self, job: Job, step: StepId) -> int:
        """Distinct host-level domains of the shard with the fewest."""
        commit, ranks = job.commits[step], job.copies.get(step, {})
        if len(ranks) < commit.world_size:
            return 0
        whole = [[h for h, c in hosts.items() if not c.missing] for hosts in ranks.values()]
        return min(len(self.catalog.hosts.domains(hosts)) for hosts in whole)

    def _missing_copies(self, job: Job, step: StepId, replicas: int) -> int:
        """Whole copies that all shards of the step together are short of."""
        ranks = job.copies.get(step, {})
        whole = (sum(not c.missing for c in ranks.get(r, {}).values()) for r in range(job.commits[step].world_size))
        return sum(max(0, replicas - count) for count in whole)

    def _step_rows(self, job: Job) -> list[Body]:
        attempt = job.newest
        spans = job.spans(attempt.ordinal) if attempt is not None else ()
        rows = []
        for step in sorted({*job.commits, *job.markers, *job.copies}, reverse=True):
            commit = job.commits.get(step)
            ranks = job.copies.get(step, {})
            rows.append(
                {
                    "attempt": step.attempt, "step": step.step, "committed": commit is not None,
                    "degraded": commit.reason if commit is not None and commit.is_degraded else "",
                    "durable": step in job.markers, "in_lineage": in_lineage(spans, step),
                    "retired": job.retired.get(step, ""),
                    "copies": self._fewest_copies(job, step) if commit is not None else 0,
                    "shards": len(ranks),
                    "world_size": commit.world_size if commit is not None else None,
                    "nbytes": sum(next(iter(h.values())).spec.nbytes for h in ranks.values() if h),
                    "shard_nbytes_max": max((c.spec.nbytes for h in ranks.values() for c in h.values()), default=0),
                    "hosts": sorted({host for hosts in ranks.values() for host in hosts}),
                    "age_s": self.catalog.wall_s - commit.wall_s if commit is not None else None,
                }
            )  # fmt: skip
        return rows

    def _steps(self, call: Call) -> None:
        job = self._job(call)
        if job is not None:
            newest = job.newest.ordinal if job.newest is not None else None
            self.catalog.answer(call, {"steps": self._step_rows(job), "attempt": newest})

    # -- dry runs and single shards -------------------------------------------------------------

    def _plan(self, call: Call) -> None:
        """What would be recovered, from where, if the named hosts were lost now (memstore plan --lose)."""
        job = self._job(call)
        if job is None or job.newest is None:
            return
        lost = [str(h) for h in call.body.get("lose", ())]
        unknown = [h for h in lost if h not in self.catalog.hosts.states]
        if unknown:
            known = ", ".join(sorted(self.catalog.hosts.states))
            self.catalog.refuse(call, "ConfigError", f"no host {', '.join(unknown)} in the store: it has {known}")
            return
        attempt = job.newest
        result = what_if(
            job.inventory(live=self.catalog.hosts.live_ids(), silent=()),
            job.spans(attempt.ordinal),
            lost,
            world_size=attempt.world_size,
            rank_hosts={rank: seat.host_id for rank, seat in attempt.seats.items()},
        )
        committed = max((s.step for s in job.commits), default=None)
        self.catalog.answer(
            call,
            {
                "job": job.name, "lost_hosts": lost, "verdict": result.verdict, "why": result.why,
                "step": result.step.step if result.step is not None else None,
                "attempt": result.step.attempt if result.step is not None else None,
                "committed_step": committed, "ranks_moved": list(result.ranks_moved),
                "bytes": {"local": result.bytes_local, "peer": result.bytes_peer, "durable": result.bytes_durable},
                "transfers": [
                    [t.rank, t.tier, t.source, t.target_host, t.nbytes] for t in result.transfers if t.tier != "local"
                ][:1000],
                "rejected": [[r.step.attempt, r.step.step, r.reason] for r in result.rejected[:20]],
                "odds": self._odds_table(job, attempt.replicas),
            },
        )  # fmt: skip

    def _read(self, call: Call) -> None:
        """Bring one rank's shard to the caller's host, without a barrier and without adopting anything (R27)."""
        job = self._job(call)
        if job is None:
            return
        if job.newest is None:
            why = f"job {job.name!r} has copies and no attempt: connect to it first"
            self.catalog.refuse(call, "RecoveryError", why)
            return
        attempt, rank, wanted = job.newest, int(call.body["rank"]), call.body.get("step")
        spans, of_attempt = job.spans(attempt.ordinal), call.body.get("of_attempt")
        known = [s for s in {*job.copies, *job.commits, *job.markers} if of_attempt in (None, s.attempt)]
        found = [s for s in known if s.step == wanted]
        only = max(found, key=lambda s: (in_lineage(spans, s), s), default=None)
        if wanted is not None and only is None:
            self.catalog.refuse(call, "RecoveryError", f"job {job.name!r} has no step {wanted}")
            return
        size = job.commits[only].world_size if only in job.commits and only is not None else attempt.world_size
        result = plan(
            job.inventory(live=self.catalog.hosts.live_ids(), silent=()), job.spans(attempt.ordinal),
            world_size=size, rank_hosts=dict.fromkeys(range(size), call.host_id), only_step=only,
        )  # fmt: skip
        if result.step is None or rank not in result.specs:
            why = f"rank {rank} is not one of its {len(result.specs)} ranks" if result.step is not None else result.why
            self.catalog.refuse(call, "RecoveryError", f"job {job.name!r}: {why}")
            return
        self.count += 1
        shard = ShardId(job.name, result.step.attempt, result.step.step, rank)
        holders = [h for h in job.copies.get(result.step, {}).get(rank, {}) if self.catalog.hosts.is_live(h)]
        answer = {"step": shard.step, "attempt": shard.attempt, "verdict": result.verdict, "why": result.why}
        self.reads[-self.count] = (call, shard, answer)
        self.catalog.tell(
            call.host_id, "stage",
            {
                "job": job.name, "round": -self.count, "rank": rank, "shard": shard_to_wire(shard),
                "spec": spec_to_wire(result.specs[rank]), "attempt": attempt.ordinal, "holders": sorted(holders),
                "durable": attempt.config.get("durable"),
                "runs": [
                    [t.tier, t.source, t.first_chunk, t.chunks_count] for t in result.transfers if t.rank == rank
                ],
            },
        )  # fmt: skip

    def is_read(self, shard: ShardId, host_id: str) -> bool:
        """True while a read brings the shard to this host: its copy there is not surplus yet (R7)."""
        return any(call.host_id == host_id and shard == read for call, read, _ in self.reads.values())

    def staged(self, body: Body) -> None:
        """A shard read by `_read` is at its reader's host, or could not be brought there."""
        found = self.reads.pop(int(body["round"]), None)
        if found is None:
            return
        call, _, answer = found
        if body["ok"]:
            self.catalog.answer(call, {**answer, "shard": body["shard"], "digest": body["digest"]})
        else:
            self.catalog.refuse(call, "RecoveryError", f"step {answer['step']}: {body['why']}")

    # -- verify, rm ---------------------------------------------------------------------------

    def _verify(self, call: Call) -> None:
        """Every live host re-digests what it holds; steps that were retired may be offered again (R25, R30)."""
        self.count += 1
        live = self.catalog.hosts.live_ids()
        self.asks[self.count] = Ask(call, set(live))
        for job in self.catalog.jobs.values():
            if call.body.get("job") in (None, job.name):
                job.retired.clear()
        for host in live:
            self.catalog.tell(host, "ask", {"ask": self.count, "what": "verify", "job": call.body.get("job")})

    def answered(self, host_id: str, body: Body) -> None:
        """One host answered a question put to all."""
        found = self.asks.get(int(body["ask"]))
        if found is not None:
            found.waits.discard(host_id)
            found.answers[host_id] = body["value"] if body["ok"] else {"error": body["why"]}
            self._finish_asks()

    def _finish_asks(self) -> None:
        for number, ask in list(self.asks.items()):
            ask.waits = {h for h in ask.waits if self.catalog.hosts.is_live(h)}
            if not ask.waits or self.catalog.now - ask.call.since_s > ASK_DEADLINE_S:
                del self.asks[number]
                self.catalog.answer(ask.call, {"hosts": ask.answers, "silent": sorted(ask.waits)})

    def tick(self) -> None:
        """Hosts that died do not answer."""
        self.reads = {n: read for n, read in self.reads.items() if self.catalog.hosts.is_live(read[0].host_id)}
        self._finish_asks()

    def _remove(self, call: Call) -> None:
        """Drop every copy of a job in RAM, and its facts."""
        job = self._job(call)
        if job is None:
            return
        attempt = job.newest
        seats = attempt.seats.values() if attempt is not None and attempt.phase != "closed" else ()
        alive = [s for s in seats if not s.is_gone and self.catalog.hosts.is_live(s.host_id)]
        if alive and not call.body.get("force"):
            seat = alive[0]
            self.catalog.refuse(
                call, "JobBusyError",
                f"job {job.name!r} is being trained: rank {seat.rank} on host {seat.host_id} (pid {seat.pid}) is "
                "alive. Stop it first, or pass --force",
            )  # fmt: skip
            return
        shards = [[job.name, s.attempt, s.step, rank] for s, ranks in job.copies.items() for rank in ranks]
        for host in self.catalog.hosts.live_ids():
            self.catalog.tell(host, "drop", {"shards": shards, "removed": [job.name, job.newest_ordinal]})
        self.catalog.record(JobRemoved(job.name, job.newest_ordinal))
        self.catalog.answer(call, {"job": job.name, "shards": len(shards)})

    def _retire(self, call: Call) -> None:
        """A person says that a step must not be offered again (R25)."""
        job = self._job(call)
        if job is None:
            return
        self.catalog.record(
            StepRetired(job.name, int(call.body["attempt"]), int(call.body["step"]), str(call.body["reason"]))
        )
        self.catalog.answer(call, {})

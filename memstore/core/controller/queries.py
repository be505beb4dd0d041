"""What people and readers may ask: status, steps, dry runs, single shards, removal. Pure; changes no attempt (R27)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from memstore.core.attempts.roll_call import roll_call
from memstore.core.cluster.facts import StepRetired
from memstore.core.cluster.job import Attempt, Call, Job
from memstore.core.cluster.text import listed, listed_pins
from memstore.core.durable.last_copies import LastCopies
from memstore.core.durable.paths import place_of
from memstore.core.repair.drop_copy import drop_copy
from memstore.core.report.gone_steps import gone_steps
from memstore.core.report.problems import problems
from memstore.core.report.status import StatusReport
from memstore.core.report.timeline import gone_rows, timeline
from memstore.core.wire.messages import Body, shard_from_wire, shard_to_wire, spec_to_wire
from recovery.inventory import ShardId, StepId
from recovery.lineage import in_lineage
from recovery.planner import RecoveryPlan, plan
from recovery.simulate import what_if

if TYPE_CHECKING:
    from memstore.core.controller.machine import Catalog

TERM_SHIFT, TERMS = 32, 1 << 29  # a term's numbers stay below 2**61
ASK_DEADLINE_S = 300.0  # re-digesting a large host takes a while; a host that answers later is left out


@dataclass(slots=True)
class Ask:
    """A question put to every live host."""

    call: Call
    waits: set[str]
    answers: dict[str, Any] = field(default_factory=dict)
    died: set[str] = field(default_factory=set)  # hosts that died before they answered


class Queries:
    """Answers for the catalog."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.report, self.last_copies = StatusReport(catalog), LastCopies(catalog)
        self.asks: dict[int, Ask] = {}
        self.reads: dict[int, tuple[Call, ShardId, Body]] = {}
        self.retiring: dict[StepRetired, list[Call]] = {}  # recorded, not spread yet
        # Looked at since the last tick, by job and verb: all ranks that wait ask at one moment.
        self.roll_calls: dict[tuple[str, str], Body] = {}
        # Of what is ordered, for its report: none that a former controller ordered may answer a read of ours.
        self.count = catalog.log.term % TERMS << TERM_SHIFT

    def ask(self, verb: str, call: Call) -> None:
        """Dispatch one question."""
        handlers: dict[str, Callable[[Call], None]] = {
            "status": self._status,
            "roll_call": self._roll_call,
            "steps": self._steps,
            "plan": self._plan,
            "read": self._read,
            "verify": self._verify,
            "rm": self._remove,
            "retire": self._retire,
            "events": self._events,
            "last_copies": self._last_copies,
            "pin": lambda call: self._with_job(call, self.catalog.pins.pin),
            "fork": lambda call: self._with_job(call, self.catalog.forks.ask),
            "persist": lambda call: self._with_job(call, self.catalog.persists.ask),
            "twins": self.catalog.view.twins.told,
            "unpin": lambda call: self._with_job(call, self.catalog.pins.unpin),
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
            story = self.catalog.orphans.stories.get(name, "")
            gone = f" ({story})" if story else ""
            self.catalog.refuse(call, "RecoveryError", f"the store holds no job {name!r}{gone}: it has {have}")
        return job

    def _with_job(self, call: Call, work: Callable[[Job, Call], None]) -> None:
        job = self._job(call)
        if job is not None:
            work(job, call)

    def _attempt(self, call: Call, job: Job | None) -> Attempt | None:
        if job is not None and job.newest is None:
            why = f"job {job.name!r} has copies and no attempt: connect to it first"
            self.catalog.refuse(call, "RecoveryError", why)
        return job.newest if job is not None else None

    # -- status -------------------------------------------------------------------------------

    def _status(self, call: Call) -> None:
        body = self.report.body()
        self.catalog.answer(call, {**body, "problems": problems(body)})

    def _roll_call(self, call: Call) -> None:
        """Who has come to what the caller waits for, and who is awaited."""
        key = (str(call.body["job"]), str(call.body["of"]))
        found = self.roll_calls.get(key) or roll_call(self.catalog, *key)
        if found is not None:
            self.roll_calls[key] = found
        self.catalog.answer(call, {"found": found})

    def _steps(self, call: Call) -> None:
        job = self._job(call)
        if job is not None:
            newest = job.newest.ordinal if job.newest is not None else None
            self.catalog.answer(call, {**timeline(self.catalog, job), "attempt": newest})

    def _events(self, call: Call) -> None:
        """What happened since a number, of one job or of all; things of the store itself come with either."""
        job, since = call.body.get("job"), int(call.body.get("since") or 0)
        page = self.catalog.observer.chronicle.page(since, None if job is None else str(job))
        self.catalog.answer(call, {**page, "wall_s": self.catalog.wall_s})

    def _last_copies(self, call: Call) -> None:
        """Say what would be lost with the copies in RAM, of one job or of all."""
        job = self._job(call) if call.body.get("job") is not None else None
        if job is not None or call.body.get("job") is None:
            self.last_copies.ask(call, [job] if job is not None else list(self.catalog.jobs.values()))

    # -- dry runs and single shards -------------------------------------------------------------

    def _plan(self, call: Call) -> None:
        """Say what a get would recover now, from where, if the named hosts, or none, were lost before it."""
        job = self._job(call)
        attempt = self._attempt(call, job)
        if job is None or attempt is None:
            return
        lost = [str(h) for h in call.body.get("lose", ())]
        unknown = [h for h in lost if h not in self.catalog.hosts.states]
        if unknown:
            known = ", ".join(sorted(self.catalog.hosts.states))
            self.catalog.refuse(call, "ConfigError", f"no host {', '.join(unknown)} in the store: it has {known}")
            return
        result = self._what_if(job, attempt, lost, attempt.world_size)
        if result.step is not None and result.world_size not in (None, attempt.world_size):
            result = self._what_if(job, attempt, lost, result.world_size)
        committed = max((s.step for s in job.commits), default=None)
        there = self._survivors(lost)
        trained = max((attempt.trained_step, *(s.step for s in job.commits)))
        self.catalog.answer(
            call,
            {
                "job": job.name, "lost_hosts": lost, "verdict": result.verdict, "why": result.why,
                "step": result.step.step if result.step is not None else None,
                "attempt": result.step.attempt if result.step is not None else None,
                "committed_step": committed,
                "steps_lost": max(0, trained - result.step.step) if result.step is not None else None,
                "ranks_moved": list(result.ranks_moved),
                "world_size": attempt.world_size, "step_world_size": result.world_size,
                "moved_bytes": result.moved_bytes,
                "bytes": {"local": result.bytes_local, "peer": result.bytes_peer, "durable": result.bytes_durable},
                "transfers": [
                    [t.rank, t.tier, t.source, _said(t.target_host, there), t.nbytes]
                    for t in result.transfers
                    if t.tier != "local"
                ][:1000],
                "rejected": [[r.step.attempt, r.step.step, r.reason] for r in result.rejected[:20]],
                "gone": gone_rows(job, result.gone),
                "unlisted": self.catalog.durable_looks.unlisted(job),
                "odds": self.report.odds_table(job, attempt.replicas),
            },
        )  # fmt: skip

    def _survivors(self, lost: list[str]) -> set[str]:
        return set(self.catalog.hosts.live_ids()) - set(lost)

    def _what_if(self, job: Job, attempt: Attempt, lost: list[str], world_size: int) -> RecoveryPlan:
        """Plan a get after the loss for so many ranks; ranks that the attempt lacks are on its hosts in turn.

        Where none of its hosts is left, the ranks are on the store's others, but for spare ones.
        """
        seats = {rank: seat.host_id for rank, seat in attempt.seats.items()}
        hosts, there = sorted(set(seats.values())), self._survivors(lost)
        if there.isdisjoint(hosts):
            states = self.catalog.hosts.states
            seats, hosts = {}, sorted(h for h in there if states[h].info.labels.get("memstore") != "replica") or hosts
        gone = gone_steps(self.catalog, job)  # before the loss: what it takes is told step by step
        return what_if(
            job.inventory(live=self.catalog.hosts.live_ids(), silent=(), gone=gone), job.spans(attempt.ordinal),
            {*lost, *(host for host in hosts if host not in there)},
            world_size=world_size,
            rank_hosts={rank: seats.get(rank, hosts[rank % len(hosts)]) for rank in range(world_size)},
        )  # fmt: skip

    def _read(self, call: Call) -> None:
        """Bring one rank's shard to the caller's host, without a barrier and without adopting anything (R27)."""
        job = self._job(call)
        attempt = self._attempt(call, job)
        if job is None or attempt is None:
            return
        rank, wanted = int(call.body["rank"]), call.body.get("step")
        spans, of_attempt = job.spans(attempt.ordinal), call.body.get("of_attempt")
        known = [s for s in {*job.copies, *job.commits, *job.markers} if of_attempt in (None, s.attempt)]
        found = [s for s in known if s.step == wanted]
        only = max(found, key=lambda s: (in_lineage(spans, s), s), default=None)
        if wanted is not None and only is None:
            have = sorted({s.step for s in known})
            what = f"its steps are {listed(have)}" if have else "it has none"
            self.catalog.refuse(call, "RecoveryError", f"job {job.name!r} has no step {wanted}: {what}")
            return
        result = self._plan_at(call.host_id, job, attempt, only, attempt.world_size)
        if result.step is not None and result.world_size not in (None, attempt.world_size):
            result = self._plan_at(call.host_id, job, attempt, result.step, result.world_size)
        if result.step is None or rank not in result.specs:
            why = f"rank {rank} is not one of its {len(result.specs)} ranks" if result.step is not None else result.why
            self.catalog.refuse(call, "RecoveryError", f"job {job.name!r}: {why}")
            return
        self.count += 1
        shard = ShardId(job.name, result.step.attempt, result.step.step, rank)
        holders = [h for h in job.copies.get(result.step, {}).get(rank, {}) if self.catalog.hosts.is_live(h)]
        answer = {"step": shard.step, "attempt": shard.attempt, "verdict": result.verdict, "why": result.why}
        if call.body.get("chunks") is not None:
            answer["excerpt"] = -self.count
        self.reads[-self.count] = (call, shard, answer)
        self.catalog.tell(
            call.host_id, "stage",
            {
                "job": job.name, "round": -self.count, "rank": rank, "shard": shard_to_wire(shard),
                "spec": spec_to_wire(result.specs[rank]), "attempt": attempt.ordinal, "holders": sorted(holders),
                "durable": place_of(attempt.config, job.markers.get(result.step)),
                "chunks": call.body.get("chunks"), "stream": call.body.get("stream"),
                "runs": [
                    [t.tier, t.source, t.first_chunk, t.chunks_count] for t in result.transfers if t.rank == rank
                ],
            },
        )  # fmt: skip

    def _plan_at(self, host: str, job: Job, attempt: Attempt, only: StepId | None, world_size: int) -> RecoveryPlan:
        """What it takes to bring all ranks' shards to one host; nothing is planned for another world size (R27)."""
        return plan(
            job.inventory(live=self.catalog.hosts.live_ids(), silent=()), job.spans_to_read(attempt.ordinal, only),
            world_size=world_size, rank_hosts=dict.fromkeys(range(world_size), host), only_step=only,
        )  # fmt: skip

    def is_read(self, shard: ShardId) -> bool:
        """True while a read brings the shard to some host: no copy is surplus yet, least of all its source (R7)."""
        return any(shard == read for _, read, _ in self.reads.values())

    def staged(self, body: Body) -> None:
        """A shard read by `_read` is at its reader's host, or could not be brought there."""
        number = int(body["round"])
        found = self.reads.get(number)
        if found is None or shard_from_wire(body["shard"]) != found[1]:
            return
        call, _, answer = self.reads.pop(number)
        if body["ok"]:
            self.catalog.answer(call, {**answer, "shard": body["shard"], "digest": body["digest"]})
        else:
            self.catalog.refuse(call, "RecoveryError", f"step {answer['step']}: {body['why']}")

    # -- verify, rm ---------------------------------------------------------------------------

    def _verify(self, call: Call) -> None:
        """Every live host re-digests what it holds; what was retired, not torn, may be offered again (R25, R30)."""
        self.count += 1
        live = self.catalog.hosts.live_ids()
        self.asks[self.count] = Ask(call, set(live))
        for job in self.catalog.jobs.values():
            if call.body.get("job") in (None, job.name):
                for step in sorted(job.retired.keys() - job.torn):
                    self.catalog.record(StepRetired(job.name, step.attempt, step.step, ""))
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
            ask.died |= {h for h in ask.waits if not self.catalog.hosts.is_live(h)}
            ask.waits -= ask.died
            if not ask.waits or self.catalog.now - ask.call.since_s > ASK_DEADLINE_S:
                del self.asks[number]
                self.catalog.answer(ask.call, {"hosts": ask.answers, "silent": sorted(ask.waits | ask.died)})

    def host_died(self, host_id: str) -> None:
        """Whoever died does not answer, also if it is back at once: its ranks ask again."""
        self.reads = {n: read for n, read in self.reads.items() if read[0].host_id != host_id}
        for ask in self.asks.values():
            ask.died |= ask.waits & {host_id}
        self._finish_asks()

    def tick(self) -> None:
        """Deadlines."""
        self.roll_calls.clear()
        self._finish_asks()

    def _remove(self, call: Call) -> None:
        """Drop every copy of a job in RAM, and its facts."""
        name = str(call.body.get("job", ""))
        job = Job(name) if name in self.catalog.orphans.stories.keys() - self.catalog.jobs.keys() else self._job(call)
        if job is None:
            return
        attempt = job.newest
        seats = attempt.seats.values() if attempt is not None and attempt.phase != "closed" else ()
        alive = [s for s in seats if s.is_alive and self.catalog.hosts.is_live(s.host_id)]
        if alive and not call.body.get("force"):
            seat = alive[0]
            self.catalog.refuse(
                call, "JobBusyError",
                f"job {job.name!r} is being trained: rank {seat.rank} on host {seat.host_id} (pid {seat.pid}) is "
                "alive. Stop it first, or pass --force as well",
            )  # fmt: skip
            return
        unfinished = self.catalog.forks.unfinished(job)
        if unfinished:
            self.catalog.refuse(
                call, "JobBusyError",
                f"job {job.name!r} is being forked to {unfinished[0]!r}, which is not whole yet: ask again later, "
                "or remove that one first",
            )  # fmt: skip
            return
        if job.pins and not call.body.get("force"):
            self.catalog.refuse(
                call, "JobBusyError",
                f"job {job.name!r} has pins that would be lost with it: {listed_pins(job)}. Take them back with "
                f"`memstore unpin {job.name} NAME`, or pass --force as well",
            )  # fmt: skip
            return
        pins = [[name, pin.attempt, pin.step] for name, pin in sorted(job.pins.items())]
        self.catalog.expiry.remove(job, (call, {"job": job.name, "pins": pins}))

    def _retire(self, call: Call) -> None:
        """A step must not be offered again: somebody says so, or its rank saw that it is torn (R25)."""
        job, body = self._job(call), call.body
        if job is None:
            return
        is_torn, reason = body.get("is_torn") is True, str(body["reason"]) or "somebody said so"
        fact = StepRetired(job.name, int(body["attempt"]), int(body["step"]), reason, is_torn)
        if fact not in self.retiring:
            self.catalog.record(fact)
        self.retiring.setdefault(fact, []).append(call)

    def apply_retired(self, fact: StepRetired) -> None:
        """The word has spread: until then whoever said it would have to say it again to a successor (R16)."""
        job = self.catalog.jobs.get(fact.job)
        if job is not None:  # else it was removed meanwhile
            job.retire(fact)
        if job is not None and fact.is_torn:
            self.catalog.rounds.torn(self.catalog.now, job, StepId(fact.attempt, fact.step))
        for call in self.retiring.pop(fact, ()):
            self.catalog.answer(call, {})

    def forget(self, name: str) -> None:
        """The job was removed: whoever retired a step of it meanwhile has what he asked for."""
        self.last_copies.forget(name)
        for fact in [fact for fact in self.retiring if fact.job == name]:
            for call in self.retiring.pop(fact):
                self.catalog.answer(call, {})


def _said(host: str, there: set[str]) -> str:
    """Return a host's name, or that of the one that takes its place."""
    return host if host in there else f"replacement of {host}"

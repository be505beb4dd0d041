"""Connect is collective: joins gather, an attempt opens as one fact, opening fences the older ones. Pure (R20, R21).

    join --all ranks there--> AttemptOpened recorded --spread--> fencing --every live host answered--> open
                                                                             open --all ranks closed--> closed
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from memstore.core.facts import AttemptClosed, AttemptOpened, RestoreDecided
from memstore.core.job import Attempt, Call, Job, Seat
from placement.domains import is_finer, spread_level
from recovery.inventory import StepId

if TYPE_CHECKING:
    from memstore.core.catalog import Catalog

ACTIVE_WINDOW_S = 60.0  # a launch whose ranks were active this recently is not replaced silently (R20)
FENCE_DEADLINE_S = 10.0  # a silent host is fenced when it answers again, before it serves


@dataclass(slots=True)
class Gathering:
    """Joins of one launch that wait for the rest of their ranks."""

    key: str | None
    world_size: int
    joins: dict[int, Call] = field(default_factory=dict)
    rewind_to: StepId | None = None


class Attempts:
    """Gatherings and attempts of all jobs, for the catalog."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.gatherings: dict[str, Gathering] = {}
        self.opening: dict[str, list[Call]] = {}  # job -> joins to answer when fencing is done
        self.fence_waits: dict[str, tuple[set[str], float]] = {}  # job -> (hosts awaited, deadline)
        self.closes: dict[str, set[int]] = {}  # job -> ranks of the newest attempt that said close

    # -- join ---------------------------------------------------------------------------------

    def join(self, now: float, call: Call) -> None:
        """A rank wants in; answer at once if it is in already, else gather (R20)."""
        body, name = call.body, str(call.body["job"])
        job = self.catalog.jobs.get(name)
        newest = job.newest if job is not None else None
        if newest is not None and self._is_member(newest, body):
            if name in self.opening:
                self.opening[name].append(call)
            else:
                self.catalog.answer(call, self._joined_body(newest))
            return
        refusal = self._refusal(now, job, newest, body)
        if refusal is not None:
            self.catalog.refuse(call, *refusal)
            return
        if newest is not None and self._replaces_seat(newest, body):
            seat = newest.seats[int(body["rank"])]
            seat.host_id, seat.nonce, seat.pid, seat.is_gone = call.host_id, body["nonce"], int(body["pid"]), False
            self.catalog.answer(call, self._joined_body(newest))
            return
        self._gather(name, call)

    def _is_member(self, attempt: Attempt, body: dict[str, Any]) -> bool:
        seat = attempt.seats.get(int(body["rank"]))
        return seat is not None and seat.nonce == body["nonce"] and attempt.phase != "closed"

    def _replaces_seat(self, attempt: Attempt, body: dict[str, Any]) -> bool:
        """Until a rank completed a get or put, a newer join of one rank replaces it inside the attempt."""
        is_same_launch = body["key"] is not None and body["key"] == attempt.key
        is_untouched = not attempt.has_restored and not attempt.has_put and attempt.phase == "open"
        seat = attempt.seats.get(int(body["rank"]))
        return is_same_launch and is_untouched and seat is not None and seat.is_gone

    def _refusal(
        self, now: float, job: Job | None, newest: Attempt | None, body: dict[str, Any]
    ) -> tuple[str, str] | None:
        name, rank, world_size = body["job"], int(body["rank"]), int(body["world_size"])
        if not 0 <= rank < world_size:
            return "ConfigError", f"rank {rank} is outside the world of {world_size} ranks: use 0 to {world_size - 1}"
        if job is not None:
            spent = [a.ordinal for a in job.attempts.values() if a.key is not None and a.key == body["key"]]
            if any(ordinal != newest.ordinal or newest.phase == "closed" for ordinal in spent if newest is not None):
                return "FencedError", (
                    f"job {name!r}: the launch key {body['key']!r} belongs to attempt {max(spent)}, which is closed: "
                    "every launch needs a new key"
                )
        if newest is not None and newest.phase != "closed" and not body.get("takeover"):
            busy = self._busy_seat(now, newest, body)
            if busy is not None:
                return "JobBusyError", (
                    f"job {name!r} is being trained: rank {busy.rank} of attempt {newest.ordinal} is alive on host "
                    f"{busy.host_id} (pid {busy.pid}, step {busy.step}). Stop that launch, use another job name, or "
                    "connect(..., takeover=True) to fence it"
                )
        gathering = self.gatherings.get(name)
        if gathering is not None and gathering.key == body["key"] and gathering.world_size != world_size:
            return "ConfigError", (
                f"job {name!r}: rank {rank} says world_size={world_size}, the ranks waiting say "
                f"{gathering.world_size}: all ranks of one launch must agree"
            )
        return None

    def _busy_seat(self, now: float, attempt: Attempt, body: dict[str, Any]) -> Seat | None:
        if body["launcher"] in attempt.launcher.split(" ") or (body["key"] is not None and body["key"] == attempt.key):
            return None
        for seat in attempt.seats.values():
            is_active = now - seat.last_active_s <= ACTIVE_WINDOW_S
            if not seat.is_gone and is_active and self.catalog.hosts.is_live(seat.host_id):
                return seat
        return None

    def _gather(self, name: str, call: Call) -> None:
        body = call.body
        key, world_size, rank = body["key"], int(body["world_size"]), int(body["rank"])
        gathering = self.gatherings.get(name)
        if gathering is None or gathering.key != key or gathering.world_size != world_size:
            for old in gathering.joins.values() if gathering is not None else ():
                self.catalog.refuse(old, "FencedError", f"job {name!r}: a newer launch began to connect")
            gathering = self.gatherings[name] = Gathering(key, world_size)
        replaced = gathering.joins.get(rank)
        if replaced is not None and replaced.body["nonce"] != body["nonce"]:
            self.catalog.refuse(replaced, "FencedError", f"job {name!r}: a newer process joined as rank {rank}")
        gathering.joins[rank] = call
        if len(gathering.joins) == world_size:
            self._open(name, gathering)

    def _open(self, name: str, gathering: Gathering) -> None:
        del self.gatherings[name]
        joins = [gathering.joins[rank] for rank in range(gathering.world_size)]
        first, job = joins[0].body, self.catalog.jobs.get(name)
        hosts = tuple(call.host_id for call in joins)
        replicas = int(first["config"]["replicas"])
        level = spread_level(self.catalog.hosts.topology(sorted(self.catalog.eligible_hosts(hosts))), replicas).level
        parent = None
        if job is not None and job.newest is not None:
            asked = job.newest.level_asked
            level = asked if is_finer(level, asked, self.catalog.hosts.failure_domains) else level
            parent = None if first.get("fresh") else job.parent_for_next()
        ordinal = max(job.attempts, default=0) + 1 if job is not None else 1
        self.opening.setdefault(name, []).extend(joins)
        self.catalog.record(
            AttemptOpened(
                job=name,
                attempt=ordinal,
                world_size=gathering.world_size,
                parent=parent,
                key=gathering.key,
                is_fresh=bool(first.get("fresh")),
                level_asked=level,
                config=first["config"],
                nonces=tuple(str(call.body["nonce"]) for call in joins),
                hosts=hosts,
                launcher=" ".join(sorted({str(call.body["launcher"]) for call in joins})),
                wall_s=self.catalog.wall_s,
            )
        )
        if gathering.rewind_to is not None:
            to = gathering.rewind_to
            self.catalog.record(RestoreDecided(name, ordinal, 0, to.attempt, to.step, self.catalog.wall_s))

    # -- facts applied ------------------------------------------------------------------------

    def apply_opened(self, now: float, fact: AttemptOpened, *, is_replay: bool) -> None:
        """The fact has spread (or is replayed): the attempt exists and older ones are fenced."""
        job = self.catalog.jobs.setdefault(fact.job, Job(fact.job))
        pids = {c.body["nonce"]: int(c.body["pid"]) for c in self.opening.get(fact.job, ())}
        seats = {
            rank: Seat(rank, host, nonce, pids.get(nonce, 0), last_active_s=now)
            for rank, (host, nonce) in enumerate(zip(fact.hosts, fact.nonces, strict=True))
        }
        attempt = Attempt(
            fact.attempt, fact.world_size, fact.key, fact.launcher, fact.is_fresh, fact.parent, fact.level_asked,
            dict(fact.config), seats,
        )  # fmt: skip
        job.attempts[fact.attempt] = attempt
        job.placement, job.refusals = None, {}
        self.closes.pop(fact.job, None)
        if is_replay:
            attempt.phase = "open"
            return
        self.catalog.rounds.abort(fact.job, "FencedError", f"attempt {fact.attempt} of job {fact.job!r} was opened")
        live = set(self.catalog.hosts.live_ids())
        self.fence_waits[fact.job] = (live, now + FENCE_DEADLINE_S)
        for host in sorted(live):
            self.catalog.tell(host, "fence", {"job": fact.job, "attempt": fact.attempt})
        self.progress_fence(now, fact.job)

    def fenced(self, now: float, host_id: str, job: str) -> None:
        """A host refuses older processes now and has sent its inventory."""
        if job in self.fence_waits:
            self.fence_waits[job][0].discard(host_id)
            self.progress_fence(now, job)

    def progress_fence(self, now: float, name: str) -> None:
        """Open the attempt once every live host answered, or its deadline passed."""
        waits, deadline = self.fence_waits[name]
        waits &= set(self.catalog.hosts.live_ids())
        attempt = self.catalog.jobs[name].newest
        if attempt is None or (waits and now < deadline):
            return
        del self.fence_waits[name]
        attempt.phase = "open"
        self.catalog.send_targets(name)
        for call in self.opening.pop(name, ()):
            self.catalog.answer(call, self._joined_body(attempt))

    def _joined_body(self, attempt: Attempt) -> dict[str, Any]:
        return {
            "attempt": attempt.ordinal,
            "world_size": attempt.world_size,
            "restored_step": attempt.parent_step if attempt.has_restored else None,
            "resume_step": attempt.resume_step,
        }

    # -- the end ------------------------------------------------------------------------------

    def rank_gone(self, now: float, nonce: str) -> None:
        """A rank's process is dead: its seat is free and a half-gathered join of it is void."""
        for name, gathering in list(self.gatherings.items()):
            for rank, call in list(gathering.joins.items()):
                if call.body["nonce"] == nonce:
                    del gathering.joins[rank]
            if not gathering.joins:
                del self.gatherings[name]
        for job in self.catalog.jobs.values():
            for seat in job.newest.seats.values() if job.newest is not None else ():
                if seat.nonce == nonce:
                    seat.is_gone = True

    def close(self, call: Call) -> None:
        """A rank closed its store; when all have, the attempt is closed and its key spent."""
        job = self.catalog.jobs.get(str(call.body["job"]))
        attempt = job.newest if job is not None else None
        self.catalog.answer(call, {})
        if job is None or attempt is None or attempt.ordinal != call.body["attempt"]:
            return
        ranks = self.closes.setdefault(job.name, set())
        ranks.add(int(call.body["rank"]))
        attempt.seats[int(call.body["rank"])].is_gone = True
        if len(ranks) == attempt.world_size and attempt.phase == "open":
            self.catalog.record(AttemptClosed(job.name, attempt.ordinal))

    def tick(self, now: float) -> None:
        """Deadlines: a fence that a host never answered, a gathering that misses ranks."""
        for name in list(self.fence_waits):
            self.progress_fence(now, name)
        for name, gathering in list(self.gatherings.items()):
            for rank, call in list(gathering.joins.items()):
                limit_s = float(call.body["config"]["connect_timeout_s"])
                if now - call.since_s <= limit_s:
                    continue
                missing = [r for r in range(gathering.world_size) if r not in gathering.joins]
                self.catalog.refuse(
                    call,
                    "GatherTimeout",
                    f"connect to job {name!r}: after {limit_s:g} s ranks {listed(missing)} of {gathering.world_size} "
                    "have not connected. Every rank must call memstore.connect; raise connect_timeout_s if they are "
                    "merely slow",
                )
                del gathering.joins[rank]
            if not gathering.joins:
                del self.gatherings[name]

    def rewind(self, call: Call) -> None:
        """Collective: open a new attempt whose parent step is the one named (R22)."""
        body = call.body
        job = self.catalog.jobs[str(body["job"])]
        attempt = job.newest
        if attempt is None or attempt.ordinal != body["attempt"]:
            self.catalog.refuse(call, "FencedError", f"job {job.name!r}: a newer attempt was opened")
            return
        to = next(
            (s for s in sorted({*job.commits, *job.markers}, reverse=True) if s.step == int(body["step"])), None
        )  # newest attempt that has the step
        if to is None:
            have = sorted({s.step for s in (*job.commits, *job.markers)})
            self.catalog.refuse(
                call, "RecoveryError", f"job {job.name!r} has no step {body['step']} to rewind to: it has {listed(have)}"
            )
            return
        gathering = self.gatherings.get(job.name)
        if gathering is None or gathering.rewind_to != to:
            gathering = self.gatherings[job.name] = Gathering(attempt.key, attempt.world_size, rewind_to=to)
        body.setdefault("config", dict(attempt.config))
        body.setdefault("launcher", attempt.launcher)
        body["pid"] = attempt.seats[int(body["rank"])].pid
        gathering.joins[int(body["rank"])] = call
        if len(gathering.joins) == attempt.world_size:
            self._open(job.name, gathering)


def listed(values: list[int], limit: int = 10) -> str:
    """Return at most `limit` values as text, with the count of the rest."""
    head = ", ".join(str(v) for v in values[:limit])
    return head if len(values) <= limit else f"{head} and {len(values) - limit} more"

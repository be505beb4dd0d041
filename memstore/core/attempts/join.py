"""Connect is collective: joins gather, an attempt opens as one fact, opening fences the older ones. Pure (R20, R21).

join --all ranks there--> [late hosts here] --> [markers listed] --> AttemptOpened recorded --spread--> fencing
fencing --every live host answered--> open --all ranks closed--> closed
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from msgspec.structs import replace

from memstore.core.attempts.gathering import Entrant, Gathering, groups_refusal, joining
from memstore.core.attempts.in_place import newer_number, recovery_before, run_of
from memstore.core.cluster.collective import gather_timeout, job_removed, missing_ranks
from memstore.core.cluster.effects import AttemptBegun, AttemptUnfenced, Effects, RankGone
from memstore.core.cluster.facts import AttemptClosed, AttemptOpened, RestoreDecided, kept_by
from memstore.core.cluster.job import Attempt, AttemptMember, Call, Job, group_numbers, group_runs
from memstore.core.cluster.state import ClusterState
from memstore.core.cluster.text import listed, named_hosts, plural
from memstore.core.durable.markers import DurableMarkers
from memstore.core.durable.paths import place_of
from memstore.core.journal.replication import Journal
from memstore.core.targets.targets import ClusterView
from memstore.core.wire.calls import CloseStore, Join, Rewind
from memstore.core.wire.orders import DurablePlace, Fence
from memstore.core.wire.replies import Joined, Noted
from memstore.core.wire.status_rows import LaunchRow
from recovery.inventory import StepId

# -- attempt numbers ----------------------------------------------------------------------------------
# Which number the next attempt of a job gets: one that no other launch has, as far as is known. Pure (R16, R20).


LEFT_FREE = 1000  # numbers that launches may have which only absent hosts know of


class AttemptNumbers:
    """Numbers of attempts, of all jobs."""

    def __init__(self, state: ClusterState, out: Effects, journal: Journal) -> None:
        self.state, self.out, self.journal = state, out, journal
        self._opened: set[str] = set()  # jobs of which this controller has opened an attempt

    def next(self, name: str) -> int:
        """Return the number of the attempt that is opened now.

        Hosts that had the newest steps and that this controller has never seen may have gone on without those that are
        here. So may any host that is expected and has not come, of a job that no host here knows. Two launches of one
        number would be taken for one, and their shards for one step: their numbers are left free.
        """
        job, known_job = self.state.jobs.get(name), self.state.known_job(name)
        unapplied = [x.attempt for x in self.journal.log.unapplied() if isinstance(x, AttemptOpened) and x.job == name]
        known = job.newest_number if job is not None else 0
        attempt_number = max([known, self.state.removed.get(name, 0), *unapplied]) + 1
        is_first = name not in self._opened
        absent = self.absent(name) if is_first else set()
        self._opened.add(name)
        if not absent:
            return attempt_number
        why = "had its newest steps and may know of launches" if known_job is not None else "may know the job"
        why = f"{named_hosts(absent)}, not here yet, {why}"
        self.out.log(f"job {name!r}: attempt {attempt_number + LEFT_FREE} follows {known}: {why}", "warning")
        return attempt_number + LEFT_FREE

    def absent(self, name: str) -> set[str]:
        """Return the hosts that this controller has never seen and that may know launches of the job."""
        job = self.state.known_job(name)
        if job is None or job.newest is None:
            return self.state.expected_hosts - self.state.hosts.states.keys()
        named = {host for step in job.commits for host in job.committed_on(step)}
        named |= {member.host_id for member in job.newest.members.values()}
        return named - self.state.hosts.states.keys()


# -- join ---------------------------------------------------------------------------------------------


ACTIVE_WINDOW_S = 60.0  # a launch whose ranks were active this recently is not replaced silently (R20)
MARKERS_DEADLINE_S = 15.0  # a durable store that does not list its markers by then cannot be read
WORLD_SIZE_MAX = 1 << 20  # the missing ranks of a launch are listed one by one
FENCE_DEADLINE_S = 10.0  # a silent host is fenced when it answers again, before it serves


class Attempts:
    """Gatherings and attempts of all jobs."""

    def __init__(
        self, state: ClusterState, out: Effects, journal: Journal, view: ClusterView, markers: DurableMarkers
    ) -> None:
        self.state, self.out, self.journal, self.view, self.markers = state, out, journal, view, markers
        self.gatherings: dict[str, Gathering] = {}
        self.opening: dict[str, list[Entrant]] = {}  # job -> processes to answer when their attempt is open
        self.fence_waits: dict[str, tuple[set[str], float]] = {}  # job -> (hosts awaited, deadline)
        self.unsigned = AttemptNumbers(state, out, journal)
        self.closes: dict[str, set[int]] = {}  # job -> ranks of the newest attempt that said close
        self.last_closes: dict[str, Call[CloseStore]] = {}  # job -> the last of them, until the attempt is closed
        state.holds.add("a rewind", self._held, is_in_use=False)

    def _held(self, job: Job) -> set[StepId]:
        gathering = self.gatherings.get(job.name)
        return {gathering.rewind_to} if gathering is not None and gathering.rewind_to is not None else set()

    # -- join ---------------------------------------------------------------------------------

    def join(self, now: float, call: Call[Join]) -> None:
        """Handle a rank's join: answer at once if it is in already, else gather (R20)."""
        request, name, entrant = call.request, call.request.job, joining(call)
        job = self.state.jobs.get(name)
        newest = job.newest if job is not None else None
        if self._is_repeated(name, entrant):
            return
        is_of_size = newest is not None and newest.world_size == request.world_size  # else it begins another launch
        if newest is not None and is_of_size and self._is_member(name, newest, entrant):
            if newest.phase == "fencing":
                self.opening.setdefault(name, []).append(entrant)
            else:
                self._answer_member(name, newest, entrant)
            return
        refusal = self._refusal(now, job, newest, request)
        if refusal is not None:
            self.out.refuse(call, *refusal)
            return
        if newest is not None and self._replaces_member(newest, request):
            contradiction = self._contradiction(name, newest, request)
            if contradiction:
                self.out.refuse(call, "ConfigError", contradiction)
            else:
                self._replace_member(name, newest, entrant)
            return
        self._gather(now, name, entrant, request.world_size)

    def _is_repeated(self, name: str, entrant: Entrant) -> bool:
        """Return whether the same question waits for its attempt to open already: this one is answered in its place."""
        waiting = self.opening.get(name, [])
        for number, other in enumerate(waiting):
            if other.question == entrant.question:
                waiting[number] = entrant
                return True
        return False

    def _is_member(self, name: str, attempt: Attempt, entrant: Entrant) -> bool:
        is_launch = entrant.key in (None, attempt.key)  # else its process begins another one
        member = attempt.members.get(entrant.rank) if is_launch else None
        is_leaving = member is not None and member.rank in self.closes.get(name, ())  # it said close: a new life
        return member is not None and member.nonce == entrant.nonce and attempt.phase != "closed" and not is_leaving

    def _replaces_member(self, attempt: Attempt, request: Join) -> bool:
        """Let a newer join replace a rank inside the attempt, until some rank has completed a get or put."""
        is_same_launch = request.key is not None and request.key == attempt.key
        is_untouched = not attempt.has_restored and not attempt.has_put and attempt.phase != "closed"
        return is_same_launch and is_untouched and request.world_size == attempt.world_size

    def _contradiction(self, name: str, attempt: Attempt, request: Join) -> str:
        """Return why the process that takes a rank's place may not name its shard or groups, or "" (R34)."""
        rank = request.rank
        before = (attempt.shard_of[rank], max(attempt.shard_of) + 1) if attempt.shard_of else (None, None)
        said = (request.shard, request.shards)
        groups = {key: numbers[rank] for key, numbers in attempt.groups.items()}
        if groups != request.groups:
            return f"job {name!r}: rank {rank} is in groups {groups}; who takes its place names {request.groups}"
        if said == before:
            return ""
        return f"job {name!r}: rank {rank} named shard {before[0]} of {before[1]}; who takes its place names {said}"

    def _replace_member(self, name: str, attempt: Attempt, entrant: Entrant) -> None:
        """Record the attempt again with the new process in it: a successor must know it by its nonce."""
        unapplied = [x for x in self.journal.log.unapplied() if isinstance(x, AttemptOpened) and x.job == name]
        unapplied = [x for x in unapplied if x.attempt == attempt.attempt_number]  # another rank was replaced just now
        fact = unapplied[-1] if unapplied else attempt.written_again(name, self.state.wall_s)
        member, host = attempt.members[entrant.rank], entrant.call.host_id
        nonces, hosts, rank = list(fact.nonces), list(fact.hosts), entrant.rank
        nonces[rank], hosts[rank] = entrant.nonce, host
        member.nonce, member.host_id, member.pid, member.is_gone = nonces[rank], host, 0, False
        member.ended_s, member.has_closed = None, False
        attempt.place(attempt.members)
        self.opening.setdefault(name, []).append(entrant)
        self.journal.record(replace(fact, nonces=kept_by(nonces, hosts), hosts=tuple(hosts)))

    def _refusal(self, now: float, job: Job | None, newest: Attempt | None, request: Join) -> tuple[str, str] | None:
        name, rank, world_size = request.job, request.rank, request.world_size
        if rank >= world_size:
            return "ConfigError", f"rank {rank} is outside the world of {world_size} ranks: use 0 to {world_size - 1}"
        if world_size > WORLD_SIZE_MAX:
            return "ConfigError", f"world_size={world_size} is over the limit of {WORLD_SIZE_MAX:,} ranks"
        if job is not None:
            spent = [a.attempt_number for a in job.attempts.values() if a.key is not None and a.key == request.key]
            # A launch may open several attempts (a rank that died and came back, a rewind); only the last one counts.
            if newest is not None and spent and (max(spent) != newest.attempt_number or newest.phase == "closed"):
                why = f"the launch key {request.key!r} belongs to attempt {max(spent)}, which is closed"
                return "FencedError", f"job {name!r}: {why}: every launch needs a new key"
        begun = self._newer_generation(newest, request)
        if begun is not None:
            why = f"and generation {begun} has begun: a rank was lost meanwhile"
            return "FencedError", f"job {name!r}: rank {rank} joins an older generation, {why}"
        if newest is not None and newest.phase != "closed" and not request.takeover:
            busy = self._busy_member(now, newest, request)
            if busy is not None:
                return "JobBusyError", (
                    f"job {name!r} is being trained: rank {busy.rank} of attempt {newest.attempt_number} is "
                    "alive on host "
                    f"{busy.host_id} (pid {busy.pid}, step {busy.step}). Stop that launch, use another job name, or "
                    "connect(..., takeover=True) to fence it"
                )
        gathering = self.gatherings.get(name)
        if gathering is not None and gathering.key == request.key and gathering.world_size != world_size:
            return "ConfigError", (
                f"job {name!r}: rank {rank} says world_size={world_size}, the ranks waiting say "
                f"{gathering.world_size}: all ranks of one launch must agree"
            )
        return None

    def _newer_generation(self, newest: Attempt | None, request: Join) -> int | None:
        """Return the newer generation that has begun if the join is of an older one: it may come late (R20)."""
        gathering = self.gatherings.get(request.job)
        keys = (gathering.key if gathering is not None else None, newest.key if newest is not None else None)
        return next((number for key in keys if (number := newer_number(request.key, key)) is not None), None)

    def _busy_member(self, now: float, attempt: Attempt, request: Join) -> AttemptMember | None:
        is_same_launch = request.key is not None and request.key == attempt.key
        if is_same_launch or request.launcher in attempt.launcher.split(" "):
            return None
        for member in attempt.members.values():
            is_active = now - member.last_active_s <= ACTIVE_WINDOW_S
            if not member.is_gone and is_active and self.state.hosts.is_live(member.host_id):
                return member
        return None

    def _gather(self, now: float, name: str, entrant: Entrant, world_size: int) -> None:
        key, rank = entrant.key, entrant.rank
        gathering = self.gatherings.get(name)
        if gathering is None or gathering.key != key or gathering.world_size != world_size:
            self.dismiss(name, "FencedError", f"job {name!r}: a newer launch began to connect")
            gathering = self.gatherings[name] = Gathering(key, world_size)
        replaced = gathering.joins.get(rank)
        if replaced is not None and replaced.nonce != entrant.nonce:
            self.out.refuse(replaced.call, "FencedError", f"job {name!r}: a newer process joined as rank {rank}")
        gathering.joins[rank] = entrant
        if len(gathering.joins) == world_size:
            joins = [gathering.joins[rank] for rank in range(world_size)]
            refusal = groups_refusal(name, [entrant.groups for entrant in joins])
            refusal = refusal or self.view.shared_shards.refusal(name, [(e.shard, e.shards) for e in joins])
            if refusal is not None:
                self.dismiss(name, "ConfigError", refusal)
            else:
                self._complete(now, name, gathering)

    def dismiss(self, name: str, error: str, message: str) -> None:
        """Refuse all ranks that gather for the job, or rewind it."""
        gathering = self.gatherings.pop(name, None)
        if gathering is not None:
            gathering.joins.refuse_all(self.out, error, message)

    def _complete(self, now: float, name: str, gathering: Gathering) -> None:
        """Open the attempt for a complete launch, after listing the markers of what RAM may have forgotten (R31).

        Hosts that are announced and have not come may know attempts and steps of a job that no host here knows, and
        newer ones where they had its newest. A launch that began without them would go on from too old a step.
        """
        if self._is_asked_again(now, name, gathering):
            return
        late = self._late_hosts(now, name, gathering)
        if late and gathering.level_asked is None:
            gathering.level_asked = self._level_asked(gathering, ())
            self.out.log(f"job {name!r}: its launch waits for {named_hosts(late)}, {_why_late(self.state, name)}")
        gathering.late_hosts = late
        if late:
            return
        durable = place_of(gathering.joins[0].config)
        if not durable:
            self.open(name, gathering)
            return
        self.list_markers(now, name, gathering, durable, lambda why: self._markers_listed(name, gathering, why))

    def _is_asked_again(self, now: float, name: str, gathering: Gathering) -> bool:
        """Let the ranks of a complete launch join once more if a host has brought a newer attempt meanwhile (R20).

        They may be in that attempt already, or be kept out by ranks that live on the host.
        """
        job = self.state.known_job(name)
        before, gathering.knew = gathering.knew, job.newest_number if job is not None else 0
        if before is None or gathering.knew <= before:
            return False
        self._join_again(now, name, gathering)
        return True

    def _join_again(self, now: float, name: str, gathering: Gathering) -> None:
        """Let the ranks of a launch join as if they came now: what stands about their job has changed."""
        del self.gatherings[name]
        for entrant in gathering.joins.values():
            call, request = entrant.call, entrant.call.request
            if isinstance(request, Join):  # a rewind is of a known job
                self.join(now, Call(call.host_id, call.call_id, request, call.since_s))

    def _level_asked(self, gathering: Gathering, before: Iterable[str]) -> str:
        hosts = [entrant.call.host_id for entrant in gathering.joins.values()]
        return self.view.asked_level(hosts, int(gathering.joins[0].config["replicas"]), before)

    def _late_hosts(self, now: float, name: str, gathering: Gathering) -> frozenset[str]:
        """Return the hosts that a complete launch waits for."""
        late = self.view.late_hosts()
        if not late or gathering.joins[0].is_fresh or now >= gathering.opens_by_s:
            return frozenset()
        return frozenset(late & self.unsigned.absent(name))

    def list_markers(
        self, now: float, name: str, gathering: Gathering, durable: DurablePlace, on_listed: Callable[[str], None]
    ) -> None:
        """Ask the host of rank 0 for the job's durable markers; `on_listed` is called once, then or at the deadline."""
        gathering.on_listed, gathering.listing_since_s = on_listed, now
        gathering.markers_call = self.markers.ask(gathering.joins[0].call.host_id, name, durable)

    def listed(self, call: int, why: str) -> None:
        """Go on with the gathering that had a host list markers; `why` storage could not be read, or ""."""
        for name, gathering in list(self.gatherings.items()):
            if gathering.markers_call == call:
                self._go_on(name, gathering, why)

    def _go_on(self, name: str, gathering: Gathering, why: str) -> None:
        """Go on with a gathering whose durable markers were listed, unless a rank has died meanwhile."""
        is_complete = len(gathering.joins) == gathering.world_size
        if self.gatherings.get(name) is gathering and is_complete and gathering.on_listed is not None:
            gathering.on_listed(why)

    def _markers_listed(self, name: str, gathering: Gathering, why: str) -> None:
        """Open the attempt; if storage could not be read, no rank may start from nothing (R23)."""
        if self._is_asked_again(self.state.now, name, gathering):
            return
        if why and self.state.known_job(name) is None:
            self.dismiss(name, "RecoveryError", _unreadable(name, why))
        else:
            self.open(name, gathering)

    def open(self, name: str, gathering: Gathering) -> None:
        """Record the fact of the attempt with the next number."""
        del self.gatherings[name]
        joins = [gathering.joins[rank] for rank in range(gathering.world_size)]
        first, job = joins[0], self.state.jobs.get(name)
        hosts = tuple(entrant.call.host_id for entrant in joins)
        before = {each.level_asked for each in job.attempts.values()} if job is not None else set()
        if gathering.level_asked is not None:
            before.add(gathering.level_asked)
        level = self._level_asked(gathering, before)
        is_fresh = first.is_fresh and not _has_committed(job, run_of(gathering.key))
        parent = job.parent_for_next() if job is not None and not is_fresh else None
        attempt_number = self.unsigned.next(name)
        self.opening.setdefault(name, []).extend(joins)
        opened = self.view.with_writers(
            AttemptOpened(
                job=name,
                attempt=attempt_number,
                world_size=gathering.world_size,
                parent=parent,
                key=gathering.key,
                is_fresh=is_fresh,
                level_asked=level,
                config=dict(first.config),
                nonces=kept_by([entrant.nonce for entrant in joins], hosts),
                hosts=hosts,
                launcher=" ".join(sorted({entrant.launcher for entrant in joins})),
                wall_s=self.state.wall_s,
                shard_of=tuple(e.shard for e in joins if e.shard is not None) if first.shards is not None else (),
                generation=first.in_place.generation if first.in_place is not None else 0,
                groups={key: group_runs(entrant.groups[key] for entrant in joins) for key in first.groups},
            )
        )
        self.journal.record(opened)
        if gathering.rewind_to is not None:
            to = gathering.rewind_to
            self.journal.record(RestoreDecided(name, attempt_number, 0, to.attempt, to.step, self.state.wall_s))

    # -- facts applied ------------------------------------------------------------------------

    def apply_opened(self, now: float, fact: AttemptOpened, *, is_replay: bool) -> None:
        """Apply the replicated (or replayed) fact: the attempt exists and older ones are fenced."""
        job = self.state.job(fact.job)
        joined = {entrant.nonce: entrant for entrant in self.opening.get(fact.job, ())}
        members = {
            rank: _member(rank, host, nonce, joined.get(nonce), now)
            for rank, (host, nonce) in enumerate(zip(fact.hosts, fact.nonces, strict=True))
        }
        old = job.attempts.get(fact.attempt)
        if old is not None:  # recorded again because a rank was replaced: the ranks still there keep their places
            kept = {member.nonce: member for member in old.members.values() if member.pid}
            old.place({rank: kept.get(member.nonce, member) for rank, member in members.items()})
            old.shard_of, old.writers = fact.shard_of, fact.writers
            job.placement = None
            if not is_replay:
                self.fence_all(now, fact.job)
            return
        attempt = Attempt(
            fact.attempt,
            fact.world_size,
            fact.key,
            fact.launcher,
            fact.is_fresh,
            fact.parent,
            fact.level_asked,
            dict(fact.config),
            members,
            shard_of=fact.shard_of,
            writers=fact.writers,
            opened_s=fact.wall_s,
            generation=fact.generation,
            groups=group_numbers(fact.groups),
            recovery=recovery_before(fact, job, joined),
        )
        job.begin(attempt)
        job.placement, job.refusals = None, {}
        self._forget_closes(fact.job)
        if is_replay:
            attempt.phase = "open"
            return
        if attempt.recovery is not None:
            self.out.note(
                "replaced",
                job=fact.job,
                attempt=fact.attempt,
                generation=attempt.generation,
                replaced=attempt.recovery.replaced,
            )
        self.out.emit(AttemptBegun(fact.job, fact.attempt))
        self.fence_all(now, fact.job)
        gathering = self.gatherings.get(fact.job)
        if gathering is not None and gathering.key is not None and gathering.key == fact.key:
            # They came while the attempt was being written down: each takes the place of its rank's older process.
            self._join_again(now, fact.job, gathering)

    def fence_all(self, now: float, name: str) -> None:
        """Order every live host to refuse older processes and to answer with its inventory (R21)."""
        attempt = self.state.jobs[name].newest
        if attempt is None:
            return
        attempt.phase = "fencing"
        live = set(self.state.hosts.live_ids())
        self.fence_waits[name] = (live, now + FENCE_DEADLINE_S)
        self.send_fences(sorted(live), name, attempt)
        self.progress_fence(now, name)

    def send_fences(self, hosts: Iterable[str], name: str, attempt: Attempt) -> None:
        """Order hosts to refuse processes of older attempts; their own that came by a rewind are none."""
        for host in hosts:
            own = tuple(member.nonce for member in attempt.members_on(host))
            self.out.send(host, Fence(job=name, attempt=attempt.attempt_number, members=own))

    def fenced(self, now: float, host_id: str, job: str, attempt_number: int) -> None:
        """Take a host's inventory: it refuses older processes now."""
        newest = self.state.jobs[job].newest if job in self.state.jobs else None
        if job in self.fence_waits and newest is not None and attempt_number >= newest.attempt_number:
            waits, _ = self.fence_waits[job]
            waits.discard(host_id)
            if not waits:  # ticks look for hosts that died meanwhile
                self.progress_fence(now, job)

    def progress_fence(self, now: float, name: str) -> None:
        """Open the attempt once every live host answered, or its deadline passed."""
        waits, deadline = self.fence_waits[name]
        waits &= set(self.state.hosts.live_ids())
        attempt = self.state.jobs[name].newest
        if attempt is None or (waits and now < deadline):
            return
        del self.fence_waits[name]
        attempt.phase = "open"
        self.view.send_targets(self.state.jobs[name])
        later = {x.attempt for x in self.journal.log.unapplied() if isinstance(x, AttemptOpened) and x.job == name}
        waiting = self.opening.pop(name, [])
        for entrant in waiting:
            if later and not self._is_member(name, attempt, entrant):
                self.opening.setdefault(name, []).append(entrant)  # its own attempt is about to open
            else:
                self._answer_member(name, attempt, entrant)
        self.out.emit(AttemptUnfenced(name))

    def _answer_member(self, name: str, attempt: Attempt, entrant: Entrant) -> None:
        """Send a process of the attempt its place in it; FencedError for one whose place another has taken."""
        if not self._is_member(name, attempt, entrant):
            self.out.refuse(entrant.call, "FencedError", f"job {name!r}: another process took this rank's place")
            return
        reply = Joined(
            attempt=attempt.attempt_number,
            world_size=attempt.world_size,
            rank=entrant.rank,
            restored_step=attempt.parent_step if attempt.has_restored else None,
            resume_step=attempt.resume_step,
            put_every=attempt.config.get("put_every", "step"),  # of the attempt: ranks' own may differ (R33)
            shared_shard=self.view.shared_shards.joined(attempt, entrant.rank),
        )
        self.out.answer(entrant.call, reply)

    # -- the end ------------------------------------------------------------------------------

    def rank_gone(self, host: str, nonce: str, *, has_left: bool = False) -> None:
        """Free the place of a rank whose process is dead or has left, and void its join."""
        for name, gathering in list(self.gatherings.items()):
            for rank in [rank for rank, each in gathering.joins.items() if each.nonce == nonce]:
                del gathering.joins[rank]
                gathering.markers_call = 0  # asked again when its place is taken
            if not gathering.joins:
                del self.gatherings[name]
        for entrant in (e for waiting in self.opening.values() for e in waiting if e.nonce == nonce):
            entrant.is_gone = True  # its place is set when the attempt's fact is replicated
        for job in self.state.jobs.values():
            for member in job.newest.members_on(host) if job.newest is not None else ():
                if member.nonce == nonce:
                    if not member.is_gone:
                        self._note_gone("rank_left" if has_left else "rank_dead", job, member)
                    member.end(self.state.now, has_closed=False)
                    self.out.emit(RankGone(job, member))

    def _note_gone(self, kind: str, job: Job, member: AttemptMember, **why: str) -> None:
        """Note, once, that a rank has not closed its store: its process ended or left, or an exception ended it."""
        self.out.note(
            kind,
            job=job.name,
            attempt=job.newest_number,
            step=member.step,
            rank=member.rank,
            host=member.host_id,
            pid=member.pid,
            **why,
        )

    def forget(self, name: str) -> None:
        """Drop what ranks of a removed job wait for."""
        self.dismiss(name, *job_removed(name))
        for entrant in self.opening.pop(name, ()):
            self.out.refuse(entrant.call, *job_removed(name))
        self.fence_waits.pop(name, None)
        self._forget_closes(name)

    def close(self, call: Call[CloseStore]) -> None:
        """Note that a rank closed its store, or left by an exception: it is gone. Close the attempt once all have.

        The last one is answered when that is recorded: a status that follows shows a closed job.
        """
        job, rank = self.state.jobs.get(call.request.job), call.request.rank
        attempt = job.newest if job is not None else None
        if job is None or attempt is None or attempt.attempt_number != call.request.attempt:
            self.out.answer(call, Noted())
            return
        ranks, member = self.closes.setdefault(job.name, set()), attempt.members[rank]
        ranks.add(rank)
        if call.request.error and not member.is_gone:
            self._note_gone("rank_ended", job, member, why=call.request.error)
        member.end(self.state.now, has_closed=not call.request.error)
        if call.request.error:
            kind, colon, said = call.request.error.partition(": ")
            attempt.ended_by = attempt.ended_by or f"{kind} on rank {rank}{colon}{said}"
            self.out.emit(RankGone(job, member))
        if len(ranks) == attempt.world_size and attempt.phase != "closed":
            self.last_closes[job.name] = call
            self.journal.record(AttemptClosed(job.name, attempt.attempt_number, attempt.ended_by))
        else:
            self.out.answer(call, Noted())

    def apply_closed(self, fact: AttemptClosed) -> None:
        """Close an attempt: no rank of it goes on."""
        self._answer_last_close(fact.job)
        job = self.state.jobs.get(fact.job)
        if job is not None and fact.attempt in job.attempts:
            job.attempts[fact.attempt].phase = "closed"
            job.attempts[fact.attempt].ended_by = fact.ended_by
            job.attempts[fact.attempt].closed_s = self.state.now

    def _forget_closes(self, job: str) -> None:
        self.closes.pop(job, None)
        self._answer_last_close(job)

    def _answer_last_close(self, job: str) -> None:
        if (call := self.last_closes.pop(job, None)) is not None:
            self.out.answer(call, Noted())

    def tick(self, now: float) -> None:
        """Check deadlines: of fences that a host has not answered, and of launches that miss ranks."""
        for name in list(self.fence_waits):
            self.progress_fence(now, name)
        for name, gathering in list(self.gatherings.items()):
            if gathering.markers_call:
                if now - gathering.listing_since_s > MARKERS_DEADLINE_S:
                    why = f"it did not list its markers within {MARKERS_DEADLINE_S:g} s"
                    self._go_on(name, gathering, why)
                continue
            if gathering.late_hosts and len(gathering.joins) == gathering.world_size:
                self._complete(now, name, gathering)
                continue
            late = next((e for e in gathering.joins.values() if now - e.call.since_s > e.limit_s), None)
            if late is not None:  # one deadline for all, so that each of them is sent the same ranks
                named_s = float(late.config["connect_timeout_s"])
                refusal = gather_timeout(
                    f"connect to job {name!r}",
                    named_s,
                    missing_ranks(gathering.world_size, gathering.joins),
                    gathering.world_size,
                    "connected" if gathering.rewind is None else "called rewind()",
                    "Every rank must call it; raise connect_timeout_s if they are merely slow",
                )
                self.dismiss(name, *refusal)


def _member(rank: int, host: str, nonce: str, joined: Entrant | None, now: float) -> AttemptMember:
    """Return the member for a process that joined; one that died before its attempt opened is gone."""
    if joined is None:
        return AttemptMember(rank, host, nonce, last_active_s=now)
    return AttemptMember(rank, host, nonce, joined.pid, joined.is_gone, last_active_s=now)


def _has_committed(job: Job | None, run: str | None) -> bool:
    """Return whether a generation of this run has a committed step: a fresh start is behind it."""
    attempts = [] if job is None or run is None else [job.attempts.get(step.attempt) for step in job.commits]
    return any(attempt is not None and run_of(attempt.key) == run for attempt in attempts)


def _unreadable(name: str, why: str) -> str:
    return (
        f"job {name!r}: no host knows it and its durable storage cannot be read: {why}. Make it readable, or connect "
        "with durable=None if it holds nothing of this job"
    )


# -- launches -----------------------------------------------------------------------------------------
# Incomplete launches: which ranks have come, which are awaited. Pure; read `join.py` for the rules.


LISTED_MAX = 1000  # ranks that one answer names


def launches(state: ClusterState, attempts: Attempts) -> list[LaunchRow]:
    """Return a row for each job that some rank waits to join or to rewind."""
    names = attempts.gatherings.keys() | attempts.opening.keys()
    return [row for name in sorted(names) if (row := launch(state, attempts, name)) is not None]


def launch(state: ClusterState, attempts: Attempts, name: str) -> LaunchRow | None:
    """Return how far the launch of a job is, None if no rank waits for one."""
    gathering = attempts.gatherings.get(name)
    if gathering is not None:
        return _gathering(state, name, gathering)
    waiting = attempts.opening.get(name)
    return _opening(state, attempts, name, waiting) if waiting else None


def _gathering(state: ClusterState, name: str, gathering: Gathering) -> LaunchRow:
    missing = [rank for rank in range(gathering.world_size) if rank not in gathering.joins]
    waiting = list(gathering.joins.values())
    awaited = f"{'rank' if len(missing) == 1 else 'ranks'} {listed(missing)}"
    until_s = min(each.call.since_s + each.limit_s for each in waiting)
    if gathering.markers_call:
        until_s = gathering.listing_since_s + MARKERS_DEADLINE_S
        awaited = f"host {gathering.joins[0].call.host_id} to list what durable storage has of the job"
    elif gathering.late_hosts and not missing:
        until_s = min(gathering.opens_by_s, state.late_until_s)
        awaited = f"{named_hosts(gathering.late_hosts)}, {_why_late(state, name)}"
    return LaunchRow(
        job=name,
        phase="listing" if gathering.markers_call else "gathering",
        since_s=_since_s(state, waiting),
        awaited=awaited,
        ranks=len(waiting),
        world_size=gathering.world_size,
        missing=missing[:LISTED_MAX],
        is_rewind=gathering.rewind is not None,
        left_s=max(0.0, until_s - state.now),
    )


def _opening(state: ClusterState, attempts: Attempts, name: str, waiting: list[Entrant]) -> LaunchRow:
    """A complete launch: hosts journal the attempt, then refuse the ranks of older ones."""
    waits, deadline_s = attempts.fence_waits.get(name, (set(), None))
    hosts = sorted(waits)
    awaited, left_s = "its hosts to write the attempt down", None
    if deadline_s is not None:
        more = f" and {len(hosts) - 10} more" if len(hosts) > 10 else ""
        awaited = f"{plural(len(hosts), 'host')} to refuse ranks of older attempts ({', '.join(hosts[:10])}{more})"
        left_s = max(0.0, min(deadline_s - state.now, FENCE_DEADLINE_S))
    world_size = _world_size(state, attempts, name, waiting)
    return LaunchRow(
        job=name,
        phase="fencing" if deadline_s is not None else "opening",
        since_s=_since_s(state, waiting),
        awaited=awaited,
        ranks=world_size,
        world_size=world_size,
        missing=[],
        is_rewind=isinstance(waiting[0].call.request, Rewind),
        left_s=left_s,
    )


def _why_late(state: ClusterState, name: str) -> str:
    return "which may know the job" if state.known_job(name) is None else "which may have newer steps"


def _world_size(state: ClusterState, attempts: Attempts, name: str, waiting: list[Entrant]) -> int:
    """Return the ranks of the attempt that is written down: rewind() does not name it."""
    facts = [fact for fact in attempts.journal.log.unapplied() if isinstance(fact, AttemptOpened) and fact.job == name]
    if facts:
        return facts[-1].world_size
    job = state.jobs.get(name)
    return job.newest.world_size if job is not None and job.newest is not None else len(waiting)


def _since_s(state: ClusterState, waiting: list[Entrant]) -> float:
    return state.now - min(each.call.since_s for each in waiting)


def come_text(ranks: int, world_size: int, missing: Sequence[int]) -> str:
    """Return "1 of 2 ranks have come"."""
    if missing:
        return f"{ranks} of {plural(world_size, 'rank')} have come"
    return "its rank has come" if world_size == 1 else f"all {world_size} ranks have come"

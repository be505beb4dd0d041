"""Who writes which part of which step to durable storage, and when the marker may follow. Pure (R31).

A job's writes, each of a step of its own:

none --due--> writing (every host its slices) --all slices reported--> marking --> durable
 | '--due, beside others--> writing --^     |  a slice failed, or its writer died: another holder writes it
 |    threads are idle, and each of         |--late, and a newer one is due or needs its room--> abandoned and counted
 |    the others ends in time               |--two are beyond the kept steps--> the newer one is abandoned
 '--else: waits, and the newest             |--a newer one is durable, and retention would take it--> abandoned
    step is written then                    |--no host is left to write it--> failed; tried again when next due
                                            '--its step was retired--> no marker; a torn step's is taken back

A step has room in memory for its write as long as retention keeps it; beyond that there is one version for durable
writes, which the oldest has. So a write begins beside another only if that one is expected to be done by then. The
order of ends is free: the newest marker counts, and what writes under way read of older steps is not removed.

The holders of a shard share its slices, so that each writes a part of it, all at once, and every byte is written once.
All slices are under one key: that of the writes before and beside it or, without one, of the host that reports first;
such a write has the storage for itself. A host with another key fails with its slices, and is named.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

from memstore.core.capacity import Retention
from memstore.core.cluster.effects import Effects
from memstore.core.cluster.job import TRUSTED, Attempt, Job
from memstore.core.cluster.state import ClusterState, mtbf_s
from memstore.core.cluster.step_lookup import redundant_steps
from memstore.core.cluster.text import named_hosts
from memstore.core.commits import StepCommits
from memstore.core.durable.markers import wire_uses
from memstore.core.durable.paths import other_key, place_of, storage_of
from memstore.core.durable.persist import Persists
from memstore.core.durable.slice_format import slices_count
from memstore.core.durable.states import MARKER, WRITES_AT_ONCE, DurableState, DurableStates, Piece, Write
from memstore.core.schedule import Decision, ends_in_time, is_late, next_durable, optimal_every, retire
from memstore.core.targets.targets import ClusterView
from memstore.core.wire.frame import BODY_BYTES_MAX
from memstore.core.wire.ids import WireShard, WireSpec, WireStep
from memstore.core.wire.orders import BaseShard, DurablePlace, RemoveStep, SlicesOfShard, WriteMarker, WriteSlices
from memstore.core.wire.reports import MarkerWritten, SliceWritten, StepRemoved
from memstore.intervals import Every, parse_every
from recovery.inventory import DurableMarker, StepId
from recovery.lineage import in_lineage

FAILED_AGAIN_S = 60.0  # a step whose write failed may be written again after that, though no newer one was committed
KEYS_NAMED_MAX = 3
TAKE_BACK_S = 30.0  # after that the removal of a torn step is ordered again: its host died, or storage failed
BASE_ROW_BYTES, BASE_TAG_BYTES = 70, 17  # that a marker needs for an older step, for each rank and for each slice
REMOVAL_S = 30.0  # a write waits so long for a removal of its step, which would take what was just written


class DurableOrders:
    """Durable writes of all jobs."""

    def __init__(
        self,
        state: ClusterState,
        out: Effects,
        view: ClusterView,
        steps: StepCommits,
        retention: Retention,
        states: DurableStates,
        persists: Persists,
    ) -> None:
        self.state, self.out, self.view, self.steps, self.retention = state, out, view, steps, retention
        self.states, self.persists = states, persists
        state.holds.add("a durable write", self._held, is_in_use=True)

    def _held(self, job: Job) -> set[StepId]:
        state = self.states.of(job.name)
        return {write.step for write in _unmarked(state)} or set(sorted(state.writes)[-1:])  # room is for one

    def consider(self, now: float, job: Job) -> None:
        """Start the next write if it is due and may begin (R31)."""
        attempt = job.newest
        if attempt is None or not attempt.config.get("durable"):
            return
        state = self.states.of(job.name)
        for write in _unmarked(state):
            if write.place != place_of(attempt.config):
                self._abandon(job, state, write, "a newer attempt writes to another place")
        self._give_up_retired(now, job, attempt, state)
        self._give_room(now, job, attempt, state)
        if self._put_first(now, job, attempt, state):
            return
        if not self.states.is_known(job) and not state.unread:
            return  # a host lists the markers: storage may have this step, and a newer one would wait for the write
        self._tell_trust(now, job, state, storage_of(attempt.config))
        mine = [s for s in job.commits if s.attempt == attempt.attempt_number and s not in job.retired]
        decision = self._next(now, job, attempt, state, mine)
        if decision.start is not None:  # only now: to see that a step is whole takes a look at every rank
            decision = self._next(now, job, attempt, state, [s for s in mine if self.states.is_whole(job, s)])
        if decision.start is None or self._is_being_removed(state, decision.start):
            return
        beside = [write for write in state.writes.values() if not _is_late(now, state, write)]
        if beside and not self._fits_beside(now, attempt, state, beside):
            return
        for write in [write for write in state.writes.values() if write not in beside]:
            self._make_way(job, state, write, f"{decision.why}; step {write.step.step} is late and makes way")
        self._start(now, job, attempt, state, decision.start)

    def _fits_beside(self, now: float, attempt: Attempt, state: DurableState, writes: list[Write]) -> bool:
        """Return whether one more write uses threads that are idle, and the others end before it needs their room."""
        # Until then retention keeps the newest step, so that its write needs no room.
        until_s = (attempt.committed_s or now) + (attempt.pace.interval_s() or 0.0) * int(attempt.config["keep_steps"])
        owed = Counter(host for write in writes for host in write.waits.values())
        return max(owed.values(), default=0) < WRITES_AT_ONCE and all(
            # Without a key each of the first two writes would take that of the host which reports first.
            write.key is not None
            and write.place == place_of(attempt.config)
            and ends_in_time(now, write.since_s, state.write_s, until_s)
            for write in writes
        )

    def _give_room(self, now: float, job: Job, attempt: Attempt, state: DurableState) -> None:
        """Keep, of the writes of steps that retention keeps no more, the one for which there is a version of room.

        That is the oldest, which has least left to write, unless it is late, or the newest was asked for.
        """
        kept = redundant_steps(job, attempt)
        while len(beyond := sorted((w for w in _unmarked(state) if w.step not in kept), key=lambda w: w.step)) > 1:
            if _is_late(now, state, beyond[0]) or self.persists.is_wanted(job, beyond[-1].step):
                self._make_way(job, state, beyond[0], f"step {beyond[1].step.step} needs its room")
            else:
                self._abandon(job, state, beyond[-1], f"step {beyond[-2].step.step} is still in the room for it")
                state.last_started_s, state.last_started_step = beyond[-2].since_s, beyond[-2].step
            self.retention.retain(job)

    def _make_way(self, job: Job, state: DurableState, write: Write, why: str) -> None:
        """Abandon a write that is too slow, and count it: the distance to the next one doubles."""
        self._abandon(job, state, write, why)
        state.abandoned_in_a_row += 1
        state.abandoned_count += 1

    def _next(self, now: float, job: Job, attempt: Attempt, state: DurableState, committed: list[StepId]) -> Decision:
        return next_durable(
            now,
            last_started_s=state.last_started_s,
            last_durable_step=job.newest_durable,
            committed=committed,
            every=self._spacing(job, attempt, state),
            in_progress=state.active.step if state.active is not None else None,
            last_started_step=state.last_started_step if now - state.failed_s < FAILED_AGAIN_S else None,
            abandoned_in_a_row=state.abandoned_in_a_row,
        )

    def _put_first(self, now: float, job: Job, attempt: Attempt, state: DurableState) -> bool:
        """Write a requested step before a due one; True if nothing else may begin now."""
        persists = self.persists
        if any(persists.is_wanted(job, step) for step in state.writes):
            return True
        wanted = persists.wanted(job)
        if wanted is None:
            return False
        if not persists.is_due(job, wanted) or self._is_being_removed(state, wanted):
            return True
        for write in _unmarked(state):  # not counted: that says nothing of the storage's speed
            self._abandon(job, state, write, f"it made way for step {wanted.step}, which was asked for")
        self._start(now, job, attempt, state, wanted)
        return True

    def _spacing(self, job: Job, attempt: Attempt, state: DurableState) -> Every:
        every = parse_every(attempt.config["durable_every"])
        return optimal_every(state.write_s, mtbf_s(self.state, job)) if every.is_optimal else every

    def _give_up_retired(self, now: float, job: Job, attempt: Attempt, state: DurableState) -> None:
        """Withhold a retired step's marker, and remove a torn step's: RAM may forget that it is torn (R25, R31).

        A marker that is being written is waited for, and taken back once it is there. Each controller has each torn
        step removed once, until a host says that it is: a former one may have died with the marker's order on its way.
        """
        for write in _unmarked(state):
            if write.step in job.retired:
                self._report_retired(job, write)
                self._stop(job, state, write)
                self._remove(job, write.place, write.step, only_unmarked=True)
        place = place_of(attempt.config)
        for step in sorted(job.torn - state.taken_back - state.bases - state.writes.keys()):
            if now - state.ordered_back_s.get(step, -math.inf) < TAKE_BACK_S:
                continue
            if place is None or not self._remove(job, place, step, only_unmarked=False):
                return
            state.ordered_back_s[step] = now
            job.markers.pop(step, None)
            if state.last_started_step == step:
                state.last_started_step = state.last_started_s = None  # the next committed step takes its place at once

    def _report_retired(self, job: Job, write: Write) -> None:
        why = f"it was retired: {job.retired[write.step]}"
        self._note("durable_abandoned", job, write, why=why)

    def _note(self, kind: str, job: Job, write: Write, **why: str) -> None:
        """Note that a durable write ended as asked, failed or was abandoned (R31)."""
        took_s, step = self.state.now - write.since_s, write.step
        self.out.note(kind, job=job.name, attempt=step.attempt, step=step.step, seconds={"write": took_s}, **why)

    def _remove(self, job: Job, place: DurablePlace, step: StepId, *, only_unmarked: bool) -> bool:
        """Have what storage holds of a step removed; False if no host is there."""
        able = [host for host in self.state.hosts.live_ids() if self.state.hosts.is_answering(host)]
        if able:
            host = min(able, key=self.states.of(job.name).stuck.__contains__)
            self._order_removal(host, job, place, step, only_unmarked=only_unmarked)
        return bool(able)

    def _order_removal(self, host: str, job: Job, place: DurablePlace, step: StepId, *, only_unmarked: bool) -> None:
        row = WireStep.of(step)
        self.states.of(job.name).removals[step] = (host, self.state.now)
        self.out.send(host, RemoveStep(job=job.name, durable=place, step=row, only_unmarked=only_unmarked))

    def _tell_trust(self, now: float, job: Job, state: DurableState, place: DurablePlace | None) -> None:
        """Have the markers of the trusted step, and of those trusted no more, written again to say so (R38)."""
        pin = job.pins.get(TRUSTED)
        wanted = {StepId(pin.attempt, pin.step): True} if pin is not None else {}
        for step, is_trusted in {**dict.fromkeys(job.distrusted, False), **wanted}.items():
            marker = job.markers.get(step)
            if place is None or marker is None or marker.is_trusted == is_trusted or step in state.writes:
                continue
            is_due = now - state.trust_told_s.get(step, -math.inf) >= TAKE_BACK_S
            hosts = [host for host in self.state.hosts.live_ids() if self.state.hosts.is_answering(host)]
            if is_due and hosts and not self._is_being_removed(state, step):
                state.trust_told_s[step] = now
                said = replace(marker, is_trusted=is_trusted)
                self.out.send(min(hosts, key=state.stuck.__contains__), self._marker_order(job, place, said))

    def _is_being_removed(self, state: DurableState, step: StepId) -> bool:
        """Return whether a host is still removing what storage holds of a step."""
        _, since_s = state.removals.get(step, ("", -math.inf))
        return self.state.now - since_s < REMOVAL_S

    def _start(self, now: float, job: Job, attempt: Attempt, state: DurableState, step: StepId) -> None:
        write = Write(step, now, now, storage_of(attempt.config), {}, {})
        known = next((other.key for other in state.writes.values() if other.place == write.place), state.key)
        state.writes[step], state.last_started_s, state.last_started_step = write, now, step
        state.failed_s = math.inf
        write.key = (known or None) if write.place.key_file else ""
        write.base = self._base(job, attempt, state, write)
        for rank, hosts in job.copies[step].items():
            owner = self.view.owner_host(job, attempt, rank)
            able = self.states.writers(job, step, rank)
            able = sorted(able, key=owner.__ne__)  # the owner first: it alone writes a small shard
            spec = write.specs[rank] = hosts[able[0]].spec
            able = [host for host in able if hosts[host].spec == spec]
            able = [host for host in able if host not in state.stuck] or able
            count = slices_count(spec)
            write.waits.update({(rank, number): able[number * len(able) // count] for number in range(count)})
        row_bytes = BASE_ROW_BYTES * len(write.specs) + BASE_TAG_BYTES * len(write.waits)
        fit = BODY_BYTES_MAX // 2 // row_bytes // int(attempt.config["durable_keep"])  # a list has all markers
        write.bases_max = min(int(attempt.config["durable_bases"]), fit)
        self._order_slices(job, write, set(write.waits))

    def _base(self, job: Job, attempt: Attempt, state: DurableState, write: Write) -> DurableMarker | None:
        """Choose the step whose chunks are not written again: the newest older one that was seen there whole."""
        if state.is_base_failed:
            return None
        spans = job.spans(attempt.attempt_number)
        return max(
            (
                marker
                for step, marker in job.markers.items()
                if step < write.step and step in state.seen_s and marker.key == write.key
                if in_lineage(spans, step) and not self._is_being_removed(state, step)
            ),
            key=lambda marker: marker.step,
            default=None,
        )

    def _order_slices(self, job: Job, write: Write, pieces: set[Piece]) -> None:
        """Send every host the `pieces` that it writes."""
        state = self.states.of(job.name)
        numbers: dict[str, dict[int, list[int]]] = {}
        for rank, number in sorted(pieces):
            numbers.setdefault(write.waits[rank, number], {}).setdefault(rank, []).append(number)
        for host, ranks in sorted(numbers.items()):
            ids = {rank: WireShard(job.name, write.step.attempt, write.step.step, rank) for rank in ranks}
            parts = [_part(write, ids[rank], tuple(mine)) for rank, mine in ranks.items()]
            order = WriteSlices(
                job=job.name,
                durable=write.place,
                step=WireStep.of(write.step),
                parts=tuple(parts),
                key=write.key,
                beside=tuple(WireStep.of(step) for step in sorted((state.writes.keys() | state.bases) - {write.step})),
            )
            self.out.send(host, order)

    def _move(self, job: Job, write: Write, pieces: set[Piece], gone: str) -> bool:
        """Give slices to other holders of their shards, the least busy first; False if some slice has none left."""
        for piece in sorted(pieces):
            write.failed.setdefault(piece, set()).add(gone)
            copies, spec = job.copies.get(write.step, {}).get(piece[0], {}), write.specs[piece[0]]
            holders = [host for host in self.states.writers(job, write.step, piece[0]) if copies[host].spec == spec]
            able = [h for h in holders if h not in write.failed[piece] and h not in write.other_keys]
            if not able:
                return False
            busy = list(write.waits.values())
            write.waits[piece] = min(able, key=busy.count)
        self._order_slices(job, write, pieces)
        return True

    def _abandon(self, job: Job, state: DurableState, write: Write, why: str) -> None:
        """Give a write up, which is no problem by itself: it may have made way for another one."""
        state.stuck = write.stuck()
        self._note("durable_abandoned", job, write, why=why)
        self._stop(job, state, write)

    def _fail(self, job: Job, state: DurableState, write: Write, why: str) -> None:
        self._stop(job, state, write)
        state.is_base_failed = write.base is not None
        state.failed_s = self.state.now
        if job.newest_durable is None or job.newest_durable < write.step:
            state.problem = why
        self._note("durable_failed", job, write, why=why)
        state.failures_count += 1

    def _stop(self, job: Job, state: DurableState, write: Write) -> None:
        """End a write, on every host that is still at it."""
        self.persists.tried(job, write.step)
        step = WireStep.of(write.step)
        for host in sorted(set(write.waits.values())):
            self.out.send(host, WriteSlices(job=job.name, durable=write.place, step=step, parts=(), key=write.key))
        del state.writes[write.step]

    def step_removed(self, host_id: str, report: StepRemoved) -> None:
        """A host removed a step, or could not."""
        job, step = self.state.jobs.get(report.job), report.step.id
        if job is not None:
            self.states.of(job.name).removals.pop(step, None)
        if report.problem is not None:
            why = f"step {step.step} could not be removed from durable storage by {host_id}: {report.problem}"
            self.out.log(f"job {report.job!r}: {why}", "warning")
        elif not report.only_unmarked and job is not None and step in job.torn:
            self.states.of(report.job).taken_back.add(step)

    def marker_written(self, host_id: str, report: MarkerWritten) -> None:
        """A host wrote a marker, or could not."""
        step, job, state = report.step.id, self.state.jobs.get(report.job), self.states.of(report.job)
        self.states.take_back_again(report.job, step)  # it was written after all, perhaps after the removal
        if job is None or step in state.writes or step not in job.markers:
            self._written(host_id, report, MARKER)
        elif report.problem is None:
            job.markers[step] = replace(job.markers[step], is_trusted=report.is_trusted)
            state.changed[step] = self.states.calls_count
        else:
            why = f"the marker of step {step.step} does not say yet whether it is trusted: {report.problem}"
            self.out.log(f"job {job.name!r}: {why}", "warning")

    def slice_written(self, host_id: str, report: SliceWritten) -> None:
        """A host wrote a slice, or could not."""
        self._written(host_id, report, (report.rank, report.number))

    def _written(self, host_id: str, report: SliceWritten | MarkerWritten, piece: Piece) -> None:
        job, now, step = self.state.jobs.get(report.job), self.state.now, report.step.id
        state = self.states.of(report.job)
        write = state.writes.get(step)
        attempt = job.newest if job is not None else None
        if job is None or attempt is None or write is None:
            return
        if write.waits.get(piece) != host_id:
            return  # another host was given the slice meanwhile; what this one wrote is the same
        problem = report.problem
        if problem is None and write.key is None:
            write.key = report.key
        if write.key is not None and report.key is not None and report.key != write.key:
            write.other_keys[host_id] = report.key
            problem = other_key(write.key, report.key)
        if problem is not None:
            self._piece_failed(job, state, write, host_id, piece, problem)
            return
        del write.waits[piece]
        write.reported.add(host_id)
        write.moved_s = now
        if isinstance(report, SliceWritten):
            [write.uses[piece]] = report.use.uses[:1]
            if not write.waits and write.phase == "writing":
                write.phase = "marking"
                self._order_marker(job, host_id, write)
            return
        if not state.abandoned_in_a_row:
            state.abandoned_count = 0  # it ended in its ordinary time: storage keeps up again
        del state.writes[step]
        state.abandoned_in_a_row, state.problem = 0, _refused(write)
        state.is_base_failed = False
        if step in job.torn:
            self._report_retired(job, write)
            self._give_up_retired(now, job, attempt, state)
            return
        job.markers[step] = write.marker
        state.changed[step], state.lacks = self.states.calls_count, ""
        state.last_done_s = state.seen_s[step] = now
        state.write_s, state.key = now - write.since_s, write.key
        self._note("durable", job, write)
        self.steps.send_durable(job, step)
        if not write.other_keys:  # else it is unclear which key a reader will have
            self._retire_durable(job, attempt, state, host_id, write)
        self.persists.written(job, step)
        self.retention.retain(job)

    def _retire_durable(self, job: Job, attempt: Attempt, state: DurableState, host_id: str, write: Write) -> None:
        """Have the steps removed that `durable_keep` lets go, but for those of which writes under way read.

        These go after the next marker. A write under way that would go at once is given up. The newest trusted step
        stays.
        """
        spans, keep, key = job.spans(attempt.attempt_number), int(attempt.config["durable_keep"]), write.key or ""
        keys = {s: marker.key for s, marker in job.markers.items() if in_lineage(spans, s)}
        for older in [w for w in _unmarked(state) if w.step in retire({**keys, w.step: key}, keep, key)]:
            self._abandon(job, state, older, f"durable_keep={keep} keeps newer steps and would remove it at once")
        trusted = max(job.trusted_steps & keys.keys(), default=None)
        for old in sorted({*retire(keys, keep, key)} - state.bases - {trusted}):
            del job.markers[old]
            state.changed[old] = self.states.calls_count
            self._order_removal(host_id, job, write.place, old, only_unmarked=False)

    def _piece_failed(
        self, job: Job, state: DurableState, write: Write, host_id: str, piece: Piece, problem: str
    ) -> None:
        """Give a slice to another holder of its shard; the write is over if there is none."""
        if not any(host_id in hosts for hosts in write.failed.values()):  # once a host, not once a slice
            why = f"durable write of step {write.step.step} failed on {host_id}: {problem}"
            self.out.log(f"job {job.name!r}: {why}", "warning")
        if piece != MARKER and self._move(job, write, {piece}, host_id):
            return
        has_other_key = host_id in write.other_keys
        for other in [w for w in state.writes.values() if has_other_key and w is not write]:  # under a key that goes
            self._abandon(job, state, other, problem)
        self._fail(job, state, write, _refused(write) if has_other_key else problem)
        self._order_removal(host_id, job, write.place, write.step, only_unmarked=True)  # full storage needs the room
        if has_other_key and state.key is not None:  # the file was replaced: the next write, at once, takes its key
            state.key = state.last_started_s = state.last_started_step = None
        elif has_other_key:
            self.persists.refuse(job, write.step, ("ConfigError", f"job {job.name!r}: {state.problem}"))

    def _order_marker(self, job: Job, host_id: str, write: Write) -> None:
        write.waits[MARKER] = host_id  # its death ends the write
        write.is_trusted = write.step in job.trusted_steps
        self.out.send(host_id, self._marker_order(job, write.place, write.marker))

    def _marker_order(self, job: Job, place: DurablePlace, marker: DurableMarker) -> WriteMarker:
        older = sorted(step for step in self.states.of(job.name).writes if step < marker.step)
        return WriteMarker(
            job=job.name,
            durable=place,
            step=WireStep.of(marker.step),
            key=marker.key,
            specs={rank: WireSpec.of(spec) for rank, spec in sorted(marker.specs.items())},
            uses=wire_uses(marker),
            lineage=job.lineage_of(marker.step.attempt),
            beside=tuple(map(WireStep.of, older)),
            is_trusted=marker.is_trusted,
        )

    def forget(self, name: str) -> None:
        """Forget a removed job: another one of its name begins without history."""
        self.states.forget(name)

    def host_died(self, job: Job, host_id: str) -> None:
        """Hand a dead writer's pieces to other holders; a write without one is over."""
        state, attempt = self.states.of(job.name), job.newest
        state.stuck.discard(host_id)  # its next process has another way to the storage
        state.removals = {step: removal for step, removal in state.removals.items() if removal[0] != host_id}
        for write in list(state.writes.values()):
            if attempt is not None and host_id in write.waits.values():
                self._writer_died(job, attempt, state, write, host_id)

    def _writer_died(self, job: Job, attempt: Attempt, state: DurableState, write: Write, host_id: str) -> None:
        hosts = self.state.hosts
        others = [host for host in hosts.live_ids() if host != host_id and hosts.is_answering(host)]
        if write.waits.get(MARKER) == host_id and others and write.step not in job.torn:
            self._order_marker(job, others[0], write)
            return
        owed = {piece for piece, host in write.waits.items() if host == host_id}
        if MARKER in owed or not self._move(job, write, owed, host_id):
            state.problem = f"host {host_id} died while it wrote, and no other host can write what it owed"
            self._abandon(job, state, write, state.problem)
            state.last_started_step = None


def _unmarked(state: DurableState) -> list[Write]:
    """Return the writes under way whose marker is not ordered yet."""
    return [write for write in state.writes.values() if write.phase != "marking"]


def _is_late(now: float, state: DurableState, write: Write) -> bool:
    return is_late(now, write.since_s, write.moved_s, state.write_s)


def _part(write: Write, shard: WireShard, numbers: tuple[int, ...]) -> SlicesOfShard:
    """Return an order of slices; the base is left out unless it has the rank's shard in the same sizes."""
    base, spec = write.base, write.specs[shard.rank]
    older = base.specs.get(shard.rank) if base is not None and write.bases_max else None
    if base is None or older is None or older._replace(digest=spec.digest) != spec:
        return SlicesOfShard(shard, spec.digest, numbers, None, write.bases_max)
    tags = tuple(use.tag for use in base.uses.get(shard.rank, ()))
    return SlicesOfShard(
        shard, spec.digest, numbers, BaseShard(WireStep.of(base.step), older.digest, tags), write.bases_max
    )


def _refused(write: Write) -> str:
    """Name the hosts that have another key than a write, with the remedy; "" if none has."""
    if not write.other_keys:
        return ""
    here = ", ".join(sorted(set(write.other_keys.values()))[:KEYS_NAMED_MAX])
    why = other_key(write.key or "", here)
    return f"{named_hosts(write.other_keys)} wrote nothing of step {write.step.step}: {why}"

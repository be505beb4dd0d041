"""Hosts that hold a kept step's copies in place of hosts that die often. Pure (R29)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property

from memstore.core.capacity.reservations import Reservations
from memstore.core.cluster.job import Attempt, Job
from memstore.core.cluster.state import ClusterState
from memstore.core.repair.pushes import RepairPushes
from memstore.core.targets.targets import ClusterView
from recovery.inventory import Copy, ShardId, StepId

ASKED_MAX = 8  # hosts looked at for one copy
SEARCHES_MAX = 32  # copies of a step in one look for which a host is sought among all; the next goes on with others


class Substitutes:
    """A scan of one step of a job: values that are the same for all its shards are computed once."""

    def __init__(
        self,
        state: ClusterState,
        view: ClusterView,
        room: Reservations,
        pushes: RepairPushes,
        job: Job,
        attempt: Attempt,
        step: StepId,
    ) -> None:
        self.hosts, self.view, self.room, self.pushes = state.hosts, view, room, pushes
        self.now, self.job, self.attempt, self.step = state.now, job, attempt, step
        now = self.now
        self.flaky = {h for h, s in self.hosts.states.items() if s.deaths_s and self.hosts.is_on_probation(now, h)}
        self._searches_left = SEARCHES_MAX
        self._beside: dict[str, set[ShardId]] = {}  # host -> the job's shards there that placement does not ask of it

    def of(self, shard: ShardId, wanted: list[str], good: Mapping[str, Copy]) -> list[str]:
        """Return the substitute hosts for a shard.

        A host that has the copy, or is being sent it, keeps it; a new one is chosen where a flapping host lacks it:
        first of another failure domain, then with the fewest copies of the step. None is asked for more than its room
        for repairs takes.
        """
        flaky = self.flaky.intersection(wanted)
        if not flaky or self.view.placement(self.job) is None:
            return []
        has_all = all(h in good and not good[h].missing for h in flaky)
        steady = [h for h in wanted if h not in flaky]
        taken, near = self.hosts.domains(steady), {self._places.get(h) for h in steady}
        count = max(0, self.attempt.replicas - len(taken))

        def may(host: str) -> bool:
            is_free = host not in wanted and host not in self.flaky and self.hosts.is_answering(host)
            is_refused = (shard, host) in self.pushes.refused_s
            return is_free and not is_refused and taken.isdisjoint(self.hosts.domains([host]))

        begun = {*good, *(() if has_all else self._pushed.get(shard, ()))}
        known = [h for h in begun if may(h)]
        known.sort(key=lambda h: (h not in good, self._places.get(h) in near, self._load(h), h))
        found = self._with_room(shard, known)[:count]
        is_vain = shard in self.pushes.vain_s or not self._searches_left or not self._is_source_free(good)
        if has_all or len(found) == count or is_vain:
            return found
        self._searches_left -= 1
        others = self._far_first(near, (h for h in self._by_load if h not in begun and may(h)))
        found = [*found, *self._with_room(shard, others)][:count]
        if len(found) < count:
            self.pushes.vain_s[shard] = self.now
        return found

    def _far_first(self, near: set[str | None], able: Iterable[str]) -> list[str]:
        """Return the first that are in another place than those that have it, then the others."""
        far: list[str] = []
        others: list[str] = []
        for host in able:
            (others if self._places.get(host) in near else far).append(host)
            if len(far) == ASKED_MAX:
                break
        return [*far, *others][:ASKED_MAX]

    def _with_room(self, shard: ShardId, hosts: Iterable[str]) -> list[str]:
        return [host for host in hosts if self._has_room(shard, host)]

    def _has_room(self, shard: ShardId, host: str) -> bool:
        """Return whether a host has room for this copy among those that placement does not ask of it: one version.

        Beyond that a copy would take the room of steps that are still to be put, and nothing would be committed.
        """
        job, attempt, here = self.job, self.attempt, self._ranks.get(host, set())
        if host not in self._beside:
            held = {
                ShardId(job.name, s.attempt, s.step, r) for s, ranks in job.on_host.get(host, {}).items() for r in ranks
            }
            held |= {s for s, target in self.pushes.under_way if target == host and s.job == job.name}
            self._beside[host] = {
                s for s in held if s.rank not in here and host not in self.view.wanted(job, attempt, s.rank)
            }
        specs = map(job.spec, self._beside[host] | {shard})
        taken = sum(spec.chunks_count for spec in specs if spec is not None)
        return taken <= sum(self.room.need(job, attempt, rank) for rank in here)

    def pushed(self, shard: ShardId, target: str) -> None:
        """Note a copy that was ordered meanwhile."""
        if target in self._beside and target not in self.view.wanted(self.job, self.attempt, shard.rank):
            self._beside[target].add(shard)

    def _is_source_free(self, good: Iterable[str]) -> bool:
        """Return whether one of these hosts may send a copy now."""
        return any(self.hosts.is_answering(host) and self.pushes.is_free(host) for host in good)

    def _load(self, host: str) -> int:
        return len(self.job.on_host.get(host, {}).get(self.step, ()))

    @cached_property
    def _by_load(self) -> list[str]:
        placement = self.view.placement(self.job)
        return sorted(placement.targets, key=lambda h: (self._load(h), h)) if placement is not None else []

    @cached_property
    def _places(self) -> Mapping[str, str | None]:
        return self.hosts.live_domains(self.attempt.level_asked)

    @cached_property
    def _pushed(self) -> dict[ShardId, list[str]]:
        found: dict[ShardId, list[str]] = {}
        for shard, target in self.pushes.under_way:
            found.setdefault(shard, []).append(target)
        return found

    @cached_property
    def _ranks(self) -> dict[str, set[int]]:
        found: dict[str, set[int]] = {}
        for rank, member in self.attempt.members.items():
            found.setdefault(member.host_id, set()).add(rank)
        return found

"""The launcher: it starts all ranks, waits until one ends, ends the others, and starts again, as Ray Train does."""

from __future__ import annotations

import random

from memstore.core.wire.calls import RankLoss
from memstore.inplace.lifelines import End
from memstore.inplace.membership import RankMembership
from memstore.testing.simulator.rank.in_place import InPlaceProcess, SimBoard
from memstore.testing.simulator.rank.rank import SimRank
from memstore.testing.simulator.rank.shared_shard_rank import Dealer, SharedShardRank
from memstore.testing.simulator.run.cluster import SimCluster
from memstore.testing.simulator.world.virtual_time import Thread

REPLACED_SHARE = 0.3  # of launches


class Launcher:
    """The launches of one simulation."""

    def __init__(self, cluster: SimCluster) -> None:
        self.cluster = cluster
        self.dealer = Dealer(cluster.scenario)

    def launches(self) -> Thread:
        """Launch again and again until the end; not while the job is said to be over."""
        cluster = self.cluster
        while not cluster.is_over:
            yield (
                lambda: (
                    not cluster.is_job_over
                    and cluster.now >= cluster.launches_from_s
                    and any(h.is_serving for h in cluster.holders.values())
                )
            )
            hosts = [n for n, h in sorted(cluster.holders.items()) if h.is_serving]
            key = f"key-{next(cluster.ids)}"
            cluster.ranks = self._ranks(hosts, key)
            place = self._place_of_replaced()
            for rank in cluster.ranks:
                cluster.start_rank(rank)
            if place is not None:
                yield from self._replace(place, hosts)
            yield lambda: any(r.is_dead or r.is_left for r in cluster.ranks)
            yield cluster.rng.uniform(0.1, 1.5)
            for rank in [r for r in cluster.ranks if not r.is_left]:
                cluster.kill_rank(rank, "another rank ended")
            for rank in cluster.ranks:
                cluster.note(f"rank {rank.rank} of attempt {rank.attempt} ended: {rank.why[:120]}")
            yield cluster.rng.uniform(0.2, 1.0)

    def _ranks(self, hosts: list[str], key: str) -> list[SimRank]:
        cluster, scenario = self.cluster, self.cluster.scenario
        if not scenario.shards:
            places = [(rank, hosts[rank % len(hosts)]) for rank in range(scenario.world_size)]
            return [SimRank(cluster, cluster.checker, rank, host, key) for rank, host in places]
        shard_of = self.dealer.deal(may_mistake=not cluster.checker.observed.is_healed)
        return [self._sharing(rank, hosts[rank % len(hosts)], key, shard_of) for rank in range(len(shard_of))]

    def _sharing(self, rank: int, host: str, key: str, shard_of: list[int] | tuple[int, ...]) -> SharedShardRank:
        return SharedShardRank(self.cluster, self.cluster.checker, self.dealer, rank, host, key, shard_of)

    def _place_of_replaced(self) -> int | None:
        """Choose, now and then, a process that is stuck before its get: another takes its place in the launch (R20)."""
        cluster, rng = self.cluster, self.dealer.rng
        if not cluster.scenario.shards or rng.random() > REPLACED_SHARE:
            return None
        place = rng.randrange(len(cluster.ranks))
        stuck = cluster.ranks[place]
        if isinstance(stuck, SharedShardRank):
            stuck.stuck_at = "get"
        return place

    def _replace(self, place: int, hosts: list[str]) -> Thread:
        cluster, rng = self.cluster, self.dealer.rng
        yield rng.uniform(0.02, 2.0)
        old = cluster.ranks[place]
        # With racks it stays on its host: a rack might have no rank left otherwise.
        host = old.host_id if cluster.scenario.racks else rng.choice(hosts)
        if isinstance(old, SharedShardRank):
            cluster.kill_rank(old, "it is replaced")
            cluster.ranks[place] = self._sharing(place, host, old.key, old.shard_of)
            cluster.start_rank(cluster.ranks[place])


# -- in place -----------------------------------------------------------------------------------------
# The launcher of a job that recovers in place: it replaces lost ranks, and starts all again only where that failed.
#
# It mirrors `memstore/inplace/ray_actors.py` and `memstore/adapters/ray_train.py`; which generation is wanted and
# which process is a rank it decides by the product's `memstore/inplace/membership.py`.


POLL_S = 0.05
HANG_AFTER_S = 3.0
LOSSES_MAX = 20
ZOMBIE_SHARE = 0.4  # of frozen processes that a kill does not reach
FOUND_AFTER_S = 8.0  # such a process is found, and killed at last


class InPlaceLauncher:
    """The runs of one simulation, one at a time."""

    def __init__(self, cluster: SimCluster) -> None:
        self.cluster = cluster
        self.rng = random.Random(f"launches in place {cluster.scenario.seed}")

    def launches(self) -> Thread:
        """Run again and again until the end; not while the job is said to be over."""
        cluster = self.cluster
        while not cluster.is_over:
            yield (
                lambda: not cluster.is_job_over and cluster.now >= cluster.launches_from_s and bool(_serving(cluster))
            )
            run = _SimRun(cluster, self.rng)
            yield from run.to_the_end()
            yield self.rng.uniform(0.2, 1.0)


def _serving(cluster: SimCluster) -> list[str]:
    return [name for name, holder in sorted(cluster.holders.items()) if holder.is_serving]


class _SimRun:
    """One run: the process of each rank, and the board that all of them see."""

    def __init__(self, cluster: SimCluster, rng: random.Random) -> None:
        self.cluster, self.rng = cluster, rng
        self.run = f"r{next(cluster.ids)}"
        self.board = SimBoard()
        self.members = RankMembership(self.board, cluster.scenario.world_size)
        self.processes: list[InPlaceProcess] = []  # by rank
        self.lost: list[int] = []  # ranks that the launcher knows to be lost
        self.frozen_s: dict[InPlaceProcess, float] = {}  # since when a process gives no sign of life
        self.noticed: set[InPlaceProcess] = set()
        self.losses = 0
        self.is_one_by_one = rng.random() < 0.4  # Ray Train replaces ranks one by one, each with its generation
        self.has_watchdogs = random.Random(f"watchdogs {cluster.scenario.seed} {self.run}").random() < 0.5

    def to_the_end(self) -> Thread:
        cluster = self.cluster
        hosts = _serving(cluster)
        for rank in range(cluster.scenario.world_size):
            self.processes.append(self._started(rank, hosts[rank % len(hosts)]))
        cluster.ranks = [process.store for process in self.processes]
        for process in self.processes:
            cluster.start_process(process, 0.0)
        self.members.begin(0)
        while not self._is_over():
            yield POLL_S
            self._look()
            if self.lost:
                yield from self._replace()
        for process in self.processes:
            if not process.is_left:
                cluster.kill_rank(process.store, "its run ended")
        for process in self.processes:
            cluster.note(f"rank {process.rank} of {self.run} ended: {process.store.why[:120]}")

    def _is_over(self) -> bool:
        """Return whether the run is given up: the job is over, a function has raised, or no process is left."""
        cluster = self.cluster
        is_empty = all(process.is_dead or process.is_left for process in self.processes)
        has_raised = any(self._has_raised(process) for process in self.processes)
        return cluster.is_job_over or cluster.is_over or is_empty or has_raised or self.losses > LOSSES_MAX

    def _has_raised(self, process: InPlaceProcess) -> bool:
        return process.has_raised and process not in self.noticed and not process.is_left

    def _started(self, rank: int, host: str) -> InPlaceProcess:
        cluster = self.cluster
        life, first = self.members.register(rank), self.members.generation + 1
        return InPlaceProcess(cluster, cluster.checker, self.rng, self.board, self.run, rank, life, first, host)

    # -- losses -------------------------------------------------------------------------------

    def _look(self) -> None:
        """Look for processes that ended, or give no sign of life, and notice them now or a little later."""
        cluster = self.cluster
        for process in self.processes:
            if process in self.noticed:
                continue
            if process.is_dead or process.is_left:
                if self.has_watchdogs:
                    self.members.mark_broken()  # its watchdog says so at once; it is replaced when the launcher sees it
                self._notice(process, self.rng.uniform(0.0, 1.5))
            elif not process.is_frozen:
                self.frozen_s.pop(process, None)
            elif cluster.now - self.frozen_s.setdefault(process, cluster.now) > HANG_AFTER_S:
                self.members.mark_broken()  # frees the others now
                if self.rng.random() < ZOMBIE_SHARE:
                    process.is_left = True
                    cluster.at(FOUND_AFTER_S, lambda p=process: cluster.kill_rank(p.store, "found at last"))  # type: ignore[misc]
                else:
                    cluster.kill_rank(process.store, "frozen, and killed")
                self._notice(process, self.rng.uniform(0.0, 1.5))

    def _notice(self, process: InPlaceProcess, after_s: float) -> None:
        self.noticed.add(process)
        self.cluster.at(after_s, lambda: self.lost.append(process.rank))

    def _replace(self) -> Thread:
        """Replace lost ranks, and let all meet again."""
        cluster = self.cluster
        self.members.mark_broken()
        waiting, cluster.in_recovery = cluster.in_recovery, []
        for work in waiting:
            work()
        yield self.rng.uniform(0.0, 0.5) + self._late_s()
        yield lambda: bool(_serving(cluster)) or self._is_over()
        while self.lost:
            ranks, self.lost = (self.lost[:1], self.lost[1:]) if self.is_one_by_one else (self.lost, [])
            self.losses += len(ranks)
            if self._is_over():
                return
            for rank in ranks:
                self._start_replacement(rank)
            self.members.begin(self.members.generation + 1)
            yield self.rng.uniform(0.0, 0.5)

    def _late_s(self) -> float:
        late_s, self.cluster.late_launch_s = self.cluster.late_launch_s, 0.0
        return late_s

    def _start_replacement(self, rank: int) -> None:
        cluster, old = self.cluster, self.processes[rank]
        end = End.FROZEN if old.is_left or old.is_frozen else End.GONE
        silent_s, generation = end.silent_s(HANG_AFTER_S), self.members.generation + 1
        self.board.losses.append(RankLoss(rank, generation, end.cause, cluster.scenario.has_spares, silent_s))
        process = self._started(rank, self._host(old.host_id))
        cluster.note(f"rank {rank} of {self.run}: process {process.life} on {process.host_id} replaces {old.store.why}")
        self.processes[rank] = process
        cluster.ranks[rank] = process.store
        cluster.start_process(process, self.rng.choice([0.02, 0.3, 1.0, 2.0]))

    def _host(self, before: str) -> str:
        """Return the host of a replacement: the one before, or one of its rack, unless there are spares."""
        cluster, hosts = self.cluster, _serving(self.cluster)
        if not hosts:
            return before
        near = [host for host in hosts if cluster.racks[host] == cluster.racks[before]] or hosts
        if before in near and not (cluster.scenario.has_spares and self.rng.random() < 0.5):
            return before
        return self.rng.choice(near)

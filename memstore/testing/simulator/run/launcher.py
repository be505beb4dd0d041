"""The launcher: it starts all ranks, waits until one ends, ends the others, and starts again, as Ray Train does."""

from __future__ import annotations

from memstore.testing.simulator.rank.dealing import Dealer
from memstore.testing.simulator.rank.rank import SimRank
from memstore.testing.simulator.rank.shared_shard_rank import SharedShardRank
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

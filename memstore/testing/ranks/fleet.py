"""The ranks of a job on a `ProcessCluster`: launched together, checked together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from memstore.testing.clusters.processes import ProcessCluster
from memstore.testing.ranks.rank import disagreements
from memstore.testing.ranks.rank_process import RankNursery, RankProcess, together


class Fleet:
    """The launches of one job.

    `kib` is twice what each rank puts, or one number for each; `pipelines` has the one that each rank is in;
    `job_fields` are fields of Config, such as replicas.
    """

    def __init__(
        self,
        cluster: ProcessCluster,
        nursery: RankNursery,
        *,
        job: str = "train",
        seed: int = 1,
        kib: int | Sequence[int] = 256,
        pipelines: Sequence[int] = (),
        **job_fields: Any,
    ) -> None:
        self.cluster, self.nursery, self.job, self.seed, self.kib = cluster, nursery, job, seed, kib
        self.pipelines = pipelines
        self.config = {**asdict(cluster.config), "connect_timeout_s": 20.0, **job_fields}

    def spawn(self, hosts: Sequence[str], **env: str) -> list[RankProcess]:
        """Start one rank per entry of `hosts`; none has connected yet."""
        return [
            self.nursery.start(
                rank,
                {"MEMSTORE_HOST": host, "TORCHELASTIC_RUN_ID": "run", **env},
                namespace=self.cluster.namespace(host),
            )
            for rank, host in enumerate(hosts)
        ]

    def join(self, ranks: Sequence[RankProcess], *, world_size: int | None = None, **options: Any) -> None:
        """Send connect to every rank; the caller reads the replies."""
        for rank in ranks:
            rank.begin("connect", **self.connect_command(rank.rank, world_size or len(ranks), **options))

    def connect_command(self, rank: int, world_size: int, **options: Any) -> dict[str, Any]:
        """Return the connect command of one rank."""
        return {
            "job": self.job,
            "rank": rank,
            "world_size": world_size,
            "config": self.config,
            "seed": self.seed,
            "nbytes": 512 * (self.kib if isinstance(self.kib, int) else self.kib[rank]),
            **({"groups": {"pp": self.pipelines[rank]}} if self.pipelines else {}),
            **options,
        }

    def launch(self, hosts: Sequence[str], **options: Any) -> list[RankProcess]:
        """Start and connect one rank per entry of `hosts`."""
        ranks = self.spawn(hosts)
        self.join(ranks, **options)
        for rank in ranks:
            rank.finish()
        return ranks

    def resume(self, hosts: Sequence[str], **options: Any) -> tuple[list[RankProcess], dict[str, Any]]:
        """Launch, get, check every byte on every rank; return the ranks and the reply of rank 0."""
        ranks = self.launch(hosts, **options)
        got = together(ranks, "get")
        self.check(got)
        return ranks, got[0]

    def begin(self, hosts: Sequence[str], last_step: int, **options: Any) -> list[RankProcess]:
        """Launch a job without history and put steps 0 to `last_step`; the last is committed on return."""
        ranks, got = self.resume(hosts, **options)
        if got["step"] is not None:
            raise AssertionError(f"a new job has step {got['step']}")
        together(ranks, "train", first=0, last=last_step)
        return ranks

    def check(self, got: Sequence[dict[str, Any]]) -> None:
        """Check that every rank has the same step, and exactly the bytes that it put there."""
        for kind, words in disagreements(got):
            raise AssertionError(f"{kind}: {words}")

    def kill(self, ranks: Sequence[RankProcess]) -> None:
        """Send SIGKILL to all ranks."""
        for rank in ranks:
            rank.kill()

    def put_until_committed(self, ranks: Sequence[RankProcess], first: int, *, limit: int = 1000) -> int:
        """Put step after step, as a training loop does, until one is committed; return that step."""
        for step in range(first, first + limit):
            together(ranks, "put", step=step)
            if all(reply["level"] == "committed" for reply in together(ranks, "settle", step=step, timeout_s=1.0)):
                return step
        raise AssertionError(f"no step from {first} to {first + limit - 1} was committed")

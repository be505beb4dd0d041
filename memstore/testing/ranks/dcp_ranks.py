"""Ranks in one gloo group and one job, which save and load through torch.distributed.checkpoint.

A `DcpFleet` forks them from a process that has imported torch.distributed, so that a launch of eight costs a second.
Each does functions of a test's own file: `run(ranks, "save", step=3)` calls `save(rank, step=3)` there.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
import warnings
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict  # ranks need it, and it is imported before the first fork
import torch.distributed.fsdp
import torch.distributed.tensor.parallel  # noqa: F401
from torch.distributed.checkpoint.api import CheckpointException

from memstore.testing.clusters.processes import ProcessCluster
from memstore.testing.ranks.fleet import Fleet
from memstore.testing.ranks.rank import RankProgram
from memstore.testing.ranks.rank_process import RankFailed, RankNursery, RankProcess, nursery_main

REPLY_S = 150.0
GROUP_S = 120.0


class DcpFleet(Fleet):
    """The launches of one job whose ranks have a process group."""

    def __init__(
        self, cluster: ProcessCluster, nursery: RankNursery, program: Path, folder: Path, **job_fields: Any
    ) -> None:
        """Prepare launches.

        Args:
            program: The file whose functions the ranks run.
            folder: For the files through which the ranks of a launch find one another.
        """
        super().__init__(cluster, nursery, **job_fields)
        self.program, self.folder, self.launches_count = program, folder, 0

    def launch(self, hosts: Sequence[str], **options: Any) -> list[RankProcess]:
        """Start one rank per entry of `hosts`, in one group, and connect them."""
        ranks = self.spawn(hosts, GLOO_SOCKET_IFNAME="lo", MASTER_ADDR="127.0.0.1")
        self.launches_count += 1
        for rank in ranks:
            meeting = self.folder / f"{self.job}-{self.launches_count}"
            rank.begin("group", rank=rank.rank, world_size=len(ranks), file=str(meeting), program=str(self.program))
        for rank in ranks:
            rank.finish(REPLY_S)
        self.join(ranks, **options)
        for rank in ranks:
            rank.finish(REPLY_S)
        return ranks

    def leave(self, ranks: Sequence[RankProcess]) -> None:
        """Close the stores, all together, and end the ranks."""
        run(ranks, "close", do="close")
        self.kill(ranks)


def run(ranks: Sequence[RankProcess], name: str, *, do: str = "run", **arguments: Any) -> list[dict[str, Any]]:
    """Run a function of the program on all ranks together; raise the first error after all have ended."""
    found = outcomes(ranks, name, do=do, **arguments)
    for reply in found:
        if isinstance(reply, RankFailed):
            raise reply
    return [reply for reply in found if not isinstance(reply, RankFailed)]


def outcomes(
    ranks: Sequence[RankProcess], name: str, *, do: str = "run", **arguments: Any
) -> list[dict[str, Any] | RankFailed]:
    """Run a function of the program on all ranks together; return each rank's result or error."""
    for rank in ranks:
        rank.begin(do, **({"name": name, "arguments": arguments} if do == "run" else arguments))
    found: list[dict[str, Any] | RankFailed] = []
    for rank in ranks:
        try:
            found.append(rank.finish(REPLY_S))
        except RankFailed as failed:
            found.append(failed)
    return found


class DcpRank(RankProgram):
    """The rank's end of the commands."""

    program: ModuleType
    rank: int

    def do_group(self, rank: int, world_size: int, file: str, program: str) -> dict[str, Any]:
        """Join the process group of the launch."""
        self.rank = rank
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        dist.init_process_group(
            "gloo", init_method=f"file://{file}", rank=rank, world_size=world_size, timeout=timedelta(seconds=GROUP_S)
        )
        sys.path.insert(0, str(Path(program).parent))  # what it imports lies beside it
        spec = importlib.util.spec_from_file_location(Path(program).stem, program)
        if spec is None or spec.loader is None:
            raise ImportError(f"{program} cannot be imported")
        self.program = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = self.program
        spec.loader.exec_module(self.program)
        return {}

    def do_run(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Call a function of the program; its result is the reply."""
        try:
            reply: dict[str, Any] = getattr(self.program, name)(self, **arguments) or {}
        except CheckpointException as error:  # which is no Exception
            raise RuntimeError(f"CheckpointException: {error}") from error
        return reply

    def load(self, state: dict[str, Any], step: int | None = None, **options: Any) -> dict[str, Any]:
        """Load into a state from the store."""
        dcp.state_dict_loader.load(state, storage_reader=self.store.dcp_reader(step), **options)
        return state


if __name__ == "__main__":
    nursery_main(DcpRank)

"""Ray Train: a lost worker is replaced, the others keep their processes and enter the training function again.

    @memstore.inplace.reentrant
    def train(config): ...

    TorchTrainer(train, torch_config=InPlaceTorchConfig(), run_config=RunConfig(failure_config=FailureConfig(5)), ...)

Each replacement counts as one of `max_failures`. Ray's replica groups, which this uses, have a price: LOCAL_RANK is 0
and LOCAL_WORLD_SIZE 1 on every worker, elastic sizes and the preemption watcher are off, and `datasets=` would hand a
replacement all of the data. If all workers are lost at once, Ray starts the whole group again, as ever.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import Any

import ray
import ray.train
from ray.train.torch.config import TorchConfig, _set_torch_distributed_env_vars, _TorchBackend

from memstore.adapters.ray_train_losses import allow_losses_at_once, limit_wait_for_worker
from memstore.adapters.ray_train_names import NAMES
from memstore.adapters.ray_train_spares import Spares, spares_of
from memstore.config import check_limit, check_whole
from memstore.core.cluster.text import CAUSES
from memstore.errors import RecoveryError
from memstore.inplace.failures import REPEATS, Failures
from memstore.inplace.meeting import MeetingServer, Place
from memstore.inplace.private_names import missing
from memstore.inplace.reentry import join_meeting

log = logging.getLogger("memstore")
LOOK_S = 0.1


@dataclass
class InPlaceTorchConfig(TorchConfig):  # type: ignore[misc]  # Ray is not typed
    """TorchConfig of a job that recovers in place; `torch_config=` of a TorchTrainer.

    Attributes:
        hang_after_s: A process that is frozen for this long is lost, or a host that is silent; None: only what Ray
            sees is.
        leave_s: Longest wait for a rank that lives to leave the function after a loss, such as one in a computation of
            its own; then its process is killed and replaced, too.
        meet_s: Longest wait for a replacement, for which a host may lack room; then Ray starts all workers again.
        spares: Workers beside those of the job that wait, imports done, to take the place of a lost one. Each holds
            `resources_per_worker`.
    """

    hang_after_s: float | None = 3.0
    leave_s: float = 60.0
    meet_s: float = 120.0
    spares: int = 0

    def __post_init__(self) -> None:
        """Refuse a number of spares that is none, and times that are not above 0."""
        self.spares = check_whole("spares", self.spares)
        self.hang_after_s = None if self.hang_after_s is None else check_limit("hang_after_s", self.hang_after_s)
        self.leave_s, self.meet_s = check_limit("leave_s", self.leave_s), check_limit("meet_s", self.meet_s)
        check_limit("timeout_s", self.timeout_s)

    @property
    def backend_cls(self) -> Any:
        """Return the backend, which Ray makes in the process of its controller."""
        lacking = missing(NAMES)
        if not lacking:
            return InPlaceBackend
        log.warning(
            "memstore: Ray %s lacks %s: every lost worker restarts the whole group", ray.__version__, ", ".join(lacking)
        )
        return _TorchBackend


class InPlaceBackend(_TorchBackend):  # type: ignore[misc]
    """Tells workers where they meet, which generation is wanted, and when one has lost a rank."""

    has_replica_groups = True

    def __init__(self) -> None:
        self.server: MeetingServer | None = None
        self.spares: Spares | None = None
        self.failures = Failures()
        self._actors: dict[int, Any] = {}  # by rank; Ray shows a new worker before it is registered here

    def on_start(self, worker_group: Any, backend_config: InPlaceTorchConfig) -> None:
        """Begin with a whole group, or go on with the replacement of one worker.

        Replaced workers come one by one: the ranks that are left meet once the last of them is there.
        """
        is_whole = _is_whole(worker_group)
        self._end_if_hopeless()
        if is_whole:
            former = self.server
            self.server = MeetingServer(len(worker_group), backend_config.hang_after_s)
            if former is not None:
                former.close()
            allow_losses_at_once(worker_group)
            limit_wait_for_worker(worker_group, backend_config.meet_s)
            self._end_spares()
            rehearsed = (come, own_rank, _set_torch_distributed_env_vars)
            self.spares = spares_of(worker_group, backend_config.spares, rehearsed)
        server = self.server
        if server is None:
            raise RuntimeError("a replacement came before the group did")
        worker_group.execute(_set_torch_distributed_env_vars)
        lives = {}
        for rank, worker in zip(worker_group.execute(own_rank), worker_group.get_workers(), strict=True):
            self._actors[rank] = worker.actor
            is_spare = self.spares is not None and rank in self.spares.ranks
            lives[rank] = server.register(rank, is_spare=is_spare)
        worker_group.execute(
            come, address=ray.util.get_node_ip_address(), port=server.port, run=server.run, lives=lives,
            first=server.generation + 1, backend=backend_config.backend, timeout_s=float(backend_config.timeout_s),
            meet_s=backend_config.meet_s, leave_s=backend_config.leave_s, lifeline_port=server.lifeline_port,
            hang_after_s=backend_config.hang_after_s,
        )  # fmt: skip
        for process in lives.items():
            server.expect(process, backend_config.meet_s, time.monotonic())
        if not server.is_done():
            server.begin(server.generation + 1)
        if self.spares is not None:
            self.spares.plan()
        if is_whole and backend_config.hang_after_s is not None:
            threading.Thread(target=self._watch, args=(server,), name="memstore-losses", daemon=True).start()

    def on_training_start(self, worker_group: Any, backend_config: InPlaceTorchConfig) -> None:
        """Leave the process group to the reentrant function."""

    def on_shutdown(self, worker_group: Any, backend_config: InPlaceTorchConfig) -> None:
        """Let the workers that are left stop waiting for the one that Ray replaces; end the spares of a whole group."""
        if _is_whole(worker_group):
            self._end_spares()
        elif self.server is not None:
            self.server.mark_broken()

    def _end_if_hopeless(self) -> None:
        """Raise the failure that has come again and again at one step, which Ray takes for the end of the job."""
        for failure in self.server.take_failures() if self.server is not None else ():
            if self.failures.is_hopeless(failure):
                raise RecoveryError(
                    f"rank {failure.rank} failed after step {failure.step} in the same way in {REPEATS} generations, "
                    f"so the job ends: {failure.kind}. The last time:\n{failure.text}"
                )

    def _end_spares(self) -> None:
        if self.spares is not None:
            self.spares.close()
        self.spares = None

    def _watch(self, server: MeetingServer) -> None:
        """Kill the workers that are lost and of which Ray does not know yet, which makes Ray replace them."""
        while self.server is server:
            time.sleep(LOOK_S)
            try:
                for rank, end in server.take_lost(time.monotonic()).items():
                    if not server.is_done():
                        log.warning("memstore: rank %d is lost: %s", rank, CAUSES[end.cause])
                        server.mark_broken()
                        ray.kill(self._actors[rank])
            except Exception:  # such as of a group that Ray ends at this moment: the next look may be of another loss
                if self.server is server:
                    log.exception("memstore: lost workers could not be looked for; tried again in %g s", LOOK_S)


def _is_whole(worker_group: Any) -> bool:
    from ray.train.v2._internal.execution.worker_group import WorkerGroup

    return isinstance(worker_group, WorkerGroup)


def own_rank() -> int:
    """Return the rank of the worker that this runs in."""
    return int(ray.train.get_context().get_world_rank())


def come(
    *, address: str, port: int, run: str, lives: dict[int, int], first: int, backend: str | None, timeout_s: float,
    meet_s: float, leave_s: float, lifeline_port: int, hang_after_s: float | None,
) -> None:  # fmt: skip
    """Note in a worker where the ranks meet; the training function runs afterwards."""
    import torch
    from ray.train.torch import get_device

    context, device = ray.train.get_context(), get_device()
    launcher = f"ray-train:{ray.get_runtime_context().get_job_id()}:{context.get_experiment_name()}"
    join_meeting(
        Place(
            address=address, port=port, run=run, rank=own_rank(), life=lives[own_rank()], first=first,
            world_size=context.get_world_size(), launcher=launcher,
            backend=backend or ("nccl" if torch.cuda.is_available() else "gloo"), collective_timeout_s=timeout_s,
            gpu=device.index if device.type == "cuda" else None, meet_s=meet_s, leave_s=leave_s,
            lifeline_port=lifeline_port, hang_after_s=hang_after_s,
        )
    )  # fmt: skip

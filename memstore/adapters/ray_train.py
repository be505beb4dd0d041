"""Ray Train: a lost worker is replaced, the others keep their processes and enter the training function again.

    @memstore.inplace.reentrant
    def train(config): ...

    TorchTrainer(train, torch_config=InPlaceTorchConfig(), run_config=RunConfig(failure_config=FailureConfig(5)), ...)

Each replacement counts as one of `max_failures`. Ray's replica groups, which this uses, have a price: LOCAL_RANK is 0
and LOCAL_WORLD_SIZE 1 on every worker, elastic sizes and the preemption watcher are off, and `datasets=` would hand a
replacement all of the data. If all workers are lost at once, Ray starts the whole group again, as ever.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Collection
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

import ray
import ray.train
from ray.exceptions import RayActorError, RayError
from ray.train.torch.config import TorchConfig, _set_torch_distributed_env_vars, _TorchBackend
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from memstore.config import check_limit, check_whole
from memstore.core.cluster.text import CAUSES
from memstore.errors import RecoveryError
from memstore.inplace.meeting import MeetingPlace, MeetingServer
from memstore.inplace.membership import REPEATS, Failures
from memstore.inplace.ray_actors import SPARE_AFTER_S, warm_torch
from memstore.inplace.reentry import join_meeting
from memstore.inplace.reuse import missing

# -- ray train spares ---------------------------------------------------------------------------------
# Spares of Ray Train: workers outside of the worker group that wait, imports done, to take the place of a lost one.


SPARE_LOOK_S = 1.0
PLACE_S = 30.0  # a spare without a host is spoken of after that
WARM_S = 60.0  # longest wait for spares whose imports are under way: a new worker would begin with them
SPARE_ANSWER_S = 5.0  # longest wait for a spare that is warm
NODE_LABEL = "ray.io/node-id"


@dataclass
class Spare:
    """A worker that waits."""

    actor: Any
    bundle: int | None  # of the placement group that it is in; None: outside of it
    started_s: float
    metadata: Any  # there once its process is
    warm: Any  # the end of its warm-up
    question: Any  # the newest call, whose answer says that it lives
    is_warm: bool = False
    is_reported: bool = False


class Spares:
    """Keeps spares for one worker group, and gives Ray one when it asks that group for a new worker."""

    def __init__(self, worker_group: Any, count: int, rehearsed: tuple[Any, ...]) -> None:
        """Replace how the group makes workers, until `close`.

        Args:
            worker_group: Ray's, which runs.
            count: Spares to keep.
            rehearsed: What else a spare is to unpickle, and so import, before it is needed.
        """
        self._group, self._count, self._rehearsed = worker_group, count, rehearsed
        self._lock = threading.Lock()
        self._waiting: list[Spare] = []
        self.ranks: set[int] = set()  # whose present worker was a spare
        self._not_before_s = float("inf")  # no spare is started while the group is not whole
        self._deaths = 0  # in a row, of spares that did not become warm
        self._end = threading.Event()
        self._new_workers = worker_group._create_workers
        worker_group._create_workers = self._create
        threading.Thread(target=self._keep, name="memstore-spares", daemon=True).start()

    def plan(self) -> None:
        """Start the spares that are missing a while after now: the group is whole."""
        with self._lock:
            self._not_before_s = time.monotonic() + SPARE_AFTER_S

    def close(self) -> None:
        """End all spares: the group ends."""
        with self._lock:
            self._end.set()
            self._group._create_workers = self._new_workers
            for spare in self._waiting:
                ray.kill(spare.actor)
            self._waiting.clear()

    def _create(
        self,
        num_workers: int,
        placement_group: Any,
        resources_per_worker: dict[str, float],
        placement_group_bundle_indices: list[int | None] | None = None,
        **ranks: Any,
    ) -> list[Any]:
        """Return a spare as the one new worker; without one, or for more workers than one, new workers as Ray does."""
        from ray.train.v2._internal.execution.worker_group.worker import Worker

        if num_workers != 1 or placement_group_bundle_indices is None:
            return list(
                self._new_workers(
                    num_workers, placement_group, resources_per_worker, placement_group_bundle_indices, **ranks
                )
            )
        rank = ranks["starting_world_rank"]
        taken = self._take(rank)
        (self.ranks.discard if taken is None else self.ranks.add)(rank)
        if taken is None:
            bundle = self._make_room(rank, placement_group_bundle_indices[0])
            return list(self._new_workers(1, placement_group, resources_per_worker, [bundle], **ranks))
        spare, metadata = taken
        log.info("memstore: a spare, process %d on %s, becomes rank %d", metadata.pid, metadata.node_ip, rank)
        worker = Worker(spare.actor, metadata, resources_per_worker, placement_group_bundle_index=spare.bundle)
        return list(self._group._assign_worker_ranks([worker], rank, ranks["world_size"], ranks["replica_group_size"]))

    def _take(self, rank: int) -> tuple[Spare, Any] | None:
        """Return a spare that answers, and Ray's metadata of it; a warm one first, else one that has a process."""
        with self._lock:
            self._not_before_s = float("inf")
            until_s = time.monotonic() + WARM_S
            for spare in sorted(self._waiting, key=lambda each: not each.is_warm):
                if not _is_there(spare.metadata):
                    continue
                self._waiting.remove(spare)
                try:
                    ray.get(spare.warm, timeout=max(0.0, until_s - time.monotonic()))
                    return spare, ray.get(spare.actor.get_metadata.remote(), timeout=SPARE_ANSWER_S)
                except RayError as exc:
                    log.warning("memstore: a spare for rank %d is not used, because it does not answer: %s", rank, exc)
                    ray.kill(spare.actor)
            log.warning(
                "memstore: rank %d gets a new worker: no spare is ready (spares=%d, %d not placed yet)",
                rank,
                self._count,
                len(self._waiting),
            )
        return None

    def _make_room(self, rank: int, own: int | None) -> int:
        """Return the bundle for a new worker of a rank; a spare that holds it is ended."""
        with self._lock:
            bundle = bundle_for_worker(own, self._bundles(but=rank), [spare.bundle for spare in self._waiting])
            for spare in [each for each in self._waiting if each.bundle == bundle]:
                self._waiting.remove(spare)
                ray.kill(spare.actor)
        return bundle

    def _bundles(self, but: int | None = None) -> list[int | None]:
        """Return by rank the bundle of its worker; None for one outside of the placement group, and for `but`."""
        return [
            None if rank == but else worker.placement_group_bundle_index
            for rank, worker in enumerate(self._group.get_workers())
        ]

    def _keep(self) -> None:
        while not self._end.wait(SPARE_LOOK_S):
            try:
                with self._lock:
                    if not self._end.is_set():
                        self._look(time.monotonic())
            except Exception:  # a job without spares is better than none
                log.exception("memstore: spares could not be looked after; tried again in %g s", SPARE_LOOK_S)

    def _look(self, now: float) -> None:
        """Drop the spares that are dead, and start those that are due."""
        for spare in list(self._waiting):
            if not self._is_well(spare, now):
                self._waiting.remove(spare)
                self._deaths += not spare.is_warm
                self._not_before_s = max(self._not_before_s, now + SPARE_AFTER_S * 2 ** min(self._deaths, 6))
        while len(self._waiting) < self._count and now >= self._not_before_s:
            self._waiting.append(self._start(now))

    def _is_well(self, spare: Spare, now: float) -> bool:
        if not _is_there(spare.question):
            if now - spare.started_s > PLACE_S and not spare.is_reported and not _is_there(spare.metadata):
                spare.is_reported = True
                log.warning(
                    "memstore: no host has %s free for a spare since %g s: it waits, and a lost rank gets a new worker",
                    self._group.get_worker_group_context().resources_per_worker,
                    PLACE_S,
                )
            return True
        try:
            ray.get(spare.question)
        except RayError as exc:
            log.warning("memstore: a spare is gone, and is replaced: %s", exc)
            ray.kill(spare.actor)
            return False
        if not spare.is_warm:
            spare.is_warm, self._deaths = True, 0
            log.info("memstore: a spare is ready %.1f s after its start", now - spare.started_s)
        spare.question = spare.actor.get_metadata.remote()
        return True

    def _start(self, now: float) -> Spare:
        from ray.train.v2._internal.util import bundle_to_remote_args

        group, context = self._group, self._group.get_worker_group_context()
        run = group._train_run_context
        bundle, where = self._where()
        options = {
            "runtime_env": group._get_worker_runtime_env(custom_runtime_env=run.run_config.worker_runtime_env),
            **bundle_to_remote_args(context.resources_per_worker),
            **where,
        }
        actor = ray.remote(**options)(group._worker_cls).remote()
        # What init_train_context is given: its imports are then behind the spare.
        rehearsed = (run, group._storage_context, group._worker_callbacks_to_propagate, *self._rehearsed)
        metadata = actor.get_metadata.remote()
        warm = actor.execute.remote(warm_up, context.train_fn_ref, rehearsed)
        return Spare(actor, bundle, now, metadata, warm, warm)

    def _where(self) -> tuple[int | None, dict[str, Any]]:
        """Return an empty bundle of the placement group, or None, and the options that let Ray place a spare there."""
        placement_group = self._group.get_worker_group_state().placement_group_handle.placement_group
        empty = empty_bundles(self._bundles(), [spare.bundle for spare in self._waiting])
        # If the host of a bundle is gone Ray places the bundle again, which may have to wait.
        if empty and ray.util.placement_group_table(placement_group)["state"] == "CREATED":
            return empty[0], {"scheduling_strategy": PlacementGroupSchedulingStrategy(placement_group, empty[0])}
        hosts = Counter(worker.metadata.node_id for worker in self._group.get_workers())
        labels = (self._group.get_worker_group_context().label_selector or [{}])[0]
        return None, {
            "scheduling_strategy": "SPREAD",
            "label_selector": {NODE_LABEL: f"!{hosts.most_common(1)[0][0]}", **labels},
            "fallback_strategy": [{"label_selector": labels}],
        }


def spares_of(worker_group: Any, count: int, rehearsed: tuple[Any, ...]) -> Spares | None:
    """Return the spares of a group, none of them started yet; None if there are to be none, or another Ray forbids."""
    if not count:
        return None
    lacking = missing(SPARE_NAMES)
    selectors = worker_group.get_worker_group_context().label_selector or [] if not lacking else []
    if any(selector != selectors[0] for selector in selectors):
        lacking.append("one label_selector for all workers")
    if not lacking:
        return Spares(worker_group, count, rehearsed)
    log.warning(
        "memstore: no spares, because Ray %s or the job lacks %s: a lost rank gets a new worker",
        ray.__version__,
        ", ".join(lacking),
    )
    return None


def empty_bundles(by_rank: Collection[int | None], of_spares: Collection[int | None]) -> list[int]:
    """Return the bundles of a placement group, which has one a rank, that no worker and no spare is in."""
    return [bundle for bundle in range(len(by_rank)) if bundle not in by_rank and bundle not in of_spares]


def bundle_for_worker(own: int | None, by_rank: Collection[int | None], of_spares: Collection[int | None]) -> int:
    """Return the bundle for a new worker: the lost one's own, or an empty one, or one that a spare waits in.

    There is one, because a placement group has as many bundles as ranks, and the rank in question is in none.
    """
    if own is not None and own not in of_spares:
        return own
    return [*empty_bundles(by_rank, of_spares), *empty_bundles(by_rank, ())][0]


def warm_up(function: Any, rehearsed: tuple[Any, ...]) -> None:
    """Do in a spare what takes seconds and needs no rank.

    Args:
        function: Ray's reference to the training function; unpickling it imports the user's module.
        rehearsed: Unpickled by now, and so imported.
    """
    function.get()
    warm_torch(on_gpu=False)  # once a worker has a rank, Ray sets which GPUs it sees: too late after a first use


def _is_there(answer: Any) -> bool:
    """Return whether a call has ended, well or not."""
    return bool(ray.wait([answer], timeout=0)[0])


# -- ray train losses ---------------------------------------------------------------------------------
# Ray Train: several workers lost at once, or a new one that no host has room for, do not end the job or hang it.


LOST_ANSWER_S = 2.0  # a worker that does not answer for so long is taken to live: Ray waits for it, too


def allow_losses_at_once(worker_group: Any) -> None:
    """Change how one worker group replaces a worker: lost ones are asked for nothing, a further loss is a retry."""
    from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError

    replace = worker_group._replace_replica_group_impl

    def replace_one(replica_group_index: int) -> None:
        _end_lost_groups(worker_group, replica_group_index)
        try:
            replace(replica_group_index)
        except RayActorError as exc:
            raise WorkerGroupStartupFailedError(
                f"a worker was lost while rank {replica_group_index} was replaced: {exc}"
            ) from exc

    worker_group._replace_replica_group_impl = replace_one


def _end_lost_groups(worker_group: Any, but: int) -> None:
    """End the replica groups whose worker is lost, except the one that is replaced now: Ray then passes them over."""
    groups = {
        group.get_workers()[0].actor.get_metadata.remote(): (rank, group)
        for rank, group in enumerate(worker_group.get_replica_groups())
        if rank != but and group.is_active()
    }
    answers, _ = ray.wait(list(groups), num_returns=len(groups), timeout=LOST_ANSWER_S) if groups else ([], [])
    for answer in answers:
        try:
            ray.get(answer)
        except RayActorError:
            rank, group = groups[answer]
            log.warning("memstore: rank %d is lost, too, while rank %d is replaced", rank, but)
            group.shutdown()


def limit_wait_for_worker(worker_group: Any, limit_s: float) -> None:
    """Let one worker group wait for a new worker for so long; then Ray starts all of its workers again."""
    from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError

    create = worker_group._create_workers

    def create_within(*args: Any, **kwargs: Any) -> list[Any]:
        made: Future[list[Any]] = Future()
        threading.Thread(
            target=_create, args=(made, create, args, kwargs), name="memstore-new-worker", daemon=True
        ).start()
        wait([made], limit_s)
        if made.done():
            return made.result()
        made.add_done_callback(_end_late)
        worker_group.get_latest_poll_status = lambda: None  # Ray would replace what this shows as lost, again and again
        raise WorkerGroupStartupFailedError(
            f"no host has had room for a new worker since meet_s={limit_s:g} s, so Ray starts all workers again; each "
            f"needs {worker_group.get_worker_group_context().resources_per_worker}"
        )

    worker_group._create_workers = create_within


def _create(made: Future[list[Any]], create: Any, args: Any, kwargs: Any) -> None:
    try:
        made.set_result(create(*args, **kwargs))
    except BaseException as exc:  # raised again by who waits
        made.set_exception(exc)


def _end_late(made: Future[list[Any]]) -> None:
    """End workers that came too late."""
    for worker in made.result() if made.exception() is None else ():
        with contextlib.suppress(Exception):
            ray.kill(worker.actor)


# -- ray train names ----------------------------------------------------------------------------------
# Names that are private to Ray Train and that in-place recovery relies on, as read in Ray 2.60.


GROUPS = "ray.train.v2._internal.execution.worker_group"
# module, object, attribute -> what in-place recovery needs it for
NAMES = {
    ("ray.train.backend", "Backend", "has_replica_groups"): "Ray replaces only the worker that failed",
    ("ray.train.v2._internal.execution.controller.controller", "TrainController", "_replace_bad_workers"): "the same",
    (f"{GROUPS}.worker_group", "WorkerGroup", "_replace_replica_group_impl"): (
        "it calls the backend's on_shutdown, then on_start with the one new worker"
    ),
    (f"{GROUPS}.worker_group", "WorkerGroup", "get_replica_groups"): "those of lost workers are ended",
    (f"{GROUPS}.execution_group", "ReplicaGroup", "is_active"): "the same",
    (f"{GROUPS}.execution_group", "ReplicaGroup", "shutdown"): "the same",
    (f"{GROUPS}.worker", "RayTrainWorker", "get_metadata"): "asks a worker whether it lives",
    ("ray.train.v2._internal.exceptions", "WorkerGroupStartupFailedError", ""): "a replacement that is tried again",
    (f"{GROUPS}.worker_group", "WorkerGroup", "_create_workers"): "the wait for a new worker has an end",
    (f"{GROUPS}.worker_group", "WorkerGroup", "get_latest_poll_status"): "after it all workers are started again",
    (f"{GROUPS}.worker_group", "WorkerGroup", "get_worker_group_context"): "what the worker needs is named",
    (f"{GROUPS}.worker_group", "WorkerGroup", "get_workers"): "lost ones are killed",
    (f"{GROUPS}.worker_group", "WorkerGroup", "execute"): "tells ranks the place",
    (f"{GROUPS}.execution_group", "ReplicaGroup", "execute"): "the new one, too",
    (f"{GROUPS}.execution_group", "ReplicaGroup", "get_workers"): "the same",
    ("ray.train.torch.config", "_set_torch_distributed_env_vars", ""): "RANK and its kind",
}
SPARE_NAMES = {
    (f"{GROUPS}.worker_group", "WorkerGroup", "_assign_worker_ranks"): "gives a spare the lost rank",
    (f"{GROUPS}.worker_group", "WorkerGroup", "_worker_cls"): "a spare is an actor of it",
    (f"{GROUPS}.worker_group", "WorkerGroup", "_get_worker_runtime_env"): "a spare's environment",
    (f"{GROUPS}.worker_group", "WorkerGroup", "get_worker_group_state"): "the placement group",
    (f"{GROUPS}.worker_group", "WorkerGroup", "_train_run_context"): "what a spare unpickles ahead",
    (f"{GROUPS}.worker_group", "WorkerGroup", "_storage_context"): "the same",
    (f"{GROUPS}.worker_group", "WorkerGroup", "_worker_callbacks_to_propagate"): "the same",
    (f"{GROUPS}.worker_group", "WorkerGroupContext", "train_fn_ref"): "the training function",
    (f"{GROUPS}.worker_group", "WorkerGroupContext", "resources_per_worker"): "a spare's resources",
    (f"{GROUPS}.worker_group", "WorkerGroupContext", "label_selector"): "the hosts that it may be on",
    (f"{GROUPS}.state", "WorkerGroupState", "placement_group_handle"): "the placement group",
    (f"{GROUPS}.worker", "Worker", "placement_group_bundle_index"): "where in it a worker is",
    (f"{GROUPS}.worker", "RayTrainWorker", "execute"): "warms a spare up",
    ("ray.train.v2._internal.util", "bundle_to_remote_args", ""): "a spare's resources",
}


# -- ray train ----------------------------------------------------------------------------------------


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
            come,
            address=ray.util.get_node_ip_address(),
            port=server.port,
            run=server.run,
            lives=lives,
            first=server.generation + 1,
            backend=backend_config.backend,
            timeout_s=float(backend_config.timeout_s),
            meet_s=backend_config.meet_s,
            leave_s=backend_config.leave_s,
            lifeline_port=server.lifeline_port,
            hang_after_s=backend_config.hang_after_s,
        )
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
    *,
    address: str,
    port: int,
    run: str,
    lives: dict[int, int],
    first: int,
    backend: str | None,
    timeout_s: float,
    meet_s: float,
    leave_s: float,
    lifeline_port: int,
    hang_after_s: float | None,
) -> None:
    """Note in a worker where the ranks meet; the training function runs afterwards."""
    import torch
    from ray.train.torch import get_device

    context, device = ray.train.get_context(), get_device()
    launcher = f"ray-train:{ray.get_runtime_context().get_job_id()}:{context.get_experiment_name()}"
    join_meeting(
        MeetingPlace(
            address=address,
            port=port,
            run=run,
            rank=own_rank(),
            life=lives[own_rank()],
            first=first,
            world_size=context.get_world_size(),
            launcher=launcher,
            backend=backend or ("nccl" if torch.cuda.is_available() else "gloo"),
            collective_timeout_s=timeout_s,
            gpu=device.index if device.type == "cuda" else None,
            meet_s=meet_s,
            leave_s=leave_s,
            lifeline_port=lifeline_port,
            hang_after_s=hang_after_s,
        )
    )

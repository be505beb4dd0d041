"""Spares of Ray Train: workers outside of the worker group that wait, imports done, to take the place of a lost one.

            SPARE_AFTER_S after the group is whole          Ray wants a new worker
wanted ------------------------------------------> started --> placed --> warm --> a rank
   ^                                                  | it dies
   +--------------------------------------------------+

A spare holds the resources of a worker. The first ones are placed outside of the group's placement group, later ones in
bundles of it that lost workers left empty: a job holds no more than the resources of its workers and spares.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from memstore.adapters.ray_train_names import SPARE_NAMES
from memstore.inplace.private_names import missing
from memstore.inplace.ray_actors import SPARE_AFTER_S, warm_torch

log = logging.getLogger("memstore")
LOOK_S = 1.0
PLACE_S = 30.0  # a spare without a host is spoken of after that
WARM_S = 60.0  # longest wait for spares whose imports are under way: a new worker would begin with them
ANSWER_S = 5.0  # longest wait for a spare that is warm
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
        self, num_workers: int, placement_group: Any, resources_per_worker: dict[str, float],
        placement_group_bundle_indices: list[int | None] | None = None, **ranks: Any,
    ) -> list[Any]:  # fmt: skip
        """Return a spare as the one new worker; without one, or for more workers than one, new workers as Ray does."""
        from ray.train.v2._internal.execution.worker_group.worker import Worker

        if num_workers != 1 or placement_group_bundle_indices is None:
            return list(self._new_workers(
                num_workers, placement_group, resources_per_worker, placement_group_bundle_indices, **ranks
            ))  # fmt: skip
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
                    return spare, ray.get(spare.actor.get_metadata.remote(), timeout=ANSWER_S)
                except RayError as exc:
                    log.warning("memstore: a spare for rank %d is not used, because it does not answer: %s", rank, exc)
                    ray.kill(spare.actor)
            log.warning(
                "memstore: rank %d gets a new worker: no spare is ready (spares=%d, %d not placed yet)",
                rank, self._count, len(self._waiting),
            )  # fmt: skip
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
        while not self._end.wait(LOOK_S):
            try:
                with self._lock:
                    if not self._end.is_set():
                        self._look(time.monotonic())
            except Exception:  # a job without spares is better than none
                log.exception("memstore: spares could not be looked after; tried again in %g s", LOOK_S)

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
                    self._group.get_worker_group_context().resources_per_worker, PLACE_S,
                )  # fmt: skip
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
            **bundle_to_remote_args(context.resources_per_worker), **where,
        }  # fmt: skip
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
        "memstore: no spares, because Ray %s or the job lacks %s: a lost rank gets a new worker", ray.__version__,
        ", ".join(lacking),
    )  # fmt: skip
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

"""Ray Train: several workers lost at once, or a new one that no host has room for, do not end the job or hang it.

Ray 2.60 asks the other workers to drop their results before it replaces one. The RayActorError of one that is lost,
too, counts as an error of the controller, for which `max_failures` allows no retry. And it waits without a limit for
the process of the new worker.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from concurrent.futures import Future, wait
from typing import Any

import ray
from ray.exceptions import RayActorError

log = logging.getLogger("memstore")
ANSWER_S = 2.0  # a worker that does not answer for so long is taken to live: Ray waits for it, too


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
    answers, _ = ray.wait(list(groups), num_returns=len(groups), timeout=ANSWER_S) if groups else ([], [])
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

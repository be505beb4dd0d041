"""Ray Train: several workers lost at once, or one more while one is replaced, do not end the job.

Ray 2.60 asks the other workers to drop their results before it replaces one. The RayActorError of one that is lost,
too, counts as an error of the controller, for which `max_failures` allows no retry.
"""

from __future__ import annotations

import logging
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

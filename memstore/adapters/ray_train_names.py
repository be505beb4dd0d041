"""Names that are private to Ray Train and that in-place recovery relies on, as read in Ray 2.60.

If another Ray lacks one of NAMES, every lost worker restarts the group, and a warning names it; so does a test on a
live cluster. Without one of SPARE_NAMES there are no spares. What `ray_train.py` imports at its top has to be there.
"""

from __future__ import annotations

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
}  # fmt: skip
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
}  # fmt: skip

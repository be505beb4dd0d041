"""Names that are private to Ray Train and that in-place recovery relies on, as read in Ray 2.60.

`missing` looks for each of them, so that another Ray is met by the ordinary restart and a warning that names what
has changed. A test on a live cluster fails by name.
"""

from __future__ import annotations

import importlib

GROUPS = "ray.train.v2._internal.execution.worker_group"
# module, object, attribute -> what in-place recovery needs it for
NAMES = {
    ("ray.train.backend", "Backend", "has_replica_groups"): "Ray replaces only the worker that failed",
    ("ray.train.v2._internal.execution.controller.controller", "TrainController", "_replace_bad_workers"): "the same",
    (f"{GROUPS}.worker_group", "WorkerGroup", "_replace_replica_group_impl"): (
        "it calls the backend's on_shutdown, then on_start with the one new worker"
    ),
    (f"{GROUPS}.worker_group", "WorkerGroup", "get_workers"): "frozen ones are killed",
    (f"{GROUPS}.worker_group", "WorkerGroup", "execute"): "tells ranks the place",
    (f"{GROUPS}.execution_group", "ReplicaGroup", "execute"): "the new one, too",
    ("ray.train.torch.config", "_set_torch_distributed_env_vars", ""): "RANK and its kind",
}  # fmt: skip


def missing() -> list[str]:
    """Return the names that the installed Ray lacks, with what they are for."""
    found = []
    for (module, owner, attribute), purpose in NAMES.items():
        try:
            value = getattr(importlib.import_module(module), owner)
            if attribute:
                getattr(value, attribute)
        except (ImportError, AttributeError):
            found.append(f"{module}.{owner}{'.' if attribute else ''}{attribute} ({purpose})")
    return found

"""The table of all scenes by the name of their drill."""

from __future__ import annotations

from memstore.drills.scenes import (
    scenes_control,
    scenes_holders,
    scenes_hosts,
    scenes_network,
    scenes_partition,
    scenes_ranks,
    scenes_ray,
    scenes_storage,
    scenes_tight,
)
from memstore.drills.scenes.scene import Scene

SCENES: dict[str, type[Scene]] = {
    **scenes_ranks.SCENES,
    **scenes_holders.SCENES,
    **scenes_hosts.SCENES,
    **scenes_control.SCENES,
    **scenes_ray.SCENES,
    **scenes_storage.SCENES,
    **scenes_tight.SCENES,
    **scenes_network.SCENES,
    **scenes_partition.SCENES,
}

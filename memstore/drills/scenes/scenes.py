"""The table of all scenes by the name of their drill."""

from __future__ import annotations

from memstore.drills.scenes import scenes_hosts, scenes_in_place, scenes_network, scenes_processes, scenes_storage
from memstore.drills.scenes.scene import Scene

_FILES = (scenes_processes, scenes_hosts, scenes_storage, scenes_network, scenes_in_place)
SCENES: dict[str, type[Scene]] = {
    scene.name: scene
    for file in _FILES
    for scene in vars(file).values()
    if isinstance(scene, type) and issubclass(scene, Scene) and "name" in vars(scene)
}

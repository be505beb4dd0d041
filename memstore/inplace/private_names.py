"""Whether the installed packages have the private names of theirs that in-place recovery relies on."""

from __future__ import annotations

import importlib
import types
from collections.abc import Mapping
from typing import Any


def missing(names: Mapping[tuple[str, str, str], str]) -> list[str]:
    """Return the names that are not there, with what they are for.

    Args:
        names: (module, object in it, attribute of that or "") -> what it is for.
    """
    found = []
    for (module, owner, attribute), purpose in names.items():
        try:
            value = getattr(importlib.import_module(module), owner)
            is_there = not attribute or _has(value, attribute)
        except (ImportError, AttributeError):
            is_there = False
        if not is_there:
            found.append(f"{module}.{owner}{'.' if attribute else ''}{attribute} ({purpose})")
    return found


def _has(owner: Any, attribute: str) -> bool:
    """Return whether a class has an attribute, declares it for its objects, or names it in a method."""
    if hasattr(owner, attribute) or attribute in getattr(owner, "__annotations__", {}):
        return True
    methods = [method for base in owner.__mro__ for method in vars(base).values()]
    return any(attribute in method.__code__.co_names for method in methods if isinstance(method, types.FunctionType))


# -- torch names --------------------------------------------------------------------------------------
# Names that are private to torch and that the reuse of a model relies on, as read in torch 2.13.


C10D = "torch.distributed.distributed_c10d"
MESH = "torch.distributed.device_mesh"
FSDP = "torch.distributed.fsdp._fully_shard"
_EXCHANGED = "FSDP2's process group, exchanged for the new one of its name"
_RESET = "half-done state of FSDP2, ended"
# module, object, attribute -> what the reuse of a model needs it for
NAMES = {
    (C10D, "_new_group_with_tag", ""): "what a build makes groups with, recorded and called again",
    (C10D, "_World", "group_count"): "the next group's name: the same ones are made in every generation",
    (C10D, "_World", "pg_names"): "the names of the groups that are there",
    (C10D, "_resolve_process_group", ""): "the group of a name",
    (MESH, "DeviceMesh", "_dim_group_names"): "the groups that a mesh is of, by name",
    (MESH, "DeviceMesh", "_get_root_mesh"): "the mesh that keeps the groups of its slices",
    (MESH, "DeviceMesh", "_flatten_mapping"): "the same for flattened ones",
    (MESH, "DeviceMesh", "_pg_registry"): "a mesh's groups: the old ones would live on in it",
    (f"{FSDP}._fully_shard", "FSDPModule", "_get_fsdp_state"): "FSDP2's state of a module",
    (f"{FSDP}._fully_shard", "FSDPModule", "reset_iter_state"): _RESET,
    (f"{FSDP}._fsdp_state", "FSDPState", "_fsdp_param_groups"): "where the process groups are",
    (f"{FSDP}._fsdp_state", "FSDPState", "_state_ctx"): "switches of FSDP2, put back",
    (f"{FSDP}._fsdp_param_group", "FSDPParamGroup", "reduce_grads"): "the same",
    (f"{FSDP}._fsdp_state", "FSDPState", "_is_root"): "only a root can be reset, once it has run",
    (f"{FSDP}._fsdp_param_group", "FSDPParamGroup", "fsdp_params"): _RESET,
    (f"{FSDP}._fsdp_param_group", "FSDPParamGroup", "mesh_info"): "holds process groups",
    (f"{FSDP}._fsdp_param_group", "FSDPParamGroup", "post_forward_mesh_info"): "the same",
    (f"{FSDP}._fsdp_param_group", "FSDPParamGroup", "_all_gather_result"): "work of the old group: never waited for",
    (f"{FSDP}._fsdp_param_group", "FSDPParamGroup", "_all_gather_comm"): "one of the user's may hold a process group",
    (f"{FSDP}._fsdp_param_group", "FSDPParamGroup", "_reduce_scatter_comm"): "the same",
    (f"{FSDP}._fsdp_param_group", "FSDPParamGroup", "_all_reduce_hook"): "the same",
    (f"{FSDP}._fsdp_collectives", "DefaultAllGather", ""): "FSDP2's own, which holds none",
    (f"{FSDP}._fsdp_collectives", "DefaultReduceScatter", ""): "the same",
    (f"{FSDP}._fsdp_param", "FSDPParam", "to_sharded"): _RESET,
    (f"{FSDP}._fsdp_param", "FSDPParam", "_unsharded_param"): "its gradient is dropped",
    (f"{FSDP}._fsdp_param", "FSDPParam", "unsharded_accumulated_grad"): "the same",
    (f"{FSDP}._fsdp_param", "FSDPParam", "grad_offload_event"): _RESET,
    (f"{FSDP}._fsdp_common", "DataParallelMeshInfo", "spmd_mesh"): "a mesh whose groups are exchanged",
    (f"{FSDP}._fsdp_common", "FSDPMeshInfo", "mesh"): "the same",
    (f"{FSDP}._fsdp_common", "FSDPMeshInfo", "shard_process_group"): _EXCHANGED,
    (f"{FSDP}._fsdp_common", "FSDPMeshInfo", "reduce_scatter_process_group"): _EXCHANGED,
    (f"{FSDP}._fsdp_common", "DDPMeshInfo", "replicate_process_group"): _EXCHANGED,
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "reducer"): "freed with its hooks before the next",
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "logger"): "it holds the reducer",
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "_comm_hooks"): "registered again",
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "_use_python_reducer"): "its hooks would stay",
    ("torch.amp", "GradScaler", "_per_optimizer_states"): "stages of a step that broke off, forgotten",
}

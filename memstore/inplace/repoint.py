"""Takes models over a process group that is gone to the group of the same name: FSDP2, DTensor, what is half done.

DTensor and meshes name their groups, so they need no change once groups of these names are there. FSDP2 keeps the
groups themselves, and a mesh keeps them beside their names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from memstore.inplace.build_trace import holds_group, is_group

HELD = ("shard_process_group", "reduce_scatter_process_group", "replicate_process_group")


def obstacle(modules: list[torch.nn.Module], wrappers: Iterable[torch.nn.Module]) -> str:
    """Return which process group in these modules cannot be exchanged; "" if all can.

    Args:
        modules: All modules, with those inside of others.
        wrappers: Modules whose group is exchanged elsewhere.
    """
    others = {id(module) for module in wrappers}
    for module in modules:
        kept = [name for name, value in vars(module).items() if is_group(value)]
        if kept and id(module) not in others:
            return f"a {type(module).__name__} keeps a process group in .{kept[0]}"
        if any(holds_group(state) for _, state in getattr(module, "_comm_hooks", ())):
            return f"a communication hook of a {type(module).__name__} keeps a process group"
    for group in _param_groups(modules):
        own = (group._all_gather_comm, group._reduce_scatter_comm)
        if [type(one).__name__ for one in own] != ["DefaultAllGather", "DefaultReduceScatter"]:
            return f"FSDP2 uses {type(own[0]).__name__} and {type(own[1]).__name__}, which may keep a process group"
        if group._all_reduce_hook is not None:
            return "FSDP2 has an all-reduce hook, which may keep a process group"
    return ""


def end_half_done(modules: list[torch.nn.Module], optimizers: list[torch.optim.Optimizer]) -> None:
    """Take a model whose forward, backward or step broke off to where the next forward begins. Gradients are None."""
    if any(parameter.is_cuda for module in modules for parameter in module.parameters(recurse=False)):
        torch.cuda.synchronize()  # what a collective that was aborted wrote into is about to be freed
    for group in _param_groups(modules):
        group._all_gather_result = None  # torch's reset would wait for its work, which is of the old group
        for param in group.fsdp_params:
            param.to_sharded()
            param.unsharded_accumulated_grad = param.grad_offload_event = None
            if hasattr(param, "_unsharded_param"):
                param._unsharded_param.grad = None
    for module in modules:
        if isinstance(module, FSDPModule) and module._get_fsdp_state()._is_root:
            module.reset_iter_state()
    for module in modules:
        for parameter in module.parameters(recurse=False):
            parameter.grad = None
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)


def exchange_groups(modules: list[torch.nn.Module], optimizers: list[torch.optim.Optimizer]) -> None:
    """Exchange every process group that FSDP2 and meshes keep for the one that has its name now."""
    for info in _mesh_infos(modules):
        for name in HELD:
            if (group := getattr(info, name, None)) is not None:
                setattr(info, name, c10d._resolve_process_group(group.group_name))
    there = set(c10d._world.pg_names.values())
    for mesh in _meshes(modules, optimizers):
        for name in list(mesh._pg_registry):
            mesh._pg_registry.pop(name)
            if name in there:
                mesh._pg_registry[name] = c10d._resolve_process_group(c10d.GroupName(name))


def groups_named(modules: list[torch.nn.Module], optimizers: list[torch.optim.Optimizer]) -> set[str]:
    """Return the names of the groups that FSDP2 and DTensors need."""
    infos = {
        getattr(info, name).group_name for info in _mesh_infos(modules) for name in HELD if getattr(info, name, None)
    }
    return infos | {str(name) for mesh in _meshes(modules, optimizers) for name in mesh._dim_group_names}


def _param_groups(modules: Iterable[torch.nn.Module]) -> Iterator[Any]:
    for module in modules:
        if isinstance(module, FSDPModule):
            yield from module._get_fsdp_state()._fsdp_param_groups


def _mesh_infos(modules: Iterable[torch.nn.Module]) -> Iterator[Any]:
    for group in _param_groups(modules):
        yield group.mesh_info
        if group.post_forward_mesh_info is not None:
            yield group.post_forward_mesh_info
        for param in group.fsdp_params:  # shard_placement_fn may give a parameter a mesh of its own
            yield param.mesh_info
            if param.post_forward_mesh_info is not None:
                yield param.post_forward_mesh_info


def _meshes(modules: Iterable[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> list[DeviceMesh]:
    own = {id(mesh): mesh for mesh in _own_meshes(modules, optimizers)}
    roots = {id(root): root for root in (mesh._get_root_mesh() for mesh in own.values())}
    flat = {id(mesh): mesh for root in roots.values() for mesh in root._flatten_mapping.values()}
    return list({**own, **roots, **flat}.values())


def _own_meshes(
    modules: Iterable[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer]
) -> Iterator[DeviceMesh]:
    for info in _mesh_infos(modules):
        yield from (mesh for mesh in (info.mesh, info.spmd_mesh) if mesh is not None)
    for module in modules:
        held = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        yield from (tensor.device_mesh for tensor in held if isinstance(tensor, DTensor))
        yield from (value for value in vars(module).values() if issubclass(type(value), DeviceMesh))
    for optimizer in optimizers:
        for state in optimizer.state.values():
            values = state.values() if isinstance(state, dict) else ()
            yield from (value.device_mesh for value in values if isinstance(value, DTensor))

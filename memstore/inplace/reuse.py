"""Keeps a model and its optimizer over a loss: a replacement builds them, the others take theirs to the new group."""

from __future__ import annotations

import importlib
import logging
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch.distributed import distributed_c10d as c10d

from memstore.inplace import repoint
from memstore.inplace.build_trace import Trace, traced
from memstore.inplace.reentry import generation
from memstore.inplace.settings import BuiltSettings, Generators, generators_now, put_back_generators

# -- private names ------------------------------------------------------------------------------------
# Whether the installed packages have the private names of theirs that in-place recovery relies on.


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


# -- reuse --------------------------------------------------------------------------------------------


T = TypeVar("T")
FOLLOWERS = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
log = logging.getLogger("memstore")


class History(Protocol):
    """The connected Store, or what else knows whether the job has a committed step."""

    def latest_step(self) -> int | None:
        """Return the newest committed step; None if there is none."""


def reuse(build: Callable[[], T], store: History, *, name: str = "model") -> T:
    """Return what `build` returns, or in a process that has called it before, what it returned then.

    For a model and its optimizers in a reentrant training function, before `store.get(into=...)`, which overwrites
    what they hold. A replacement builds. Another rank keeps its tensors and takes them to the new process group: FSDP2
    and DTensors over meshes of `init_device_mesh`, DDP, and what has no group at all. A forward, backward or step that
    broke off is forgotten, and gradients are None. What no state dict has is as the build left it: modes of modules,
    `requires_grad`, hooks, parameter groups, switches of FSDP2, plain attributes, a scaler's stages, and random numbers
    if the build draws any. If all that cannot be done it builds again, and one line in the log says why.

    Args:
        build: Makes meshes, modules and optimizers, and returns them: one, or a tuple, list or dict. What has to follow
            the optimizer, such as a schedule or a GradScaler, belongs into it too. The same on every rank, without
            collectives of its own but DDP's: a replacement builds while the others do not.
        store: Connected. A job without a committed step has nothing to restore, so that all ranks build.
        name: Of what is kept, in `generation().kept`; one for each `build` of a function.
    """
    now = generation()
    if now is None:
        return build()
    kept = now.kept.get(name)
    if isinstance(kept, _Kept):
        why_not = kept.why_not(store)
        if not why_not:
            kept.take_over()
            return kept.value  # type: ignore[no-any-return]
        log.warning("memstore: rank %d builds %s again: %s", now.rank, name, why_not)
        del kept, now.kept[name]  # else there are two models meanwhile
    before = generators_now()
    with traced() as trace:
        value = build()
    drawn = {name: state for name, state in generators_now().items() if before.get(name) != state}
    followers = [leaf for leaf in _leaves(value) if isinstance(leaf, FOLLOWERS)]
    now.kept[name] = _Kept(value, trace, BuiltSettings(_modules(value), followers), drawn)
    return value


@dataclass(frozen=True, slots=True)
class _Kept:
    """What a build returned, what it did, and what it left that is in no state dict."""

    value: Any
    trace: Trace
    settings: BuiltSettings
    drawn: Generators  # those that it changed, as it left them

    def why_not(self, store: History) -> str:
        """Return why it cannot be used again, as far as possible without a new group; "" if it can."""
        if absent := missing(NAMES):
            return f"this torch lacks {', '.join(absent)}"
        if self.trace.obstacle:
            return self.trace.obstacle
        if store.latest_step() is None:
            return "the job has no committed step to restore"
        if c10d._world.group_count != self.trace.first_group:
            return "the training function made other process groups before than at its last entry"
        modules, optimizers = _modules(self.value), _optimizers(self.value)
        if not modules:
            return f"the build returned a {type(self.value).__name__}, in which there is no module"
        if found := repoint.obstacle(modules, self.trace.wrappers):
            return found
        there = {*map(str, c10d._world.pg_names.values()), *self.trace.groups}
        if others := repoint.groups_named(modules, optimizers) - there:
            return f"it is over process group {min(others)}, which the build does not make"
        return ""

    def take_over(self) -> None:
        """Take it to the new process group; collective with the build of a replacement."""
        modules, optimizers = _modules(self.value), _optimizers(self.value)
        repoint.end_half_done(modules, optimizers)
        self.settings.put_back()
        self.trace.do_again()
        self.settings.put_back()  # what is wrapped again has lost its hooks
        repoint.exchange_groups(modules, optimizers)
        put_back_generators(self.drawn)


def _modules(value: Any) -> list[torch.nn.Module]:
    models = [leaf for leaf in _leaves(value) if isinstance(leaf, torch.nn.Module)]
    return list({id(module): module for model in models for module in model.modules()}.values())


def _optimizers(value: Any) -> list[torch.optim.Optimizer]:
    return [leaf for leaf in _leaves(value) if isinstance(leaf, torch.optim.Optimizer)]


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _leaves(part)
    else:
        yield value

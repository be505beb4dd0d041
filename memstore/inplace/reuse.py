"""Keeps a model and its optimizer over a loss: a replacement builds them, the others take theirs to the new group."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from memstore.inplace.reentry import generation
from memstore.inplace.settings import BuiltSettings, Generators, generators_now, put_back_generators

# -- repoint ------------------------------------------------------------------------------------------
# Takes models over a process group that is gone to the group of the same name: FSDP2, DTensor, what is half done.
#
# DTensor and meshes name their groups, so they need no change once groups of these names are there. FSDP2 keeps the
# groups themselves, and a mesh keeps them beside their names.


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


# -- build trace --------------------------------------------------------------------------------------
# What a build does that other ranks take part in: process groups that it makes, models that it wraps in DDP.
#
# A rank that keeps what it built does these again, in the same order, while a replacement builds. Groups then have the
# names that they had, and meshes and FSDP2 name groups by these.


COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem")
_DDP_SIGNATURE = inspect.signature(DistributedDataParallel.__init__)
# What DDP's constructor leaves in the module or its parameters: hooks that a second one would double, other tensors.
_DDP_ONCE = ("delay_all_reduce_named_params", "param_to_hook_all_reduce", "mixed_precision", "device_mesh")


@dataclass(slots=True)
class Trace:
    """What a build did.

    Attributes:
        first_group: Name of the first group that it could make, a count.
        groups: Names of those that it made, and that this rank is in.
        acts: Does what other ranks take part in again; in order.
        wrappers: The DDP modules that it made.
        obstacle: Why a rank that keeps the result cannot take part in the build of another; "" if it can.
    """

    first_group: int = 0
    groups: set[str] = field(default_factory=set)
    acts: list[Callable[[], None]] = field(default_factory=list)
    wrappers: list[DistributedDataParallel] = field(default_factory=list)
    obstacle: str = ""

    def do_again(self) -> None:
        """Take part in the build of a replacement. RuntimeError: a rank is lost meanwhile."""
        for act in self.acts:
            act()


@contextmanager
def traced() -> Iterator[Trace]:
    """Record what is done in this block, by this thread."""
    trace, groups = Trace(c10d._world.group_count), set(map(str, c10d._world.pg_names.values()))
    make_group, wrap = c10d._new_group_with_tag, DistributedDataParallel.__init__
    collectives = _Collectives()

    def group_made(*args: Any, **kwargs: Any) -> Any:
        with collectives.expected():
            group = make_group(*args, **kwargs)
        if group in c10d._world.pg_names:
            trace.groups.add(str(c10d._world.pg_names[group]))
        trace.acts.append(functools.partial(_discard, make_group, args, kwargs))
        return group

    @functools.wraps(wrap)
    def wrapped(wrapper: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        with collectives.expected():
            wrap(wrapper, *args, **kwargs)
        arguments = _DDP_SIGNATURE.bind(wrapper, *args, **kwargs).arguments
        trace.obstacle = trace.obstacle or _obstacle(wrapper, arguments)
        trace.wrappers.append(wrapper)
        trace.acts.append(functools.partial(_wrap_again, wrapper, _by_name(arguments)))

    patched: Any = DistributedDataParallel
    c10d._new_group_with_tag, patched.__init__ = group_made, wrapped
    try:
        with collectives:
            yield trace
    finally:
        c10d._new_group_with_tag, patched.__init__ = make_group, wrap
    if others := set(map(str, c10d._world.pg_names.values())) - groups - trace.groups:
        trace.obstacle = f"the build makes process group {min(others)} by other means than new_group()"
    if collectives.found:
        trace.obstacle = (
            f"the build communicates ({collectives.found}), so that a replacement cannot build alone: "
            "give parallelize_module() and distribute_tensor() src_data_rank=None"
        )


class _Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the first collective that nothing of the trace does again."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = ""
        self._is_expected = False

    @contextmanager
    def expected(self) -> Iterator[None]:
        before, self._is_expected = self._is_expected, True
        try:
            yield
        finally:
            self._is_expected = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor's own code comes back with the collectives in it
        if func.namespace in COLLECTIVES and not self._is_expected and not self.found:
            self.found = str(func)
        return func(*args, **(kwargs or {}))


def _discard(function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    function(*args, **kwargs)


def _obstacle(wrapper: DistributedDataParallel, arguments: dict[str, Any]) -> str:
    """Return why a DDP module cannot be wrapped again; "" if it can."""
    once = [name for name in _DDP_ONCE if arguments.get(name) is not None]
    if once or wrapper._use_python_reducer:
        return f"DistributedDataParallel with {', '.join(once) or 'the Python reducer'} cannot be wrapped again"
    return ""


def _by_name(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of DDP's constructor with its process group by name: the group itself would live on."""
    group = arguments.get("process_group")
    named = None if group is None or group is dist.group.WORLD else group.group_name
    return {**{key: value for key, value in arguments.items() if key != "self"}, "process_group": named}


def _wrap_again(wrapper: DistributedDataParallel, arguments: dict[str, Any]) -> None:
    """Make DDP again in the same wrapper, around the same module; collective. Its reducer holds the group in C++."""
    hooks, is_training = list(getattr(wrapper, "_comm_hooks", ())), wrapper.training
    for name in ("reducer", "logger"):  # the reducer's end takes its hooks from the parameters
        wrapper.__dict__.pop(name, None)
    named = arguments["process_group"]
    group = None if named is None else c10d._resolve_process_group(named)
    DistributedDataParallel.__init__(wrapper, **{**arguments, "process_group": group})
    wrapper.training = is_training
    for hook, state in hooks:
        wrapper.register_comm_hook(state, hook)


def is_group(value: Any) -> bool:
    """Return whether an object is a process group; isinstance() is slow for torch's opaque classes."""
    return issubclass(type(value), torch.distributed.ProcessGroup)


def holds_group(value: Any) -> bool:
    """Return whether an object is a process group or has one among its attributes."""
    kept = [value, *vars(value).values()] if hasattr(value, "__dict__") else [value]
    return any(is_group(one) for one in kept)


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
        if found := obstacle(modules, self.trace.wrappers):
            return found
        there = {*map(str, c10d._world.pg_names.values()), *self.trace.groups}
        if others := groups_named(modules, optimizers) - there:
            return f"it is over process group {min(others)}, which the build does not make"
        return ""

    def take_over(self) -> None:
        """Take it to the new process group; collective with the build of a replacement."""
        modules, optimizers = _modules(self.value), _optimizers(self.value)
        end_half_done(modules, optimizers)
        self.settings.put_back()
        self.trace.do_again()
        self.settings.put_back()  # what is wrapped again has lost its hooks
        exchange_groups(modules, optimizers)
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

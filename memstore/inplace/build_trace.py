"""What a build does that other ranks take part in: process groups that it makes, models that it wraps in DDP.

A rank that keeps what it built does these again, in the same order, while a replacement builds. Groups then have the
names that they had, and meshes and FSDP2 name groups by these.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

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

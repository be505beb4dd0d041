"""Which tensors of an object with load_state_dict() have one shape only, and which are for that method to take.

Parameters, a module's buffers and the state of an optimizer have the shapes of the model. What else an object returns
may have any length in a new process: a replay buffer, a metric, `_extra_state`, a buffer of a module that loads in its
own way, a lazy parameter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import torch

from memstore.shell.tensors import subclasses

_Module, _Optimizer = torch.nn.Module, torch.optim.Optimizer
_DEPTH_MAX, _OBJECTS_MAX = 4, 10_000  # how far modules are looked for below an object's attributes
_LEAVES = (str, bytes, int, float, bool, type(None), type, FunctionType, ModuleType, torch.Tensor)


def fixed_memory(owner: object) -> frozenset[int]:
    """Return where tensors begin that have the shapes of a model: of an object, and of what models it has."""
    tensors = (tensor for each in _models_in(owner) for tensor in _fixed_tensors(each))
    return frozenset(address for tensor in tensors for address in _addresses_of(tensor) if address)


def is_in(tensor: Any, memory: frozenset[int]) -> bool:
    """Return whether a tensor lies in this memory."""
    return not memory.isdisjoint(_addresses_of(tensor))


def entries_of_own_loading(module: torch.nn.Module, keys: Iterable[Any]) -> set[Any]:
    """Return those of the keys of state_dict() that modules load in their own way, and so may have or lack."""
    modules = dict(module.named_modules(remove_duplicate=False))
    found = set()
    for key in keys:
        prefix, _, name = str(key).rpartition(".")
        owner = modules.get(prefix)
        if owner is not None and _loads_in_its_own_way(owner) and name not in owner._parameters:
            found.add(key)
    return found


def _loads_in_its_own_way(module: torch.nn.Module) -> bool:
    kind = type(module)
    is_torchs = kind.__module__.startswith("torch.nn.modules.")  # they take new versions of keys, and no other shapes
    is_plain = kind._load_from_state_dict is _Module._load_from_state_dict and not module._load_state_dict_pre_hooks
    return not is_torchs and not is_plain


def _models_in(owner: object) -> Iterator[torch.nn.Module | torch.optim.Optimizer]:
    """Yield the modules and optimizers that an object is or has, breadth first."""
    waiting, seen = [owner], {id(owner)}
    for _ in range(_DEPTH_MAX):
        below: list[Any] = []
        for each in waiting:
            if isinstance(each, _Module | _Optimizer):
                yield each
            elif isinstance(each, dict):
                below += each.values()
            elif isinstance(each, list | tuple | set | frozenset):
                below += each
            else:
                below += getattr(each, "__dict__", {}).values()
        waiting = [each for each in below if not isinstance(each, _LEAVES) and id(each) not in seen]
        seen.update(map(id, waiting))
        if len(seen) > _OBJECTS_MAX:
            return


def _fixed_tensors(model: torch.nn.Module | torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    if isinstance(model, _Optimizer):
        yield from (value for state in model.state.values() for value in _values(state))
        return
    yield from model.parameters()
    for module in model.modules():
        if not _loads_in_its_own_way(module):
            yield from module.buffers(recurse=False)


def _values(state: Any) -> Iterator[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict | list | tuple):
        for value in state.values() if isinstance(state, dict) else state:
            yield from _values(value)


def _addresses_of(tensor: Any) -> Iterator[int]:
    """Yield where a tensor's storage begins, or those of its parts."""
    if subclasses.is_dtensor(tensor):
        yield from _addresses_of(subclasses.local_tensor(tensor))
    elif subclasses.is_wrapper(tensor):
        for part in subclasses.flatten_wrapper(tensor)[0].values():
            yield from _addresses_of(part)
    elif isinstance(tensor, torch.Tensor):
        with contextlib.suppress(RuntimeError):  # it has no memory of its own, or none yet
            yield tensor.untyped_storage().data_ptr()

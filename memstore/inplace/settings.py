"""What no state dict has, of a process and of what a build returned: recorded, and put back after a loss.

A rank that stays is to go on as its replacement does, which was just started and has just built: in training mode
although an evaluation broke off, with the hooks and parameter groups of the build, with its random numbers. No
tensor of the state is touched, and what `store.get()` restores comes afterwards.
"""

from __future__ import annotations

import random
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
AUTOCAST = ("cpu", "cuda")
HOOKS_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")
Generators = dict[str, Any]  # of random numbers, by name -> their states, which can be compared


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """The modes of the thread that records them, the default dtype, and the generators of random numbers."""

    is_grad_enabled: bool
    dtype: torch.dtype
    autocast: Mapping[str, tuple[bool, torch.dtype]]
    generators: Generators

    @classmethod
    def now(cls) -> ProcessSettings:
        """Record them."""
        autocast = {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in AUTOCAST}
        return cls(torch.is_grad_enabled(), torch.get_default_dtype(), autocast, generators_now())

    def put_back(self) -> None:
        """Set them again, in the same thread: what set them for an evaluation may have been broken off."""
        torch.set_grad_enabled(self.is_grad_enabled)
        torch.set_default_dtype(self.dtype)
        for kind, (is_enabled, dtype) in self.autocast.items():
            torch.set_autocast_enabled(kind, is_enabled)
            torch.set_autocast_dtype(kind, dtype)
        put_back_generators(self.generators)


def generators_now() -> Generators:
    """Return the states of the generators that torch, Python and numpy have for the process."""
    is_gpu_used, numpy = _is_gpu_used(), sys.modules.get("numpy")
    states: Generators = {"torch": bytes(torch.get_rng_state().tolist()), "python": random.getstate()}
    devices = torch.cuda.get_rng_state_all() if is_gpu_used else ()
    # A device that is used for the first time begins with torch's seed.
    states["cuda"] = tuple(bytes(state.tolist()) for state in devices) if is_gpu_used else torch.initial_seed()
    state = None if numpy is None else numpy.random.get_state()
    if isinstance(state, tuple):  # else another kind of generator was put in the place of numpy's own
        name, keys, *others = state
        states["numpy"] = name, tuple(keys.tolist()), *others
    return states


def put_back_generators(states: Generators) -> None:
    """Set generators to the states that they had."""
    if "torch" in states:
        torch.set_rng_state(torch.tensor(list(states["torch"]), dtype=torch.uint8))
    if "python" in states:
        random.setstate(states["python"])
    if "numpy" in states:
        sys.modules["numpy"].random.set_state(states["numpy"])
    devices = states.get("cuda")
    if isinstance(devices, tuple):
        torch.cuda.set_rng_state_all([torch.tensor(list(state), dtype=torch.uint8) for state in devices])
    elif devices is not None and _is_gpu_used():
        torch.cuda.manual_seed_all(devices)


def _is_gpu_used() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


class BuiltSettings:
    """What a build left in modules, in optimizers, and in what follows these."""

    def __init__(self, modules: Iterable[torch.nn.Module], followers: Iterable[Any]) -> None:
        """Record it.

        Args:
            modules: All modules, with those inside of others.
            followers: Optimizers, schedules, scalers.
        """
        self._held: list[_HeldSetting] = [_HeldModule(module) for module in modules]
        self._held += [
            _HeldOptimizer(one) if isinstance(one, torch.optim.Optimizer) else _HeldSetting(one) for one in followers
        ]

    def put_back(self) -> None:
        """Set all of it again in those that are still there."""
        for held in self._held:
            held.put_back()


class _HeldSetting:
    """Numbers, switches and hooks among the attributes of an object, which it does not keep alive."""

    def __init__(self, owner: Any) -> None:
        self.ref, self.kind = weakref.ref(owner), type(owner)
        self.plain, self.hooks = _plain(vars(owner)), {name: _copy(each) for name, each in _hooks(owner)}

    def put_back(self) -> None:
        owner = self.ref()
        if type(owner) is not self.kind:
            return  # it is gone, or a lazy module that has become another one: its hooks are spent
        _set(vars(owner), self.plain)
        for name, hooks in _hooks(owner):
            _refill(hooks, self.hooks.get(name, {}))
        if isinstance(owner, torch.amp.GradScaler):
            getattr(owner, "_per_optimizer_states", {}).clear()  # else unscale_() is refused until the next update()


class _HeldModule(_HeldSetting):
    """The same of a module, with its mode, what its parameters require, and the switches of FSDP2."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module)
        self.is_training = module.training
        self.parameters = {
            name: (parameter.requires_grad, {kind: _copy(each) for kind, each in _hooks_of(parameter)})
            for name, parameter in _parameters(module)
        }
        self.switches = [_switches(one) for one in _switched(module)]

    def put_back(self) -> None:
        super().put_back()
        module = self.ref()
        if module is None:
            return
        if module.training != self.is_training:
            module.training = self.is_training
        for name, parameter in _parameters(module):
            if name in self.parameters:
                requires_grad, hooks = self.parameters[name]
                parameter.requires_grad_(requires_grad)
                for kind, each in _hooks_of(parameter):
                    _refill(each, hooks.get(kind, {}))
        for one, switches in zip(_switched(module), self.switches, strict=False):
            _set(vars(one), switches)


class _HeldOptimizer(_HeldSetting):
    """The same of an optimizer, with its groups; a group that was added meanwhile is taken out."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self.groups = [_plain(group) for group in optimizer.param_groups]

    def put_back(self) -> None:
        super().put_back()
        optimizer = self.ref()
        if optimizer is None:
            return
        for name in ("grad_scale", "found_inf"):  # of a step that a scaler began
            vars(optimizer).pop(name, None)
        del optimizer.param_groups[len(self.groups) :]
        for group, values in zip(optimizer.param_groups, self.groups, strict=False):
            _set(group, values)
        there = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for parameter in [each for each in optimizer.state if isinstance(each, torch.Tensor) and id(each) not in there]:
            del optimizer.state[parameter]


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    return type(value) in PLAIN or (type(value) is tuple and all(map(_is_plain, value)))


def _set(values: dict[str, Any], recorded: Mapping[str, Any]) -> None:
    """Set what is still there; what was deleted may have become a parameter or a module of that name."""
    for name, value in recorded.items():
        if name in values and values[name] is not value:
            values[name] = value


def _hooks(owner: Any) -> Iterator[tuple[str, Any]]:
    return ((name, each) for name, each in vars(owner).items() if "_hooks" in name and isinstance(each, (dict, list)))


def _hooks_of(tensor: torch.Tensor) -> Iterator[tuple[str, Any]]:
    hooks = ((name, getattr(tensor, name, None)) for name in HOOKS_OF_TENSORS)
    return ((name, each) for name, each in hooks if each is not None)


def _copy(hooks: Any) -> Any:
    return dict(hooks) if isinstance(hooks, dict) else list(hooks)


def _refill(hooks: Any, recorded: Any) -> None:
    """Fill a container of hooks in place: who may take one of them out again refers to it."""
    hooks.clear()
    (hooks.update if isinstance(hooks, dict) else hooks.extend)(recorded)


def _parameters(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    return ((name, parameter) for name, parameter in module._parameters.items() if parameter is not None)


def _switched(module: torch.nn.Module) -> list[Any]:
    """Return the objects in which FSDP2 keeps what a module's `set_...` methods set."""
    if not isinstance(module, FSDPModule):
        return []
    state = module._get_fsdp_state()
    return [state._state_ctx, *state._fsdp_param_groups]


def _switches(owner: Any) -> dict[str, Any]:
    return {name: value for name, value in _plain(vars(owner)).items() if not name.startswith("_")}

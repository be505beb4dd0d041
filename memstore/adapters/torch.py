"""An optimizer by the names of its parameters, and its loading through DCP."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from memstore.errors import ConfigError, ManifestMismatch

_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
_OF_PARAMETERS = ("params", "param_names", "entries")  # of a group: all else are hyperparameters


class NamedOptimizer:
    """An optimizer for `put`, `get(into=)` and DCP whose state is stored by the names of its parameters.

    The optimizer itself is stored by the numbers of its parameters. By name it also fits an optimizer that has them in
    another order or in other groups, a model that is wrapped otherwise, and other ranks of a sharded model. State is
    stored and loaded as it is: of frozen parameters too, and none where the optimizer has none.

    Args:
        model: The module whose parameters it has, wrapped (DDP, FSDP, torch.compile) or not.
        optimizer: Whose state is of one parameter each.

    Raises:
        ConfigError: It is no torch optimizer, has a parameter that is not the model's, or keeps one state of all
            parameters in their order (LBFGS).
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(
                f"NamedOptimizer takes one torch.optim.Optimizer, and a {type(optimizer).__name__} is none: make one "
                "for each of several optimizers; how to put what a framework (DeepSpeed) has wrapped is in "
                "docs/guide/frameworks.md"
            )
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigError(
                "an LBFGS keeps one state of all its parameters in their order, which names cannot divide: give the "
                "optimizer itself to put and get"
            )
        self._model, self.optimizer = model, optimizer
        self._known: dict[torch.Tensor, str] = {}
        self._loading: dict[str, Any] | None = None  # places for what DCP is about to bring
        self._names(optimizer.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """Return the state by parameter, and the groups, each under the name of its first parameter."""
        if self._loading is not None:
            return self._loading
        stored = self.optimizer.state_dict()
        names = self._names(stored)
        state = {names.get(index, index): entry for index, entry in stored["state"].items()}
        groups: dict[str, Any] = {}
        for group in stored["param_groups"]:
            params = [names[index] for index in group["params"]]
            if params:
                entries = sum(len(state.get(name, ())) for name in params)
                groups[params[0]] = {**group, "params": params, "entries": entries}
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Hand the optimizer the state of its own parameters; a group that was not stored keeps its hyperparameters.

        Raises:
            ManifestMismatch: It lacks a parameter that has state, or one of its groups was several with unlike
                hyperparameters, or DCP did not bring what was stored.
        """
        own = self.optimizer.state_dict()
        names, stored, groups = self._names(own), state["state"], state["param_groups"]
        live = set(names.values())
        homeless = [name for name in stored if name not in live]
        if homeless:
            raise ManifestMismatch(
                f"the optimizer's state of {homeless[0]!r} was stored ({len(homeless)} such parameters) and the "
                f"{type(self.optimizer).__name__} here does not have that parameter: give it the parameter, frozen "
                "(requires_grad=False) if it is not to be trained"
            )
        for key, group in groups.items():
            found = sum(len(stored.get(name, ())) for name in group["params"])
            if found != group["entries"] and not live.isdisjoint(group["params"]):
                raise ManifestMismatch(
                    f"the optimizer's group of {key!r} was stored with {group['entries']} entries of state and "
                    f"{found} came: load it by memstore.adapters.torch.load_dcp(states, reader), since dcp.load "
                    "brings nothing that has no place in an optimizer that has not stepped"
                )
        loaded = [_group_of(each, [names[index] for index in each["params"]], groups) for each in own["param_groups"]]
        entries = {index: stored[name] for index, name in names.items() if name in stored}
        self.optimizer.load_state_dict({**own, "state": entries, "param_groups": loaded})

    def _names(self, stored: dict[str, Any]) -> dict[int, str]:
        """Return the name of each parameter by its number in the optimizer's own state_dict()."""
        groups = zip(stored["param_groups"], self.optimizer.param_groups, strict=True)
        params = {i: param for own, live in groups for i, param in zip(own["params"], live["params"], strict=True)}
        if not self._known.keys() >= set(params.values()):
            named = unwrapped(self._model).named_parameters()
            self._known = {param: clean_name(name) for name, param in named}
        for index, param in params.items():
            if param not in self._known:
                raise ConfigError(
                    f"parameter {index} of the {type(self.optimizer).__name__}, of shape {list(param.shape)}, is not "
                    "in the model given with it: give the model whose parameters() it was made from"
                )
        return {index: self._known[param] for index, param in params.items()}

    def expect(self, found: dict[str, tuple[tuple[Any, ...], Any]] | None) -> None:
        """Have state_dict() return a place for each entry that a DCP step has of this object; None: no longer."""
        self._loading = None
        if found is None:
            return
        params = {name: param for param, name in self._known.items()}
        places: dict[str, Any] = {"state": {}, "param_groups": {}}
        for path, entry in found.values():
            if path[0] != "state" or path[1] in params:
                set_element(places, path, _place(entry, params.get(path[1])))
        self._loading = places


def load_dcp(states: dict[str, Any], reader: dcp.StorageReader, **options: Any) -> None:
    """Load as `dcp.load(states, storage_reader=reader)` does, with a place for all state of each NamedOptimizer.

    DCP fills what is there, and an optimizer that has not stepped has nothing. torch's own remedy is a step with zero
    gradients, which leaves counters and moments that training would not have had.

    Args:
        states: Objects with state_dict() and load_state_dict(), NamedOptimizers among them, and tensors, by name.
        reader: Such as `store.dcp_reader(step)`.
        options: Passed on to `dcp.load`.
    """
    metadata = reader.read_metadata()
    entries, named = metadata.state_dict_metadata, [key for key in states if isinstance(states[key], NamedOptimizer)]
    for name in named:
        paths = {key: path for key, path in metadata.planner_data.items() if path[0] == name and len(path) > 2}
        states[name].expect({key: (path[1:], entries[key]) for key, path in paths.items()})
    try:
        dcp.load(states, storage_reader=reader, **options)
    finally:
        for name in named:
            states[name].expect(None)


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside DDP."""
    while isinstance(model, torch.nn.parallel.DistributedDataParallel):
        model = model.module
    return model


def clean_name(name: str) -> str:
    """Return a parameter's name without what torch's wrappers put into it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _group_of(own: dict[str, Any], names: list[str], stored: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return a group with the hyperparameters that its parameters were stored with."""
    groups = [group for group in stored.values() if not set(names).isdisjoint(group["params"])]
    kinds = [{key: group[key] for key in group if key not in _OF_PARAMETERS} for group in groups]
    for kind, group in zip(kinds, groups, strict=True):
        if kind != kinds[0]:
            raise ManifestMismatch(
                f"the optimizer has {names[0]!r} and others in one group, and the groups of {groups[0]['params'][0]!r} "
                f"and {group['params'][0]!r} were stored with unlike hyperparameters: build the groups as they were"
            )
    return {**own, **(kinds[0] if kinds else {})}


def _place(entry: Any, param: torch.Tensor | None) -> Any:
    if not isinstance(entry, TensorStorageMetadata):
        return None
    if param is not None and param.shape == entry.size:
        return torch.zeros_like(param, dtype=entry.properties.dtype, requires_grad=False)
    device = "cpu" if param is None or not entry.size else param.device
    return torch.zeros(entry.size, dtype=entry.properties.dtype, device=device)

"""Keeps a model and its optimizer over a loss: a replacement builds them, the others take theirs to the new group."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch.distributed import distributed_c10d as c10d

from memstore.inplace import private_names, repoint
from memstore.inplace.build_trace import Trace, traced
from memstore.inplace.private_names import missing
from memstore.inplace.reentry import generation
from memstore.inplace.settings import BuiltSettings, Generators, generators_now, put_back_generators

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
        if absent := missing(private_names.NAMES):
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

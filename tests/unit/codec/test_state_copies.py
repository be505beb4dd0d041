"""Objects and what their state_dict() returns: restored either way, or named as not filled (R26)."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from overlap_case import WAIT_S, one_host, one_rank
from torch import nn
from torch.optim import lr_scheduler, swa_utils
from torchdata.stateful_dataloader import StatefulDataLoader

from memstore.adapters.torch import NamedOptimizer
from memstore.shell.codec.decode import decode_state
from memstore.shell.codec.encode import copy_into, plan_state
from memstore.shell.codec.plain_places import copies

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # by torchdata


class Fused(nn.Linear):
    """A module whose hook makes a copy of its weight."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_state_dict_post_hook(self._fuse)

    @staticmethod
    def _fuse(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
        state[prefix + "weight"] = torch.cat([state[prefix + "weight"]])


class Extra(nn.Linear):
    """A module with a state beside its parameters: a tensor of bytes, as TransformerEngine has."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.scale = 1

    def get_extra_state(self) -> torch.Tensor:
        return torch.full((2,), self.scale, dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.scale = int(state[0])


def plain_module() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)))
    model.append(model[0])  # tied
    return model


def optimizer_of(kind: Callable[[Any], Any]) -> Callable[[], Any]:
    def make() -> Any:
        optimizer = kind(nn.Linear(3, 3).parameters())
        for param in optimizer.param_groups[0]["params"]:
            param.grad = torch.randn_like(param)
        optimizer.step(lambda: torch.rand(()))
        optimizer.param_groups[0]["lr"] = float(torch.rand(()))
        return optimizer

    return make


def schedule_of(kind: Callable[[Any], Any]) -> Callable[[], Any]:
    def make() -> Any:
        schedule = kind(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9))
        for _ in range(int(torch.randint(1, 9, ()))):
            schedule.optimizer.step()
            schedule.step(*([torch.rand(())] if kind is lr_scheduler.ReduceLROnPlateau else []))
        return schedule

    return make


def named() -> NamedOptimizer:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, lr=float(torch.rand(())))
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    return NamedOptimizer(model, optimizer)


def scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=float(2 ** int(torch.randint(3, 20, ()))))


def loader() -> StatefulDataLoader:
    made = StatefulDataLoader(list(range(64)), batch_size=2, shuffle=True)
    batches = iter(made)
    for _ in range(int(torch.randint(1, 20, ()))):
        next(batches)
    return made


OPTIMIZERS = [
    "SGD",
    "Adam",
    "AdamW",
    "NAdam",
    "RAdam",
    "Adamax",
    "Adagrad",
    "Adadelta",
    "RMSprop",
    "Rprop",
    "ASGD",
    "Adafactor",
]
SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5]),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.9),
    "ConstantLR": lr_scheduler.ConstantLR,
    "LinearLR": lr_scheduler.LinearLR,
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lr_scheduler.PolynomialLR,
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 9),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.5),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.5, 20),
    "ReduceLROnPlateau": lr_scheduler.ReduceLROnPlateau,
    "SWALR": lambda o: swa_utils.SWALR(o, 0.05),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.StepLR(o, 2)]
    ),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.StepLR(o, 2)], [3]
    ),
}
MODULES: dict[str, Callable[[], Any]] = {
    "module": plain_module,
    "compiled module": lambda: torch.compile(nn.Linear(3, 3), backend="eager"),
    "module whose hook copies": Fused,
    "module with extra state": Extra,
    "averaged module": lambda: swa_utils.AveragedModel(nn.Linear(3, 3)),
}
OBJECTS: dict[str, Callable[[], Any]] = {
    **{name: optimizer_of(getattr(torch.optim, name)) for name in OPTIMIZERS},
    **{name: schedule_of(kind) for name, kind in SCHEDULES.items()},
    **MODULES,
    "NamedOptimizer": named,
    "GradScaler": scaler,
    "StatefulDataLoader": loader,
}


def bits(value: object) -> bytes:
    plan = plan_state(value)
    slot = memoryview(bytearray(max(plan.nbytes, 1)))
    copy_into(plan, [slot], len(slot))
    return plan.layout + bytes(slot)


def moved(state: object, into: object) -> list[str]:
    """Put one state and get it into another; return the paths to copies in that."""
    found = list(copies(into, "state"))
    plan = plan_state(state)
    slot = memoryview(bytearray(max(plan.nbytes, 1)))
    copy_into(plan, [slot], len(slot))
    decode_state(plan.layout, [slot], len(slot), into=into)
    return found


def two(name: str) -> tuple[Any, Any]:
    made = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        made.append(OBJECTS[name]())
        if isinstance(made[-1], Extra):
            made[-1].scale = seed
    return made[0], made[1]


@pytest.mark.parametrize("name", OBJECTS)
def test_an_object_is_restored(name: str) -> None:
    """Whole, and nothing is named."""
    stored, live = two(name)
    assert bits(stored) != bits(live)
    assert moved({"x": stored}, {"x": live}) == []
    assert bits(stored) == bits(live)


@pytest.mark.parametrize("name", OBJECTS)
def test_what_state_dict_returned_restores_the_object_or_is_named(name: str) -> None:
    """Never neither; a module's parameters and buffers are filled in the module, and what is there alone is named."""
    stored, live = two(name)
    found = moved({"x": [stored.state_dict()]}, {"x": [live.state_dict()]})
    if name in ("module", "compiled module", "averaged module"):
        assert found == []
    elif name in MODULES:
        assert found == [f"state['x'][0]['{'weight' if name == 'module whose hook copies' else '_extra_state'}']"]
    else:
        assert found == ["state['x'][0]"]
    assert (bits(stored) == bits(live)) == (found == [])


def test_the_callers_own_dicts_are_not_taken_for_copies() -> None:
    """Plain values, averages, random states, parameters by name, and the variables that a module's dict has itself."""
    model = plain_module()
    state = {
        "epoch": 3,
        "ema": {name: param.clone() for name, param in model.named_parameters()},
        "trained": dict(model.named_parameters()),
        "rng": (torch.get_rng_state(), {"python": [1, 2]}),
        "kept": model.state_dict(keep_vars=True),
        "ordered": collections.OrderedDict(a=1),
        "model": model,
    }
    assert list(copies(state, "state")) == []
    assert next(copies(copy.deepcopy(model.state_dict()), "x")) == "x['0.weight']"
    sharing = copy.deepcopy(model.state_dict())
    sharing["0.weight"] = sharing["3.weight"].detach()  # tied to itself alone
    assert "x['0.weight']" in list(copies(sharing, "x"))


def test_a_get_names_what_it_filled_in_a_copy(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In the result and in a line of the log with the remedy; a put of such a dict is named once."""
    stored, live = two("StepLR")
    with one_host(tmp_path) as cluster, one_rank(cluster) as store:
        store.put(1, {"schedule": stored.state_dict(), "w": torch.ones(2)}).wait("committed", WAIT_S)
        store.put(2, {"schedule": stored.state_dict(), "w": torch.ones(2)}).wait("committed", WAIT_S)
        into = {"schedule": live.state_dict(), "w": torch.zeros(2)}
        got = store.get(2, rank=0, into=into)
    assert got is not None
    assert got.not_filled == ("state['schedule']",)
    assert into["schedule"] == stored.state_dict()  # which the caller may hand to load_state_dict()
    lines = [line for line in caplog.messages if "state_dict() made" in line]
    assert len(lines) == 2
    assert "state['schedule']: state_dict() made that. A put stores what it was when it was made" in lines[0]
    assert "filled state['schedule'], which state_dict() made, and not the object: give the object" in lines[1]

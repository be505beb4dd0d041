"""What no state dict has is put back: after a loss a rank goes on as a process that has just built."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from memstore.adapters.ray_train import InPlaceTorchConfig
from memstore.errors import ConfigError
from memstore.inplace.ray_actors import InPlaceGroup
from memstore.inplace.settings import BuiltSettings, ProcessSettings, generators_now, put_back_generators


class Built:
    """What a build returns: a model, its optimizer, a schedule and a scaler."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.Linear(2, 2))
        self.model[2].requires_grad_(False)
        self.model[0].register_forward_hook(passed)
        self.optimizer = torch.optim.SGD(self.model[0].parameters(), lr=0.1, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        self.settings = BuiltSettings(self.model.modules(), [self.optimizer, self.schedule, self.scaler])

    def step(self) -> None:
        """Train one step."""
        self.scaler.scale(self.model(torch.ones(1, 2)).sum()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()

    def described(self) -> dict[str, Any]:
        """Return all that a state dict lacks, and what one overwrites."""
        hooks = [
            [
                list(each.values())
                for name, each in vars(one).items()
                if name.endswith("hooks") and isinstance(each, dict)
            ]
            for one in (*self.model.modules(), self.optimizer)
        ]
        parameters = list(self.model.parameters())
        return {
            "training": [module.training for module in self.model.modules()],
            "requires_grad": [one.requires_grad for one in parameters],
            "hooks": hooks,
            "hooks of tensors": [[*(one._backward_hooks or ())] for one in parameters],
            "p": self.model[1].p,
            "groups": [{**group, "params": list(map(id, group["params"]))} for group in self.optimizer.param_groups],
            "stateless": [one for one in self.optimizer.state if one is self.model[2].weight],
            "of a scaler": [name for name in ("grad_scale", "found_inf") if hasattr(self.optimizer, name)],
            "epoch": self.schedule.last_epoch,
            "scale": self.scaler.get_scale(),
            "stages": len(self.scaler._per_optimizer_states),
        }


def passed(*_: object) -> None:
    """Do nothing: a hook."""


def add_group(built: Built) -> None:
    """Thaw a layer, as a schedule of the training function does."""
    built.model[2].requires_grad_(True)
    built.optimizer.add_param_group({"params": list(built.model[2].parameters()), "lr": 7.0})
    built.step()


def break_off_in_a_step(built: Built) -> None:
    """Leave what a scaler's step of a fused optimizer has while it runs."""
    built.optimizer.grad_scale = built.optimizer.found_inf = torch.ones(())  # type: ignore[attr-defined]


def unscale(built: Built) -> None:
    """Leave a scaler between unscale_() and update()."""
    built.scaler.scale(built.model(torch.ones(1, 2)).sum()).backward()
    built.scaler.unscale_(built.optimizer)


CHANGES: dict[str, Callable[[Built], object]] = {
    "evaluation": lambda built: built.model.eval(),
    "frozen": lambda built: built.model.requires_grad_(False),
    "thawed": lambda built: built.model.requires_grad_(True),
    "hook added": lambda built: built.model.register_full_backward_hook(passed),
    "hook removed": lambda built: built.model[0]._forward_hooks.clear(),
    "hook of a parameter": lambda built: built.model[0].weight.register_hook(lambda gradient: gradient),
    "hook of an optimizer": lambda built: built.optimizer.register_step_post_hook(passed),
    "dropout": lambda built: setattr(built.model[1], "p", 0.1),
    "steps": lambda built: [built.step() for _ in range(3)],
    "scale": lambda built: (built.step(), built.scaler.update(64.0)),
    "unscale": unscale,
    "in a step": break_off_in_a_step,
    "group": add_group,
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_training_changed_is_as_the_build_left_it(change: str) -> None:
    """Ranks that stay and their replacement differ in nothing that get() does not restore."""
    built = Built()
    before = built.described()
    CHANGES[change](built)
    assert built.described() != before
    built.settings.put_back()
    assert built.described() == before
    built.model.requires_grad_(True)
    built.step()


def test_a_hook_that_is_put_back_can_be_removed_by_its_handle() -> None:
    """The container is the one that the handle knows."""
    model = nn.Linear(2, 2)
    handle = model.register_forward_hook(passed)
    settings = BuiltSettings([model], [])
    model.register_forward_hook(lambda *_: None)
    settings.put_back()
    assert list(model._forward_hooks.values()) == [passed]
    handle.remove()
    assert not model._forward_hooks


def test_a_lazy_module_that_has_run_stays_what_it_became() -> None:
    """Its hooks were spent on the first forward; only its mode is put back."""
    model = nn.Sequential(nn.LazyLinear(2))
    settings = BuiltSettings(model.modules(), [])
    model(torch.ones(1, 3))
    model.eval()
    settings.put_back()
    assert model(torch.ones(1, 3)).shape == (1, 2)
    assert model[0].training


def test_what_became_a_module_is_not_hidden_by_what_it_was() -> None:
    """An attribute that was None at the build holds a module now: the old value would come before it."""
    model = nn.Module()
    model.head = None
    settings = BuiltSettings([model], [])
    model.head = nn.Linear(1, 1)
    settings.put_back()
    assert isinstance(model.head, nn.Linear)


def test_nothing_is_kept_alive() -> None:
    """A module that the function took out of the model is gone with its tensors."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    settings = BuiltSettings(model.modules(), [])
    model.eval()
    del model[1]
    settings.put_back()
    assert all(module.training for module in model.modules())
    assert sum(held.ref() is not None for held in settings._held) == 2


@pytest.fixture
def process() -> Iterator[ProcessSettings]:
    made = ProcessSettings.now()
    yield made
    made.put_back()


def test_modes_that_were_set_for_an_evaluation_are_put_back(process: ProcessSettings) -> None:
    """The call that would have set them again was not reached."""
    torch.set_grad_enabled(False)
    torch.set_autocast_enabled("cpu", True)
    torch.set_autocast_dtype("cpu", torch.float16)
    torch.set_default_dtype(torch.float64)
    process.put_back()
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")
    assert torch.get_autocast_dtype("cpu") == process.autocast["cpu"][1]
    assert torch.zeros(1).dtype == torch.float32


def draw() -> tuple[float, float, float]:
    """Return a random number of each generator."""
    return torch.rand(()).item(), random.random(), float(np.random.rand())


def test_generators_of_random_numbers_begin_again(process: ProcessSettings) -> None:
    """A new process would draw the same ones, and other ranks draw them too."""
    now = ProcessSettings.now()
    first = draw()
    assert draw() != first
    now.put_back()
    assert draw() == first


def test_only_generators_that_are_named_are_put_back(process: ProcessSettings) -> None:
    """The others stay where they are."""
    states = generators_now()
    _, first, second = draw()
    put_back_generators({"python": states["python"]})
    assert draw()[1] == first
    put_back_generators({"numpy": states["numpy"]})
    assert draw()[2] == second


# -- test limits --------------------------------------------------------------------------------------
# Times and counts of a group that recovers in place are looked at where they are given, not at the first loss.


pytest.importorskip("ray.train.v2")


MADE: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "actors": (partial(InPlaceGroup, 2), ("hang_after_s", "leave_s", "meet_s", "collective_timeout_s")),
    "Ray Train": (InPlaceTorchConfig, ("hang_after_s", "leave_s", "meet_s", "timeout_s")),
}


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("value", [0, -1, -5.0, math.nan, "3", "x", True, [3]])
def test_a_time_that_is_none_is_refused(kind: str, value: object) -> None:
    """The error names the argument and what was given."""
    make, names = MADE[kind]
    for name in names:
        with pytest.raises(ConfigError, match=f"^{name}=.*: use a number of seconds") as caught:
            make(**{name: value})
        assert caught.value.field == name


@pytest.mark.parametrize("kind", MADE)
def test_times_may_be_any_numbers(kind: str) -> None:
    """No watchdog is a choice of its own."""
    make, names = MADE[kind]
    make(**dict.fromkeys(names, 3))
    assert make(hang_after_s=None).hang_after_s is None
    assert make(meet_s=math.inf).meet_s > 0


@pytest.mark.parametrize("name", ["max_losses", "spares"])
@pytest.mark.parametrize("value", [-1, 1.5, "2", None])
def test_a_count_that_is_none_is_refused(name: str, value: object) -> None:
    """A negative number of losses would end the job at the first one."""
    with pytest.raises(ConfigError, match=f"^{name}="):
        InPlaceGroup(2, **{name: value})  # type: ignore[arg-type]

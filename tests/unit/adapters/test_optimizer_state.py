"""Model and optimizer through a put and a get: training goes on as if it had never stopped, bit for bit (R26)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from memstore.adapters.torch import NamedOptimizer
from memstore.client.prepare import bytes_to_come
from memstore.errors import ConfigError, LoadError, ManifestMismatch
from memstore.shell.codec.decode import decode_state
from memstore.shell.codec.encode import copy_into, plan_state

Optimizer = torch.optim.Optimizer
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "AdamW amsgrad, foreach": lambda p: torch.optim.AdamW(p, amsgrad=True, foreach=True),
    "Adam with weight decay": lambda p: torch.optim.Adam(p, weight_decay=0.1),
    "Adam with a tensor as lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, dampening=0.5),
    "Adagrad": torch.optim.Adagrad,
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "ASGD": torch.optim.ASGD,
    "Rprop": torch.optim.Rprop,
    "Adadelta": torch.optim.Adadelta,
    "Adamax": torch.optim.Adamax,
    "Adafactor": torch.optim.Adafactor,
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
    "SparseAdam": torch.optim.SparseAdam,
}
FEW = ["AdamW", "Adam with weight decay", "SGD with momentum", "Adagrad", "RMSprop"]
FORMS: dict[str, Callable[[Any, Optimizer], Any]] = {
    "itself": lambda _, optimizer: optimizer,
    "by name": NamedOptimizer,
}


class Net(nn.Module):
    """A body, a head, and a head that only some batches use; `Net(sparse=True)` has an embedding alone."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.sparse = nn.Embedding(9, 4, sparse=True) if sparse else None
        if not sparse:
            self.body, self.head, self.late = nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, has_late: bool) -> torch.Tensor:
        if self.sparse is not None:
            loss: torch.Tensor = self.sparse((x[:, 0].abs() * 4).long()).square().mean()
            return loss
        hidden = self.body(x).tanh()
        return (self.head(hidden) + (self.late(hidden) if has_late else 0)).square().mean()


def train(model: Any, optimizer: Optimizer, steps: range, late_from: int = 0) -> list[str]:
    """Return the bits of the losses."""
    losses = []
    for step in steps:
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step)).clamp(-2, 2)

        def closure(x: torch.Tensor = x, step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x, step >= late_from)
            loss.backward()
            return loss

        losses.append(float(torch.as_tensor(optimizer.step(closure)).detach()).hex())
    return losses


def made(name: str, seed: int) -> tuple[Net, Optimizer]:
    torch.manual_seed(seed)
    model = Net(sparse=name == "SparseAdam")
    return model, OPTIMIZERS[name](list(model.parameters()))


def moved(state: object, into: object) -> Any:
    """Put one state and get it into another."""
    plan = plan_state(state)
    views = [memoryview(bytearray(256)) for _ in range(0, plan.nbytes, 256)]
    copy_into(plan, views, 256)
    return decode_state(plan.layout, views, 256, into=into)


def freeze(model: Net, *, is_frozen: bool = True) -> None:
    for param in model.body.parameters() if model.sparse is None else ():
        param.requires_grad_(not is_frozen)
        param.grad = None


@pytest.mark.parametrize(
    ("name", "form"), [each for each in itertools.product(OPTIMIZERS, FORMS) if each != ("LBFGS", "by name")]
)
@pytest.mark.parametrize("put_at", [0, 3])
def test_training_goes_on_bit_for_bit(name: str, form: str, put_at: int) -> None:
    """Before the first step and after some, into an optimizer that has not stepped; a put changes nothing."""
    model, optimizer = made(name, 0)
    unbroken = train(model, optimizer, range(7))
    model, optimizer = made(name, 0)
    losses = train(model, optimizer, range(put_at))
    state = {"model": model, "optim": FORMS[form](model, optimizer)}
    other, fresh = made(name, 1)
    moved(state, {"model": other, "optim": FORMS[form](other, fresh)})
    assert losses + train(other, fresh, range(put_at, 7)) == unbroken
    assert losses + train(model, optimizer, range(put_at, 7)) == unbroken


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "LBFGS"])
def test_room_is_prepared_for_what_an_optimizer_will_keep(
    name: str, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Before its first step, and the optimizer, its parameters and torch's generator stay as they are; else it says."""
    model, optimizer = made(name, 0)
    freeze(model, is_frozen=name == "RMSprop")
    hooked: list[Any] = []
    optimizer.register_step_post_hook(lambda *_: hooked.append(1))
    state = {"model": model, "optim": FORMS[form](model, optimizer)}
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    before, drawn = plan_state(state).nbytes, torch.get_rng_state()
    planned = before + bytes_to_come([state, {"schedule": schedule}])
    assert hooked == []
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(param.grad is None for param in model.parameters())
    assert plan_state(state).nbytes == before
    train(model, optimizer, range(1))
    after = plan_state(state).nbytes
    if name in ("ASGD", "Adafactor", "SparseAdam"):
        assert f"the {name} has not stepped" in caplog.text
    else:
        assert after <= planned <= after + 64 * 30
        assert caplog.text == ""


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", FEW)
def test_what_is_frozen_at_the_restore_keeps_its_state(name: str, form: str) -> None:
    """Trained, frozen, put and got while it is frozen, thawed."""

    def go_on(model: Net, optimizer: Optimizer) -> list[str]:
        losses = train(model, optimizer, range(3, 5))
        freeze(model, is_frozen=False)
        return losses + train(model, optimizer, range(5, 9))

    model, optimizer = made(name, 0)
    train(model, optimizer, range(3))
    freeze(model)
    other, fresh = made(name, 1)
    freeze(other)
    state = {"model": model, "optim": FORMS[form](model, optimizer)}
    moved(state, {"model": other, "optim": FORMS[form](other, fresh)})
    assert go_on(other, fresh) == go_on(model, optimizer)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", FEW)
def test_a_parameter_without_state_yet_has_none_after_a_get(name: str, form: str) -> None:
    """A head that no batch has used gets its first state when one does."""
    model, optimizer = made(name, 0)
    train(model, optimizer, range(3), late_from=5)
    other, fresh = made(name, 1)
    state = {"model": model, "optim": FORMS[form](model, optimizer)}
    moved(state, {"model": other, "optim": FORMS[form](other, fresh)})
    assert set(map(len, fresh.state.values())) == set(map(len, optimizer.state.values()))
    assert len(fresh.state) == len(optimizer.state)
    assert train(other, fresh, range(3, 9), late_from=5) == train(model, optimizer, range(3, 9), late_from=5)


@pytest.mark.parametrize("is_by_name", [False, True])
def test_a_group_that_was_not_stored(is_by_name: bool) -> None:
    """By name it keeps its hyperparameters and the others are restored; by number it is refused, nothing written."""

    def grouped(model: Net) -> Optimizer:
        return torch.optim.AdamW([*model.body.parameters(), *model.head.parameters()], lr=0.02)

    model, other = made("AdamW", 0)[0], made("AdamW", 1)[0]
    optimizer, fresh = grouped(model), grouped(other)
    train(model, optimizer, range(3))
    fresh.param_groups[0]["lr"] = 0.5
    fresh.add_param_group({"params": list(other.late.parameters()), "lr": 0.03, "betas": (0.8, 0.9)})
    if not is_by_name:
        before = [param.clone() for param in other.parameters()]
        with pytest.raises(ManifestMismatch, match=r"\['optim'\] .* of \[4\] .*AdamW.* has \[4, 2\]: build it as"):
            moved({"model": model, "optim": optimizer}, {"model": other, "optim": fresh})
        assert all(map(torch.equal, before, other.parameters()))
        return
    state = {"model": model, "optim": NamedOptimizer(model, optimizer)}
    moved(state, {"model": other, "optim": NamedOptimizer(other, fresh)})
    optimizer.add_param_group({"params": list(model.late.parameters()), "lr": 0.03, "betas": (0.8, 0.9)})
    assert train(other, fresh, range(3, 7)) == train(model, optimizer, range(3, 7))


def test_groups_of_many_parameters_are_compared_too() -> None:
    """Their numbers are stored in another form than those of a few."""
    params = [nn.Parameter(torch.ones(1)) for _ in range(150)]
    with pytest.raises(ManifestMismatch, match=r"of \[150\] parameters, and the SGD in `into` has \[80, 70\]"):
        moved([torch.optim.SGD(params)], [torch.optim.SGD([{"params": params[:80]}, {"params": params[80:]}])])


def test_groups_may_be_divided_and_are_not_mixed() -> None:
    """One group becomes two with its hyperparameters; two unlike ones do not become one."""
    model, other = made("AdamW", 0)[0], made("AdamW", 1)[0]
    one = torch.optim.AdamW(model.parameters(), lr=0.02)
    train(model, one, range(3))
    parts = [{"params": list(part.parameters())} for part in (other.head, other.body, other.late)]
    several = torch.optim.AdamW(parts)
    moved([model, NamedOptimizer(model, one)], [other, NamedOptimizer(other, several)])
    assert train(other, several, range(3, 6)) == train(model, one, range(3, 6))
    several.param_groups[1]["lr"] = 0.5
    with pytest.raises(LoadError, match=r"'body.weight' and others in one group.*unlike hyperparameters"):
        moved(NamedOptimizer(other, several), NamedOptimizer(model, one))


@pytest.mark.parametrize("is_by_name", [False, True])
def test_parameters_in_another_order(is_by_name: bool) -> None:
    """By name they keep their state; by number the optimizer is refused if it knows its parameters' names."""

    def backwards(model: Net) -> Optimizer:
        return torch.optim.AdamW(list(model.named_parameters())[::-1])

    model, other = made("AdamW", 0)[0], made("AdamW", 1)[0]
    optimizer, fresh = torch.optim.AdamW(model.named_parameters()), backwards(other)
    train(model, optimizer, range(3))
    if is_by_name:
        moved([model, NamedOptimizer(model, optimizer)], [other, NamedOptimizer(other, fresh)])
        assert train(other, fresh, range(3, 6)) == train(model, optimizer, range(3, 6))
        return
    with pytest.raises(ManifestMismatch, match=r"group 0 was stored with 'body.weight' where the AdamW .* 'late.bias'"):
        moved([model, optimizer], [other, fresh])


def test_a_model_that_is_wrapped_otherwise() -> None:
    """torch.compile puts its word into the names of parameters, at the top or below; DDP's and FSDP's go likewise."""
    model, optimizer = made("AdamW", 0)
    other, fresh = made("AdamW", 1)
    train(model, optimizer, range(3))
    compiled: Any = torch.compile(model, backend="eager")
    other.body = torch.compile(other.body, backend="eager")  # type: ignore[assignment]
    moved(NamedOptimizer(compiled, optimizer), NamedOptimizer(other, fresh))
    assert torch.equal(fresh.state[other.body.weight]["exp_avg"], optimizer.state[model.body.weight]["exp_avg"])
    assert "body.weight" in NamedOptimizer(compiled, optimizer).state_dict()["state"]


def test_of_frozen_weights_only_the_trained_ones() -> None:
    """What is not to be stored is left out of a dict of live parameters, which a get fills in place."""

    def state(model: Net, optimizer: Optimizer) -> dict[str, Any]:
        trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
        return {"model": trained, "optim": NamedOptimizer(model, optimizer)}

    model, other = Net(), Net()
    other.body.load_state_dict(model.body.state_dict())  # the base, of a file
    freeze(model)
    freeze(other)
    optimizer, fresh = (torch.optim.AdamW(each.parameters()) for each in (model, other))
    train(model, optimizer, range(3))
    assert plan_state(state(model, optimizer)).nbytes < plan_state([model, optimizer]).nbytes
    moved(state(model, optimizer), state(other, fresh))
    assert train(other, fresh, range(3, 6)) == train(model, optimizer, range(3, 6))


def test_state_of_a_parameter_that_the_optimizer_lacks_is_refused() -> None:
    """It would be lost in silence."""
    model, optimizer = made("AdamW", 0)
    train(model, optimizer, range(2))
    other = Net()
    fresh = torch.optim.AdamW(other.head.parameters())
    with pytest.raises(LoadError, match=r"'body.weight' was stored \(4 such.*AdamW here does not.*frozen"):
        moved(NamedOptimizer(model, optimizer), NamedOptimizer(other, fresh))


def test_what_cannot_be_named_is_refused_by_name() -> None:
    """Before anything is put."""
    model = Net()
    with pytest.raises(ConfigError, match=r"an LBFGS keeps one state .* give the optimizer itself"):
        NamedOptimizer(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ConfigError, match=r"takes one torch.optim.Optimizer, and a list is none"):
        NamedOptimizer(model, [torch.optim.SGD(model.parameters())])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"parameter 0 of the SGD, of shape \[4, 4\], is not in the model"):
        NamedOptimizer(model, torch.optim.SGD(Net().parameters()))

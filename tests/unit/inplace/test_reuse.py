"""What a training function built is used again where that is safe; else it is built again, and the log says why."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel, distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

from memstore.inplace import reuse
from memstore.inplace.reentry import Generation, enter
from memstore.inplace.reuse import FSDP, NAMES, missing

Build = Callable[[], Any]


class History:
    """A job's newest committed step."""

    def __init__(self, step: int | None = 3) -> None:
        self.step = step

    def latest_step(self) -> int | None:
        return self.step


@pytest.fixture
def kept() -> Iterator[dict[str, Any]]:
    yield {}
    enter(None)


@contextmanager
def entered(number: int, kept: dict[str, Any]) -> Iterator[None]:
    """Be in a generation of one rank, in a process group of its own: torch's fake one, which has no sockets."""
    enter(Generation(number, 0, 1, number == 0, kept))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def adam() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(2, 2)
    return model, torch.optim.AdamW(model.parameters())


def in_two(kept: dict[str, Any], build: Build, history: History | None = None) -> tuple[Any, Any]:
    """Return what a function has of its build in two generations."""
    found = []
    for number in range(2):
        with entered(number, kept):
            found.append(reuse(build, history or History()))
    return found[0], found[1]


def test_outside_of_a_generation_it_builds() -> None:
    """A script that runs as ever gets what it built."""
    assert reuse(lambda: "built", History()) == "built"


def test_what_was_built_is_there_again_without_gradients(kept: dict[str, Any]) -> None:
    """The optimizer keeps its state, which the restore overwrites."""
    with entered(0, kept):
        model, optimizer = reuse(adam, History())
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    with entered(1, kept):
        again, its_optimizer = reuse(adam, History())
    assert (again, its_optimizer) == (model, optimizer)
    assert [parameter.grad for parameter in again.parameters()] == [None, None]
    assert len(its_optimizer.state) == 2


def test_a_model_in_the_middle_of_a_forward_begins_the_next_one(kept: dict[str, Any]) -> None:
    """FSDP2's state machine is where a forward begins, and the group is the new one."""

    def build() -> torch.nn.Module:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        fully_shard(model[0])
        fully_shard(model)
        return model

    def break_off(*_: object) -> None:
        raise RuntimeError("broken off")

    with entered(0, kept):
        model = reuse(build, History())
        hook = model[1].register_forward_hook(break_off)
        with pytest.raises(RuntimeError, match="broken off"):
            model(torch.ones(1, 2))
        hook.remove()
    with entered(1, kept):
        assert reuse(build, History()) is model
        assert isinstance(model, FSDPModule)
        model(torch.ones(1, 2)).sum().backward()
        group = model[0]._get_fsdp_state()._fsdp_param_groups[0]
        assert group.mesh_info.shard_process_group is dist.group.WORLD


def test_the_switches_of_fsdp_are_as_the_build_left_them(kept: dict[str, Any]) -> None:
    """A loss amid accumulated batches: no gradient would be reduced any more, on the ranks that stay."""

    def build() -> torch.nn.Module:
        return fully_shard(torch.nn.Linear(2, 2))

    with entered(0, kept):
        model = reuse(build, History())
        model(torch.ones(1, 2))
        model.set_requires_gradient_sync(False)
        model.set_is_last_backward(False)
        model.set_gradient_divide_factor(7.0)
    with entered(1, kept):
        assert reuse(build, History()) is model
        state = model._get_fsdp_state()
        (group,) = state._fsdp_param_groups
        assert (group.reduce_grads, group.all_reduce_grads, group.gradient_divide_factor) == (True, True, None)
        assert state._state_ctx.is_last_backward
        model(torch.ones(1, 2)).sum().backward()
        assert model.weight.grad is not None


def test_ddp_has_the_hooks_and_the_mode_of_its_build(kept: dict[str, Any]) -> None:
    """It is wrapped again, for which what trains is what the build left."""

    def hook(*_: object) -> None:
        pass

    def build() -> DistributedDataParallel:
        model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)))
        model.register_forward_hook(hook)
        return model

    with entered(0, kept):
        model = reuse(build, History())
        model.eval()
        model.module.requires_grad_(False)
        model.register_forward_pre_hook(hook)
        model.register_comm_hook(None, allreduce_hook)
    with entered(1, kept):
        assert reuse(build, History()) is model
        assert [*model._forward_hooks.values(), *model._forward_pre_hooks.values(), *model._comm_hooks] == [hook]
        assert all(module.training for module in model.modules())
        assert all(parameter.requires_grad for parameter in model.parameters())
        model.register_comm_hook(None, allreduce_hook)


def test_what_a_build_draws_is_drawn_once(kept: dict[str, Any]) -> None:
    """A rank that stays goes on with the random numbers that a replacement has after its build."""

    def build() -> torch.nn.Module:
        torch.manual_seed(3)
        return torch.nn.Linear(2, 2)

    drawn = []
    for number in range(2):
        with entered(number, kept):
            reuse(build, History())
            drawn.append(torch.rand(3).tolist())
    assert drawn[0] == drawn[1]


def test_a_build_that_draws_nothing_leaves_the_functions_own_seed(kept: dict[str, Any]) -> None:
    """The function has seeded by its generation before."""
    drawn = []
    for number in range(2):
        with entered(number, kept):
            torch.manual_seed(number)
            reuse(lambda: torch.nn.Dropout(0.5), History())
            drawn.append(torch.rand(3).tolist())
    assert drawn[1] == torch.rand(3, generator=torch.Generator().manual_seed(1)).tolist()


def test_a_loss_while_ddp_is_wrapped_again_is_met_by_the_next_generation(
    kept: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wrapper is half made then; its module and its hook are those of the first build."""

    def build() -> DistributedDataParallel:
        model = DistributedDataParallel(torch.nn.Linear(2, 2))
        model.register_comm_hook(None, allreduce_hook)
        return model

    def lost(*_: object, **__: object) -> None:
        raise RuntimeError("Connection closed by peer")

    with entered(0, kept):
        model = reuse(build, History())
        module = model.module
    with entered(1, kept), monkeypatch.context() as patch:
        patch.setattr(distributed, "_sync_module_states", lost)
        with pytest.raises(RuntimeError, match="closed by peer"):
            reuse(build, History())
    with entered(2, kept):
        assert reuse(build, History()) is model
        assert model.module is module
        assert [hook for hook, _ in model._comm_hooks] == [allreduce_hook]
        assert model.process_group is dist.group.WORLD


def test_two_builds_have_two_names(kept: dict[str, Any]) -> None:
    """Each is kept."""
    for number in range(2):
        with entered(number, kept):
            found = reuse(adam, History()), reuse(adam, History(), name="critic")
    assert found[0][0] is not found[1][0]
    assert set(kept) == {"model", "critic"}


def plain() -> torch.nn.Module:
    return torch.nn.Linear(2, 2)


def with_group() -> torch.nn.Module:
    model = torch.nn.Linear(2, 2)
    model.group = dist.group.WORLD
    return model


def fsdp1() -> torch.nn.Module:
    return FullyShardedDataParallel(plain(), device_id="cpu")


def communicating() -> torch.nn.Module:
    model = torch.nn.Linear(2, 2)
    dist.broadcast(model.weight.detach(), 0)
    return model


def hooked_ddp() -> torch.nn.Module:
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    model.register_comm_hook(dist.group.WORLD, lambda state, bucket: torch.futures.Future())  # type: ignore[arg-type,return-value]
    return model


def mixed_ddp() -> torch.nn.Module:
    model = torch.nn.Linear(2, 2)
    named = [("weight", model.weight)]
    return DistributedDataParallel(model, delay_all_reduce_named_params=named, param_to_hook_all_reduce=model.bias)


WHY_NOT: dict[str, tuple[Build, int | None, str]] = {
    "no step": (plain, None, "the job has no committed step to restore"),
    "group in a module": (with_group, 3, r"a Linear keeps a process group in \.group"),
    "group in FSDP": (fsdp1, 3, r"a FullyShardedDataParallel keeps a process group in \.process_group"),
    "collective": (communicating, 3, r"the build communicates \(c10d\.broadcast_"),
    "hook": (hooked_ddp, 3, "a communication hook of a DistributedDataParallel keeps a process group"),
    "wrapped once": (mixed_ddp, 3, "delay_all_reduce_named_params, param_to_hook_all_reduce cannot be wrapped again"),
    "no module": (lambda: "model", 3, "the build returned a str, in which there is no module"),
}


@pytest.mark.parametrize("case", WHY_NOT)
def test_what_cannot_be_used_again_is_built(kept: dict[str, Any], caplog: pytest.LogCaptureFixture, case: str) -> None:
    """One line says why."""
    build, step, why = WHY_NOT[case]
    builds = []

    def counted() -> Any:
        builds.append(build())
        return builds[-1]

    with caplog.at_level(logging.WARNING, "memstore"):
        assert in_two(kept, counted, History(step))[1] is builds[1]
    (line,) = [record.getMessage() for record in caplog.records if record.name == "memstore"]
    assert line.startswith("memstore: rank 0 builds model again: ")
    assert re.search(why, line)


def test_other_groups_before_it_are_noticed(kept: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """A group of the same name would be another one."""
    with entered(0, kept):
        model = reuse(plain, History())
    with entered(1, kept):
        dist.new_group([0])
        assert reuse(plain, History()) is not model
    assert "the training function made other process groups before" in caplog.text


def test_each_private_name_of_torch_is_there(
    kept: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With another torch all is built again; here it fails by name."""
    assert missing(NAMES) == []
    name = (f"{FSDP}._fsdp_param", "FSDPParam", "no_such_state")
    monkeypatch.setitem(NAMES, name, "nothing")
    assert missing(NAMES) == [f"{FSDP}._fsdp_param.FSDPParam.no_such_state (nothing)"]
    first, second = in_two(kept, plain)
    assert first is not second
    assert "this torch lacks torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam.no_such_state" in caplog.text

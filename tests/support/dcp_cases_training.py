"""torch's cases of models and optimizers: one function each, run on all ranks; a false one raises."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch
from dcp_case import Case, Small, State, equal, raises
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

# -- training end to end ------------------------------------------------------------------------------------------


def build(kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model: nn.Module = Small(seed)
    if kind == "fsdp":
        model = fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    elif kind == "hsdp":
        model = fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    elif kind == "ddp":
        model = DistributedDataParallel(model)
    return model, torch.optim.Adam(model.parameters(), lr=0.1, foreach=False)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> float:
    torch.manual_seed(7)
    loss = torch.zeros(())
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.rand(8, 8)).sum()
        loss.backward()
        optimizer.step()
    return float(loss)


def app(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def goes_on(case: Case, kind: str, save: Callable[[State], Any]) -> None:
    """What is loaded into a fresh model trains on as the one that was saved."""
    model, optimizer = build(kind, 1)
    train(model, optimizer, 2)
    save({**app(model, optimizer), "losses": io.BytesIO(b"losses"), "step": 2})
    wanted = train(model, optimizer, 1)

    fresh, fresh_optimizer = build(kind, 2)
    state = case.load({**app(fresh, fresh_optimizer), "losses": io.BytesIO(), "step": 0})
    set_state_dict(fresh, fresh_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert state["losses"].getvalue() == b"losses"
    assert state["step"] == 2
    assert train(fresh, fresh_optimizer, 1) == wanted


def end_to_end_fsdp(case: Case) -> None:
    goes_on(case, "fsdp", case.save)


def end_to_end_hsdp(case: Case) -> None:
    goes_on(case, "hsdp", case.save)


def end_to_end_ddp(case: Case) -> None:
    goes_on(case, "ddp", case.save)


def models_change_their_parallelism(case: Case) -> None:
    def tensor_parallel(seed: int) -> nn.Module:
        mesh = init_device_mesh("cpu", (4,))
        return parallelize_module(Small(seed), mesh, {"one": ColwiseParallel(), "two": RowwiseParallel()})

    makers: dict[str, Callable[[int], nn.Module]] = {
        "fsdp": lambda seed: build("fsdp", seed)[0],
        "hsdp": lambda seed: build("hsdp", seed)[0],
        "ddp": lambda seed: build("ddp", seed)[0],
        "tp": tensor_parallel,
    }
    whole = dict(Small(1).state_dict())
    for one, saver in makers.items():
        case.save({"model": get_model_state_dict(saver(1))})
        for other, loader in makers.items():
            found = case.load({"model": get_model_state_dict(loader(2))})["model"]
            full = {name: leaf.full_tensor() if isinstance(leaf, DTensor) else leaf for name, leaf in found.items()}
            assert equal(full, whole), (one, other)


def end_to_end_async(case: Case) -> None:
    goes_on(case, "fsdp", case.save_async)


def end_to_end_async_with_dcps_own_stager(case: Case) -> None:
    for is_async in (False, True):
        stager = DefaultStager(StagingOptions(False, False, is_async, False))
        goes_on(case, "fsdp", lambda state, s=stager: case.save_async(state, async_stager=s))  # type: ignore[misc]
        stager.close()


def optimizer_is_filled_in_place(case: Case) -> None:
    model, optimizer = build("none", 1)
    case.save(app(model, optimizer))
    other, other_optimizer = Small(2), None
    other_optimizer = torch.optim.Adam(other.parameters(), lr=0.2)
    state = app(other, other_optimizer)
    weights, moments = state["model"], state["optimizer"]
    case.load(state)
    assert state["model"] is weights
    assert state["optimizer"] is moments
    set_state_dict(other, other_optimizer, model_state_dict=weights, optim_state_dict=moments)
    assert other_optimizer.param_groups[0]["lr"] == 0.1
    assert equal(dict(get_model_state_dict(other)), dict(get_model_state_dict(model)))


def parts_by_name(case: Case) -> None:
    model, optimizer = build("fsdp", 1)
    train(model, optimizer, 2)
    saved = app(model, optimizer)
    case.save(saved)
    part = case.load({"model": get_model_state_dict(build("fsdp", 2)[0])})
    assert equal(dict(part["model"]), dict(saved["model"]))
    whole = {name: weight.full_tensor() for name, weight in saved["model"].items()}
    assert equal(_load_state_dict_from_keys("model", storage_reader=case.reader())["model"], whole)
    found = _load_state_dict_from_keys({"optimizer.state"}, storage_reader=case.reader())["optimizer"]
    assert list(found) == ["state"]
    assert torch.equal(
        found["state"]["two.bias"]["exp_avg"], saved["optimizer"]["state"]["two.bias"]["exp_avg"].full_tensor()
    )


def fine_tuning_a_larger_model(case: Case) -> None:
    case.save({"model": Small(1).state_dict()})
    larger = nn.ModuleDict({"base": Small(2), "head": nn.Linear(8, 2)})
    state = {"model": larger["base"].state_dict(), "head": larger["head"].state_dict()}
    head = {name: weight.clone() for name, weight in state["head"].items()}
    raises(CheckpointException, "Missing key", lambda: case.load(dict(state)))
    case.load(state, planner=DefaultLoadPlanner(allow_partial_load=True))
    assert equal(dict(state["model"]), dict(Small(1).state_dict()))
    assert equal(dict(state["head"]), head)


def what_is_stored_is_listed(case: Case) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    tensor = distribute_tensor(torch.arange(16.0).view(4, 4), mesh, [Shard(0), Replicate()])
    case.save({"weight": tensor, "blob": io.BytesIO(b"epoch 4")})
    found = case.reader().read_metadata().state_dict_metadata
    assert isinstance(found["blob"], BytesStorageMetadata)
    weight = found["weight"]
    assert isinstance(weight, TensorStorageMetadata)
    assert (weight.size, weight.properties.dtype, len(weight.chunks)) == (torch.Size([4, 4]), torch.float32, 2)


def sizes_that_differ_are_refused(case: Case) -> None:
    case.save({"w": torch.zeros(4, 4)})
    raises(CheckpointException, "Size mismatch", lambda: case.load({"w": torch.zeros(4, 5)}))


def a_plan_that_is_cached_is_saved_again(case: Case) -> None:
    for value in range(3):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        state = {"w": torch.full((50, 7), float(value)), "step": value}
        case.save(state, planner=planner)
        assert equal(case.load({"w": torch.zeros(50, 7), "step": -1}), state)

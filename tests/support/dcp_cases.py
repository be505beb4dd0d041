"""Cases that torch has for its own storage, asked of ours: one function each, run on all ranks; a false one raises."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec, ShardMetadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from memstore.client.dcp.reader import DcpReader
from memstore.client.dcp.writer import DcpWriter
from memstore.errors import StepConflict, UnsupportedState
from memstore.testing.ranks.dcp_ranks import DcpRank

# -- dcp case -----------------------------------------------------------------------------------------
# One rank's way to the store in the cases of torch's: `save` and `load`, each save at the next step.


State = dict[str, Any]


class Case:
    """One rank's way to the store."""

    def __init__(self, rank: DcpRank, step: int) -> None:
        self.store, self.step = rank.store, step

    def writer(self, kind: Callable[..., DcpWriter] = DcpWriter, **options: Any) -> DcpWriter:
        self.step += 1
        return kind(self.store.puts, self.step, **options)

    def reader(self) -> DcpReader:
        found: DcpReader = self.store.dcp_reader(self.step)
        return found

    def save(self, state: Any, **options: Any) -> Any:
        return dcp.save(state, storage_writer=self.writer(), **options)

    def save_async(self, state: Any, **options: Any) -> None:
        answer = dcp.async_save(state, storage_writer=self.writer(), **options)
        getattr(answer, "upload_completion", answer).result(120)

    def load(self, state: Any, **options: Any) -> Any:
        dcp.load(state, storage_reader=self.reader(), **options)
        return state


def raises(kind: type[BaseException], words: str, work: Callable[[], Any]) -> None:
    """The work must raise this, with these words."""
    try:
        work()
    except kind as error:
        if words in str(error):
            return
        raise AssertionError(f"{words!r} is not in {error}") from error
    raise AssertionError(f"nothing was raised: {kind.__name__} with {words!r} was expected")


def equal(one: Any, other: Any) -> bool:
    """Equal tensors, DTensors by their local part, or objects."""
    if isinstance(one, DTensor):
        return isinstance(other, DTensor) and torch.equal(one.to_local(), other.to_local())
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return bool(one == other)


class Small(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.one, self.two = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.two(torch.relu(self.one(value)))
        return out


def claim_room(rank: DcpRank) -> dict[str, Any]:
    """Put a state that is larger than every case's."""
    return {"step": rank.store.put(1, {"w": torch.zeros(1 << 17)}).wait("committed", 120).step}


def run_case(rank: DcpRank, case: str, step: int) -> dict[str, Any]:
    """Run one case; its steps follow `step`. Return the last one."""
    way = Case(rank, step)
    globals()[case](way)
    dist.barrier()
    return {"step": way.step}


# -- plain states ------------------------------------------------------------------------------------------


def plain_module_state(case: Case) -> None:
    saved, loaded = Small(1).state_dict(), Small(2).state_dict()
    case.save(saved, no_dist=True)
    assert not equal(saved, loaded)
    assert equal(saved, case.load(loaded, no_dist=True))


def bytes_are_replaced(case: Case) -> None:
    case.save({"bytes0": [1], "bytes1": "string"})
    assert case.load({"bytes0": [2], "bytes1": "other"}) == {"bytes0": [1], "bytes1": "string"}


def blob_of_a_stateful_object(case: Case) -> None:
    class Blob:
        def __init__(self, value: bytes) -> None:
            self.state: State = {"blob": value}

        def state_dict(self) -> State:
            return self.state

        def load_state_dict(self, state: State) -> None:
            self.state = state

    case.save({"model": Small(1).state_dict(), "blob": Blob(b"some blob")})
    loaded = case.load({"model": Small(2).state_dict(), "blob": Blob(b"")})
    assert loaded["blob"].state == {"blob": b"some blob"}
    assert equal(loaded["model"], Small(1).state_dict())


def narrower_and_wider_dtypes(case: Case) -> None:
    values = torch.rand(40, 30)
    case.save({"w": values}, no_dist=True)
    assert torch.equal(case.load({"w": torch.zeros(40, 30).bfloat16()}, no_dist=True)["w"], values.bfloat16())
    case.save({"w": values.bfloat16()}, no_dist=True)
    assert torch.equal(case.load({"w": torch.zeros(40, 30)}, no_dist=True)["w"], values.bfloat16().float())


def empty_state(case: Case) -> None:
    case.save({})
    assert case.load({}) == {}
    case.save({}, no_dist=True)
    assert case.load({}, no_dist=True) == {}


def stateful_in_place_and_others_replaced(case: Case) -> None:
    class Noted(dict[str, Any]):
        is_set = False

        def __setitem__(self, key: str, value: Any) -> None:
            self.is_set = True
            super().__setitem__(key, value)

    class Holder:
        is_loaded = False

        def state_dict(self) -> State:
            return {}

        def load_state_dict(self, state: State) -> None:
            self.is_loaded = True

    held, state = Holder(), Noted(held=None)
    dict.__setitem__(state, "held", held)
    case.save(state)
    case.load(state)
    assert (held.is_loaded, state.is_set) == (True, False)
    state = Noted(plain={"tensor": torch.rand(10, 10), "bytes": [1, 2]})
    case.save(state)
    case.load(state)
    assert state.is_set


def keys_in_another_order_on_each_rank(case: Case) -> None:
    class Talking:
        def state_dict(self) -> State:
            return {}

        def load_state_dict(self, state: State) -> None:
            dist.all_reduce(torch.ones(2))

    class Gathering(Talking):
        def load_state_dict(self, state: State) -> None:
            dist.all_gather([torch.ones(2) for _ in range(dist.get_world_size())], torch.ones(2))

    both = {"a": Gathering(), "b": Talking()}
    state = both if dist.get_rank() == 0 else dict(reversed(both.items()))
    case.save(state)
    case.load(state)


def a_step_is_saved_once(case: Case) -> None:
    case.save({"random": torch.zeros(10)})
    again = DcpWriter(case.store.puts, case.step)
    raises(CheckpointException, StepConflict.__name__, lambda: dcp.save({"r": torch.ones(10)}, storage_writer=again))
    assert torch.equal(case.load({"random": torch.ones(10)})["random"], torch.zeros(10))


def storage_meta_names_the_step(case: Case) -> None:
    case.save({"a": torch.zeros(4, 4)})
    meta = case.reader().read_metadata().storage_meta
    assert meta is not None
    assert meta.checkpoint_id == f"memstore:{case.store.job}/{case.step}"


def names_are_not_claimed(case: Case) -> None:
    assert not DcpWriter.validate_checkpoint_id("/tmp/x")
    assert not DcpReader.validate_checkpoint_id("/tmp/x")


# -- errors of every phase on every rank -----------------------------------------------------------------------


def failing(kind: type[Any], phase: str, bad_rank: int) -> type[Any]:
    """A writer or reader that fails in one phase on one rank."""

    def fail(self: Any, *args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == bad_rank:
            raise ValueError(f"rank {bad_rank} fails in {phase}")
        return getattr(kind, phase)(self, *args, **kwargs)

    return type("Failing", (kind,), {phase: fail})


def saves_that_fail_in_any_phase(case: Case) -> None:
    phases = [
        ("set_up_storage_writer", 0),
        ("prepare_local_plan", 1),
        ("prepare_global_plan", 0),
        ("_write", 2),
        ("_submit", 0),
    ]
    for phase, bad_rank in phases:  # the last two are in the midst of write_data and finish
        writer = case.writer(failing(DcpWriter, phase, bad_rank))
        state = {"w": torch.full((20, 20), float(case.step)), "bytes": [1, 2]}
        words = f"rank {bad_rank} fails in {phase}"
        raises(CheckpointException, words, lambda s=state, w=writer: dcp.save(s, storage_writer=w))  # type: ignore[misc]
        case.step += 1  # a rank that is late with the news skips the next step (R12)
        dist.barrier()
    for phase in ("set_up_storage_writer", "_write", "_submit"):  # every rank alone, without a group
        writer = case.writer(failing(DcpWriter, phase, dist.get_rank()))
        work = lambda w=writer: dcp.save({"w": torch.ones(3)}, storage_writer=w, no_dist=True)  # type: ignore[misc]  # noqa: E731
        raises(CheckpointException, f"fails in {phase}", work)
        case.step += 1
        dist.barrier()
    state = {"w": torch.rand(20, 20), "bytes": [3]}
    case.save(state)
    assert equal(case.load({"w": torch.zeros(20, 20), "bytes": []})["bytes"], [3])


def loads_that_fail_in_any_phase(case: Case) -> None:
    state = {"w": torch.arange(400.0).view(20, 20), "bytes": [1, 2]}
    case.save(state)
    phases = [
        ("set_up_storage_reader", 0),
        ("prepare_local_plan", 1),
        ("prepare_global_plan", 0),
        ("read_metadata", 3),
        ("read_data", 2),
    ]
    for phase, bad_rank in phases:
        reader = failing(DcpReader, phase, bad_rank)(case.reader()._ranges, case.step)
        target = {"w": torch.zeros(20, 20), "bytes": [0]}
        words = f"rank {bad_rank} fails in {phase}"
        raises(CheckpointException, words, lambda t=target, r=reader: dcp.load(t, storage_reader=r))  # type: ignore[misc]
    alone = failing(DcpReader, "read_data", dist.get_rank())(case.reader()._ranges, case.step)
    target = {"w": torch.zeros(20, 20)}
    raises(CheckpointException, "fails in read_data", lambda: dcp.load(target, storage_reader=alone, no_dist=True))
    assert equal(case.load({"w": torch.zeros(20, 20), "bytes": [0]}), state)


# -- ShardedTensor -------------------------------------------------------------------------------------------


def chunked(dim: int, ranks: list[int]) -> ChunkShardingSpec:
    return ChunkShardingSpec(dim=dim, placements=[f"rank:{rank}/cpu" for rank in ranks])  # type: ignore[arg-type]


def rows(*parts: tuple[int, int, int], columns: int | None = 20) -> EnumerableShardingSpec:
    """Shards as (first row, rows, rank)."""
    tail = [] if columns is None else [columns]
    return EnumerableShardingSpec(
        [ShardMetadata([at, *([0] * len(tail))], [size, *tail], f"rank:{rank}/cpu") for at, size, rank in parts]
    )


def gathered(tensor: ShardedTensor) -> torch.Tensor | None:
    out = torch.zeros(tensor.size()) if dist.get_rank() == 0 else None
    tensor.gather(out=out)
    return out


def same_on_rank_0(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is None or other is None or torch.equal(one, other)


SPECS: dict[str, Any] = {
    "two": chunked(0, [0, 1]),
    "folded": chunked(0, [0, 1, 1, 0]),
    "five": rows((0, 2, 0), (2, 1, 1), (3, 3, 0), (6, 3, 1), (9, 1, 0)),
    "uneven": rows((0, 8, 1), (8, 2, 0)),
    "four": chunked(0, [0, 1, 2, 3]),
}


def sharded_tensor_as_it_was(case: Case) -> None:
    saved, loaded = (sharded_tensor.rand(SPECS["two"], 10, 20) for _ in range(2))
    case.save({"st": saved})
    case.load({"st": loaded})
    assert same_on_rank_0(gathered(saved), gathered(loaded))


def sharded_tensor_with_any_other_plan(case: Case) -> None:
    for one in SPECS:
        saved = sharded_tensor.rand(SPECS[one], 10, 20)
        case.save({"st": saved})
        for other in SPECS:
            if one != other:
                loaded = sharded_tensor.zeros(SPECS[other], 10, 20)
                case.load({"st": loaded})
                assert same_on_rank_0(gathered(saved), gathered(loaded)), (one, other)


def sharded_tensor_rows_to_columns(case: Case) -> None:
    saved, loaded = sharded_tensor.rand(chunked(0, [0, 1]), 10, 20), sharded_tensor.zeros(chunked(1, [0, 1]), 10, 20)
    case.save({"st": saved})
    case.load({"st": loaded})
    assert same_on_rank_0(gathered(saved), gathered(loaded))


def sharded_tensor_to_tensor_and_back(case: Case) -> None:
    specs = [chunked(0, [0, 1]), chunked(0, [0, 1, 1, 0]), rows((0, 8, 1), (8, 24, 0), columns=None)]
    for save_spec in specs:
        plain = torch.arange(32.0)
        state: State = {"sharded": sharded_tensor.rand(save_spec, 32), "replicated": plain}
        case.save(state)
        for load_spec in specs:
            swapped: State = {"sharded": torch.zeros(32), "replicated": sharded_tensor.zeros(load_spec, 32)}
            case.load(swapped)
            assert same_on_rank_0(gathered(state["sharded"]), swapped["sharded"])
            assert same_on_rank_0(plain, gathered(swapped["replicated"]))


def sharded_tensor_is_refused_by_async_save(case: Case) -> None:
    state = {"deep": {"st": sharded_tensor.rand(SPECS["four"], 10, 20)}}
    raises(UnsupportedState, "deep.st: a ShardedTensor", lambda: case.save_async(state))


# -- DTensor ---------------------------------------------------------------------------------------------------


def reshard(
    case: Case, saved: tuple[list[int], list[Placement]], loads: list[tuple[list[int], list[Placement]]]
) -> None:
    whole = torch.arange(16.0).view(4, 4)
    case.save({"t": distribute_tensor(whole, init_device_mesh("cpu", tuple(saved[0])), saved[1])})
    for shape, placements in loads:
        target = distribute_tensor(torch.zeros(4, 4), init_device_mesh("cpu", tuple(shape)), placements)
        case.load({"t": target})
        assert torch.equal(target.full_tensor(), whole), (saved, shape, placements)


LINE: list[list[Placement]] = [[Shard(0)], [Shard(1)], [Replicate()]]
GRID: list[list[Placement]] = [
    [Replicate(), Replicate()],
    [Replicate(), Shard(0)],
    [Shard(0), Replicate()],
    [Shard(0), Shard(0)],
    [Shard(1), Shard(0)],
]


def dtensor_1d_to_1d(case: Case) -> None:
    for one in LINE:
        reshard(case, ([4], one), [([4], other) for other in LINE])


def dtensor_2d_to_2d(case: Case) -> None:
    for one in GRID:
        reshard(case, ([2, 2], one), [([2, 2], other) for other in GRID])


def dtensor_1d_to_2d(case: Case) -> None:
    for one in LINE:
        reshard(case, ([4], one), [([2, 2], other) for other in GRID])


def dtensor_2d_to_1d(case: Case) -> None:
    for one in GRID:
        reshard(case, ([2, 2], one), [([4], other) for other in LINE])


def dtensor_parameters_with_extra_state(case: Case) -> None:
    class Extra(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            mesh = init_device_mesh("cpu", (4,))
            self.sharded = nn.Parameter(distribute_tensor(torch.arange(4.0) * scale, mesh, [Shard(0)]))
            self.replicated = nn.Parameter(distribute_tensor(torch.arange(4.0, 8) * scale, mesh, [Replicate()]))
            self.extra: State = {"scale": scale, "tensor": torch.full((1,), scale)}

        def get_extra_state(self) -> State:
            return self.extra

        def set_extra_state(self, state: State) -> None:
            self.extra = state

    case.save(Extra(1.0).state_dict())
    loaded = case.load(Extra(10.0).state_dict())
    assert equal(dict(loaded), dict(Extra(1.0).state_dict()))


def tensor_parallel_model(case: Case) -> None:
    def made(seed: int) -> nn.Module:
        mesh = init_device_mesh("cpu", (4,))
        return parallelize_module(Small(seed), mesh, {"one": ColwiseParallel(), "two": RowwiseParallel()})

    saved, loaded = made(1).state_dict(), made(2).state_dict()
    case.save(dict(saved))
    assert not equal(dict(saved), dict(loaded))
    assert equal(dict(saved), case.load(dict(loaded)))


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

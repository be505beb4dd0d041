"""torch's cases of ShardedTensor and DTensor: one function each, run on all ranks; a false one raises."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from dcp_case import Case, Small, State, equal, raises
from torch import nn
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec, ShardMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from memstore.errors import UnsupportedState

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

"""What the ranks of the DCP tests do; run by `memstore.testing.ranks.dcp_ranks` in every rank's process."""

from __future__ import annotations

import pickle
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint._async_process_executor as executor
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import memstore
from memstore.client.dcp.reader import load
from memstore.shell.rank.leases import OVER, Tenant
from memstore.shell.rank.shard_read import ShardRanges, ShardRead
from memstore.testing.ranks.dcp_ranks import DcpRank

State = dict[str, Any]


def full(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The same random tensor on every rank, NaN payloads included where the dtype is 16 bits wide."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bfloat16:
        return torch.randint(-(1 << 15), 1 << 15, shape, generator=generator, dtype=torch.int16).view(torch.bfloat16)
    return torch.randn(shape, generator=generator).to(dtype)


def split(world_size: int) -> tuple[int, int]:
    """Return the shape of a 2-D mesh."""
    return (2, world_size // 2) if world_size % 2 == 0 else (1, world_size)


def placed(seed: int) -> State:
    """DTensors of every placement, even and uneven, and plain objects, nested."""
    world_size = dist.get_world_size()
    line = init_device_mesh("cpu", (world_size,))
    grid = init_device_mesh("cpu", split(world_size), mesh_dim_names=("replicate", "shard"))
    return {
        "shard0": distribute_tensor(full(seed, 48, 6), line, [Shard(0)]),
        "shard1": distribute_tensor(full(seed + 1, 5, 96), line, [Shard(1)]),
        "replicate": distribute_tensor(full(seed + 2, 33, 7), line, [Replicate()]),
        "hsdp": distribute_tensor(full(seed + 3, 24, 10), grid, [Replicate(), Shard(0)]),
        "both": distribute_tensor(full(seed + 4, 24, 16), grid, [Shard(0), Shard(1)]),
        "same": distribute_tensor(full(seed + 5, 24, 4), grid, [Shard(0), Shard(0)]),
        "uneven": distribute_tensor(full(seed + 6, 7, 5), line, [Shard(0)]),
        "uneven1": distribute_tensor(full(seed + 7, 3, 11, dtype=torch.bfloat16), line, [Shard(1)]),
        "few": distribute_tensor(full(seed + 8, 1, 9), line, [Shard(0)]),
        "large": distribute_tensor(full(seed + 9, 600, 501), line, [Shard(0)]),
        "nested": {
            "plain": full(seed + 10, 13, 3),
            "list": [full(seed + 11, 4), f"text {seed}"],
            "step": seed,
            "rate": 0.1,
            "scalar": torch.tensor(float(seed)),
            "empty": torch.empty(0, 3),
            "view": full(seed + 12, 6, 8).t(),
        },
    }


def mostly_objects(seed: int) -> State:
    """A tensor of eight chunks and an object of five on every rank."""
    rank = dist.get_rank()
    return {f"tensor{rank}": full(seed + rank, 256, 512), f"object{rank}": [bytes([seed % 256]) * 300_000]}


class Grows:
    """Takes more when it is saved than when it was counted: its copy is larger."""

    def __init__(self, nbytes: int) -> None:
        self.data = bytes(nbytes)

    def __deepcopy__(self, memo: dict[int, Any]) -> Grows:
        return Grows(300_000)


def growing_objects(seed: int) -> State:
    return {**mostly_objects(seed), f"object{dist.get_rank()}": Grows(1)}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width + 4)
        self.down = nn.Linear(4 * width + 4, width, bias=False)
        self.norm = nn.LayerNorm(width)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(value + self.down(torch.relu(self.up(value))))
        return out


def model(seed: int, mesh: DeviceMesh) -> nn.Module:
    """FSDP2 over the whole of a 1-D mesh, or FSDP2 x tensor parallel over a 2-D one: strided shards."""
    torch.manual_seed(seed)
    made = nn.Sequential(Block(6), Block(6))
    if mesh.ndim == 2:
        for block in made:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for block in made:
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(made, mesh=mesh["dp"])


def trained(seed: int, *, is_2d: bool) -> State:
    """Model and AdamW state by name, after one step."""
    world_size = dist.get_world_size()
    tp = 2 if is_2d and world_size % 2 == 0 else 1
    mesh = init_device_mesh("cpu", (world_size // tp, tp), mesh_dim_names=("dp", "tp"))
    made = model(seed, mesh if is_2d else mesh["dp"])
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.01, weight_decay=0.1, foreach=False)
    made(full(seed, 3, 6)).sum().backward()
    optimizer.step()
    weights, moments = get_state_dict(made, optimizer)
    return {"model": weights, "optim": moments}


def everything(seed: int) -> State:
    """The whole of what is resharded."""
    return {"placed": placed(seed), "fsdp": trained(seed, is_2d=False), "fsdp_tp": trained(seed, is_2d=True)}


def leaves(state: Any, path: str = "") -> dict[str, Any]:
    """Flatten by path."""
    if isinstance(state, dict):
        return {name: leaf for key, child in state.items() for name, leaf in leaves(child, f"{path}.{key}").items()}
    if isinstance(state, list):
        return {name: leaf for i, child in enumerate(state) for name, leaf in leaves(child, f"{path}.{i}").items()}
    return {path: state}


def raw(value: Any) -> Any:
    """What must be equal: a tensor's local bytes with its shape and dtype, or the object."""
    if isinstance(value, DTensor):
        value = value.to_local()
    if isinstance(value, torch.Tensor):
        dense = value.detach().contiguous().flatten()
        return (value.shape, value.dtype, dense.view(torch.uint8).numpy().tobytes() if dense.numel() else b"")
    return value


def differing(one: State, other: State) -> list[str]:
    """Return the paths whose values differ."""
    a, b = leaves(one), leaves(other)
    return sorted(set(a) ^ set(b)) + sorted(name for name in set(a) & set(b) if raw(a[name]) != raw(b[name]))


# -- saving and loading ---------------------------------------------------------------------------------


def save(
    rank: DcpRank, step: int, what: str = "everything", how: str = "sync", stock: str = "", **options: Any
) -> dict[str, Any]:
    """Save a state of seed `step`, and, with `stock`, the same state with DCP's own writer into that folder."""
    state = globals()[what](step)
    if stock:
        dcp.save(state, checkpoint_id=stock)
    writer = rank.store.dcp_writer(step, **options)
    rank.tickets[step] = writer
    if how == "sync":
        dcp.save(state, storage_writer=writer)
    else:
        future = dcp.async_save(state, storage_writer=writer)
        for leaf in leaves(state).values():  # training goes on
            if isinstance(leaf, torch.Tensor):
                (leaf.to_local() if isinstance(leaf, DTensor) else leaf).detach().zero_()
        future.result(120)
    if writer.wait is not None:  # the save has waited for it on the coordinator: here the word may be on its way
        writer.ticket.wait(writer.wait, 60)
    return {"level": writer.ticket.level, "nbytes": writer.ticket.nbytes}


def compare(
    rank: DcpRank, seed: int, what: str = "everything", stock: str = "", step: int | None = None
) -> dict[str, Any]:
    """Load into states of another seed; say what differs from the stock reader's result, and what was loaded at all."""
    mine, theirs, before = (globals()[what](seed) for _ in range(3))
    reader = rank.store.dcp_reader(step)
    dcp.load(mine, storage_reader=reader)
    dcp.load(theirs, checkpoint_id=stock)
    return {"step": reader.step, "differing": differing(mine, theirs), "changed": differing(mine, before)}


def check(rank: DcpRank, seed: int, step: int | None = None, what: str = "placed") -> dict[str, Any]:
    """Load into a state of another seed; say what differs from a state made again."""
    mine = globals()[what](seed + 1000)
    reader = rank.store.dcp_reader(step)
    dcp.load(mine, storage_reader=reader)
    return {"step": reader.step, "differing": differing(mine, globals()[what](seed if seed >= 0 else reader.step))}


def shift(rank: DcpRank, seed: int, step: int) -> dict[str, Any]:
    """Go on with another number of ranks: load what is there, save the next step, load it again."""
    before = check(rank, seed)
    level = save(rank, step, "placed")["level"]
    return {"before": before, "level": level, "after": check(rank, step, step)}


# -- saves that do not go well --------------------------------------------------------------------------


class Faulty(DefaultSavePlanner):
    """Fails on one rank, in the middle of its write."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def resolve_data(self, write_item: WriteItem) -> Any:
        if dist.get_rank() == self.rank:
            raise OSError("the planner failed")
        return super().resolve_data(write_item)


def save_faulty(rank: DcpRank, step: int, bad_rank: int, is_async: bool) -> dict[str, Any]:
    """Save with a planner that fails on one rank."""
    writer = rank.store.dcp_writer(step)
    if is_async:
        dcp.async_save(placed(step), storage_writer=writer, planner=Faulty(bad_rank)).result(120)
    else:
        dcp.save(placed(step), storage_writer=writer, planner=Faulty(bad_rank))
    return {}


def save_without_room(rank: DcpRank, step: int, bad_rank: int) -> dict[str, Any]:
    """Save while one rank's slots are all taken."""
    leases, other = rank.store._link.leases, Tenant()
    if rank.rank == bad_rank:
        assert leases.take(other, len(leases.free), 0.0)
    try:
        return save(rank, step, "placed")
    finally:
        other.state = OVER


def save_unsupported(rank: DcpRank, step: int, bad_rank: int) -> dict[str, Any]:
    """One rank has a tensor that cannot be stored."""
    state = placed(step)
    if rank.rank == bad_rank:
        state["bad"] = torch.sparse_coo_tensor([[0]], [1.0], (2,), check_invariants=True)
    dcp.save(state, storage_writer=rank.store.dcp_writer(step))
    return {}


def save_in_process(rank: DcpRank, step: int, is_staged_elsewhere: bool) -> dict[str, Any]:
    """Ask DCP for a save process, or do what that comes to after a stager of DCP's own: it pickles the writer."""
    writer = rank.store.dcp_writer(step)
    try:
        if is_staged_elsewhere:
            pickle.dumps(writer)
        else:
            kind = AsyncCheckpointerType.PROCESS
            dcp.async_save(placed(step), storage_writer=writer, async_checkpointer_type=kind)
    finally:
        assert (writer.ticket, executor._CHECKPOINT_PROCESS) == (None, None)
    return {}


# -- other ways ----------------------------------------------------------------------------------------------


def save_twice(rank: DcpRank, first: int) -> dict[str, Any]:
    """Two saves are under way at once, each over a group of its own."""
    futures, writers = [], []
    for step in (first, first + 1):
        writers.append(rank.store.dcp_writer(step, wait=None))
        group = dist.new_group(backend="gloo")
        futures.append(dcp.async_save(placed(step), storage_writer=writers[-1], process_group=group))
    for future in futures:
        future.result(120)
    writers[-1].ticket.wait("committed", 120)
    return {"levels": [writer.ticket.level for writer in writers]}


def save_without_wait(rank: DcpRank, step: int) -> dict[str, Any]:
    """The save returns before the step is committed."""
    writer = rank.store.dcp_writer(step, wait=None)
    dcp.save(placed(step), storage_writer=writer)
    return {"level": writer.ticket.wait("committed", 120).level}


def own(seed: int) -> State:
    """A state of this rank alone."""
    return {"weight": full(seed * 100 + dist.get_rank(), 50, 3), "rank": dist.get_rank(), "seed": seed}


def save_alone(rank: DcpRank, step: int, **options: Any) -> dict[str, Any]:
    """Every rank saves a state of its own."""
    dcp.save(own(step), storage_writer=rank.store.dcp_writer(step), **options)
    return {}


def load_alone(rank: DcpRank, step: int, **options: Any) -> dict[str, Any]:
    """Every rank loads its own state again."""
    return {"differing": differing(rank.load(own(0) | {"weight": torch.zeros(50, 3)}, step, **options), own(step))}


def save_in_group(rank: DcpRank, step: int, members: list[int]) -> dict[str, Any]:
    """Some ranks save through DCP, in a group of their own; the others put what they have."""
    group = dist.new_group(members, backend="gloo")
    if rank.rank in members:
        writer = rank.store.dcp_writer(step, wait=None)
        dcp.save({"w": full(step, 9, 9), "n": step}, storage_writer=writer, process_group=group)
        writer.ticket.wait("committed", 120)
    else:
        rank.store.put(step, {}).wait("committed", 120)
    state: State = {"w": torch.zeros(9, 9), "n": 0}
    rank.load(state, step)
    return {"differing": differing(state, {"w": full(step, 9, 9), "n": step})}


def save_in_group_and_wait(rank: DcpRank, step: int, members: list[int]) -> dict[str, Any]:
    """Some ranks save and wait; the others do nothing."""
    group = dist.new_group(members, backend="gloo")
    if rank.rank in members:
        dcp.save({"w": full(step, 9, 9)}, storage_writer=rank.store.dcp_writer(step), process_group=group)
    return {}


def save_and_outgrow(rank: DcpRank, step: int, how: str) -> dict[str, Any]:
    """Save a small state, then one of three times the chunks."""
    for number, rows in enumerate((400, 1200)):
        writer = rank.store.dcp_writer(step + number)
        state = {"w": full(step, rows, 100) + rank.rank, f"rank {rank.rank}": full(step, rows, 50)}
        if how == "sync":
            dcp.save(state, storage_writer=writer)
        else:
            dcp.async_save(state, storage_writer=writer).result(120)
        writer.ticket.wait("committed", 60)
    return {"level": writer.ticket.level, "reason": writer.ticket.reason}


def load_parts(rank: DcpRank, seed: int, step: int, names: list[str]) -> dict[str, Any]:
    """Load some names only; say how many bytes of chunks were opened, and what of the state differs."""
    reads: list[ShardRead] = []
    real = ShardRanges.ask

    def noted(self: ShardRanges, *args: Any, **kwargs: Any) -> ShardRead:
        reads.append(real(self, *args, **kwargs))
        return reads[-1]

    wanted = {name: leaf for name, leaf in placed(seed).items() if name in names}
    state = {name: leaf for name, leaf in placed(seed + 1000).items() if name in names}
    ShardRanges.ask = noted  # type: ignore[method-assign,assignment]
    try:
        rank.load(state, step)
    finally:
        ShardRanges.ask = real  # type: ignore[method-assign]
    opened = [
        chunk.nbytes
        for read in reads
        for chunk, slot in zip(read.manifest().chunks, read.answer().slots, strict=True)
        if slot is not None
    ]
    return {"nbytes": sum(opened), "differing": differing(state, wanted)}


def replicas(seed: int) -> State:
    """A state that is the same on every rank."""
    return {"weights": {f"w{i}": full(seed * 10 + i, 500, 100) for i in range(8)}, "step": seed}


def put_plain(rank: DcpRank, step: int) -> dict[str, Any]:
    """An ordinary put between saves."""
    return {"level": rank.store.put(step, own(step)).wait("committed", 120).level}


def agree(rank: DcpRank) -> dict[str, Any]:
    """The step that all ranks agree on."""
    return {"step": rank.store.agree_on_step()}


def follow(rank: DcpRank, job: str, step: int, what: str = "placed") -> dict[str, Any]:
    """Load a step of another job together, although rank 1 has leased the step before it; say what differs."""
    with memstore.reader(job, config=rank.store.config) as reader, reader.lease(step - dist.get_rank() % 2):
        mine = globals()[what](step + 1000)
        found = reader.dcp_reader(step - dist.get_rank() % 2)
        loaded = load(mine, found, process_group=dist.group.WORLD, planner=None)
    return {"step": loaded, "differing": differing(mine, globals()[what](step))}

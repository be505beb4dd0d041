"""What the ranks of the optimizer tests do: train a sharded model; put, get, save and load it; compare losses."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.tensor import DTensor

from memstore.adapters.torch import NamedOptimizer, load_dcp
from memstore.testing.ranks.dcp_ranks import DcpRank

FORMS: dict[str, Callable[[Any, Any], Any]] = {"itself": lambda _, optimizer: optimizer, "by name": NamedOptimizer}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.02),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, dampening=0.5),
}


class Net(nn.Module):
    """A body, a head, and a head that only late batches use."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.late = nn.Linear(6, 10), nn.Linear(10, 3), nn.Linear(10, 3)

    def forward(self, x: torch.Tensor, has_late: bool) -> torch.Tensor:
        hidden = self.body(x).tanh()
        out: torch.Tensor = self.head(hidden) + (self.late(hidden) if has_late else 0)
        return out


def made(kind: str, optimizer: str, seed: int) -> tuple[Any, torch.optim.Optimizer]:
    """Return a model and its optimizer; FSDP1 has each parameter for itself, or one flat one of all."""
    torch.manual_seed(seed)
    model: Any = Net()
    if kind == "FSDP2":
        for part in (model.body, model.head, model.late):
            fully_shard(part)
        fully_shard(model)
    else:
        is_flat = kind == "FSDP1, flat"
        model = FullyShardedDataParallel(model, use_orig_params=not is_flat, device_id=torch.device("cpu"))
    return model, OPTIMIZERS[optimizer](model.parameters())


def train(model: Any, optimizer: torch.optim.Optimizer, steps: range, late_from: int) -> list[str]:
    """Return the bits of this rank's losses."""
    losses = []
    for step in steps:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step * 100 + dist.get_rank()))
        loss = model(x, step >= late_from).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()).hex())
    return losses


def freeze(model: Any, *, is_frozen: bool) -> None:
    """Freeze the body, or thaw it."""
    for name, param in model.named_parameters():
        if "body" in name:
            param.requires_grad_(not is_frozen)


def restored(rank: DcpRank, kind: str, optimizer: str, form: str, step: int, row: str) -> dict[str, Any]:
    """Train, put, get into new objects, and train both on; say whether their losses are equal."""
    put_at, late_from = (0, 0) if row == "before the first step" else (3, 6 if row == "without state yet" else 0)
    one, other = made(kind, optimizer, 0), made(kind, optimizer, 1)
    train(*one, range(put_at), late_from)
    if row == "frozen":
        freeze(one[0], is_frozen=True)
        freeze(other[0], is_frozen=True)
    state = {"model": one[0], "optim": FORMS[form](*one)}
    into = {"model": other[0], "optim": FORMS[form](*other)}
    rank.store.put(step, state).wait("committed", 30)
    got = rank.store.get(step, rank=dist.get_rank(), into=into)
    assert got is not None
    losses = [train(*each, range(put_at, 5), late_from) for each in (one, other)]
    for model, _ in (one, other):
        freeze(model, is_frozen=False)
    thawed = [train(*each, range(5, 9), late_from) for each in (one, other)]
    untouched = made(kind, optimizer, 0)
    is_untouched = row == "frozen" or train(*untouched, range(9), late_from)[put_at:] == losses[0] + thawed[0]
    return {"is_equal": losses[0] + thawed[0] == losses[1] + thawed[1] and is_untouched, "left": got.not_filled}


def refused(rank: DcpRank, step: int) -> dict[str, Any]:
    """Put FSDP1's parts as ShardedTensors, and do as the error says; return it, and whether DCP brings them."""
    (model, optimizer), (other, _) = made("FSDP1", "AdamW", 0), made("FSDP1", "AdamW", 1)
    train(model, optimizer, range(2), 0)
    for each in (model, other):
        FullyShardedDataParallel.set_state_dict_type(each, StateDictType.SHARDED_STATE_DICT)
    try:
        rank.store.put(step, {"model": model})
        error = ""
    except Exception as exc:
        error = f"{type(exc).__name__}: {exc}"
    dcp.save({"model": model}, storage_writer=rank.store.dcp_writer(step))
    loaded = {"model": other.state_dict()}
    dcp.load(loaded, storage_reader=rank.store.dcp_reader(step))
    other.load_state_dict(loaded["model"])
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return {"error": error, "is_equal": all(torch.equal(one, two) for one, two in pairs)}


def states(seed: int, groups: int, optimizer: str) -> dict[str, Any]:
    """Return a model and its named optimizer, as DCP takes them; the last parameter is frozen."""
    model, _ = made("FSDP2", optimizer, seed)
    parts = [list(part.parameters()) for part in (model.body, model.head, model.late)]
    made_of = [[*parts[0], *parts[1], *parts[2]]] if groups == 1 else [parts[2] + parts[0], parts[1]]
    kind = OPTIMIZERS[optimizer]
    return {"model": model, "optim": NamedOptimizer(model, kind([{"params": each} for each in made_of]))}


def digest(loaded: dict[str, Any]) -> str:
    """Name model and optimizer, gathered from all ranks: the same for any number of them."""
    named, found = loaded["optim"].state_dict(), hashlib.sha256()
    entries = {f"{name}.{key}": value for name, entry in named["state"].items() for key, value in entry.items()}
    for name, value in sorted({**loaded["model"].state_dict(), **entries}.items()):
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        found.update(name.encode() + (b"" if whole is None else whole.numpy().tobytes()))
    return found.hexdigest() + str([group["lr"] for group in loaded["optim"].optimizer.param_groups][:1])


def save(rank: DcpRank, step: int, optimizer: str) -> dict[str, Any]:
    """Train with a body that is frozen after some steps and a head without state, and save."""
    made = states(0, 1, optimizer)
    model, named = made["model"], made["optim"]
    train(model, named.optimizer, range(2), late_from=9)
    named.optimizer.param_groups[0]["lr"] = 0.005
    freeze(model, is_frozen=True)
    dcp.save(made, storage_writer=rank.store.dcp_writer(step))
    return {"digest": digest(made), "count": len(named.state_dict()["state"])}


def load(rank: DcpRank, groups: int, optimizer: str) -> dict[str, Any]:
    """Load into new objects whose body is frozen, by us, and as DCP does; return what came, and DCP's error."""
    step = rank.store.agree_on_step()
    found, other = states(1, groups, optimizer), states(1, 1, optimizer)
    freeze(found["model"], is_frozen=True)
    load_dcp(found, rank.store.dcp_reader(step))
    try:
        dcp.load(other, storage_reader=rank.store.dcp_reader(step))
        error = ""
    except Exception as exc:
        error = f"{type(exc).__name__}: {exc}"
    return {"digest": digest(found), "count": len(found["optim"].state_dict()["state"]), "error": error}

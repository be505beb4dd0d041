"""A model and its optimizers as one Stateful object, with torch's own state-dict rules; ranks that follow their bytes.

`get_state_dict` names optimizer state by parameter name and creates it if the optimizer has not
stepped, so that a fresh process has a place for every byte; it understands DDP and FSDP.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.distributed_c10d import PrefixStore

from memstore.client.collective_hooks import WatchedCollectives
from memstore.client.store import Store


class AppState:
    """Model and optimizers for `put` and `get(into=)`.

    Args:
        model: A module, wrapped or not.
        optimizer: One optimizer, several, or none.
        options: Passed on to torch; sharded states are the default and what each rank should put.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] = (),
        *,
        options: StateDictOptions | None = None,
    ) -> None:
        self._model = model
        self._optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        self._options = options

    def state_dict(self) -> dict[str, Any]:
        """Return {"model": ..., "optim": ...}."""
        model, optim = get_state_dict(self._model, self._optimizers, options=self._options)
        return {"model": model, "optim": optim}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Hand both parts back to torch."""
        set_state_dict(
            self._model,
            self._optimizers,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
            options=self._options,
        )


def watch_collectives(store: Store) -> WatchedCollectives:
    """Mark every bulk collective that goes through torch.distributed's functions, until the result is closed.

    For what `Store.instrument_ddp` does not cover, such as FSDP on a CPU backend; libraries that took the functions
    before (`from torch.distributed import all_reduce`) are not seen.
    """
    return WatchedCollectives(store.marks)


def reassign_ranks(store: Store, *, together: int = 1) -> tuple[int, ...]:
    """Give every process the rank whose bytes its host holds, in the store and in torch.distributed; collective (R27).

    Call it right after connect, before anything is built on the process group: the default group ends and starts again
    with the new ranks, over the same key-value store, so a mesh made afterwards is in the right order. RANK follows;
    LOCAL_RANK and the device stay. Where no other order moves fewer bytes nothing happens.

    Args:
        store: Connected, without a get or put yet.
        together: As in `Store.assign_ranks`, whose result and errors this has.
    """
    order = store.assign_ranks(together=together)
    if order == tuple(range(store.world_size)) or not dist.is_initialized():
        return order
    backend, keys = dist.distributed_c10d.get_backend_config(), dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    dist.init_process_group(
        backend,
        store=PrefixStore(f"memstore/{store.job}/{store.attempt}", keys),
        rank=store.rank,
        world_size=store.world_size,
    )
    if "RANK" in os.environ:
        os.environ["RANK"] = str(store.rank)
    return order

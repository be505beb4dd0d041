"""A model and its optimizers as one Stateful object, with torch's own state-dict rules.

`get_state_dict` names optimizer state by parameter name and creates it if the optimizer has not
stepped, so that a fresh process has a place for every byte; it understands DDP and FSDP.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict


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

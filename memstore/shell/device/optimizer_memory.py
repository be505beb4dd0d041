"""The memory that does not change before an optimizer's step: its parameters and state (R11)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator

import torch

from memstore.core.format.layout import is_dense
from memstore.errors import ConfigError
from memstore.shell.device.side_stream import has_streams
from memstore.shell.tensors import subclasses
from memstore.shell.tensors.memory import TensorSource, is_flat

Place = tuple[str, int]  # device, address


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield an optimizer's parameters and the tensors that its state holds for each of them."""
    for group in optimizer.param_groups:
        yield from group["params"]
    for values in optimizer.state.values():
        if isinstance(values, dict):
            yield from (value for value in values.values() if isinstance(value, torch.Tensor))


class OptimizerMemory:
    """The memory of some tensors, found by device and address.

    Tensor subclasses but DTensor are left out: what keeps their memory is unknown.

    Raises:
        ConfigError: Something else than a tensor is among them.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        found: dict[Place, tuple[int, tuple[torch.Tensor, ...]]] = {}
        is_one = isinstance(tensors, torch.Tensor) or not isinstance(tensors, Iterable)  # a tensor would be its rows
        for tensor in [tensors] if is_one else tensors:
            if not isinstance(tensor, torch.Tensor):
                raise ConfigError(
                    "overlap= takes True or the tensors that may be copied late, and one of them is of type "
                    f"{type(tensor).__name__}: pass model.parameters(), or the values of a state_dict()",
                    field="overlap",
                )
            local = subclasses.local_tensor(tensor) if subclasses.is_dtensor(tensor) else tensor
            if type(local) not in (torch.Tensor, torch.nn.Parameter) or local.is_inference():
                continue
            if _fills_its_extent(local) and local.nbytes and has_streams(local.device):
                owners = (local,) if local is tensor else (tensor, local)
                found[str(local.device), local.data_ptr()] = local.nbytes, owners
        self._starts = sorted(found)
        self._found = [found[start] for start in self._starts]

    def owners_of(self, source: TensorSource) -> tuple[torch.Tensor, ...]:
        """Return the tensors whose version counters tell of writes to a source, the one with its memory last, or ()."""
        if source.address is not None or not is_flat(source.owner):
            return ()  # of the host, or gathered bytes, which are a copy, made at once
        place = str(source.owner.device), source.owner.data_ptr()
        index = bisect_right(self._starts, place) - 1
        if index < 0:
            return ()
        (device, start), (nbytes, owners) = self._starts[index], self._found[index]
        return owners if device == place[0] and place[1] + source.nbytes <= start + nbytes else ()


def _fills_its_extent(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.is_nested:
        return False
    return tensor.is_contiguous() or is_dense(tensor.shape, tensor.stride(), 1)

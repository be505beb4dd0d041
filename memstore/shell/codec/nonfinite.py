"""Looks for numbers that are not finite in what a put copies, and names the tensors that have them (R39).

The native helper looks while it digests. What it does not copy, such as tensors on a device, torch looks at: a norm of
each tensor is ordered with the put, before training changes it, and read once the copies have come.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from memstore.shell.tensors.memory import dense_bytes
from memstore.shell.tensors.placed_sources import PlacedSources
from memstore.shell.tensors.slot_stream import tensor_at

NAMES_MAX = 10
_FLOAT8 = (torch.float8_e5m2, torch.float8_e4m3fn, torch.float8_e4m3fnuz)
_DTYPES = (None, torch.float64, torch.float32, torch.float16, torch.bfloat16, *_FLOAT8)  # by kind


class Nonfinite:
    """What one put has found."""

    def __init__(self) -> None:
        self._offsets: list[int] = []
        # Offsets, whether each is finite, on the host, and what says when that has come.
        self._ordered: list[tuple[list[int], torch.Tensor, torch.cuda.Event | None]] = []

    def found(self, offsets: list[int]) -> None:
        """Take the offsets of tensors that have such numbers."""
        self._offsets += offsets

    def begin(self, placed: PlacedSources, kinds: bytes) -> None:
        """Have torch look at each tensor; on a device it does so in the order of what training has queued."""
        norms: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
        for kind, (offset, source) in zip(kinds, placed, strict=False):
            dtype = _DTYPES[kind]
            if dtype is not None:
                at, nbytes = source.address, source.nbytes
                flat = (dense_bytes(source.owner) if at is None else tensor_at(at, nbytes)).view(dtype)
                wide = flat if flat.element_size() > 1 else flat.float()
                norm = torch.linalg.vector_norm(wide, torch.inf, dtype=torch.float64 if kind == 1 else torch.float32)
                norms.setdefault(norm.device, []).append((offset, norm))
        for rows in norms.values():
            flags, event = torch.isfinite(torch.stack([norm.double() for _, norm in rows])), None
            if flags.is_cuda:  # what training queues from now on is not waited for
                host, event = torch.empty_like(flags, device="cpu", pin_memory=True), torch.cuda.Event()
                flags = host.copy_(flags, non_blocking=True)
                event.record(torch.cuda.current_stream(rows[0][1].device))
            self._ordered.append(([offset for offset, _ in rows], flags, event))

    def names(self, name_at: Callable[[int], str]) -> list[str]:
        """Return the tensors that have such numbers, the first by their paths; waits for what was ordered."""
        for offsets, flags, event in self._ordered:
            if event is not None:
                event.synchronize()
            self._offsets += [offset for offset, is_good in zip(offsets, flags.tolist(), strict=True) if not is_good]
        self._ordered.clear()
        offsets = sorted(self._offsets)
        more = [f"and {len(offsets) - NAMES_MAX} more"] if len(offsets) > NAMES_MAX else []
        return [*(name_at(offset) for offset in offsets[:NAMES_MAX]), *more]

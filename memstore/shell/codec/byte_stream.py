"""The source of a restored state: the bytes of a shard."""

from __future__ import annotations

from typing import Protocol

import torch


class ByteStream(Protocol):
    """Where a shard's bytes come from: its slots, or reads of its parts."""

    def read(self, offset: int, address: int, nbytes: int) -> None:
        """Copy stream bytes to host memory, at the latest in the next `settle`."""

    def read_to(self, offset: int, target: torch.Tensor) -> bool:
        """Copy stream bytes into flat uint8 device memory, at the latest in the next `settle`; False if it does not."""

    def read_bytes(self, offset: int, nbytes: int) -> bytes:
        """Return stream bytes as an object of their own."""

    def alias(self, offset: int, nbytes: int) -> torch.Tensor | None:
        """Return stream bytes without a copy, or None."""

    def settle(self) -> None:
        """Return once every read is done, and verified where this stream verifies."""

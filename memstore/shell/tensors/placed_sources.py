"""Where the bytes of a state are copied from, and where in its stream they stand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from memstore.shell.tensors.memory import TensorSource

HostTable = npt.NDArray[np.int64]  # a row for each source: its offset in the stream, its address, its nbytes


class PlacedSources:
    """Sources and their offsets, in stream order. Kept as columns; iteration makes the rows.

    Args:
        offsets: Of each in the stream.
        sizes: The bytes of each.
        addresses: Of each in host memory; None for bytes that are gathered at the copy, or by a device.
        owners: What keeps the memory of each alive, and what bytes that are gathered come from.
        table: The first three as a table, if the caller has it.
    """

    def __init__(
        self,
        offsets: Sequence[int],
        sizes: Sequence[int],
        addresses: Sequence[int | None],
        owners: Sequence[Any],
        table: HostTable | None = None,
    ) -> None:
        self.offsets, self.owners = offsets, owners
        self._sizes, self._addresses, self._table = sizes, addresses, table

    @classmethod
    def of(cls, rows: Iterable[tuple[int, TensorSource]]) -> PlacedSources:
        """Return these offsets with their sources."""
        offsets, sources = list[int](), list[TensorSource]()
        for offset, source in rows:
            offsets.append(offset)
            sources.append(source)
        return cls(
            offsets,
            [each.nbytes for each in sources],
            [each.address for each in sources],
            [each.owner for each in sources],
        )

    def followed_by(self, rows: Sequence[tuple[int, int]], blobs: Sequence[bytes | bytearray]) -> PlacedSources:
        """Return these sources and behind them byte strings, at these offsets and of these sizes."""
        if not rows:
            return self
        offsets, sizes = map(list, zip(*rows, strict=True))
        addresses: list[int | None] = [np.frombuffer(blob, np.uint8).__array_interface__["data"][0] for blob in blobs]
        table = self._table
        if table is not None:
            table = np.concatenate((table, host_table(offsets, addresses, sizes)))
        return PlacedSources(
            [*self.offsets, *offsets],
            [*self._sizes, *sizes],
            [*self._addresses, *addresses],
            [*self.owners, *blobs],
            table,
        )

    def __iter__(self) -> Iterator[tuple[int, TensorSource]]:
        return zip(self.offsets, map(TensorSource, self._sizes, self._addresses, self.owners), strict=True)

    def host_table(self) -> HostTable | None:
        """Return stream offset, address and nbytes of each; None if one is not copied from host memory as it lies."""
        if self._table is None and None not in self._addresses:
            self._table = host_table(self.offsets, self._addresses, self._sizes)
        return self._table


def host_table(offsets: Sequence[int], addresses: Sequence[int | None], sizes: Sequence[int]) -> HostTable:
    """Return the columns as a table: `[sources, 3]`."""
    table: HostTable = np.array([offsets, addresses, sizes], np.int64).T
    return table

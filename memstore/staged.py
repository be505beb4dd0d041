"""A staged shard opened: states built from parts of its stream, every chunk verified after its copy (R7)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from memstore.core.layout import decode_layout
from memstore.core.manifest import Manifest
from memstore.errors import MemstoreError, ProtocolError
from memstore.shell.checked_stream import CheckedStream, ChunkSource
from memstore.shell.state_decode import build_state


class OpenShard:
    """The chunks of `source`, for as long as that has them."""

    def __init__(self, source: ChunkSource, manifest: Manifest) -> None:
        self.manifest = manifest
        self._stream = CheckedStream(manifest, source)

    def build(self, data: bytes, into: Any, *, offset: int = 0) -> Any:
        """Return the state whose layout is `data` and whose stream begins at `offset`, in `into` if that is given.

        A chunk that is bad here by then is brought again from another copy, and copied again.

        Raises:
            DigestMismatch: Some chunk has no good copy; a state given as `into` is unusable then, and the message
                says so.
        """
        layout, left = decode_layout(data), self.manifest.nbytes - offset
        if layout.nbytes > max(left, 0):
            raise ProtocolError(f"a layout in {self.manifest.shard} is of {layout.nbytes} bytes, it has {left}")
        with self.telling(into):
            return build_state(layout, _Shifted(self._stream, offset), into=into)

    @contextlib.contextmanager
    def telling(self, into: Any) -> Iterator[None]:
        """Whatever fails in here once something was written says that `into` is unusable."""
        try:
            yield
        except MemstoreError as exc:
            if into is not None and self._stream.has_written:
                raise type(exc)(f"{exc}; the state given as into= is unusable: restart this process") from exc
            raise

    @property
    def mended_count(self) -> int:
        """Chunks that were bad here and came from another copy."""
        return len(self._stream.mended)


class _Shifted:
    """A stream within a stream."""

    def __init__(self, stream: CheckedStream, offset: int) -> None:
        self._stream, self._offset = stream, offset

    def read(self, offset: int, address: int, nbytes: int) -> None:
        self._stream.read(self._offset + offset, address, nbytes)

    def read_bytes(self, offset: int, nbytes: int) -> bytes:
        return self._stream.read_bytes(self._offset + offset, nbytes)

    def alias(self, offset: int, nbytes: int) -> torch.Tensor | None:
        return self._stream.alias(self._offset + offset, nbytes)

    def settle(self) -> None:
        self._stream.settle()

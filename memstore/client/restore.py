"""A staged shard opened: states built from parts of its stream, every chunk verified after its copy (R7)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from memstore.core.format.layout import decode_layout
from memstore.core.format.manifest import Manifest
from memstore.errors import LoadError, MemstoreError, ProtocolError
from memstore.shell.codec.decode import build_state, matched
from memstore.shell.codec.plain_places import copies
from memstore.shell.codec.verified_stream import CheckedStream, ChunkSource


class OpenShard:
    """The chunks of `source`, for as long as that has them.

    Args:
        beside: Another shard that the same get opens: a write from either counts for both.
    """

    def __init__(self, source: ChunkSource, manifest: Manifest, beside: OpenShard | None = None) -> None:
        self.manifest = manifest
        self._stream = CheckedStream(manifest, source)
        self._written: list[str] = [] if beside is None else beside._written  # which of the given states
        self.not_filled: list[str] = [] if beside is None else beside.not_filled  # paths in them (R26)
        self.in_copies: list[str] = [] if beside is None else beside.in_copies  # paths that were filled, of no object

    def build(self, data: bytes, into: Any, *, offset: int = 0, name: str = "state") -> Any:
        """Return the state whose layout is `data` and whose stream begins at `offset`, in `into` if that is given.

        A chunk that is bad here by then is brought again from another copy, and copied again.

        Args:
            name: The name of the state in messages.

        Raises:
            DigestMismatch: Some chunk has no good copy. `into` may have been written to: `naming_partial_writes` says.
        """
        layout, left = decode_layout(data), self.manifest.nbytes - offset
        if layout.nbytes > max(left, 0):
            raise ProtocolError(
                f"{self.manifest.shard} has {left} bytes from byte {offset} on, and its layout of the {name} names "
                f"{layout.nbytes}: its manifest is not what a put writes; read an older step"
            )
        self._stream.has_written = False
        in_copies = list(copies(into, name))  # before there are other references to what is in it
        match = matched(layout, into, name)
        is_written = False
        try:
            state = build_state(layout, _Shifted(self._stream, offset), match)
        except LoadError:
            is_written = True
            raise
        finally:
            if into is not None and (is_written or self._stream.has_written):
                self._written.append("into=" if name == "state" else f"{name}_into=")
        self.not_filled += [] if match is None else match.plain.not_filled
        self.in_copies += in_copies
        return state

    @contextlib.contextmanager
    def naming_partial_writes(self) -> Iterator[None]:
        """Name, in an error raised in here, the given states that were written to and are unusable."""
        try:
            yield
        except Exception as exc:
            if not self._written:
                raise
            given = " and ".join(f"the state given as {name}" for name in self._written)
            way = "repair that object and call get() again" if isinstance(exc, LoadError) else "restart this process"
            unusable = f"{given} {'is' if len(self._written) == 1 else 'are'} unusable: {way}"
            kind, said = (type(exc), str(exc)) if isinstance(exc, MemstoreError) else (LoadError, repr(exc))
            raise kind(f"{said}; {unusable}", is_unusable=True) from exc

    @property
    def repaired_count(self) -> int:
        """The chunks that were damaged or did not come, and were brought again."""
        return len(self._stream.repaired)


class _Shifted:
    """A stream within a stream."""

    def __init__(self, stream: CheckedStream, offset: int) -> None:
        self._stream, self._offset = stream, offset

    def read(self, offset: int, address: int, nbytes: int) -> None:
        self._stream.read(self._offset + offset, address, nbytes)

    def read_to(self, offset: int, target: torch.Tensor) -> bool:
        return self._stream.read_to(self._offset + offset, target)

    def read_bytes(self, offset: int, nbytes: int) -> bytes:
        return self._stream.read_bytes(self._offset + offset, nbytes)

    def alias(self, offset: int, nbytes: int) -> torch.Tensor | None:
        return self._stream.alias(self._offset + offset, nbytes)

    def settle(self) -> None:
        self._stream.settle()

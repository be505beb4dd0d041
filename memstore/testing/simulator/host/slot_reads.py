"""The transport of a simulated holder: reads slots of others, some of them after they were given up (R6, R14).

What is read travels as the metadata of its places, so that `Request` decides what arrives. A late read lands when its
chunks are waited for no longer, unless the holder is gone: its agents end with it.
"""

from __future__ import annotations

from collections.abc import Sequence

from memstore.errors import PeerUnreachable
from memstore.shell.transport.transport import GivenUp, Piece
from memstore.testing.simulator.host.context import HostContext

LATE_S = (0.05, 3.0)


class SlotReads:
    """Reads of one holder."""

    def __init__(self, holder: HostContext) -> None:
        self.holder = holder

    def metadata(self) -> bytes:
        """Return nothing: `Request` puts the bytes in its place."""
        return b""

    def offset(self, view: memoryview) -> int:
        """Return where a view of a slot begins."""
        slots, chunk_bytes = self.holder.memory.slots, self.holder.memory.chunk_bytes
        return next(number for number, slot in enumerate(slots) if slot is view.obj) * chunk_bytes

    def read(self, metadata: bytes, pieces: Sequence[Piece], *, host: str, deadline_s: float) -> GivenUp | None:
        """Read pieces of `metadata` now, or if so drawn, later."""
        network, landed = self.holder.world.network, list[bool]()

        def land() -> None:
            landed.append(True)
            memory = self.holder.memory
            if not self.holder.is_up or memory.is_cut:
                return
            for piece in pieces:
                number, start = divmod(piece.my_offset, memory.chunk_bytes)
                slot, came = memory.slots[number], metadata[piece.their_offset : piece.their_offset + piece.nbytes]
                slot[start : start + piece.nbytes] = came
            memory.version += 1

        if not network.take("late_reads"):
            land()
            return None
        self.holder.world.at(network.rng.uniform(*LATE_S), land)
        return GivenUp(PeerUnreachable(f"host {host} could not be read from", host=host), lambda: bool(landed))

    def close(self) -> None:
        """Do nothing: no process is there."""

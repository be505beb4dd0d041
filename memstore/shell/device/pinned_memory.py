"""Slots that a GPU reads and writes without a staging buffer: registered as pinned memory in this process (R11).

Registered are ranges of whole slots, each once, until the mapping is closed. That is safe because pages behind them
stay the same while it is mapped: they are held against being given back (`page_locks`) before they are registered.
Without CUDA, or where the driver refuses, copies go on as they would from any memory.

CUDA keeps a refused call as the last error of the thread that made it, where torch would raise it from training's next
kernel: so none of these calls is made in a thread that computes.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterable
from typing import Any

from memstore.shell.arena.mapping import ArenaMapping, runs

log = logging.getLogger("memstore")
RANGE_BYTES = 64 << 20  # of one call, which cannot be interrupted
UNPIN_S = 60.0
REGISTER_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device's context


def cuda_runtime() -> Any:
    """Return torch's module of CUDA, or None where this process has not initialised it; never initialises it."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_initialized() else None


class PinnedSlots:
    """The registered ranges of one mapping."""

    def __init__(self, mapping: ArenaMapping) -> None:
        self._mapping = mapping
        self._lock = threading.Lock()
        self._slots: set[int] = set()
        self._ranges: list[tuple[int, int]] = []  # device and address of each
        self._is_over = False  # closed, or refused once

    @property
    def is_empty(self) -> bool:
        """Return whether nothing is registered."""
        return not self._ranges

    def add(self, slots: Iterable[int], device: int) -> None:
        """Register those that are not registered yet, from the context of a CUDA device; a refusal is logged once.

        Not for a thread that computes.
        """
        cuda = cuda_runtime()
        with self._lock:
            fresh = sorted(set(slots) - self._slots)
            if cuda is None or self._is_over or not fresh:
                return
            for first, count in runs(fresh, max(1, RANGE_BYTES // self._mapping.chunk_bytes)):
                address, nbytes = self._mapping.address(first), count * self._mapping.chunk_bytes
                if not self._mapping.hold(first, count):
                    continue  # free slots that the holder is giving back: not leased to this rank any more
                refusal = call(cuda, device, "cudaHostRegister", address, nbytes, REGISTER_PORTABLE)
                if refusal:
                    self._is_over = True
                    log.warning(
                        "memstore: CUDA refused to pin %d bytes of %s (%s), %d slots are pinned: copies between GPU "
                        "and store go on through CUDA's own buffers, slower (`ulimit -l` too low? arena_dir no tmpfs?)",
                        nbytes,
                        self._mapping.folder,
                        refusal,
                        len(self._slots),
                    )
                    return
                self._ranges.append((device, address))
                self._slots.update(range(first, first + count))

    def close(self) -> None:
        """Take every registration back, before the memory is unmapped. In a forked child it does nothing."""
        with self._lock:
            self._is_over = True
            known, self._ranges = self._ranges, []
        cuda = cuda_runtime()
        if known and cuda is not None:
            unpin = threading.Thread(target=self._unpin, args=(cuda, known), name="memstore-unpin", daemon=True)
            unpin.start()
            unpin.join(UNPIN_S)

    def _unpin(self, cuda: Any, known: list[tuple[int, int]]) -> None:
        refusals = {call(cuda, device, "cudaHostUnregister", address) for device, address in known} - {""}
        if refusals:
            log.warning("memstore: CUDA could not unpin all of %s (%s)", self._mapping.folder, min(refusals))


def call(cuda: Any, device: int, name: str, *arguments: int) -> str:
    """Call CUDA's runtime in the context of a device; return why it refused, or ""."""
    try:
        with cuda.device(device):  # a thread that never chose one would make a context on device 0
            code = int(getattr(cuda.cudart(), name)(*arguments))
    except RuntimeError as exc:  # a device that failed before: training will see that error by itself
        return repr(exc)
    return f"error {code}" if code else ""

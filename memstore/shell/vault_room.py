"""Room for what a vault is to hold: slots with memory behind them, claimed up to a limit as jobs reserve (R9, R10)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from memstore.core.shelf import Share
from memstore.errors import CapacityError
from memstore.shell.capacity import beyond_limit, gib

if TYPE_CHECKING:
    from memstore.shell.vault import Vault

Admit = Callable[[int, int], str | None]  # (asked bytes, claimed bytes) -> why this machine has no room for it, or None


class VaultRoom:
    """Grows one vault's arena; `lock` is held while it grows, and never the vault's lock meanwhile."""

    def __init__(self, vault: Vault, limit_bytes: int, limit_why: str, admit: Admit | None) -> None:
        self._vault, self._admit = vault, admit
        self.limit_bytes, self.limit_why = limit_bytes, limit_why
        self.lock = threading.Lock()

    def claim(self, job: str, share: Share, on_step: Callable[[int, int], None] = lambda done, wanted: None) -> None:
        """Grow the arena to hold the share and reserve it; CapacityError with the numbers if it cannot."""
        vault = self._vault
        with self.lock:
            with vault.lock:
                needed = vault.shelf.slots_needed(job, share)
            self.grow_to(needed, on_step)
            with vault.lock:
                vault.shelf.set_share(job, share)

    def ensure_free(self, count: int) -> None:
        """Make sure `count` slots are free for staging (R10); who finds them free does not wait for others' growth."""
        table = self._vault.table
        while len(table.free) < count:
            with self.lock:
                with self._vault.lock:
                    needed = len(table.slots) + count - len(table.free)
                self.grow_to(needed)

    def grow_to(self, slots_count: int, on_step: Callable[[int, int], None] = lambda done, wanted: None) -> None:
        """Have so many slots; the caller holds `lock`. CapacityError if they are beyond the limit, or not to be had."""
        arena, chunk_bytes = self._vault.arena, self._vault.chunk_bytes
        if slots_count <= arena.slots_count:
            return
        if slots_count * chunk_bytes > self.limit_bytes:
            raise CapacityError(
                f"the arena needs {gib(slots_count * chunk_bytes)}, may take {gib(self.limit_bytes)} "
                f"({self.limit_why}), has {gib(arena.slots_count * chunk_bytes)} now; do one of: "
                f"{beyond_limit(self.limit_why)}",
                asked_bytes=slots_count * chunk_bytes,
                limit_bytes=self.limit_bytes,
            )
        refusal = self._admit(slots_count * chunk_bytes, arena.claimed_bytes) if self._admit else None
        if refusal is not None:
            raise CapacityError(refusal, asked_bytes=slots_count * chunk_bytes)
        arena.grow(slots_count, on_step=on_step)
        with self._vault.lock:
            self._vault.table.grow(arena.slots_count)

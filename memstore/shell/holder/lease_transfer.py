"""Leases that a rank's process offers to a child of it, such as DCP's save process (R8, R20).

    offered --adopt, by a child of the owner--> the child's own: it submits, and its death frees them
         '--withdraw--> the owner's again          '--the owner sends bye or is dead--> free

The owner fills the slots, then offers them; from the adoption on it may not write them. No slot has two owners: an
adoption and a withdrawal (`withdraw`) are decided here, under one lock, and both are answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from memstore.core.arena.slot_table import Owner
from memstore.core.wire.rank_messages import OfferSlots
from memstore.errors import ConfigError
from memstore.shell.arena.replica_store import ReplicaStore
from memstore.shell.arena.slot_sample import differing

ANCESTORS_MAX = 16


class LeaseTransfers:
    """The offers of leases on one host. Callers hold the lock of the holder's state, but for `check`."""

    def __init__(self, replicas: ReplicaStore) -> None:
        self.replicas = replicas
        self.offered: dict[tuple[Owner, int], Sequence[int]] = {}  # (owner, step) -> slots

    def check(self, owner: Owner, offer: OfferSlots) -> None:
        """Look whether this host sees in the slots of an offer what the owner has seen there.

        Raises:
            LookupError: It filled them in another arena than this host's, or has seen (`sample`) other bytes there.
        """
        step, slots = offer.step, offer.slots
        if offer.arena != self.replicas.arena.identity:
            raise LookupError(f"what was staged for step {step} lies in an arena that this host does not have any more")
        arena_slots = self.replicas.arena.mapping
        if self._is_leased(owner, slots) and differing(
            arena_slots, slots, len(slots) * arena_slots.chunk_bytes, offer.sample
        ):
            raise LookupError(f"what was staged for step {step} is not what its host sees in those slots")

    def offer_slots(self, owner: Owner, step: int, slots: Sequence[int]) -> None:
        """Offer filled slots to a child of the owner, in place of older offers of any of them."""
        for key, old in list(self.offered.items()):
            if key[0] == owner and not set(old).isdisjoint(slots):
                del self.offered[key]
        if slots and self._is_leased(owner, slots):  # else a child has them already
            self.offered[owner, step] = slots

    def _is_leased(self, owner: Owner, slots: Sequence[int]) -> bool:
        with self.replicas.lock:
            return self.replicas.table.leases.get(owner, set()).issuperset(slots)

    def withdraw(self, owner: Owner, step: int, slots: Sequence[int]) -> list[int]:
        """Take the offer back; return which of the slots are leased to the owner."""
        self.offered.pop((owner, step), None)
        with self.replicas.lock:
            mine = self.replicas.table.leases.get(owner, set())
            return sorted(mine.intersection(slots))

    def adopt(self, owner: Owner | None, child: Owner, step: int) -> Sequence[int]:
        """Move the leases to the child, and return the slots. LookupError if they are not offered."""
        slots = self.offered.pop((owner, step), None) if owner is not None else None
        with self.replicas.lock:
            if owner is None or slots is None or not self.replicas.table.transfer(owner, child, slots):
                raise LookupError(f"nothing staged for step {step} is on offer any more: its process took it back")
            self.replicas.flush()
        return slots

    def forget(self, owner: Owner) -> None:
        """Forget the offers of an owner that is gone."""
        for key in [key for key in self.offered if key[0] == owner]:
            del self.offered[key]


def check_child(pid: int, parent_pid: int, nonce: str) -> None:
    """Raise ConfigError unless process `pid` descends from `parent_pid`, which joined as `nonce`."""
    ancestor = pid
    for _ in range(ANCESTORS_MAX):
        ancestor = _parent_pid(ancestor)
        if ancestor == parent_pid:
            return
        if ancestor <= 1:
            break
    raise ConfigError(f"process {pid} is no child of process {parent_pid}, which joined as {nonce!r}")


def _parent_pid(pid: int) -> int:
    """Return the parent of a process; 0 if there is none (proc(5), field 4)."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    return int(status.rpartition(")")[2].split()[1])

"""Leases that a rank's process offers to a child of it, such as DCP's save process (R8, R20).

    offered --adopt, by a child of the owner--> the child's own: it submits, and its death frees them
         '--withdraw--> the owner's again          '--the owner sends bye or is dead--> free

The owner fills the slots, then offers them; from the adoption on it may not write them. No slot has two owners: an
adoption and a withdrawal are decided here, one after the other, and both are answered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memstore.core.arena.slot_table import Owner
from memstore.core.holder.link import Link
from memstore.core.holder.state import HolderState
from memstore.core.wire.rank_messages import AdoptSlots, OfferSlots, WithdrawSlots


def check(state: HolderState, owner: Owner, offer: OfferSlots, differs: Callable[[], bool]) -> None:
    """Look whether this host sees in the slots of an offer what the owner has seen there; any thread may call it.

    Args:
        state: The holder's; only its store is looked at.
        owner: The process that offers.
        offer: What it offers.
        differs: Compares the offer's sample with the slots; called only while they are the owner's own.

    Raises:
        LookupError: The owner filled them in another arena than this host's, or saw other bytes there.
    """
    if offer.arena != state.store.arena_identity:
        raise LookupError(
            f"what was staged for step {offer.step} lies in an arena that this host does not have any more"
        )
    if _is_leased(state, owner, offer.slots) and differs():
        raise LookupError(f"what was staged for step {offer.step} is not what its host sees in those slots")


def move(state: HolderState, link: Link, question: OfferSlots | AdoptSlots | WithdrawSlots) -> Sequence[int]:
    """Offer, adopt or withdraw slots; return those that are the asking process's from now on.

    Raises:
        LookupError: What is to be adopted is not on offer.
    """
    match question:
        case OfferSlots(step=step, slots=slots):
            _offer(state, link.owner, step, slots)
            return ()
        case WithdrawSlots(step=step, slots=slots):
            state.ranks.offered.pop((link.owner, step), None)
            with state.store.lock:
                return sorted(state.store.table.leases.get(link.owner, set()).intersection(slots))
        case AdoptSlots(step=step):
            return _adopt(state, link, step)


def _offer(state: HolderState, owner: Owner, step: int, slots: Sequence[int]) -> None:
    """Offer filled slots to a child of the owner, in place of older offers of any of them."""
    offered = state.ranks.offered
    for key, old in list(offered.items()):
        if key[0] == owner and not set(old).isdisjoint(slots):
            del offered[key]
    if slots and _is_leased(state, owner, slots):  # else a child has them already
        offered[owner, step] = slots


def _adopt(state: HolderState, link: Link, step: int) -> Sequence[int]:
    """Move the leases that the parent of a process offers to that process."""
    lender, store = state.ranks.owners.get(link.parent), state.store
    slots = state.ranks.offered.pop((lender, step), None) if lender is not None else None
    with store.lock:
        if lender is None or slots is None or not store.table.transfer(lender, link.owner, slots):
            raise LookupError(f"nothing staged for step {step} is on offer any more: its process took it back")
        store.flush()
    return slots


def forget(state: HolderState, owner: Owner) -> None:
    """Forget the offers of a process that is gone."""
    for key in [key for key in state.ranks.offered if key[0] == owner]:
        del state.ranks.offered[key]


def _is_leased(state: HolderState, owner: Owner, slots: Sequence[int]) -> bool:
    with state.store.lock:
        return state.store.table.leases.get(owner, set()).issuperset(slots)

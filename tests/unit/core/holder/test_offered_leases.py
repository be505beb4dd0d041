"""Leases that a process offers to a child of it: in any order of questions no slot has two owners (R8, R20)."""

from __future__ import annotations

import itertools
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from memstore.core.arena.slot_table import Owner, SlotTable
from memstore.core.holder import offered_leases, ranks
from memstore.core.holder.state import HolderState, Limits
from memstore.core.wire.messages import HostInfo
from memstore.core.wire.rank_messages import AdoptSlots, OfferSlots, SlotSample, WithdrawSlots

PARENT, CHILDREN = Owner(1, 1, 1), (Owner(2, 2, 2), Owner(3, 3, 3))
STEPS, SLOTS = (4, 5), range(5)
some_slots = st.lists(st.sampled_from(SLOTS), max_size=3, unique=True).map(tuple)
questions = st.one_of(
    st.tuples(st.just("offer"), st.sampled_from(STEPS), some_slots),
    st.tuples(st.just("withdraw"), st.sampled_from(STEPS), some_slots),
    st.tuples(st.just("adopt"), st.sampled_from(STEPS), st.sampled_from(CHILDREN)),
    st.tuples(st.just("submit"), st.just(0), some_slots),
)


def host() -> HolderState:
    """Return a holder with one rank, which leases all slots, and the rank's two child processes."""
    table = SlotTable(len(SLOTS))
    store: Any = SimpleNamespace(
        arena_identity="arena", table=table, lock=threading.RLock(), flush=lambda: None, reclaim=table.reclaim,
        reclaim_dead=lambda known, is_alive: None,
    )  # fmt: skip
    state = HolderState(
        HostInfo("a", 1, ()), store, lambda shard, digest: None, Limits(2.0, 6.0), now=lambda: 0.0,
        report=lambda report: None, ask=lambda request: None, is_stopping=lambda: False,
        is_alive=lambda owner: True, pin_numbers=itertools.count(1),
    )  # fmt: skip
    state.ranks.owners["n"] = PARENT
    table.lease(PARENT, len(SLOTS), attempt=1)
    return state


def link(owner: Owner = PARENT) -> Any:
    """Return the link of a process."""
    return SimpleNamespace(owner=owner, nonce="" if owner in CHILDREN else "n", parent="n" if owner in CHILDREN else "")


def offer(step: int, *slots: int, arena: str = "arena") -> OfferSlots:
    """Return the offer of some slots."""
    return OfferSlots(id=1, step=step, slots=slots, arena=arena, sample=SlotSample(seed=0, digests=b""))


def leased(state: HolderState, owner: Owner) -> set[int]:
    """Return the slots that a process leases."""
    return set(state.store.table.leases.get(owner, ()))


@given(st.lists(questions, min_size=3, max_size=12))
@example([("offer", 4, (0, 1)), ("offer", 5, (1, 2)), ("adopt", 4, CHILDREN[0]), ("adopt", 5, CHILDREN[1])])
@example([("offer", 4, (0, 1)), ("submit", 0, (1,)), ("adopt", 4, CHILDREN[0]), ("withdraw", 4, (0, 1))])
def test_every_slot_has_one_owner_after_any_questions(asked: list[tuple[str, int, Any]]) -> None:
    """An adoption moves what its parent offers and still leases, whole or not at all; nothing else moves a lease."""
    state = host()
    for kind, step, what in asked:
        mine, on_offer = leased(state, PARENT), dict(state.ranks.offered)
        theirs = [leased(state, child) for child in CHILDREN]
        if kind == "adopt":
            wanted = set(on_offer.get((PARENT, step), ()))
            if wanted and wanted <= mine:
                assert set(offered_leases.move(state, link(what), AdoptSlots(id=1, step=step))) == wanted
                theirs[CHILDREN.index(what)] |= wanted
                mine -= wanted
            else:
                with pytest.raises(LookupError, match=f"step {step} is on offer"):
                    offered_leases.move(state, link(what), AdoptSlots(id=1, step=step))
            assert (PARENT, step) not in state.ranks.offered
        elif kind == "withdraw":
            question = WithdrawSlots(id=1, step=step, slots=what)
            assert list(offered_leases.move(state, link(), question)) == sorted(mine.intersection(what))
            assert (PARENT, step) not in state.ranks.offered
        elif kind == "offer":
            assert offered_leases.move(state, link(), offer(step, *what)) == ()
            if what and mine.issuperset(what):
                assert state.ranks.offered[PARENT, step] == what
        elif state.store.table.submit(PARENT, what):
            mine -= set(what)
        assert (leased(state, PARENT), *(leased(state, child) for child in CHILDREN)) == (mine, *theirs)
        offered = list(itertools.chain.from_iterable(state.ranks.offered.values()))
        assert len(offered) == len(set(offered)), "one slot is on offer twice"
        state.store.table.validate()


def test_an_offer_ends_with_the_process_that_made_it() -> None:
    """Its child comes too late: the slots are free, and another process may have them."""
    state = host()
    offered_leases.move(state, link(), offer(4, 0, 1))
    state.is_alive = lambda owner: owner != PARENT
    list(ranks.reap(state))
    assert state.ranks.offered == {}
    with pytest.raises(LookupError, match="step 4 is on offer"):
        offered_leases.move(state, link(CHILDREN[0]), AdoptSlots(id=1, step=4))
    assert leased(state, CHILDREN[0]) == set()


def test_an_offer_is_refused_if_the_host_sees_other_bytes_in_its_slots() -> None:
    """The owner filled them in an arena that was replaced, or a page of them is gone."""
    state = host()
    with pytest.raises(LookupError, match="an arena that this host does not have any more"):
        offered_leases.check(state, PARENT, offer(4, 0, arena="older"), lambda: False)
    with pytest.raises(LookupError, match="is not what its host sees"):
        offered_leases.check(state, PARENT, offer(4, 0), lambda: True)
    offered_leases.check(state, PARENT, offer(4, 0), lambda: False)


def test_an_offer_that_comes_again_after_the_adoption_is_not_compared() -> None:
    """The child writes there by now: bytes that differ are no mistake of the parent's."""
    state, question = host(), offer(4, 0, 1)
    offered_leases.move(state, link(), question)
    offered_leases.move(state, link(CHILDREN[0]), AdoptSlots(id=1, step=4))
    offered_leases.check(state, PARENT, question, lambda: pytest.fail("it was compared"))
    offered_leases.move(state, link(), question)
    assert state.ranks.offered == {}

"""Slots of a read that was given up are free again only once it has ended (R6, R13)."""

from __future__ import annotations

from memstore.core.arena.slot_table import SlotTable
from memstore.core.arena.withheld_slots import WithheldSlots


def test_slots_are_out_of_use_until_their_own_read_has_ended() -> None:
    table, ended = SlotTable(4), set[str]()
    withheld = WithheldSlots(table)
    for name in ("first", "second"):
        numbers = [table.receive(), table.receive()]
        withheld.withhold([number for number in numbers if number is not None], lambda name=name: name in ended)
    assert (withheld.count, withheld.free_ended(), len(table.free)) == (4, [], 0)
    ended.add("second")
    assert (len(withheld.free_ended()), withheld.count, len(table.free)) == (2, 2, 2)
    ended.add("first")
    assert (len(withheld.free_ended()), withheld.count, len(table.free)) == (2, 0, 4)

"""Files of an arena that were removed, written again from what a holder has open (R35)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from memstore.core.arena.memory_ports import SlotHeader
from memstore.core.arena.slot_table import SlotState
from memstore.shell.arena.arena import Arena
from memstore.testing.clusters.scratch_folder import scratch_folder

CHUNK = 64 << 10


@pytest.fixture
def folder() -> Iterator[Path]:
    with scratch_folder() as path:
        yield path


def open_arena(folder: Path) -> Arena:
    return Arena.open(folder, limit_bytes=16 * CHUNK, chunk_bytes=CHUNK)


@pytest.mark.parametrize("what", [("arena", "slots"), ("arena",), ("slots",)])
def test_removed_files_are_written_again_with_what_is_sealed(folder: Path, what: tuple[str, ...]) -> None:
    """Every sealed slot is in the new files under its number, all others are free, and the old pages are let go of."""
    arena = open_arena(folder)
    arena.grow(6)
    for slot in range(6):
        arena.view(slot)[:] = bytes([slot + 1]) * CHUNK
        state = SlotState.SEALED if slot % 2 else SlotState.LEASED
        arena.headers.write(slot, SlotHeader(state, CHUNK - slot, bytes(16), owner_pid=1))
    for name in what:
        (folder / name).unlink()
    assert arena.files_present() == {name: name not in what for name in ("arena", "slots")}
    pages = os.fstat(arena._fd).st_blocks
    arena.write_again()
    if "arena" in what:
        assert os.fstat(arena._fd).st_blocks * 2 == pages
    again = open_arena(folder)
    assert again.identity != arena.identity
    assert [again.headers.read(n).state for n in range(6)] == [SlotState.FREE, SlotState.SEALED] * 3
    for slot in (1, 3, 5):
        assert again.headers.read(slot).nbytes == CHUNK - slot
        assert bytes(again.view(slot, CHUNK - slot)) == bytes([slot + 1]) * (CHUNK - slot)
    for one in (arena, again):
        one.close()

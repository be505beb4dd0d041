"""A sample of what a process sees in slots: the same memory gives the same, other bytes are found (R8)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from memstore.core.wire.rank_messages import SlotSample
from memstore.errors import ClosedError, IntegrityError
from memstore.shell.arena.arena import Arena
from memstore.shell.arena.mapping import LINE_BYTES, LINES_COUNT, ArenaMapping, differing, sample
from memstore.testing.clusters.scratch_folder import scratch_folder

CHUNK = 64 << 10
SLOTS = [5, 0, 3, 7]


@pytest.fixture
def arena() -> Iterator[Arena]:
    with scratch_folder() as path:
        made = Arena.open(path, limit_bytes=8 * CHUNK, chunk_bytes=CHUNK)
        made.grow(8)
        for slot in range(8):
            made.view(slot)[:] = np.random.default_rng(slot).bytes(CHUNK)
        yield made
        made.close()


@pytest.mark.parametrize("last_bytes", [1, LINE_BYTES, CHUNK - 1, CHUNK])
def test_two_mappings_of_one_file_see_the_same(arena: Arena, last_bytes: int) -> None:
    """For any length of the last chunk, and for any seed."""
    rank = ArenaMapping.open(arena.folder)
    nbytes = 3 * CHUNK + last_bytes
    try:
        for seed in range(50):
            assert differing(arena.mapping, SLOTS, nbytes, sample(rank, SLOTS, nbytes, seed)) == []
    finally:
        rank.close()
    with pytest.raises(ClosedError):
        sample(rank, SLOTS, nbytes, 1)


def test_chunks_of_other_bytes_are_named(arena: Arena) -> None:
    """A chunk that was written since differs wherever one looks; the others do not."""
    for seed in range(50):
        seen = sample(arena.mapping, SLOTS, 4 * CHUNK, seed)
        for index in (1, 3):
            arena.view(SLOTS[index])[:] = np.random.default_rng((seed, index)).bytes(CHUNK)
        assert differing(arena.mapping, SLOTS, 4 * CHUNK, seen) == [1, 3]


def test_no_two_puts_look_at_the_same_places(arena: Arena) -> None:
    """A single line that differs is found by its share of the looks, so that none is passed over for ever."""
    found = 0
    for seed in range(4000):
        seen = sample(arena.mapping, [0], CHUNK, seed)
        arena.view(0)[777] ^= 1
        found += bool(differing(arena.mapping, [0], CHUNK, seen))
    wanted = 4000 * LINES_COUNT * LINE_BYTES / CHUNK
    assert wanted / 2 < found < wanted * 2


def test_only_what_was_filled_is_looked_at(arena: Arena) -> None:
    """A short last chunk is looked at within its last line's bounds: what lies behind it may belong to others."""
    for seed in range(200):
        seen = sample(arena.mapping, SLOTS, 3 * CHUNK + 100, seed)
        arena.view(SLOTS[3])[2 * LINE_BYTES :] = np.random.default_rng(seed).bytes(CHUNK - 2 * LINE_BYTES)
        assert differing(arena.mapping, SLOTS, 3 * CHUNK + 100, seen) == []


@pytest.mark.parametrize("count", [0, 31, 33])
def test_nonsense_is_no_sample(arena: Arena, count: int) -> None:
    """A sample without one digest a chunk is refused."""
    with pytest.raises(IntegrityError, match="without a sample of its 4 chunks"):
        differing(arena.mapping, SLOTS, 4 * CHUNK, SlotSample(seed=1, digests=bytes(count)))


def test_slots_that_are_not_claimed_are_refused(arena: Arena) -> None:
    """Touching them would be a SIGBUS."""
    with pytest.raises(IndexError):
        sample(arena.mapping, [8], CHUNK, 1)

"""How the chunks of one shard are asked for or offered over several streams. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

BATCH_CHUNKS_MIN, BATCH_CHUNKS_MAX = 4, 32


def batches(chunks: Sequence[int], streams: int) -> Iterator[list[int]]:
    """Cut a shard's chunks into requests: small at first, so that all streams start at once, and small at the end,
    so that they end together; large between, since every request waits for an answer."""
    least = min(BATCH_CHUNKS_MIN, max(1, -(-len(chunks) // streams)))
    first, size = 0, least
    for turn in itertools.count(1):
        left = len(chunks) - first
        if left <= 0:
            return
        count = min(size, max(least, -(-left // (2 * streams))))
        yield list(chunks[first : first + count])
        first += count
        if turn % streams == 0:
            size = min(2 * size, BATCH_CHUNKS_MAX)

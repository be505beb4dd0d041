"""A look at the bytes of slots by two processes: do a rank that filled them and its holder see the same memory? (R8)

Some cache lines of every chunk are digested, at places given by a seed: the rank draws a new one for every put and
sends it along with its digests, the holder looks at the same places. The digests of whole chunks cannot show it: they
are the holder's alone, and say of the wrong memory that it is unchanged ever since.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from memstore.core.wire.rank_messages import SlotSample
from memstore.errors import IntegrityError
from memstore.shell.arena.mapping import LINE_BYTES, ArenaMapping

LINES_COUNT = 4  # of each chunk: half a percent of the copy, measured with 1 GiB in chunks of 4 MiB
DIGEST_BYTES = 8
_GOLDEN = 0x9E3779B97F4A7C15  # splitmix64; numpy's own generators may differ between two versions of it
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def sample(mapping: ArenaMapping, slots: Sequence[int], nbytes: int, seed: int) -> SlotSample:
    """Return what this process sees of a stream of `nbytes` in these slots; errors as `ArenaMapping.view`."""
    lines = mapping.lines(slots, _places(seed, len(slots), nbytes, mapping.chunk_bytes))
    return SlotSample(seed=seed, digests=b"".join(xxhash.xxh3_64_digest(chunk) for chunk in lines))


def differing(mapping: ArenaMapping, slots: Sequence[int], nbytes: int, seen: SlotSample) -> list[int]:
    """Return the chunks of which another process has seen other bytes than this one sees.

    Raises:
        IntegrityError: The rank's sample does not fit the number of chunks.
    """
    if len(seen.digests) != len(slots) * DIGEST_BYTES:
        raise IntegrityError(f"it came without a sample of its {len(slots)} chunks")
    ours = sample(mapping, slots, nbytes, seen.seed).digests
    return [i for i in range(len(slots)) if _at(ours, i) != _at(seen.digests, i)]


def _at(digests: bytes, index: int) -> bytes:
    return digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]


def _places(seed: int, count: int, nbytes: int, chunk_bytes: int) -> npt.NDArray[np.int64]:
    """Return the numbers of some cache lines of every chunk, `[count, LINES_COUNT]`; the last chunk may be short."""
    x = np.arange(1, count * LINES_COUNT + 1, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(seed % (1 << 64))
    for shift, factor in _MIX:
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    x ^= x >> np.uint64(31)
    limits = np.full(count, chunk_bytes // LINE_BYTES, np.uint64)
    if count:
        limits[-1] = -(-(nbytes - (count - 1) * chunk_bytes) // LINE_BYTES)
    places: npt.NDArray[np.int64] = (x.reshape(count, LINES_COUNT) % limits[:, None]).astype(np.int64)
    return places

"""The oracle: it makes the bytes that a rank has at a step from seed, job, attempt, rank and step.

A restored state names the attempt that put it. Its bytes are made again and compared one by one, so that bytes of
another attempt, rank or step are noticed even if every digest fits. It uses hashlib and numpy's Philox, and nothing of
the store.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
FROZEN_SHARE = 4  # one part in so many never changes, for chunks that are stored and sent once
BIAS_COUNT = 17  # an odd size, for a chunk that tensors share


def _generator(*words: object) -> np.random.Generator:
    key = hashlib.blake2b(repr(words).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))


def arrays(seed: int, job: str, attempt: int, rank: int, step: int, kib: int) -> dict[str, Array]:
    """Return the arrays of one rank at one step; `kib` is the size of what changes."""
    moving = _generator(seed, job, attempt, rank, step)
    fixed = _generator(seed, job, "frozen", rank)
    return {
        "weights": np.frombuffer(moving.bytes(kib << 10), np.uint8),
        "bias": np.frombuffer(moving.bytes(8 * BIAS_COUNT), np.int64),
        "frozen": np.frombuffer(fixed.bytes((kib << 10) // FROZEN_SHARE), np.uint8),
    }


def tag(seed: int, job: str, attempt: int, rank: int, step: int) -> str:
    """Return the line of text that travels in the state beside the arrays."""
    return f"{seed}/{job}/{attempt}/{rank}/{step}"


def difference(wanted: Mapping[str, Array], wanted_tag: str, found: Mapping[str, Array], found_tag: object) -> str:
    """Say what differs between two states, or ""."""
    problems = []
    if found_tag != wanted_tag:
        problems.append(f"the state says it is {found_tag!r}, not {wanted_tag!r}")
    if set(found) != set(wanted):
        problems.append(f"it has {sorted(found)}, not {sorted(wanted)}")
    for name in sorted(set(found) & set(wanted)):
        mine, theirs = wanted[name].view(np.uint8).ravel(), found[name].view(np.uint8).ravel()
        if mine.size != theirs.size:
            problems.append(f"{name} has {theirs.size:,} bytes, not {mine.size:,}")
        elif not np.array_equal(mine, theirs):
            at = np.flatnonzero(mine != theirs)
            kind = "all of them 0" if not theirs[at].any() else "not zeros"
            problems.append(f"{at.size:,} of {mine.size:,} bytes of {name} differ from byte {at[0]:,} on ({kind})")
    return "; ".join(problems)

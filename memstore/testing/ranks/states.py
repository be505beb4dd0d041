"""The oracle of bytes: a training state that follows from who puts it, and the comparison of two states, byte by byte.

A restored state names the attempt that put it. Its bytes are made again and compared, so that bytes of another attempt,
rank or step are noticed even if every digest fits. It uses hashlib and numpy's Philox, and nothing of the store.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

DIFFERENCES_MAX = 5
BIAS_COUNT = 17  # an odd size, for a chunk that tensors share


def make_state(seed: int, job: str, attempt: int, rank: int, step: int, nbytes: int) -> dict[str, Any]:
    """Return about `nbytes` of tensors and plain objects; another (rank, step) has another state.

    The bits are random, so the floats include NaN payloads and denormals. The state has a tied weight, a strided view,
    an empty tensor and one without dimensions: bugs of a copy show there first. A quarter never changes, so that its
    chunks are stored and sent once.
    """
    moving, fixed = _bits(seed, job, attempt, rank, step), _bits(seed, job, "frozen", rank)

    def tensor(count: int, dtype: torch.dtype, bits: np.random.Generator = moving) -> torch.Tensor:
        return torch.from_numpy(np.frombuffer(bits.bytes(count), np.uint8).copy()).view(dtype)

    unit = max(64, nbytes // 8 // 64 * 64)
    weights = tensor(3 * unit, torch.float32)
    return {
        "model": {
            "weights": weights.reshape(16, -1),
            "head": weights,  # tied to the weights
            "norm": tensor(unit, torch.bfloat16),
            "mask": tensor(unit, torch.uint8).reshape(8, -1).t() > 127,
            "bias": tensor(8 * BIAS_COUNT, torch.int64),
            "frozen": tensor(2 * unit, torch.uint8, fixed),
        },
        "optimizer": {
            "moments": {0: {"step": torch.tensor(float(step)), "exp_avg": tensor(unit, torch.float32)}},
            "groups": [{"lr": 1e-3 / (abs(step) + 1), "betas": (0.9, 0.95), "params": [0]}],
        },
        "empty": torch.empty(0, 3),
        "rng": moving.bytes(33),
        "where": {"job": job, "attempt": attempt, "rank": rank, "step": step},
    }


def _bits(*words: object) -> np.random.Generator:
    key = hashlib.blake2b(repr(words).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))


def overwrite(state: dict[Any, Any], made: Mapping[Any, Any]) -> None:
    """Give a state the values of another one with equal tensors, in place, as an optimizer does."""
    for name, value in made.items():
        if isinstance(value, dict):
            overwrite(state[name], value)
        elif isinstance(value, torch.Tensor):
            state[name].copy_(value)
        else:
            state[name] = value


def compare(restored: Any, fresh: Any, path: str = "state") -> tuple[int, list[str]]:
    """Compare two states; return how many bytes are equal, and up to five differences with their paths.

    Tensors must agree in type, dtype, shape and every byte; floats in every bit; containers in type, keys and order.
    """
    if type(restored) is not type(fresh):
        return 0, [f"{path}: {type(restored).__name__} instead of {type(fresh).__name__}"]
    if isinstance(fresh, torch.Tensor):
        return _compare_tensors(restored, fresh, path)
    if isinstance(fresh, dict):
        if list(restored) != list(fresh):
            return 0, [f"{path}: keys {list(restored)[:8]} instead of {list(fresh)[:8]}"]
        pairs = [(restored[key], fresh[key], f"{path}[{key!r}]") for key in fresh]
    elif isinstance(fresh, list | tuple):
        if len(restored) != len(fresh):
            return 0, [f"{path}: {len(restored)} items instead of {len(fresh)}"]
        pairs = [(a, b, f"{path}[{i}]") for i, (a, b) in enumerate(zip(restored, fresh, strict=True))]
    else:
        mine, theirs = _object_bytes(fresh), _object_bytes(restored)
        return (len(mine), []) if mine == theirs else (0, [f"{path}: {restored!r} instead of {fresh!r}"])
    equal, differences = 0, []
    for a, b, where in pairs:
        count, found = compare(a, b, where)
        equal += count
        differences += found
    return equal, differences[:DIFFERENCES_MAX]


def _compare_tensors(restored: torch.Tensor, fresh: torch.Tensor, path: str) -> tuple[int, list[str]]:
    if (restored.dtype, restored.shape) != (fresh.dtype, fresh.shape):
        return 0, [f"{path}: {restored.dtype} {tuple(restored.shape)}, not {fresh.dtype} {tuple(fresh.shape)}"]
    mine, theirs = tensor_bytes(fresh), tensor_bytes(restored)
    at = np.flatnonzero(mine != theirs)
    if not at.size:
        return mine.size, []
    kind = "not zeros" if theirs[at].any() else "all of them 0"
    words = f"{path}: {at.size:,} of {mine.size:,} bytes differ from byte {at[0]:,} on ({kind})"
    return mine.size - at.size, [words]


def tensor_bytes(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return a tensor's bytes in row-major order, `[nbytes]`; for a contiguous tensor this is a view."""
    flat: np.ndarray[Any, np.dtype[np.uint8]] = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat


def _object_bytes(value: Any) -> bytes:
    if isinstance(value, float):
        return struct.pack("<d", value)
    return value if isinstance(value, bytes) else repr(value).encode()


def alter(state: dict[str, Any]) -> None:
    """Flip one bit of a restored state, so that a test sees the comparison fail."""
    tensor_bytes(state["optimizer"]["moments"][0]["exp_avg"])[-1] ^= 1

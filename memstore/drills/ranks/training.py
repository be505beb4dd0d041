"""A training state made from (seed, rank, step), and the comparison of two states byte by byte.

A drill calls a restore verified if this comparison finds no difference. The fresh state never passed through the store.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import torch

DIFFERENCES_MAX = 5


def make_state(seed: int, rank: int, step: int, nbytes: int) -> dict[str, Any]:
    """Return about `nbytes` of tensors and plain objects; every (seed, rank, step) has another state.

    The bits are random, so the floats include NaN payloads and denormals. The state has a tied weight, a strided view,
    an empty tensor and one without dimensions: bugs of a copy show there first. Each key of Philox has its own stream.
    """
    bits = np.random.Generator(np.random.Philox(key=[seed, (rank << 40) | step]))

    def tensor(count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(np.frombuffer(bits.bytes(count), np.uint8).copy()).view(dtype)

    unit = max(64, nbytes // 8 // 64 * 64)
    weight = tensor(4 * unit, torch.float32)
    state: dict[str, Any] = {
        "model": {
            "embed.weight": weight.reshape(16, -1),
            "head.weight": weight,  # tied to the embedding
            "norm.weight": tensor(unit, torch.bfloat16),
            "mask": tensor(unit, torch.uint8).reshape(8, -1).t() > 127,
        },
        "optimizer": {
            "state": {0: {"step": torch.tensor(float(step)), "exp_avg": tensor(2 * unit, torch.float32)}},
            "param_groups": [{"lr": 1e-3 / (step + 1), "betas": (0.9, 0.95), "params": [0]}],
        },
        "empty": torch.empty(0, 3),
        "rng": bits.bytes(33),
        "where": {"rank": rank, "step": step, "name": f"rank {rank}"},
    }
    return state


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
    wrong = int((mine != theirs).sum())
    return mine.size - wrong, [f"{path}: {wrong} of {mine.size} bytes differ"] if wrong else []


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
    tensor_bytes(state["optimizer"]["state"][0]["exp_avg"])[-1] ^= 1

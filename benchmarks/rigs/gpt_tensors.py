"""The tensors of a GPT in training: parameters and Adam's two moments, some hundred tensors of any total size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

WIDTHS = (32, 64, 128, 256, 512, 768, 1024, 1600, 2048, 4096)  # GPT-2 and GPT-3 widths, and small ones for tests
COPIES = 3  # parameter, exp_avg, exp_avg_sq
ELEMENT_BYTES = 4
TOUCH_ELEMENTS = (64 << 10) // ELEMENT_BYTES  # one change per 64 KiB alters every chunk of any size


def gpt_state(nbytes: int, seed: int = 0) -> dict[str, Any]:
    """Return {"model": ..., "optimizer": ...} of about `nbytes` in float32, filled with numbers of `seed`.

    The width is the largest that leaves room for four layers beside a vocabulary of 16 times the
    width; layers fill the rest, and the vocabulary takes what is left over.
    """
    parameters_count = nbytes // (COPIES * ELEMENT_BYTES)
    width = max((w for w in WIDTHS if 4 * _layer_count(w) + 16 * w * w <= parameters_count), default=16)
    layers = max(1, (parameters_count - 16 * width * width) // _layer_count(width))
    vocabulary = max(16, (parameters_count - layers * _layer_count(width)) // width)
    generator = torch.Generator().manual_seed(seed)

    def fresh() -> dict[str, torch.Tensor]:
        return {n: torch.rand(s, generator=generator) + 0.5 for n, s in _shapes(width, layers, vocabulary)}

    model, mean, variance = fresh(), fresh(), fresh()
    moments = {n: {"step": torch.tensor(1.0), "exp_avg": mean[n], "exp_avg_sq": variance[n]} for n in model}
    return {"model": model, "optimizer": {"state": moments, "param_groups": [{"lr": 3e-4, "betas": (0.9, 0.95)}]}}


def _layer_count(width: int) -> int:
    return 12 * width * width + 13 * width


def _shapes(width: int, layers: int, vocabulary: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "wte.weight", (vocabulary, width)
    for layer in range(layers):
        for name, shape in (
            ("ln_1.weight", (width,)),
            ("ln_1.bias", (width,)),
            ("attn.qkv.weight", (3 * width, width)),
            ("attn.qkv.bias", (3 * width,)),
            ("attn.proj.weight", (width, width)),
            ("attn.proj.bias", (width,)),
            ("ln_2.weight", (width,)),
            ("ln_2.bias", (width,)),
            ("mlp.fc.weight", (4 * width, width)),
            ("mlp.fc.bias", (4 * width,)),
            ("mlp.proj.weight", (width, 4 * width)),
            ("mlp.proj.bias", (width,)),
        ):
            yield f"h.{layer}.{name}", shape
    yield "ln_f.weight", (width,)


def tensors(state: Any) -> list[torch.Tensor]:
    """Return every tensor of a state, in state order."""
    if isinstance(state, torch.Tensor):
        return [state]
    parts = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return [tensor for part in parts for tensor in tensors(part)]


def empty_like(state: Any) -> Any:
    """Return the same state with other memory, zeroed, so that its pages are there."""
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)
    if isinstance(state, dict):
        return {key: empty_like(value) for key, value in state.items()}
    return [empty_like(value) for value in state] if isinstance(state, list) else state


def total_nbytes(state: Any) -> int:
    """Return the bytes of all tensors."""
    return sum(t.numel() * t.element_size() for t in tensors(state))


def touch(state: Any, by: int = 1) -> None:
    """Change one element per 64 KiB of every tensor: no chunk keeps its digest, so none is free to store or send."""
    for tensor in tensors(state):
        tensor.view(-1)[::TOUCH_ELEMENTS] += by


def mark(state: Any, number: int) -> None:
    """Set the elements that `touch` changes: whole numbers, so that touching them in any order gives the same bits."""
    for tensor in tensors(state):
        tensor.view(-1)[::TOUCH_ELEMENTS] = number


def flatten(state: Any, flat: np.ndarray) -> None:
    """Write the bytes of all tensors one after the other."""
    end = 0
    for tensor in tensors(state):
        raw = tensor.reshape(-1).numpy().view(np.uint8)
        flat[end : end + raw.size] = raw
        end += raw.size


def wipe(state: Any) -> None:
    """Clear what was read, so that the next comparison cannot pass on old bytes."""
    for tensor in tensors(state):
        tensor.zero_()


def is_same(one: Any, other: Any) -> bool:
    """Compare all tensors of two states byte by byte."""
    mine, theirs = tensors(one), tensors(other)
    return len(mine) == len(theirs) and all(
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(_raw(a), _raw(b))
        for a, b in zip(mine, theirs, strict=True)
    )


def is_same_but(one: Any, other: Any, by: int) -> bool:
    """Compare all tensors of two states byte by byte, where `one` was touched by `by` more than the marked `other`."""
    mine, theirs = tensors(one), tensors(other)
    if len(mine) != len(theirs):
        return False
    for a, b in zip(mine, theirs, strict=True):
        expected = b.clone()
        touch(expected, by)
        if not is_same(a, expected):
            return False
    return True


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)

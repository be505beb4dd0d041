"""The text to train on: the source of this Python's standard library, so that no download is needed."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

VOCABULARY_SIZE = 128  # ASCII; other bytes become "?"
_UNKNOWN = ord("?")


def library_text(limit_bytes: int) -> bytes:
    """Return the first `limit_bytes` of the library's modules in name order, ASCII only.

    Raises:
        FileNotFoundError: this Python has no library source.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    parts, nbytes = [], 0
    for path in sorted(folder.glob("*.py")):
        parts.append(bytes(b if b < VOCABULARY_SIZE else _UNKNOWN for b in path.read_bytes()))
        nbytes += len(parts[-1])
        if nbytes >= limit_bytes:
            break
    if not parts:
        raise FileNotFoundError(f"no Python source in {folder}: the demo trains on the standard library's text")
    return b"".join(parts)[:limit_bytes]


class Batches:
    """Random windows of a text. They depend on (seed, step, rank) alone; so a repeated step gets the same bytes."""

    def __init__(self, text: bytes, *, seed: int, batch_size: int, context: int) -> None:
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._seed, self._batch_size, self._context = seed, batch_size, context

    def draw(self, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (input, target), both [batch_size, context], target one character ahead."""
        generator = torch.Generator().manual_seed((self._seed * 1_000_003 + step) * 4_099 + rank)
        starts = torch.randint(0, len(self._text) - self._context - 1, (self._batch_size,), generator=generator)
        windows = torch.stack([self._text[s : s + self._context + 1] for s in starts.tolist()]).long()
        return windows[:, :-1], windows[:, 1:]

"""The generation that this process is in: one meeting of all ranks, one run of the training function in each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Generation:
    """One run of the training function on all ranks, between two losses.

    Attributes:
        number: 0 at the start of the worker group, one more after each loss.
        rank: This process's rank; the replacement of a lost rank has its number.
        world_size: Ranks that met.
        is_first_here: This process enters the training function for the first time.
        kept: What the training function keeps for its next entry in this process, such as compiled code or the
            workers of a data loader. A replacement's is empty. A model and an optimizer are over the former process
            group: `reuse` keeps them here, and takes them to this one.
    """

    number: int
    rank: int
    world_size: int
    is_first_here: bool
    kept: dict[str, Any] = field(default_factory=dict)


_current: Generation | None = None


def generation() -> Generation | None:
    """Return the generation that this process is in; None outside of a reentrant training function."""
    return _current


def enter(new: Generation | None) -> None:
    """Begin a generation, or end the last one."""
    global _current
    _current = new

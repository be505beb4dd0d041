"""What every contestant does, in its own process: save a state, say when training went on and when all was done.

Imports nothing but torch: it runs in the peers' environments.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Task:
    """What a contestant gets.

    Args:
        state: The GPT's state; every rank has another one.
        peer: How much the other rank's elements that `gpt_tensors.touch` changes are larger.
        rank: 0 or 1.
        world_size: Ranks of this contestant, each a process; more than one have a gloo group.
        memory: A folder in shared memory, the same for all ranks.
        disk: A folder on a disk.
        options: What only this contestant understands.
    """

    state: dict[str, Any]
    peer: int
    rank: int
    world_size: int
    memory: Path
    disk: Path
    options: dict[str, Any]


class Stamps(NamedTuple):
    """Three moments of one round, on the machine's monotonic clock, in seconds."""

    started: float
    released: float  # training would go on here
    ended: float


class Contestant(ABC):
    """One system, with one or several ways to use it."""

    @abstractmethod
    def __init__(self, task: Task) -> None:
        """Connect, start, allocate: all that a user does before the first step."""

    @abstractmethod
    def run(self, way: str, step: int) -> Stamps:
        """Save the state as it is now; steps grow."""

    @abstractmethod
    def is_same(self, way: str) -> bool:
        """Compare every byte that the last run moved, and let go of what is not needed for the next one."""

    def close(self) -> None:  # noqa: B027
        """Stop what was started; files in the task's folders are removed by the caller."""


def now() -> float:
    """Return the machine's monotonic clock, which all its processes share."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)

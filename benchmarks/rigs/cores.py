"""Two hosts emulated on one machine by pinning: what runs on one host gets one core, what runs on the other another."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch


class Cores(NamedTuple):
    """The core of each host; None: both hosts share all cores of the machine."""

    near: int | None = None
    far: int | None = None


SHARED = Cores()


def emulated() -> Cores:
    """Return the cores of two emulated hosts; ValueError if this process may use only one."""
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < 2:
        raise ValueError(f"two hosts are emulated on a core each, and this process may use only {usable}: allow it two")
    return Cores(*usable[:2])


@contextlib.contextmanager
def on_core(core: int | None) -> Iterator[None]:
    """Keep all threads of this process, and what they start, on a core, with torch on one thread; None: do nothing.

    Afterwards the threads that are there have all cores back that the caller had, and torch its threads.
    """
    if core is None:
        yield
        return
    before, threads_count = os.sched_getaffinity(0), torch.get_num_threads()
    torch.set_num_threads(1)
    _allow({core})
    try:
        yield
    finally:
        _allow(before)
        torch.set_num_threads(threads_count)


def _allow(cores: set[int]) -> None:
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # a thread that has just ended
            os.sched_setaffinity(int(task.name), cores)

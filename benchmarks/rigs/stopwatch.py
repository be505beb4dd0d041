"""What a piece of work takes: seconds, and processor seconds of all processes that take part in it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from benchmarks.report.harness import Took
from benchmarks.rigs.process_costs import cpu_seconds

Done = TypeVar("Done")


def timed(work: Callable[[], Done], pids: Iterable[int] = ()) -> tuple[Took, Done]:
    """Do some work; return what it took, of this process and of the other ones named, and what it returned."""
    counted = (os.getpid(), *pids)
    used_s, started_s = cpu_seconds(counted), time.perf_counter()
    done = work()
    took_s = time.perf_counter() - started_s
    return Took(took_s, cpu_seconds(counted) - used_s), done

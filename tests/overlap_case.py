"""What the tests of overlapped puts share: one host, one rank, and copies that are left to the fence."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from memstore.api import connect
from memstore.store import Store
from memstore.testing.processes import ProcessCluster

WAIT_S = 60.0
WIDTH = 256  # a weight is 256 KiB
_jobs = itertools.count()


def one_host(folder: Path) -> ProcessCluster:
    """Return a cluster of one host, h1, that is yet to start."""
    return ProcessCluster(folder, {"h1": {}}, arena_bytes=256 << 20, keep_steps=3, stall_budget_s=WAIT_S)


@contextlib.contextmanager
def one_rank(cluster: ProcessCluster) -> Iterator[Store]:
    """Join a job of its own on h1; conftest.py gives the environment back."""
    os.environ["MEMSTORE_HOST"] = "h1"
    with connect(f"overlap{next(_jobs)}", rank=0, world_size=1, config=cluster.config) as joined:
        yield joined


def hold(store: Store) -> None:
    """From now on the copy thread copies nothing: all is left to the fence."""
    store.puts.overlap._start = lambda copy: None  # type: ignore[method-assign]


def stored(store: Store, step: int) -> Any:
    """Return the state of a step."""
    got = store.get(step, rank=0)
    assert got is not None
    return got.state

"""A rank in a pod: gets the newest step, checks every byte, puts steps, says what is committed and waits to be killed.

    python pod_rank.py STORE RANK WORLD_SIZE FIRST LAST

It prints one line of JSON after the get and one after the puts. Where arenas lie it has from MEMSTORE_ARENA_DIR.
"""

from __future__ import annotations

import json
import sys

import numpy as np

import memstore

NBYTES = 16 << 20


def state_of(rank: int, step: int) -> dict[str, np.ndarray]:
    """Return what a rank puts at a step."""
    return {"weights": np.random.default_rng([rank, step]).integers(0, 256, NBYTES, dtype=np.uint8)}


def main() -> None:
    """Run the rank."""
    name, rank, world_size, first, last = sys.argv[1], *map(int, sys.argv[2:])
    config = memstore.Config(store=name)
    with memstore.connect("train", rank=rank, world_size=world_size, attempt=f"run-{first}", config=config) as store:
        got = store.get()
        is_whole = got is not None and np.array_equal(got.state["weights"], state_of(rank, got.step)["weights"])
        found = {"step": got and got.step, "is_whole": is_whole, "source": got and got.source}
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()
        for step in range(first, last + 1):
            ticket = store.put(step, state_of(rank, step))
            ticket.wait("committed", timeout_s=60.0)
        sys.stdout.write(json.dumps({"committed": last}) + "\n")
        sys.stdout.flush()
        sys.stdin.readline()


if __name__ == "__main__":
    main()

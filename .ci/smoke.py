"""Put and get on one host from the installed wheel: argv[1] is the checkout that must not be imported from."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import ray
import torch

import memstore

MIB = 1024 * 1024


def main() -> None:
    """Put one state, wait until it is committed, get it back and compare the bytes."""
    home = Path(memstore.__file__).resolve()
    if Path(sys.argv[1]).resolve() in home.parents:
        raise SystemExit(f"smoke: memstore came from the checkout ({home}), not from the wheel")
    ray.init("local", num_cpus=2, include_dashboard=False, object_store_memory=100 * MIB, log_to_driver=False)
    name = f"smoke-{os.getpid()}"
    config = memstore.Config(store=name, arena_bytes=64 * MIB, replicas=1)
    memstore.start(config=config)
    try:
        state = {"weight": torch.randn(1024, 257), "step": 7, "note": "smoke"}
        with memstore.connect("smoke", rank=0, world_size=1, config=config) as store:
            if store.get() is not None:
                raise SystemExit("smoke: a new job has history")
            store.put(7, state).wait("committed", timeout_s=60.0)
            got = store.get(step=7)
        if got is None or got.step != 7:
            raise SystemExit(f"smoke: put step 7, got {got!r}")
        same = torch.equal(got.state["weight"].view(torch.int32), state["weight"].view(torch.int32))
        if not same or got.state["step"] != 7 or got.state["note"] != "smoke":
            raise SystemExit("smoke: what came back is not what was put")
    finally:
        memstore.stop(config=config, keep_data=False, force=True)
        ray.shutdown()
    print(f"smoke: step 7 put, committed and read back from {home.parent}, {got.nbytes} bytes equal")


if __name__ == "__main__":
    main()

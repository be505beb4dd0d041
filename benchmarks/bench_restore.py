"""A restore into tensors that exist: from this host's memory, and over the wire from one peer, beside a plain copy.

The store keeps one copy, on NEAR. A rank there reads it locally; a reader on FAR has none, so its
host fetches it from NEAR first. Both verify every digest before a byte is written.
"""

from __future__ import annotations

import time
from typing import Any

from benchmarks import gpt_tensors, rig, targets
from benchmarks.harness import Options, Record, interleave, require

LOCAL, PEER, COPY = "get, local", "get, from one peer", "plain copy"


def run(options: Options) -> list[Record]:
    """Return the seconds of each and their ratios to the plain copy."""
    state = gpt_tensors.gpt_state(options.nbytes)
    twin = gpt_tensors.empty_like(state)
    pairs = list(zip(gpt_tensors.tensors(twin), gpt_tensors.tensors(state), strict=True))
    with rig.store_on_two_hosts(options, replicas=1) as (cluster, store):

        def refresh(step: int) -> None:
            gpt_tensors.touch(state)
            store.put(step, state).wait("committed")

        def local(step: int) -> float:
            started_s = time.perf_counter()
            got = store.get(step, rank=0, into=twin)
            took_s = time.perf_counter() - started_s
            require(got is not None and got.verdict == "local" and gpt_tensors.is_same(twin, state), "local get")
            _wipe(twin)
            return took_s

        def peer(step: int) -> float:
            started_s = time.perf_counter()
            got = rig.read_at(rig.FAR, cluster.config, step, into=twin)
            took_s = time.perf_counter() - started_s
            require(got.verdict == "peer" and gpt_tensors.is_same(twin, state), f"get from a peer ({got.verdict})")
            _wipe(twin)
            return took_s

        def copy(_: int) -> float:
            started_s = time.perf_counter()
            for target, source in pairs:
                target.copy_(source)
            took_s = time.perf_counter() - started_s
            require(gpt_tensors.is_same(twin, state), "plain copy")
            _wipe(twin)
            return took_s

        seconds = interleave({LOCAL: local, PEER: peer, COPY: copy}, options, refresh)
    record = Record("restore", gpt_tensors.total_nbytes(state), seconds)
    record.ratio("local get / plain copy", LOCAL, COPY, targets.GET_LOCAL)
    record.ratio("get from one peer / plain copy", PEER, COPY)
    return [record]


def _wipe(state: Any) -> None:
    """Clear what was read, so that the next comparison cannot pass on old bytes."""
    for tensor in gpt_tensors.tensors(state):
        tensor.zero_()

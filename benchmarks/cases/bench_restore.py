"""A restore into tensors that exist: from this host's memory, and over the wire from one peer.

The store keeps one copy, on NEAR. A rank there reads it locally: alone (`get(step, rank=)`), and as all ranks do
together (`get(step)`, whose bytes are verified on their hosts before any rank is released). A reader on FAR has none,
so its host fetches it from NEAR. Beside them a plain copy of the same tensors, and the same bytes over raw TCP.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.report import targets
from benchmarks.report.harness import Options, Record, Took, interleave, require
from benchmarks.rigs import gpt_tensors, rig
from benchmarks.rigs.stopwatch import timed
from benchmarks.rigs.tcp_streams import TcpStreams
from memstore.client.checkpoint import Checkpoint

LOCAL, TOGETHER, PEER = "get, local", "get of all ranks together, local", "get, from one peer"
COPY, TCP = "plain copy", "raw TCP, 2 streams"


def run(options: Options) -> list[Record]:
    """Return the seconds of each, their ratios to the plain copy, and the peer's speed over raw TCP's."""
    state = gpt_tensors.gpt_state(options.nbytes)
    twin = gpt_tensors.empty_like(state)
    nbytes = gpt_tensors.total_nbytes(state)
    pairs = list(zip(gpt_tensors.tensors(twin), gpt_tensors.tensors(state), strict=True))
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))
        flat = np.memmap(Path(folder) / "bytes", np.uint8, mode="w+", shape=(nbytes,))
        cluster, store = stack.enter_context(rig.store_on_two_hosts(options, replicas=1))
        pids = rig.pids_of(cluster)
        far = stack.enter_context(rig.reader_at(rig.FAR, cluster.config))
        tcp = stack.enter_context(TcpStreams(Path(folder) / "bytes"))

        def refresh(step: int) -> None:
            gpt_tensors.touch(state)
            gpt_tensors.flatten(state, flat)
            store.put(step, state).wait("committed")

        def read(get: Callable[[], Checkpoint | None], verdict: str) -> Took:
            took, got = timed(get, pids)
            require(got is not None and got.source == verdict and gpt_tensors.is_same(twin, state), f"get: {got}")
            gpt_tensors.wipe(twin)
            return took

        def copy(_: int) -> Took:
            took = timed(lambda: [target.copy_(source) for target, source in pairs])[0]
            require(gpt_tensors.is_same(twin, state), "plain copy")
            gpt_tensors.wipe(twin)
            return took

        def raw(_: int) -> Took:
            took, is_same = tcp.send()
            require(is_same, "raw TCP")
            return took

        contenders = {
            LOCAL: lambda step: read(lambda: store.get(step, rank=0, into=twin), "local"),
            TOGETHER: lambda step: read(lambda: store.get(step, into=twin), "local"),
            PEER: lambda step: read(lambda: far.get(step, rank=0, into=twin), "peer"),
            COPY: copy,
            TCP: raw,
        }
        rounds = interleave(contenders, options, refresh)
    record = Record("restore", nbytes, rounds.seconds, cpu_seconds=rounds.cpu_seconds)
    record.ratio("local get / plain copy", LOCAL, COPY, targets.GET_LOCAL)
    record.ratio("local get of all ranks together / plain copy", TOGETHER, COPY)
    record.ratio("get from one peer / plain copy", PEER, COPY)
    record.ratio("get from one peer: speed / raw TCP", TCP, PEER, targets.GET_PEER)
    return [record]

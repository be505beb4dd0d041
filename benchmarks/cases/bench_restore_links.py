"""A read over shaped links: from two peers with 1 Gbit each into a host with 10 Gbit, beside one of those peers alone.

Network namespaces of one machine with token buckets on their links; needs root. A rank on the first of three hosts
puts to two jobs: one keeps its only copy there, the other a second one on the next host. A reader on the third host,
which keeps none, reads both in turns. Links that slow are the limit, not the processors that all hosts share.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from pathlib import Path

from benchmarks.report import targets
from benchmarks.report.harness import MIB, Options, Record, Took, interleave, require
from benchmarks.rigs import gpt_tensors, rig
from benchmarks.rigs.stopwatch import timed
from memstore.testing.clusters.namespaces import NamespaceRig, available
from memstore.testing.clusters.processes import ProcessCluster

OWNER, OTHER, FAR = "owner", "other", "far"
SLOW_BITS_PER_S, FAST_BITS_PER_S = 1_000_000_000, 10_000_000_000
BURST_BYTES = 256 << 10  # 0.2 ms of the faster link: a smaller bucket is not refilled in time
NBYTES_MAX = 128 * MIB  # a second over one link
ONE, TWO, LINK = "get, from one peer", "get, from two peers", "the bytes over one link at its rate"


def run(options: Options) -> list[Record]:
    """Return the seconds of each and the speed of two peers over one; without root, why there are none."""
    # Other bytes for each: what one read brings here, the other would find by its content.
    states = {
        name: gpt_tensors.gpt_state(min(options.nbytes, NBYTES_MAX), seed) for seed, name in enumerate((ONE, TWO))
    }
    nbytes = gpt_tensors.total_nbytes(states[ONE])
    why = available()
    if why is not None:
        return [Record("restore over links", nbytes, {}, absent={ONE: why, TWO: why})]
    twin = gpt_tensors.empty_like(states[ONE])
    with contextlib.ExitStack() as stack:
        net = stack.enter_context(NamespaceRig([OWNER, OTHER, FAR]))
        cluster = stack.enter_context(_cluster(stack, net, options, nbytes))
        for host, rate in {OWNER: SLOW_BITS_PER_S, OTHER: SLOW_BITS_PER_S, FAR: FAST_BITS_PER_S}.items():
            net.shape(host, rate, burst_bytes=BURST_BYTES)
        stores, readers = {}, {}
        for name, copies in {ONE: 1, TWO: 2}.items():
            config = dataclasses.replace(cluster.config, replicas=copies, min_copies=copies)
            stores[name] = stack.enter_context(rig.rank_at(OWNER, f"copies-{copies}", config))
            readers[name] = stack.enter_context(rig.reader_at(FAR, config, f"copies-{copies}"))

        def refresh(step: int) -> None:
            for name, store in stores.items():
                gpt_tensors.touch(states[name])
                store.put(step, states[name]).wait("committed")

        def read(name: str, step: int) -> Took:
            took, got = timed(lambda: readers[name].get(step, rank=0, into=twin), rig.pids_of(cluster))
            require(got.source == "peer" and gpt_tensors.is_same(twin, states[name]), f"{name} ({got.source})")
            gpt_tensors.wipe(twin)
            return took

        contenders = {name: lambda step, name=name: read(name, step) for name in stores}
        rounds = interleave(contenders, options, refresh)
    rounds.seconds[LINK] = [nbytes * 8 / SLOW_BITS_PER_S] * options.rounds
    record = Record("restore over links", nbytes, rounds.seconds, cpu_seconds=rounds.cpu_seconds)
    record.ratio("speed from two peers / from one", ONE, TWO, targets.GET_TWO_PEERS)
    record.ratio("speed from one peer / its link's rate", LINK, ONE)
    return [record]


def _cluster(stack: contextlib.ExitStack, net: NamespaceRig, options: Options, nbytes: int) -> ProcessCluster:
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    label = {"memstore": "replica"}
    return ProcessCluster(
        Path(folder),
        {OWNER: {"rack": "r1", **label}, OTHER: {"rack": "r2", **label}, FAR: {"rack": "r3"}},
        arena_bytes=8 * nbytes + 64 * MIB,
        chunk_bytes=min(options.chunk_bytes, nbytes // 16),
        rig=net,
        detect="normal",
    )

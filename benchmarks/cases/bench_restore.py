"""A restore into tensors that exist: from this host's memory, and over the wire from one peer.

The store keeps one copy, on NEAR. A rank there reads it locally: alone (`get(step, rank=)`), and as all ranks do
together (`get(step)`, whose bytes are verified on their hosts before any rank is released). A reader on FAR has none,
so its host fetches it from NEAR. Beside them a plain copy of the same tensors, and the same bytes over raw TCP.

Once with all cores shared by both hosts, and once with hosts emulated: what runs on NEAR on one core; what runs on
FAR, the reader and raw TCP's sink among it, on another. The local get of a smaller state, of which the fixed costs are
a larger part, has a record of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.report import targets
from benchmarks.report.harness import EMULATED_HOSTS, MIB, SHARED_CORES, Options, Record, Took, interleave, require
from benchmarks.rigs import gpt_tensors, rig
from benchmarks.rigs.cores import SHARED, emulated, on_core
from benchmarks.rigs.floors import TcpStreams
from benchmarks.rigs.stopwatch import timed, until_idle
from memstore.client.checkpoint import Checkpoint
from memstore.testing.clusters.namespaces import NamespaceRig, available
from memstore.testing.clusters.processes import ProcessCluster

LOCAL, TOGETHER, PEER = "get, local", "get of all ranks together, local", "get, from one peer"
COPY, TCP = "plain copy", "raw TCP, 2 streams"
SMALL_BYTES = 256 * MIB


def run(options: Options) -> list[Record]:
    """Return a record for each way in which two hosts stand on this machine, and one of a smaller local get."""
    records = [measure(options, hosts) for hosts in options.hosts]
    if SHARED_CORES in options.hosts:
        records.append(measure_local(dataclasses.replace(options, nbytes=min(options.nbytes, SMALL_BYTES))))
    return records


class Twins:
    """A state, and the tensors that it is read into."""

    def __init__(self, options: Options) -> None:
        self.state = gpt_tensors.gpt_state(options.nbytes)
        self.twin = gpt_tensors.empty_like(self.state)
        self.nbytes = gpt_tensors.total_nbytes(self.state)
        self._pairs = list(zip(gpt_tensors.tensors(self.twin), gpt_tensors.tensors(self.state), strict=True))

    def read(self, get: Callable[[], Checkpoint | None], source: str, pids: list[int]) -> Took:
        """Time a get, compare every byte, and forget what came. What the last put still costs its holders is over."""
        until_idle(set(pids) - {os.getpid()})
        took, got = timed(get, pids)
        require(got is not None and got.source == source and self._is_same(), f"get: {got}")
        return took

    def copy(self) -> Took:
        """Time a plain copy."""
        took = timed(lambda: [target.copy_(source) for target, source in self._pairs])[0]
        require(self._is_same(), "plain copy")
        return took

    def _is_same(self) -> bool:
        is_same = gpt_tensors.is_same(self.twin, self.state)
        gpt_tensors.wipe(self.twin)
        return is_same


def measure(options: Options, hosts: str) -> Record:
    """Return the seconds of each, their ratios to the plain copy, and the peer's speed over raw TCP's."""
    is_emulated = hosts == EMULATED_HOSTS
    cores = emulated() if is_emulated else SHARED
    with contextlib.ExitStack() as stack:
        stack.enter_context(on_core(cores.near))
        twins = Twins(options)
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))
        flat = np.memmap(Path(folder) / "bytes", np.uint8, mode="w+", shape=(twins.nbytes,))
        cluster, store = stack.enter_context(rig.store_on_two_hosts(options, replicas=1, cores=cores))
        pids = rig.pids_of(cluster)
        far = stack.enter_context(rig.reader_at(rig.FAR, cluster.config))
        tcp = stack.enter_context(TcpStreams(Path(folder) / "bytes", core=cores.far))

        def refresh(step: int) -> None:
            gpt_tensors.touch(twins.state)
            gpt_tensors.flatten(twins.state, flat)
            store.put(step, twins.state).wait("committed")

        def peer(step: int) -> Took:
            with on_core(cores.far):  # the reader is this process, too
                return twins.read(lambda: far.get(step, rank=0, into=twins.twin), "peer", pids)

        def raw(_: int) -> Took:
            took, is_same = tcp.send()
            require(is_same, "raw TCP")
            return took

        contenders = {
            LOCAL: lambda step: twins.read(lambda: store.get(step, rank=0, into=twins.twin), "local", pids),
            TOGETHER: lambda step: twins.read(lambda: store.get(step, into=twins.twin), "local", pids),
            PEER: peer,
            COPY: lambda _: twins.copy(),
            TCP: raw,
        }
        rounds = interleave(contenders, options, refresh)
    name = "restore, emulated hosts" if is_emulated else "restore"
    record = Record(name, twins.nbytes, rounds.seconds, cpu_seconds=rounds.cpu_seconds)
    record.ratio("local get / plain copy", LOCAL, COPY, None if is_emulated else targets.GET_LOCAL)
    record.ratio("local get of all ranks together / plain copy", TOGETHER, COPY)
    record.ratio("get from one peer / plain copy", PEER, COPY)
    tcp_target = targets.GET_PEER_HOSTS if is_emulated else targets.GET_PEER
    record.ratio("get from one peer: speed / raw TCP", TCP, PEER, tcp_target)
    return record


def measure_local(options: Options) -> Record:
    """Return the local get beside a plain copy, and nothing else."""
    twins = Twins(options)
    with rig.store_on_two_hosts(options, replicas=1) as (cluster, store):

        def refresh(step: int) -> None:
            gpt_tensors.touch(twins.state)
            store.put(step, twins.state).wait("committed")

        def local(step: int) -> Took:
            pids = rig.pids_of(cluster)
            return twins.read(lambda: store.get(step, rank=0, into=twins.twin), "local", pids)

        rounds = interleave({LOCAL: local, COPY: lambda _: twins.copy()}, options, refresh)
    name = f"restore, at most {SMALL_BYTES // MIB} MiB"
    record = Record(name, twins.nbytes, rounds.seconds, cpu_seconds=rounds.cpu_seconds)
    record.ratio("local get / plain copy", LOCAL, COPY, targets.GET_LOCAL_SMALL)
    return record


# -- restore links ------------------------------------------------------------------------------------
# A read over shaped links: from two peers with 1 Gbit each into a host with 10 Gbit, beside one of those peers alone.
#
# Network namespaces of one machine with token buckets on their links; needs root. A rank on the first of three hosts
# puts to two jobs: one keeps its only copy there, the other a second one on the next host. A reader on the third
# host, which keeps none, reads both in turns. Links that slow are the limit, not the processors that all hosts share.


OWNER, OTHER, FAR = "owner", "other", "far"
SLOW_BITS_PER_S, FAST_BITS_PER_S = 1_000_000_000, 10_000_000_000
BURST_BYTES = 256 << 10  # 0.2 ms of the faster link: a smaller bucket is not refilled in time
NBYTES_MAX = 128 * MIB  # a second over one link
ONE, TWO, LINK = "get, from one peer", "get, from two peers", "the bytes over one link at its rate"


def run_links(options: Options) -> list[Record]:
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

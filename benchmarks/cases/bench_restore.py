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
from benchmarks.rigs.process_costs import until_idle
from benchmarks.rigs.stopwatch import timed
from benchmarks.rigs.tcp_streams import TcpStreams
from memstore.client.checkpoint import Checkpoint

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

"""From put until the copy is sealed on the peer, beside raw TCP and Ray's object store, in one interleaved run.

memstore's clock runs from the call of put until its ticket is `replicated`: copy, digests on both
ends, transfer, seal, acknowledgement. Ray's runs from ray.put until an actor on the other node has
the object; the fetch alone is listed too. Raw TCP sends the same bytes over two streams, from warm
memory to warm memory, with no digest; the floor does what memstore has to, and nothing else
(floors.py). Once with all cores shared by both hosts, and once with hosts emulated: rank, near
holder, controller and the senders on one core, far holder and the sinks on another.
"""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import targets
from benchmarks.report.harness import EMULATED_HOSTS, Options, Record, Took, interleave, require
from benchmarks.rigs import gpt_tensors, rig
from benchmarks.rigs.cores import SHARED, emulated, on_core
from benchmarks.rigs.floors import DigestFloor, RayObjects, TcpStreams
from benchmarks.rigs.stopwatch import timed
from memstore.client.ticket import Ticket

FLOOR = "floor: copy, digest, TCP, digest"
MEMSTORE, TCP, RAY, RAY_FETCH = "memstore put to sealed", "raw TCP, 2 streams", "Ray put and fetch", "Ray fetch alone"


def run(options: Options) -> list[Record]:
    """Return a record for each way in which two hosts stand on this machine."""
    return [measure(options, hosts) for hosts in options.hosts]


def measure(options: Options, hosts: str) -> Record:
    """Return the seconds of each and memstore's speed over Ray's and over raw TCP's."""
    is_emulated = hosts == EMULATED_HOSTS
    cores = emulated() if is_emulated else SHARED
    state = gpt_tensors.gpt_state(options.nbytes)
    nbytes = gpt_tensors.total_nbytes(state)
    fetch_s: list[float] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(on_core(cores.near))
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))
        flat = np.memmap(Path(folder) / "bytes", np.uint8, mode="w+", shape=(nbytes,))
        cluster, store = stack.enter_context(rig.store_on_two_hosts(options, replicas=2, cores=cores))
        tcp = stack.enter_context(TcpStreams(Path(folder) / "bytes", core=cores.far))
        floor = stack.enter_context(DigestFloor(Path(folder) / "bytes", options.chunk_bytes, core=cores.far))
        contenders = {
            MEMSTORE: lambda step: _replicate(cluster, store, state, step),
            TCP: lambda _: _sent(tcp, "raw TCP"),
            FLOOR: lambda _: _sent(floor, "the floor"),
        }
        if options.with_ray and not is_emulated:
            objects = stack.enter_context(RayObjects(Path(folder) / "bytes"))
            contenders[RAY] = lambda _: _ray(objects, fetch_s)
        rounds = interleave(contenders, options, lambda _: _refresh(state, flat))
    name = "replicate, emulated hosts" if is_emulated else "replicate"
    record = Record(name, nbytes, rounds.seconds, cpu_seconds=rounds.cpu_seconds)
    tcp_target = targets.SEALED_TCP_HOSTS if is_emulated else targets.SEALED_TCP
    record.ratio("speed / raw TCP", TCP, MEMSTORE, tcp_target)
    record.ratio("speed / the floor", FLOOR, MEMSTORE)
    record.ratio("the floor's speed / raw TCP", TCP, FLOOR)
    record.cpu_ratio("CPU seconds / the floor's", MEMSTORE, FLOOR, targets.SEALED_CPU)
    if RAY in record.seconds:
        record.seconds[RAY_FETCH] = fetch_s[options.warmups :]
        record.ratio("speed / Ray put and fetch", RAY, MEMSTORE, targets.SEALED_RAY)
        record.ratio("speed / Ray fetch alone", RAY_FETCH, MEMSTORE)
    return record


def _refresh(state: Any, flat: np.ndarray) -> None:
    """Alter every chunk, and give the others the very same bytes."""
    gpt_tensors.touch(state)
    gpt_tensors.flatten(state, flat)


def _replicate(cluster: Any, store: Any, state: Any, step: int) -> Took:
    def put() -> Ticket:
        ticket: Ticket = store.put(step, state)
        ticket.wait("replicated")
        return ticket

    took, ticket = timed(put, rig.pids_of(cluster))
    ticket.wait("committed")
    got = rig.read_at(rig.FAR, cluster.config, step)
    require(got.source == "local" and gpt_tensors.is_same(got.state, state), f"the peer's copy of step {step}")
    return took


def _sent(streams: TcpStreams | DigestFloor, what: str) -> Took:
    took, is_same = streams.send()
    require(is_same, what)
    return took


def _ray(objects: RayObjects, fetch_s: list[float]) -> Took:
    both, alone_s, is_same = objects.send()
    require(is_same, "Ray's object")
    fetch_s.append(alone_s)
    return both

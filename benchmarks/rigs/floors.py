"""Floors to compare with: raw TCP over loopback, copy and digest with nothing else, Ray's own object store."""

from __future__ import annotations

import ctypes
import functools
import itertools
import multiprocessing
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import xxhash

from benchmarks.report.harness import MIB, Took
from benchmarks.rigs.cores import on_core
from benchmarks.rigs.stopwatch import cpu_seconds, descendants, timed

# -- tcp streams --------------------------------------------------------------------------------------
# Raw loopback TCP over a few streams to another process: what the wire could do without digests and bookkeeping.


TIMEOUT_S = 60.0
Receive = Callable[[socket.socket, memoryview], None]  # until the sender closes: a share again and again, each answered


class Sink:
    """A process that receives the bytes of a file into warm memory.

    Args:
        path: File of the bytes; what came is compared with it after the clock stops.
        streams: Connections; the n-th that comes carries the n-th share.
        receive: Of one stream, in a thread of the process; pickled.
        core: Where the process runs; None: anywhere.
    """

    def __init__(self, path: Path, streams: int, receive: Receive, core: int | None) -> None:
        context = multiprocessing.get_context("spawn")
        self._control, theirs = context.Pipe()
        self._process = context.Process(target=_sink, args=(theirs, str(path), streams, receive), daemon=True)
        with on_core(core):
            self._process.start()
        theirs.close()
        self.port = int(answer(self._control))

    def is_same(self) -> bool:
        """Say whether what came is the file, and forget it."""
        self._control.send("compare")
        return bool(answer(self._control))

    @property
    def pid(self) -> int:
        """Return the process."""
        assert self._process.pid is not None  # it was started
        return self._process.pid

    def close(self) -> None:
        """End the process."""
        self._control.close()
        end(self._process)


class TcpStreams:
    """Sends the bytes of a file in shared memory to a `Sink`.

    Args:
        path: File of the bytes.
        streams: Connections, with one thread at each end of each.
        core: Where the sink runs; None: anywhere.
    """

    def __init__(self, path: Path, streams: int = 2, *, core: int | None = None) -> None:
        self._source = np.memmap(path, np.uint8, mode="r")
        self._sink = Sink(path, streams, _receive, core)
        self._sockets = connected(self._sink.port, streams)

    def __enter__(self) -> TcpStreams:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in self._sockets:
            connection.close()
        self._sink.close()

    def send(self) -> tuple[Took, bool]:
        """Send everything once; return what it took until all streams acknowledged, and whether the bytes agree."""
        parts = shares(self._source.size, len(self._sockets))

        def send(number: int) -> None:
            start, stop = parts[number]
            self._sockets[number].sendall(self._source[start:stop].data)
            if self._sockets[number].recv(1) != b"k":
                raise ConnectionError("the sink closed a stream")

        took, _ = timed(lambda: together(len(parts), send), [self._sink.pid])
        return took, self._sink.is_same()


def answer(control: Connection) -> Any:
    """Return what the process at the other end says within TIMEOUT_S; TimeoutError."""
    if not control.poll(TIMEOUT_S):
        raise TimeoutError(f"the process at the other end did not answer within {TIMEOUT_S:g} s")
    return control.recv()


def end(process: BaseProcess) -> None:
    """Wait for a process whose control was closed; kill it if it stays."""
    process.join(5.0)
    if process.is_alive():
        process.kill()
        process.join(5.0)
    process.close()


def connected(port: int, streams: int) -> list[socket.socket]:
    """Connect to a sink, stream by stream."""
    return [socket.create_connection(("127.0.0.1", port), TIMEOUT_S) for _ in range(streams)]


def shares(nbytes: int, count: int) -> list[tuple[int, int]]:
    """Return start and end of each stream's bytes."""
    return list(itertools.pairwise(nbytes * i // count for i in range(count + 1)))


def together(count: int, work: Callable[[int], object]) -> None:
    """Run work(0), work(1), ... on a thread each."""
    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)


def _sink(control: Connection, path: str, streams: int, receive: Receive) -> None:
    source = np.memmap(path, np.uint8, mode="r")
    buffer = np.ones(source.size, np.uint8)
    with socket.create_server(("127.0.0.1", 0)) as server:
        control.send(server.getsockname()[1])
        sockets = [server.accept()[0] for _ in range(streams)]
    for connection, (start, stop) in zip(sockets, shares(source.size, streams), strict=True):
        threading.Thread(target=receive, args=(connection, buffer.data[start:stop]), daemon=True).start()
    try:
        while control.recv():
            is_same = bool(np.array_equal(buffer, source))
            buffer[:] = 0  # before the answer: what is timed next has the cores to itself
            control.send(is_same)
    except EOFError:
        return


def _receive(connection: socket.socket, view: memoryview) -> None:
    with connection:
        while True:
            done = 0
            while done < view.nbytes:
                got = connection.recv_into(view[done:])
                if got == 0:
                    return
                done += got
            connection.sendall(b"k")


# -- digest floor -------------------------------------------------------------------------------------
# The floor under put to sealed: copy, digest, TCP, digest, with nothing else, in as few lines as it takes.
#
# What any store must do that gives training its memory back before it sends: copy the tensors into shared memory with
# two threads; then, over two streams, digest a chunk and send it, receive a chunk and digest it. No room to find, no
# request and no answer, nothing sealed; who wants to beat it needs a cheaper kernel or more cores.


STREAMS = 2


class DigestFloor:
    """Copies the bytes of a file into warm shared memory, which a process sends to a third one.

    Args:
        path: File of the bytes; the sink compares what it received with it after the clock stops.
        chunk_bytes: Digested and sent at a time.
        core: Where the sink runs; None: anywhere.
    """

    def __init__(self, path: Path, chunk_bytes: int, *, core: int | None = None) -> None:
        source = np.memmap(path, np.uint8, mode="r")
        self._source = np.array(source)  # a training's memory: not shared
        self._path, self._arena = path, path.with_name("arena")
        self._slots = np.memmap(self._arena, np.uint8, mode="w+", shape=source.shape)
        self._slots[:] = 1  # warm
        self._chunk_bytes = chunk_bytes
        self._sink = Sink(path, STREAMS, functools.partial(_digest_receive, chunk_bytes=chunk_bytes), core)
        context = multiprocessing.get_context("spawn")
        self._sender, theirs = context.Pipe()
        of_sender = (theirs, str(self._arena), self._sink.port, chunk_bytes)
        self._process = context.Process(target=_sender, args=of_sender, daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> DigestFloor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sender.close()
        end(self._process)
        self._sink.close()
        self._arena.unlink()

    def send(self) -> tuple[Took, bool]:
        """Copy and send once; return what it took until all is digested at the sink, and whether the bytes agree."""
        self._source[:] = np.memmap(self._path, np.uint8, mode="r")
        target, source = self._slots.ctypes.data, self._source.ctypes.data
        parts = shares(self._source.size, STREAMS)

        def copy(number: int) -> None:
            for start, stop in _chunks(*parts[number], self._chunk_bytes):
                ctypes.memmove(target + start, source + start, stop - start)

        def work() -> None:
            together(STREAMS, copy)
            self._sender.send("go")
            answer(self._sender)

        assert self._process.pid is not None  # it was started
        took, _ = timed(work, [self._process.pid, self._sink.pid])
        return took, self._sink.is_same()


def _chunks(start: int, stop: int, chunk_bytes: int) -> list[tuple[int, int]]:
    return [(at, min(stop, at + chunk_bytes)) for at in range(start, stop, chunk_bytes)]


def _sender(control: Connection, arena: str, port: int, chunk_bytes: int) -> None:
    slots = np.memmap(arena, np.uint8, mode="r+")
    slots[:] += 0  # every page is entered, and stays as it is
    view, parts = slots.data, shares(slots.size, STREAMS)
    sockets = connected(port, STREAMS)
    for connection in sockets:
        connection.settimeout(None)

    def send(number: int) -> None:
        for start, stop in _chunks(*parts[number], chunk_bytes):
            xxhash.xxh3_128_digest(view[start:stop])
            sockets[number].sendall(view[start:stop])
        sockets[number].recv(1)

    try:
        while control.recv():
            together(STREAMS, send)
            control.send("sent")
    except EOFError:
        return


def _digest_receive(connection: socket.socket, view: memoryview, chunk_bytes: int) -> None:
    connection.setblocking(False)
    readable = select.poll()
    readable.register(connection, select.POLLIN)
    with connection:
        while True:
            for first, stop in _chunks(0, view.nbytes, chunk_bytes):
                start = first
                while start < stop:
                    try:
                        got = connection.recv_into(view[start:stop])
                    except BlockingIOError:
                        # Woken when the rest of the chunk is there: to be woken by every segment costs more.
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, stop - start)
                        readable.poll()
                        continue
                    if not got:
                        return
                    start += got
                xxhash.xxh3_128_digest(view[first:stop])
            connection.sendall(b"k")


# -- ray objects --------------------------------------------------------------------------------------
# Ray's own object store between two nodes: put by an actor on one, fetched by an actor on the other.


RAY_TIMEOUT_S = 120.0


class RayObjects:
    """Two raylets on this machine, each with an object store that holds the object 1.5 times.

    The object is one contiguous array, the kindest case for Ray: one buffer, no serialization.
    """

    def __init__(self, path: Path) -> None:
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        import ray
        from ray.cluster_utils import Cluster

        self._ray = ray
        self._path = path
        # Ray takes no store below 75 MiB.
        store_bytes = max(int(1.5 * path.stat().st_size), 128 * MIB)
        others = set(descendants(os.getpid()))
        self._cluster = Cluster()
        try:
            for resources in ({"near": 1}, {"far": 1}):
                self._cluster.add_node(
                    num_cpus=1, resources=resources, object_store_memory=store_bytes, include_dashboard=False
                )
            ray.init(address=self._cluster.address, log_to_driver=False, logging_level="warning")
            self._near = ray.remote(_Near).options(num_cpus=0, resources={"near": 1}).remote(str(path))
            self._far = ray.remote(_Far).options(num_cpus=0, resources={"far": 1}).remote()
            ray.get([self._near.node.remote(), self._far.node.remote()], timeout=RAY_TIMEOUT_S)
            self._pids = sorted(set(descendants(os.getpid())) - others)
        except BaseException:
            self._stop()
            raise

    def __enter__(self) -> RayObjects:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        self._ray.shutdown()
        self._cluster.shutdown()

    def send(self) -> tuple[Took, float, bool]:
        """Put and fetch once; return what both took, seconds of the fetch alone, and whether the bytes are the same."""
        self._ray.get(self._near.refresh.remote(), timeout=RAY_TIMEOUT_S)
        used_s, started_s = cpu_seconds(self._pids), time.perf_counter()
        references = self._ray.get(self._near.put.remote(), timeout=RAY_TIMEOUT_S)
        put_s = time.perf_counter() - started_s
        self._ray.get(self._far.fetch.remote(references), timeout=RAY_TIMEOUT_S)
        both = Took(time.perf_counter() - started_s, cpu_seconds(self._pids) - used_s)
        del references
        self._ray.get(self._near.drop.remote(), timeout=RAY_TIMEOUT_S)
        is_same = self._ray.get(self._far.compare.remote(str(self._path)), timeout=RAY_TIMEOUT_S)
        return both, both.wall_s - put_s, bool(is_same)


class _Near:
    """The actor that puts."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._source = np.array(np.memmap(path, np.uint8, mode="r"))
        self._references: list[Any] = []

    def node(self) -> str:
        """Answer, so that the actor is known to be up."""
        return "near"

    def refresh(self) -> None:
        """Take the round's bytes into this process's memory."""
        self._source[:] = np.memmap(self._path, np.uint8, mode="r")

    def put(self) -> list[Any]:
        """Put them into this node's store."""
        import ray

        self._references = [ray.put(self._source)]
        return self._references

    def drop(self) -> None:
        """Let go of the object."""
        self._references = []


class _Far:
    """The actor on the other node."""

    def __init__(self) -> None:
        self._got: Any = None

    def node(self) -> str:
        """Answer, so that the actor is known to be up."""
        return "far"

    def fetch(self, references: list[Any]) -> int:
        """Pull the object into this node's store."""
        import ray

        self._got = ray.get(references[0])
        return int(self._got.size)

    def compare(self, path: str) -> bool:
        """Compare what was fetched with the bytes that were put, then let go of it."""
        is_same = bool(np.array_equal(self._got, np.memmap(path, np.uint8, mode="r")))
        self._got = None
        return is_same

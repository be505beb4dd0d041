"""Raw loopback TCP over a few streams to another process: what the wire could do without digests and bookkeeping."""

from __future__ import annotations

import itertools
import multiprocessing
import socket
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from benchmarks.report.harness import Took
from benchmarks.rigs.cores import on_core
from benchmarks.rigs.stopwatch import timed

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

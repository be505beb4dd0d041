"""Raw loopback TCP over a few streams to another process: what the wire could do without digests and bookkeeping."""

from __future__ import annotations

import itertools
import multiprocessing
import socket
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

TIMEOUT_S = 60.0


class TcpStreams:
    """Sends the bytes of a file in shared memory to a process that receives them into warm memory.

    Args:
        path: File of the bytes; the sink compares what it received with it after the clock stops.
        streams: Connections, with one thread at each end of each.
    """

    def __init__(self, path: Path, streams: int = 2) -> None:
        self._source = np.memmap(path, np.uint8, mode="r")
        context = multiprocessing.get_context("spawn")
        self._control, theirs = context.Pipe()
        self._sink = context.Process(target=_sink, args=(theirs, str(path), streams), daemon=True)
        self._sink.start()
        theirs.close()
        port = int(answer(self._control))
        self._sockets = [socket.create_connection(("127.0.0.1", port), TIMEOUT_S) for _ in range(streams)]

    def __enter__(self) -> TcpStreams:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in self._sockets:
            connection.close()
        self._control.close()
        self._sink.join(5.0)
        if self._sink.is_alive():
            self._sink.kill()
            self._sink.join(5.0)
        self._sink.close()

    def send(self) -> tuple[float, bool]:
        """Send everything once; return the seconds until all streams acknowledged, and whether the bytes agree."""
        shares = _shares(self._source.size, len(self._sockets))
        threads = [
            threading.Thread(target=_send, args=(connection, self._source[start:end]))
            for connection, (start, end) in zip(self._sockets, shares, strict=True)
        ]
        started_s = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
        took_s = time.perf_counter() - started_s
        self._control.send("compare")
        return took_s, bool(answer(self._control))


def answer(control: Connection) -> Any:
    """Return what the process at the other end says within TIMEOUT_S; TimeoutError."""
    if not control.poll(TIMEOUT_S):
        raise TimeoutError(f"the sink did not answer within {TIMEOUT_S:g} s")
    return control.recv()


def _shares(nbytes: int, count: int) -> list[tuple[int, int]]:
    edges = [nbytes * i // count for i in range(count + 1)]
    return list(itertools.pairwise(edges))


def _send(connection: socket.socket, share: np.ndarray) -> None:
    connection.sendall(share.data)
    if connection.recv(1) != b"k":
        raise ConnectionError("the sink closed a stream")


def _sink(control: Connection, path: str, streams: int) -> None:
    source = np.memmap(path, np.uint8, mode="r")
    buffer = np.zeros(source.size, np.uint8)
    with socket.create_server(("127.0.0.1", 0)) as server:
        control.send(server.getsockname()[1])
        sockets = [server.accept()[0] for _ in range(streams)]
    for connection, (start, end) in zip(sockets, _shares(source.size, streams), strict=True):
        threading.Thread(target=_receive, args=(connection, buffer.data[start:end]), daemon=True).start()
    try:
        while control.recv():
            control.send(bool(np.array_equal(buffer, source)))
            buffer[:] = 0
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

"""The floor under put to sealed: copy, digest, TCP, digest, with nothing else, in as few lines as it takes.

What any store must do that gives training its memory back before it sends: copy the tensors into shared memory with
two threads; then, over two streams, digest a chunk and send it, receive a chunk and digest it. No room to find, no
request and no answer, nothing sealed; who wants to beat it needs a cheaper kernel or more cores.
"""

from __future__ import annotations

import ctypes
import functools
import multiprocessing
import select
import socket
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType

import numpy as np
import xxhash

from benchmarks.report.harness import Took
from benchmarks.rigs.stopwatch import timed
from benchmarks.rigs.tcp_streams import Sink, answer, connected, end, shares, together

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
        self._sink = Sink(path, STREAMS, functools.partial(_receive, chunk_bytes=chunk_bytes), core)
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


def _receive(connection: socket.socket, view: memoryview, chunk_bytes: int) -> None:
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

"""The floor under put to sealed: copy, digest, TCP, digest, with nothing else, in as few lines as it takes.

What any store must do that gives training its memory back before it sends: copy the tensors into shared memory with
two threads; then, over two streams, digest a chunk and send it, receive a chunk and digest it. No room to find, no
request and no answer, nothing sealed; who wants to beat it needs a cheaper kernel or more cores.
"""

from __future__ import annotations

import ctypes
import itertools
import multiprocessing
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType

import numpy as np
import xxhash

from benchmarks.tcp_streams import TIMEOUT_S, answer

STREAMS = 2
Range = tuple[int, int]  # start, end


class DigestFloor:
    """Copies the bytes of a file into warm shared memory, which a process sends to a third one.

    Args:
        path: File of the bytes; the sink compares what it received with it after the clock stops.
        chunk_bytes: Digested and sent at a time.
    """

    def __init__(self, path: Path, chunk_bytes: int) -> None:
        source = np.memmap(path, np.uint8, mode="r")
        self._source = np.array(source)  # a training's memory: not shared
        self._path, self._arena = path, path.with_name("arena")
        self._slots = np.memmap(self._arena, np.uint8, mode="w+", shape=source.shape)
        self._slots[:] = 1  # warm
        self._parts = _parts(source.size, chunk_bytes)
        context = multiprocessing.get_context("spawn")
        self._sink, theirs = context.Pipe()
        self._processes = [context.Process(target=_sink, args=(theirs, str(path), chunk_bytes), daemon=True)]
        self._processes[0].start()
        port = int(answer(self._sink))
        self._sender, theirs = context.Pipe()
        self._processes.append(
            context.Process(target=_sender, args=(theirs, str(self._arena), port, chunk_bytes), daemon=True)
        )
        self._processes[1].start()

    def __enter__(self) -> DigestFloor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sender.close()
        self._sink.close()
        for process in self._processes:
            process.join(5.0)
            if process.is_alive():
                process.kill()
                process.join(5.0)
            process.close()
        self._arena.unlink()

    def send(self) -> tuple[float, bool]:
        """Copy and send once; return the seconds until all is digested at the sink, and whether the bytes agree."""
        self._source[:] = np.memmap(self._path, np.uint8, mode="r")
        target, source = self._slots.ctypes.data, self._source.ctypes.data
        started_s = time.perf_counter()
        _together(lambda n: [ctypes.memmove(target + a, source + a, b - a) for a, b in self._parts[n]])
        self._sender.send("go")
        answer(self._sender)
        took_s = time.perf_counter() - started_s
        self._sink.send("compare")
        return took_s, bool(answer(self._sink))


def _parts(nbytes: int, chunk_bytes: int) -> list[list[Range]]:
    """Return the chunks of each stream, one block for each."""
    edges = [nbytes * i // STREAMS for i in range(STREAMS + 1)]

    def chunks(start: int, end: int) -> Iterator[Range]:
        for at in range(start, end, chunk_bytes):
            yield at, min(end, at + chunk_bytes)

    return [list(chunks(start, end)) for start, end in itertools.pairwise(edges)]


def _together(work: Callable[[int], object]) -> None:
    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(STREAMS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)


def _sender(control: Connection, arena: str, port: int, chunk_bytes: int) -> None:
    slots = np.memmap(arena, np.uint8, mode="r+")
    slots[:] += 0  # every page is entered, and stays as it is
    view, parts = slots.data, _parts(slots.size, chunk_bytes)
    sockets = [socket.create_connection(("127.0.0.1", port), TIMEOUT_S) for _ in range(STREAMS)]
    for number, connection in enumerate(sockets):
        connection.settimeout(None)
        connection.sendall(bytes([number]))

    def send(number: int) -> None:
        for start, end in parts[number]:
            xxhash.xxh3_128_digest(view[start:end])
            sockets[number].sendall(view[start:end])
        sockets[number].recv(1)

    try:
        while control.recv():
            _together(send)
            control.send("sent")
    except EOFError:
        return


def _sink(control: Connection, path: str, chunk_bytes: int) -> None:
    source = np.memmap(path, np.uint8, mode="r")
    buffer = np.ones(source.size, np.uint8)
    parts = _parts(source.size, chunk_bytes)
    with socket.create_server(("127.0.0.1", 0)) as server:
        control.send(server.getsockname()[1])
        for _ in range(STREAMS):
            connection = server.accept()[0]
            number = connection.recv(1)[0]
            threading.Thread(target=_receive, args=(connection, buffer.data, parts[number]), daemon=True).start()
    try:
        while control.recv():
            control.send(bool(np.array_equal(buffer, source)))
            buffer[:] = 0
    except EOFError:
        return


def _receive(connection: socket.socket, view: memoryview, chunks: list[Range]) -> None:
    connection.setblocking(False)
    readable = select.poll()
    readable.register(connection, select.POLLIN)
    with connection:
        while True:
            for first, end in chunks:
                start = first
                while start < end:
                    try:
                        got = connection.recv_into(view[start:end])
                    except BlockingIOError:
                        # Woken when the rest of the chunk is there: to be woken by every segment costs more.
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, end - start)
                        readable.poll()
                        continue
                    if not got:
                        return
                    start += got
                xxhash.xxh3_128_digest(view[first:end])
            connection.sendall(b"k")

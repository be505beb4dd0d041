"""The program of an agent process: maps the arena, and reads or is read through NIXL.

    python -m memstore.shell.transport.nixl_agent reads|serves ARENA_FD SOCKET_FD

It ends when its holder closes the socket or is gone; if it is stopped, the kernel kills it. UCX aborts a process for
what happens at the other end, so that none of it may run in the holder's.
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
import secrets
import select
import signal
import socket
import sys
import threading
from typing import Any

from memstore.shell.transport.agent_messages import (
    PACKET_BYTES_MAX,
    ArenaMetadata,
    Ended,
    Read,
    Ready,
    decode_message,
    decode_metadata,
    encode,
)

BINDINGS = ("nixl_cu13._bindings", "nixl_cu12._bindings")
PR_SET_PDEATHSIG = 1
POLL_S = 0.0002
SERVING_POLL_US = 10_000  # with 0, as in NIXL's own Python API, its thread never waits and takes a whole core


class Agent:
    """One NIXL agent with the arena registered."""

    def __init__(self, role: str, arena_fd: int) -> None:
        self._nixl = _bindings()
        self._nbytes = os.fstat(arena_fd).st_size
        self._map = mmap.mmap(arena_fd, self._nbytes)
        self._map.madvise(mmap.MADV_DONTFORK)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        settings = self._nixl.nixlAgentConfig()
        settings.useProgThread, settings.pthrDelay = role == "serves", SERVING_POLL_US
        self._agent = self._nixl.nixlAgent(f"{role}-{secrets.token_hex(16)}", settings)
        self._agent.createBackend("UCX", {})
        regions = self._nixl.nixlRegDList(self._nixl.DRAM_SEG, [(self._address, self._nbytes, 0, "")])
        self._agent.registerMem(regions, [])
        self._names: dict[bytes, str] = {}

    def metadata(self) -> bytes:
        """Return what others need to read from the arena."""
        return encode(ArenaMetadata(self._address, self._nbytes, self._agent.getLocalMD()))

    def prepare(self, read: Read) -> int:
        """Return the handle of a read, which is not released before the read has come. Any exception: it is none."""
        theirs = decode_metadata.decode(read.metadata)
        if theirs.agent not in self._names:
            name = self._agent.loadRemoteMD(theirs.agent)
            self._names[theirs.agent] = name if isinstance(name, str) else name.decode()
        remote, local = [], []
        for their_offset, my_offset, nbytes in read.pieces:
            if my_offset + nbytes > self._nbytes or their_offset + nbytes > theirs.nbytes:
                raise ValueError(f"{nbytes} bytes at {their_offset} or at {my_offset} lie beyond an arena's end")
            remote.append((theirs.address + their_offset, nbytes, 0))
            local.append((self._address + my_offset, nbytes, 0))
        lists = (self._nixl.nixlXferDList(self._nixl.DRAM_SEG, each) for each in (local, remote))
        handle: int = self._agent.createXferReq(self._nixl.NIXL_READ, *lists, self._names[theirs.agent], "", [])
        return handle

    def begin(self, handle: int) -> None:
        """Begin a read; if this raises, some of it may have begun."""
        self._agent.postXferReq(handle, "")

    def has_come(self, handle: int) -> bool:
        """Return whether all bytes of a read are there, and let it go then; any exception if they will not come."""
        if self._agent.getXferStatus(handle) != self._nixl.NIXL_SUCCESS:
            return False
        self._agent.releaseXferReq(handle)
        return True


def _bindings() -> Any:
    """Return NIXL's compiled module; its Python API imports more, and leaves no choice in how often it polls."""
    for name in BINDINGS:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    raise ModuleNotFoundError(f"none of {', '.join(BINDINGS)} is installed")


def serve(pipe: socket.socket) -> None:
    """Let others read until the holder is gone."""
    while pipe.recv(PACKET_BYTES_MAX):
        pass


def read_for(pipe: socket.socket, agent: Agent) -> None:
    """Carry out reads until the holder is gone."""
    handles: dict[int, int] = {}
    while True:
        if select.select([pipe], [], [], POLL_S if handles else None)[0]:
            packet = pipe.recv(PACKET_BYTES_MAX)
            if not packet:
                return
            asked = decode_message.decode(packet)
            assert isinstance(asked, Read)
            failed = begun(agent, asked, handles)
            if failed is not None:
                pipe.send(encode(failed))
        for number, handle in [*handles.items()]:
            try:
                ended = Ended(number) if agent.has_come(handle) else None
            except Exception as error:
                ended = Ended(number, text_of(error))
            if ended is not None:
                del handles[number]
                pipe.send(encode(ended))


def begun(agent: Agent, asked: Read, handles: dict[int, int]) -> Ended | None:
    """Begin a read and put it among `handles`; return what to answer if it fails at once."""
    try:
        handle = agent.prepare(asked)
    except Exception as error:  # NIXL's exceptions have no base of their own
        return Ended(asked.number, text_of(error), has_begun=False)
    try:
        agent.begin(handle)
    except Exception as error:
        return Ended(asked.number, text_of(error))
    handles[asked.number] = handle
    return None


def text_of(error: Exception) -> str:
    """Return an error as a line."""
    return f"{type(error).__name__}: {error}"[:500]


def be_killed_with_holder() -> None:
    """Have the kernel kill this process when the thread that started it ends: else a stopped one keeps the lock."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def end_with(pipe: socket.socket) -> None:
    """End this process as soon as its holder's end of the socket is closed, whatever its main thread is doing."""
    gone = select.poll()
    gone.register(pipe, select.POLLRDHUP)
    gone.poll()
    os._exit(0)


def main() -> None:
    """Run until the holder is gone."""
    be_killed_with_holder()
    role, arena_fd, pipe = sys.argv[1], int(sys.argv[2]), socket.socket(fileno=int(sys.argv[3]))
    threading.Thread(target=end_with, args=(pipe,), daemon=True).start()
    agent = Agent(role, arena_fd)
    pipe.send(encode(Ready(agent.metadata())))
    if role == "serves":
        serve(pipe)
    else:
        read_for(pipe, agent)
    os._exit(0)  # UCX would warn of every read that has not come


if __name__ == "__main__":
    main()

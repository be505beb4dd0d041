"""Reads through NIXL, with agents in processes of their own.

    reading agent --a read failed, or was given up--> takes no more --its other reads have ended--> killed --> next one

NIXL says that a read has come, and never that one which failed or was given up has ended: a handle that is released
too early is released without an error, and bytes go on landing. The end of the process says it. What peers read from
is another process, which need not end for that.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from memstore.errors import ConfigError, PeerUnreachable
from memstore.shell.transport.agent_process import AgentProcess
from memstore.shell.transport.transport import GivenUp, Piece

log = logging.getLogger("memstore")
END_TIMEOUT_S = 5.0


class NixlTransport:
    """Two agents of one holder: one reads, one is read. Both are started again when they are gone."""

    def __init__(self, arena_file: Path, lock_fd: int) -> None:
        """Start both; ConfigError if they do not come. The locked file stays the caller's, and open until `close`."""
        self._arena_fd, self._lock_fd = os.open(arena_file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW), lock_fd
        self._lock = threading.Lock()
        self._is_closed = False
        self._retired: list[AgentProcess] = []
        self._serving = AgentProcess("serves", self._arena_fd, self._lock_fd)
        try:
            self._reading = AgentProcess("reads", self._arena_fd, self._lock_fd)
        except BaseException:
            self._serving.kill()
            os.close(self._arena_fd)
            raise

    def metadata(self) -> bytes:
        """Return what another holder needs to read from this arena now."""
        with self._lock:
            if not self._serving.is_usable and not self._is_closed:
                log.warning("the process that peers read from has ended: another one is started")
                self._serving = AgentProcess("serves", self._arena_fd, self._lock_fd)
            return self._serving.metadata

    def read(self, metadata: bytes, pieces: Sequence[Piece], *, host: str, deadline_s: float) -> GivenUp | None:
        """Read pieces of the arena that `metadata` is of; None once all have come. Waits at most `deadline_s`."""
        try:
            agent = self._reader()
        except (ConfigError, OSError) as error:
            return GivenUp(PeerUnreachable(f"host {host} cannot be read from: {error}", host=host), lambda: True)
        ended = agent.read(metadata, pieces, deadline_s)
        if not ended.why:
            return None
        log.warning("a read of %d chunks from host %s was given up: %s", len(pieces), host, ended.why)
        failed = PeerUnreachable(f"host {host} could not be read from: {ended.why}", host=host)
        if not ended.has_begun:
            return GivenUp(failed, lambda: True)
        agent.retire()
        return GivenUp(failed, agent.has_ended)

    def _reader(self) -> AgentProcess:
        """Return the agent that takes reads now; ConfigError if none can be started."""
        with self._lock:
            if self._is_closed:
                raise ConfigError("this holder is closing", field="transport")
            self._retired = [agent for agent in self._retired if not agent.has_ended()]
            if not self._reading.is_usable:
                self._retired.append(self._reading)
                self._reading = AgentProcess("reads", self._arena_fd, self._lock_fd)
            return self._reading

    def close(self) -> None:
        """End what reads and what is read, and wait for their end; reads under way fail."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            agents = [self._serving, self._reading, *self._retired]
        for agent in agents:
            agent.kill()
        for agent in agents:
            agent.wait_ended(END_TIMEOUT_S)
        os.close(self._arena_fd)

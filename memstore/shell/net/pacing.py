"""How bytes of copies leave this host: in a low class, and no faster than asked, by the kernel's own means.

Class and pace apply to connections that this host opened, so to its pushes: chunks that a peer fetches to restore
runs on connections of the peer's, at full speed. Source: RFC 8622 (the class "lower effort", DSCP 1).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from memstore.shell.net.channel import Channel

CHUNK_S = 10.0  # a chunk may be in transit for this long at most: its receiver gives up after 30 s


class Pacing:
    """All outgoing bulk connections of one host; any thread may use it."""

    def __init__(self, dscp: int, bytes_per_s: int, chunk_bytes: int) -> None:
        """`bytes_per_s` is for all connections together, 0: no limit; `dscp` 0: the network's default class.

        A connection is never so slow that a chunk would miss its deadline: with many of them the limit is exceeded.
        """
        self.dscp, self.bytes_per_s = dscp, bytes_per_s
        self.pace_min = int(chunk_bytes / CHUNK_S)
        self._lock = threading.Lock()
        self._sending: list[Channel] = []

    def enter(self, channel: Channel) -> Channel:
        """Take a new connection."""
        if self.dscp:
            channel.classify(self.dscp)
        return channel

    @contextlib.contextmanager
    def sending(self, channel: Channel) -> Iterator[None]:
        """Give the connection an equal share of the limit while inside."""
        if not self.bytes_per_s:
            yield
            return
        self._change(channel, is_begun=True)
        try:
            yield
        finally:
            self._change(channel, is_begun=False)

    def _change(self, channel: Channel, *, is_begun: bool) -> None:
        with self._lock:
            if is_begun:
                self._sending.append(channel)
            else:
                self._sending.remove(channel)
            for each in self._sending:
                each.pace(max(self.pace_min, self.bytes_per_s // len(self._sending)))

"""The networks of another host: a connection takes the one with the fewest, and another where that fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from memstore.core.send_gate import EndpointChoice
from memstore.core.wire.ids import Endpoint
from memstore.errors import PeerTimeout, PeerUnreachable
from memstore.shell.net.channel import Channel

SILENCE_S = 5.0  # with several networks: if nothing is taken at the other end for so long, another one is tried


class HostNetworks:
    """The networks of one host, and this process's connections over them. Any thread may call."""

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        """Take where the host listens, in its order, one endpoint at least."""
        self._choice = EndpointChoice(endpoints)
        self._endpoint_of: dict[Channel, Endpoint] = {}
        self._lock = threading.Lock()

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """Return where the host listens."""
        return self._choice.all

    def dial(self, connect: Callable[[Endpoint], Channel]) -> Channel:
        """Return a new connection, which `end` ends.

        Raises:
            PeerUnreachable, PeerTimeout: none could be reached; the last one's error.
        """
        tried: set[Endpoint] = set()
        while True:
            with self._lock:  # counted before it is there: else all that connect at once would take the same network
                endpoint = next(each for each in self._choice.order(time.monotonic()) if each not in tried)
                self._choice.opened(endpoint)
            tried.add(endpoint)
            try:
                channel = connect(endpoint)
            except BaseException as exc:
                self._closed(endpoint, exc)
                if isinstance(exc, (PeerUnreachable, PeerTimeout)) and len(tried) < len(self.endpoints):
                    continue
                raise
            if len(self.endpoints) > 1:
                channel.end_after_silence(SILENCE_S)
            with self._lock:
                self._endpoint_of[channel] = endpoint
            return channel

    def end(self, channel: Channel, error: BaseException | None = None) -> None:
        """Close a connection, for this error or for none; a second call changes nothing.

        A network whose connection broke is avoided for a while.
        """
        with self._lock:
            endpoint = self._endpoint_of.pop(channel, None)
        if endpoint is not None:
            self._closed(endpoint, error)
        channel.close()

    def _closed(self, endpoint: Endpoint, error: BaseException | None) -> None:
        with self._lock:
            self._choice.closed(endpoint)
            if isinstance(error, (PeerUnreachable, PeerTimeout)):
                self._choice.failed(endpoint, time.monotonic())

    def has_another(self) -> bool:
        """Say whether one of several networks did not fail lately."""
        with self._lock:
            return self._choice.has_another(time.monotonic())

    def is_uneven(self) -> bool:
        """Say whether a network that may be used has no connection while another has several."""
        with self._lock:
            return self._choice.is_uneven(time.monotonic())

"""Connects to one of a host's networks: the one with the fewest connections, and another where that fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from memstore.core.network.endpoint_choice import EndpointChoice
from memstore.core.wire.ids import Endpoint
from memstore.errors import PeerTimeout, PeerUnreachable
from memstore.shell.net.channel import Channel

SILENCE_S = 5.0  # with several networks: if nothing is taken at the other end for so long, another one is tried


def dial(
    endpoints: EndpointChoice, lock: threading.Lock, connect: Callable[[Endpoint], Channel]
) -> tuple[Channel, Endpoint]:  # fmt: skip
    """Return a new connection, counted, and where it goes.

    Args:
        endpoints: Those of the host.
        lock: What they are under.
        connect: Connects to one of them.

    Raises:
        PeerUnreachable, PeerTimeout: none could be reached; the last one's error.
    """
    tried: set[Endpoint] = set()
    while True:
        with lock:  # counted before it is there: else all that connect at once would take the same network
            endpoint = next(each for each in endpoints.order(time.monotonic()) if each not in tried)
            endpoints.opened(endpoint)
        tried.add(endpoint)
        try:
            channel = connect(endpoint)
        except BaseException as exc:
            has_failed = isinstance(exc, (PeerUnreachable, PeerTimeout))
            with lock:
                endpoints.closed(endpoint)
                if has_failed:
                    endpoints.failed(endpoint, time.monotonic())
            if has_failed and len(tried) < len(endpoints.all):
                continue
            raise
        if len(endpoints.all) > 1:
            channel.end_after_silence(SILENCE_S)
        return channel, endpoint

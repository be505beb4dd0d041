"""Connects to one of a host's networks: the one with the fewest connections, and another where that fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from memstore.core.network.endpoint_choice import EndpointChoice
from memstore.core.wire.ids import Endpoint
from memstore.errors import PeerTimeout, PeerUnreachable
from memstore.shell.net.channel import Channel

SILENCE_S = 5.0  # with several networks: after so long without an answer of the peer's kernel another one is better


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
    with lock:
        order = endpoints.order(time.monotonic())
    error: PeerUnreachable | PeerTimeout | None = None
    for endpoint in order:
        try:
            channel = connect(endpoint)
        except (PeerUnreachable, PeerTimeout) as exc:
            error = exc
            with lock:
                endpoints.failed(endpoint, time.monotonic())
            continue
        if len(order) > 1:
            channel.end_after_silence(SILENCE_S)
        with lock:
            endpoints.opened(endpoint)
        return channel, endpoint
    assert error is not None
    raise error

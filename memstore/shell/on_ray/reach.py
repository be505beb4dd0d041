"""Asks whether Ray's control store (the GCS) answers, with a limit, before Ray itself is asked.

ray.init() waits for minutes where something accepts connections and never answers, and what it leaves half done cannot
be given up.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable

from memstore.errors import PeerTimeout, PeerUnreachable

REACH_S = 5.0  # a GCS answers in a millisecond; a machine that swaps takes longer
PROBE_S = 2.0  # one try
RETRY_S = 0.2
_DATA, _HEADERS, _RESET, _SETTINGS = 0, 1, 3, 4  # types of HTTP/2 frames
_CALL_STREAM = 1


def gcs_address(address: str | None) -> str | None:
    """Return host:port of the GCS that Ray would join: at `address`, RAY_ADDRESS, or of this machine's cluster.

    None for what only Ray can judge, such as "local" and ray:// addresses.

    Raises:
        ConnectionError: no address is given and no Ray cluster is known on this machine.
        PeerUnreachable: the address is no host:port.
    """
    named = address or os.environ.get("RAY_ADDRESS") or "auto"
    if named == "local" or "://" in named:
        return None
    from ray._private.services import canonicalize_bootstrap_address

    try:
        place: str | None = canonicalize_bootstrap_address(named)
        return place
    except ValueError as error:
        raise PeerUnreachable(f"{named!r} is no address of a Ray cluster: give one such as 10.0.0.1:6379") from error


def wait_for_gcs(address: str | None, limit_s: float, say: Callable[[str], None]) -> None:
    """Return once the GCS answers that `gcs_address` names; `say` is called once with the reason of the wait.

    Raises:
        ConnectionError: no address is given and no Ray cluster is known on this machine.
        PeerUnreachable: nothing listens there; said at once.
        PeerTimeout: what listens there has not answered within `limit_s`.
    """
    place = gcs_address(address)
    if place is None:
        return
    named = address or os.environ.get("RAY_ADDRESS") or place
    named = f"{named if named != 'auto' else place} ({_source(address)})"
    began_s, has_said = time.monotonic(), False
    while True:
        left_s = began_s + limit_s - time.monotonic()
        try:
            if _answers(place, max(0.01, min(PROBE_S, left_s))):
                return
        except (OSError, OverflowError, ValueError) as error:
            raise PeerUnreachable(
                f"no Ray cluster answers at {named}: {error}. {_remedy(address)}", address=place
            ) from error
        if left_s <= 0:
            raise PeerTimeout(
                f"Ray's GCS at {named} does not answer, waited {limit_s:.3g} s: it hangs, or the address is wrong or "
                f"out of reach. {_remedy(address)}",
                operation="reach Ray",
                limit_s=limit_s,
            )
        if not has_said:
            say(f"waiting for Ray's GCS at {named}, which does not answer, up to {limit_s:.3g} s")
        has_said = True


def is_there(place: str) -> bool:
    """Say whether something listens where a GCS was."""
    host, _, port = place.rpartition(":")
    with contextlib.suppress(OSError, OverflowError, ValueError):
        socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_S).close()
        return True
    return False


def wants_token(error: BaseException) -> bool:
    """Say whether Ray could not join because the cluster's token is missing here: its own words hide it in a cause."""
    cause: BaseException | None = error
    while cause is not None:
        if "InvalidAuthToken" in str(cause) or type(cause).__name__ == "AuthenticationError":
            return True
        cause = cause.__cause__
    return False


def _answers(place: str, limit_s: float) -> bool:
    """Say whether a GCS answers a call there, False if it is silent; OSError if nothing listens."""
    host, _, port = place.rpartition(":")
    deadline_s = time.monotonic() + limit_s
    with contextlib.suppress(TimeoutError, ConnectionResetError, BrokenPipeError):
        with socket.create_connection((host.strip("[]"), int(port)), timeout=limit_s) as connection:
            connection.settimeout(max(0.01, deadline_s - time.monotonic()))
            connection.sendall(_call(place))
            if os.environ.get("RAY_USE_TLS", "").lower() in ("1", "true"):  # as Ray reads it
                # A server of TLS says something, or hangs up on plain text.
                connection.recv(1)
                return True
            while (found := _frame(connection, deadline_s)) is not None:
                if found in ((_HEADERS, _CALL_STREAM), (_RESET, _CALL_STREAM)):
                    return True
        time.sleep(min(RETRY_S, limit_s))  # it hung up: no GCS, or one that ends
    return False


def _call(place: str) -> bytes:
    """Return the bytes of a gRPC call of CheckAlive at Ray's GCS; any answer, even a refusal, shows that it lives.

    HTTP/2's preface and settings, the headers as literals, and an empty message. A GCS that hangs still has a thread
    that sends settings, so those alone say nothing.
    """
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": "/ray.rpc.NodeInfoGcsService/CheckAlive",
        ":authority": place,
        "te": "trailers",
        "content-type": "application/grpc",
    }
    texts = [part.encode() for pair in fields.items() for part in pair]
    literals = [bytes([len(text)]) + text for text in texts]
    headers = b"".join(b"\0" + name + value for name, value in zip(literals[::2], literals[1::2], strict=True))
    frames = ((_SETTINGS, 0, 0, b""), (_HEADERS, 4, _CALL_STREAM, headers), (_DATA, 1, _CALL_STREAM, bytes(5)))
    return b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"".join(
        len(body).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + body
        for kind, flags, stream, body in frames
    )


def _frame(connection: socket.socket, deadline_s: float) -> tuple[int, int] | None:
    """Read one HTTP/2 frame; return its type and stream, None if the server hung up. TimeoutError at the deadline."""

    def read(count: int) -> bytes:
        found = b""
        while len(found) < count:
            connection.settimeout(max(0.01, deadline_s - time.monotonic()))
            data = connection.recv(count - len(found))
            if not data:
                return b""
            found += data
        return found

    head = read(9)
    size = int.from_bytes(head[:3], "big")
    if not head or (size and not read(size)):
        return None
    return head[3], int.from_bytes(head[5:], "big")


def _source(address: str | None) -> str:
    """Return the setting that named the address."""
    if address is not None:
        return "the address given"
    return "from RAY_ADDRESS" if os.environ.get("RAY_ADDRESS") else "this machine's newest Ray cluster"


def _remedy(address: str | None) -> str:
    """Return what to do about an address where no GCS answers."""
    if address is None and not os.environ.get("RAY_ADDRESS"):
        return "If that cluster is gone, `ray stop` forgets it; then start one with `ray start --head`"
    named = "the address" if address is not None else "RAY_ADDRESS"
    return f"Start that cluster with `ray start --head`, or correct {named}; `ray status --address=HOST:PORT` tests one"

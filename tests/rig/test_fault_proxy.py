"""The fault proxy by itself: what passes, what is late, lost or broken, and that it follows its rules exactly."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from memstore.core.wire.frame import HEADER_BYTES, Kind, pack_header
from memstore.testing.clusters.processes import wait_for
from memstore.testing.faults.fault_proxy import FaultProxy

WAIT_S = 60.0


class Echo:
    """A server that sends back what it gets, and remembers it."""

    def __init__(self) -> None:
        self.got = bytearray()
        self.server = socket.create_server(("127.0.0.1", 0))
        self.where = self.server.getsockname()
        self.threads = [threading.Thread(target=self.run, daemon=True)]
        self.threads[0].start()

    def run(self) -> None:
        """Serve every connection in a thread of its own until closed."""
        while True:
            try:
                peer, _ = self.server.accept()
            except OSError:
                return
            self.threads.append(threading.Thread(target=self.serve, args=(peer,), daemon=True))
            self.threads[-1].start()

    def serve(self, peer: socket.socket) -> None:
        """Echo one connection."""
        with peer:
            try:
                while data := peer.recv(65536):
                    self.got += data
                    peer.sendall(data)
            except OSError:
                return

    def close(self) -> None:
        """Stop; every thread has ended."""
        self.server.shutdown(socket.SHUT_RDWR)
        self.server.close()
        for thread in self.threads:
            thread.join(WAIT_S)


@pytest.fixture
def echo() -> Iterator[Echo]:
    """An echo server."""
    echo = Echo()
    yield echo
    echo.close()


@pytest.fixture
def proxy(echo: Echo) -> Iterator[FaultProxy]:
    """A proxy before it."""
    with FaultProxy(lambda: echo.where) as proxy:
        yield proxy


def dial(proxy: FaultProxy, timeout_s: float = WAIT_S) -> socket.socket:
    """Connect through the proxy."""
    return socket.create_connection((proxy.address, proxy.port), timeout=timeout_s)


def dial_and_read(proxy: FaultProxy) -> None:
    """Connect and wait for a byte."""
    with dial(proxy) as sock:
        sock.recv(1)


def receive(sock: socket.socket, nbytes: int) -> bytes:
    """Read exactly `nbytes`, or what comes before the end."""
    data = bytearray()
    while len(data) < nbytes and (part := sock.recv(nbytes - len(data))):
        data += part
    return bytes(data)


def send_and_drain(sock: socket.socket, nbytes: int) -> None:
    """Send, then read to the end of the connection."""
    sock.sendall(bytes(nbytes))
    while sock.recv(65536):
        pass


def frame(payload: bytes) -> bytes:
    """One memstore frame with this payload."""
    body = b"body 7"
    return pack_header(Kind.CHUNK, 1, body, len(payload)) + body + payload


def test_without_rules_every_byte_passes_both_ways(proxy: FaultProxy) -> None:
    """Random bytes, frames or not, come back as they were; the end of one side reaches the other."""
    data = random.Random(1).randbytes(700_000)
    with dial(proxy) as sock:
        sender = threading.Thread(target=lambda: (sock.sendall(data), sock.shutdown(socket.SHUT_WR)))
        sender.start()
        assert receive(sock, len(data) + 1) == data
        sender.join(WAIT_S)
    assert (proxy.up.bytes_count, proxy.down.bytes_count) == (len(data), len(data))


def test_a_delay_holds_back_but_keeps_the_order(proxy: FaultProxy) -> None:
    """With a delay of 0.2 s each way and jitter, bytes come at least that late and in order."""
    proxy.up.delay_s = proxy.down.delay_s = 0.2
    proxy.up.jitter_s, proxy.up.rng = 0.05, random.Random(3)
    with dial(proxy) as sock:
        started = time.monotonic()
        for i in range(5):
            sock.sendall(bytes([i]) * 10)
        assert receive(sock, 50) == b"".join(bytes([i]) * 10 for i in range(5))
        assert time.monotonic() - started >= 0.4


def test_a_rate_limit_is_kept(proxy: FaultProxy) -> None:
    """100 kB at 400 kB/s take a quarter of a second."""
    proxy.up.rate_bytes_per_s = 400_000
    with dial(proxy) as sock:
        started = time.monotonic()
        sock.sendall(bytes(100_000))
        assert len(receive(sock, 100_000)) == 100_000
        assert time.monotonic() - started > 0.2


def test_one_direction_can_be_lost(proxy: FaultProxy, echo: Echo) -> None:
    """With the way back lost the target learns everything; healed, that connection is reset and a new one works."""
    with dial(proxy, 0.3) as sock:
        proxy.down.drop = True
        sock.sendall(b"hello")
        wait_for(lambda: proxy.down.dropped_count == 5, "the way back to be lost")
        assert bytes(echo.got) == b"hello"
        with pytest.raises(TimeoutError):
            sock.recv(1)
        proxy.down.drop = False
        sock.settimeout(WAIT_S)
        with pytest.raises(ConnectionResetError):
            sock.recv(1)
    with dial(proxy) as sock:
        sock.sendall(b"again")
        assert receive(sock, 5) == b"again"


def test_a_stall_keeps_every_byte_for_later(proxy: FaultProxy) -> None:
    """Nothing arrives during a stall, everything after it."""
    with dial(proxy, 0.2) as sock:
        proxy.up.stall = True
        sock.sendall(b"later")
        with pytest.raises(TimeoutError):
            sock.recv(1)
        proxy.up.stall = False
        sock.settimeout(WAIT_S)
        assert receive(sock, 5) == b"later"


@pytest.mark.parametrize("at", [0, 1, 4096, 99_999])
def test_a_reset_comes_in_place_of_its_byte(proxy: FaultProxy, echo: Echo, at: int) -> None:
    """Both ends are reset, at most `at` bytes arrive, and it happens once."""
    proxy.up.reset("connection", at)
    with dial(proxy) as sock, pytest.raises(ConnectionError):
        send_and_drain(sock, 100_000)
    assert (proxy.up.resets_count, proxy.up.waiting) == (1, 0)
    assert len(echo.got) <= at
    with dial(proxy) as sock:
        sock.sendall(bytes(at + 10))
        assert len(receive(sock, at + 10)) == at + 10


def test_exactly_one_bit_flips_in_the_part_that_was_named(proxy: FaultProxy) -> None:
    """Header, body and payload of the first frame that is large enough, in any pieces it arrives in."""
    small, large = frame(b"s" * 10), frame(b"L" * 50_000)
    body_nbytes = len(large) - HEADER_BYTES - 50_000
    places = {"header": 20, "body": HEADER_BYTES + 1, "payload": HEADER_BYTES + body_nbytes + 40_000}
    for part, place in places.items():
        proxy.up.flip(part, {"header": 20, "body": 1, "payload": 40_000}[part], payload_min=1000, bit=3)
        with dial(proxy) as sock:
            sent = small + large + large
            for start in (0, 17, 33, 20_000):
                end = {0: 17, 17: 33, 33: 20_000, 20_000: len(sent)}[start]
                sock.sendall(sent[start:end])
            got = receive(sock, len(sent))
        wrong = [i for i in range(len(sent)) if sent[i] != got[i]]
        assert wrong == [len(small) + place]
        assert sent[wrong[0]] ^ got[wrong[0]] == 1 << 3
    assert (proxy.up.flips_count, proxy.up.waiting) == (3, 0)


def test_a_reset_at_the_end_of_a_frame_lets_the_frame_pass(proxy: FaultProxy, echo: Echo) -> None:
    """`end` is the place behind a frame's last byte."""
    whole = frame(b"p" * 5000)
    proxy.up.reset("end", payload_min=1)
    with dial(proxy) as sock:
        sock.sendall(whole)
        wait_for(lambda: proxy.up.resets_count == 1, "the reset", WAIT_S)
    assert whole.startswith(bytes(echo.got))
    assert proxy.up.bytes_count == len(whole)


def test_refused_and_unanswered_connections_are_reset_and_counted(proxy: FaultProxy, echo: Echo) -> None:
    """While it refuses, and while no process listens behind it, a client is reset; live ones can be reset at once."""
    with dial(proxy) as live:
        live.sendall(b"x")
        assert receive(live, 1) == b"x"
        proxy.refuse = True
        with pytest.raises(ConnectionResetError):
            dial_and_read(proxy)
        proxy.refuse = False
        proxy.target = lambda: ("127.0.0.1", 1)
        with pytest.raises(ConnectionResetError):
            dial_and_read(proxy)
        assert (proxy.connections_count, proxy.refused_count) == (3, 2)
        proxy.reset_all()
        with pytest.raises(ConnectionResetError):
            live.recv(1)

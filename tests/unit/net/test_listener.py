"""Listeners serve peers that prove themselves, and outlive all others (R4, I13, I19, I20, fault F33)."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from memstore import errors
from memstore.core.wire import frame
from memstore.core.wire.frame import Kind
from memstore.core.wire.handshake import HolderIdentity, Identity, ProbeIdentity
from memstore.shell import identity
from memstore.shell.net import listener
from memstore.shell.net.channel import Channel
from memstore.shell.net.listener import Listener, Process, connect_tcp, connect_unix

SECRET = bytes(range(32))
HOLDER, PROBE = HolderIdentity(host="a", incarnation=1), ProbeIdentity()


@pytest.fixture(autouse=True)
def _nothing_leaks() -> Iterator[None]:
    """No thread and no descriptor is left behind by any test."""
    threads, descriptors = set(threading.enumerate()), set(os.listdir("/proc/self/fd"))
    yield
    until(lambda: set(threading.enumerate()) <= threads, "threads ended")
    until(lambda: len(set(os.listdir("/proc/self/fd")) - descriptors) <= 1, "descriptors closed")


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait, at most 30 s, for something that another thread does."""
    tick, end = threading.Event(), time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, f"not reached: {what}"
        tick.wait(0.002)


def echo(channel: Channel, identity: object) -> None:
    """Answer every call with its body and its caller's identity, until the peer goes."""
    while True:
        call = channel.recv(timeout_s=None)
        channel.send(Kind.REPLY, call.request_id, bytes(call.data) + repr(identity).encode(), deadline_s=5)


def serve(**options: Any) -> Listener:
    defaults = {"secret": SECRET, "store": "s", "identity": lambda: HOLDER, "on_channel": echo}
    return Listener.tcp("127.0.0.1", 0, **{**defaults, **options})


def connect(where: Listener, **options: Any) -> Channel:
    defaults = {"secret": SECRET, "store": "s", "identity": PROBE, "timeout_s": 5.0}
    return connect_tcp(*where.address[:2], **{**defaults, **options})


def works(where: Listener) -> bool:
    with connect(where) as channel:
        return channel.request(b"1", timeout_s=5).data == b"1" + repr(PROBE).encode()


@pytest.mark.parametrize("secret", [SECRET, None], ids=["proved", "named"])
def test_another_host_than_the_one_that_is_called_is_refused(secret: bytes | None) -> None:
    """Its address is out of date: what is sent there would be taken for the other host's (R1)."""
    with serve(secret=secret) as here:
        connect(here, secret=secret, host="a").close()
        with pytest.raises(errors.AuthenticationError, match=r"host 'a' answers at .* where host 'b' is looked for"):
            connect(here, secret=secret, host="b")
    with serve(identity=lambda: PROBE) as here, pytest.raises(errors.AuthenticationError, match="a probe answers at"):
        connect(here, host="b")


def test_peers_that_know_the_secret_are_served_and_know_each_other() -> None:
    """Both identities arrive; many clients are served at once."""
    with serve() as server:
        channels = [connect(server) for _ in range(5)]
        for channel in channels:
            assert channel.request(b"1", timeout_s=5).data == b"1" + repr(PROBE).encode()
        assert server.connections == 5
        for channel in channels:
            channel.close()
        until(lambda: server.connections == 0, "connections forgotten")


@pytest.mark.parametrize(
    "garbage",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 20, id="http"),
        pytest.param(os.urandom(5000), id="noise"),
        pytest.param(frame.pack_header(Kind.CALL, 1, b"a body") + b"a body", id="call"),
        pytest.param(frame.pack_header(Kind.HELLO, 1, bytes(4097)), id="long hello"),
        pytest.param(frame.pack_header(Kind.HELLO, 1, b"\xdd\xff\xff\xff\xff") + b"\xdd\xff\xff\xff\xff", id="array"),
        pytest.param(frame.pack_header(Kind.HELLO, 1, b"", 1 << 20), id="bulk"),
        pytest.param(frame.MAGIC + b"\x01\x01" + b"\xff" * 26, id="lengths"),
    ],
)
def test_garbage_on_the_port_leaves_the_listener_serving(garbage: bytes) -> None:
    """The stranger is closed and counted, never reaches the callback, and a peer is served afterwards."""
    seen: list[dict[str, Any]] = []

    def on_channel(channel: Channel, identity: Identity) -> None:
        seen.append(identity)
        echo(channel, identity)

    with serve(on_channel=on_channel) as server:
        with socket.create_connection(server.address) as stranger:
            with contextlib.suppress(OSError):  # the listener may have closed the connection by then
                stranger.sendall(garbage)
                stranger.shutdown(socket.SHUT_WR)
            until(lambda: server.refused == 1, "stranger refused")
        assert works(server)
        assert seen == [PROBE]


@pytest.mark.parametrize("theirs", [{"secret": bytes(32)}, {"secret": None}, {"store": "other"}])
def test_a_wrong_secret_is_refused_and_others_are_served(theirs: dict[str, Any]) -> None:
    """The client gets AuthenticationError, the server counts it and says why."""
    with serve() as server:
        with pytest.raises(errors.AuthenticationError):
            connect(server, **theirs)
        until(lambda: server.refused == 1, "refusal counted")
        assert "refused our proof" in server.last_refusal
        assert works(server)


def test_a_slow_handshake_ends_at_its_deadline() -> None:
    """A stranger that sends a byte now and then does not get more time by it (slowloris)."""
    with serve(handshake_timeout_s=1.0) as server, socket.create_connection(server.address) as stranger:
        stranger.settimeout(0.02)
        began = time.monotonic()
        drip = iter(frame.pack_header(Kind.HELLO, 1, bytes(100)))
        while True:
            try:
                stranger.sendall(bytes([next(drip, 0)]))
                if stranger.recv(1) == b"":
                    break
            except TimeoutError:
                assert time.monotonic() - began < 5
            except OSError:
                break
        until(lambda: server.refused == 1, "stranger refused")
        assert works(server)


def test_idle_strangers_make_room_for_a_peer() -> None:
    """With every unauthenticated place taken the oldest stranger goes and a peer is still served."""
    with serve(unauthenticated_max=3, handshake_timeout_s=30) as server:
        strangers = [socket.create_connection(server.address) for _ in range(12)]
        assert works(server)
        assert server.connections <= 4
        strangers[0].settimeout(5)
        assert strangers[0].recv(1) == b""
        for stranger in strangers:
            stranger.close()


def test_a_stranger_that_is_slow_to_go_keeps_no_peer_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine its thread runs late: the peer waits for the place, it is not refused."""
    refuse, late = Listener._refuse, threading.Event()

    def refuse_late(self: Listener, peer: str, error: Exception) -> None:
        late.wait(0.3)
        refuse(self, peer, error)

    monkeypatch.setattr(Listener, "_refuse", refuse_late)
    with serve(unauthenticated_max=1, handshake_timeout_s=30) as server, socket.create_connection(server.address):
        until(lambda: server.connections == 1, "the stranger's place")
        assert works(server)


def test_a_stranger_that_never_goes_costs_the_next_peer_not_the_listener(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread hangs: a process that needs its place is refused after a while, and the next is served once it is
    gone.
    """
    monkeypatch.setattr(listener, "MAKE_ROOM_S", 0.05)
    refuse, goes = Listener._refuse, threading.Event()

    def refuse_late(self: Listener, peer: str, error: Exception) -> None:
        if threading.current_thread() is not self._acceptor:
            goes.wait(30)
        refuse(self, peer, error)

    monkeypatch.setattr(Listener, "_refuse", refuse_late)
    with serve(unauthenticated_max=1, handshake_timeout_s=30) as server, socket.create_connection(server.address):
        until(lambda: server.connections == 1, "the stranger's place")
        with pytest.raises(errors.PeerUnreachable):
            connect(server)
        assert "1 handshakes" in server.last_refusal
        goes.set()
        until(lambda: server.connections == 0, "the stranger's end")
        assert works(server)


def test_connections_beyond_the_bound_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The total is bounded too; once one leaves, the next is served."""
    monkeypatch.setattr(listener, "CONNECTIONS_MAX", 2)
    with serve() as server:
        first, second = connect(server), connect(server)
        with pytest.raises(errors.PeerUnreachable):
            connect(server)
        assert "2 connections" in server.last_refusal
        first.close()
        until(lambda: server.connections == 1, "a place is free")
        assert works(server)
        second.close()


def test_a_finished_connection_frees_its_socket_at_once() -> None:
    """Not when the collector comes by: a holder may keep a reference to a channel that has ended."""
    kept: list[Channel] = []
    with serve(on_channel=lambda channel, identity: kept.append(channel)) as server:
        connect(server).close()
        until(lambda: kept != [] and server.connections == 0, "connection served")
        assert kept[0]._sock.fileno() == -1


def test_an_error_in_the_callback_costs_only_its_connection(caplog: pytest.LogCaptureFixture) -> None:
    """A bug in a handler closes that channel, is logged, and the listener goes on."""

    def on_channel(channel: Channel, identity: Identity) -> None:
        if identity == HOLDER:
            raise KeyError("bug")
        echo(channel, identity)

    with serve(on_channel=on_channel) as server:
        with connect(server, identity=HOLDER) as channel, pytest.raises(errors.PeerUnreachable):
            channel.recv(timeout_s=5)
        assert works(server)
        until(lambda: "an error of ours" in caplog.text, "bug logged")


def test_a_session_that_ends_by_a_message_that_is_none_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """A peer that has authenticated and sends nonsense is a mistake of ours: a log without a word would hide it."""

    def on_channel(channel: Channel, identity: dict[str, Any]) -> None:
        raise errors.ProtocolError("the field `shard` is missing")

    with serve(on_channel=on_channel) as server:
        with connect(server) as channel, pytest.raises(errors.PeerUnreachable):
            channel.recv(timeout_s=5)
        until(lambda: "the field `shard` is missing" in caplog.text, "error logged")
    assert [record.levelname for record in caplog.records if "shard" in record.message] == ["WARNING"]


def test_an_error_of_the_machine_in_the_callback_is_not_called_ours(caplog: pytest.LogCaptureFixture) -> None:
    """A full table of descriptors costs the connection and one line that names it, without a traceback."""

    def on_channel(channel: Channel, identity: Identity) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with serve(on_channel=on_channel) as server:
        with connect(server) as channel, pytest.raises(errors.PeerUnreachable):
            channel.recv(timeout_s=5)
        until(lambda: "Too many open files" in caplog.text, "error logged")
    assert "of ours" not in caplog.text
    assert "Traceback" not in caplog.text


def test_failing_accepts_do_not_stop_the_listener(monkeypatch: pytest.MonkeyPatch) -> None:
    """When no thread can be started the connection is closed, and the next one is served."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("memstore tcp:"):
            raise RuntimeError("can't start new thread")
        start(thread)

    with serve() as server:
        monkeypatch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(errors.PeerUnreachable):
            connect(server)
        monkeypatch.undo()
        assert "can't start new thread" in server.last_refusal
        assert works(server)


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "192.0.2.1"])
def test_listening_beyond_loopback_needs_a_secret(address: str) -> None:
    """Without a secret only loopback is served (I19)."""
    with pytest.raises(errors.ConfigError, match="without a secret"):
        Listener.tcp(address, 0, secret=None, store="s", identity=lambda: PROBE, on_channel=echo)


def test_loopback_without_a_secret_still_exchanges_identities() -> None:
    """Both sides without a secret find each other."""
    with serve(secret=None) as server, connect(server, secret=None) as channel:
        assert channel.request(b"", timeout_s=5).data == repr(PROBE).encode()


def test_an_address_in_use_or_not_ours_is_a_config_error() -> None:
    """The message names address and port."""
    with serve() as server:
        port = server.address[1]
        with pytest.raises(errors.ConfigError, match=f"127.0.0.1 port {port}"):
            Listener.tcp("127.0.0.1", port, secret=SECRET, store="s", identity=lambda: PROBE, on_channel=echo)
    with pytest.raises(errors.ConfigError, match="not an IP address"):
        Listener.tcp("no such host", 0, secret=SECRET, store="s", identity=lambda: PROBE, on_channel=echo)


def test_connecting_to_no_process_is_unreachable_and_to_silence_a_timeout(tmp_path: Path) -> None:
    """Refused, missing and mute listeners are distinguished, in time."""
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        identity = {"secret": SECRET, "store": "s", "identity": {}}
        with pytest.raises(errors.PeerUnreachable, match="cannot connect"):
            connect_tcp(*mute.getsockname(), **identity, timeout_s=5)
        mute.listen()
        with pytest.raises(errors.PeerTimeout):
            connect_tcp(*mute.getsockname(), **identity, timeout_s=0.05)
    with pytest.raises(errors.PeerUnreachable, match="cannot connect"):
        connect_unix(tmp_path / "none", timeout_s=5)


def test_close_ends_live_connections_and_waiting_threads() -> None:
    """After close() peers see the end, no process can connect, and closing again does nothing."""
    server = serve()
    channel, stranger = connect(server), socket.create_connection(server.address)
    until(lambda: server.connections == 2, "both accepted")
    began = time.monotonic()
    server.close()
    assert time.monotonic() - began < 3
    assert server.connections == 0
    assert server._sock.fileno() == -1
    with channel, stranger, pytest.raises(errors.PeerUnreachable):
        channel.recv(timeout_s=5)
    with pytest.raises(errors.PeerUnreachable):
        connect(server)
    server.close()


def test_close_waits_for_a_handler_that_hangs_only_so_long() -> None:
    """What a handler is stuck in may never end, such as a file system: close() gives its thread up in time."""
    ends = threading.Event()
    server = serve(on_channel=lambda channel, identity: ends.wait(30) and None)
    with connect(server):
        closing = threading.Thread(target=server.close, kwargs={"timeout_s": 0.1})
        closing.start()
        closing.join(10)
        is_late = closing.is_alive()
        ends.set()
        closing.join(30)
    assert not is_late
    until(lambda: server.connections == 0, "the handler's end")


def test_a_holder_that_takes_no_connections_is_a_timeout(tmp_path: Path) -> None:
    """Its queue is full: a client learns of it within its own time limit."""
    path = tmp_path / "holder.sock"
    with socket.socket(socket.AF_UNIX) as stuck, contextlib.ExitStack() as waiting:
        stuck.bind(str(path))
        stuck.listen(0)
        first = waiting.enter_context(socket.socket(socket.AF_UNIX))
        first.connect(str(path))  # the queue has one place more than it says
        with pytest.raises(errors.PeerTimeout):
            connect_unix(path, timeout_s=0.05)


def test_a_handler_may_close_its_listener() -> None:
    """close() from a connection's own thread does not wait for itself."""
    servers: list[Listener] = []
    server = serve(on_channel=lambda channel, identity: servers[0].close())
    servers.append(server)
    with connect(server) as channel, pytest.raises(errors.PeerUnreachable):
        channel.recv(timeout_s=5)
    until(lambda: server.connections == 0, "listener closed")


@pytest.mark.parametrize("name", ["holder.sock", "x" * 60 + "/" + "y" * 60 + "/holder.sock"])
def test_unix_peers_are_known_by_the_kernel(tmp_path: Path, name: str) -> None:
    """The socket file has mode 0600, stale ones are replaced, long paths work, and close removes the file."""
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    for _ in range(2):
        server = Listener.unix(path, on_channel=echo)
        assert server.address == str(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with connect_unix(path, timeout_s=5) as channel:
            me = Process(os.getpid(), os.getuid())
            assert channel.request(b"", timeout_s=5).data == repr(me).encode()
        stale = path.parent / "stale"
        os.link(path, stale)
        server.close()
        assert not path.exists()
        stale.rename(path)
    path.unlink()


def test_closing_leaves_a_successors_socket_file_alone(tmp_path: Path) -> None:
    """A holder that was replaced does not unlink the path of its successor (R2)."""
    path = tmp_path / "holder.sock"
    with Listener.unix(path, on_channel=echo) as first, Listener.unix(path, on_channel=echo):
        first.close()
        with connect_unix(path, timeout_s=5) as channel:
            assert b"Process" in channel.request(b"", timeout_s=5).data


def test_a_unix_peer_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each side talks only to processes of our user and of root (R4)."""
    path = tmp_path / "holder.sock"
    monkeypatch.setattr(Channel, "credentials", lambda self: (1234, os.getuid() + 1))
    with Listener.unix(path, on_channel=echo) as server:
        with pytest.raises(errors.AuthenticationError, match="process 1234"):
            connect_unix(path, timeout_s=5)
        until(lambda: server.refused == 1, "refused by the server too")
    monkeypatch.undo()


def test_a_file_that_is_no_socket_is_not_removed(tmp_path: Path) -> None:
    """A wrong path costs an error, not a user's file."""
    path = tmp_path / "notes.txt"
    path.write_text("keep")
    with pytest.raises(errors.ConfigError, match="not a socket"):
        Listener.unix(path, on_channel=echo)
    assert path.read_text() == "keep"


def test_interfaces_are_found_by_name_network_and_address() -> None:
    """Loopback is on every machine, and the default is an address of this machine."""
    name = next(name for name, address in identity.interface_addresses() if address == "127.0.0.1")
    for spec in (name, "127.0.0.0/8", "127.0.0.1", "127.0.0.1/8"):
        assert identity.resolve_interface(spec) == "127.0.0.1"
    assert identity.resolve_interface(None) in {address for _, address in identity.interface_addresses()}


@pytest.mark.parametrize("spec", ["no-such-nic", "203.0.113.0/24", "2001:db8::/32", ""])
def test_an_interface_that_matches_nothing_lists_what_is_here(spec: str) -> None:
    """The error shows every interface with its address."""
    with pytest.raises(errors.ConfigError, match=r"127\.0\.0\.1"):
        identity.resolve_interface(spec)


def test_the_default_interface_prefers_a_real_one_and_falls_back_to_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a route the first address that is not loopback wins; with nothing else it is loopback."""
    monkeypatch.setattr(identity, "_PROBE", ("256.0.0.1", 9))
    monkeypatch.setattr(identity, "interface_addresses", lambda: [("lo", "127.0.0.1"), ("eth7", "10.9.8.7")])
    assert identity.resolve_interface(None) == "10.9.8.7"
    monkeypatch.setattr(identity, "interface_addresses", lambda: [("lo", "127.0.0.1")])
    assert identity.resolve_interface(None) == "127.0.0.1"

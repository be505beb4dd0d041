"""The handshake: a process that does not know the secret gets nothing, also by copying or sending back (I19,
fault F33).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import msgpack
import msgspec
import pytest

from memstore import errors
from memstore.core.wire.codec import encode
from memstore.core.wire.error_message import ErrorMessage, decode_error
from memstore.core.wire.frame import Kind
from memstore.core.wire.handshake import (
    ClientProof,
    ControllerIdentity,
    Hello,
    HolderIdentity,
    ProbeIdentity,
    ServerProof,
    decode_hello,
    decode_server_proof,
)
from memstore.shell.net import auth
from memstore.shell.net.channel import Channel

SECRET = bytes(range(32))
HOLDER, PROBE = HolderIdentity(host="a", incarnation=1), ProbeIdentity()


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    """Two ends of one connection as channels."""
    left, right = socket.socketpair()
    with Channel(left, peer="the server") as client, Channel(right, peer="the client") as server:
        yield client, server


@pytest.fixture
def aside() -> Iterator[Callable[..., Future[Any]]]:
    """Run a function in another thread; all are waited for at the end."""
    with ThreadPoolExecutor(4) as pool:
        yield pool.submit


def shake(pair: tuple[Channel, Channel], aside: Callable[..., Future[Any]], **theirs: Any) -> tuple[Any, Any]:
    """Run both sides of a handshake and return result or error of client and server."""
    server = {"secret": SECRET, "store": "default", "identity": HOLDER, "timeout_s": 5.0}
    client = {**server, "identity": PROBE, **theirs}
    outcomes = [aside(auth.authenticate_client, pair[0], **client), aside(auth.authenticate_server, pair[1], **server)]
    return tuple(outcome.exception(10) or outcome.result() for outcome in outcomes)  # type: ignore[return-value]


@pytest.mark.parametrize("secret", [SECRET, None])
def test_handshake_exchanges_proven_identities(
    pair: tuple[Channel, Channel], aside: Callable[..., Future[Any]], secret: bytes | None
) -> None:
    """Both ends learn the other's identity, and frames beyond the handshake pass from then on."""
    client = aside(auth.authenticate_client, pair[0], secret, store="s", identity=PROBE, timeout_s=5)
    server = aside(auth.authenticate_server, pair[1], secret, store="s", identity=HOLDER, timeout_s=5)
    assert (client.result(5), server.result(5)) == (HOLDER, PROBE)
    pair[0].send(Kind.CHUNK, 1, bytes(9000), deadline_s=5)
    assert pair[1].recv(timeout_s=5).kind is Kind.CHUNK


@pytest.mark.parametrize("theirs", [{"secret": bytes(32)}, {"secret": None}, {"store": "other"}])
def test_wrong_secret_or_store_fails_on_both_ends_without_naming_the_secret(
    pair: tuple[Channel, Channel], aside: Callable[..., Future[Any]], theirs: dict[str, Any]
) -> None:
    """Neither end gets an identity; both channels are closed; the message names the peer."""
    outcomes = shake(pair, aside, **theirs)
    for channel, outcome in zip(pair, outcomes, strict=True):
        assert type(outcome) is errors.AuthenticationError
        assert channel.peer in str(outcome)
        assert SECRET.hex() not in str(outcome)
        assert channel.is_closed


def hello(channel: Channel) -> ServerProof:
    """As a stranger, send HELLO and return the server's nonce and proof."""
    channel.send(Kind.HELLO, 0, Hello(nonce=os.urandom(32)), deadline_s=5)
    return decode_server_proof(channel.recv(timeout_s=5).data)


def test_a_servers_own_proof_sent_back_proves_nothing(
    pair: tuple[Channel, Channel], aside: Callable[..., Future[Any]]
) -> None:
    """Reflection: echoing the server's MAC as the client's is refused (fault F33)."""
    server = aside(auth.authenticate_server, pair[1], SECRET, store="s", identity=PROBE, timeout_s=5)
    first = hello(pair[0])
    proof = ClientProof(identity=encode(PROBE), proof=first.proof)
    pair[0].send(Kind.AUTH2, 0, proof, deadline_s=5)
    assert type(server.exception(5)) is errors.AuthenticationError


def test_a_client_refuses_its_own_nonce_and_a_proof_borrowed_from_a_server(
    pair: tuple[Channel, Channel], aside: Callable[..., Future[Any]]
) -> None:
    """A mirror in place of a server is refused before the client has sent its identity."""
    client = aside(auth.authenticate_client, pair[0], SECRET, store="s", identity=HOLDER, timeout_s=5)
    nonce = decode_hello(pair[1].recv(timeout_s=5).data).nonce
    pair[1].send(Kind.AUTH1, 0, ServerProof(nonce=nonce, proof=bytes(32)), deadline_s=5)
    assert type(client.exception(5)) is errors.AuthenticationError
    refused = ErrorMessage(error="AuthenticationError", message="refused", context={})
    assert decode_error(pair[1].recv(timeout_s=5).data) == refused


def test_a_recorded_handshake_does_not_work_again(aside: Callable[..., Future[Any]]) -> None:
    """Replay: the client's frames of a good handshake are refused by the next one (fault F33)."""
    recorded: list[tuple[Kind, Any]] = []

    class Recording(Channel):
        def send(self, kind: Kind, request_id: int = 0, body: Any = None, bulk: Any = (), *, deadline_s: float) -> None:
            recorded.append((kind, body))
            super().send(kind, request_id, body, bulk, deadline_s=deadline_s)

    left, right = socket.socketpair()
    with Recording(left) as client, Channel(right) as server:
        assert shake((client, server), aside) == (HOLDER, PROBE)
    assert [kind for kind, _ in recorded] == [Kind.HELLO, Kind.AUTH2]
    left, right = socket.socketpair()
    with Channel(left) as stranger, Channel(right) as server:
        again = aside(auth.authenticate_server, server, SECRET, store="default", identity=PROBE, timeout_s=5)
        for kind, body in recorded:
            stranger.send(kind, 0, body, deadline_s=5)
        assert type(again.exception(5)) is errors.AuthenticationError


@pytest.mark.parametrize("changed", [Kind.AUTH2, Kind.AUTH3])
def test_an_identity_changed_on_the_way_is_refused(
    pair: tuple[Channel, Channel], aside: Callable[..., Future[Any]], monkeypatch: pytest.MonkeyPatch, changed: Kind
) -> None:
    """The proof covers the identity, the client's and the server's: another role under the same proof fails."""
    send = Channel.send

    def tamper(self: Channel, kind: Kind, request_id: int, body: Any, *, deadline_s: float) -> None:
        if kind is changed:
            body = msgspec.structs.replace(body, identity=encode(ControllerIdentity(term=1)))
        send(self, kind, request_id, body, deadline_s=deadline_s)

    monkeypatch.setattr(Channel, "send", tamper)
    client, server = shake(pair, aside)
    assert type(client) is errors.AuthenticationError
    assert changed is Kind.AUTH3 or type(server) is errors.AuthenticationError


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"k": "hello"},
        {"k": "hello", "nonce": 5},
        {"k": "hello", "nonce": b"short"},
        {"k": "hi", "nonce": bytes(32)},
    ],
)
def test_malformed_handshakes_are_refused(
    pair: tuple[Channel, Channel], aside: Callable[..., Future[Any]], body: dict[str, Any]
) -> None:
    """Missing or mistyped fields are an AuthenticationError, nothing else."""
    server = aside(auth.authenticate_server, pair[1], SECRET, store="s", identity=PROBE, timeout_s=5)
    pair[0].send(Kind.HELLO, 0, msgpack.packb(body), deadline_s=5)
    assert type(server.exception(5)) is errors.AuthenticationError


def test_a_handshake_has_one_deadline_for_all_its_frames(
    pair: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time spent before the first frame is missing for the next one."""
    times = iter([0.0, 1.0])
    monkeypatch.setattr(auth, "time", SimpleNamespace(monotonic=lambda: next(times, 100.0)))
    pair[0].send(Kind.HELLO, 0, Hello(nonce=bytes(32)), deadline_s=5)
    with pytest.raises(errors.PeerTimeout) as caught:
        auth.authenticate_server(pair[1], SECRET, store="s", identity=PROBE, timeout_s=5)
    assert caught.value.limit_s == 0  # type: ignore[attr-defined]


def test_a_silent_peer_costs_the_deadline(pair: tuple[Channel, Channel]) -> None:
    """A silent peer is a PeerTimeout, and the channel is closed."""
    with pytest.raises(errors.PeerTimeout):
        auth.authenticate_client(pair[0], SECRET, store="s", identity=PROBE, timeout_s=0.05)
    assert pair[0].is_closed


@pytest.mark.parametrize("wrong", [{"secret": b"short"}, {"identity": HolderIdentity(host="h" * 3000, incarnation=1)}])
def test_a_short_secret_or_a_long_identity_is_a_config_error(
    pair: tuple[Channel, Channel], wrong: dict[str, Any]
) -> None:
    """Caught before a byte is sent."""
    with pytest.raises(errors.ConfigError, match="bytes"):
        auth.authenticate_client(
            pair[0], **{"secret": SECRET, "store": "s", "identity": PROBE, "timeout_s": 1.0, **wrong}
        )


@pytest.mark.parametrize("kind", [Kind.HELLO, Kind.CALL])
def test_a_stranger_meets_the_strict_limits_on_any_channel(
    pair: tuple[Channel, Channel], aside: Callable[..., Future[Any]], kind: Kind
) -> None:
    """From the first byte of the handshake on, a long body or an early CALL is refused from its header."""
    server = aside(auth.authenticate_server, pair[1], SECRET, store="s", identity=PROBE, timeout_s=5)
    pair[0].send(kind, 0, bytes(5000 if kind is Kind.HELLO else 32), deadline_s=5)
    assert type(server.exception(5)) is errors.ProtocolError
    assert pair[1].is_closed

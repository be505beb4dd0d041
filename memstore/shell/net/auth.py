"""Mutual proof that both ends of a connection know the store's secret, before anything else is said.

    client -> server   HELLO  nonce_c
    server -> client   AUTH1  nonce_s, MAC("server proves")
    client -> server   AUTH2  identity_c, MAC("client proves", identity_c)
    server -> client   AUTH3  identity_s, MAC("server identity", identity_c, identity_s)

The messages: `core/wire/handshake.py`. MAC is HMAC-SHA256 under the secret over the label, the wire version, the
store's name, both nonces and the identities. The labels differ, so a proof sent back to its author proves nothing; the
nonces are new for every connection, so a recorded handshake does not work again. Until the other side has proved itself
each side reveals a nonce and a MAC, which say nothing about a 256-bit secret. It authenticates the ends at connection
time; it does not encrypt, and does not protect later bytes from a network that rewrites them on the way: that is
tls.py. Under TLS the digest of the server's certificate is among the fields, so that a handshake cannot be passed on
through another one's.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import time
from collections.abc import Callable
from typing import NoReturn, TypeVar

from memstore import errors
from memstore.core.wire import frame as wire
from memstore.core.wire.codec import Decoder, Message, encode
from memstore.core.wire.error_message import ErrorMessage
from memstore.core.wire.frame import Kind
from memstore.core.wire.handshake import (
    NONCE_BYTES,
    ClientProof,
    Hello,
    Identity,
    ServerIdentity,
    ServerProof,
    decode_client_proof,
    decode_hello,
    decode_identity,
    decode_server_identity,
    decode_server_proof,
)
from memstore.shell.net.channel import Channel

T = TypeVar("T")
SECRET_BYTES = 32
IDENTITY_BYTES_MAX = 2 << 10
"""Leaves room for the proof in a frame of a stranger."""
_SERVER_PROVES = b"memstore server proves"
_CLIENT_PROVES = b"memstore client proves"
_SERVER_IDENTITY = b"memstore server identity"


def authenticate_client(
    channel: Channel, secret: bytes | None, *, store: str, identity: Identity, timeout_s: float
) -> Identity:
    """Prove ourselves to a server, make it prove itself, and return its identity.

    Without a secret (both sides) it only exchanges identities. Raises AuthenticationError, PeerTimeout or
    PeerUnreachable; the channel is closed then.
    """
    return _run(_Handshake(channel, secret, store, identity, timeout_s), _Handshake.as_client)


def authenticate_server(
    channel: Channel, secret: bytes | None, *, store: str, identity: Identity, timeout_s: float
) -> Identity:
    """The other end of `authenticate_client`: return the client's proven identity, or raise and close the channel."""
    return _run(_Handshake(channel, secret, store, identity, timeout_s), _Handshake.as_server)


class _Handshake:
    """One handshake: the key, the time left, and the transcript so far."""

    def __init__(
        self, channel: Channel, secret: bytes | None, store: str, identity: Identity, timeout_s: float
    ) -> None:
        if secret is not None and len(secret) != SECRET_BYTES:
            raise errors.ConfigError(f"the store's secret has {SECRET_BYTES} bytes, not {len(secret)}")
        self.channel = channel
        self.key = secret if secret is not None else bytes(SECRET_BYTES)
        self.store = store
        self.identity = encode(identity)
        if len(self.identity) > IDENTITY_BYTES_MAX:
            size = len(self.identity)
            raise errors.ConfigError(f"an identity of {size:,} bytes exceeds the limit of {IDENTITY_BYTES_MAX:,}")
        self.deadline = time.monotonic() + timeout_s
        self.nonce = os.urandom(NONCE_BYTES)

    def as_client(self) -> Identity:
        self.send(Kind.HELLO, Hello(nonce=self.nonce))
        first = self.recv(Kind.AUTH1, decode_server_proof)
        nonces = (self.nonce, self.of_the_other(first.nonce))
        self.check(first.proof, _SERVER_PROVES, *nonces)
        self.send(
            Kind.AUTH2, ClientProof(identity=self.identity, proof=self.mac(_CLIENT_PROVES, *nonces, self.identity))
        )
        last = self.recv(Kind.AUTH3, decode_server_identity)
        self.check(last.proof, _SERVER_IDENTITY, *nonces, self.identity, last.identity)
        return decode_identity(last.identity)

    def as_server(self) -> Identity:
        nonces = (self.of_the_other(self.recv(Kind.HELLO, decode_hello).nonce), self.nonce)
        self.send(Kind.AUTH1, ServerProof(nonce=self.nonce, proof=self.mac(_SERVER_PROVES, *nonces)))
        second = self.recv(Kind.AUTH2, decode_client_proof)
        self.check(second.proof, _CLIENT_PROVES, *nonces, second.identity)
        proof = self.mac(_SERVER_IDENTITY, *nonces, second.identity, self.identity)
        self.send(Kind.AUTH3, ServerIdentity(identity=self.identity, proof=proof))
        return decode_identity(second.identity)

    def mac(self, label: bytes, *parts: bytes) -> bytes:
        fields: tuple[bytes, ...] = (label, bytes([wire.VERSION]), self.store.encode(), *parts)
        if self.channel.binding:
            fields = (*fields[:3], self.channel.binding, *parts)
        # Each field after its length: no two lists of fields give the same text.
        text = b"".join(len(field).to_bytes(8, "little") + field for field in fields)
        return hmac.new(self.key, text, hashlib.sha256).digest()

    def check(self, proof: bytes, label: bytes, *parts: bytes) -> None:
        if not hmac.compare_digest(proof, self.mac(label, *parts)):
            self.refuse("does not know the store's secret, or belongs to another store")

    def of_the_other(self, nonce: bytes) -> bytes:
        if nonce == self.nonce:
            self.refuse("sent a nonce that is not its own")
        return nonce

    def send(self, kind: Kind, message: Message) -> None:
        self.channel.send(kind, 0, message, deadline_s=self.left_s())

    def recv(self, kind: Kind, decode: Decoder[T]) -> T:
        frame = self.channel.recv(timeout_s=self.left_s())
        if frame.kind is Kind.ERROR:
            # A stranger's words: neither its class nor its text may steer us.
            self.refuse("refused our proof: it has another secret, or another store's name")
        if frame.kind is not kind:
            self.refuse(f"sent {frame.kind.name} where the handshake has {kind.name}")
        try:
            return decode(frame.data)
        except errors.ProtocolError as error:
            self.refuse(f"sent a handshake that is none: {error}")

    def left_s(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def refuse(self, why: str) -> NoReturn:
        message = f"{self.channel.peer} {why}; this side serves store {self.store!r}"
        raise errors.AuthenticationError(message, peer=self.channel.peer, store=self.store)


def _run(handshake: _Handshake, side: Callable[[_Handshake], Identity]) -> Identity:
    channel = handshake.channel
    channel.authenticated = False
    try:
        identity = side(handshake)
    except errors.AuthenticationError:
        # The refusal names nothing: the other side has proved nothing.
        _send_refused(channel)
        channel.close()
        raise
    except BaseException:
        channel.close()
        raise
    channel.authenticated = True
    return identity


def _send_refused(channel: Channel) -> None:
    try:
        refused = ErrorMessage(error="AuthenticationError", message="refused", context={})
        channel.send(Kind.ERROR, 0, refused, deadline_s=0.1)
    except errors.TransportError:
        return

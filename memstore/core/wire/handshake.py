"""Either end of a connection to the other: proofs of the store's secret, and who each end is. Pure.

The only messages that a stranger may send. What each proof covers: `shell/net/auth.py`.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from memstore.core.wire.codec import Decoder, Message
from memstore.core.wire.frame import BODY_BYTES_MAX_UNAUTHENTICATED, BODY_ITEMS_MAX_UNAUTHENTICATED
from memstore.core.wire.ids import Positive, Unsigned

NONCE_BYTES = 32
Nonce = Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES, description="random, of this connection")]
Proof = Annotated[bytes, Meta(min_length=32, max_length=32, description="HMAC-SHA256 under the store's secret")]


class Hello(Message, frozen=True, tag="hello"):
    """Begin a handshake: client to server, in a HELLO frame."""

    nonce: Nonce


class ServerProof(Message, frozen=True, tag="server_proof"):
    """Prove that the server knows the secret: in an AUTH1 frame."""

    nonce: Nonce
    proof: Proof


class ClientProof(Message, frozen=True, tag="client_proof"):
    """Prove that the client knows it, and name the client: in an AUTH2 frame."""

    identity: bytes
    """An Identity as a body: the proof covers its bytes, so it is decoded only once they are proved."""
    proof: Proof


class ServerIdentity(Message, frozen=True, tag="server_identity"):
    """Name the server: in an AUTH3 frame."""

    identity: bytes
    proof: Proof


class HolderIdentity(Message, frozen=True, tag="holder"):
    """A host's holder, in one of its lives."""

    host: str
    incarnation: Unsigned


class ReaderIdentity(Message, frozen=True, tag="reader"):
    """A process that fetches chunks: a rank, or a reader of its job, on a host of the store."""

    host: str


class ControllerIdentity(Message, frozen=True, tag="controller"):
    """The controller of a term (R17)."""

    term: Positive


class ProbeIdentity(Message, frozen=True, tag="probe"):
    """A process that asks nothing: it looks whether the other end serves."""


Identity = HolderIdentity | ReaderIdentity | ControllerIdentity | ProbeIdentity

_STRANGER = {"items_max": BODY_ITEMS_MAX_UNAUTHENTICATED, "bytes_max": BODY_BYTES_MAX_UNAUTHENTICATED}
decode_hello: Decoder[Hello] = Decoder(Hello, **_STRANGER)
decode_server_proof: Decoder[ServerProof] = Decoder(ServerProof, **_STRANGER)
decode_client_proof: Decoder[ClientProof] = Decoder(ClientProof, **_STRANGER)
decode_server_identity: Decoder[ServerIdentity] = Decoder(ServerIdentity, **_STRANGER)
decode_identity: Decoder[Identity] = Decoder(Identity, **_STRANGER)

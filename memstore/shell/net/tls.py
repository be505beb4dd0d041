"""TLS below the frames of a TCP connection: both ends show a certificate of the store's own authority (R4).

Optional. It adds secrecy, and integrity against attackers in between, to auth.py's proof; auth.py's handshake still
runs, inside. Certificates are not compared with addresses, which change with every pod: any process with one that the
authority signed is let as far as auth.py, whose proofs name the server's certificate, so that the holder of another
one cannot pass a handshake on. Contexts are loaded once: a process sees a renewed certificate when it starts again.
"""

from __future__ import annotations

import hashlib
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from memstore.config import Config
from memstore.errors import ConfigError

RECORD_BYTES = 16 << 10
"""What one TLS record holds; shorter views are joined up to this, so that a header and its body are one record."""
SEND_BYTES = 256 << 10
"""Encrypted in one call, during which the other direction waits."""


@dataclass(frozen=True)
class Tls:
    """The contexts of one process for both roles, and the digest of its own certificate."""

    server: ssl.SSLContext
    client: ssl.SSLContext
    own_digest: bytes

    @classmethod
    def load(cls, config: Config) -> Tls | None:
        """Read the files in the folder that the config names; None if it names none.

        Raises:
            ConfigError: A file cannot be read or decoded, or the key is readable by others.
        """
        if config.tls_dir is None:
            return None
        cert, key, authority = (f"{config.tls_dir}/{name}.pem" for name in ("cert", "key", "ca"))
        try:
            mode = Path(key).stat().st_mode
            if mode & 0o077:
                raise ConfigError(f"{key} has mode {mode & 0o777:04o}, open to others: use 0600", field="tls_dir")
            pem = Path(cert).read_text(encoding="ascii")
            first = pem[pem.index(ssl.PEM_HEADER) : pem.index(ssl.PEM_FOOTER) + len(ssl.PEM_FOOTER)]
            return cls(
                _context(ssl.PROTOCOL_TLS_SERVER, cert, key, authority),
                _context(ssl.PROTOCOL_TLS_CLIENT, cert, key, authority),
                hashlib.sha256(ssl.PEM_cert_to_DER_cert(first)).digest(),
            )
        except (OSError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"TLS cannot be set up from tls_dir={config.tls_dir}: {error}; cert.pem, key.pem and ca.pem must be in "
                "it on every host, in PEM, the key without a password",
                field="tls_dir",
            ) from error

    def wrap(self, sock: socket.socket, *, is_server: bool) -> TlsStream:
        """Take over a connected, non-blocking socket; nothing is sent before `TlsStream.shake`."""
        context = self.server if is_server else self.client
        return TlsStream(
            context.wrap_socket(sock, server_side=is_server, do_handshake_on_connect=False), self, is_server
        )


class TlsStream:
    """What a Channel needs of a socket, over TLS: BlockingIOError when the socket must be waited for.

    OpenSSL allows one call at a time on one connection, and a Channel sends and receives in two threads: a lock keeps
    them apart. No call blocks, so neither waits long for the other.
    """

    def __init__(self, sock: ssl.SSLSocket, tls: Tls, is_server: bool) -> None:
        self._sock = sock
        self._tls, self._is_server = tls, is_server
        self._lock = threading.Lock()
        self.family = sock.family

    def shake(self) -> str | None:
        """Go on with the handshake; return None when it is done, else "read" or "write", to wait for."""
        try:
            with self._lock:
                self._sock.do_handshake()
        except ssl.SSLWantReadError:
            return "read"
        except ssl.SSLWantWriteError:
            return "write"
        return None

    def server_digest(self) -> bytes:
        """Return the SHA-256 of the server's certificate, ours or the peer's."""
        if self._is_server:
            return self._tls.own_digest
        return hashlib.sha256(self._sock.getpeercert(binary_form=True) or b"").digest()

    def sendmsg(self, views: Sequence[memoryview], ancillary: Sequence[object] = (), flags: int = 0) -> int:
        """Send the beginning of `views`; to be called with the same views again after BlockingIOError."""
        data: memoryview | bytes = views[0][:SEND_BYTES]
        if views[0].nbytes < RECORD_BYTES:
            parts, room = [], RECORD_BYTES
            for view in views:
                parts.append(view[:room])
                room -= parts[-1].nbytes
                if not room:
                    break
            data = b"".join(parts)
        return self._now(lambda: self._sock.send(data))

    def recv_into(self, view: memoryview) -> int:
        """Fill the beginning of `view`; 0 when the peer has ended the connection."""
        return self._now(lambda: self._sock.recv_into(view))

    def shutdown(self, how: int) -> None:
        """End the connection for every thread that waits in it."""
        # SSLSocket's own shutdown would let a thread that still receives read cipher text as if it were plain.
        socket.socket.shutdown(self._sock, how)

    def fileno(self) -> int:
        """Return the descriptor, for uses of the connection below TLS."""
        return self._sock.fileno()

    def setsockopt(self, level: int, option: int, value: int | bytes) -> None:
        """Set an option of the connection below TLS."""
        self._sock.setsockopt(level, option, value)

    def getsockopt(self, level: int, option: int, nbytes: int) -> bytes:
        """Read an option of the connection below TLS."""
        return self._sock.getsockopt(level, option, nbytes)

    def close(self) -> None:
        """Free the descriptor."""
        self._sock.close()

    def _now(self, work: Callable[[], int]) -> int:
        try:
            with self._lock:
                return work()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise BlockingIOError(str(error)) from None


def _context(side: int, cert: str, key: str, authority: str) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(cert, key, password=_no_password)
    context.load_verify_locations(authority)
    return context


def _no_password() -> str:
    raise ConfigError("the key in tls_dir has a password: it would have to be typed on every host", field="tls_dir")

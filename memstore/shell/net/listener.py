"""Accepts connections and hands each, once its peer is known, to a callback in a thread of its own; and connects.

TCP peers prove the store's secret (auth.py); AF_UNIX peers are known by the kernel (SO_PEERCRED). Strangers are
bounded in number and in time: when every place is taken the oldest handshake makes room, so that idle strangers cannot
keep a peer out.
"""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401  (getaddrinfo would load it on the first call, which fails without a descriptor)
import ipaddress
import logging
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from memstore import errors
from memstore.core.wire.codec import tag_of
from memstore.core.wire.handshake import HolderIdentity, Identity
from memstore.shell.net import auth
from memstore.shell.net.channel import Channel, describe_peer
from memstore.shell.net.tls import Tls

Who = TypeVar("Who")

CONNECTIONS_MAX = 4096
"""Live connections of one listener: 1000 hosts with 4 streams; each costs a thread and a descriptor."""
BACKLOG = 256
MAKE_ROOM_S = 2.0
"""How long a new connection waits for the evicted stranger's thread to leave, which a busy host may run late."""
SUN_PATH_BYTES = 107
_log = logging.getLogger(__name__)


class Process(NamedTuple):
    """The other end of an AF_UNIX connection, as the kernel knows it."""

    pid: int
    uid: int


class Listener(Generic[Who]):
    """A listening socket, its accept thread, and one daemon thread per connection.

    The callback runs until it is done with the channel, which is closed afterwards. `refused` counts connections that
    never reached it and `last_refusal` says why the last one did not.
    """

    def __init__(
        self,
        sock: socket.socket,
        handshake: Callable[[Channel], Who],
        on_channel: Callable[[Channel, Who], None],
        unauthenticated_max: int,
    ) -> None:
        self._sock = sock
        self._handshake = handshake
        self._on_channel = on_channel
        self._unauthenticated_max = unauthenticated_max
        self._room = threading.Condition()
        self._closing = threading.Event()
        self._strangers: dict[Channel, None] = {}
        self._threads: dict[threading.Thread, Channel] = {}
        self._unlink: Callable[[], None] = lambda: None
        self.refused = 0
        self.last_refusal = ""
        self.address = sock.getsockname()
        self._acceptor = threading.Thread(target=self._accept, name="memstore-accept", daemon=True)

    @staticmethod
    def tcp(
        address: str,
        port: int,
        *,
        secret: bytes | None,
        store: str,
        identity: Callable[[], Identity],
        on_channel: Callable[[Channel, Identity], None],
        tls: Tls | None = None,
        handshake_timeout_s: float = 5.0,
        unauthenticated_max: int = 64,
    ) -> Listener[Identity]:
        """Listen on an address of this machine; port 0 takes a free one, see `.address` (host, port).

        The callback gets the client's proven identity. Raises ConfigError without a secret beyond loopback, and for
        an address that cannot be bound.
        """
        family, where = _resolve(address, port)
        if secret is None and not ipaddress.ip_address(where[0]).is_loopback:
            raise errors.ConfigError(f"refusing to listen on {address} without a secret; only loopback may do without")

        def handshake(channel: Channel) -> Identity:
            until = time.monotonic() + handshake_timeout_s
            if tls is not None:
                channel.secure(tls, is_server=True, timeout_s=handshake_timeout_s)
            left_s = max(0.0, until - time.monotonic())
            return auth.authenticate_server(channel, secret, store=store, identity=identity(), timeout_s=left_s)

        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(where)
            sock.listen(BACKLOG)
        except OSError as error:
            sock.close()
            raise errors.ConfigError(f"cannot listen on {address} port {port}: {error}") from error
        return Listener(sock, handshake, on_channel, unauthenticated_max)._started()

    @staticmethod
    def unix(
        path: str | Path, *, on_channel: Callable[[Channel, Process], None], unauthenticated_max: int = 64
    ) -> Listener[Process]:
        """Listen on a socket file of mode 0600; a stale one is replaced (the caller holds the arena's lock, R2).

        Peers of another user than ours and root are refused. The callback gets the process.
        """
        path = Path(path)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            if path.exists() and not path.is_socket():
                raise errors.ConfigError(f"{path} exists and is not a socket; remove it")
            path.unlink(missing_ok=True)
            with _bindable(path) as name:
                sock.bind(name)
            # Before listen() no client can connect, so none can use a wider mode.
            path.chmod(0o600)
            sock.listen(BACKLOG)
            inode = path.stat().st_ino
        except OSError as error:
            sock.close()
            raise errors.ConfigError(f"cannot listen on {path}: {error}") from error
        except BaseException:
            sock.close()
            raise
        listener = Listener(sock, check_credentials, on_channel, unauthenticated_max)
        listener.address = str(path)
        listener._unlink = lambda: _unlink_own(path, inode)
        return listener._started()

    def close(self, *, timeout_s: float = 5.0) -> None:
        """Stop accepting, end every live channel, and wait for the threads, at most `timeout_s` together."""
        until = time.monotonic() + timeout_s
        self._closing.set()
        self._unlink()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        with self._room:
            self._room.notify_all()
        self._acceptor.join(max(0.0, until - time.monotonic()))
        self._sock.close()
        with self._room:
            threads = dict(self._threads)
        for channel in threads.values():
            channel.abort()
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))

    def __enter__(self) -> Listener[Who]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def connections(self) -> int:
        """Connections alive now, handshakes included."""
        with self._room:
            return len(self._threads)

    def _started(self) -> Listener[Who]:
        self._acceptor.start()
        return self

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                sock, _ = self._sock.accept()
            except OSError as error:
                # Out of descriptors, or a connection that was gone already: neither may stop us from serving others.
                if not self._closing.wait(0.02):
                    self._refuse("a connection", error)
                continue
            try:
                self._admit(sock)
            except (OSError, RuntimeError) as error:
                self._refuse(describe_peer(sock), error)
                sock.close()

    def _admit(self, sock: socket.socket) -> None:
        channel = Channel(sock)
        thread = threading.Thread(target=self._serve, args=(channel,), name=f"memstore {channel.peer}", daemon=True)
        with self._room:
            if len(self._strangers) >= self._unauthenticated_max:
                next(iter(self._strangers)).abort()
                self._room.wait_for(self._has_room, MAKE_ROOM_S)
            if not self._has_room():
                raise OSError(f"{len(self._strangers)} handshakes and {len(self._threads)} connections are open")
            self._strangers[channel] = None
            self._threads[thread] = channel
        try:
            thread.start()
        except RuntimeError:
            with self._room:
                self._forget(channel)
                del self._threads[thread]
            raise

    def _has_room(self) -> bool:
        return (
            not self._closing.is_set()
            and len(self._strangers) < self._unauthenticated_max
            and len(self._threads) < CONNECTIONS_MAX
        )

    def _serve(self, channel: Channel) -> None:
        try:
            try:
                identity = self._handshake(channel)
            except errors.MemstoreError as error:
                self._refuse(channel.peer, error)
                return
            with self._room:
                self._forget(channel)
            self._on_channel(channel, identity)
        except errors.ProtocolError as error:  # the peer has shown who it is: this is a mistake of ours
            _log.warning("the connection of %s is closed: %s", channel.peer, error)
        except (errors.TransportError, errors.ClosedError) as error:
            _log.debug("%s: %s", channel.peer, error)
        except OSError as error:  # the machine's, such as a full table of descriptors
            _log.warning("a connection of %s ended: %s", channel.peer, error)
        except Exception:
            _log.exception("a connection of %s ended with an error of ours", channel.peer)
        finally:
            channel.close()
            with self._room:
                self._forget(channel)
                self._threads.pop(threading.current_thread(), None)

    def _forget(self, channel: Channel) -> None:
        self._strangers.pop(channel, None)
        self._room.notify_all()

    def _refuse(self, peer: str, error: Exception) -> None:
        with self._room:
            self.refused += 1
            self.last_refusal = f"{peer}: {error}"
        _log.debug("refused %s: %s", peer, error)


def connect_tcp(
    address: str,
    port: int,
    *,
    secret: bytes | None,
    store: str,
    identity: Identity,
    timeout_s: float,
    host: str | None = None,
    tls: Tls | None = None,
) -> Channel:
    """Connect and prove both ends within `timeout_s`; AuthenticationError unless `host`, if given, is who answers.

    Raises PeerUnreachable, PeerTimeout, AuthenticationError or ProtocolError.
    """
    started = time.monotonic()
    family, where = _resolve(address, port)
    channel = _connected(family, where, f"tcp:{address}:{port}", timeout_s)
    if tls is not None:
        try:
            channel.secure(tls, is_server=False, timeout_s=max(0.0, started + timeout_s - time.monotonic()))
        except BaseException:
            channel.close()
            raise
    left_s = max(0.0, started + timeout_s - time.monotonic())
    found = auth.authenticate_client(channel, secret, store=store, identity=identity, timeout_s=left_s)
    if host is not None and not (isinstance(found, HolderIdentity) and found.host == host):
        channel.close()
        who = f"host {found.host!r}" if isinstance(found, HolderIdentity) else f"a {tag_of(found)}"
        raise errors.AuthenticationError(
            f"{who} answers at {channel.peer}, where host {host!r} is looked for: that address is out of date",
            peer=channel.peer,
            host=host,
        )
    return channel


def connect_unix(path: str | Path, *, timeout_s: float) -> Channel:
    """Connect to a holder on this machine.

    Raises PeerUnreachable, PeerTimeout, or AuthenticationError if the listener is another user's.
    """
    peer = f"unix:{path}"
    with contextlib.ExitStack() as stack:
        try:
            name = stack.enter_context(_bindable(Path(path)))
        except OSError as error:
            raise errors.PeerUnreachable(f"cannot connect to {peer}: {error}", peer=peer, eof=False) from error
        channel = _connected(socket.AF_UNIX, name, peer, timeout_s)
    try:
        check_credentials(channel)
    except errors.AuthenticationError:
        channel.close()
        raise
    return channel


def check_credentials(channel: Channel) -> Process:
    """Return the process at the other end; raises AuthenticationError unless it is our user's or root's."""
    pid, uid = channel.credentials()
    if uid not in (0, os.getuid()):
        message = f"process {pid} of user {uid} is neither ours (user {os.getuid()}) nor root's"
        raise errors.AuthenticationError(message, pid=pid, uid=uid)
    return Process(pid, uid)


def _connected(family: int, where: Any, peer: str, timeout_s: float) -> Channel:
    try:
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:  # no descriptor is left
        raise errors.PeerUnreachable(f"cannot connect to {peer}: {error}", peer=peer, eof=False) from error
    try:
        sock.settimeout(max(timeout_s, 0.001))
        sock.connect(where)
        return Channel(sock, peer=peer)
    except TimeoutError as error:
        sock.close()
        message = f"{peer}: no connection within {timeout_s} s"
        raise errors.PeerTimeout(
            message, peer=peer, operation="connect", waited_s=timeout_s, limit_s=timeout_s
        ) from error
    except OSError as error:
        sock.close()
        if isinstance(error, BlockingIOError):
            message = f"{peer}: its queue of new connections is full"
            raise errors.PeerTimeout(
                message, peer=peer, operation="connect", waited_s=0.0, limit_s=timeout_s
            ) from error
        raise errors.PeerUnreachable(f"cannot connect to {peer}: {error}", peer=peer, eof=False) from error


def _resolve(address: str, port: int) -> tuple[int, Any]:
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError) as error:
        raise errors.ConfigError(f"{address!r} is not an IP address: {error}") from error
    return found[0][0], found[0][4]


@contextlib.contextmanager
def _bindable(path: Path) -> Iterator[str]:
    """Give a name of a socket file that fits sun_path: long ones are reached through their folder's descriptor."""
    if len(os.fsencode(path)) <= SUN_PATH_BYTES:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def _unlink_own(path: Path, inode: int) -> None:
    with contextlib.suppress(OSError):
        status = path.lstat()
        if status.st_ino == inode and stat.S_ISSOCK(status.st_mode):
            path.unlink()

"""Copies shards to and from peers over several streams, every byte digested on arrival (R13, R14).

A `PeerClient` keeps a pool of authenticated connections to one holder. `send_chunks` sends what the peer lacks of a
shard that it was offered; `fetch_into` pulls chunk runs into an incoming replica. Both block, in threads of the caller.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from memstore.core.arena.replica_index import IncomingReplica
from memstore.core.arena.replica_store import Store
from memstore.core.send_gate import batches
from memstore.core.wire.codec import Request, decode_reply
from memstore.core.wire.error_message import decode_error
from memstore.core.wire.frame import Kind
from memstore.core.wire.handshake import Identity
from memstore.core.wire.ids import Endpoint, WireShard
from memstore.core.wire.peer_messages import (
    ChunksLacking,
    FetchChunks,
    HasCopy,
    ParityOf,
    Refused,
    ShardHost,
    WholeShard,
    decode_lacking,
)
from memstore.errors import PeerRefused, PeerTimeout, PeerUnreachable, ProtocolError
from memstore.shell.net.channel import BulkGate, Channel, Pacing
from memstore.shell.net.host_networks import HostNetworks
from memstore.shell.net.listener import connect_tcp
from memstore.shell.net.tls import Tls
from memstore.shell.peer.chunk_frames import (
    RUN_BYTES,
    SLOW_RUN_BYTES,
    Damage,
    receive_head,
    receive_run,
    runs,
    send_run,
)
from memstore.shell.peer.outgoing_shard import OutgoingReplica
from memstore.shell.peer.patches import offer_of, patch_runs
from memstore.shell.threads import await_ended, lower_thread_priority

CALL_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 5.0
Throttle = Callable[[int], None]
_T = TypeVar("_T")
_R = TypeVar("_R")


class PeerClient:
    """One other holder."""

    def __init__(
        self,
        host_id: str,
        endpoints: Sequence[Endpoint],
        *,
        secret: bytes,
        store: str,
        identity: Identity,
        streams: int,
        damage: Damage,
        pacing: Pacing,
        tls: Tls | None = None,
    ) -> None:
        self.host_id, self._networks = host_id, HostNetworks(endpoints)
        self._secret, self._store, self._identity = secret, store, identity
        self._streams = min(streams, os.cpu_count() or 1)  # more only take turns
        self._tls, self._pacing = tls, pacing
        self._idle: list[Channel] = []
        self._borrowed: set[Channel] = set()
        self._lock = threading.Lock()
        self._damage = damage
        self._workers = ThreadPoolExecutor(self._streams, f"memstore-peer-{host_id}", lower_thread_priority)
        self.is_closed = False
        self.sent_bytes = 0

    def close(self) -> None:
        """Drop all connections; calls under way fail."""
        with self._lock:
            self.is_closed = True
            idle, self._idle = [*self._idle, *self._borrowed], []
        for channel in idle:
            self._networks.end(channel)
        self._workers.shutdown(wait=False, cancel_futures=True)

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """Return where the holder listens."""
        return self._networks.endpoints

    @contextlib.contextmanager
    def channel(self) -> Iterator[Channel]:
        """Borrow a connection; it returns to the pool only after no error."""
        with self._lock:
            if self.is_closed:
                raise PeerUnreachable(f"host {self.host_id} is gone", host=self.host_id)
            is_new = not self._idle or self._networks.is_uneven()
            channel = None if is_new else self._idle.pop()
        channel = channel or self._pacing.enter(self._networks.dial(self._connect))
        with self._lock:
            self._borrowed.add(channel)
        try:
            yield channel
        except BaseException as exc:
            self._networks.end(channel, exc)
            if isinstance(exc, ProtocolError):
                self._damage.frame(exc)
            raise
        finally:
            with self._lock:
                self._borrowed.discard(channel)
        with self._lock:
            if not self.is_closed and len(self._idle) < self._streams:
                self._idle.append(channel)
                return
        self._networks.end(channel)

    def _connect(self, endpoint: Endpoint) -> Channel:
        return connect_tcp(
            endpoint.address,
            endpoint.port,
            secret=self._secret,
            store=self._store,
            identity=self._identity,
            timeout_s=CONNECT_TIMEOUT_S,
            host=self.host_id,
            tls=self._tls,
        )

    def connect(self) -> None:
        """Open every stream and keep it; those that are idle count."""
        with contextlib.ExitStack() as stack:
            for _ in range(self._streams):
                stack.enter_context(self.channel())

    def call(self, request: Request[_R], timeout_s: float = CALL_TIMEOUT_S) -> _R:
        """Send one request and return its reply."""
        return self._converse(lambda channel: decode_reply(request, channel.request(request, timeout_s=timeout_s).data))

    def _converse(self, work: Callable[[Channel], _T]) -> _T:
        """Run `work`, which may be repeated, on a connection.

        It is repeated once: if the connection may have gone stale while it was idle, or another network is left.
        """
        with self._lock:
            had_idle = bool(self._idle)
        try:
            with self.channel() as channel:
                return work(channel)
        except (PeerUnreachable, PeerTimeout) as exc:
            if not self._networks.has_another() and not (had_idle and isinstance(exc, PeerUnreachable)):
                raise
        self.drop_idle()
        with self.channel() as channel:
            return work(channel)

    def drop_idle(self) -> None:
        """Forget idle connections: the peer has restarted."""
        with self._lock:
            idle, self._idle = self._idle, []
        for channel in idle:
            self._networks.end(channel)

    def over_streams(
        self,
        requests: Iterable[list[int]],
        work: Callable[[list[int]], None],
        before: Callable[[list[int]], object] = lambda batch: None,
    ) -> None:
        """Run `work` on every batch over the streams; the first error is raised after all have ended.

        Once the peer was silent, batches that have not begun are left out: each would wait as long for it.
        `before` waits for a batch's chunks in the caller's thread: all pushes and fetches share the streams.
        """
        futures: list[Future[None]] = []
        silent = threading.Event()

        def unless_silent(batch: list[int]) -> None:
            try:
                if not silent.is_set():
                    work(batch)
            except PeerTimeout:
                silent.set()
                raise

        try:
            for batch in requests:
                before(batch)
                futures.append(self._workers.submit(unless_silent, batch))
        except RuntimeError as exc:  # its workers are shut down
            raise PeerUnreachable(f"host {self.host_id} is gone", host=self.host_id) from exc
        finally:
            await_ended(futures)
        for future in futures:
            if future.cancelled():  # its workers were shut down meanwhile: the peer has moved or is dead
                raise PeerUnreachable(f"host {self.host_id} is gone", host=self.host_id)
            error = future.exception()
            if error is not None:
                raise error

    # -- push ---------------------------------------------------------------------------------

    def send_chunks(
        self,
        shipment: OutgoingReplica,
        chunks: Sequence[int],
        *,
        base: Sequence[bytes],
        sender: str,
        throttle: Throttle | None,
        gate: BulkGate | None = None,
        parity: ParityOf | None = None,
    ) -> None:
        """Send those of a shard's chunks that the peer lacks, over several streams. PeerRefused, TransportError.

        Args:
            shipment: The shard; the peer has taken an offer of it.
            chunks: Indices of the chunks.
            base: The digests of a shard whose chunks may differ in little from those in their places.
            sender: This host.
            throttle: Called with the bytes of each run, to wait before it; None: they may go at once.
            gate: Lets a run's bytes out in parts.
            parity: The parity that they are added into; None: they make a copy.
        """
        send = functools.partial(self._send_batch, shipment, base, sender, throttle, gate, parity)
        if gate is None:
            self.over_streams(batches(chunks, self._streams), send, before=shipment.digests)
        else:  # one stream sends at a time, and its waits must not block others
            for batch in batches(chunks, 1):
                send(batch)

    def send_whole(
        self, shipment: OutgoingReplica, request: WholeShard, *, throttle: Throttle | None, gate: BulkGate | None = None
    ) -> HasCopy | ChunksLacking | Refused:
        """Send a shard with its manifest in one request. PeerRefused, TransportError; arguments as `send_chunks`."""

        def send(channel: Channel) -> HasCopy | ChunksLacking | Refused:
            views = [view for i in range(len(shipment.sizes)) if (view := shipment.view(i)) is not None]
            if len(views) < len(shipment.sizes):
                raise PeerRefused("one of its chunks went bad here", is_final=True)
            if throttle is not None:
                throttle(sum(shipment.sizes))
            paced = functools.partial(self._pacing.sending, channel)
            with paced() if gate is None else contextlib.nullcontext():
                frame = channel.request(request, views, timeout_s=CALL_TIMEOUT_S, gate=gate and gate.paced(paced))
            self.sent_bytes += sum(shipment.sizes)
            return decode_reply(request, frame.data)

        return self._converse(send)

    def _send_batch(
        self,
        shipment: OutgoingReplica,
        base: Sequence[bytes],
        sender: str,
        throttle: Throttle | None,
        gate: BulkGate | None,
        parity: ParityOf | None,
        batch: list[int],
    ) -> None:
        request, blocks = offer_of(shipment, base, sender, batch, parity)

        def send(channel: Channel) -> None:
            request_id = next_request_id()
            channel.send(Kind.CALL, request_id, request, deadline_s=CALL_TIMEOUT_S)
            answer = channel.recv(timeout_s=CALL_TIMEOUT_S)
            if answer.kind is Kind.ERROR:
                raise PeerRefused(str(decode_error(answer.data).rebuilt()), is_final=False)
            if answer.kind is not Kind.EVENT:
                reply = decode_reply(request, answer.data)
                why = reply.why if isinstance(reply, Refused) else "it lacks none"
                raise PeerRefused(f"host {self.host_id} wants no chunk: {why}", is_final=False)
            lacking = decode_lacking(answer.data)
            lack, patches = lacking.chunks, lacking.patches
            if not (set(batch).issuperset(lack) and blocks.keys() >= set(patches)):
                raise ProtocolError(f"{channel.peer} asks for chunks {[*lack, *patches][:64]}: not offered to it so")
            is_slow = throttle is not None or gate is not None or bool(self._pacing.bytes_per_s)
            limit_bytes = SLOW_RUN_BYTES if is_slow else RUN_BYTES
            parts = runs([shipment.sizes[i] for i in lack], limit_bytes)
            whole = (([shipment.view(i) for i in lack[part]], list[bytes]()) for part in parts)
            for views, masks in itertools.chain(whole, patch_runs(shipment, patches, blocks)):
                if None in views:
                    raise PeerRefused(f"one of the chunks {[*lack, *patches]} went bad here", is_final=True)
                nbytes = sum(view.nbytes for view in views if view is not None)
                if throttle is not None:
                    throttle(nbytes)
                paced = functools.partial(self._pacing.sending, channel)
                with paced() if gate is None else contextlib.nullcontext():
                    held = gate and gate.paced(paced)  # while it waits, its share of the pace is the others'
                    send_run(channel, request_id, views, masks, timeout_s=CALL_TIMEOUT_S, gate=held)
                self.sent_bytes += nbytes
            if channel.recv(timeout_s=CALL_TIMEOUT_S).kind is not Kind.REPLY:
                raise ProtocolError(f"{channel.peer}: a batch ended without its reply")

        self._converse(send)

    # -- fetch --------------------------------------------------------------------------------

    def fetch_bytes(self, request: FetchChunks) -> list[bytearray]:
        """Return chunks of a shard that the peer has, empty for one that it lacks. IntegrityError, TransportError."""

        def fetch(channel: Channel) -> list[bytearray]:
            found: list[bytearray] = []
            request_id = next_request_id()
            channel.send(Kind.CALL, request_id, request, deadline_s=CALL_TIMEOUT_S)
            while len(found) < len(request.chunks):
                sizes = receive_head(channel, len(request.chunks) - len(found), timeout_s=CALL_TIMEOUT_S).sizes
                data = [bytearray(nbytes) for nbytes in sizes]
                channel.recv_bulk_digests([(memoryview(each),) for each in data if each], [], timeout_s=CALL_TIMEOUT_S)
                found += data
            channel.recv(timeout_s=CALL_TIMEOUT_S)
            return found

        return self._converse(fetch)

    def fetch_into(
        self,
        replicas: Store,
        replica: IncomingReplica,
        digest: str,
        want: Sequence[int],
        others: tuple[ShardHost, ...] = (),
    ) -> list[int]:
        """Pull chunks into a replica over several streams; return the indices that came damaged or not at all.

        Where the peer has parity of the shard it decodes them, with what the hosts of the `others` have.

        Raises:
            IntegrityError: the peer does not hold the shard.
            TransportError: the connection failed; says nothing about the bytes.
            CapacityError: no room here.
        """
        bad: list[int] = []
        fetch = functools.partial(self._fetch_batch, replicas, replica, digest, others)
        self.over_streams(batches(want, self._streams), lambda batch: bad.extend(fetch(batch)))
        return bad

    def _fetch_batch(
        self, replicas: Store, replica: IncomingReplica, digest: str, others: tuple[ShardHost, ...], batch: list[int]
    ) -> list[int]:
        """Return the indices that came damaged or not at all."""

        def fetch(channel: Channel) -> list[int]:
            bad: list[int] = []
            want = [i for i in batch if replica.slots[i] is None]
            request = FetchChunks(shard=WireShard.of(replica.shard), digest=digest, chunks=tuple(want), others=others)
            request_id = next_request_id()
            channel.send(Kind.CALL, request_id, request, deadline_s=CALL_TIMEOUT_S)
            while want:
                run = receive_run(
                    channel,
                    replicas,
                    replica,
                    want,
                    take=replicas.take_slots_growing,
                    damage=self._damage,
                    timeout_s=CALL_TIMEOUT_S,
                )
                bad += run.bad
                want = want[run.answered :]
            channel.recv(timeout_s=CALL_TIMEOUT_S)
            return bad

        return self._converse(fetch)


_request_ids = iter(range(1, 1 << 62))
_request_lock = threading.Lock()


def next_request_id() -> int:
    """Return a number unique in this process."""
    with _request_lock:
        return next(_request_ids)


class RateLimit:
    """Sleeps so that at most `bytes_per_s` pass; for repair and scrub (R29, R30)."""

    def __init__(self, bytes_per_s: float, stop: threading.Event) -> None:
        self.bytes_per_s, self._stop = bytes_per_s, stop
        self._due_s = time.monotonic()
        self._lock = threading.Lock()

    def __call__(self, nbytes: int) -> None:
        with self._lock:
            now = time.monotonic()
            self._due_s = max(self._due_s, now - 0.1) + nbytes / self.bytes_per_s
            wait_s = self._due_s - now
        if wait_s > 0:
            self._stop.wait(wait_s)

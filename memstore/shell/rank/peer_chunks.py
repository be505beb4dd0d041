"""Chunks that holders of other hosts send this process, each received straight to where its bytes go (R4, R26).

    asked for, batch by batch over several streams --its digest is right--> there
      '--it is lacking, damaged or late, or the connection fails--> left to the reader, whose holder brings it

The process proves the store's secret as a holder does. Connections are opened for one read and end with it.
"""

from __future__ import annotations

import _thread
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memstore.config import Config
from memstore.core.format import layout
from memstore.core.format.manifest import Manifest
from memstore.core.send_gate import batches
from memstore.core.wire.error_message import decode_error
from memstore.core.wire.frame import Kind
from memstore.core.wire.handshake import ReaderIdentity
from memstore.core.wire.ids import Endpoint, WireShard
from memstore.core.wire.peer_messages import FetchChunks, decode_run
from memstore.core.wire.replies import ChunksElsewhere
from memstore.errors import MemstoreError, PeerTimeout, ProtocolError
from memstore.shell.arena.folder import read_secret
from memstore.shell.net.channel import Channel
from memstore.shell.net.host_networks import HostNetworks
from memstore.shell.net.listener import connect_tcp
from memstore.shell.net.tls import Tls
from memstore.shell.threads import Answer, answer_of

if TYPE_CHECKING:
    from memstore.shell.codec.verified_stream import Targets  # imports torch, which the command line does without

log = logging.getLogger("memstore")
CONNECT_S = 5.0
AVOID_S = 60.0  # for which a host that did not answer is not dialled: each read would wait CONNECT_S (D259)
SILENT_S = 10.0  # for one chunk; what has not come by then the holder brings, which knows who is dead


class Dialler:
    """Connects this process to holders of other hosts."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        """Take the folder of this host's arena, and the settings of the running store."""
        self._folder, self._store = folder, str(settings["store"])
        self._config = Config(interface=settings.get("interface"), tls_dir=settings.get("tls_dir"))
        self._tls: Tls | None = None

    @property
    def streams(self) -> int:
        """Return how many connections a read opens to one host: more than cores only take turns."""
        return min(self._config.streams, os.cpu_count() or 1)

    def connect(self, host: str, endpoint: Endpoint) -> Channel:
        """Open a connection to a holder. TransportError, or ConfigError for files of TLS that this user cannot use."""
        if self._tls is None and self._config.tls_dir is not None:
            self._tls = Tls.load(self._config)
        return connect_tcp(
            endpoint.address,
            endpoint.port,
            secret=read_secret(self._folder),
            store=self._store,
            identity=ReaderIdentity(host=self._folder.name),
            timeout_s=CONNECT_S,
            host=host,
            tls=self._tls,
        )


class PeerChunks:
    """The chunks of one shard that this process fetches; `close` ends all waits."""

    def __init__(
        self,
        dialler: Dialler,
        manifest: Manifest,
        digest: str,
        rows: Sequence[ChunksElsewhere],
        networks: Mapping[str, HostNetworks],
    ) -> None:
        self._dialler, self._manifest, self._digest, self._networks = dialler, manifest, digest, networks
        self._host_of = {
            index: row.host
            for row in rows
            for part in row.chunks
            for index in range(part.first, part.first + part.count)
        }
        self._idle: dict[str, list[Channel]] = {row.host: [] for row in rows}
        self._open: dict[Channel, str] = {}  # the host of each connection
        self._lock = threading.Lock()
        self._is_closed = False
        self.damaged_count = self.broken_frames = 0  # what arrived otherwise than it was sent
        self.silent_hosts: set[str] = set()  # did not answer when they were dialled

    def has_source_of(self, index: int) -> bool:
        """Say whether a chunk is fetched from another host, which answers as far as is known."""
        host = self._host_of.get(index)
        return host is not None and host not in self.silent_hosts

    @contextmanager
    def fetching(self, indices: Sequence[int], targets: Targets) -> Iterator[Callable[[], list[int]]]:
        """Fetch chunks in threads; the given function waits for the end and returns those that are not there.

        An exception in the block ends the fetch: no byte is written after it.
        """
        by_host: dict[str, list[int]] = {}
        for index in indices:
            by_host.setdefault(self._host_of[index], []).append(index)
        lacking: Future[list[int]] = Answer()
        turn = _thread.allocate_lock()  # held while anything is fetched

        def fetch() -> None:
            with turn:
                try:
                    lacking.set_result([] if self._is_closed else self._fetch(by_host, targets))
                except BaseException as exc:
                    lacking.set_exception(exc)

        try:
            # In a thread that no signal's handler interrupts: the pool's waits would be torn (D152).
            _thread.start_new_thread(fetch, ())
            yield lambda: answer_of(lacking)
            lacking.exception()
        except BaseException:
            self.close()
            with turn:
                raise

    def _fetch(self, by_host: Mapping[str, Sequence[int]], targets: Targets) -> list[int]:
        jobs: list[Future[list[int]]] = []
        count = len(by_host) * self._dialler.streams
        with ThreadPoolExecutor(max(1, count), thread_name_prefix="memstore-fetch") as workers:
            for host, wanted in by_host.items():
                todo = deque(batches(wanted, self._dialler.streams))
                streams = range(min(self._dialler.streams, len(todo)))
                jobs += [workers.submit(self._stream, host, todo, targets) for _ in streams]
        there = {index for job in jobs for index in job.result()}
        return sorted(index for wanted in by_host.values() for index in wanted if index not in there)

    def close(self) -> None:
        """End every connection; any thread may call, more than once."""
        with self._lock:
            self._is_closed = True
            channels, self._open = self._open, {}
        for channel, host in channels.items():
            self._networks[host].end(channel)

    def _stream(self, host: str, todo: deque[list[int]], targets: Targets) -> list[int]:
        """Fetch batches over one connection until none is left or it fails; return the chunks that are there."""
        done: list[int] = []
        try:
            with self._channel(host) as channel:
                while (batch := _next(todo)) is not None:
                    self._batch(channel, batch, targets, done)
        except MemstoreError as exc:
            if isinstance(exc, ProtocolError):
                with self._lock:
                    self.broken_frames += 1
            if not self._is_closed:
                log.warning("memstore: chunks of host %s are brought by this host's holder instead: %s", host, exc)
        return done

    @contextmanager
    def _channel(self, host: str) -> Iterator[Channel]:
        with self._lock:
            channel = self._idle[host].pop() if self._idle[host] else None
        if channel is None:
            channel = self._dial(host)
            with self._lock:
                self._open[channel] = host
                is_closed = self._is_closed
            if is_closed:
                self._networks[host].end(channel)
        try:
            yield channel
        except BaseException as exc:
            self._networks[host].end(channel, exc)
            raise
        with self._lock:
            self._idle[host].append(channel)

    def _dial(self, host: str) -> Channel:
        try:
            return self._networks[host].dial(partial(self._dialler.connect, host))
        except PeerTimeout:
            with self._lock:
                self.silent_hosts.add(host)
            raise

    def _batch(self, channel: Channel, batch: Sequence[int], targets: Targets, done: list[int]) -> None:
        request = FetchChunks(shard=WireShard.of(self._manifest.shard), digest=self._digest, chunks=tuple(batch))
        channel.send(Kind.CALL, 1, request, deadline_s=SILENT_S)
        left = deque(batch)
        while left:
            taken = [(left.popleft(), size) for size in self._sizes(channel, len(left))]
            due = [(index, size) for index, size in taken if size]  # 0: the chunk is lacking
            for run in layout.batches(due, lambda item: item[1], targets.call_bytes):
                self._receive(channel, run, targets, done)
        channel.recv(timeout_s=SILENT_S)

    def _sizes(self, channel: Channel, count: int) -> tuple[int, ...]:
        """Receive the next frame's header; return the sizes of the chunks that follow, 0 for one that is lacking."""
        frame = channel.recv(timeout_s=SILENT_S)
        if frame.kind is Kind.ERROR and not frame.bulk_bytes:
            raise decode_error(frame.data).rebuilt()
        if frame.kind is not Kind.CHUNK:
            raise ProtocolError(f"{channel.peer}: {frame.kind.name} where up to {count} chunks were due")
        sizes = decode_run(frame.data).sizes
        if not 0 < len(sizes) <= count or sum(sizes) != frame.bulk_bytes:
            raise ProtocolError(
                f"{channel.peer}: a run of {len(sizes)} chunks in {frame.bulk_bytes} bytes, where up to {count} chunks "
                "were due"
            )
        return sizes

    def _receive(self, channel: Channel, run: Sequence[tuple[int, int]], targets: Targets, done: list[int]) -> None:
        """Receive the next chunks (index, nbytes) of a frame; add those to `done` that have the manifest's digest."""
        chunks = [self._manifest.chunks[index] for index, _ in run]
        for (index, size), chunk in zip(run, chunks, strict=True):
            if size != chunk.nbytes:
                raise ProtocolError(f"{channel.peer}: chunk {index} has {size} bytes, the manifest says {chunk.nbytes}")
        into = [targets.of(index, size) for index, size in run]
        digests: list[bytes] = []
        try:
            channel.recv_bulk_digests([target.views for target in into], digests, timeout_s=SILENT_S)
        finally:
            for (index, _), chunk, target, digest in zip(run, chunks, into, digests, strict=False):
                if digest == chunk.digest:
                    target.finish()
                    done.append(index)
                else:
                    self._note_damaged(channel, index)

    def _note_damaged(self, channel: Channel, index: int) -> None:
        with self._lock:
            self.damaged_count += 1
        log.warning("memstore: chunk %d of %s arrived damaged from %s", index, self._manifest.shard, channel.peer)


class Fetches:
    """The fetches of one link's process, which an interruption ends for good, and what they learn of other hosts."""

    def __init__(self) -> None:
        self._open: set[PeerChunks] = set()
        self._lock = threading.Lock()
        self._is_over = False
        self._avoided_until_s: dict[str, float] = {}  # by host
        self._networks: dict[str, HostNetworks] = {}  # by host

    def reachable(self, rows: Iterable[ChunksElsewhere]) -> list[ChunksElsewhere]:
        """Return the rows of hosts that are not avoided: what the others have this host's holder brings."""
        with self._lock:
            return [row for row in rows if self._avoided_until_s.get(row.host, 0.0) < time.monotonic()]

    def networks_of(self, rows: Sequence[ChunksElsewhere]) -> dict[str, HostNetworks]:
        """Return the networks of these hosts, with what earlier fetches learned of them."""
        with self._lock:
            for row in rows:
                known = self._networks.get(row.host)
                if known is None or known.endpoints != row.endpoints:
                    self._networks[row.host] = HostNetworks(row.endpoints)
            return {row.host: self._networks[row.host] for row in rows}

    def begin(self, fetch: PeerChunks) -> None:
        """Have a fetch ended with the others."""
        with self._lock:
            self._open.add(fetch)
            is_over = self._is_over
        if is_over:
            fetch.close()

    def end(self, fetch: PeerChunks) -> None:
        """End a fetch."""
        with self._lock:
            self._open.discard(fetch)
            self._avoided_until_s.update(dict.fromkeys(fetch.silent_hosts, time.monotonic() + AVOID_S))
        fetch.close()

    def close(self) -> None:
        """End all fetches, also those to come."""
        with self._lock:
            self._is_over = True
            fetches, self._open = list(self._open), set()
        for fetch in fetches:
            fetch.close()


def _next(todo: deque[list[int]]) -> list[int] | None:
    """Take a batch; None if another stream took the last one."""
    try:
        return todo.popleft()
    except IndexError:
        return None

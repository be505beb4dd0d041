"""Keeps what procedures of core/holder ask for by calls that block, and runs procedures on threads.

A procedure never suspends: the thread that runs it holds the lock of the state, gives it up while a call of this port
blocks, and wakes the procedures that wait for a change of the state. So one at a time touches the state, while calls of
several run side by side.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from memstore.core.arena.replica_index import IncomingReplica, StoredReplica
from memstore.core.arena.slot_table import Owner, PeerShare
from memstore.core.durable.increments import Origins
from memstore.core.durable.slice_format import SliceHeader, slice_range
from memstore.core.durable.states import WRITES_AT_ONCE
from memstore.core.format.manifest import chunk_digest
from memstore.core.holder import holder_io, orders
from memstore.core.holder.holder_io import (
    CALL_TIMEOUT_S,
    HolderIo,
    Lane,
    Link,
    PushSource,
    Stop,
    Storage,
    StreamingSource,
    WholeReply,
)
from memstore.core.holder.puts import seal
from memstore.core.schedule import take_turn
from memstore.core.wire.codec import Request
from memstore.core.wire.orders import DurablePlace, Lineage
from memstore.core.wire.peer_messages import ParityOf, ShardHost, WholeShard
from memstore.core.wire.rank_messages import HolderEvent, PutReady, SlotSample, Welcome
from memstore.core.wire.replies import HostVerified
from memstore.core.wire.reports import MarkersFound
from memstore.errors import IntegrityError, TransportError
from memstore.shell.arena.mapping import differing
from memstore.shell.durable.tier import PartsTier, open_tier
from memstore.shell.holder.context import HolderContext, RankConnection, RankConnections
from memstore.shell.holder.pending_calls import Calls, TrainedSteps
from memstore.shell.holder.scrub import Scrubber
from memstore.shell.holder.send_gate import SendGate
from memstore.shell.peer.client import PeerClient, RateLimit
from memstore.shell.peer.outgoing_shard import OutgoingReplica, StreamingReplica
from memstore.shell.peer.parity import ParityServer
from memstore.shell.threads import OwnThreads, await_ended, lower_thread_priority
from recovery.inventory import DurableMarker, ShardId, ShardSpec, SliceRef, StepId

# -- put timings --------------------------------------------------------------------------------------
# Collects what this host's ranks measured of their puts, for metrics; no put waits for it (R11).


KEPT = 4096  # puts that the metrics have not counted yet; without metrics they are never counted


@dataclass(frozen=True, slots=True)
class TimedPut:
    """One put of one rank, sealed here."""

    job: str
    stall_s: float
    nbytes: int


class PutMeter:
    """The puts since the last `take`; any thread may use it."""

    def __init__(self) -> None:
        self._puts: deque[TimedPut] = deque(maxlen=KEPT)

    def count(self, job: str, stall_s: float, nbytes: int) -> None:
        """Count a put that was sealed."""
        self._puts.append(TimedPut(job, stall_s, nbytes))

    def take(self) -> list[TimedPut]:
        """Return the puts since the last call."""
        taken = []
        while self._puts:
            taken.append(self._puts.popleft())
        return taken


# -- blocking io --------------------------------------------------------------------------------------


P = ParamSpec("P")
T = TypeVar("T")
Procedure = Callable[Concatenate[HolderIo, P], Coroutine[Any, Any, T]]
log = logging.getLogger("memstore")
RANGE_THREADS = 16  # of durable storage, over all shards: an object store is fast only by many requests at once
DIGEST_THREADS = min(4, os.cpu_count() or 1)  # two fill a small machine's memory bus
SIDE_THREADS, ORDER_THREADS, PUSH_THREADS, READ_THREADS = 8, 4, 8, 8
LIST_THREADS = 2  # apart from the writers: a stuck write must not keep a restore from listing markers


class BlockingIo:
    """The port of one holder's procedures, and the lock of its state."""

    def __init__(
        self,
        context: HolderContext,
        connections: RankConnections,
        send_gate: SendGate,
        calls: Calls,
        trained: TrainedSteps,
        scrubber: Scrubber,
        parity: ParityServer,
    ) -> None:
        self.parity = parity
        self.context, self.replicas, self._changed = context, context.replicas, context.changed
        self.connections, self.send_gate, self.calls = connections, send_gate, calls
        self.trained, self.scrubber, self.meter = trained, scrubber, PutMeter()
        self._beside = ThreadPoolExecutor(SIDE_THREADS, "memstore-source")
        self._connectors = ThreadPoolExecutor(ORDER_THREADS, "memstore-connect")
        self._ranges = ThreadPoolExecutor(RANGE_THREADS, "memstore-range")
        self._digesters = ThreadPoolExecutor(DIGEST_THREADS, "memstore-digest")
        self._lanes: dict[str, ThreadPoolExecutor | OwnThreads] = {
            "fence": ThreadPoolExecutor(ORDER_THREADS, "memstore-fence"),
            "room": ThreadPoolExecutor(1, "memstore-reserve"),
            "drop": ThreadPoolExecutor(ORDER_THREADS, "memstore-drop"),
            "verify": ThreadPoolExecutor(1, "memstore-verify"),
            "push": ThreadPoolExecutor(PUSH_THREADS, "memstore-push", lower_thread_priority),
            "repair": ThreadPoolExecutor(PUSH_THREADS, "memstore-repair", lower_thread_priority),
            "read": ThreadPoolExecutor(READ_THREADS, "memstore-read"),
            "write": OwnThreads(WRITES_AT_ONCE, "memstore-persist", lower_thread_priority),
            "list": OwnThreads(LIST_THREADS, "memstore-markers"),
        }
        self._repair_limit = RateLimit(context.config.repair_bytes_per_s, context.stopping)
        self._free_s: dict[str, float] = {}  # job -> when its next slice may begin

    def close(self) -> None:
        """Begin nothing more, and abandon the durable writes under way."""
        with self.state():
            for stop in self.context.state.stops.values():
                stop.is_set = True
        for pool in (self._beside, self._connectors, self._ranges, self._digesters):
            pool.shutdown(wait=False, cancel_futures=True)
        for lane in self._lanes.values():
            if isinstance(lane, OwnThreads):
                lane.close()
            else:
                lane.shutdown(wait=False, cancel_futures=True)

    # -- procedures -----------------------------------------------------------------------------

    @contextmanager
    def state(self) -> Iterator[None]:
        """Hold the lock for a moment, to read or change the state between the steps of procedures."""
        with self._changed:
            try:
                yield
            finally:
                self._changed.notify_all()

    def wake(self) -> None:
        """Let procedures look again at what they wait for: something other than the state has changed."""
        with self.state():
            pass

    def run(self, procedure: Procedure[P, T], *args: P.args, **named: P.kwargs) -> T:
        """Run a procedure to its end on this thread and return its result; raise its errors here."""
        return self.finish(procedure(self, *args, **named))

    def finish(self, steps: Coroutine[Any, Any, T]) -> T:
        """Run a procedure that was made already."""
        with self.state():
            try:
                steps.send(None)
            except StopIteration as end:
                return cast(T, end.value)
        raise RuntimeError("a procedure awaited something that is not of its port")

    def start(self, lane: Lane, procedure: Procedure[P, None], *args: P.args, **named: P.kwargs) -> None:
        """Run a procedure on a thread of a lane; a failure is logged. After `close` nothing begins."""

        def work() -> None:
            try:
                self.run(procedure, *args, **named)
            except Exception:
                log.exception("host %s: %s failed", self.context.host_id, procedure.__qualname__)

        pool = self._lanes[lane.kind]
        if isinstance(pool, OwnThreads):
            pool.submit(lane.key, work)
        else:
            with contextlib.suppress(RuntimeError):  # the holder ends
                pool.submit(work)

    @contextmanager
    def _released(self) -> Iterator[None]:
        """Give the lock up for a call that may block."""
        self._changed.notify_all()
        self._changed.release()
        try:
            yield
        finally:
            self._changed.acquire()

    @contextmanager
    def _at_storage(self) -> Iterator[None]:
        """As `_released`; a panic in obstore's native code, which is no Exception, is raised as a RuntimeError."""
        with self._released():
            try:
                yield
            except Exception:
                raise
            except BaseException as exc:
                raise RuntimeError(repr(exc)) from exc

    # -- time -----------------------------------------------------------------------------------

    async def sleep(self, seconds: float) -> None:
        """As in HolderIo."""
        with self._released():
            self.context.stopping.wait(seconds)

    async def wait_for(self, is_there: Callable[[], bool], limit_s: float | None = None) -> bool:
        """As in HolderIo."""
        self._changed.notify_all()
        return self._changed.wait_for(is_there, limit_s)

    async def together(self, work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        """As in HolderIo: on other threads.

        Returning before all have ended would let one still write into an incoming replica that was given up.
        """
        with self._released():
            try:
                futures = [self._beside.submit(self.finish, steps) for steps in work]
                await_ended(futures)
            finally:
                for steps in work:
                    if inspect.getcoroutinestate(steps) == inspect.CORO_CREATED:  # the holder ended before it began
                        steps.close()
            return [future.result() for future in futures]

    # -- other holders --------------------------------------------------------------------------

    async def reach(self, host: str) -> PeerClient:
        """As in HolderIo."""
        with self._released():
            return self.context.peers.peer(host)

    async def begin_connect(self, job: str) -> Callable[[], bool]:
        """As in HolderIo."""
        targets = self.context.state.shared_shards.all_targets(job)
        connecting = self._connectors.submit(self.context.logged, self._connect, job, targets)
        connecting.add_done_callback(lambda _: self.wake())
        return connecting.done

    def _connect(self, job: str, targets: Sequence[str]) -> None:
        for target in targets:
            try:
                self.context.peers.peer(target).connect()
            except TransportError as exc:
                log.info("job %s: host %s cannot be reached yet: %s", job, target, exc)

    async def call_peer(self, peer: holder_io.Peer, request: Request[T], *, limit_s: float = CALL_TIMEOUT_S) -> T:
        """As in HolderIo."""
        with self._released():
            return cast(PeerClient, peer).call(request, timeout_s=limit_s)

    async def send_chunks(
        self,
        peer: holder_io.Peer,
        source: PushSource,
        chunks: Sequence[int],
        *,
        base: Sequence[bytes],
        is_repair: bool,
        parity: ParityOf | None = None,
    ) -> None:
        """As in HolderIo."""
        shipment = cast(OutgoingReplica, source)
        with self._released():
            gate = None if is_repair else self.send_gate.sending(shipment)
            throttle = self._repair_limit if is_repair else None
            sender, to = self.context.host_id, cast(PeerClient, peer)
            to.send_chunks(shipment, chunks, base=base, sender=sender, throttle=throttle, gate=gate, parity=parity)

    async def send_whole(
        self, peer: holder_io.Peer, source: PushSource, request: WholeShard, *, is_repair: bool
    ) -> WholeReply:
        """As in HolderIo."""
        shipment = cast(OutgoingReplica, source)
        with self._released():
            gate = None if is_repair else self.send_gate.sending(shipment)
            throttle = self._repair_limit if is_repair else None
            return cast(PeerClient, peer).send_whole(shipment, request, throttle=throttle, gate=gate)

    async def receive_chunks(
        self,
        peer: holder_io.Peer,
        replica: IncomingReplica,
        digest: str,
        chunks: Sequence[int],
        others: tuple[ShardHost, ...] = (),
    ) -> list[int]:
        """As in HolderIo."""
        with self._released():
            return cast(PeerClient, peer).fetch_into(self.replicas, replica, digest, chunks, others)

    async def decode_chunks(
        self, replica: IncomingReplica, digest: str, chunks: Sequence[int], others: tuple[ShardHost, ...]
    ) -> list[int]:
        """As in HolderIo."""
        with self._released():
            return self.parity.decode_into(replica, digest, chunks, others)

    # -- durable storage ------------------------------------------------------------------------

    async def read_durable_manifest(self, place: DurablePlace, shard: ShardId, spec: ShardSpec) -> bytes:
        """As in HolderIo."""
        with self._released():
            return open_tier(place).read_manifest(shard, spec)

    async def receive_durable(
        self, place: DurablePlace, replica: IncomingReplica, spec: ShardSpec, chunks: Sequence[int]
    ) -> list[int]:
        """As in HolderIo."""
        with self._released():
            problems: list[str] = []
            read = functools.partial(self._read_durable, open_tier(place), replica, spec, problems)
            futures = [self._ranges.submit(read, index, spec.chunk_nbytes(index)) for index in chunks]
            await_ended(futures)  # none may still write to the incoming replica when it is given up
            if problems:  # the plan goes on without: only here it is known why
                log.warning("durable storage lacks %d chunks of %s: %s", len(problems), replica.shard, problems[0])
            return [index for future in futures for index in future.result()]

    def _read_durable(
        self, tier: PartsTier, replica: IncomingReplica, spec: ShardSpec, problems: list[str], index: int, nbytes: int
    ) -> list[int]:
        """Read one chunk; return [index], and add to `problems`, if it is not there as it was put, else []."""
        number = self.replicas.take_slots_growing(1)[0]
        view = self.replicas.arena.view(number, nbytes)
        try:
            tier.read_chunk_into(replica.shard, spec, index, view)
        except IntegrityError as exc:
            self.replicas.give_back([number])
            problems.append(str(exc))
            return [index]
        except BaseException:
            self.replicas.give_back([number])
            raise
        return self.replicas.keep_chunks(replica, [(index, number, nbytes, chunk_digest(view))])

    async def open_durable(self, place: DurablePlace) -> Storage:
        """As in HolderIo."""
        with self._released():
            return open_tier(place)

    async def slice_turn(self, job: str, nbytes: int, bytes_per_s: int | None) -> float:
        """As in HolderIo."""
        return take_turn(self._free_s, job, time.monotonic(), nbytes, bytes_per_s)

    async def copy_slice(self, stored: StoredReplica, number: int) -> tuple[list[bytes], int | None]:
        """As in HolderIo."""
        chunks: list[bytes] = []
        with self._released():
            for index in slice_range(stored.spec, number):
                view = self.replicas.chunk_view(stored, index)
                chunk = bytes(view) if view is not None else None  # digested after it left the slot (R7)
                if chunk is None or chunk_digest(chunk) != stored.digests[index]:
                    return [], index
                chunks.append(chunk)
        return chunks, None

    async def write_slice(
        self,
        storage: Storage,
        shard: ShardId,
        spec: ShardSpec,
        number: int,
        manifest: bytes,
        chunks: Sequence[bytes],
        stop: Stop,
        origins: Origins = (),
    ) -> bool:
        """As in HolderIo."""
        with self._at_storage():
            nbytes = cast(PartsTier, storage).write_slice(
                shard, spec, number, manifest, chunks, should_stop=lambda: stop.is_set, origins=origins
            )
        return nbytes is not None

    async def read_slice_headers(
        self, storage: Storage, shard: ShardId, spec: ShardSpec, number: int, ref: SliceRef
    ) -> dict[SliceRef, SliceHeader]:
        """As in HolderIo."""
        with self._at_storage():
            return cast(PartsTier, storage).read_headers(shard, spec, number, ref)

    async def store_marker(self, place: DurablePlace, job: str, marker: DurableMarker, lineage: Lineage) -> None:
        """As in HolderIo."""
        with self._at_storage():
            open_tier(place).write_marker(job, marker, lineage)

    async def remove_durable(self, place: DurablePlace, job: str, step: StepId, *, only_unmarked: bool) -> None:
        """As in HolderIo."""
        with self._at_storage():
            open_tier(place).remove_step(job, step, only_unmarked=only_unmarked)

    async def sweep_durable(self, place: DurablePlace, job: str, keep: Collection[StepId]) -> None:
        """As in HolderIo."""
        with self._at_storage():
            open_tier(place).sweep(job, keep)

    async def read_markers(self, place: DurablePlace, job: str, check: StepId | None) -> MarkersFound:
        """As in HolderIo."""
        with self._at_storage():
            tier = open_tier(place)
            records, problems = tier.marker_records(job)
            lacks = "" if check is None else tier.lacks(job, check)
            rows = tuple(record.row for record in records)
            return MarkersFound(markers=rows, key=tier.key, damaged="; ".join(problems), lacks=lacks)

    # -- this host's memory ---------------------------------------------------------------------

    async def on_store(self, call: Callable[[], T]) -> T:
        """As in HolderIo."""
        with self._released():
            return call()

    async def claim_room(self, job: str, share: PeerShare) -> None:
        """As in HolderIo."""
        with self._released():
            self.replicas.claim(job, share)

    async def verify(self, stored: StoredReplica, chunks: frozenset[int] | None = None) -> list[int]:
        """As in HolderIo."""
        with self._released():
            return self.replicas.verify(stored, self._digesters.map, chunks)

    async def verify_copies(self, job: str | None) -> HostVerified:
        """As in HolderIo."""
        with self._released():
            return self.scrubber.verify_all(job)

    async def open_incoming(
        self,
        name: str,
        shard: ShardId,
        digests: Sequence[bytes],
        sizes: Sequence[int],
        attempt: int,
        chunks: tuple[int, ...] | None = None,
    ) -> IncomingReplica:
        """As in HolderIo."""
        with self._released():
            return self.replicas.open_incoming(name, shard, digests, sizes, attempt, chunks)

    async def verify_slots(self, slots: Sequence[int]) -> None:
        """As in HolderIo."""
        with self._released():
            self.replicas.verify_slots(slots, self._digesters.map)

    # -- what is sent ---------------------------------------------------------------------------

    async def read_manifest(self, source: PushSource) -> bytes:
        """As in HolderIo."""
        with self._released():
            return cast(OutgoingReplica, source).manifest()

    async def await_digest(self, source: StreamingSource) -> str:
        """As in HolderIo."""
        with self._released():
            return cast(StreamingReplica, source).sealed().spec.digest

    # -- puts -----------------------------------------------------------------------------------

    async def compare_sample(self, slots: Sequence[int], nbytes: int, seen: SlotSample) -> list[int]:
        """As in HolderIo."""
        with self._released():
            return differing(self.replicas.arena.mapping, slots, nbytes, seen)

    async def open_fresh(
        self, shard: ShardId, slots: Sequence[int], sizes: Sequence[int], digests: Sequence[bytes] | None
    ) -> StreamingSource:
        """As in HolderIo."""
        return StreamingReplica(self.replicas, shard, slots, sizes, digests)

    async def release_sends(self, shard: ShardId) -> None:
        """As in HolderIo."""
        self.send_gate.release(shard.job, shard.rank, (shard.attempt, shard.step))

    async def digest_and_store(self, shard: ShardId, ready: PutReady, fresh: StreamingSource) -> StoredReplica:
        """As in HolderIo."""
        with self._released():
            stored = self.replicas.seal_local(
                shard,
                world_size=ready.terms.world_size,
                layout=ready.layout,
                nbytes=ready.nbytes,
                slots=ready.slots,
                attempt=shard.attempt,
                given=seal.given_digests(ready),
                follower=fresh if isinstance(fresh, StreamingReplica) else None,
            )
        self.meter.count(shard.job, ready.stall_s, ready.nbytes)
        return stored

    # -- ranks, and people ----------------------------------------------------------------------

    async def send_welcome(self, link: Link, stale: Sequence[int]) -> None:
        """As in HolderIo."""
        config = self.context.config
        welcome = Welcome(
            stale=tuple(stale),
            arena=self.replicas.arena.identity,
            chunk_bytes=self.replicas.chunk_bytes,
            store=config.store_fields(),
            job_defaults=config.job_defaults(),
        )
        with self._released():
            cast(RankConnection, link).send(welcome)

    async def send_to_rank(self, link: Link, message: HolderEvent) -> None:
        """As in HolderIo."""
        with self._released():
            cast(RankConnection, link).send(message)

    async def grant(self, link: Link) -> None:
        """As in HolderIo."""
        with self._released():
            self.connections.grant(cast(RankConnection, link))

    async def close_link(self, link: Link) -> None:
        """As in HolderIo."""
        with self._released():
            cast(RankConnection, link).channel.abort()

    async def forget_process(self, owner: Owner) -> None:
        """As in HolderIo."""
        self.calls.forget(owner)
        self.start(Lane("room"), orders.release, self.context.state)

    async def forget_job(self, job: str) -> None:
        """As in HolderIo."""
        self.trained.forget(job)

    async def warn(self, text: str) -> None:
        """As in HolderIo."""
        log.warning("%s", text)

    async def unexpected(self, what: str, error: Exception) -> None:
        """As in HolderIo."""
        if isinstance(error, OSError):  # the machine's, such as a full table of descriptors: no bug of ours
            log.error("%s: %s", what, error)
        else:
            log.error("%s", what, exc_info=error)

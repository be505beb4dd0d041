"""A real controller among thousands of hosts: its loop, its queues, its packing and its sockets.

No process behind them.

Every session is a socket pair whose far end another process reads and counts. What a holder would answer is made here,
from what the catalog orders, and comes back as a packed body that is unpacked like any other; the processor time of
that is not the controller's, and is taken off. Read `bench_controller.py` for what is asked of it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import xxhash

from memstore.config import Config
from memstore.core.journal.records import journal_after, whole_order
from memstore.core.wire.codec import encode, encode_frame
from memstore.core.wire.frame import Kind
from memstore.core.wire.ids import Endpoint, WireCopy, WireShard, WireSpec
from memstore.core.wire.messages import Action, AnswerCall, LeaseRenewed, LogLine, SendOrder
from memstore.core.wire.orders import DropJob, Fence, FreeCopies, FreeStep, PushTargets, Reserve, WriteJournal
from memstore.core.wire.reports import (
    FactsWritten,
    Fenced,
    Freed,
    Heartbeat,
    HolderMessage,
    HostInventory,
    Reserved,
    Sealed,
    StepFreed,
    decode_holder_message,
)
from memstore.shell.controller import Controller, FromInside, Session
from memstore.shell.net.channel import Channel
from memstore.testing.controller.holder import host_stats

JOB = "train"
RANKS_PER_HOST = 8
CHUNK_BYTES, CHUNKS = 4 << 20, 64  # of every shard
SILENCE_S = 300.0  # where no host beats: time is not what is measured
QUIET_S = 0.05  # nothing was sent for this long, and nothing waits: the controller is done
DEADLINE_S = 80.0
READ_BYTES = 1 << 20
BEATS_EVERY_S = 0.01  # a part of all hosts beats, then the next
STATS = host_stats(used_bytes=1 << 30, reserved_bytes=1 << 30, limit_bytes=1 << 30, received_bytes=1 << 30)
BEAT = Heartbeat(stats=STATS, trained={}, clock_s=None)
_COUNT = struct.Struct("<Q")


@dataclass(frozen=True)
class Cost:
    """What something took the controller."""

    cpu_s: float
    sent_bytes: int
    orders: int
    received_bytes: int


class Members:
    """A membership that names the hosts once, at the start; they are not dialled."""

    def __init__(self, hosts: Iterable[str], term: int) -> None:
        self.names, self.term = list(hosts), term

    def hosts(self) -> dict[str, dict[str, Any]]:
        """Return the announced hosts the first time."""
        names, self.names = self.names, []
        return {name: {} for name in names}

    def claim_term(self, above: int) -> int:
        """Return the term of this controller."""
        return self.term

    def newest_term(self) -> int:
        """No other process claims one."""
        return self.term


@dataclass
class SimHost:
    """What a holder remembers."""

    name: str
    number: int
    incarnation: int = 1
    copies: dict[tuple[int, int, int], WireCopy] = field(default_factory=dict)  # (attempt, step, rank) -> as reported
    journal: list[bytes] = field(default_factory=list)
    pages: list[bytes] = field(default_factory=list)  # of an order whose end has not come


class Fleet:
    """Hosts in racks of 32 with 8 ranks each, and what they keep when the controller goes."""

    def __init__(self, hosts_count: int) -> None:
        self.hosts = {f"host-{n:05d}": SimHost(f"host-{n:05d}", n) for n in range(hosts_count)}
        self.world_size = hosts_count * RANKS_PER_HOST
        self.names = list(self.hosts)
        self.targets: dict[str, list[str]] = {}
        self.attempt = 0
        self.launch = 0

    def host_of(self, rank: int) -> str:
        """Ranks fill one host after the other."""
        return self.names[rank // RANKS_PER_HOST]

    def up(self, host: SimHost) -> HostInventory:
        """What a holder's session begins with."""
        return HostInventory(
            incarnation=host.incarnation,
            endpoints=(Endpoint(f"10.{host.number >> 16}.{host.number >> 8 & 255}.{host.number & 255}", 7000),),
            machine=f"machine-{host.name}",
            is_explicit=False,
            labels={"rack": f"rack-{host.number // 32}"},
            limit_bytes=1 << 40,
            copies=tuple(host.copies.values()),
            journal=tuple(host.journal),
            ranks=(),
            up_s=0.0,
            idle_s=0.0,
        )

    def keep(self, action: SendOrder) -> HolderMessage | None:
        """Obey an order; return the report that answers it, if there is one."""
        host, order = self.hosts[action.host_id], action.order
        match order:
            case WriteJournal():
                if (whole := whole_order(host.pages, order)) is not None:
                    host.journal = journal_after(host.journal, whole)
                return None if order.has_more else FactsWritten(seq=order.seq)
            case Fence():
                return Fenced(job=JOB, attempt=order.attempt, copies=tuple(host.copies.values()))
            case Reserve(is_claim=True):
                return Reserved(job=JOB, attempt=order.attempt, number=order.number, problem=None)
            case PushTargets():
                self.targets[host.name] = list(order.targets)
            case FreeCopies() | DropJob():
                for shard in order.shards:
                    host.copies.pop((shard.attempt, shard.step, shard.rank), None)
                return Freed(shards=order.shards, number=getattr(order, "number", None))
            case FreeStep():
                for key in [key for key in host.copies if key[:2] == (order.step.attempt, order.step.step)]:
                    del host.copies[key]
                return StepFreed(job=order.job, step=order.step, number=order.number)
        return None

    def seals(self, step: int) -> Iterator[tuple[str, Sealed]]:
        """Every rank's seals, its own host's first: (host, report)."""
        for is_own in (True, False):
            for rank in range(self.world_size):
                own = self.host_of(rank)
                digest = xxhash.xxh3_128_hexdigest(f"{step}-{rank}".encode())
                spec = WireSpec(digest, CHUNKS * CHUNK_BYTES, CHUNK_BYTES, CHUNKS, self.world_size)
                for host in [own] if is_own else self.targets[own]:
                    copy = WireCopy(WireShard(JOB, self.attempt, step, rank), spec, ())
                    self.hosts[host].copies[self.attempt, step, rank] = copy
                    yield host, Sealed(copy=copy, put=None)


class _Listening(Controller):
    """A controller whose orders are also shown to the rig."""

    seen: Callable[[Action], None]

    def _execute(self, action: Action, frames: dict[int, bytes]) -> None:
        super()._execute(action, frames)
        self.seen(action)

    def _take_inside(self, taken: FromInside | threading.Event) -> None:
        if isinstance(taken, threading.Event):
            taken.set()
        else:
            super()._take_inside(taken)


class SilentConfig(Config):
    """Of hosts that never beat."""

    @property
    def suspect_after_s(self) -> float:
        """As long as no host is to be doubted."""
        return SILENCE_S


class Rig:
    """One controller of a fleet; a context manager."""

    def __init__(self, fleet: Fleet, *, term: int, is_beating: bool = False) -> None:
        """With `is_beating` all hosts beat, lost ones too, as often as Config says, and silence counts as it says."""
        self.fleet = fleet
        self.orders_count = self.received_bytes = 0
        self.ours_s = 0.0  # processor time of the rig itself
        self.answers: list[AnswerCall] = []
        self.doubted: list[str] = []  # what was said of hosts that were silent, or seemed to be
        self._orders: list[SendOrder] = []
        self._lock = threading.Lock()
        pairs = [socket.socketpair() for _ in fleet.hosts]
        self._count = mmap.mmap(-1, mmap.PAGESIZE)
        config = Config() if is_beating else SilentConfig(detect=2 * SILENCE_S)
        self._reader = _start_reader(pairs, self._count, config.heartbeat_s if is_beating else 0.0)
        members: Any = Members(fleet.hosts, term)
        _Listening.seen = self._see  # the catalog's thread starts at once
        self.controller = _Listening(config, members, secret=b"", settle_s=SILENCE_S)
        self.sessions: dict[str, Session] = {}
        for name, (near, far) in zip(fleet.hosts, pairs, strict=True):
            far.close()
            session = self.sessions[name] = Session(name, 1, Channel(near))
            self.controller.tell(session)

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        self.controller.close()
        os.kill(self._reader, signal.SIGKILL)
        os.waitpid(self._reader, 0)

    def _see(self, action: Action) -> None:
        begun_s = time.thread_time()
        with self._lock:
            if isinstance(action, SendOrder):
                self._orders.append(action)
            elif isinstance(action, AnswerCall):
                self.answers.append(action)
            elif isinstance(action, LogLine) and "no heartbeat" in action.text:
                self.doubted.append(action.text)
            self.ours_s += time.thread_time() - begun_s

    def receive(self, host: str, data: bytes) -> None:
        """A holder's packed message arrives."""
        self.received_bytes += len(data)
        self.controller.tell((self.sessions[host], decode_holder_message(data)))

    def notify(self, messages: Iterable[tuple[str, HolderMessage]]) -> None:
        """Holders send these; the making and packing of them is not the controller's work."""
        for host, message in self._outside(messages):
            self.receive(host, self._ours(lambda m=message: encode(m)))  # type: ignore[misc]

    def start(self) -> None:
        """All hosts announce themselves.

        The controller need not wait for others, nor outlast any process, and has a lease.
        """
        fleet, machine = self.fleet, self.controller.machine
        self.notify((host.name, fleet.up(host)) for host in fleet.hosts.values())
        self.settle()
        machine.state.rules = replace(machine.state.rules, settle_s=0.0, outlast_s=0.0)
        self.controller.tell(LeaseRenewed(time.monotonic() + SILENCE_S))
        while not self.controller.is_serving():
            self.settle()

    def _outside(self, messages: Iterable[Any]) -> Iterator[Any]:
        source = iter(messages)
        while (message := self._ours(lambda: next(source, None))) is not None:
            yield message

    def _ours(self, work: Callable[[], Any]) -> Any:
        begun_s = time.thread_time()
        done = work()
        took_s = time.thread_time() - begun_s
        with self._lock:
            self.ours_s += took_s
        return done

    def cost(self, work: Callable[[], None]) -> Cost:
        """Do something to the controller; return what it took until nothing was left to be said."""
        self.settle()
        before = (time.process_time(), self.ours_s, self.sent_bytes, self.orders_count, self.received_bytes)
        work()
        self.settle()
        after = (time.process_time(), self.ours_s, self.sent_bytes, self.orders_count, self.received_bytes)
        cpu, ours, sent, orders, received = (b - a for a, b in zip(before, after, strict=True))
        return Cost(cpu - ours, int(sent), int(orders), int(received))

    @property
    def sent_bytes(self) -> int:
        """Bytes that have come out of all sessions."""
        count: int = _COUNT.unpack_from(self._count)[0]
        return count

    def settle(self) -> None:
        """Answer what is ordered until there is nothing to answer, and all bytes are through."""
        until_s = time.monotonic() + DEADLINE_S
        still_s = time.monotonic()
        while True:
            self._wake(until_s)
            with self._lock:
                orders, self._orders = self._orders, []
            self.orders_count += len(orders)
            self._answer(orders)
            sent = self.sent_bytes
            time.sleep(0.01)
            waits = bool(orders) or sent != self.sent_bytes or any(s.outbox for s in self.sessions.values())
            if waits:
                still_s = time.monotonic()
            elif time.monotonic() - still_s > QUIET_S:
                return
            if time.monotonic() > until_s:
                raise TimeoutError(f"the controller was not done within {DEADLINE_S:g} s")

    def _answer(self, orders: list[SendOrder]) -> None:
        def messages() -> Iterator[tuple[str, HolderMessage]]:
            for order in orders:
                report = self.fleet.keep(order)
                if report is not None:
                    yield order.host_id, report

        self.notify(messages())

    def _wake(self, until_s: float) -> None:
        """Wait until all events so far were taken."""
        event = threading.Event()
        self.controller.tell(event)  # type: ignore[arg-type]
        if not event.wait(until_s - time.monotonic()):
            raise TimeoutError(f"the catalog was not done within {DEADLINE_S:g} s")


def _start_reader(pairs: list[tuple[socket.socket, socket.socket]], count: mmap.mmap, beat_s: float) -> int:
    """Fork a process that reads all the far ends and counts, until the near ones are closed; return its pid.

    Unless `beat_s` is 0 every far end also sends a heartbeat that often, not all at once.
    """
    pid = os.fork()
    if pid:
        return pid
    try:  # the child never returns
        poll, buffer, total = select.epoll(), bytearray(READ_BYTES), 0
        by_fd = {far.fileno(): far for _, far in pairs}
        for near, far in pairs:
            near.close()
            poll.register(far, select.EPOLLIN)
        beats = _Beats([far for _, far in pairs], beat_s)
        while by_fd:
            for fd, _ in poll.poll(beats.send_due()):
                got = 0
                with contextlib.suppress(OSError):
                    got = by_fd[fd].recv_into(buffer)
                if not got:
                    poll.unregister(fd)
                    by_fd.pop(fd).close()
                total += got
                _COUNT.pack_into(count, 0, total)
    finally:
        os._exit(0)


class _Beats:
    """Heartbeats of all hosts, spread over the time between two of one host."""

    def __init__(self, ends: list[socket.socket], every_s: float) -> None:
        self.ends, self.every_s = ends, every_s
        self.frame = encode_frame(Kind.EVENT, BEAT)
        self.begun_s, self.sent_count = time.monotonic(), 0

    def send_due(self) -> float | None:
        """Send what is due by now; return for how many seconds nothing more is, None for ever."""
        if not self.every_s:
            return None
        due_count = int((time.monotonic() - self.begun_s) / self.every_s * len(self.ends))
        while self.sent_count < due_count:
            with contextlib.suppress(OSError):  # its session has ended
                self.ends[self.sent_count % len(self.ends)].send(self.frame, socket.MSG_DONTWAIT)
            self.sent_count += 1
        return BEATS_EVERY_S

"""One real state machine among thousands of hosts, without time, delays or bytes, to measure what a step costs it.

`CatalogWorld` shows what the controller decides; this shows how much work that is. Events are those that holders send:
one report a seal, one acknowledgement a fact. Only the time inside `ControllerMachine.handle` is counted.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, TypeVar, cast

from memstore.config import Config
from memstore.core.cluster.state import Rules
from memstore.core.controller.machine import ControllerMachine
from memstore.core.wire import orders
from memstore.core.wire.calls import Called, RankCall
from memstore.core.wire.codec import Request, encode
from memstore.core.wire.ids import Endpoint, WireCopy, WireShard, WireSpec
from memstore.core.wire.messages import (
    AnswerCall,
    Event,
    HostBeat,
    HostInfo,
    HostUp,
    LeaseRenewed,
    Received,
    SendOrder,
    Tick,
)
from memstore.core.wire.replies import decode_passed
from memstore.core.wire.reports import FactsWritten, Fenced, MarkersFound, MarkersListed, PutTimes, Reserved, Sealed
from memstore.testing.requests import request_of

R = TypeVar("R")
JOB = "train"
CHUNK_BYTES = 4 << 20
CHUNKS = 64  # of every shard


class ControllerFleet:
    """`hosts_count` hosts in racks of 32, `ranks_per_host` ranks on each, one attempt of one job, connected.

    `handle_s` grows by the processor seconds spent in `ControllerMachine.handle`.
    """

    def __init__(self, hosts_count: int, *, ranks_per_host: int = 8, replicas: int = 2, **config: Any) -> None:
        self.hosts = [f"h{n:05d}" for n in range(hosts_count)]
        self.ranks_per_host = ranks_per_host
        self.world_size = hosts_count * ranks_per_host
        self.config = Config(replicas=replicas, **config).job_fields()
        self.now = 0.0
        self.handle_s = 0.0
        self.targets: dict[str, list[str]] = {}
        self.rooms: dict[str, orders.Reserve] = {}  # host -> the last reservation that it was ordered
        self.committed: set[int] = set()  # steps whose commit was sent to every host
        self.answers: list[AnswerCall] = []
        self._acknowledged: dict[int, int] = {}
        self.machine = ControllerMachine(term=1, now=0.0, wall_offset_s=1e9, rules=Rules(), expected_hosts=self.hosts)
        self.handle(LeaseRenewed(1e9))
        for number, host in enumerate(self.hosts):
            labels = {"rack": f"r{number // 32}"}
            self.handle(
                HostUp(
                    HostInfo(
                        host, 1, (Endpoint(f"10.0.{number >> 8}.{number & 255}", 7000),), f"m-{host}", labels=labels
                    )
                )
            )
        self.now = 20.0
        self.handle(Tick())
        for host in self.hosts:
            self.handle(HostBeat(host))
        self._call(
            "join", {"world_size": self.world_size, "key": "launch", "launcher": "launcher", "config": self.config}
        )
        self._call("reserve", {"attempt": 1, "slots": CHUNKS})

    def host_of(self, rank: int) -> str:
        """Return the host of a rank; ranks fill one host after the other, as launchers number them."""
        return self.hosts[rank // self.ranks_per_host]

    def _call(self, verb: str, body: dict[str, Any]) -> None:
        """Let every rank ask; raise AssertionError unless each got an answer."""
        self.answers.clear()
        for rank in range(self.world_size):
            more = {"job": JOB, "rank": rank, "nonce": f"n{rank}", "pid": 1000 + rank}
            self.handle(Received(self.host_of(rank), Called(id=rank + 1, call=request_of(verb, more, **body))))
        refused = [answer.error for answer in self.answers if answer.error is not None]
        assert not refused, (verb, refused[:1])
        assert len(self.answers) == self.world_size, (verb, len(self.answers))

    def ask(self, request: Request[R]) -> R:
        """Return the answer to a person's question, packed and unpacked as it travels."""
        self.handle(Received(self.hosts[0], Called(id=0, call=cast(RankCall, request))))
        answered = self.answers.pop()
        assert answered.reply is not None, answered.error
        found: R = decode_passed(request, encode(answered.reply))
        return found

    def handle(self, event: Event) -> None:
        """Give the state machine one event, then carry out its orders, as every host would."""
        waiting: list[Event] = [event]
        while waiting:
            begun_s = time.process_time()
            actions = self.machine.handle(self.now, waiting.pop())
            self.handle_s += time.process_time() - begun_s
            for action in actions:
                if isinstance(action, AnswerCall):
                    self.answers.append(action)
                elif isinstance(action, SendOrder):
                    waiting += self._obey(action)

    def _obey(self, action: SendOrder) -> Iterable[Event]:
        host, order = action.host_id, action.order
        match order:
            case orders.WriteJournal():
                return [Received(host, FactsWritten(seq=order.seq))]
            case orders.Fence():
                return [Received(host, Fenced(job=JOB, attempt=order.attempt, copies=()))]
            case orders.ListMarkers():
                found = MarkersFound(markers=(), key="", damaged="", lacks="")
                listed = MarkersListed(job=JOB, call=order.call, found=found, problem="")
                return [Received(host, listed)]
            case orders.Reserve(is_claim=True):
                self.rooms[host] = order
                return [Received(host, Reserved(job=JOB, attempt=order.attempt, number=order.number, problem=None))]
            case orders.PushTargets():
                self.targets[host] = list(order.targets)
            case orders.StepLevel(level="committed"):
                self._acknowledged[order.step] = self._acknowledged.get(order.step, 0) + 1
                if self._acknowledged[order.step] == len(self.hosts):
                    self.committed.add(order.step)
        return []

    def seal(self, host: str, rank: int, step: int, *, is_own: bool) -> None:
        """Let a host report its copy of a rank's shard."""
        spec = WireSpec(f"{step:016x}{rank:016x}", CHUNKS * CHUNK_BYTES, CHUNK_BYTES, CHUNKS, self.world_size)
        put = PutTimes(stall_s=0.01, age_s=0.2) if is_own else None
        self.handle(Received(host, Sealed(copy=WireCopy(WireShard(JOB, 1, step, rank), spec, ()), put=put)))

    def put(self, step: int, ranks: Iterable[int] | None = None) -> None:
        """Let every rank put; its own host seals the shard first, then the targets of that host."""
        order = list(range(self.world_size)) if ranks is None else list(ranks)
        for rank in order:
            self.seal(self.host_of(rank), rank, step, is_own=True)
        for rank in order:
            for target in self.targets[self.host_of(rank)]:
                self.seal(target, rank, step, is_own=False)

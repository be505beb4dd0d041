"""A holder's port that plays by script: time passes only where a procedure waits, and every call is kept."""

from __future__ import annotations

import inspect
import itertools
import types
from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

from memstore.core.arena.replica_index import StoredReplica
from memstore.core.durable.increments import Origins
from memstore.core.durable.slice_format import SliceHeader
from memstore.core.holder.holder_io import HolderIo, Lane, Peer, PushSource, Stop, Storage, StreamingSource, WholeReply
from memstore.core.holder.state import HolderState, Limits
from memstore.core.wire.calls import RankCall
from memstore.core.wire.ids import Endpoint
from memstore.core.wire.messages import HostInfo
from memstore.core.wire.orders import DurablePlace
from memstore.core.wire.peer_messages import HasCopy, WholeShard
from memstore.core.wire.replies import HostVerified
from memstore.core.wire.reports import MarkersFound, Report
from recovery.inventory import ShardId, ShardSpec, SliceRef, StepId

P = ParamSpec("P")
T = TypeVar("T")
ASKED = [name for name, each in vars(HolderIo).items() if inspect.iscoroutinefunction(each)]


@types.coroutine
def halt(seen: Any) -> Generator[Any, Any, Any]:
    """Suspend the procedure that asks: its `send(None)` returns `seen`, and the next one's value goes on with it."""
    return (yield seen)


@dataclass(frozen=True)
class ScriptedPeer:
    """Another holder."""

    host: str
    endpoints: tuple[Endpoint, ...] = ()


@dataclass(frozen=True)
class OpenStorage:
    """Durable storage, opened under a key."""

    key: str


@dataclass(kw_only=True, eq=False)
class ScriptedIo:
    """The port of a holder's procedures, and its state.

    A test overrides the calls that it scripts. Unless another store is given, the holder's is this object too.
    """

    store: Any = None
    limits: Limits = field(default_factory=lambda: Limits(suspect_after_s=1.0, dead_after_s=3.0))
    errors: dict[str, Exception] = field(default_factory=dict)  # the name of a call -> what it raises
    meanwhile: Callable[[], None] = lambda: None  # happens during every wait
    key: str = "k"  # of this host, for durable storage
    info: HostInfo = field(default_factory=lambda: HostInfo("me", 1, ()))
    now: float = 0.0
    is_stopping: bool = False

    def __post_init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []  # the name of each call, and what it was given
        self.reports: list[Report] = []
        self.asks: list[RankCall] = []  # what the controller was asked
        self._held = ""
        for name in ASKED:
            setattr(self, name, partial(self._called, name, getattr(self, name)))
        self.state = HolderState(
            self.info,
            self if self.store is None else self.store,
            self.outgoing,
            self.limits,  # type: ignore[arg-type]
            now=lambda: self.now,
            report=self.reports.append,
            ask=self.asks.append,
            is_stopping=lambda: self.is_stopping,
            is_alive=lambda owner: True,
            pin_numbers=itertools.count(1),
        )

    async def _called(self, name: str, call: Callable[..., Coroutine[Any, Any, Any]], *args: Any, **named: Any) -> Any:
        self.calls.append((name, *args, *named.values()))
        if name == self._held:
            await halt(name)
        if name in self.errors:
            raise self.errors[name]
        return await call(*args, **named)

    def outgoing(self, shard: ShardId, digest: str) -> PushSource | None:
        """Pin a replica for a push."""
        return None

    def of(self, name: str) -> list[list[Any]]:
        """Return what each call of a name was given."""
        return [given for called, *given in self.calls if called == name]

    @property
    def names(self) -> list[str]:
        """The names of the calls."""
        return [call[0] for call in self.calls]

    @property
    def started(self) -> list[tuple[Lane, Callable[..., Coroutine[Any, Any, None]], tuple[Any, ...]]]:
        """The procedures that were begun: where, and what each is given besides the port."""
        return [(lane, procedure, tuple(args)) for lane, procedure, *args in self.of("start")]

    def play(self, steps: Coroutine[Any, Any, T]) -> T:
        """Run a procedure to its end and return its result."""
        try:
            steps.send(None)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        raise AssertionError("a procedure awaits what is not of its port")

    def play_until(self, name: str, steps: Coroutine[Any, Any, Any]) -> None:
        """Run a procedure until a call of this name is under way; `play` runs the rest."""
        self._held = name
        assert steps.send(None) == name
        self._held = ""

    def play_started(self, number: int = 0) -> None:
        """Run a procedure that was begun."""
        _, procedure, args = self.started[number]
        self.play(procedure(self, *args))

    # -- the calls, as in HolderIo --------------------------------------------------------------

    def start(
        self,
        lane: Lane,
        procedure: Callable[Concatenate[HolderIo, P], Coroutine[Any, Any, None]],
        *args: P.args,
        **named: P.kwargs,
    ) -> None:
        assert not named
        self.calls.append(("start", lane, procedure, *args))

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.meanwhile()

    async def wait_for(self, is_there: Callable[[], bool], limit_s: float | None = None) -> bool:
        if not is_there():
            self.meanwhile()
        if not is_there():
            assert limit_s is not None, "it would wait for ever"
            self.now += limit_s
        return is_there()

    async def together(self, work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        return [await steps for steps in work]

    async def reach(self, host: str) -> Peer:
        return ScriptedPeer(host)

    async def begin_connect(self, job: str) -> Callable[[], bool]:
        return lambda: True

    async def send_whole(self, peer: Peer, source: PushSource, request: WholeShard, *, is_repair: bool) -> WholeReply:
        return HasCopy()

    async def read_manifest(self, *given: Any) -> bytes:
        return b"manifest"

    async def open_durable(self, place: DurablePlace) -> Storage:
        return OpenStorage(self.key)

    async def slice_turn(self, job: str, nbytes: int, bytes_per_s: int | None) -> float:
        return 0.0

    async def copy_slice(self, stored: StoredReplica, number: int) -> tuple[list[bytes], int | None]:
        return [], None

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
        return not stop.is_set

    async def read_slice_headers(
        self, storage: Storage, shard: ShardId, spec: ShardSpec, number: int, ref: SliceRef
    ) -> dict[SliceRef, SliceHeader]:
        return {}

    async def read_markers(self, place: DurablePlace, job: str, check: StepId | None) -> MarkersFound:
        return MarkersFound(markers=(), key=self.key, damaged="", lacks="")

    async def on_store(self, call: Callable[[], T]) -> T:
        return call()

    async def verify(self, stored: StoredReplica, chunks: frozenset[int] | None = None) -> list[int]:
        return sorted(stored.missing)

    async def verify_copies(self, job: str | None) -> HostVerified:
        return HostVerified(shards=0, chunks=0, damaged=0, damaged_manifests=0)

    async def await_digest(self, source: StreamingSource) -> str:
        return "d"

    async def _nothing(self, *given: Any, **named: Any) -> None:
        pass

    async def _none(self, *given: Any, **named: Any) -> list[int]:
        return []

    async def _unscripted(self, *given: Any, **named: Any) -> Any:
        raise NotImplementedError

    send_chunks = store_marker = remove_durable = sweep_durable = claim_room = verify_slots = release_sends = _nothing
    send_welcome = send_to_rank = grant = close_link = forget_process = forget_job = warn = unexpected = _nothing
    receive_chunks = decode_chunks = receive_durable = compare_sample = _none
    call_peer = open_incoming = open_fresh = digest_and_store = _unscripted
    read_durable_manifest = read_manifest

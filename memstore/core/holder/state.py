"""The state that the procedures of one holder share. Nothing in it can block, and nothing in it knows a procedure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from memstore.core.arena.replica_index import IncomingReplica
from memstore.core.arena.replica_store import Store
from memstore.core.arena.slot_table import Owner
from memstore.core.holder.holder_io import Link, PushSource, Stop
from memstore.core.holder.puts.shared_shards import HolderSharedShards
from memstore.core.holder.sessions import JobFences
from memstore.core.wire.calls import RankCall
from memstore.core.wire.messages import HostInfo
from memstore.core.wire.orders import Bring, StepLevel
from memstore.core.wire.rank_messages import CheckInto, PutReady
from memstore.core.wire.reports import Report
from recovery.inventory import ShardId, StepId


@dataclass(frozen=True)
class Limits:
    """The store's settings that procedures use."""

    suspect_after_s: float
    dead_after_s: float
    whole_bytes: int = 0  # a shard of so many bytes at most is sent in one request


@dataclass(eq=False)
class Replication:
    """A put whose copies are on their way: over once every target has sealed it."""

    shard: ShardId
    left: set[str]


@dataclass
class Pushes:
    """The copies that are on their way from here, and the targets that this host cannot reach."""

    under_way: dict[tuple[ShardId, str, bool], list[Replication]] = field(default_factory=dict)  # by `Push.key`
    silent_since_s: dict[str, float] = field(default_factory=dict)  # targets that the view has and that do not answer


@dataclass(eq=False)
class Fetching:
    """A read that brings a shard here, while other reads of the shard wait for it."""

    is_over: bool = False
    replica: IncomingReplica | None = None

    def left(self) -> int:
        """Return how many chunks have not come; -1 before that is known."""
        return len(self.replica.missing) if self.replica is not None else -1


@dataclass(eq=False)
class Ready:
    """What is in a reader's reach: slots of the wanted chunks that are here, and who has the others."""

    order: Bring
    replica: IncomingReplica
    manifest: bytes
    sources: Mapping[str, Sequence[int]]  # host -> chunks that the reader fetches there
    deadline_s: float = 0.0
    is_checked: bool = False  # its rank has compared it with `into=`


@dataclass
class Reads:
    """The reads that are under way on this host, and what they have brought."""

    ready: dict[int, Ready] = field(default_factory=dict)  # by the number of its order
    newest: dict[tuple[str, int], Bring] = field(default_factory=dict)  # (job, rank) -> its newest for a get of all
    fetching: dict[tuple[ShardId, str], Fetching] = field(default_factory=dict)  # shard and digest -> who fetches it
    unanswered_s: dict[str, float] = field(default_factory=dict)  # source -> when it last left a question unanswered
    is_tight: bool = False  # a read waits until others have given room back; no other one does so beside it

    def check_of(self, link: Link) -> CheckInto | None:
        """Return what a rank is to compare with `into=`; None if it has done so, or nothing is ready for it."""
        order = self.newest.get((link.job, link.rank))
        ready = self.ready.get(order.read) if order is not None and order.reader == link.nonce else None
        return (
            CheckInto(read=ready.order.read, manifest=ready.manifest)
            if ready is not None and not ready.is_checked
            else None
        )


@dataclass(frozen=True)
class SubmittedPut:
    """A put that a rank submitted completely, and the fence of its job at that moment."""

    link: Link
    ready: PutReady
    fence: int

    @property
    def shard(self) -> ShardId:
        """Return the shard that it is to become."""
        return ShardId(self.link.job, self.ready.terms.attempt, self.ready.terms.step, self.link.rank)

    @property
    def key(self) -> tuple[str, int, Owner]:
        """Return the key by which a fence and a `bye` wait for it."""
        return self.link.job, self.ready.terms.attempt, self.link.owner


@dataclass
class SubmittedPuts:
    """The submissions that are not finished."""

    pending: dict[tuple[str, int, Owner], int] = field(default_factory=dict)  # (job, attempt, process) -> submissions
    sealing: set[ShardId] = field(default_factory=set)


@dataclass
class Ranks:
    """The links of this host's ranks, and their processes."""

    links: dict[str, Link] = field(default_factory=dict)  # by nonce
    newest: dict[tuple[str, int, int, int], int] = field(default_factory=dict)  # process, life of its store -> order
    stores: dict[tuple[str, int, int], tuple[int, Owner]] = field(
        default_factory=dict
    )  # process -> life and owner of its newest store
    owners: dict[str, Owner] = field(default_factory=dict)  # nonce -> process, until it is proved dead (R8)
    committed: dict[str, StepLevel] = field(default_factory=dict)  # job -> last commit sent, for links that come back

    def of_job(self, job: str) -> list[Link]:
        """Return the links of a job's ranks."""
        return [link for link in self.links.values() if link.job == job]

    def is_current(self, link: Link) -> bool:
        """Say whether a link is the one on which its process is connected."""
        return self.links.get(link.nonce) is link

    def process_of(self, link: Link) -> tuple[str, int, int]:
        """Return a link's nonce and process, whichever try to connect, or store of it, the link is of."""
        return link.nonce, link.owner.pid, link.owner.start

    def has_newer_store(self, process: tuple[str, int, int], life: int) -> bool:
        """Return whether a newer store of a process than the one of this life has the process's link."""
        return process in self.stores and life < self.stores[process][0]

    def current(self, link: Link) -> Link:
        """Return the link on which the same store is connected now."""
        now = self.links.get(link.nonce, link)
        return now if now.owner == link.owner else link


@dataclass
class HolderState:
    """The state of one holder, shared by its procedures."""

    info: HostInfo  # of this life of the holder
    store: Store
    outgoing: Callable[[ShardId, str], PushSource | None]  # pins a replica for a push; None if it is not here
    limits: Limits
    now: Callable[[], float]  # monotonic, seconds
    report: Callable[[Report], None]  # queues a report to the controller
    ask: Callable[[RankCall], None]  # asks the controller on the holder's own behalf, again in each session
    is_stopping: Callable[[], bool]
    is_alive: Callable[[Owner], bool]  # of a process on this host
    # Of readers, from a random number on: an `Unpin` of an older link, or to a former holder, then frees no other pin.
    pin_numbers: Iterator[int]
    idle_s: float = 0.0  # for how long no holder had run here before this one; 0 once the arena is used (R5)
    fences: JobFences = field(default_factory=JobFences)
    shared_shards: HolderSharedShards = field(default_factory=HolderSharedShards)
    pushes: Pushes = field(default_factory=Pushes)
    reads: Reads = field(default_factory=Reads)
    puts: SubmittedPuts = field(default_factory=SubmittedPuts)
    ranks: Ranks = field(default_factory=Ranks)
    stops: dict[tuple[str, StepId], Stop] = field(default_factory=dict)  # (job, step) -> what ends its durable writes
    # slice that was written (shard, digest, number) -> the digests of each chunk's blocks, of the newest steps alone
    blocks: dict[tuple[ShardId, str, int], list[bytes]] = field(default_factory=dict)
    began_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.began_s = self.now()

    def keep_blocks(self, job: str, steps: Collection[StepId]) -> None:
        """Forget the digests of blocks of a job's other steps."""
        for key in [k for k in self.blocks if k[0].job == job and StepId(k[0].attempt, k[0].step) not in steps]:
            del self.blocks[key]

    @property
    def host_id(self) -> str:
        """Return the name of the host."""
        return self.info.host_id

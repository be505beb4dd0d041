"""The effects of a holder's procedures: a procedure yields them, the shell or the simulator carries each one out.

A procedure is a generator: `reply = yield CallPeer(peer, request)`. Between two yields it reads and changes the
holder's state. Only one procedure runs at a time, so it needs no lock. While an effect is carried out other procedures
run, so it may block for as long as it takes. The yield gives its value, or raises the MemstoreError that it ended with.

Calls that cannot wait are no effects: a report is queued, and a pin is released, also while a procedure is closed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from memstore.core.arena.replica_index import IncomingReplica, StagedKey, StoredReplica
from memstore.core.arena.share import PeerShare
from memstore.core.arena.slot_table import Owner
from memstore.core.holder.link import Link
from memstore.core.wire.codec import Request
from memstore.core.wire.orders import DurablePlace, Lineage
from memstore.core.wire.peer_messages import WholeShard
from memstore.core.wire.rank_messages import HolderEvent, PutReady, SlotSample
from memstore.core.wire.reports import MarkerRow
from recovery.inventory import DurableMarker, ShardId, ShardSpec, StepId

T = TypeVar("T")
CALL_TIMEOUT_S = 30.0


class Effect:
    """The base of everything that a procedure may yield."""


Procedure = Generator[Effect, Any, T]  # a procedure that returns a T
Peer = Any  # the connections to one other holder, as `Reach` gives them; a procedure only passes them on


class PushSource(Protocol):
    """The source of a push: a stored replica that is pinned for it, or a shard that this host is still digesting."""

    @property
    def shard(self) -> ShardId:
        """Return the shard."""

    @property
    def digest(self) -> str:
        """Return its digest, "" while it is being digested."""

    @property
    def sizes(self) -> Sequence[int]:
        """Return the bytes of each of its chunks."""

    @property
    def stored(self) -> StoredReplica | None:
        """Return the stored replica, None while it is being digested."""

    def release(self) -> None:
        """Release the pin: this push is over."""


class StreamingSource(PushSource, Protocol):
    """A shard that this host is digesting; once it is stored it is pinned for every push that has begun."""

    def begin(self) -> None:
        """Count one more push that reads it; each `begin` needs one `release`."""

    def is_settled(self) -> bool:
        """Return whether it is stored, or never will be."""

    def extend(self, slots: Sequence[int], digests: Sequence[bytes]) -> None:
        """Name the next chunks, whose digests are known."""

    def fail(self, why: str) -> None:
        """Note that it will not be stored: its pushes end."""


class Storage(Protocol):
    """Durable storage, opened under one key."""

    @property
    def key(self) -> str:
        """Return the name of the key, "" for none."""


@dataclass(eq=False)
class Stop:
    """The flag that ends the durable writes of a step once it is set."""

    is_set: bool = False


# -- time ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sleep(Effect):
    """Wait for some seconds, or until the holder stops."""

    seconds: float


@dataclass(frozen=True)
class WaitFor(Effect):
    """Wait until a condition on the holder's state is true; give False if it was not within the limit."""

    is_there: Callable[[], bool]
    limit_s: float | None = None  # None: for as long as it takes


@dataclass(frozen=True)
class Together(Effect):
    """Run procedures side by side and give what they return; the first error is raised once all have ended."""

    procedures: Sequence[Procedure[Any]]


# -- other holders ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reach(Effect):
    """Give the Peer of a host; PeerUnreachable if the controller's view does not have it."""

    host: str


@dataclass(frozen=True)
class BeginConnect(Effect):
    """Begin to open the streams to a job's targets, which its next put needs.

    Give a function that says whether it has ended.
    """

    job: str


@dataclass(frozen=True)
class CallPeer(Effect):
    """Send a peer one request and give its reply; TransportError if there is none, or the peer's own error."""

    peer: Peer
    request: Request[Any]
    limit_s: float = CALL_TIMEOUT_S


@dataclass(frozen=True)
class SendChunks(Effect):
    """Send a peer those of these chunks that it lacks, each once its digest is known, straight from its slot.

    PeerRefused if the peer has no incoming replica for them, if a chunk went bad here, or if the put failed here
    meanwhile.
    """

    peer: Peer
    source: PushSource
    chunks: Sequence[int]
    is_repair: bool  # paced by the store's limit for repairs, and held back for no collective


@dataclass(frozen=True)
class SendWhole(Effect):
    """Send a peer all chunks of a shard with its manifest, and give the reply; PeerRefused if a chunk went bad here."""

    peer: Peer
    source: PushSource
    request: WholeShard
    is_repair: bool


@dataclass(frozen=True)
class ReceiveChunks(Effect):
    """Pull chunks of a stored shard from a peer into an incoming replica; give those that came damaged, or not at all.

    IntegrityError if the peer does not hold the shard, CapacityError if there is no room here.
    """

    peer: Peer
    replica: IncomingReplica
    digest: str
    chunks: Sequence[int]


# -- durable storage ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReadDurableManifest(Effect):
    """Give the manifest of a shard in durable storage; IntegrityError if it is not there as it was put."""

    place: DurablePlace
    shard: ShardId
    spec: ShardSpec


@dataclass(frozen=True)
class ReceiveDurable(Effect):
    """Read a shard's chunks from durable storage into an incoming replica; return those that storage lacks."""

    place: DurablePlace
    replica: IncomingReplica
    spec: ShardSpec
    chunks: Sequence[int]
    sizes: Sequence[int]  # of all chunks of the shard


@dataclass(frozen=True)
class OpenDurable(Effect):
    """Give the Storage of a job, under the key that is in this host's key file now."""

    place: DurablePlace


@dataclass(frozen=True)
class SliceTurn(Effect):
    """Take a turn for a slice under the job's cap for this host; give the seconds until it may be written."""

    job: str
    stored: StoredReplica
    number: int
    bytes_per_s: int | None


@dataclass(frozen=True)
class CopySlice(Effect):
    """Copy a slice's chunks; give the copies and None, or [] and the index of the first chunk with a wrong digest."""

    stored: StoredReplica
    number: int


@dataclass(frozen=True)
class WriteSlice(Effect):
    """Write a slice whole or not at all; give False if its step was stopped meanwhile."""

    storage: Storage
    shard: ShardId
    spec: ShardSpec
    number: int
    manifest: bytes
    chunks: Sequence[bytes]
    stop: Stop


@dataclass(frozen=True)
class StoreMarker(Effect):
    """Write the marker of a step; IntegrityError unless all of its parts are there."""

    place: DurablePlace
    job: str
    marker: DurableMarker
    lineage: Lineage


@dataclass(frozen=True)
class RemoveDurable(Effect):
    """Remove a step from durable storage: its marker first."""

    place: DurablePlace
    job: str
    step: StepId
    only_unmarked: bool


@dataclass(frozen=True)
class SweepDurable(Effect):
    """Remove what abandoned writes of a job left behind before a step."""

    place: DurablePlace
    job: str
    step: StepId


@dataclass(frozen=True)
class MarkersFound:
    """What durable storage has of a job."""

    key: str  # the name of the key that this host has
    markers: tuple[MarkerRow, ...]
    damaged: str  # what is wrong with markers that are there and say nothing
    lacks: str  # what is missing of the step that was to be checked


@dataclass(frozen=True)
class ReadMarkers(Effect):
    """Give the MarkersFound of a job; with `check` also which parts of that step are missing."""

    place: DurablePlace
    job: str
    check: StepId | None


# -- this host's memory -------------------------------------------------------------------------------


@dataclass(frozen=True)
class OnStore(Effect):
    """Make a call of the store that may block (digests, waits, unlinks files); give what the call returns."""

    call: Callable[[], Any]


@dataclass(frozen=True)
class ClaimRoom(Effect):
    """Reserve room for a job, and tell its ranks how far that is; CapacityError, with numbers, if it cannot be."""

    job: str
    share: PeerShare


@dataclass(frozen=True)
class Verify(Effect):
    """Digest a pinned replica again, quarantine what is bad, and give the chunks that this host lacks now."""

    stored: StoredReplica
    chunks: frozenset[int] | None = None  # only these; None: all


@dataclass(frozen=True)
class OpenIncoming(Effect):
    """Open an incoming replica for some chunks of a shard, or for all (None); good chunks here are in it."""

    name: str
    shard: ShardId
    digests: Sequence[bytes]
    sizes: Sequence[int]
    attempt: int
    chunks: tuple[int, ...] | None = None


@dataclass(frozen=True)
class KeepStaged(Effect):
    """Keep a pinned replica for the reader of a round; IntegrityError if it was dropped meanwhile."""

    key: StagedKey
    stored: StoredReplica
    pin: int


# -- what is sent -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReadManifest(Effect):
    """Give the manifest of a push's source once it is sealed; PeerRefused if the put failed here."""

    source: PushSource


@dataclass(frozen=True)
class AwaitDigest(Effect):
    """Give the digest of a shard that is being digested, once it is sealed; PeerRefused if the put failed here."""

    source: StreamingSource


# -- puts ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CompareSample(Effect):
    """Compare a rank's sample with its slots; give the chunks that differ. IntegrityError if it sent no sample."""

    slots: Sequence[int]
    nbytes: int
    seen: SlotSample


@dataclass(frozen=True)
class OpenFresh(Effect):
    """Give the source of a shard that is about to be digested."""

    shard: ShardId
    slots: Sequence[int]
    sizes: Sequence[int]


@dataclass(frozen=True)
class Replicate(Effect):
    """Begin the pushes of a put to this host's targets; give False if there are none."""

    shard: ShardId
    digest: str  # "" while it is being digested
    fresh: StreamingSource | None = None


@dataclass(frozen=True)
class DigestAndStore(Effect):
    """Digest a submission chunk by chunk, for the pushes that run meanwhile, and store it; give the replica.

    One that came with its digests is not digested: its pushes get them all at once.
    """

    shard: ShardId
    ready: PutReady
    fresh: StreamingSource


# -- ranks, and people --------------------------------------------------------------------------------


@dataclass(frozen=True)
class SendWelcome(Effect):
    """Tell a rank that its link is taken, and which of the slots that it holds are not its own any more."""

    link: Link
    stale: Sequence[int]


@dataclass(frozen=True)
class SendToRank(Effect):
    """Send a rank a message; a link that cannot take it ends, and comes back."""

    link: Link
    message: HolderEvent


@dataclass(frozen=True)
class Grant(Effect):
    """Lease a rank what its share allows (`ranks.lease`), and tell it, in the order of its leases."""

    link: Link


@dataclass(frozen=True)
class CloseLink(Effect):
    """End a link."""

    link: Link


@dataclass(frozen=True)
class ForgetProcess(Effect):
    """Forget a process that is gone: its calls, its offers; room that no job has reserved can be given back."""

    owner: Owner


@dataclass(frozen=True)
class ForgetJob(Effect):
    """Forget which steps the ranks of a removed job have trained."""

    job: str


@dataclass(frozen=True)
class Warn(Effect):
    """Log a failure that the rules foresee, for people."""

    text: str


@dataclass(frozen=True)
class Unexpected(Effect):
    """Log an error that no rule foresees, with its traceback unless it is one of the machine (OSError).

    The simulator takes it for a failed run.
    """

    what: str
    error: Exception

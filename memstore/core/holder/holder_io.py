"""What a holder's procedures may ask for: one port, which the shell keeps by threads and the simulator in virtual time.

A procedure is a coroutine: `reply = await io.call_peer(peer, request)`. Between two awaits it reads and changes the
holder's state. Only one procedure runs at a time, so it needs no lock. While it awaits, other procedures run, so a call
may take as long as it needs. It returns its value, or raises the MemstoreError that it ended with.

Calls that cannot wait are not here: a report is queued, and a pin is released, also while a procedure is closed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, Literal, NamedTuple, ParamSpec, Protocol, TypeVar

from memstore.core.arena.replica_index import IncomingReplica, StoredReplica
from memstore.core.arena.slot_table import Owner, PeerShare
from memstore.core.durable.increments import Origins
from memstore.core.durable.slice_format import SliceHeader
from memstore.core.wire.codec import Request
from memstore.core.wire.ids import Endpoint
from memstore.core.wire.orders import DurablePlace, Lineage
from memstore.core.wire.peer_messages import ChunksLacking, HasCopy, ParityOf, Refused, ShardHost, WholeShard
from memstore.core.wire.rank_messages import HolderEvent, PutReady, SlotSample
from memstore.core.wire.replies import HostVerified
from memstore.core.wire.reports import MarkersFound
from recovery.inventory import DurableMarker, ShardId, ShardSpec, SliceRef, StepId

# -- link ---------------------------------------------------------------------------------------------
# The link of a rank's process, or of a tool, as the holder's procedures use it.


class Link(Protocol):
    """One connection to the host's holder."""

    nonce: str
    owner: Owner
    job: str  # "": a tool's
    rank: int
    attempt: int
    pins: dict[int, Callable[[], None]]  # what this reader holds -> how to let go of it
    is_retired: bool  # the same process came back on another link and sends unsealed puts again

    @property
    def order(self) -> int:
        """Return a number that grows with each connection that this host accepts."""

    @property
    def is_open(self) -> bool:
        """Say whether it can be sent anything."""


# -- holder io ----------------------------------------------------------------------------------------


P = ParamSpec("P")
T = TypeVar("T")
WholeReply = HasCopy | ChunksLacking | Refused
CALL_TIMEOUT_S = 30.0


class Peer(Protocol):
    """The connections to one other holder, as `reach` gives them; a procedure only passes them on."""

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """Return where it listens."""


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


class Lane(NamedTuple):
    """The threads that a procedure is run on: slow work of one kind, or for one key, holds up no other."""

    kind: Literal["fence", "room", "drop", "verify", "push", "read", "repair", "write", "list"]
    key: tuple[str, ...] = ()  # of writes and lists: the storage, and the job if its pace is capped


class HolderIo(Protocol):
    """Threads, time, peers, durable storage, memory, ranks and the log of one holder."""

    def start(
        self,
        lane: Lane,
        procedure: Callable[Concatenate[HolderIo, P], Coroutine[Any, Any, None]],
        *args: P.args,
        **named: P.kwargs,
    ) -> None:
        """Begin a procedure, and do not wait for it. Those of lane `room` run one after another, in their order."""

    # -- time -----------------------------------------------------------------------------------

    async def sleep(self, seconds: float) -> None:
        """Wait for some seconds, or until the holder stops."""

    async def wait_for(self, is_there: Callable[[], bool], limit_s: float | None = None) -> bool:
        """Wait until a condition on the holder's state is true; False if it was not within the limit (None: none)."""

    async def together(self, work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        """Run procedures side by side and return their results; the first error is raised once all have ended."""

    # -- other holders --------------------------------------------------------------------------

    async def reach(self, host: str) -> Peer:
        """Return the connections to a host; PeerUnreachable if the controller's view does not have it."""

    async def begin_connect(self, job: str) -> Callable[[], bool]:
        """Begin to open the streams to a job's targets, which its next put needs; return what says if it has ended."""

    async def call_peer(self, peer: Peer, request: Request[T], *, limit_s: float = CALL_TIMEOUT_S) -> T:
        """Send a peer one request and return its reply; TransportError if there is none, or the peer's own error."""

    async def send_chunks(
        self,
        peer: Peer,
        source: PushSource,
        chunks: Sequence[int],
        *,
        base: Sequence[bytes],
        is_repair: bool,
        parity: ParityOf | None = None,
    ) -> None:
        """Send a peer those of these chunks that it lacks, each once its digest is known, straight from its slot.

        With `parity` the peer adds them into that; else it makes a copy, and a chunk that differs in few blocks from
        the one in its place in `base`, digests, is sent as a patch where both hosts have that one. A repair is paced by
        the store's limit for repairs, and held back for no collective.

        Raises:
            PeerRefused: The peer has no incoming replica for them, a chunk went bad here, or the put failed here.
        """

    async def send_whole(self, peer: Peer, source: PushSource, request: WholeShard, *, is_repair: bool) -> WholeReply:
        """Send a peer all chunks of a shard with its manifest; return its reply. PeerRefused if one went bad here."""

    async def receive_chunks(
        self,
        peer: Peer,
        replica: IncomingReplica,
        digest: str,
        chunks: Sequence[int],
        others: tuple[ShardHost, ...] = (),
    ) -> list[int]:
        """Pull chunks of a stored shard from a peer into an incoming replica; return those that came damaged, or not.

        With `others` the peer may have parity of the shard, and decodes them with what those hosts have.

        Raises:
            IntegrityError: The peer does not hold the shard.
            CapacityError: There is no room here.
        """

    async def decode_chunks(
        self, replica: IncomingReplica, digest: str, chunks: Sequence[int], others: tuple[ShardHost, ...]
    ) -> list[int]:
        """Decode chunks, from this host's parity and what the others have, into an incoming replica.

        Returns:
            Those that could not be decoded. Errors are those of `receive_chunks`.
        """

    # -- durable storage ------------------------------------------------------------------------

    async def read_durable_manifest(self, place: DurablePlace, shard: ShardId, spec: ShardSpec) -> bytes:
        """Return the manifest of a shard in durable storage; IntegrityError if it is not there as it was put."""

    async def receive_durable(
        self, place: DurablePlace, replica: IncomingReplica, spec: ShardSpec, chunks: Sequence[int]
    ) -> list[int]:
        """Read a shard's chunks from durable storage into an incoming replica; return those that storage lacks."""

    async def open_durable(self, place: DurablePlace) -> Storage:
        """Return the storage of a job, under the key that is in this host's key file now."""

    async def slice_turn(self, job: str, nbytes: int, bytes_per_s: int | None) -> float:
        """Take a turn for a slice's bytes under the job's cap for this host; return the seconds until it may begin."""

    async def copy_slice(self, stored: StoredReplica, number: int) -> tuple[list[bytes], int | None]:
        """Copy a slice's chunks; return them and None, or [] and the index of the first chunk with a wrong digest."""

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
        """Write a slice whole or not at all; return False if its step was stopped meanwhile.

        Of the chunks, those that `origins` names of older slices are b"".
        """

    async def read_slice_headers(
        self, storage: Storage, shard: ShardId, spec: ShardSpec, number: int, ref: SliceRef
    ) -> dict[SliceRef, SliceHeader]:
        """Return the headers of an older slice and of all that it reads; IntegrityError if one is not there."""

    async def store_marker(self, place: DurablePlace, job: str, marker: DurableMarker, lineage: Lineage) -> None:
        """Write the marker of a step; IntegrityError unless all of its parts are there."""

    async def remove_durable(self, place: DurablePlace, job: str, step: StepId, *, only_unmarked: bool) -> None:
        """Remove a step from durable storage: its marker first."""

    async def sweep_durable(self, place: DurablePlace, job: str, keep: Collection[StepId]) -> None:
        """Remove what abandoned writes of a job left behind before the newest of `keep`."""

    async def read_markers(self, place: DurablePlace, job: str, check: StepId | None) -> MarkersFound:
        """Return the markers of a job; with `check` also which parts of that step are missing."""

    # -- this host's memory ---------------------------------------------------------------------

    async def on_store(self, call: Callable[[], T]) -> T:
        """Make a call of the store that may block (digests, waits, unlinks files); return what the call returns."""

    async def claim_room(self, job: str, share: PeerShare) -> None:
        """Reserve room for a job, and send its ranks how far that is; CapacityError, with numbers, if it cannot be."""

    async def verify(self, stored: StoredReplica, chunks: frozenset[int] | None = None) -> list[int]:
        """Digest a pinned replica again (None: all of it), quarantine what is bad; return what this host lacks now."""

    async def verify_copies(self, job: str | None) -> HostVerified:
        """Digest everything here again (None: of all jobs), quarantine what is bad; return the counts."""

    async def open_incoming(
        self,
        name: str,
        shard: ShardId,
        digests: Sequence[bytes],
        sizes: Sequence[int],
        attempt: int,
        chunks: tuple[int, ...] | None = None,
    ) -> IncomingReplica:
        """Open an incoming replica for some chunks of a shard, or for all (None); it holds what is here of them."""

    async def verify_slots(self, slots: Sequence[int]) -> None:
        """Digest slots again; quarantine the bad ones, and report the copies that lose them."""

    # -- what is sent ---------------------------------------------------------------------------

    async def read_manifest(self, source: PushSource) -> bytes:
        """Return the manifest of a push's source once it is sealed; PeerRefused if the put failed here."""

    async def await_digest(self, source: StreamingSource) -> str:
        """Return the digest of a shard that is being digested once it is sealed; PeerRefused if the put failed."""

    # -- puts -----------------------------------------------------------------------------------

    async def compare_sample(self, slots: Sequence[int], nbytes: int, seen: SlotSample) -> list[int]:
        """Compare a rank's sample with its slots; return the chunks that differ. IntegrityError if there is none."""

    async def open_fresh(
        self, shard: ShardId, slots: Sequence[int], sizes: Sequence[int], digests: Sequence[bytes] | None
    ) -> StreamingSource:
        """Return the source of a shard that is about to be digested, or whose digests came with it."""

    async def release_sends(self, shard: ShardId) -> None:
        """Hold back no longer, for a collective, what is still sent of the rank's older puts."""

    async def digest_and_store(self, shard: ShardId, ready: PutReady, fresh: StreamingSource) -> StoredReplica:
        """Digest a submission chunk by chunk, for the pushes that run meanwhile, and store it; return the replica.

        One that came with its digests is not digested: its pushes get them all at once.
        """

    # -- ranks, and people ----------------------------------------------------------------------

    async def send_welcome(self, link: Link, stale: Sequence[int]) -> None:
        """Tell a rank that its link is taken, and which of the slots that it holds are not its own any more."""

    async def send_to_rank(self, link: Link, message: HolderEvent) -> None:
        """Send a rank a message; a link that cannot take it ends, and comes back."""

    async def grant(self, link: Link) -> None:
        """Lease a rank what its share allows (`ranks.lease`), and send it, in the order of its leases."""

    async def close_link(self, link: Link) -> None:
        """End a link."""

    async def forget_process(self, owner: Owner) -> None:
        """Forget the calls of a process that is gone; room that no job has reserved can be given back."""

    async def forget_job(self, job: str) -> None:
        """Forget which steps the ranks of a removed job have trained."""

    async def warn(self, text: str) -> None:
        """Log a failure that the rules foresee, for people."""

    async def unexpected(self, what: str, error: Exception) -> None:
        """Log an error that no rule foresees, with its traceback unless it is one of the machine (OSError).

        The simulator takes it for a failed run.
        """

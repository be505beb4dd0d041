"""Controller to holder: orders, and the answers to its ranks' calls. Pure.

In EVENT frames, in the order in which they were decided; what one of them comes to is reported (`reports.py`).
"""

from __future__ import annotations

from typing import Literal

from memstore.core.wire.codec import Decoder, Message, Part, Row
from memstore.core.wire.ids import (
    Digest,
    Endpoints,
    Name,
    Positive,
    Spare,
    Tag,
    Unsigned,
    WireShard,
    WireSpec,
    WireStep,
    WireUses,
)
from memstore.core.wire.peer_messages import ParityOf, ShardHost

# -- the journal (R16) --------------------------------------------------------------------------------


class TermNumber(Row, frozen=True):
    """The number of a record in journals, or of an order: by the controller of a term, which gives each once."""

    term: Unsigned
    number: Unsigned


class WriteJournal(Message, frozen=True, tag="journal"):
    """Keep some records of the journal, write others behind them, and acknowledge `seq` once it is done."""

    keep: tuple[TermNumber, ...] | None
    """None: all."""
    records: tuple[bytes, ...]
    """One with the place of a record that is kept says less than that, and replaces it."""
    seq: Unsigned
    has_more: bool = False
    """A page of a long journal: its records come before those of the next order."""


# -- hosts --------------------------------------------------------------------------------------------


class EchoClock(Message, frozen=True, tag="clock"):
    """The controller's clock, for the next heartbeats to echo (R17)."""

    clock_s: float


class TakeIncarnation(Message, frozen=True, tag="take_incarnation"):
    """A later life of this host was here: go on with a higher incarnation than its (R3)."""

    above: Unsigned


class HostAddress(Row, frozen=True):
    """Where a holder listens."""

    host: str
    endpoints: Endpoints
    incarnation: Unsigned


class HostNews(Message, frozen=True, tag="host_news"):
    """The addresses of hosts that came or moved, and the jobs that there are: room of other jobs is given back."""

    hosts: tuple[HostAddress, ...]
    gone: tuple[str, ...] | None
    """Hosts that are dead since; None: all that are not among these, which are all live ones."""
    jobs: tuple[Name, ...]


# -- attempts, targets, room --------------------------------------------------------------------------


class Fence(Message, frozen=True, tag="fence"):
    """Refuse processes of older attempts, but the members; report what is here (R21)."""

    job: Name
    attempt: Unsigned
    members: tuple[str, ...]
    """Nonces of processes that go on in the new attempt: they asked for it by a rewind (R22)."""


class RankTargets(Row, frozen=True):
    """The targets of a rank that writes a shared shard (R34), or that has others than the first rank here (R18)."""

    rank: Unsigned
    targets: tuple[str, ...]
    other_writers: tuple[Unsigned, ...]
    """Ranks that write the same."""
    parity_set: tuple[ShardHost, ...] = ()
    """The ranks on whose hosts its shard is added into parity, with its own; none: it is not."""
    spare: Spare = 0


class PushTargets(Message, frozen=True, tag="targets"):
    """Where this host pushes the shards of its ranks (R13)."""

    job: Name
    attempt: Unsigned
    targets: tuple[str, ...]
    ranks: tuple[RankTargets, ...]
    """Ranks that have targets of their own."""


class Reserve(Message, frozen=True, tag="reserve"):
    """Claim room for a job; reported (R10)."""

    job: Name
    attempt: Unsigned
    ranks: dict[Unsigned, Unsigned]
    """The slots of each rank of this host."""
    peer_slots: Unsigned
    world_size: Unsigned
    versions: Unsigned
    number: TermNumber
    is_claim: bool = True
    """False: claim and report nothing, but have memory and connections ready for such room."""
    may_lease: bool = True
    """False: the ranks are to be leased none of it yet, for a restore may take the place of their puts (R10)."""


# -- copies -------------------------------------------------------------------------------------------


class PushCopy(Message, frozen=True, tag="push"):
    """Copy one shard to a peer, for repair (R29)."""

    shard: WireShard
    digest: Digest
    target: str
    parity: ParityOf | None = None
    """The parity there that it is to be added into; None: the target is to have a copy."""


class FreeCopies(Message, frozen=True, tag="free"):
    """Free copies; reported (R19)."""

    shards: tuple[WireShard, ...]
    number: TermNumber | None
    """None: the rank is in no attempt."""


class FreeStep(Message, frozen=True, tag="free_step"):
    """Free all that is here of a step, and give up what comes of it; reported (R19)."""

    job: Name
    step: WireStep
    number: TermNumber


class DropJob(Message, frozen=True, tag="drop_job"):
    """Free copies and all room of a removed job, and fence its processes up to this attempt (R10, R21)."""

    job: Name
    attempt: Unsigned
    shards: tuple[WireShard, ...]


class VerifyCopies(Message, frozen=True, tag="verify"):
    """Digest everything again, of one job or of all, and report what is damaged (R30)."""

    call: Positive
    job: Name | None


# -- puts ---------------------------------------------------------------------------------------------


Level = Literal["pending", "sealed", "replicated", "committed", "durable", "skipped", "superseded", "failed"]
"""Of a ticket (R15)."""


class StepLevel(Message, frozen=True, tag="level"):
    """What a step has reached, or why it never will: for the tickets of its ranks, to which the holder passes it on.

    Of a step that is skipped or superseded the holder lets the copies go (R12).
    """

    job: Name
    attempt: Unsigned
    step: Unsigned
    level: Level
    reason: str = ""
    degraded: bool = False
    resume: Unsigned = 0
    """All ranks put again from this step on (R12)."""
    digest: str = ""
    """Of the rank's shard, once it is sealed: the same step is taken again only with this one (R12)."""
    put_from: Unsigned = 0
    """From this step on `put_steps` lie between two puts (R33)."""
    put_steps: Unsigned = 1


class PutEarly(Message, frozen=True, tag="put_early"):
    """Put the first step from this one on ahead of its turn: asked of all ranks, then decided for all alike (R33)."""

    job: Name
    attempt: Unsigned
    step: Unsigned
    is_agreed: bool | None = None
    """None: it is asked, and the rank answers."""


# -- restores (R23-R27) -------------------------------------------------------------------------------


class DurablePlace(Part, frozen=True):
    """How a holder reaches the durable storage of a job."""

    url: str
    compression: str | None
    key_file: str | None
    bytes_per_s: Unsigned | None
    key: str | None = None
    """The name of the key of the step that is read; None: not for reading, "": not encrypted."""
    tags: tuple[Tag, ...] = ()
    """Of the slices of the shard that is read, in their order; none: all are whole."""


OWN_PARITY = ".parity"
"""Names the parity of the host that a shard is brought to among its sources; no host has this name."""


class Run(Row, frozen=True):
    """Chunks of a shard that the plan takes from one source."""

    tier: Literal["local", "peer", "parity", "durable"]
    source: str | None
    """A host; None: durable storage. One with parity decodes them."""
    first: Unsigned
    count: Unsigned
    stride: Positive = 1
    """From one chunk to the next."""

    @property
    def chunks(self) -> range:
        """Return the chunks."""
        return range(self.first, self.first + self.count * self.stride, self.stride)


class ChunkRange(Row, frozen=True):
    """Neighbouring chunks of a shard."""

    first: Unsigned
    count: Unsigned


class Bring(Message, frozen=True, tag="bring"):
    """Have a shard, or some chunks of it, in a reader's reach: in slots here, or known where they lie; reported."""

    read: Positive
    """The number under which the holder keeps it for the reader."""
    job: Name
    """The reader's."""
    shard: WireShard
    spec: WireSpec
    chunks: tuple[ChunkRange, ...] | None
    """None: all of them."""
    attempt: Unsigned
    holders: tuple[str, ...]
    durable: DurablePlace | None
    runs: tuple[Run, ...]
    reader: str
    """The nonce of the reading process; "": it is not known, or there is none."""
    use: Literal["get", "read", "repair", "store"]
    """A get of all ranks: every chunk is digested where it lies, and the rank compares `into=` with it, before it is
    reported (R23). A read, whose reader digests (R27). What a reader found damaged, or could not fetch. Or the host is
    to have a copy, which is never read."""
    others: tuple[ShardHost, ...] = ()
    """Where the other shards of its parity set are, if chunks are to be decoded."""


# -- durable storage (R31) ----------------------------------------------------------------------------


class BaseShard(Row, frozen=True):
    """The same rank's shard of an older durable step, of the same sizes: equal chunks are not written again."""

    step: WireStep
    digest: Digest
    tags: tuple[Tag, ...]
    """Of its slices; none: all are whole."""


class SlicesOfShard(Row, frozen=True):
    """The slices of one shard that this host writes."""

    shard: WireShard
    digest: Digest
    numbers: tuple[Unsigned, ...]
    base: BaseShard | None = None
    bases_max: Unsigned = 0
    """Most older slices that one may read."""


class Lineage(Part, frozen=True):
    """What a marker says of the attempt of its step."""

    attempt: Unsigned
    parent_attempt: Unsigned | None
    parent_step: Unsigned | None
    attempts: tuple[tuple[Unsigned, float], ...] = ()
    """Which attempts there were before, and when each was opened, by the wall clock."""


class WriteSlices(Message, frozen=True, tag="write_slices"):
    """Write slices of shards; each is reported. Without any: write no more of the step."""

    job: Name
    durable: DurablePlace
    step: WireStep
    parts: tuple[SlicesOfShard, ...]
    key: str | None
    """The name of the key that they are to be under; "": none; None: the one that the host has."""
    beside: tuple[WireStep, ...] = ()
    """Other steps of the job whose writes go on, and durable ones that these read; all writes not named here end."""


class WriteMarker(Message, frozen=True, tag="write_marker"):
    """Write the marker of a step whose slices are all written, or whose trust has changed; reported."""

    job: Name
    durable: DurablePlace
    step: WireStep
    specs: dict[Unsigned, WireSpec]
    """By rank."""
    uses: WireUses
    key: str
    lineage: Lineage
    beside: tuple[WireStep, ...] = ()
    """Older steps whose writes go on: their slices stay."""
    is_trusted: bool = False
    """It is to say so (R38)."""


class RemoveStep(Message, frozen=True, tag="remove_step"):
    """Remove what storage has of a step; reported."""

    job: Name
    durable: DurablePlace
    step: WireStep
    only_unmarked: bool
    """Leave it alone if it has a marker."""


class ListMarkers(Message, frozen=True, tag="list_markers"):
    """Report the markers of a job; with a step to check, also whether all its slices are there."""

    job: Name
    durable: DurablePlace
    call: Positive
    check: WireStep | None = None


# -- answers ------------------------------------------------------------------------------------------


class CallAnswered(Message, frozen=True, tag="answered"):
    """The answer to a call, or the error to raise where it was made: to the holder, and from it to a rank."""

    id: Unsigned
    reply: bytes
    error: tuple[str, str] | None = None
    """Its class and its text; the reply is empty."""


DurableOrder = WriteSlices | WriteMarker | RemoveStep | ListMarkers
Order = (
    WriteJournal
    | EchoClock
    | TakeIncarnation
    | HostNews
    | Fence
    | PushTargets
    | Reserve
    | PushCopy
    | FreeCopies
    | FreeStep
    | DropJob
    | VerifyCopies
    | StepLevel
    | Bring
    | DurableOrder
    | CallAnswered
    | PutEarly
)

decode_order: Decoder[Order] = Decoder(Order)

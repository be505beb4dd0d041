"""Rank and holder of one host, over the holder's Unix socket (R4, R8, R11, R15). Pure.

    rank -> holder   a hello, then calls, puts and what else it has to say
    holder -> rank   Welcome, or an ErrorMessage and the end; then answers, leases, levels, fences

In EVENT frames. Nothing of it is acknowledged: a link that comes back reports its leases, and unanswered messages are
sent again.
"""

from __future__ import annotations

from memstore.core.wire.calls import Called
from memstore.core.wire.codec import Decoder, Message, Part, Setting
from memstore.core.wire.error_message import ErrorMessage
from memstore.core.wire.ids import Name, Positive, Seconds, Unsigned
from memstore.core.wire.orders import CallAnswered, PutEarly, StepLevel

# -- rank to holder -----------------------------------------------------------------------------------


class RankHello(Message, frozen=True, tag="rank_hello"):
    """A process of a rank connects, for the first time or again, and says which slots it believes to be its own."""

    nonce: str
    life: Unsigned
    """Rises with each store of a process: the highest is its newest (D240)."""
    pid: Unsigned
    job: Name
    rank: Unsigned
    attempt: Unsigned
    """0: it has not joined yet."""
    held: tuple[Unsigned, ...]
    arena: str
    """The arena in which it holds them; "": none yet."""
    ended: tuple[Unsigned, ...] = ()
    """Lives of stores that this process has closed since it was welcomed last: their `bye` may have met no holder."""


class ToolHello(Message, frozen=True, tag="tool_hello"):
    """A process connects that only asks: the command line, a reader."""

    nonce: str
    life: Unsigned
    pid: Unsigned


class SlotSample(Part, frozen=True):
    """What a process sees of some cache lines of slots (`arena/mapping.py`)."""

    seed: Unsigned
    digests: bytes


class PutTerms(Part, frozen=True):
    """What a put is from its beginning on: made once by its rank, and kept as it is by its holder."""

    attempt: Unsigned
    step: Unsigned
    world_size: Positive
    shared_chunks: Unsigned | None = None
    """So many of its first chunks are what other ranks put as well; None: the rank names no shard (R34)."""
    began_s: Seconds = 0.0
    """By the clock of this machine."""


class PutReady(Message, frozen=True, tag="put_ready"):
    """Submit a filled put to the holder, which digests, stores and copies it (R11)."""

    terms: PutTerms
    slots: tuple[Unsigned, ...]
    arena: str
    sample: SlotSample
    layout: bytes
    nbytes: Unsigned
    stall_s: Seconds
    is_lost: bool = False
    """Its slots are the rank's no more: it is sent again for its level only."""
    digests: bytes | None = None
    """Of all its chunks, joined: the rank took them of the bytes as it copied them; None: the holder digests (R14)."""


class Unpin(Message, frozen=True, tag="unpin"):
    """Release the pin of an answer."""

    pin: Unsigned


class ArrivedDamaged(Message, frozen=True, tag="arrived_damaged"):
    """What a process fetched from other hosts' holders was damaged on the way: its holder counts it with its own."""

    chunks: Unsigned
    frames: Unsigned


class StepTrained(Message, frozen=True, tag="trained"):
    """The rank has trained this step."""

    step: Unsigned


class MarksMade(Message, frozen=True, tag="marks"):
    """The rank marks its collectives in this file of the arena's folder."""

    file: str


class PutWaiting(Message, frozen=True, tag="put_waiting"):
    """A put of this step waits for room: older copies are held back no longer (R13)."""

    step: Unsigned


class IntoChecked(Message, frozen=True, tag="into_checked"):
    """The rank has compared `into=` with what was brought for it."""

    read: Positive
    refusal: tuple[str, str] | None
    """Class and text of the error that its get is to raise; None: it fits."""


class Bye(Message, frozen=True, tag="bye"):
    """The store is closed: slots that it leased and did not submit are free."""

    has_left: bool = False
    """The process ended its own waits because another rank is lost: it lives, and comes to the next attempt."""


Hello = RankHello | ToolHello
RankMessage = Called | PutReady | Unpin | ArrivedDamaged | StepTrained | MarksMade | PutWaiting | IntoChecked | Bye

decode_hello: Decoder[Hello] = Decoder(Hello)
decode_rank_message: Decoder[RankMessage] = Decoder(RankMessage)

# -- holder to rank -----------------------------------------------------------------------------------


class Welcome(Message, frozen=True, tag="welcome"):
    """The holder has taken the link."""

    stale: tuple[Unsigned, ...]
    """Slots of those held that are not the rank's any more (R8)."""
    arena: str
    chunk_bytes: Positive
    store: dict[str, Setting]
    job_defaults: dict[str, Setting]


class SlotsLeased(Message, frozen=True, tag="slots_leased"):
    """More slots that are the rank's to fill."""

    slots: tuple[Unsigned, ...]


class CheckInto(Message, frozen=True, tag="check_into"):
    """Compare `into=` with this manifest and say what came of it (R26)."""

    read: Positive
    manifest: bytes


class AttemptFenced(Message, frozen=True, tag="fenced"):
    """The process belongs to an older attempt, or its job was removed (R21)."""

    attempt: Unsigned
    is_removed: bool


class ShardDiffers(Message, frozen=True, tag="replicas_differ"):
    """Another rank that names the same shard put other bytes; no chunks: the same again (R34)."""

    attempt: Unsigned
    step: Unsigned
    other_rank: Unsigned
    count: Unsigned
    chunks: tuple[Unsigned, ...]


HolderEvent = CallAnswered | SlotsLeased | StepLevel | CheckInto | AttemptFenced | ShardDiffers | PutEarly

decode_greeting: Decoder[Welcome | ErrorMessage] = Decoder(Welcome | ErrorMessage)
decode_holder_event: Decoder[HolderEvent] = Decoder(HolderEvent)

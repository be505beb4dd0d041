"""Holder to holder: a shard is offered, its chunks sent, and sealed; or asked for and sent. Pure.

A connection carries one request at a time: a CALL frame, answered by a REPLY frame with what the request names, or by
an ERROR frame (`error_message.py`). Chunks travel between the two, in CHUNK frames:

    Offer --Done--> ChunkBatch --ChunksLacking--> CHUNK frames, patches last --Done--> ... --> Seal --HasCopy-->
      '--HasCopy, Refused--> '--Refused-->                       of parity also Done--'   '--ChunksLacking--> again
    WholeShard, with all chunks of a small shard --HasCopy, Refused--> or --ChunksLacking--> ChunkBatch ...
    FetchChunks --> CHUNK frames --Done-->
"""

from __future__ import annotations

from typing import Annotated, Generic, TypeVar

from msgspec import Meta

from memstore.core.wire.codec import Decoder, Message, Request, Row
from memstore.core.wire.ids import ChunkDigest, Digest, Positive, Unsigned, WireShard
from recovery.parity import ParitySet

R = TypeVar("R")


class OfferedChunk(Row, frozen=True):
    """A chunk that a sender has."""

    index: Unsigned
    digest: ChunkDigest
    nbytes: Positive
    base: ChunkDigest | None = None
    """Of a chunk as long that differs in few blocks: a host that has it needs a patch only."""


class ChunkRun(Message, frozen=True, tag="run"):
    """The body of a CHUNK frame: its bulk is these chunks, one after the other, in the order asked for.

    Several chunks share a frame because slots and locks are taken once per frame: with one each, a tenth of a core went
    into that at 3 GB/s.
    """

    sizes: tuple[Unsigned, ...]
    """Size 0 stands for a chunk that the sender lacks."""
    masks: tuple[bytes, ...] = ()
    """Of patches a bit for each block of the chunk, the first block's the highest: 1 for one that comes."""


class Done(Message, frozen=True, tag="done"):
    """The request was carried out, and there is nothing to say about it."""


class Refused(Message, frozen=True, tag="refused"):
    """The holder does not take the shard, or chunks of it: it was aborted, fenced or never offered, or has no room."""

    why: str
    is_final: bool
    """Waiting cannot help: the sender gives up."""


class HasCopy(Message, frozen=True, tag="has_copy"):
    """The holder has a whole copy of the shard, which counts: nothing is to be sent."""


class ChunksLacking(Message, frozen=True, tag="lacking"):
    """The holder lacks these chunks of the shard: they are to be sent, in this order, or again.

    Of a batch it says so in an EVENT frame, before its reply.
    """

    chunks: tuple[Unsigned, ...]
    patches: tuple[Unsigned, ...] = ()
    """Of a batch: those that it lacks besides, and has the base of. They are sent as patches, after the others."""


class ManifestFound(Message, frozen=True, tag="manifest_found"):
    """A manifest as it is stored; the reader compares its digest."""

    manifest: bytes


class ParityOf(Row, frozen=True):
    """The parity that chunks are added into: of this rank's host, in this set of ranks."""

    rank: Unsigned
    ranks: Annotated[tuple[Unsigned, ...], Meta(min_length=3, max_length=127, description="a parity set")]
    spare: Annotated[int, Meta(ge=1, le=2, description="rows that a chunk is added into")]

    @classmethod
    def of(cls, rank: int, ranks: ParitySet) -> ParityOf:
        """Return the row of a rank's parity."""
        return cls(rank, ranks.ranks, ranks.spare)

    @property
    def set(self) -> ParitySet:
        """Return the set."""
        return ParitySet(self.ranks, self.spare)


class IncomingRequest(Request[R], Generic[R], frozen=True, kw_only=True):
    """The base of what concerns a shard that a peer sends here."""

    shard: WireShard
    sender: str
    """The host that sends it: the one that proved to be the peer."""
    parity: ParityOf | None = None
    """The shard is added into parity here; None: a copy of it is made."""


class Offer(IncomingRequest[Done | HasCopy | Refused], frozen=True, tag="offer"):
    """Ask the holder to admit a shard before a byte of it travels (R10, R13)."""

    digest: Digest | None
    """None while the sender itself does not know it yet."""
    attempt: Unsigned
    """A fence against this attempt refuses it: the shard's own, for a repair the one that orders it."""
    chunks_count: Unsigned


class ChunkBatch(IncomingRequest[Done | Refused], frozen=True, tag="chunks"):
    """Announce chunks of an offered shard; those that the holder wants follow."""

    chunks: tuple[OfferedChunk, ...]


class Seal(IncomingRequest[HasCopy | ChunksLacking | Done | Refused], frozen=True, tag="seal"):
    """Make a copy of the incoming replica: its manifest names the chunks (R7, R14).

    Done: the shard is in the parity, and those of other ranks are still to come.
    """

    manifest: bytes


class WholeShard(IncomingRequest[HasCopy | ChunksLacking | Refused], frozen=True, kw_only=True, tag="whole_shard"):
    """Make a copy of a small shard in one request: the bulk of its frame is all chunks, in order (R13)."""

    attempt: Unsigned
    """As in Offer."""
    manifest: bytes


class Abort(IncomingRequest[Done], frozen=True, tag="abort"):
    """Give the incoming replica up."""


class ShardHost(Row, frozen=True):
    """A host with a copy of the shard of a rank, at the same step."""

    rank: Unsigned
    host: str
    parity: Digest | None = None
    """Not of its shard, but of the parity that the rank's host keeps: the digest."""


class FetchManifest(Request[ManifestFound], frozen=True, tag="fetch_manifest"):
    """Ask for the manifest of a shard."""

    shard: WireShard
    digest: Digest


class FetchChunks(Request[Done], frozen=True, tag="fetch_chunks"):
    """Ask for chunks of a shard, which come in this order; one that the holder lacks comes with size 0."""

    shard: WireShard
    digest: Digest
    chunks: tuple[Unsigned, ...]
    others: tuple[ShardHost, ...] = ()
    """Where the other shards of its parity set are, and parity: a holder that has some of it decodes the chunks."""


class Verify(Request[ChunksLacking], frozen=True, tag="verify"):
    """Ask the holder to digest its copy again: chunks of it arrived damaged, or a rank is about to fetch them.

    If it lacks any, the controller is sent the same (R25).
    """

    shard: WireShard
    digest: Digest
    chunks: tuple[Unsigned, ...] | None
    """Only these; None: all of it."""


class Ping(Request[Done], frozen=True, tag="ping"):
    """Ask whether the holder answers."""


PeerRequest = Offer | ChunkBatch | Seal | WholeShard | Abort | FetchManifest | FetchChunks | Verify | Ping

decode_request: Decoder[PeerRequest] = Decoder(PeerRequest)
decode_run: Decoder[ChunkRun] = Decoder(ChunkRun)
decode_chunks: Decoder[ChunkRun] = Decoder(ChunkRun)
decode_lacking: Decoder[ChunksLacking] = Decoder(ChunksLacking)

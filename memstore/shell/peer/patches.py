"""Patches: of a chunk that differs in few blocks from one that both hosts have, those blocks travel (R13, R14).

    sender: new chunk, base --a sample, then all blocks compared--> patch, or the chunk whole
    target: base, patch --copied into a slot, digested--> the new chunk, or one that it lacks still

Neither host trusts the other's base: the digest of the new chunk decides. `core/send_gate.py` says what pays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from memstore.core.arena.replica_index import IncomingReplica
from memstore.core.arena.replica_store import Store
from memstore.core.format.manifest import chunk_digest
from memstore.core.send_gate import block_bytes, may_pay, pays, sampled
from memstore.core.wire.ids import WireShard
from memstore.core.wire.peer_messages import ChunkBatch, OfferedChunk, ParityOf
from memstore.errors import ProtocolError
from memstore.shell.net.channel import Channel
from memstore.shell.peer.chunk_frames import SLOW_RUN_BYTES, Damage, ReceivedRun, receive_head, runs
from memstore.shell.peer.outgoing_shard import OutgoingReplica

Blocks = npt.NDArray[np.bool_]  # for each block of a chunk whether it is in the patch
SAMPLED_BYTES = 64  # of a sampled block


def offer_of(
    shipment: OutgoingReplica, base: Sequence[bytes], sender: str, batch: Sequence[int], parity: ParityOf | None
) -> tuple[ChunkBatch, dict[int, Blocks]]:
    """Return the announcement of a shard's chunks; and of those which differ in few blocks from the chunk in their
    place in `base`, digests, these blocks. Of a step that was dropped no chunk is here any more.
    """
    chunks, found, replicas = [], dict[int, Blocks](), shipment.replicas
    for index, digest in zip(batch, shipment.digests(batch), strict=True):
        old, nbytes, blocks = base[index] if index < len(base) else digest, shipment.sizes[index], None
        new = shipment.view(index) if old != digest else None
        if new is not None:
            with replicas.held(old, nbytes) as slot:
                blocks = None if slot is None else differing(new, replicas.arena.view(slot, nbytes))
        if blocks is not None:
            found[index] = blocks
        chunks.append(OfferedChunk(index, digest, nbytes, None if blocks is None else old))
    batch_of = WireShard.of(shipment.shard)
    return ChunkBatch(shard=batch_of, sender=sender, parity=parity, chunks=tuple(chunks)), found


def differing(new: memoryview, base: memoryview) -> Blocks | None:
    """Return which blocks of a chunk differ from those of another one of its size; None if a patch would not pay."""
    (ours, our_rest), (theirs, their_rest) = _blocks(new), _blocks(base)
    part = sampled(len(ours))
    lines = np.any(ours[part, :SAMPLED_BYTES] != theirs[part, :SAMPLED_BYTES], axis=1)
    if not may_pay(int(np.count_nonzero(lines)), len(lines)):
        return None
    blocks = np.any(ours.view(np.uint64) != theirs.view(np.uint64), axis=1)
    if our_rest.size:
        blocks = np.append(blocks, np.any(our_rest != their_rest))
    return blocks if pays(patch_bytes(blocks, new.nbytes), new.nbytes) else None


def patch_bytes(blocks: Blocks, nbytes: int) -> int:
    """Return the bytes of a patch of a chunk of `nbytes`."""
    size = block_bytes(nbytes)
    return int(np.count_nonzero(blocks)) * size - (-nbytes % size if blocks[-1] else 0)


def packed(chunk: memoryview, blocks: Blocks) -> memoryview:
    """Return the bytes of a patch: those blocks of the chunk, in order."""
    whole, rest = _blocks(chunk)
    chosen = whole[blocks[: len(whole)]].reshape(-1)
    return (np.append(chosen, rest) if rest.size and blocks[-1] else chosen).data


def apply(target: memoryview, base: memoryview, patch: memoryview, blocks: Blocks) -> None:
    """Fill a slot with a base whose blocks a patch replaces."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(base, np.uint8))
    whole, rest = _blocks(target)
    chosen, new = blocks[: len(whole)], np.frombuffer(patch, np.uint8)
    end = int(np.count_nonzero(chosen)) * whole.shape[1]
    whole[chosen] = new[:end].reshape(-1, whole.shape[1])
    if rest.size and blocks[-1]:
        rest[:] = new[end:]


def _blocks(chunk: memoryview) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Return a chunk's whole blocks as rows, and the bytes after them."""
    size, data = block_bytes(chunk.nbytes), np.frombuffer(chunk, np.uint8)
    end = len(data) // size * size
    return data[:end].reshape(-1, size), data[end:]


# -- on the wire --------------------------------------------------------------------------------------


def patch_runs(
    shipment: OutgoingReplica, indices: Sequence[int], blocks: Mapping[int, Blocks]
) -> Iterator[tuple[list[memoryview | None], list[bytes]]]:
    """Yield the patches of chunks in runs, each with its mask; None for a chunk that went bad here."""
    for part in runs([patch_bytes(blocks[i], shipment.sizes[i]) for i in indices], SLOW_RUN_BYTES):
        views = [(shipment.view(i), blocks[i]) for i in indices[part]]
        yield (
            [None if view is None else packed(view, chosen) for view, chosen in views],
            [np.packbits(chosen).tobytes() for _, chosen in views],
        )


def _named(mask: bytes, size: int, nbytes: int) -> Blocks:
    """Return the blocks that a mask names of a chunk of `nbytes`; ProtocolError unless they have `size` bytes."""
    count = -(-nbytes // block_bytes(nbytes))
    blocks = np.unpackbits(np.frombuffer(mask, np.uint8))[:count].astype(np.bool_)
    if len(mask) != -(-count // 8) or not patch_bytes(blocks, nbytes) == size > 0:
        raise ProtocolError(f"a patch of {size:,} bytes has a mask of {len(mask)} for {count} blocks, or other blocks")
    return blocks


def receive_patches(
    channel: Channel,
    replicas: Store,
    replica: IncomingReplica,
    indices: Sequence[int],
    *,
    offered: Mapping[int, OfferedChunk],
    take: Callable[[int], list[int]],
    damage: Damage,
    timeout_s: float,
) -> ReceivedRun:
    """Receive the next frame's patches, of the first of `indices`, and build and digest their chunks.

    Arguments and errors are those of `receive_run`; `offered` has the base of each chunk. A base that was dropped
    meanwhile leaves its chunk lacking; so does a bad one, which is taken out and reported as the scrub does it.
    """
    run = receive_head(channel, len(indices), replicas.chunk_bytes, timeout_s=timeout_s)
    if len(run.masks) != len(run.sizes):
        raise ProtocolError(f"{channel.peer}: a run of {len(run.sizes)} patches has {len(run.masks)} masks")
    due = [
        (offered[index], size, _named(mask, size, offered[index].nbytes))
        for index, size, mask in zip(indices, run.sizes, run.masks, strict=False)
    ]
    numbers = take(len(due))
    arrived: list[tuple[int, int, int, bytes]] = []
    try:
        for (chunk, size, blocks), number in zip(due, numbers, strict=False):
            patch = memoryview(bytearray(size))
            channel.recv_bulk_digests([(patch,)], [], timeout_s=timeout_s)
            digest = _built(replicas, chunk, patch, blocks, number, damage)
            if digest:
                arrived.append((chunk.index, number, chunk.nbytes, digest))
        channel.skip_bulk(timeout_s=timeout_s)
    finally:
        replicas.give_back(sorted({*numbers} - {number for _, number, _, _ in arrived}))
        bad = replicas.keep_chunks(replica, arrived)
    here = {index for index, *_ in arrived}.difference(bad)
    return ReceivedRun(len(due), [chunk.index for chunk, *_ in due if chunk.index not in here], sum(run.sizes))


def _built(
    replicas: Store, chunk: OfferedChunk, patch: memoryview, blocks: Blocks, number: int, damage: Damage
) -> bytes:
    """Build a chunk in a slot and return its digest, b"" if its base is gone; look for the fault if it is wrong."""
    base = chunk.base or b""
    with replicas.held(base, chunk.nbytes) as slot:
        if slot is None:
            return b""
        target = replicas.arena.view(number, chunk.nbytes)
        apply(target, replicas.arena.view(slot, chunk.nbytes), patch, blocks)
        digest = chunk_digest(target)
        if digest != chunk.digest:
            replicas.verify_slots([slot])
            damage.add(chunks=replicas.table.lookup(base, chunk.nbytes) == slot)  # else the base was at fault
    return digest

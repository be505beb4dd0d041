"""Which chunks of a durable slice are not written again, because an older durable slice has them (R31). Pure.

    no base, or what has the base's chunk is too many slices, or mostly out of use --> written here
    chunk like the base's -----------------------------------------------------------> named: read where it lies
    some of its blocks are unlike the base's --all patches together below half of it-> patched: read there, then these
                                               '--more, or the blocks are not known--> written here

The base is the same slice, of the same rank, of an older durable step that the controller chose for the whole write.
What a slice reads is a matter of that step's headers, and its name carries a digest of it: what two writers put under
one name reads alike. Which blocks of a chunk changed only the writer of the base knows, from their digests in memory.

A patch is a bit for every block of the chunk, whether it follows, and then these blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import xxhash

from memstore.core.durable.paths import slice_name
from memstore.core.durable.slice_format import SliceHeader, slice_range, slices_count
from memstore.errors import IntegrityError
from recovery.inventory import DurableMarker, ShardSpec, SliceRef, StepId

BLOCK_BYTES = 4096  # each has a digest of 8 bytes in its writer's memory: 0.2 %
Origins = tuple[SliceRef | None, ...]  # of the chunks of a slice, in order; None: it is written here


@dataclass(frozen=True, slots=True)
class Base:
    """An older slice as it lies in storage."""

    ref: SliceRef
    digests: Sequence[bytes]  # of all chunks of its shard
    headers: Mapping[SliceRef, SliceHeader]  # its own, and those of all slices that it reads


def plan_origins(
    spec: ShardSpec, number: int, digests: Sequence[bytes], base: Base, bases_max: int, patches: Mapping[int, bytes]
) -> tuple[Origins, tuple[SliceRef, ...]]:
    """Return where each chunk of a slice lies once it is written, and all older slices that a reader opens for it.

    A chunk that has a patch lies there as well as here.

    Args:
        spec: Of the shard; the base's has the same sizes.
        number: Of the slice.
        digests: Of all chunks of the shard.
        base: The slice of the base.
        bases_max: Most older slices; of more, those that have least of this one go.
        patches: What makes chunks of the base those of this slice.
    """
    chunks = slice_range(spec, number)
    same = [index for index in chunks if digests[index] == base.digests[index] or index in patches]
    paths = {index: list(chunk_path(base.headers, base.ref, index)) for index in same}
    for index, patch in patches.items():
        stored = [base.headers[ref].chunk_place(index)[1] for ref in paths[index][:-1]]
        if 2 * (len(patch) + sum(stored)) > spec.chunk_nbytes(index):
            del paths[index]
    while True:
        used = Counter[SliceRef]()
        for index, path in paths.items():
            for ref in path:
                used[ref] += base.headers[ref].chunk_place(index)[1]
        # A slice that is read stays whole: half of it in use, all that are kept take at most twice what is read.
        poor = [ref for ref in used if 2 * used[ref] < sum(base.headers[ref].stored_nbytes)]
        if not poor and len(used) <= bases_max:
            break
        least = min(poor or used, key=lambda ref: (used[ref], ref))
        paths = {index: path for index, path in paths.items() if least not in path}
    origins = tuple(paths[index][0] if index in paths else None for index in chunks)
    return origins, tuple(sorted(used))


def chunk_path(headers: Mapping[SliceRef, SliceHeader], ref: SliceRef, index: int) -> Iterator[SliceRef]:
    """Yield the slices that have bytes of a chunk of slice `ref`."""
    origin: SliceRef | None = ref
    while origin is not None:
        header = headers[origin]
        if header.chunk_place(index)[1]:
            yield origin
        older = header.origin(index)
        if older is not None and older.step >= origin.step:
            raise IntegrityError(f"a slice of step {origin.step.step} reads step {older.step.step}, which is not older")
        origin = older


def block_digests(chunk: bytes) -> bytes:
    """Return the digests of a chunk's blocks, joined."""
    view = memoryview(chunk)
    return b"".join(xxhash.xxh3_64_digest(view[at : at + BLOCK_BYTES]) for at in range(0, len(view), BLOCK_BYTES))


def make_patch(chunk: bytes, digests: bytes, base_digests: bytes) -> bytes:
    """Return the patch that makes the base's chunk this one; both have blocks of these digests."""
    now, was = (memoryview(each).cast("Q") for each in (digests, base_digests))
    changed = [at for at in range(len(now)) if now[at] != was[at]]
    bits = bytearray(-(-len(now) // 8))
    for at in changed:
        bits[at // 8] |= 1 << at % 8
    return bytes(bits) + b"".join(chunk[at * BLOCK_BYTES : (at + 1) * BLOCK_BYTES] for at in changed)


def apply_patch(view: memoryview, patch: bytes) -> None:
    """Make the base's chunk the patched one; IntegrityError for a patch of another chunk's size."""
    count = -(-view.nbytes // BLOCK_BYTES)
    offset = -(-count // 8)
    changed = [at for at in range(8 * offset) if at // 8 < len(patch) and patch[at // 8] >> at % 8 & 1]
    places = [(at * BLOCK_BYTES, min((at + 1) * BLOCK_BYTES, view.nbytes)) for at in changed]
    if len(patch) != offset + sum(max(0, end - start) for start, end in places) or max(changed, default=0) >= count:
        raise IntegrityError(f"a patch of {len(patch)} bytes does not fit a chunk of {view.nbytes}")
    for start, end in places:
        view[start:end] = patch[offset : offset + end - start]
        offset += end - start


def part_names(marker: DurableMarker, rank: int) -> list[str]:
    """Return the names of all slices of a rank's part."""
    digest = marker.specs[rank].digest
    numbers = range(slices_count(marker.specs[rank]))
    return [slice_name(rank, number, digest, marker.key, marker.use(rank, number).tag) for number in numbers]


def needed_names(markers: Iterable[DurableMarker]) -> dict[StepId, set[str]]:
    """Return what steps read of older ones, step -> names: it stays as long as their markers."""
    needed: dict[StepId, set[str]] = {}
    for marker in markers:
        for rank, uses in marker.uses.items():
            for number, use in enumerate(uses):
                for ref in use.bases:
                    name = slice_name(rank, number, ref.digest, marker.key, ref.tag)
                    needed.setdefault(ref.step, set()).add(name)
    return needed

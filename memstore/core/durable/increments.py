"""Which chunks of a durable slice are not written again, because an older durable slice has them (R31). Pure.

    chunk unlike the base's, or no base ------------------------------> written here
    chunk like the base's --it lies in few slices, each half in use---> named: a reader opens the slice that has it
                            '--too many, or mostly out of use---------> written here

The base is the same slice, of the same rank, of an older durable step that the controller chose for the whole write.
What a slice reads is a matter of that step's headers alone, and its name carries a digest of it: writers that saw the
same write the same bytes under the same name, and others do not meet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from memstore.core.durable.paths import slice_name
from memstore.core.durable.slice_format import SliceHeader, slice_range, slices_count
from memstore.errors import IntegrityError
from recovery.inventory import DurableMarker, ShardSpec, SliceRef, StepId

Origins = tuple[SliceRef | None, ...]  # of the chunks of a slice, in order; None: it is written here


@dataclass(frozen=True, slots=True)
class Base:
    """An older slice as it lies in storage."""

    ref: SliceRef
    digests: Sequence[bytes]  # of all chunks of its shard
    headers: Mapping[SliceRef, SliceHeader]  # its own, and those of all slices that it reads


def plan_origins(
    spec: ShardSpec, number: int, digests: Sequence[bytes], base: Base, bases_max: int
) -> tuple[Origins, tuple[SliceRef, ...]]:
    """Return where each chunk of a slice lies once it is written, and all older slices that a reader opens for it.

    Args:
        spec: Of the shard; the base's has the same sizes.
        number: Of the slice.
        digests: Of all chunks of the shard.
        base: The slice of the base.
        bases_max: Most older slices; of more, those that have least of this one go.
    """
    chunks = slice_range(spec, number)
    same = [index for index in chunks if digests[index] == base.digests[index]]
    paths = {index: list(chunk_path(base.headers, base.ref, index)) for index in same}
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

"""A DCP step out of global tensors and objects: the share of each rank of the new job, and its copy into slots.

Every rank computes the same shares from the metadata, so they need not talk; objects and metadata lie with rank 0.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from memstore.client.dcp.metadata import Place, SavedLayout, encode_metadata
from memstore.client.dcp.staging import ALIGNMENT_BYTES, LARGE_BYTES
from memstore.client.store import Store
from memstore.client.ticket import Ticket
from memstore.errors import CapacityError, IntegrityError
from memstore.shell.tensors.slot_stream import SlotStream

ROOM_S = 120.0  # no training waits for it
Give = Callable[[MetadataIndex, "torch.Tensor | bytes"], None]


class StepSource(Protocol):
    """What a step is made of; `metadata` has no storage."""

    metadata: Metadata

    def read(self, wanted: Iterable[MetadataIndex], give: Give) -> None:
        """Yield every wanted part or object, in any order. IntegrityError if it contradicts the metadata."""


@dataclass
class Share:
    """The tensors of one rank, in stream order, and where they end."""

    places: dict[MetadataIndex, Place] = field(default_factory=dict)
    nbytes: int = 0


def shares_of(metadata: Metadata, ranks_count: int) -> list[Share]:
    """Return what each rank holds: the largest part to the one with the least, large parts first in the stream."""
    parts = [
        (MetadataIndex(name, chunk.offsets), chunk.sizes.numel() * entry.properties.dtype.itemsize)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
        for chunk in entry.chunks
    ]
    loads = [0] * ranks_count
    ranks: dict[MetadataIndex, int] = {}
    for index, nbytes in sorted(parts, key=lambda part: -part[1]):
        rank = loads.index(min(loads))
        ranks[index] = rank
        loads[rank] += nbytes
    shares = [Share() for _ in range(ranks_count)]
    for index, nbytes in sorted(parts, key=lambda part: part[1] < LARGE_BYTES):
        share = shares[ranks[index]]
        start = -(-share.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES if nbytes else share.nbytes
        share.places[index] = Place(ranks[index], start, nbytes)
        share.nbytes = start + nbytes
    return shares


def put_share(store: Store, step: int, source: StepSource, shares: Sequence[Share]) -> Ticket:
    """Submit this rank's share; rank 0 adds objects and metadata. Collective over the ranks of the job.

    Raises:
        CapacityError: there is no room. IntegrityError: the source is not what its metadata says.
    """
    began_s = time.monotonic()
    share, tail, place = shares[store.rank], b"", None
    if store.rank == 0:
        tail, place = _tail(source, shares)
    nbytes = share.nbytes + len(tail)
    ticket, room = store.puts.begin(step, nbytes, began_s=began_s, timeout_s=ROOM_S)
    if room is None:
        raise CapacityError(f"step {step} of job {store.job!r} found no room: {ticket.reason}")
    try:
        stream = SlotStream(room.views(), room.chunk_bytes, nbytes)
        stream.zero(0, nbytes)  # gaps are zeros, so that equal states give equal chunks

        def copy(index: MetadataIndex, found: torch.Tensor | bytes) -> None:
            target = share.places[index]
            assert isinstance(found, torch.Tensor)
            dense = found.contiguous()
            if dense.nbytes != target.nbytes:
                raise IntegrityError(f"{index.fqn!r} has {dense.nbytes} bytes where {target.nbytes} were announced")
            if target.nbytes:
                stream.write(target.offset, dense.data_ptr(), target.nbytes)

        source.read(share.places, copy)
        if tail:
            data = torch.frombuffer(bytearray(tail), dtype=torch.uint8)
            stream.write(share.nbytes, data.data_ptr(), len(tail))
    except BaseException:
        room.abandon()
        raise
    room.submit(SavedLayout(place, True).encode(nbytes), nbytes)
    return ticket


def _tail(source: StepSource, shares: Sequence[Share]) -> tuple[bytes, tuple[int, int]]:
    """Return objects and metadata as they stand behind rank 0's tensors, and where the metadata is."""
    metadata, start = source.metadata, shares[0].nbytes
    objects: dict[MetadataIndex, bytes] = {}

    def keep(index: MetadataIndex, found: torch.Tensor | bytes) -> None:
        assert isinstance(found, bytes)
        objects[index] = found

    names = metadata.state_dict_metadata
    source.read([MetadataIndex(n) for n, e in names.items() if not isinstance(e, TensorStorageMetadata)], keep)
    places = {index: place for share in shares for index, place in share.places.items()}
    end = start
    for index, data in objects.items():
        places[index] = Place(0, end, len(data))
        end += len(data)
    encoded = encode_metadata(Metadata(names, metadata.planner_data, places))
    return b"".join(objects.values()) + encoded, (end, len(encoded))

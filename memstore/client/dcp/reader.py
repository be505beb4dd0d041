"""DCP loads from memory, with any world size: `dcp.load(state, storage_reader=store.dcp_reader())`, `Reader.load`.

DCP's planner says which part of which saved item goes where; here the parts become byte ranges of the shards of the
ranks that saved, in batches, so that one batch is copied while the next is on its way. Nothing is committed to the
planner before the chunks it came from have been digested again.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load as torch_load
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from memstore.client.dcp.metadata import Place, SavedLayout, decode_metadata
from memstore.core.format.layout import batches, byte_span, row_major
from memstore.core.format.manifest import Manifest
from memstore.errors import IntegrityError, LeaseLost, ManifestMismatch, MemstoreError, RecoveryError, StepDropped
from memstore.shell.codec.verified_stream import CheckedStream
from memstore.shell.rank.shard_read import ShardRanges, ShardRead
from recovery.inventory import StepId

BATCH_BYTES = 256 << 20  # in transit while another is copied: bounds the arena memory of a load
COORDINATORS_TRIED = 64  # ranks looked at for the metadata; the coordinator is rank 0 unless a process group differs


class Leased(Protocol):
    """A step that is leased while a load runs: a Reader's Lease."""

    step: int
    attempt: int

    def end(self) -> None:
        """Let go of the step."""

    def lost(self) -> LeaseLost:
        """Return the error for a read that found the step dropped."""


LeaseStep = Callable[[int | None, int | None], Leased]  # takes the step and its attempt, None: the newest


@dataclass(frozen=True)
class ItemPart:
    """A box of one saved item: its bytes, from first to last element, and how the box lies in them."""

    item: ReadItem
    place: Place
    offset: int  # first byte wanted, in the rank's stream
    nbytes: int
    dtype: torch.dtype | None  # None: an object
    strides: tuple[int, ...] = ()  # of the saved item, in elements


class DcpReader(StorageReader):
    """A StorageReader of one step.

    Args:
        ranges: Reads of the job.
        step: The step; None: the one that `agree` adopts, on all ranks alike.
        agree: Adopts a step, as agree_on_step does; without it the newest committed step is read.
        wait: Waits until the target of the load is not being copied any more.
        lease: Leases a step, of that attempt if one is given, for the time of a load: a Reader's.
        report: Takes why the target of a load is half written, "" once a load has filled it.
    """

    def __init__(
        self,
        ranges: ShardRanges,
        step: int | None,
        agree: Callable[[], int | None] | None = None,
        wait: Callable[[], None] = lambda: None,
        lease: LeaseStep | None = None,
        report: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.step, self._ranges, self._agree, self._wait, self._report = step, ranges, agree, wait, report
        self.failed: Exception | None = None  # why it had no metadata: torch goes on without, and forgets the reason
        self._metadata: Metadata | None = None
        self._ready: Metadata | None = None  # read as the load began
        self._named, self._lease_step = step, lease
        self._lease: Leased | None = None
        self._attempt: int | None = None  # that put the step: another lineage may have one of that number
        self._chunk_bytes = 1
        self._rank: int | None = None  # whose own metadata is read, where every rank saved for itself

    # -- StorageReader ------------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Take DCP's name for the load, which is unused: the step identifies it."""

    def begin(self) -> None:
        """Lease the step of a load by this process alone, and read its metadata; `dcp.load` wraps what it raises."""
        self._ready = self._read_metadata(None)

    @property
    def _at(self) -> StepId:
        return StepId(self._attempt or 0, self.step or 0)

    def _begin_lease(self, lease: LeaseStep, step: int | None, of: int | None) -> None:
        self.end_lease()
        self._lease = lease(step, of)
        self.step, self._attempt = self._lease.step, self._lease.attempt

    def end_lease(self) -> None:
        """Let go of the step; a load that ends does so by itself."""
        if self._lease is not None:
            self._lease.end()
        self._lease = self._attempt = None

    @contextlib.contextmanager
    def _under_lease(self) -> Iterator[None]:
        """Raise LeaseLost in place of StepDropped; end the lease if anything is raised."""
        try:
            yield
        except StepDropped as error:
            lost = self._lease.lost() if self._lease is not None and not isinstance(error, LeaseLost) else error
            self.end_lease()
            raise lost from error
        except BaseException:
            self.end_lease()
            raise

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: a reader comes from `store.dcp_reader`, not from a name."""
        return False

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata of the step's coordinator; with `rank=`, that of a rank that saved for itself.

        Raises:
            RecoveryError: the job has no step to read. ManifestMismatch: the step was not saved through DCP.
        """
        try:
            ready, self._ready = self._ready, None
            self._metadata = ready or self._read_metadata(kwargs.get("rank"))
        except Exception as error:
            self.failed = error
            raise
        return self._metadata

    def _read_metadata(self, rank: int | None) -> Metadata:
        if self._lease_step is not None and self._lease is None:
            self._begin_lease(self._lease_step, self._named, self._ranges.attempt)
        if self.step is None and self._agree is not None:
            self.step = self._agree()
            if self.step is None:
                raise RecoveryError(
                    f"job {self._ranges.job!r} has no history: load only if `store.agree_on_step()` is not None"
                )
        with self._under_lease():
            metadata = self._metadata_of(rank) if rank is not None else self._global_metadata()
        self._rank = rank
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Take the metadata as DCP's planner has it."""
        self._metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan, with the step that this process has leased."""
        return replace(plan, storage_data=self._at) if self._lease else plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans, all of the coordinator's step: another process may have leased a newer one."""
        return [self.prepare_local_plan(plan) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Bring every planned part here, copy it to where the planner says, verify.

        Raises:
            RecoveryError, DigestMismatch: some chunk has no good copy; the state is unusable then. PeerTimeout: a batch
                took too long.
        """
        self._wait()
        with self._under_lease():
            chosen = plan.storage_data
            if self._lease_step is not None and isinstance(chosen, StepId) and chosen != self._at:
                self._begin_lease(self._lease_step, chosen.step, chosen.attempt)
                self._metadata = self._global_metadata()
            try:
                self._read_parts(plan, planner)
            except BaseException as error:
                self._report(f"a DCP load of step {self.step} failed: {error!r}")
                raise
        self._report("")
        self.end_lease()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_parts(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        parts = sorted((self._part(item) for item in plan.items), key=lambda p: (p.place.rank, p.offset))
        by_rank = itertools.groupby(parts, key=lambda part: part.place.rank)
        cut = [batch for _, mine in by_rank for batch in batches(mine, lambda part: part.nbytes, BATCH_BYTES)]
        coming = [self._ask(batch) for batch in cut[:1]]
        try:
            for number, batch in enumerate(cut):
                with coming.pop() as read:
                    read.answer()
                    coming += [self._ask(later) for later in cut[number + 1 : number + 2]]
                    self._load(batch, read, planner)
        finally:
            for read in coming:
                read.close()

    # -- metadata -----------------------------------------------------------------------------

    def _global_metadata(self) -> Metadata:
        """Return the metadata of a group's save; if each saved for itself, of this process's rank or the only one."""
        own: list[tuple[int, tuple[int, int]]] = []  # of ranks that saved for themselves
        has_any, rank, world_size = False, 0, 1
        while rank < min(world_size, COORDINATORS_TRIED):
            manifest, saved = self._saved(rank)
            world_size = manifest.world_size
            has_any |= saved is not None
            if saved is not None and saved.metadata is not None:
                if saved.is_global:
                    return self._decode(rank, saved.metadata)
                if not own and rank < self._ranges.link.rank < world_size:
                    mine = self._saved(self._ranges.link.rank)[1]
                    if mine is not None and mine.metadata is not None:
                        return self._decode(self._ranges.link.rank, mine.metadata)
                own.append((rank, saved.metadata))
                if rank == self._ranges.link.rank:
                    break
            rank += 1
        if not has_any:
            raise self._not_dcp()
        if own and (len(own) == 1 or own[-1][0] == self._ranges.link.rank):
            return self._decode(*own[-1])
        savers = ", ".join(str(rank) for rank, _ in own[:10]) or "none"
        raise RecoveryError(
            f"step {self.step} of job {self._ranges.job!r} has no metadata of all ranks. For themselves saved ranks "
            f"{savers}; rank {self._ranges.link.rank} did not: load it with as many ranks as saved it"
        )

    def _metadata_of(self, rank: int) -> Metadata:
        _, saved = self._saved(rank)
        if saved is None:
            raise self._not_dcp()
        if saved.metadata is None:
            raise RecoveryError(f"rank {rank} wrote no metadata of its own in step {self.step}")
        return self._decode(rank, saved.metadata)

    def _saved(self, rank: int) -> tuple[Manifest, SavedLayout | None]:
        """Return a shard's manifest, and what DCP's writer said in it; None if another put it."""
        with self._ranges.ask(self.step, rank, attempt=self._attempt) as read:
            answer, manifest = read.answer(), read.manifest()
        self.step, self._attempt = answer.step, answer.attempt
        self._chunk_bytes = manifest.chunk_bytes
        return manifest, SavedLayout.decode(manifest.layout)

    def _not_dcp(self) -> ManifestMismatch:
        return ManifestMismatch(
            f"step {self.step} of job {self._ranges.job!r} was put by store.put(): get it with store.get()"
        )

    def _decode(self, rank: int, place: tuple[int, int]) -> Metadata:
        with self._ranges.ask(self.step, rank, [place], self._chunk_bytes, attempt=self._attempt) as read:
            [data] = read.bytes_of([place])
        metadata = decode_metadata(bytes(data))
        metadata.storage_meta = StorageMeta(checkpoint_id=f"memstore:{self._ranges.job}/{self.step}")
        return metadata

    # -- bytes --------------------------------------------------------------------------------

    def _part(self, item: ReadItem) -> ItemPart:
        assert self._metadata is not None
        place = (self._metadata.storage_data or {}).get(item.storage_index)
        if not isinstance(place, Place):
            raise IntegrityError(
                f"{item.storage_index.fqn!r} is in the metadata of step {self.step} and was not written"
            )
        if item.type is LoadItemType.BYTE_IO:
            return ItemPart(item, place, place.offset, place.nbytes, None)
        entry = self._metadata.state_dict_metadata[item.storage_index.fqn]
        assert isinstance(entry, TensorStorageMetadata)
        offsets = item.storage_index.offset
        saved = next(chunk.sizes for chunk in entry.chunks if offsets is None or chunk.offsets == offsets)
        itemsize = entry.properties.dtype.itemsize
        strides = row_major(saved, itemsize)
        elements = tuple(step // itemsize for step in strides)
        if 0 in item.lengths:
            return ItemPart(item, place, place.offset, 0, entry.properties.dtype, elements)
        first = sum(at * step for at, step in zip(item.storage_offsets, strides, strict=True))
        nbytes = byte_span(item.lengths, strides, itemsize)[1]
        if first + nbytes > place.nbytes:
            raise ManifestMismatch(
                f"{item.storage_index.fqn!r}: bytes {first} to {first + nbytes} are asked of an item of {place.nbytes}"
            )
        return ItemPart(item, place, place.offset + first, nbytes, entry.properties.dtype, elements)

    def _ask(self, batch: Sequence[ItemPart]) -> ShardRead:
        ranges = [(part.offset, part.nbytes) for part in batch]
        return self._ranges.ask(self.step, batch[0].place.rank, ranges, self._chunk_bytes, attempt=self._attempt)

    def _load(self, batch: Sequence[ItemPart], read: ShardRead, planner: LoadPlanner) -> None:
        stream = CheckedStream(read.manifest(), read)
        filled: list[tuple[ReadItem, torch.Tensor, Callable[[], None]]] = []
        objects: list[tuple[ReadItem, bytearray]] = []
        for part in batch:
            if part.dtype is None:
                objects.append((part.item, stream.read_later(part.offset, part.nbytes)))
            else:
                target = planner.resolve_tensor(part.item)
                filled.append((part.item, target, _fill_later(target.detach(), part, stream)))
        stream.settle()
        for item, target, finish in filled:
            finish()
            planner.commit_tensor(item, target)
        for item, data in objects:
            planner.load_bytes(item, io.BytesIO(data))


def _fill_later(target: torch.Tensor, part: ItemPart, stream: CheckedStream) -> Callable[[], None]:
    """Plan the copy of a part to a tensor of its shape; straight into its memory where it lies there as it was saved.

    Returns what is to be called once the stream has settled.
    """
    if tuple(target.shape) != tuple(part.item.lengths):
        raise ManifestMismatch(
            f"{part.item.dest_index.fqn!r}: the planner gave a tensor of shape {list(target.shape)} for "
            f"{list(part.item.lengths)}"
        )
    if not part.nbytes:
        return lambda: None
    is_plain = target.is_cpu and target.is_contiguous() and target.dtype is part.dtype
    is_plain = is_plain and not target.is_conj() and not target.is_neg()
    if is_plain and part.nbytes == target.nbytes:  # a box without gaps: rows of the first dimension, or all of it
        stream.read(part.offset, target.data_ptr(), part.nbytes)
        is_counted = not target.is_inference()
        return lambda: torch.autograd.graph.increment_version(target) if is_counted else None  # behind autograd's back
    flat = torch.frombuffer(stream.read_later(part.offset, part.nbytes), dtype=torch.uint8)
    source = torch.empty(0, dtype=part.dtype).set_(flat.untyped_storage(), 0, tuple(part.item.lengths), part.strides)
    return lambda: _copy(target, source)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)


def load(state: dict[str, Any], reader: DcpReader, *, process_group: Any, planner: LoadPlanner | None) -> int:
    """`dcp.load` with a Reader's DcpReader; raises the first error of any process as itself. Returns the step."""
    is_alone = process_group is None
    try:
        if is_alone:  # else the other processes would wait for this one
            reader.begin()
        torch_load(state, storage_reader=reader, planner=planner, process_group=process_group, no_dist=is_alone)
    except CheckpointException as error:  # a BaseException
        errors = [error.failures[rank][0] for rank in sorted(error.failures)]
        ours = [each for each in (reader.failed, *errors) if isinstance(each, MemstoreError)]
        raise (ours or errors or [error])[0] from error
    finally:
        reader.end_lease()
    assert reader.step is not None
    return reader.step

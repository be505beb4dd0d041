"""DCP saves into memory: `dcp.save(state, storage_writer=store.dcp_writer(step))`.

    dcp.save          write_data: planned items -> slots; finish: metadata behind them on the coordinator
    dcp.async_save    stage: all tensors -> slots, on the training thread; write_data keeps the slots of planned items

The coordinator submits its shard in `finish`, after every rank has written, so a step without metadata is never
committed. The state is copied once. DCP's planner decides which rank writes what.
"""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from memstore.client.dcp.metadata import Place, SavedLayout, encode_metadata, estimate_bytes
from memstore.client.dcp.staging import ALIGNMENT_BYTES, LARGE_BYTES, copy_sources, stage_state
from memstore.client.put import Put
from memstore.client.puts import Puts
from memstore.client.ticket import LEVELS, Ticket
from memstore.errors import CommitError, ConfigError, UnsupportedState
from memstore.shell.codec.interpreter import copying
from memstore.shell.tensors.memory import TensorSource, flat_source
from memstore.shell.tensors.slot_stream import SlotStream, address_of, byte_array

FRAMES_MAX = 8  # between dcp.save and a writer, with a subclass's in between


class DcpWriter(StorageWriter, AsyncStager):
    """One step's StorageWriter and AsyncStager.

    Args:
        puts: The puts of the rank's store.
        step: As for `store.put`.
        wait: Level the step reaches before DCP's save ends, or its future is done; None: it does not wait. A step
            that cannot reach it raises CommitError there, on all ranks.
        wait_s: Longest wait for it.

    Attributes:
        ticket: The put's ticket, once it has begun; None before.
    """

    _synchronize_after_execute = True

    def __init__(self, puts: Puts, step: int, *, wait: str | None = "committed", wait_s: float = 600.0) -> None:
        if wait is not None and wait not in LEVELS:
            raise ConfigError(f"wait={wait!r} is no level: use one of {', '.join(LEVELS)}, or None", field="wait")
        if puts.shared_shard is not None:
            raise ConfigError(
                "a DCP writer is not for connect(shard_rank=, shard_count=): DCP saves what ranks share once by "
                "itself; connect without shard_rank=, or use put() and get()",
                field="shard_rank",
                value=str(puts.shared_shard.shard),
            )
        self.puts, self.step, self.wait, self.wait_s = puts, step, wait, wait_s
        self.ticket: Ticket | None = None
        self._put: Put | None = None
        self._end = 0  # of the bytes in the stream
        self._tail: list[bytes] = []  # objects and metadata, which stand behind the tensors
        self._is_coordinator = False
        self._is_global = True
        self._has_group = False  # this save's ranks plan together, however few they are
        self._names: dict[str, int] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Refuse to be pickled for DCP's process mode, also if another stager than this writer has staged."""
        raise _process_mode()

    # -- AsyncStager --------------------------------------------------------------------------

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy every tensor into slots; return the state with placeholder tensors.

        Raises:
            What `store.put` raises; UnsupportedState for a tensor that cannot be staged; ConfigError in DCP's process
            mode. Nothing was copied then.
        """
        if _save_option(sys._getframe(1), "async_checkpointer_type") is AsyncCheckpointerType.PROCESS:
            raise _process_mode()
        began_s = time.monotonic()
        placeholders = stage_state(state_dict)
        self._names = placeholders.dims
        metadata_nbytes = estimate_bytes(placeholders.dims, self.puts.world_size)
        self._begin(placeholders.nbytes, placeholders.objects_nbytes + metadata_nbytes, began_s, self._stall_s)
        if self._is_open:
            self._copy(
                lambda stream: copy_sources(placeholders.placed, stream, placeholders.nbytes), placeholders.nbytes
            )
        self._end = placeholders.nbytes
        if self.ticket is not None:
            self.ticket.stall_s = time.monotonic() - began_s
        staged: dict[str, Any] = placeholders.state
        return staged

    def synchronize_staging(self) -> None:
        """Return at once: `stage` has copied."""

    def close(self) -> None:
        """Give up a state that was staged and never saved."""
        if self._is_open:
            self._give_up("it was staged and not saved")

    # -- StorageWriter ------------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Take DCP's name for the save, which is unused: the step identifies it."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: a writer comes from `store.dcp_writer`, not from a name."""
        return False

    def storage_meta(self) -> StorageMeta:
        """Name the step."""
        return StorageMeta(checkpoint_id=f"memstore:{self.puts.job}/{self.step}")

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Note which rank writes the metadata, and whether for all ranks."""
        self._is_coordinator = is_coordinator
        self._is_global = bool(kwargs.get("use_collectives", True))
        self._has_group = bool(getattr(_save_option(sys._getframe(1), "distW"), "use_dist", False))
        if not self._is_global:
            self._is_coordinator = True

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans unchanged; let the coordinator learn the size of the metadata.

        Raises:
            ConfigError: Only some of the job's ranks save together, and would wait for the puts of the others.
        """
        is_part = self._is_global and (self._has_group or len(plans) > 1) and len(plans) != self.puts.world_size
        if is_part and self.wait is not None:
            error = ConfigError(
                f"{len(plans)} of the {self.puts.world_size} ranks of job {self.puts.job!r} save step {self.step}: "
                "it is committed once all of them have put it: save with all ranks (process_group=None), or, where the "
                "others put() this step, with dcp_writer(step, wait=None)",
                field="process_group",
            )
            self._fail(error)
            raise error
        items = [item for plan in plans for item in plan.items]
        self._names |= {i.index.fqn: len(i.tensor_data.size) if i.tensor_data else 0 for i in items}
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Bring the planned items into the stream; submit it, unless the metadata is still to come."""
        future: Future[list[WriteResult]] = Future()
        try:
            future.set_result(self._write(plan, planner))
        except BaseException as error:
            self._fail(error)
            raise
        return future

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        items = [(item, planner.resolve_data(item)) for item in plan.items]
        tensors = [(item, value.detach()) for item, value in items if isinstance(value, torch.Tensor)]
        objects = [(item, value.getvalue()) for item, value in items if isinstance(value, io.BytesIO)]
        if self.ticket is not None and all(tensor.is_meta for _, tensor in tensors):
            starts = self._keep_staged([tensor for _, tensor in tensors])
        else:
            starts = self._copy_items(tensors, sum(len(data) for _, data in objects))
        sizes = [tensor.numel() * tensor.element_size() for _, tensor in tensors]
        places = [(item, start, size) for (item, _), start, size in zip(tensors, starts, sizes, strict=True)]
        places += [(item, self._append(data), len(data)) for item, data in objects]
        if not self._is_coordinator:
            self._submit(None)
            self._end_save(None)
        return [WriteResult(item.index, size, Place(self.puts.rank, start, size)) for item, start, size in places]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Put the metadata behind the coordinator's items, submit, wait for the level asked for.

        Raises:
            CommitError, TimeoutError: the step did not reach it.
        """
        places: dict[MetadataIndex, Place] = {r.index: r.storage_data for rank in results for r in rank}
        metadata.storage_data = places
        self._is_global &= len(results) > 1 or self.puts.world_size == 1  # else no_dist: this rank's own state
        metadata.storage_meta = self.storage_meta()
        try:
            data = encode_metadata(metadata)
            self._submit((self._append(data), len(data)))
        except BaseException as error:
            self._fail(error)
            raise
        self._end_save(self.wait)

    # -- slots --------------------------------------------------------------------------------

    def _begin(self, nbytes: int, tail_bytes: int, began_s: float, growth_s: float) -> None:
        if self.ticket is not None:
            raise ConfigError(f"this writer has saved step {self.step}: make one for every step", field="step")
        extra = 1 + tail_bytes // self.puts.chunk_bytes
        self._put = self.puts.begin(self.step, nbytes, began_s=began_s, extra_slots=extra, growth_s=growth_s)
        self.ticket = self._put.ticket

    @property
    def _is_open(self) -> bool:
        return self._put is not None and self._put.is_open

    @property
    def _stall_s(self) -> float:
        """Return how long a step that blocks training may wait."""
        return self.puts.config.stall_budget_s

    def _copy(self, copy: Callable[[SlotStream], None], nbytes: int) -> None:
        put = self._put
        assert put is not None
        try:
            with put.lock, copying():
                if put.is_open:  # else given up meanwhile: the submission says so
                    copy(SlotStream(put.views(), put.chunk_bytes, nbytes))
        except BaseException as error:
            self._give_up(f"its state could not be copied: {error!r}")
            raise

    def _copy_items(self, tensors: Sequence[tuple[WriteItem, torch.Tensor]], tail_bytes: int) -> list[int]:
        """Copy items of a save that was not staged; return where each starts."""
        began_s = time.monotonic()
        sources = []
        for item, tensor in tensors:
            try:
                sources.append(flat_source(tensor))
            except ValueError as error:
                raise UnsupportedState(f"{item.index.fqn}: {error}. Nothing was copied.") from None
        starts = [0] * len(sources)
        end = 0
        placed: list[tuple[int, TensorSource]] = []
        for number in sorted(range(len(sources)), key=lambda i: sources[i].nbytes < LARGE_BYTES):
            starts[number] = end
            if sources[number].nbytes:
                placed.append((end, sources[number]))
            end = _aligned(end + sources[number].nbytes)
        if self._is_coordinator:
            tail_bytes += estimate_bytes(self._names, self.puts.world_size if self._is_global else 1)
        self._begin(end, tail_bytes, began_s, self.wait_s if self.wait is not None else self._stall_s)
        if self._is_open:
            self._copy(lambda stream: copy_sources(placed, stream, end), end)
        if self.ticket is not None:
            self.ticket.stall_s = time.monotonic() - began_s  # of the copy; a synchronous save goes on waiting
        self._end = end
        return starts

    def _keep_staged(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Drop the slots in which nothing lies that the planner gave this rank; return where each item starts now."""
        chunk_bytes = self.puts.chunk_bytes
        spans = [(int(t.storage_offset()), t.numel() * t.element_size()) for t in tensors]
        kept = sorted(
            {
                i
                for start, size in spans
                if size
                for i in range(start // chunk_bytes, _last(start, size, chunk_bytes) + 1)
            }
        )
        moved = {old: new for new, old in enumerate(kept)}
        if self._put is not None and self._put.is_open:
            staged = -(-self._end // chunk_bytes)
            self._put.keep([*kept, *range(staged, len(self._put.slots))])
        self._end = len(kept) * chunk_bytes
        return [moved[start // chunk_bytes] * chunk_bytes + start % chunk_bytes if size else 0 for start, size in spans]

    def _append(self, data: bytes) -> int:
        """Queue bytes for the end of the stream; return where they will start."""
        start = self._end
        self._tail.append(data)
        self._end += len(data)
        return start

    def _submit(self, metadata: tuple[int, int] | None) -> None:
        put = self._put
        if put is None or put.ticket.is_over:
            return
        tail = b"".join(self._tail)
        short = -(-self._end // put.chunk_bytes) - len(put.slots)
        if short > 0 and not put.extend(short, self.puts.config.stall_budget_s):
            self._give_up(f"no free slots for {len(tail)} bytes of objects and metadata")
            return
        if short > 0:
            self.puts.room.outgrown(len(put.slots))
        with put.lock:
            if tail and put.is_open:
                stream = SlotStream(put.views(), put.chunk_bytes, self._end)
                source = byte_array(tail)
                stream.write(self._end - len(tail), address_of(source), len(tail))
            is_ours = put.submit(SavedLayout(metadata, self._is_global).encode(self._end), self._end)
        if not is_ours:
            put.fail("its slots were taken back before it was submitted")

    def _give_up(self, why: str) -> None:
        if self._put is not None:
            self._put.fail(why)

    def _fail(self, error: BaseException) -> None:
        """Give the save up on all ranks, as it failed here: none keeps slots for the step (R12)."""
        why = f"its save failed: {error!r}"
        if self.ticket is not None and not self.ticket.is_over:
            self._give_up(why)
        self.puts.steps.give_up(self.step, why, self._stall_s)

    def _end_save(self, level: str | None) -> None:
        """Wait for a level; a save that waits for one says so on every rank as soon as it cannot be reached."""
        ticket = self.ticket
        if level is not None and ticket is not None:
            ticket.wait(level, self.wait_s)
        if self.wait is not None and ticket is not None and ticket.is_over and ticket.level != "durable":
            raise CommitError(f"step {self.step} was {ticket.level}: {ticket.reason}", step=self.step)


def _process_mode() -> ConfigError:
    return ConfigError(
        "a DCP writer of memstore saves in the process that trains, and dcp.async_save was asked to save in another "
        "one: leave async_checkpointer_type= away, or pass AsyncCheckpointerType.THREAD, the default; the state is "
        "copied into slots on the training thread either way",
        field="async_checkpointer_type",
        value="AsyncCheckpointerType.PROCESS",
    )


def _save_option(frame: FrameType | None, name: str) -> Any:
    """Return what dcp.save or dcp.async_save, whichever has called, calls `name`: it tells a writer less. None if no
    caller has it.
    """
    for _ in range(FRAMES_MAX):
        if frame is None:
            break
        if name in frame.f_locals:
            return frame.f_locals[name]
        frame = frame.f_back
    return None


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _last(start: int, nbytes: int, chunk_bytes: int) -> int:
    return (start + nbytes - 1) // chunk_bytes

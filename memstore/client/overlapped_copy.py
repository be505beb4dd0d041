"""Puts of device memory whose copy overlaps the next step's forward and backward, and the fence that ends it (R11).

put:    host memory is copied at once, what may change on a device is cloned there; a copy thread orders the copies of
        the device through a side stream, bit by bit: the host waits for nothing that training has queued
fence:  in front of the optimizer's step: orders the rest, and makes the stream of the step wait, not the host

The put is submitted when the copies have arrived. A state without device memory is put as without overlap.

A put, get, agree_on_step, rewind or close waits for the end, on the host. At the end of the interpreter it is given up.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import torch

from memstore.errors import ConfigError
from memstore.shell.codec.encode import StatePlan, copy_all_but, slot_stream
from memstore.shell.device.deferred_copy import DeferredCopy, DeferredDeviceCopies, WatchedSource, changed_message
from memstore.shell.device.side_stream import DeviceWrite, has_streams
from memstore.shell.tensors.memory import TensorSource, dense_bytes, is_flat
from memstore.shell.tensors.placed_sources import PlacedSources

if TYPE_CHECKING:
    from memstore.client.put import Put
    from memstore.shell.codec.encode import StatePlan
from bisect import bisect_right
from collections.abc import Iterator

from memstore.core.format.layout import is_dense
from memstore.shell.tensors import subclasses

log = logging.getLogger("memstore")
# The nice value of the copy thread: training's threads go first. The fence does what a busy machine leaves undone.
NICENESS = 10
EXIT_S = 5.0
# Device memory that a put may take for clones of changing tensors; the rest is copied at once, and waited for.
CLONES_BYTES_MAX = 64 << 20


class Hook(Protocol):
    """What torch returns for a registered hook."""

    def remove(self) -> None:
        """Take the hook back."""


class Overlap:
    """The overlapped copies of one store; at most one is under way."""

    def __init__(self, budget_s: float) -> None:
        """A copy that has not ended `budget_s` after a fence began fails its step."""
        self._budget_s = budget_s
        self._optimizers: list[torch.optim.Optimizer] = []
        self._hooks: list[Hook] = []
        self._late: tuple[DeferredCopy, Put] | None = None
        self._checking = threading.RLock()  # a signal handler may put
        _OVERLAPS.add(self)

    def fence(self, optimizer: torch.optim.Optimizer) -> None:
        """Wait in front of every step of this optimizer; its parameters and state are copied late from now on.

        Raises:
            ConfigError: It is no torch.optim.Optimizer.
        """
        # A wrapper of an optimizer may be of its type and never have become one: its own step knows no hooks.
        if not isinstance(optimizer, torch.optim.Optimizer) or not hasattr(optimizer, "_optimizer_step_pre_hooks"):
            raise ConfigError(
                f"wait_before_step({type(optimizer).__name__}) needs a torch.optim.Optimizer, whose step can be made "
                "to wait: pass the optimizer that this one wraps, or put with overlap=<the tensors that it alone "
                "changes>, and call store.wait_before_step() before it steps",
                field="optimizer",
            )
        if any(known is optimizer for known in self._optimizers):
            return
        this = weakref.ref(self)

        @torch.compiler.disable  # type: ignore[untyped-decorator]  # a compiled step would trace what ends the copy
        def before_step(*_: Any) -> None:
            overlap = this()
            if overlap is not None:
                overlap.hold_step()

        self._hooks.append(optimizer.register_step_pre_hook(before_step))
        self._optimizers.append(optimizer)

    def steady_memory(self, overlap: bool | Iterable[torch.Tensor]) -> OptimizerMemory | None:
        """Return the memory that is to be copied late, or None for a put that does not overlap.

        Raises:
            ConfigError: No optimizer step would wait for the copy.
        """
        if overlap is False:
            return None
        if overlap is not True:
            return OptimizerMemory(overlap)
        if not self._optimizers:
            raise ConfigError(
                "put(overlap=True) needs an optimizer that waits for the copy: call "
                "store.wait_before_step(optimizer) once before",
                field="overlap",
            )
        return OptimizerMemory(chain.from_iterable(optimizer_tensors(one) for one in self._optimizers))

    # -- a copy ---------------------------------------------------------------------------------

    def copy(self, put: Put, plan: StatePlan, memory: OptimizerMemory) -> bool:
        """Queue the copies of device memory, make all others; the put is submitted when the last has arrived.

        False, with nothing copied, if none of it lies on a device.
        """
        if all(source.address is not None for _, source in plan.placed):
            return False
        late: dict[int, WatchedSource] = {}
        writes: list[DeviceWrite] = []
        try:
            stream = slot_stream(plan, put.views(), put.chunk_bytes)
            if put.look is not None:
                put.look.begin(plan.placed, plan.kinds)
            clones = _Clones()
            for number, (offset, source) in enumerate(plan.placed):
                if source.address is not None:
                    continue
                owners = memory.owners_of(source)
                flat = source.owner if owners else clones.take(source)
                if flat is not None:
                    writes.append(DeviceWrite(flat, stream.host_pieces(offset, source.nbytes)))
                    late[number] = WatchedSource(owners, flat.untyped_storage())
            flights = DeferredDeviceCopies(writes)
            with put.lock:
                copy_all_but(plan, stream, late)
                put.is_late = put.is_open
            # Not the plan itself: it keeps alive the tensors that were copied at once.
            bare = replace(plan, placed=PlacedSources.of(()))
            offsets = [plan.placed.offsets[number] for number in late]
            copy = DeferredCopy(
                list(late.values()),
                flights,
                keep=stream,
                is_wanted=lambda: not put.ticket.is_over,
                on_end=lambda problem: _end(put, bare, problem),
                name_of=lambda number: bare.name_at(offsets[number]),
            )
        except BaseException as exc:
            put.is_late = False
            put.fail(f"its state could not be copied: {exc!r}")
            raise
        self._late = copy, put
        try:
            self._start(copy)
        except BaseException as exc:
            # Ends it once, from any owner: its slots go back when no copy writes into them any more.
            copy.stop(f"its copy could not be started: {exc!r}")
            self._late = None
            raise
        return True

    def _start(self, copy: DeferredCopy) -> None:
        try:
            _thread.start_new_thread(_work, (copy,))
        except RuntimeError as exc:  # the limit of threads or of memory: this one copies
            log.warning("no copy thread could be started (%s): the copy does not overlap", exc)
            copy.work()

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when the copy under way has ended; at once if there is none.

        One that has not after `timeout_s` (the stall budget) fails its step, and training goes on. Any thread.
        """
        self._wait(timeout_s, is_for_device=True)

    def hold_step(self, timeout_s: float | None = None) -> None:
        """Return when the copy's sources may be written, on a device by this thread's current streams. As `wait`."""
        self._wait(timeout_s, is_for_device=False)

    def _wait(self, timeout_s: float | None, *, is_for_device: bool) -> None:
        late = self._late
        if late is None:
            return
        copy, put = late
        began_s = time.monotonic()
        if not copy.ended.is_set():
            budget_s = self._budget_s if timeout_s is None else timeout_s
            is_done = copy.flights.order_rest(began_s + budget_s)
            if is_done and is_for_device:
                is_done = copy.ended.wait(max(0.0, began_s + budget_s - time.monotonic()))
            if not is_done:
                copy.stop(f"it was not copied within {budget_s:g} s at the fence")
            try:
                copy.flights.hold_current()
            except BaseException as exc:
                copy.stop(f"its copy failed: {exc!r}")
                if not isinstance(exc, RuntimeError):  # not the device's
                    raise
                log.exception("an overlapped copy failed: its step is given up")
        with self._checking:
            if self._late is not late:
                return  # another thread waited as well, has looked, and its optimizer may have written since
            # An operation raises the counter when it is done: one that was at work when the copy ended shows only now.
            name = copy.release()
            if name:
                put.retire(changed_message(name))
            put.ticket.stall_s += time.monotonic() - began_s
            if copy.ended.is_set():
                put.end_late()  # nothing, but where a signal's handler came between
            if is_for_device or copy.ended.is_set():
                self._late = None

    def close(self) -> None:
        """Wait for the copy under way as a fence does, let the optimizers go."""
        try:
            self.wait()
        finally:
            for hook in self._hooks:
                hook.remove()
            self._hooks, self._optimizers = [], []

    def give_up(self) -> None:
        """Stop the copies at exit, before the interpreter frees their memory."""
        if self._late is not None:
            copy, _ = self._late
            copy.stop("the process ended")
            copy.ended.wait(EXIT_S)

    def forget(self) -> None:
        """Drop the copies in a forked child: they and their thread are the parent's."""
        _OF_PARENTS.append(self._late)  # not freed here: its events are of the parent's device context
        self._late = None


def _end(put: Put, plan: StatePlan, problem: str) -> None:
    """Submit the put, or give its step up on all ranks (R12)."""
    try:
        if not problem:
            put.complete(plan)
        elif not put.ticket.is_over:
            put.fail(problem)
    except BaseException as exc:
        if not problem:
            put.fail(f"it could not be submitted: {exc!r}")
        raise
    finally:
        put.end_late()


def _work(copy: DeferredCopy) -> None:
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
    try:
        copy.work()
    except Exception as exc:
        copy.stop(f"its copy failed: {exc!r}")  # nothing, if it has ended
        log.exception("an overlapped copy failed: its step is given up")


class _Clones:
    """Device memory of one put that may change before the fence, copied on its device first."""

    def __init__(self) -> None:
        self._nbytes = 0

    def take(self, source: TensorSource) -> torch.Tensor | None:
        """Return a copy of a source's bytes, made on the current stream, or None if it is not to be copied late."""
        owner = source.owner
        if not isinstance(owner, torch.Tensor) or owner.is_cpu or not has_streams(owner.device):
            return None
        self._nbytes += source.nbytes
        if self._nbytes > CLONES_BYTES_MAX:
            return None
        return owner.clone() if is_flat(owner) else dense_bytes(owner)


_OVERLAPS: weakref.WeakSet[Overlap] = weakref.WeakSet()
_OF_PARENTS: list[object] = []


def _give_up_all() -> None:
    for overlap in list(_OVERLAPS):
        overlap.give_up()


def _forget_all() -> None:
    for overlap in list(_OVERLAPS):
        overlap.forget()


atexit.register(_give_up_all)
os.register_at_fork(after_in_child=_forget_all)


# -- optimizer memory ---------------------------------------------------------------------------------
# The memory that does not change before an optimizer's step: its parameters and state (R11).


Place = tuple[str, int]  # device, address


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield an optimizer's parameters and the tensors that its state holds for each of them."""
    for group in optimizer.param_groups:
        yield from group["params"]
    for values in optimizer.state.values():
        if isinstance(values, dict):
            yield from (value for value in values.values() if isinstance(value, torch.Tensor))


class OptimizerMemory:
    """The memory of some tensors, found by device and address.

    Tensor subclasses but DTensor are left out: what keeps their memory is unknown.

    Raises:
        ConfigError: Something else than a tensor is among them.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        found: dict[Place, tuple[int, tuple[torch.Tensor, ...]]] = {}
        is_one = isinstance(tensors, torch.Tensor) or not isinstance(tensors, Iterable)  # a tensor would be its rows
        for tensor in [tensors] if is_one else tensors:
            if not isinstance(tensor, torch.Tensor):
                raise ConfigError(
                    "overlap= takes True or the tensors that may be copied late, and one of them is of type "
                    f"{type(tensor).__name__}: pass model.parameters(), or the values of a state_dict()",
                    field="overlap",
                )
            local = subclasses.local_tensor(tensor) if subclasses.is_dtensor(tensor) else tensor
            if type(local) not in (torch.Tensor, torch.nn.Parameter) or local.is_inference():
                continue
            if _fills_its_extent(local) and local.nbytes and has_streams(local.device):
                owners = (local,) if local is tensor else (tensor, local)
                found[str(local.device), local.data_ptr()] = local.nbytes, owners
        self._starts = sorted(found)
        self._found = [found[start] for start in self._starts]

    def owners_of(self, source: TensorSource) -> tuple[torch.Tensor, ...]:
        """Return the tensors whose version counters tell of writes to a source, the one with its memory last, or ()."""
        if source.address is not None or not is_flat(source.owner):
            return ()  # of the host, or gathered bytes, which are a copy, made at once
        place = str(source.owner.device), source.owner.data_ptr()
        index = bisect_right(self._starts, place) - 1
        if index < 0:
            return ()
        (device, start), (nbytes, owners) = self._starts[index], self._found[index]
        return owners if device == place[0] and place[1] + source.nbytes <= start + nbytes else ()


def _fills_its_extent(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.is_nested:
        return False
    return tensor.is_contiguous() or is_dense(tensor.shape, tensor.stride(), 1)

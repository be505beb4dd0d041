"""The loop around a training function: meet, run, and after a loss leave, meet and run again in the same process.

+--> meet --all ranks--> run --return--> wait for the other ranks' return --> done
|                         | exception          | a rank is lost
|                         v                    |
+------- yes -- was a rank lost? --no--> raise |
+----------------------------------------------+
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from enum import Enum
from typing import Any, ParamSpec, TypeVar, cast

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from memstore.client.connect import newest_step_here
from memstore.core.attempts.in_place import generation_key
from memstore.core.cluster.text import listed
from memstore.errors import ConfigError
from memstore.inplace import watcher
from memstore.inplace.gloo_sockets import GlooSockets
from memstore.inplace.meeting import LOOK_S, Meeting, MeetingPlace, connect
from memstore.inplace.membership import NONE, Leaving, failure_of, in_place_of, may_be_loss, met_text
from memstore.inplace.settings import ProcessSettings
from memstore.inplace.watcher import Watcher
from memstore.shell.rank.holder_link import allow_links, interrupt_all
from memstore.shell.rank.launch import IN_PLACE, Launch, give_launch

# -- generation ---------------------------------------------------------------------------------------
# The generation that this process is in: one meeting of all ranks, one run of the training function in each.


@dataclass(frozen=True, slots=True)
class Generation:
    """One run of the training function on all ranks, between two losses.

    Attributes:
        number: 0 at the start of the worker group, one more after each loss.
        rank: This process's rank; the replacement of a lost rank has its number.
        world_size: Ranks that met.
        is_first_here: This process enters the training function for the first time.
        kept: What the training function keeps for its next entry in this process, such as compiled code or the
            workers of a data loader. A replacement's is empty. A model and an optimizer are over the former process
            group: `reuse` keeps them here, and takes them to this one.
    """

    number: int
    rank: int
    world_size: int
    is_first_here: bool
    kept: dict[str, Any] = field(default_factory=dict)


_current: Generation | None = None


def generation() -> Generation | None:
    """Return the generation that this process is in; None outside of a reentrant training function."""
    return _current


def enter(new: Generation | None) -> None:
    """Begin a generation, or end the last one."""
    global _current
    _current = new


# -- reentry ------------------------------------------------------------------------------------------


P = ParamSpec("P")
R = TypeVar("R")
log = logging.getLogger("memstore")
TIMED_OUT_S = 1.0  # by which a wait may look shorter than it was
VERDICT_S = 12.0  # a process that ended with its watchdog is known to be lost after 10 s
_place: MeetingPlace | None = None
_used: MeetingPlace | None = None


def join_meeting(place: MeetingPlace | None) -> None:
    """Say where this process meets the other ranks; a reentrant function that is called afterwards goes there."""
    global _place
    _place = place


def reentrant(function: Callable[P, R]) -> Callable[P, R]:
    """Let a training function be entered again in the same process after another rank was lost.

    The function connects, gets, trains and puts as it would anyway; torch.distributed is initialised when it is
    entered. If a rank is lost it is left by the exception that its collective, its put or its get raises, and entered
    again once the rank has its replacement. An exception of its own code is raised to the caller.

    Called in a process that `memstore.adapters.ray_train` or `memstore.inplace.ray_actors` has not started, it is the
    function itself.

    Raises:
        GatherTimeout: After a loss, no replacement came, or not all ranks did.
    """

    if hasattr(function, "is_reentrant"):
        return function

    @functools.wraps(function)
    def entered(*args: P.args, **kwargs: P.kwargs) -> R:
        return run_here(lambda: function(*args, **kwargs))

    entered.is_reentrant = True  # type: ignore[attr-defined]
    return entered


def run_here(function: Callable[[], R]) -> R:
    """Call a function in every generation that this process is to take part in; once if it is to meet no other.

    A function of its own, for pickle: what is sent by value takes a copy of the globals that it names.
    """
    global _used
    if _place is None:
        return function()
    if _used is _place:
        raise ConfigError(
            "a second reentrant function was called in this process: the ranks meet for one. Call both parts from one "
            "function, and decorate that"
        )
    _used = _place
    return _Reentry(_place).run(function)


class Outcome(Enum):
    """How a generation ended on this rank."""

    RETURNED = "the function returned on all ranks"
    LOST = "a rank was lost, and this one meets its replacement"
    RAISED = "the function raised an exception of its own, which ends this process"


class _Reentry:
    """Runs a function once in each generation, until it returns."""

    def __init__(self, place: MeetingPlace) -> None:
        self.place, self.meeting, self.sockets = place, Meeting(place), GlooSockets()
        self.kept: dict[str, Any] = {}
        self.watcher = Watcher(self.meeting, self._free)
        self.generation = NONE
        self.leaving: Leaving | None = None  # of the generation before; None: this process was in none
        self.settings = ProcessSettings.now()  # as the function was entered for the first time
        self.aborting: threading.Thread | None = None  # of this generation; what is computed from then on is void

    def run(self, function: Callable[[], R]) -> R:
        """Return what the function returned; None if it had returned on all ranks before this process was there."""
        last, is_first = self.place.first - 1, True
        try:
            if "nccl" in self.place.backend:
                watcher.leave_errors_to_us()
            while True:
                before, last = last, self.meeting.meet(last)
                met_s, failed_s, outcome = time.monotonic(), math.inf, Outcome.RAISED
                if last == NONE:
                    log.warning("memstore: rank %d was lost after all had returned: nothing is left", self.place.rank)
                    return cast(R, None)
                try:
                    self._begin(last, is_first=is_first)
                    give_launch(self._launch(last, before, met_s))
                    result = function()
                    self.watcher.leaving()
                    # Else a replacement would find no rank to go on with.
                    if self.meeting.is_over_for_all(last):
                        outcome = Outcome.RETURNED
                        return result
                    outcome = Outcome.LOST
                except BaseException as error:
                    failed_s = time.monotonic()
                    self.watcher.leaving()
                    is_void = self.aborting is not None and isinstance(error, Exception)
                    if not (is_void or may_be_loss(error)) or not self._is_over(last):
                        self._report(error, last)
                        raise
                    outcome = Outcome.LOST
                    text = str(error)  # a log record that kept the exception would keep its frames, and so the model
                    log.warning("memstore: rank %d leaves generation %d: %s", self.place.rank, last, text)
                finally:
                    over_s = self.watcher.over_s or time.monotonic()
                    self._end(outcome)
                    self.watcher.left()
                    self.leaving = Leaving(failed_s, over_s, time.monotonic())
                is_first = False
                # The frames of the exception are gone now, and with them the model if no cycle holds it.
                threading.Thread(target=_collect, name="memstore-collect", daemon=True).start()
        finally:
            self.watcher.close()
            allow_links()

    def _report(self, error: BaseException, generation: int) -> None:
        """Report an exception of the function's own: the same one again and again ends the job."""
        if isinstance(error, Exception):
            with contextlib.suppress(dist.DistError):  # what replaces ranks is gone, and the job with it
                rank, step = self.place.rank, newest_step_here()
                self.meeting.report(failure_of(error, run=self.place.run, generation=generation, rank=rank, step=step))

    def _begin(self, number: int, *, is_first: bool) -> None:
        place = self.place
        enter(Generation(number, place.rank, place.world_size, is_first, self.kept))
        self.generation, self.aborting = number, None
        allow_links()
        self.sockets.record()
        self.watcher.guard(number)
        # Over a connection of its own: if a rank is lost, the wait for its address ends only with the connection.
        store = connect(place)
        self.sockets.take_store(place.port)
        dist.init_process_group(
            place.backend,
            store=dist.PrefixStore(f"g{number}", store),
            rank=place.rank,
            world_size=place.world_size,
            timeout=timedelta(seconds=place.collective_timeout_s),
        )
        if watcher.has_nccl():
            watcher.make_communicator(place.gpu)
        self.sockets.made()
        if not is_first:
            self.settings.put_back()

    def _launch(self, number: int, before: int, met_s: float) -> Launch:
        """Return what connect() is to know of a generation that has met and made its process group."""
        place, now = self.place, time.monotonic()
        launch = Launch(
            place.rank,
            place.world_size,
            generation_key(place.run, number),
            place.launcher,
            IN_PLACE,
            may_be_loss=may_be_loss,
        )
        if number == 0:
            return launch
        losses = self.meeting.losses(number) if place.rank == 0 else ()
        in_place = in_place_of(number, losses, self.leaving, met_s, now)
        if place.rank == 0:
            log.info("memstore: %s", met_text(in_place, before))
        return replace(launch, in_place=in_place, since_s=now)

    def _free(self) -> None:
        """End every wait of the training thread: in a collective, for a process group, or on the store."""
        interrupt_all("a rank of it was lost")  # first: what an aborted collective leaves must not be put
        self.sockets.shut_store()
        is_making = self.sockets.is_making  # its sockets are what frees the thread then
        self.sockets.shut(spared_port=self.place.port)
        if not is_making and watcher.has_nccl():
            self._abort()

    def _abort(self) -> None:
        """Begin to abort in a thread of its own: if it hangs, the watcher can still kill this process."""
        if self.aborting is None:
            target = functools.partial(_abort, self.meeting, self.generation)
            self.aborting = threading.Thread(target=target, name="memstore-abort", daemon=True)
            self.aborting.start()

    def _end(self, outcome: Outcome) -> None:
        """End the generation's launch and its process groups.

        An exception of the function's own is about to end this process, and NCCL's communicators end with it: an abort
        could leave half a result to ranks whose stores are open.
        """
        enter(None)
        give_launch(None)
        self.sockets.shut(spared_port=self.place.port)  # else a collective under way could hold the group's end up
        self.sockets.end()
        if outcome is Outcome.RAISED and watcher.has_nccl():
            return
        if outcome is Outcome.LOST and (self.aborting is not None or watcher.has_nccl()):
            interrupt_all("its generation was left")  # an overlapped put may wait behind what is aborted
            self._abort()  # the same: a peer that is lost never takes part
            self.aborting.join()  # type: ignore[union-attr]  # at most leave_s: then the watcher kills this process
        if dist.is_initialized():
            try:
                dist.destroy_process_group()
            except Exception:
                if outcome is Outcome.RETURNED:
                    raise
                log.exception("memstore: the process group of a generation that was left could not be ended")
        _forget_groups()

    def _is_over(self, generation: int) -> bool:
        deadline_s = time.monotonic() + max(VERDICT_S, 2 * (self.place.hang_after_s or 0))
        inquiry = self.meeting.inquire(generation) if self._has_timed_out() else None
        while not self.meeting.is_over(generation):
            if time.monotonic() > deadline_s:
                return False
            if inquiry is not None and (absent := inquiry.look(time.monotonic())) is not None:
                log.warning(
                    "memstore: rank %d: a collective timed out; of %d ranks these wait in none: %s",
                    self.place.rank,
                    self.place.world_size,
                    listed(absent) or "none",
                )
                inquiry = None
            time.sleep(LOOK_S)
        return True

    def _has_timed_out(self) -> bool:
        """Return whether the training thread was in torch for as long as a collective may take."""
        limit_s = self.place.collective_timeout_s
        return self.watcher.waited_s >= max(limit_s / 2, limit_s - TIMED_OUT_S)


def _collect() -> None:
    """Free what only cycles hold, and give the system the memory between what is left: the next entry needs as much."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)


def _forget_groups() -> None:
    """Let torch begin again with its groups and their names, which a replacement's process begins with too.

    A group whose making broke off has counted, and one that the training thread made while the others were aborted is
    still registered: the next group of its name would be refused.
    """
    world = c10d._world
    for table in (
        world.pg_map,
        world.pg_names,
        world.pg_group_ranks,
        world.pg_backend_config,
        world.pg_to_tag,
        world.tags_to_pg,
        world.pg_coalesce_state,
    ):
        table.clear()
    c10d._update_default_pg(None)
    c10d._unregister_all_process_groups()
    world.group_count = 0


def _abort(meeting: Meeting, generation: int) -> None:
    try:
        # What this rank was to send may be missing in what another one computes and puts.
        meeting.again().wait_until_closed(generation)
    except Exception as exc:  # the meeting is gone, or this process has no descriptor left for a connection to it
        log.warning("memstore: NCCL is aborted without waiting for the other ranks: %r", exc)
    try:
        watcher.abort()
    except Exception:  # its process groups may be half gone: the training thread's next call says so, or leave_s
        log.exception("memstore: NCCL's communicators could not all be aborted")

"""Store: what a training loop calls. put copies into leased slots and returns; get restores one whole step.

Read `shell/rank/holder_link.py` for the other end of every call here, `core/controller/machine.py` for the decisions.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import logging
import mmap
import numbers
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from memstore.client.checkpoint import Checkpoint, open_shard
from memstore.client.pin_verbs import PinVerbs
from memstore.client.prepare import PutPreparation, bytes_to_come
from memstore.client.puts import Puts
from memstore.client.rehearsal import FirstRehearsal, Rehearsal, rehearse_stored, target_of
from memstore.client.shared_shard import SharedShard
from memstore.client.ticket import Ticket, check_process, check_step
from memstore.client.whole_get import WholeGet
from memstore.config import Config, check_given_whole, check_name, check_seconds, check_whole
from memstore.core.cluster.text import error_text
from memstore.core.send_gate import MARK_BYTES, MARK_MAX_S, MARK_PREFIX
from memstore.core.wire.calls import CloseStore, Get, ReadStep, Rewind
from memstore.core.wire.orders import PutEarly, StepLevel
from memstore.core.wire.rank_messages import CheckInto, HolderEvent, MarksMade, ShardDiffers, SlotsLeased
from memstore.core.wire.replies import Joined, StepAgreed
from memstore.errors import ClosedError, CommitError, ConfigError, MemstoreError, RecoveryError
from memstore.shell.rank.collective import CALL_SLACK_S, ask_with_all, collective, take_turn
from memstore.shell.rank.holder_link import HolderLink
from memstore.shell.rank.launch import Launch
from memstore.shell.rank.shard_read import ShardRanges, ShardRead
from memstore.shell.rank.sigterm import WATCH

if TYPE_CHECKING:
    import torch

    from memstore.client.dcp.reader import DcpReader
    from memstore.client.dcp.writer import DcpWriter

log = logging.getLogger("memstore")
REHEARSAL_S = 600.0  # for a commit, and for the fresh process
ERROR_SHOWN = 300  # characters of the exception that ended training


class Store(PinVerbs):
    """One rank of one attempt of a job; made by `memstore.connect`. A context manager; not thread-safe."""

    def __init__(self, link: HolderLink, launch: Launch, config: Config, joined: Joined, *, job: str) -> None:
        self.job, self.world_size = job, launch.world_size
        self.config = config
        self._link = link
        self._launch = launch
        self.puts = Puts(link, config, world_size=launch.world_size)
        self.marks = CollectiveMarks(link)
        self._take_attempt(joined)
        self._whole_get = WholeGet(link, self.puts)
        self._is_closed = False
        self._pid = os.getpid()
        self._one_get = threading.RLock()
        self._verb = _Verb()
        self.first_rehearsal: FirstRehearsal | None = None
        link.on_event, link.on_fenced = self.on_event, self.puts.on_fenced

    def _take_attempt(self, joined: Joined) -> None:
        self.attempt, self.rank = joined.attempt, joined.rank
        self.puts.begin_attempt(joined)

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and not self._is_closed and os.getpid() == self._pid:  # else no level events follow
            with contextlib.suppress(MemstoreError, TimeoutError):
                self.flush(timeout_s=self.config.stall_budget_s)
        self.close(error=error)

    def __repr__(self) -> str:
        return f"Store(job={self.job!r}, attempt={self.attempt}, rank={self.rank} of {self.world_size})"

    @property
    def shared_shard(self) -> SharedShard | None:
        """This rank's shared shard, with `is_writer`; None if connect() named no shard."""
        return self.puts.shared_shard

    # -- put ----------------------------------------------------------------------------------

    def put(
        self,
        step: int,
        state: Any,
        *,
        rank_state: Any = None,
        overlap: bool | Iterable[torch.Tensor] = False,
        timeout_s: float | None = None,
    ) -> Ticket:
        """Copy the state into this host's memory and return; everything else happens elsewhere (R11).

        Args:
            step: >= 0 and above every step put or restored before in this lineage; the same step again
                returns its ticket.
            state: Any nesting that docs/guide/put-and-get.md lists. With `connect(shard_rank=, shard_count=)`, what
                this shard's ranks share: it is looked at on its writers only (R34).
            rank_state: State of this rank alone, such as its data loader's position; with shard_rank= only.
            overlap: True: parameters and optimizer state on a GPU are copied while training goes on, until the step of
                an optimizer that was passed to `wait_before_step`; all else before put returns. Or the tensors that may
                be copied so.
            timeout_s: Longest wait for free slots instead of `stall_budget_s`.

        Returns:
            A ticket; if there were no free slots in time its level is "skipped" and training goes on (R12).

        Raises:
            UnsupportedState, StepConflict, ClosedError, FencedError: before anything is copied.
            ConfigError: `overlap=True` and no optimizer waits; a put in the middle of another verb of this thread.
            CapacityError, CommitError: at the first put only, on all ranks alike (R10, R19).
        """
        self._check_open()
        step, timeout_s = check_step(step), self._given_seconds(timeout_s)
        if rank_state is not None and self.shared_shard is None:
            raise ConfigError(
                "put(rank_state=) needs connect(shard_rank=, shard_count=): without, every rank's state is its own"
            )
        with self._alone(f"put({step})"):
            ticket = self.puts.put(step, state, timeout_s, overlap, rank_state)
            if ticket.level == "skipped":
                self.puts.steps.trained(step)
            elif self.first_rehearsal is not None:
                self.first_rehearsal.begin(step, self._rehearse_newest)
            return ticket

    def wait_before_step(
        self, optimizer: torch.optim.Optimizer | None = None, *, timeout_s: float | None = None
    ) -> None:
        """Hold an optimizer's steps until overlapped copies are done; without one, wait for them now. Any thread.

        This thread's current stream waits, the host does not. GPU memory that was written, freed or resized before it
        was copied makes its step fail, by name (or retires it): what autograd counts is seen, no write through `.data`
        and none by fused optimizers. A wait in vain, of `stall_budget_s` or `timeout_s`, fails the checkpoint step;
        training goes on.

        Raises:
            ConfigError: `optimizer` has no hook in front of its step.
        """
        timeout_s = self._given_seconds(timeout_s)
        if optimizer is None:
            self.puts.overlap.hold_step(timeout_s)
        else:
            self._check_open()
            self.puts.overlap.fence(optimizer)

    def should_put(self, step: int, *, is_epoch_end: bool | None = None) -> bool:
        """Return whether to put this step, by the job's `put_every`; the same answer on every rank (R33).

        Call it on every rank for every step, and put when it says so. With a time, a share or "auto" the first steps
        are put and measured; then commits bring the number of steps from one put to the next, and a new one now and
        then. should_put() waits only while several puts lack a commit, at most `stall_budget_s`.

        Args:
            step: That is trained.
            is_epoch_end: It is the last one of an epoch, on all ranks alike: what put_every="epoch" goes by.

        Raises:
            ConfigError: put_every="epoch", and `is_epoch_end` is not given.
            StepConflict: `step` is no int from 0 to 2**61 - 1.
        """
        self._check_open()
        return self.puts.steps.due(check_step(step), self.config.stall_budget_s, is_epoch_end)

    def prepare(self, state: Any, *, rank_state: Any = None) -> PutPreparation:
        """Make the first put as fast as the ones after it: claim, connect and enter its room in the background.

        Collective: call it on every rank, after get() if the job has a history. A put that comes before it is ready
        waits for it. After get() of a step the hosts grow and connect by themselves, but claim nothing.

        Args:
            state: The state to be put, or (an int) its bytes. A state is planned, not copied, with what optimizers of
                torch that have not stepped will keep.
            rank_state: As in put.

        Returns:
            At once; `wait()` on it raises the errors of a first put (CapacityError, CommitError, ...).

        Raises:
            UnsupportedState: put would refuse this state.
            ConfigError: the bytes are no int from 0 to 2**61 - 1.
            FencedError, ClosedError: as put.
        """
        self._check_open()
        nbytes = check_whole("state", state) if isinstance(state, numbers.Integral) else None
        self.puts.check_usable()
        with self._alone("prepare()"):
            if nbytes is None:
                nbytes = self.puts.planned(state, rank_state).nbytes + bytes_to_come((state, rank_state))
            return self.puts.room.prepare(nbytes)

    # -- events of the link (its threads) ---------------------------------------------------------

    def on_event(self, event: HolderEvent) -> None:
        """Take a holder's event: a level for tickets, a check for a get under way, entered slots."""
        match event:
            case StepLevel():
                self.puts.on_level(event)
            case PutEarly() if event.attempt == self.attempt:
                self.puts.steps.on_put_early(event)
            case CheckInto():
                self._whole_get.check(event)
            case SlotsLeased():
                self.puts.room.on_slots()
            case ShardDiffers() if self.shared_shard is not None and event.attempt == self.attempt:
                self.shared_shard.name_differing(self._link, event, self.puts.steps.wait_committed)

    # -- get ----------------------------------------------------------------------------------

    def get(
        self,
        step: int | None = None,
        *,
        rank: int | None = None,
        into: Any = None,
        rank_state_into: Any = None,
        from_job: str | None = None,
        trusted: bool = False,
        must_exist: bool = False,
        timeout_s: float = 600.0,
    ) -> Checkpoint | None:
        """Return the newest whole step of the lineage, the same on every rank; collective (R23, R24).

        Args:
            step: Read this step instead; adopts nothing (R22).
            from_job: Read a committed step of this other job, the newest whole one unless `step` names it; adopts
                nothing, and the other job does not change. With its first put this job branches off there (R32).
            trusted: Go back to the newest whole step that `trust` named, in RAM or on durable storage; with `from_job`
                read the other job's. What came after it leaves the lineage. RecoveryError where none is whole (R38).
            rank: Read one rank's shard, without a barrier (R27).
            into: Filled in place after every rank's bytes are verified (R26); with `rank`, as they come. Should that
                fail once it has begun, the error says that the state is unusable, get() fails on all ranks, none of
                them adopts the step, and puts are refused until a get() succeeds.
            rank_state_into: Filled with what this rank put as rank_state=, before `into` and likewise.
            must_exist: Raise RecoveryError instead of returning None.
            timeout_s: Deadline; GatherTimeout names the ranks that did not call.

        Returns:
            None only for a job without history, and after `connect(fresh=True)`; never with `from_job`.

        Raises:
            LoadError: an object of `into` did not take its state, on this rank.
            RecoveryError, WorldSizeError, ManifestMismatch, FencedError, PeerTimeout; ConfigError: in mid-put.
        """
        self._check_open()
        step, rank = check_given_whole("step", step), check_given_whole("rank", rank)
        timeout_s = check_seconds("timeout_s", timeout_s)
        if from_job is not None and check_name("job", from_job) == self.job:
            raise ConfigError(f"from_job={from_job!r} is this job: get(), or get(step), reads its own steps")
        if trusted and not (step is None and rank is None):
            raise ConfigError("trusted=True chooses the step and takes every rank: give it without step= and rank=")
        with self._alone("get()"):
            self.puts.overlap.wait()  # into= may be the state being copied
            if rank is not None:
                request = ReadStep(job=from_job or self.job, step=step, of_attempt=None, rank=rank)
                read = ShardRead(self._link, request, timeout_s)
                return open_shard(read, into, rank_state_into=rank_state_into, timeout_s=timeout_s)
            left_s = take_turn(self._one_get, f"get() of job {self.job!r}", timeout_s)
            try:
                asked = Get(**self._link.who(), step=step, from_job=from_job, timeout_s=left_s, is_trusted=trusted)
                got = self._whole_get.run(asked, into, rank_state_into)
            finally:
                self._one_get.release()
        if got is None and must_exist:
            raise RecoveryError(f"job {self.job!r} has no history, and get() was called with must_exist=True")
        return got

    def agree_on_step(self, *, timeout_s: float = 600.0) -> int | None:
        """Adopt the step that get() would return without loading its bytes; collective, the same on every rank (R27).

        For readers that take other ranks' shards with get(step, rank=) afterwards. None and the errors are get()'s.
        """
        self._check_open()
        timeout_s = check_seconds("timeout_s", timeout_s)
        with self._alone("agree_on_step()"):
            self.puts.overlap.wait()
            left_s = take_turn(self._one_get, f"agree_on_step() of job {self.job!r}", timeout_s)
            try:
                request = Get(**self._link.who(), step=None, timeout_s=left_s, is_agreement=True)
                answer = collective(self._link, request, left_s)
            finally:
                self._one_get.release()
        if not isinstance(answer, StepAgreed):
            return None
        self.puts.steps.go_on_from(answer.step)
        return answer.step

    # -- torch.distributed.checkpoint ----------------------------------------------------------

    def dcp_writer(self, step: int, *, wait: str | None = "committed", wait_s: float = 600.0) -> DcpWriter:
        """Return the StorageWriter, and AsyncStager, of one step: `dcp.save(state, storage_writer=...)`.

        Raises:
            ConfigError: connect() named a shard.
        """
        from memstore.client.dcp.writer import DcpWriter

        return DcpWriter(self.puts, check_step(step), wait=wait, wait_s=check_seconds("wait_s", wait_s))

    def dcp_reader(self, step: int | None = None, *, timeout_s: float = 600.0) -> DcpReader:
        """Return a StorageReader: `dcp.load(state, storage_reader=...)`, with any world size (R27).

        Args:
            step: Read this step and adopt nothing; None: the step that get() would return is adopted. A load that
                fails while it fills the state has puts refused, as a get() has.
        """
        from memstore.client.dcp.reader import DcpReader

        step, timeout_s = check_given_whole("step", step), check_seconds("timeout_s", timeout_s)
        ranges = ShardRanges(self._link, self.job, timeout_s)

        def agree() -> int | None:
            return self.agree_on_step(timeout_s=timeout_s)

        return DcpReader(ranges, step, agree, self.wait_before_step, report=self.puts.loaded)

    # -- collectives, so that a put's copies travel between them (D87) --------------------------

    @contextlib.contextmanager
    def collective(self) -> Iterator[None]:
        """Hold the copies of puts back while a collective runs inside; it counts for 10 s at most (D87)."""
        self.marks.begin()
        try:
            yield
        finally:
            self.marks.end()

    # -- the rest -----------------------------------------------------------------------------

    def rewind(self, step: int, *, attempt: int | None = None) -> None:
        """Go on from an older step: collective, opens a new attempt whose parent step is `step` (R22).

        Args:
            step: A committed step, in RAM or on durable storage; call `get()` for its bytes.
            attempt: The attempt that put it, where several lineages have a step of that number (`memstore ls`).

        Raises:
            RecoveryError: There is no such step, it is not committed, not whole or retired; nothing changed.
            WorldSizeError: It was put by another number of ranks.
            FencedError: A newer attempt runs, or another rank rewinds elsewhere.
        """
        self._check_open()
        step = check_whole("step", step)
        request = Rewind(
            **self._link.who(),
            step=step,
            of_attempt=check_given_whole("attempt", attempt),
            nonce=self._link.nonce,
            key=self._launch.key,
        )
        with self._alone(f"rewind({step})"):
            self.puts.overlap.wait()
            self._take_attempt(ask_with_all(self._link, request, limit_s=self.config.connect_timeout_s))
            self.puts.steps.fail_all(f"the job was rewound to step {step} in attempt {self.attempt}", forget=True)

    def flush(self, level: str = "committed", timeout_s: float | None = None) -> None:
        """Wait until the newest put has reached `level`; a skipped or superseded put is passed over."""
        self._check_process()
        limit_s = self.config.connect_timeout_s if timeout_s is None else check_seconds("timeout_s", timeout_s)
        self._alone("flush()")  # only looked at: while it waits a signal's handler may put
        for ticket in self.puts.steps.newest_first():
            if ticket.level not in ("skipped", "superseded"):
                ticket.wait(level, limit_s)
                return

    def rehearse(
        self,
        build: Callable[[], Any] | str,
        *,
        step: int | None = None,
        loss: float | None = None,
        timeout_s: float = 600.0,
    ) -> Rehearsal:
        """Ask whether a fresh process would take what this rank put; on any rank, alone. Nothing here changes.

        A child process builds everything once more, takes the stored shard and compares every value, by path.

        Args:
            build: A function that another process can import, or its name as "FILE.py:NAME". It returns the state as
                put() gets it, or the state and a function that trains one step and returns the loss. It runs without
                this launch's process group: a state that needs one is rehearsed at small scale, `memstore rehearse`.
            step: A step that is stored; None: the newest put.
            loss: Of the training step that followed it here: the child's next loss is compared with it, bit for bit.
            timeout_s: Longest time until the step is committed, and as long for the child.

        Raises:
            ConfigError: no process can import `build`, there was no put, or ranks share shards.
            CommitError, TimeoutError: the step is not committed. PeerTimeout: the child has not ended in time.
        """
        self._check_open()
        target, timeout_s = target_of(build), check_seconds("timeout_s", timeout_s)
        if self.shared_shard is not None:
            raise ConfigError("rehearse() takes no shared shards: use `memstore rehearse FILE.py:NAME`")
        step = self.puts.steps.last if step is None else check_whole("step", step)
        if step < 0:
            raise ConfigError("rehearse() takes a step that was put: put one first")
        self.puts.steps.wait_committed(step, timeout_s)
        request = ReadStep(job=self.job, step=step, of_attempt=None, rank=self.rank)
        with ShardRead(self._link, request, timeout_s) as read:
            return rehearse_stored(read, target, loss, timeout_s)

    def _rehearse_newest(self, step: int, target: str, ending: threading.Event) -> Rehearsal:
        """Rehearse the newest step once `step` is committed, or superseded; itself it may be gone by then."""
        with contextlib.suppress(CommitError):  # a newer one was committed before it
            self.puts.steps.wait_committed(step, REHEARSAL_S)
        newest = ReadStep(job=self.job, step=None, of_attempt=None, rank=self.rank)
        with ShardRead(self._link, newest, REHEARSAL_S) as read:
            return rehearse_stored(read, target, None, REHEARSAL_S, ending)

    def close(self, *, error: BaseException | None = None) -> None:
        """Leave the job; committed steps stay. Safe to call twice, and in a forked child, where it does nothing.

        Args:
            error: The exception that training ends by, as a `with` block passes it: `status` and `events` name it, and
                it counts as a death of the restored step (R25). Ctrl-C and sys.exit(0) are a good end, and in place an
                exception that may come of a lost peer is none.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if os.getpid() != self._pid:
            return  # its threads do not exist here, and would never release locks held at the fork
        try:
            if self.first_rehearsal is not None:
                self.first_rehearsal.close()
            WATCH.unwatch(self._link)
            self.puts.overlap.close()
        finally:
            self.puts.close()
            if error is not None and self._launch.may_be_loss is not None and self._launch.may_be_loss(error):
                self._link.interrupt("its generation was left")  # so its bye says that this process goes on
            if not self._link.fenced:
                with contextlib.suppress(MemstoreError):
                    self._link.call(CloseStore(**self._link.who(), error=_ended_by(error)), CALL_SLACK_S)
            self._link.close()

    def _check_open(self) -> None:
        if self._is_closed and not self._link.fenced:
            raise ClosedError(f"this Store of job {self.job!r} is closed: connect again")
        self._check_process()
        if self._link.fenced:
            raise self._link.fenced_error()

    def _alone(self, verb: str) -> _thread.LockType:
        """Return the lock to hold during a verb; ConfigError in the middle of another one of this thread (D131)."""
        own = self._verb
        if own.lock.locked():
            raise ConfigError(
                f"{verb} of job {self.job!r} was called in the middle of {own.name}, in the same thread: by a signal's "
                "handler, or by code of the state itself (a state_dict, a tensor's class). Let the handler set a flag, "
                f"and call {verb} when {own.name} has returned",
                verb=verb,
                outer=own.name,
            )
        own.name = verb
        return own.lock

    def _given_seconds(self, timeout_s: float | None) -> float | None:
        return None if timeout_s is None else check_seconds("timeout_s", timeout_s)

    def _check_process(self) -> None:
        check_process(f"this Store of job {self.job!r}", self._pid, f"; here memstore.reader({self.job!r}) reads")


class CollectiveMarks:
    """This rank's mark of its collectives, 8 bytes in a file for its holder: no call and no wait for any (R11, D87).

    Any thread may mark; collectives may overlap.
    """

    def __init__(self, link: HolderLink) -> None:
        self._link = link
        self._lock = threading.RLock()  # a signal's handler may put
        self._depth = 0  # collectives under way
        self._began_ns = 0  # when the first of them began
        self._known: object = None  # the connection over which the holder was sent the file
        self._path: Path | None = None
        self._word = memoryview(bytearray(MARK_BYTES)).cast("Q")

    def begin(self) -> None:
        """Mark the begin of a collective."""
        with self._lock:
            now_ns = time.monotonic_ns()
            if now_ns - self._began_ns > MARK_MAX_S * 1e9:  # what began then will never end: its group was given up
                self._depth = 0
            self._depth += 1
            if self._depth == 1:
                self._began_ns = now_ns
                self._mark(now_ns)

    def end(self) -> None:
        """Mark the end of a collective."""
        with self._lock:
            self._depth = max(0, self._depth - 1)
            if not self._depth:
                self._mark(0)

    def _mark(self, began_ns: int) -> None:
        if self._known is not self._link.channel:
            self._publish()
        self._word[0] = began_ns

    def _publish(self) -> None:
        """Make a file for the holder that serves now; without space for one, the marks reach no holder."""
        if self._path is not None:  # still there if its connection ended before the holder opened it
            self._path.unlink(missing_ok=True)
        self._known, self._word = self._link.channel, memoryview(bytearray(MARK_BYTES)).cast("Q")
        self._path = self._link.folder / f"{MARK_PREFIX}{secrets.token_hex(8)}"
        try:
            with open(self._path, "xb+", 0, opener=functools.partial(os.open, mode=0o600)) as file:
                file.write(bytes(MARK_BYTES))
                self._word = memoryview(mmap.mmap(file.fileno(), MARK_BYTES)).cast("Q")
        except OSError as exc:
            log.warning("memstore: collectives are not marked, so copies travel beside them: %s", exc)
            self._path.unlink(missing_ok=True)
            return
        self._link.notify(MarksMade(file=self._path.name))


class _Verb(threading.local):
    """The verb that is under way in this thread. C enters and leaves its lock: no handler leaves it held (D152)."""

    def __init__(self) -> None:
        self.lock, self.name = _thread.allocate_lock(), ""


def _ended_by(error: BaseException | None) -> str:
    """Return the exception as one line, "" for one that a person or the script ends a good run by."""
    if error is None or isinstance(error, (KeyboardInterrupt, GeneratorExit)):
        return ""
    if isinstance(error, SystemExit) and not error.code:
        return ""
    return error_text(error, ERROR_SHOWN)

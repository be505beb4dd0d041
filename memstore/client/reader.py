"""reader: reads a job's steps from outside it, follows its commits, and leases the step that it reads (R27, R36)."""

from __future__ import annotations

import itertools
import time
import weakref
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from memstore.admin.stores import naming_others
from memstore.client.checkpoint import Checkpoint, StepInfo, open_shard, step_infos
from memstore.client.connect import holder_folder
from memstore.client.pin_verbs import persist_request, persisted, pin_request
from memstore.config import Config, check_config, check_given_whole, check_name, check_seconds, check_whole
from memstore.core.cluster.job import TRUSTED
from memstore.core.wire.calls import AskSteps, AwaitStep, LeaseStep, ReadStep, UnpinStep
from memstore.core.wire.codec import Request
from memstore.core.wire.rank_messages import Unpin
from memstore.core.wire.replies import StepAwaited, StepLeased
from memstore.errors import ConfigError, LeaseLost, NoNewerStep, PeerUnreachable
from memstore.shell.rank.admin_link import ASK_S, Tool, open_any
from memstore.shell.rank.collective import CALL_SLACK_S
from memstore.shell.rank.shard_read import ShardRanges, ShardRead

if TYPE_CHECKING:
    from memstore.client.dcp.reader import DcpReader

R = TypeVar("R")
LIMIT_S = 600.0


class Lease:
    """A committed step that is not dropped while this is open (R36); a context manager. `Reader.lease` makes one.

    It ends with the `with` block, with its process, or after `limit_s`. Training does not wait for it: see
    `why_not_kept`, and docs/guide/followers.md for what else ends it. A read that comes too late raises LeaseLost.
    """

    def __init__(self, reader: Reader, answer: StepLeased, limit_s: float) -> None:
        self.step = answer.step
        self.attempt = answer.attempt  # that put it
        self.why_not_kept = answer.why_not_kept  # "": it is kept; else why it is dropped when newer steps come
        self._reader, self._limit_s, self._until_s = reader, limit_s, time.monotonic() + limit_s
        self._end = weakref.finalize(self, reader._tool.link.notify, Unpin(pin=answer.pin))
        self._end.atexit = False  # its process's end ends it, too

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        """Let go of the step. Idempotent."""
        self._end()

    def get(self, *, rank: int = 0, into: Any = None, timeout_s: float = 600.0) -> Checkpoint:
        """Return one rank's shard of the step; as `Reader.get`."""
        return self._reader.get(self.step, rank=rank, into=into, timeout_s=timeout_s, attempt=self.attempt)

    def lost(self) -> LeaseLost:
        """Return the error for a read of this step that found it dropped."""
        if self.why_not_kept:
            why = f"nothing kept it when newer ones were committed ({self.why_not_kept})"
        elif time.monotonic() >= self._until_s:
            why = f"its limit_s={self._limit_s:g} is over: give a longer one"
        else:
            why = "puts took its slots back, or its host's holder or the controller ended meanwhile"
        return LeaseLost(
            f"step {self.step} of job {self._reader.job!r} was dropped under its lease: {why}. Lease the newest step, "
            "and read that",
            step=self.step,
        )


class Reader:
    """Reads and follows a job without joining it: no barrier, no fence. It may be opened before its job exists."""

    def __init__(self, job: str, tool: Tool, config: Config) -> None:
        self.job = job
        self._tool, self._config = tool, config
        self._seen: tuple[int, int] | None = None  # attempt and step that wait_newer() or lease() returned last
        self._numbers = itertools.count(1)

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def steps(self) -> list[StepInfo]:
        """Return every step the store knows of the job, newest first."""
        return step_infos(self._ask(AskSteps(job=self.job)))

    # -- following ----------------------------------------------------------------------------

    def latest_step(self) -> int | None:
        """Return the newest committed step of the lineage; None if there is none, or no such job yet.

        It may be dropped by the time it is read: `lease()` keeps it.
        """
        return self._await(None, None, 0.0).step

    def wait_newer(self, than: int | None, timeout_s: float = LIMIT_S) -> int:
        """Wait until a step newer than `than` is committed; return the newest one's number.

        The controller answers when it commits: any number of readers may wait, and none asks again and again. The job
        need not exist yet. If `than` is what this reader returned last, a step of a later launch counts as newer even
        where its number is lower, as after a rewind (R22).

        Args:
            than: The step that the caller has; None: any will do.

        Raises:
            NoNewerStep: None was committed within `timeout_s`.
        """
        than, timeout_s = check_given_whole("than", than), check_seconds("timeout_s", timeout_s)
        attempt = self._seen[0] if self._seen is not None and self._seen[1] == than else None
        answer = self._await(than, attempt, timeout_s)
        if answer.step is None or answer.attempt is None:
            newer = "no step" if than is None else f"no step newer than {than}"
            raise NoNewerStep(
                f"{newer} of job {self.job!r} was committed within {timeout_s:g} s: is it training? "
                f"{self._config.commands('`memstore status`')}",
                operation="wait_newer",
                limit_s=timeout_s,
            )
        self._seen = answer.attempt, answer.step
        return answer.step

    def _await(self, than: int | None, attempt: int | None, timeout_s: float) -> StepAwaited:
        request = AwaitStep(job=self.job, than=than, of_attempt=attempt, within_s=timeout_s)
        return self._tool.ask(request, timeout_s + CALL_SLACK_S)

    def lease(self, step: int | None = None, *, attempt: int | None = None, limit_s: float = LIMIT_S) -> Lease:
        """Keep a committed step in RAM while it is read: `with reader.lease() as leased: ... leased.step`.

        Args:
            step: None: the newest committed step of the lineage.
            attempt: Whose, where several lineages have a step of that number.
            limit_s: The lease ends after this time, whatever its process does.

        Raises:
            RecoveryError: There is no such committed step. StepDropped: Not any more.
        """
        limit_s = check_seconds("limit_s", limit_s)
        request = LeaseStep(
            job=self.job,
            step=check_given_whole("step", step),
            of_attempt=check_given_whole("attempt", attempt),
            lease=f"{self._tool.link.nonce}/{next(self._numbers)}",
            limit_s=limit_s,
        )
        answer = self._ask(request, self._config.connect_timeout_s + CALL_SLACK_S)
        self._seen = answer.attempt, answer.step
        return Lease(self, answer, limit_s)

    # -- reading ------------------------------------------------------------------------------

    def get(
        self,
        step: int | None = None,
        *,
        rank: int = 0,
        into: Any = None,
        timeout_s: float = 600.0,
        attempt: int | None = None,
    ) -> Checkpoint:
        """Return one rank's shard (R27); `attempt` says whose, where several lineages have a step of that number.

        Raises:
            StepDropped: Newer steps were committed meanwhile, and puts took its slots: lease or pin it (R7).
        """
        request = ReadStep(
            job=self.job,
            step=check_given_whole("step", step),
            of_attempt=check_given_whole("attempt", attempt),
            rank=check_whole("rank", rank),
        )
        timeout_s = check_seconds("timeout_s", timeout_s)
        with naming_others(self._config, self.job):
            return open_shard(ShardRead(self._tool.link, request, timeout_s), into, timeout_s=timeout_s)

    def load(
        self,
        state: dict[str, Any],
        step: int | None = None,
        *,
        attempt: int | None = None,
        process_group: Any = None,
        planner: Any = None,
        timeout_s: float = LIMIT_S,
    ) -> int:
        """`dcp.load` a step into `state` under a lease, resharded to this process or this group; return its number.

        `state` may be a part of what was saved, such as the model alone. Errors are raised as themselves, not within
        torch's CheckpointException, which is no Exception.

        Args:
            state: As for `dcp.load`.
            step: None: the newest committed step.
            attempt: Whose, where several lineages have a step of that number.
            process_group: All of its ranks call load() together; None: this process loads alone.
            planner: DCP's LoadPlanner, if not the default one.
            timeout_s: For the lease, and for each read.

        Raises:
            RecoveryError: There is no such committed step. LeaseLost: The lease was over before the load.
            ManifestMismatch: The step was not saved through DCP.
        """
        from memstore.client.dcp.reader import load

        reader = self.dcp_reader(step, attempt=attempt, timeout_s=timeout_s)
        return load(state, reader, process_group=process_group, planner=planner)

    def dcp_reader(
        self, step: int | None = None, *, attempt: int | None = None, timeout_s: float = LIMIT_S
    ) -> DcpReader:
        """Return a StorageReader for `dcp.load(state, storage_reader=...)`, which leases the step while a load runs.

        Each load with it takes the newest step, unless one is named; `.step` says which it was. If several processes
        load together, all take the coordinator's step. `load()` raises errors that `except Exception` catches.
        """
        from memstore.client.dcp.reader import DcpReader

        step, attempt = check_given_whole("step", step), check_given_whole("attempt", attempt)
        timeout_s = check_seconds("timeout_s", timeout_s)
        return DcpReader(
            self.ranges(attempt=attempt, timeout_s=timeout_s),
            step,
            lease=lambda number, of: self.lease(number, attempt=of, limit_s=timeout_s),
        )

    def pin(self, step: int, name: str, *, attempt: int | None = None) -> None:
        """Keep a committed step in RAM under a name; as `Store.pin`."""
        self._ask(pin_request(self.job, step, name, attempt))

    def trust(self, step: int, *, attempt: int | None = None) -> int:
        """Say that a committed step was found good; as `Store.trust`."""
        return self._ask(pin_request(self.job, step, TRUSTED, attempt)).step

    def pins(self) -> list[str]:
        """Return the names of the job's pins."""
        return sorted(self._ask(AskSteps(job=self.job)).pins)

    def unpin(self, name: str) -> None:
        """Take a pin's name back; as `Store.unpin`."""
        self._ask(UnpinStep(job=self.job, name=check_name("pin", name)))

    def persist(self, step: int | None = None, *, timeout_s: float = 300.0) -> int:
        """Write a committed step to durable storage now; as `Store.persist`."""
        request = persist_request(self.job, step, timeout_s)
        return persisted(self._ask(request, request.within_s + ASK_S), request.within_s)

    def ranges(self, *, attempt: int | None = None, timeout_s: float = 600.0) -> ShardRanges:
        """Return reads of parts of any rank's shard; `attempt` chooses among steps of one number."""
        timeout_s = check_seconds("timeout_s", timeout_s)
        return ShardRanges(self._tool.link, self.job, timeout_s, check_given_whole("attempt", attempt))

    def _ask(self, request: Request[R], timeout_s: float = ASK_S) -> R:
        with naming_others(self._config, self.job):
            return self._tool.ask(request, timeout_s)

    def close(self) -> None:
        """End the reader's link."""
        self._tool.close()


def reader(job: str, *, address: str | None = None, config: Config | None = None) -> Reader:
    """Open a reader of a job, on this host's holder, or on any of this machine's; starts nothing.

    Args:
        job: Name of the training run.
        address: Ray cluster of the store, joined only if this process's host is not known otherwise:
            its node on this machine does then (R4).
        config: Store fields to find the store.

    Raises:
        PeerUnreachable, PeerTimeout: no holder, or no Ray cluster at `address`, which is asked for `connect_timeout_s`.
    """
    config = check_config(config)
    check_name("job", job)
    with naming_others(config, job):
        return Reader(job, _reading_tool(config, address), config)


def _reading_tool(config: Config, address: str | None) -> Tool:
    try:
        return Tool(holder_folder(config))
    except (ConfigError, PeerUnreachable) as error:
        if address is None and isinstance(error, ConfigError):
            return open_any(config)  # several hosts are here: a reader belongs to none, and each brings it all bytes
        if address is None:
            raise
        from memstore.admin.cluster import join_ray

        join_ray(address, may_create=False, limit_s=config.connect_timeout_s, config=config)
        return Tool(holder_folder(config))

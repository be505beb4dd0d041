"""The scratch job of a drill of recovery in place: an `InPlaceGroup` on the drill's own cluster, and what it noted."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import ray

from memstore.config import Config
from memstore.drills.ranks.in_place import ENTERED, TRAINED, Gate, Note, RankEnd, Task, Training, notes, processes
from memstore.drills.ranks.ranks import CALL_S, Rank
from memstore.drills.sites.scratch import SETTLE_S, ScratchJob
from memstore.drills.sites.site import Site
from memstore.errors import DrillError, MemstoreError
from memstore.inplace.ray_actors import InPlaceGroup
from memstore.testing.faults.processes import Process, process_of
from memstore.testing.ranks.rank import PutRow

END_S = 240.0  # from the fault to the end of the training: some starts of processes, a leave, a verdict


class InPlaceJob(ScratchJob):
    """A job whose lost ranks are replaced while the others stay in their processes.

    The gate holds the training up before the fault, and lets it go on to its last step with the fault.
    """

    def __init__(
        self,
        site: Site,
        name: str,
        config: Config,
        *,
        seed: int,
        nbytes: int,
        is_altered: bool,
        group_options: Mapping[str, Any],
    ) -> None:
        super().__init__(site, name, config, seed=seed, nbytes=nbytes)
        self._is_altered, self._group_options = is_altered, group_options
        self.limit = -1  # the last step that may be trained now
        self._group: _Group | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="drill-in-place")
        self._run: Future[list[Any]] | None = None

    # -- the training -------------------------------------------------------------------------

    def start(self, hosts: Sequence[str]) -> None:
        """Start as many ranks as there are `hosts`; Ray spreads them."""
        self._folder = tempfile.mkdtemp(prefix="memstore-in-place-")
        self.gate = Gate(self._folder)
        self.gate.open(self.limit)
        task = Task(self.name, self.config, self.seed, self.nbytes, self._folder, self._is_altered)
        self._group = _Group(len(hosts), self._group_options)
        self._run = self._thread.submit(self._group.run, Training(task))
        entered = self._wait_all(ENTERED, -1, CALL_S)
        host_of = {node: host for host, node in self.site.nodes().items()}
        self.ranks = [
            Rank(None, host_of[entered[rank].node], entered[rank].pid, entered[rank].start)
            for rank in range(len(hosts))
        ]

    def train(self, first: int, last: int, what: str) -> None:
        """Let all ranks train up to step `last`, and wait until that is committed."""
        self.put(first, last, what)
        self.wait("committed", f"commit {what}")

    def put(self, first: int, last: int, what: str = "put") -> list[PutRow]:
        """Let all ranks train up to step `last`, and put each step."""
        self.limit = last
        self.gate.open(last)
        self._wait_all(TRAINED, last, CALL_S)
        return []

    def wait(self, level: str, what: str) -> None:
        """Wait until the step at the gate is committed, or some step is durable."""

        def look() -> bool:
            newest = self.newest()
            return newest.durable_step is not None if level == "durable" else newest.committed_step == self.limit

        self.site.wait_for(what, look, SETTLE_S)

    def go(self, steps_count: int) -> None:
        """Let the ranks train so many more steps, which are the last."""
        self.limit += steps_count
        self.gate.open(self.limit, is_last=True)

    def finish(self) -> tuple[list[RankEnd], str]:
        """Wait for the end of the training; return what the ranks returned, or the error that ended it, as text.

        Raises:
            DrillError: it did not end.
        """
        assert self._run is not None
        try:
            return self._run.result(END_S), ""
        except FutureTimeout as exc:
            raise DrillError(f"the training did not end within {END_S:g} s after the fault") from exc
        except (MemstoreError, ray.exceptions.RayError) as exc:
            cause = getattr(exc, "cause", None) or exc
            return [], f"{type(cause).__name__}: {cause}"

    # -- what the ranks noted -----------------------------------------------------------------

    def notes(self) -> list[Note]:
        """Return what all processes of ranks have noted, in the order of time."""
        return notes(self._folder)

    def wait_spare(self) -> Process:
        """Wait for a process that waits to take the place of a rank; return it."""
        ranks = {rank.pid for rank in self.ranks}
        found: set[int] = self.site.wait_for("a spare", lambda: processes(self._folder) - ranks, CALL_S)
        return process_of(min(found))

    def wait_entered(self, rank: int) -> Note:
        """Wait until a rank has entered the training function after a loss; return its note."""

        def look() -> Note | None:
            found = (note for note in self.notes() if (note.what, note.rank) == (ENTERED, rank) and note.generation)
            return next(found, None)

        note: Note = self.site.wait_for(f"rank {rank} to enter another generation", look, CALL_S)
        return note

    def _wait_all(self, what: str, step: int, timeout_s: float) -> dict[int, Note]:
        """Wait until every rank has noted this; return its last such note, by rank.

        Raises:
            DrillError: the training has ended before, or it took too long.
        """
        assert self._group is not None
        assert self._run is not None
        run, count = self._run, self._group.world_size
        found: dict[int, Note] = {}

        def look() -> bool:
            found.update({note.rank: note for note in self.notes() if (note.what, note.step) == (what, step)})
            return len(found) == count or run.done()

        where = f" step {step}" if step >= 0 else ""
        self.site.wait_for(f"{count} ranks that have {what}{where}", look, timeout_s)
        if len(found) < count:
            raise DrillError(f"the training has ended early: {self.finish()[1] or 'all ranks have returned'}")
        return found

    # -- the end ------------------------------------------------------------------------------

    def end_ranks(self) -> None:
        """End the run, and every process of it."""
        if self._group is not None and self._run is not None:
            self._group.end()
            with contextlib.suppress(Exception):
                self._run.result(SETTLE_S)
            shutil.rmtree(self._folder, ignore_errors=True)
        self._thread.shutdown(wait=False)
        self.ranks = []


class _Group(InPlaceGroup):
    """A group that can be ended from outside."""

    def __init__(self, world_size: int, options: Mapping[str, Any]) -> None:
        super().__init__(world_size, actor_options={"num_cpus": 0.5, "scheduling_strategy": "SPREAD"}, **options)
        self._actors: list[Any] = []

    def actor(self) -> Any:
        actor = super().actor()
        self._actors.append(actor)
        return actor

    def end(self) -> None:
        """Kill every process; none is replaced any more, so that the run ends by an error if it goes on."""
        self.max_losses = 0
        for actor in self._actors:
            with contextlib.suppress(Exception):
                ray.kill(actor)

"""Plain Ray actors, one a rank: those that are lost are replaced, the others stay."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.exceptions import RayError, RayTaskError

from memstore.config import check_limit, check_whole
from memstore.core.cluster.text import CAUSES
from memstore.errors import RecoveryError
from memstore.inplace.lifelines import Process
from memstore.inplace.meeting import MeetingPlace, MeetingServer
from memstore.inplace.reentry import join_meeting, reentrant

log = logging.getLogger("memstore")
POLL_S = 0.05
SPARE_LOOK_S = 2.0  # between two questions to a spare
SPARE_ANSWERS_S = 1.0  # longest wait for a spare's answer, with which it takes the place of a rank
SPARE_AFTER_S = 10.0  # a spare's imports take a core, which the recovery needs first


class InPlaceGroup:
    """Runs a training function on one Ray actor a rank, and replaces actors that are lost.

    Args:
        world_size: Number of ranks.
        actor_options: Of each actor, such as `{"num_gpus": 1, "scheduling_strategy": "SPREAD"}`; as ray.remote takes.
        backend: Of torch.distributed.
        spares: Actors that wait, with torch and the function's module imported, to take the place of a lost one.
        hang_after_s: A process that is frozen for this long is lost, or a host that is silent; None: only what Ray
            sees is.
        max_losses: Lost ranks, over all of a run, that are replaced; one more ends it.
        leave_s: Longest wait for a rank that lives to leave the function after a loss, such as one in a computation of
            its own; then its process is killed and replaced, too.
        meet_s: Longest wait of the ranks for one another, such as for a replacement that Ray cannot place.
        collective_timeout_s: Of torch.distributed's collectives.

    Raises:
        ConfigError: A time is not above 0, or a count below 0.
    """

    def __init__(
        self,
        world_size: int,
        *,
        actor_options: Mapping[str, Any] | None = None,
        backend: str = "gloo",
        spares: int = 0,
        hang_after_s: float | None = 3.0,
        max_losses: int = 20,
        leave_s: float = 60.0,
        meet_s: float = 300.0,
        collective_timeout_s: float = 600.0,
    ) -> None:
        self.world_size = check_whole("world_size", world_size, low=1)
        self.spares_count = check_whole("spares", spares)
        self._options = {"num_cpus": 1, **(actor_options or {}), "max_restarts": 0}
        self._backend, self.max_losses = backend, check_whole("max_losses", max_losses)
        self.hang_after_s = None if hang_after_s is None else check_limit("hang_after_s", hang_after_s)
        self._leave_s, self.meet_s = check_limit("leave_s", leave_s), check_limit("meet_s", meet_s)
        self._collective_timeout_s = check_limit("collective_timeout_s", collective_timeout_s)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `function(*args)` on every rank, again after each loss, and return what the ranks returned, by rank.

        Raises:
            RecoveryError: More than `max_losses` ranks were lost, or one after all had returned, or one's actor has
                not started within `meet_s`.
            RayTaskError: The function raised on some rank, with that rank's traceback; all ranks are ended.
        """
        run = _ActorRun(self, function, args)
        try:
            return run.to_the_end()
        finally:
            run.close()

    def place(self, server: MeetingServer, rank: int, *, is_spare: bool) -> MeetingPlace:
        """Return what a new process of a rank needs to find the others."""
        return MeetingPlace(
            address=ray.util.get_node_ip_address(),
            port=server.port,
            run=server.run,
            rank=rank,
            life=server.register(rank, is_spare=is_spare),
            first=server.generation + 1,
            world_size=self.world_size,
            launcher=f"ray-job:{ray.get_runtime_context().get_job_id()}",
            backend=self._backend,
            collective_timeout_s=self._collective_timeout_s,
            meet_s=self.meet_s,
            leave_s=self._leave_s,
            lifeline_port=server.lifeline_port,
            hang_after_s=self.hang_after_s,
        )

    def no_room_text(self, rank: int) -> str:
        """Return why a rank cannot begin."""
        free = {name: count for name, count in ray.available_resources().items() if ":" not in name}
        return (
            f"the actor of rank {rank} of {self.world_size} has not started within meet_s={self.meet_s:g} s. It needs "
            f"{self._options}, and free in the cluster are {free}: add hosts, or ask for less in actor_options"
        )

    def actor(self) -> Any:
        """Start an actor."""
        return ray.remote(**self._options)(_Member).remote()


class _ActorRun:
    """One run of a function on a group: its actors, and the meeting that they share."""

    def __init__(self, group: InPlaceGroup, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.group, self.args = group, args
        self.function = ray.put(function)
        self.server = MeetingServer(group.world_size, group.hang_after_s)
        self.actors: dict[int, Any] = {}  # by rank
        self.waiting: dict[Any, int] = {}  # the end of each rank's function -> rank
        self.results: dict[int, Any] = {}
        self.spares: dict[Any, Any] = {}  # the end of a spare's warm-up, or its last answer -> the spare
        self.looked_s = 0.0  # when the spares were last asked for an answer
        self.spares_due_s: float | None = None
        self.losses = 0
        # An answer of each actor that Ray places -> which process of a rank it is, asked at.
        self.unplaced: dict[Any, tuple[Process, float]] = {}

    def to_the_end(self) -> list[Any]:
        for rank in range(self.group.world_size):
            self._start(rank)
        self.server.begin(0)
        self.spares_due_s = time.monotonic()
        while self.waiting:
            done, _ = ray.wait(list(self.waiting), num_returns=1, timeout=POLL_S)
            lost = [rank for rank in map(self._ended, done) if rank is not None]
            self._end_lost()  # first, because it notes why a rank is lost
            if lost:
                self._replace(lost)
            self._check_placed()
            self._start_spares()
        return [self.results[rank] for rank in range(self.group.world_size)]

    def _start(self, rank: int, spare: Any = None) -> None:
        place = self.group.place(self.server, rank, is_spare=spare is not None)
        actor = self.actors[rank] = spare or self.group.actor()
        self.unplaced[actor.answer.remote()] = (rank, place.life), time.monotonic()
        self.waiting[actor.run.remote(place, [self.function], self.args)] = rank

    def _check_placed(self) -> None:
        """Raise if an actor has not started for too long."""
        if self.unplaced:
            there, _ = ray.wait(list(self.unplaced), num_returns=len(self.unplaced), timeout=0)
            for ref in there:  # placed, or lost: then its function's end says so
                process, _ = self.unplaced.pop(ref)
                self.server.expect(process, self.group.meet_s, time.monotonic())
        for (rank, _), since_s in self.unplaced.values():
            if time.monotonic() - since_s > self.group.meet_s:
                raise RecoveryError(self.group.no_room_text(rank))

    def _ended(self, ref: Any) -> int | None:
        """Take the end of a rank's function; return the rank if its process was lost."""
        rank = self.waiting.pop(ref)
        try:
            self.results[rank] = ray.get(ref)
        except RayTaskError:
            raise
        except RayError as exc:  # the actor has ended, or its host with what it returned
            log.warning("memstore: rank %d of generation %d was lost: %s", rank, self.server.generation, exc)
            return rank
        return None

    def _replace(self, ranks: list[int]) -> None:
        """Start a process for each lost rank, and let all meet again."""
        self.server.mark_broken()
        self.losses += len(ranks)
        if self.losses > self.group.max_losses:
            raise RecoveryError(f"{self.losses} ranks were lost, max_losses={self.group.max_losses} are replaced")
        if self.server.is_done():
            raise RecoveryError(f"ranks {ranks} were lost after all had returned: what they returned is lost too")
        for rank in ranks:
            ray.kill(self.actors[rank])  # it may be alive, and only out of Ray's reach
            self._start(rank, self._spare())
        self.server.begin(self.server.generation + 1)
        self.spares_due_s = time.monotonic() + SPARE_AFTER_S

    def _spare(self) -> Any:
        """Return a spare that is ready; None if there is none."""
        while self.spares:
            ready, _ = ray.wait(list(self.spares), num_returns=1, timeout=SPARE_ANSWERS_S)  # one may be about to answer
            if not ready:
                return None
            actor = self.spares.pop(ready[0])
            try:
                ray.get([ready[0], actor.answer.remote()], timeout=SPARE_ANSWERS_S)  # it may have died or frozen since
            except RayError:
                ray.kill(actor)
                continue
            return actor
        return None

    def _look_at_spares(self) -> None:
        """Ask each spare that answered last time to answer again; forget those that have died."""
        self.looked_s = time.monotonic()
        ready, _ = ray.wait(list(self.spares), num_returns=len(self.spares), timeout=0) if self.spares else ([], [])
        for ref in ready:
            actor = self.spares.pop(ref)
            try:
                ray.get(ref)
            except RayError as exc:
                log.warning("memstore: a spare is lost, and replaced in %g s: %s", SPARE_AFTER_S, exc)
                self.spares_due_s = self.spares_due_s or self.looked_s + SPARE_AFTER_S
                continue
            self.spares[actor.answer.remote()] = actor

    def _end_lost(self) -> None:
        """End the actors that are lost and of which Ray does not know yet."""
        for rank, end in self.server.take_lost(time.monotonic()).items():
            if rank in self.waiting.values() and not self.server.is_done():
                log.warning("memstore: rank %d is lost: %s", rank, CAUSES[end.cause])
                self.server.mark_broken()  # frees the others now: Ray may take a while to see it
                ray.kill(self.actors[rank])

    def _start_spares(self) -> None:
        if time.monotonic() - self.looked_s > SPARE_LOOK_S:
            self._look_at_spares()
        if self.spares_due_s is not None and time.monotonic() >= self.spares_due_s:
            self.spares_due_s = None
            while len(self.spares) < self.group.spares_count:
                actor = self.group.actor()
                self.spares[actor.warm_up.remote([self.function])] = actor

    def close(self) -> None:
        for actor in (*self.actors.values(), *self.spares.values()):
            ray.kill(actor)
        self.server.close()


class _Member:
    """The process of one rank, or a spare."""

    def warm_up(self, function: list[Any]) -> None:
        """Do what takes seconds and needs no rank: the function's module, and torch.distributed's first call."""
        ray.get(function[0])
        warm_torch(on_gpu=bool(ray.get_gpu_ids()) and torch.cuda.device_count() == 1)

    def answer(self) -> None:
        """Show that this process is there."""

    def run(self, place: MeetingPlace, function: list[Any], args: tuple[Any, ...]) -> Any:
        """Call the function as this rank, in every generation."""
        join_meeting(place)
        return reentrant(ray.get(function[0]))(*args)


def warm_torch(*, on_gpu: bool) -> None:
    """Make and end a process group of one rank, and train one step of a tiny model.

    torch's first calls take longer than later ones: the first optimizer imports some 190 modules, and the first use of
    a GPU makes a context.
    """
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.barrier()
    dist.destroy_process_group()
    with torch.random.fork_rng(devices=[]):  # a new process would begin with the same random numbers
        layer = torch.nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.zeros(1, 1)).sum().backward()
    optimizer.step()
    if on_gpu:
        torch.ones(8, 8, device="cuda").matmul(torch.ones(8, 8, device="cuda")).cpu()

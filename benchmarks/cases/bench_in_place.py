"""`python -m benchmarks.cases.bench_in_place --kills 5 --out FOLDER`: a lost rank or host -> the first new step done.

Four ranks under Ray Train on an embedded cluster of four hosts, in three ways of sharding. Three contenders, each a job
of its own in the same cluster: Ray's restart of all ranks, recovery in place with a new worker, and with a spare. Ranks
are killed or frozen at random moments of their training, hosts killed, or cut off in network namespaces (root). The
clock runs from the fault until the last rank has done its first step in the training function that it entered
afterwards. In every job each step's loss and samples have to be those of a job that lost nothing, bit for bit, and in
place every other rank has to keep its process.

Contenders follow one another: of a pair of kills that make a ratio both are the n-th of their jobs. Ray looks for dead
workers every 0.5 s (2 s by default) in all of them. Where torchft can be imported, Ray Train with torchft is one more
of DDP: its other replicas go on at once, so its clock stops when the lost one trains again, too.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.report import __main__, results
from benchmarks.report.harness import MIB, Options, Ratio, Record
from benchmarks.report.targets import (
    IN_PLACE,
    IN_PLACE_COST,
    IN_PLACE_CUT,
    IN_PLACE_FREEZE,
    IN_PLACE_SPARE,
    IN_PLACE_SPARE_S,
)
from benchmarks.rigs.stopwatch import cpu_seconds
from memstore.drills.ranks.in_place import Gate
from memstore.drills.sites.site_options import embedded_site, prepare_ray, quiet
from memstore.testing.clusters.namespaces import available
from memstore.testing.faults.processes import descendants
from memstore.testing.ranks.in_place_job import SharedGpu

if TYPE_CHECKING:
    from benchmarks.rigs.in_place_training import StepDone
    from memstore.drills.sites.site import EmbeddedSite

RESTART, NEW_WORKER, SPARE = "Ray's restart", "in place, new worker", "in place, spare"
TORCHFT = "torchft"  # replicas of the whole model, of which the others go on without the lost one
CONTENDERS = (RESTART, NEW_WORKER, SPARE, TORCHFT)
SETUPS = {"fsdp": "FSDP2", "tensor": "FSDP2 x TP", "ddp": "DDP, shared shards"}
KILL, HOST, FREEZE, CUT = "kill a rank", "kill a host", "freeze a rank", "cut a host"
NOTHING = "lose nothing"  # what the readiness costs
FAULTS = (KILL, HOST, FREEZE, CUT, NOTHING)
NO_LIMIT = 1_000_000  # of steps: where replicas of torchft are held at a gate, one that comes late waits for them
BLOCKS, BLOCK = 125, 4  # of steps, by turns: in longer ones the machine's pace changes more than what is measured
WAIT_S = 180.0
GPU_PART = 0.2  # of the GPU, for each rank and each spare: a host has one at most
ENVIRONMENT = {
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
}


class TrainingEnded(RuntimeError):
    """A training ended while it was waited for."""


@dataclass(frozen=True)
class Pace:
    """The steps around each fault, and whether there has to be a spare."""

    window: int  # steps that are trained before it, at most
    after: int
    warm_s: float | None  # after a spare has begun its imports; None: a fault waits for no spare

    @property
    def steps(self) -> int:
        """Return the steps that are trained for each fault."""
        return self.window + self.after


MEASURED = Pace(20, 10, 5.0)
QUICK = Pace(6, 2, None)  # many faults: one comes while the last one's spare is still being started


@dataclass
class Job:
    """One training under Ray Train; this side opens the gate and breaks things."""

    site: EmbeddedSite
    name: str
    contender: str
    setup: str
    folder: Path
    device: str = "cpu"
    pace: Pace = MEASURED
    limit: int = -1
    kept_count: int = 0  # survivors of all faults that kept their process
    ended: str = ""  # if another's training ended for good before its last fault: how
    seconds: list[float] = field(default_factory=list)
    phases: list[dict[str, float]] = field(default_factory=list)  # seconds, of each recovery in place
    thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    ranks_count: int = 0
    cut_node: tuple[str, str] | None = None  # a host that is cut off, and its Ray node

    def start(self, kills: int) -> None:
        """Start the training, and wait for the first steps."""
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchTrainer

        from benchmarks.rigs.in_place_training import RANKS, Announced, Records, Settings

        self.folder.mkdir(parents=True)
        self.records, self.gate = Records(self.folder), Gate(self.folder)
        self._open()
        function, torch_config = self._training()
        trainer = TorchTrainer(
            partial(function, Announced(str(self.folder))),
            train_loop_config={
                "settings": Settings(self.name, self.setup, str(self.folder), self.site.config, self.device)
            },
            torch_config=torch_config,
            scaling_config=ScalingConfig(
                num_workers=RANKS,
                placement_strategy="SPREAD",
                use_gpu=self.device != "cpu",
                resources_per_worker={"CPU": 1} if self.device == "cpu" else {"CPU": 1, "GPU": GPU_PART},
            ),
            run_config=RunConfig(
                name=self.name,
                storage_path=str(self.folder / "ray"),
                failure_config=FailureConfig(max_failures=2 * kills + 1),
            ),
        )
        self.ranks_count = RANKS
        self.run: Future[object] = self.thread.submit(trainer.fit)
        self.train(2)

    def _training(self) -> tuple[Callable[..., None], object]:
        """Return the training function, and Ray's configuration of it."""
        from ray.train.torch import TorchConfig

        if self.contender == TORCHFT:
            from ray.train.v2.torch.torchft_config import TorchftConfig

            from benchmarks.rigs.torchft_training import train_replica

            return train_replica, TorchftConfig(lighthouse_kwargs={"min_replicas": 1}, backend="gloo")
        from benchmarks.rigs.in_place_training import train
        from memstore.adapters.ray_train import InPlaceTorchConfig

        backend = "gloo" if self.device == "cpu" else "nccl"
        if self.contender == RESTART:
            return train, TorchConfig(backend=backend)
        return train, InPlaceTorchConfig(backend=backend, spares=int(self.contender == SPARE))

    def train(self, steps: int) -> None:
        """Let all ranks train so many more steps, and wait for them."""
        self.limit += steps
        self._open()
        self.wait(f"step {self.limit} of all ranks", lambda: self._have_done(self.limit), WAIT_S + steps)

    def _open(self) -> None:
        self.gate.open(NO_LIMIT if self.contender == TORCHFT else self.limit)

    def _have_done(self, step: int) -> bool:
        done = {found.rank for found in self.done() if found.step >= step}
        return len(done) == self.ranks_count

    def done(self) -> list[StepDone]:
        """Return the steps that all ranks have done."""
        return self.records.steps_done()

    def wait(self, what: str, is_there: Callable[[], bool], within_s: float = WAIT_S) -> None:
        """Wait for something that the ranks do."""
        deadline_s = time.monotonic() + within_s
        while not is_there():
            if self.run.done():
                raise TrainingEnded(f"{self.name}: the training ended before {what}") from self.run.exception()
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"{self.name}: no {what} within {within_s:g} s")
            time.sleep(0.02)

    def processes(self) -> dict[int, int]:
        """Return each rank's process."""
        return {found.rank: found.pid for found in self.done()}

    def spares(self) -> set[int]:
        """Return the processes that wait to take a rank's place."""
        from benchmarks.rigs.in_place_training import announced

        used = {found.pid for found in self.done()}
        return {pid for pid in announced(self.folder) - used if Path(f"/proc/{pid}").exists()}

    def break_and_wait(self, fault: str, chance: random.Random) -> None:
        """Break something while the ranks train; take the seconds until all have done a new step."""
        if self.contender == SPARE and self.pace.warm_s is not None:
            self.wait("a spare", lambda: bool(self.spares()))
            time.sleep(self.pace.warm_s)
        before = self.processes()
        at = self.limit + chance.randrange(1, self.pace.window)
        self.limit += self.pace.steps
        self._open()
        self.wait(f"step {at}", lambda: any(found.step >= at for found in self.done()))
        time.sleep(chance.random() * 0.2)
        begun_s = time.monotonic()
        lost = self._break(fault, before, chance)
        self.wait("a new step of all ranks", lambda: len(self._first_steps(begun_s)) == self.ranks_count)
        self.seconds.append(max(self._first_steps(begun_s).values()) - begun_s)
        after = self.processes()
        if self.contender == TORCHFT:
            self.limit = max(found.step for found in self.done()) + self.pace.after
        self.kept_count += sum(after[rank] == pid for rank, pid in before.items() if rank not in lost)
        if self.contender in (NEW_WORKER, SPARE):
            restarted = [rank for rank in before if rank not in lost and after[rank] != before[rank]]
            if restarted:
                raise RuntimeError(f"{self.name}: {fault}: ranks {restarted} lost their processes: {before}, {after}")
        self.wait(f"step {self.limit} of all ranks", lambda: self._have_done(self.limit))
        newest = self.site.job(self.name).newest if self.contender in (NEW_WORKER, SPARE) else None
        if newest is not None:
            self.phases.append(newest.recovery_s)
        self._heal()

    def _break(self, fault: str, before: dict[int, int], chance: random.Random) -> set[int]:
        """Break something; return the ranks that are lost by it."""
        if fault in (KILL, FREEZE):
            rank = chance.choice(sorted(before))
            os.kill(before[rank], signal.SIGKILL if fault == KILL else signal.SIGSTOP)
            return {rank}
        host, ranks = self._choose_host(before, chance)
        if fault == HOST:
            self.site.lose_host(host, [])
        else:
            self.cut_node = (host, self.site.nodes()[host])
            self.site.unreachable_hosts.add(host)
            self.site.links.cut(host)
        return ranks

    def _choose_host(self, before: dict[int, int], chance: random.Random) -> tuple[str, set[int]]:
        """Return a host that has ranks and no spare, and its ranks: one if it can be, because there is one spare."""
        spares, options = self.spares(), []
        for host in list(self.site.cluster.labels)[1:]:  # Ray's head cannot be lost
            here = {pid for pid, _ in self.site.cluster.node_processes(host)}
            ranks = {rank for rank, pid in before.items() if pid in here}
            if ranks and not spares & here:
                options.append((host, ranks))
        fewest = min(len(ranks) for _, ranks in options)
        return chance.choice([option for option in options if len(option[1]) == fewest])

    def _heal(self) -> None:
        """Give the cluster the lost host back, or the one that was cut off once Ray has given it up."""
        if self.cut_node is not None:
            host, node = self.cut_node
            self.site.wait_given_up(node)
            self.site.links.heal(host)
            self.site.unreachable_hosts.discard(host)
            self.site.replace_raylet(host, [])
            self.cut_node = None
        self.site.heal()

    def _first_steps(self, begun_s: float) -> dict[int, float]:
        """Return when each rank had done its first step since it entered the function after the fault.

        A replica of torchft that is not lost goes on in the function: its first step after the fault counts.
        """
        first: dict[int, float] = {}
        for found in self.done():
            if (found.done_s if self.contender == TORCHFT else found.entered_s) > begun_s:
                first.setdefault(found.rank, found.done_s)
        return first

    def block(self, steps: int) -> tuple[float, float]:
        """Train so many steps; return the wall and the processor seconds of a step, with all that the ranks started."""
        here = [*descendants(list(self.processes().values()))]
        before_s, begun_s = cpu_seconds(here), time.monotonic()
        self.train(steps)
        return (time.monotonic() - begun_s) / steps, (cpu_seconds(here) - before_s) / steps / self.ranks_count

    def end(self) -> None:
        """Let the training end."""
        if self.contender == TORCHFT:
            self.limit = max(found.step for found in self.done()) + self.pace.window
        self.gate.open(self.limit, is_last=True)
        self.run.result(WAIT_S)
        self.thread.shutdown()


def check_same(job: Job, expected: Sequence[StepDone]) -> int:
    """Compare every step of every rank with the job that lost nothing; return how many steps there were."""
    right = {(found.rank, found.step): (found.loss, found.samples) for found in expected}
    done = job.done()
    for found in done:
        if (found.loss, found.samples) != right[found.rank, found.step]:
            raise RuntimeError(f"{job.name}: rank {found.rank}, step {found.step}: another loss or other samples")
    missing = set(right) - {(found.rank, found.step) for found in done}
    if missing and job.limit >= max(step for _, step in right):
        raise RuntimeError(f"{job.name}: {len(missing)} steps were never done, as {min(missing)}")
    return len({found.step for found in done})


@contextmanager
def cluster(device: str, *, has_links: bool = False) -> Iterator[EmbeddedSite]:
    """Start four hosts in two racks with a store; with links to cut each but Ray's head has a network of its own."""
    prepare_ray()
    os.environ.update(ENVIRONMENT)
    with quiet(), embedded_site(4, 512 * MIB, has_links=has_links, gpus_per_host=int(device != "cpu")) as site:
        yield site


@dataclass(frozen=True)
class Plan:
    """What the command line asks for: how many faults, at which pace, and where."""

    kills: int
    seed: int
    device: str
    pace: Pace

    def job(self, site: EmbeddedSite, name: str, contender: str, setup: str, folder: Path) -> Job:
        """Return a job of this plan that has not begun."""
        return Job(site, name, contender, setup, folder / name, self.device, self.pace)


def play(site: EmbeddedSite, folder: Path, setup: str, contender: str, fault: str, plan: Plan) -> Job:
    """Train one job to its end, with so many faults."""
    job = plan.job(site, f"j{len(list(folder.iterdir()))}", contender, setup, folder)
    job.start(plan.kills)
    chance = random.Random(plan.seed)
    try:
        for _ in range(plan.kills):
            job.break_and_wait(fault, chance)
            of_phases = phases_text(job.phases[-1:])
            print(
                f"{SETUPS[setup]}, {fault}, {contender}: {job.seconds[-1]:.2f} s{of_phases}",
                file=sys.stderr,
                flush=True,
            )
        job.end()
    except (TrainingEnded, ProcessLookupError) as ended:  # or another replica has ended by itself
        if contender != TORCHFT or not job.seconds:
            raise
        what = "the training" if isinstance(ended, TrainingEnded) else "another replica, which nobody had killed,"
        job.ended = f"; {what} ended before the next"
    return job


def phases_text(phases: Sequence[dict[str, float]]) -> str:
    """Return the median seconds of each phase, as text; "" without any."""
    if not phases:
        return ""
    words = (f"{name} {median(each.get(name, 0.0) for each in phases):.2f}" for name in phases[0])
    return f"; {', '.join(words)} s"


def unbroken(site: EmbeddedSite, folder: Path, setup: str, plan: Plan) -> list[StepDone]:
    """Return the steps of a job that loses nothing, as many as the others train."""
    job = plan.job(site, f"unbroken-{setup}", NEW_WORKER, setup, folder)
    job.start(1)
    job.train(plan.kills * plan.pace.steps)
    job.end()
    return job.done()


def measure(setups: Sequence[str], faults: Sequence[str], contenders: Sequence[str], plan: Plan) -> list[Record]:
    """Play every fault for every contender; what Ray's restart does not see, or late, is only timed with a spare."""
    records: list[Record] = []
    expected: dict[str, list[StepDone]] = {}
    with tempfile.TemporaryDirectory(prefix="memstore-bench-") as name:
        folder = Path(name)
        with cluster(plan.device) as site:
            for setup in setups if {*faults} != {NOTHING} else []:
                expected[setup] = unbroken(site, folder, setup, plan)
                played = (KILL, HOST, FREEZE) if setup == setups[0] else (KILL,)  # the others only lose more
                for fault in (each for each in faults if each in played):
                    of_fault = [SPARE] if fault == FREEZE else _of(setup, fault, contenders)
                    records.append(race(site, folder, setup, fault, of_fault, plan, expected[setup]))
            if NOTHING in faults:
                records.append(cost(site, folder, plan))
        if CUT in faults and available() is None:
            with cluster(plan.device, has_links=True) as site:
                records.append(race(site, folder, setups[0], CUT, [SPARE], plan, expected[setups[0]]))
    return records


def _of(setup: str, fault: str, contenders: Sequence[str]) -> list[str]:
    has_torchft = setup == "ddp" and fault == KILL and find_spec("torchft") is not None
    return [name for name in contenders if name != TORCHFT or has_torchft]


def race(
    site: EmbeddedSite,
    folder: Path,
    setup: str,
    fault: str,
    contenders: Sequence[str],
    plan: Plan,
    expected: Sequence[StepDone],
) -> Record:
    """Play one fault for every contender."""
    record = Record(f"{SETUPS[setup]}{'' if plan.device == 'cpu' else ' on a GPU'}: {fault}", 0, {})
    for contender in contenders:
        job = play(site, folder, setup, contender, fault, plan)
        record.seconds[contender] = job.seconds
        if contender == TORCHFT:
            record.notes.append(
                f"{SETUPS[setup]}, {fault}, {contender}: {len(job.seconds)} faults{job.ended}; no loss is compared; "
                f"{job.kept_count} of the other ranks' processes kept"
            )
            continue
        steps = check_same(job, expected)
        others = "all" if contender != RESTART else str(job.kept_count)
        record.notes.append(
            f"{SETUPS[setup]}, {fault}, {contender}: {plan.kills} faults; {steps} steps with losses and samples of the "
            f"unbroken job; {others} of the other ranks' processes kept{phases_text(job.phases)}"
        )
    for contender, target in ((NEW_WORKER, IN_PLACE), (SPARE, IN_PLACE_SPARE)):
        if {contender, RESTART} <= record.seconds.keys():
            record.ratio(f"{contender} / {RESTART}", contender, RESTART, target)
    if {TORCHFT, RESTART} <= record.seconds.keys():
        pairs = zip(record.seconds[TORCHFT], record.seconds[RESTART], strict=False)  # it may have ended early
        record.ratios.append(Ratio(f"{TORCHFT} / {RESTART}", [a / b for a, b in pairs]))
    if SPARE in record.seconds:
        limit = {KILL: IN_PLACE_SPARE_S, FREEZE: IN_PLACE_FREEZE, CUT: IN_PLACE_CUT}.get(fault)
        record.figure(f"{SPARE}, seconds", record.seconds[SPARE], "s", limit)
    return record


def cost(site: EmbeddedSite, folder: Path, plan: Plan) -> Record:
    """Train two jobs by turns that lose nothing: one that could recover in place, and one that could not."""
    record = Record("nothing is lost", 0, {RESTART: [], NEW_WORKER: []})
    jobs = [plan.job(site, f"cost{n}", name, "fsdp", folder) for n, name in enumerate(record.seconds)]
    for job in jobs:
        job.start(0)
        job.train(BLOCK)
    cpu: dict[str, list[float]] = {RESTART: [], NEW_WORKER: []}
    for number in range(BLOCKS):
        for job in jobs[:: 1 if number % 2 else -1]:
            wall_s, cpu_s = job.block(BLOCK)
            record.seconds[job.contender].append(wall_s)
            cpu[job.contender].append(cpu_s)
    for job in jobs:
        job.end()
    record.ratio("step time, in place / ordinary", NEW_WORKER, RESTART, IN_PLACE_COST)
    pairs = zip(cpu[NEW_WORKER], cpu[RESTART], strict=True)
    record.figure(
        "processor seconds of a rank's step, in place / ordinary", [a / b for a, b in pairs], "", IN_PLACE_COST
    )
    record.notes.append(f"nothing is lost: {BLOCKS} blocks of {BLOCK} steps of each job, by turns")
    return record


def main(arguments: Sequence[str] | None = None) -> list[Record]:
    """Run what the command line asks for; return the records."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cases.bench_in_place", description=__doc__)
    parser.add_argument("--kills", type=int, default=5, help="of each job")
    parser.add_argument("--setup", choices=SETUPS, action="append", help="only this one")
    parser.add_argument("--fault", choices=FAULTS, action="append", help="only this one")
    parser.add_argument("--contender", choices=CONTENDERS, action="append", help="only this one")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: all ranks share one GPU")
    parser.add_argument("--quick", action="store_true", help="few steps around each fault, which waits for no spare")
    parser.add_argument("--seed", type=int, default=1, help="of ranks and moments")
    parser.add_argument("--out", type=Path, help="folder whose records.json takes the records")
    chosen = parser.parse_args(arguments)
    setups = chosen.setup or list(SETUPS)
    about = results.about(Options(nbytes=0, rounds=chosen.kills, warmups=0), "full")
    device = SharedGpu() if chosen.device == "cuda" else chosen.device
    plan = Plan(chosen.kills, chosen.seed, device, QUICK if chosen.quick else MEASURED)
    records = measure(setups, chosen.fault or FAULTS, chosen.contender or CONTENDERS, plan)
    print(f"{__main__.described(about)}\n\n{__main__.HEAD}")
    for record in records:
        record.about = about
        print(__main__.rows(record), flush=True)
    if chosen.out is not None:
        results.merge("in_place", records, chosen.out)
    return records


if __name__ == "__main__":
    main()

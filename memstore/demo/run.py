"""The demo from start to end: an uninterrupted run, a run that loses a host, a control run that does not restore.

This file imports Ray; so `cli.py` sets Ray's environment before it imports this file.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
from ray.train.torch import TorchConfig, TorchTrainer

import memstore
from memstore.config import MIB, Config
from memstore.demo.checks import NEED_RESTORE, Check, Kill, check_all
from memstore.demo.model import ModelSize, parameters_count
from memstore.demo.records import Run, read_run
from memstore.demo.train_loop import Settings, train
from memstore.demo.watcher import PrintLine, Watcher
from memstore.errors import ConfigError, MemstoreError
from memstore.testing.clusters.embedded import EmbeddedCluster

HOSTS = {"h1": {"rack": "r1"}, "h2": {"rack": "r2"}, "h3": {"rack": "r1"}, "h4": {"rack": "r2"}}
RANKS_COUNT = 4
# Longer than a restart of the ranks; so the restore, not repair, brings the lost copies.
REPAIR_AFTER_S = 60.0
REPLACEMENT_S = 60.0


@dataclass(frozen=True)
class Options:
    """The length of the training and the moment of the kill; the defaults are those of `make demo`."""

    folder: Path  # for the journals and Ray Train's own files
    steps: int = 80
    kill_after: int = 35  # the kill happens once this step is committed
    control_steps: int = 10
    control_kill_after: int = 3
    is_restoring: bool = True
    has_control: bool = True
    size: ModelSize = field(default_factory=ModelSize)

    def __post_init__(self) -> None:
        if not 0 <= self.kill_after < self.steps - 2:
            raise ConfigError(
                f"kill_after={self.kill_after} must leave steps to train after the kill: 0 to {self.steps - 3} of "
                f"steps={self.steps}"
            )


@dataclass(frozen=True)
class LostHostRun:
    """A training run that lost a host, with the checks of the claims about it."""

    run: Run
    kill: Kill
    checks: list[Check]
    detect_s: float | None
    detect_why: str
    lost_nbytes: int


@dataclass(frozen=True)
class Outcome:
    """The result of all runs, for the report."""

    options: Options
    undisturbed: Run
    disturbed: LostHostRun
    control: LostHostRun | None
    total_s: float

    @property
    def control_failed(self) -> list[str]:
        """Return the names of the checks that need a restore and failed on the control run."""
        checks = self.control.checks if self.control is not None else []
        return [c.name for c in checks if not c.is_ok and c.name in NEED_RESTORE]

    @property
    def is_ok(self) -> bool:
        """Return whether every check holds, and whether the control run, if any, failed all that it must fail."""
        has_proof = self.control is None or set(self.control_failed) == set(NEED_RESTORE)
        return has_proof and all(check.is_ok for check in self.disturbed.checks)


def run_demo(options: Options, print_line: PrintLine) -> Outcome:
    """Run everything and return the outcome; `print_line` gets each line as it happens.

    Raises:
        MemstoreError: the demo itself did not work; a failed check is no error, but in `Outcome.is_ok`.
    """
    started_s = time.monotonic()
    print_line(
        f"{len(HOSTS)} hosts in 2 racks (simulated: {len(HOSTS)} raylets on this machine) · FSDP2 transformer, "
        f"{parameters_count(options.size) / 1e6:.1f} M parameters, {RANKS_COUNT} ranks · put every step, 2 copies, "
        "different racks"
    )
    cluster = EmbeddedCluster(HOSTS)
    cluster.config = cluster.config.with_fields({"dead_after_s": REPAIR_AFTER_S, "arena_bytes": 512 * MIB})
    with cluster:
        print_line(f"[start]   cluster and store up after {time.monotonic() - started_s:.1f} s")
        undisturbed = _fit(cluster, options, print_line, job="undisturbed", steps=options.steps)
        seats = choose_seats(_targets(cluster.config, "undisturbed"))
        print_line(
            f"[seats]   {seats.victim} will be lost; its copies are on {seats.partner}. Its rank is kept off "
            f"{seats.partner}, so that the bytes have to cross the wire;\n"
            f"          repair waits {REPAIR_AFTER_S:g} s after a death, so that it does not bring them before"
        )
        disturbed = _lose_host(
            cluster, options, print_line, undisturbed, seats=seats, job="demo", steps=options.steps,
            kill_after=options.kill_after, is_restoring=options.is_restoring,
        )  # fmt: skip
        control = None
        if options.has_control and options.is_restoring:
            print_line("[control] the same with restore switched off, a few steps only: the checks must fail")
            _replace_host(cluster, seats.victim)
            control = _lose_host(
                cluster, options, print_line, undisturbed, seats=seats, job="control", steps=options.control_steps,
                kill_after=options.control_kill_after, is_restoring=False,
            )  # fmt: skip
    return Outcome(options, undisturbed, disturbed, control, time.monotonic() - started_s)


@dataclass(frozen=True)
class Seats:
    """The host to lose, the host with its copies, and for each worker the hosts it may use (Ray label selectors)."""

    victim: str
    partner: str
    selectors: list[dict[str, str]]


def choose_seats(targets: Mapping[str, list[str]]) -> Seats:
    """Choose the victim, and place the workers so that its rank cannot come back on the host with its copy.

    Ray Train numbers its ranks host by host, in the order of the workers. If the victim's worker is the third and its
    partner's the last, rank 2 comes back on the second host, wherever the third worker goes.
    """
    head = next(iter(HOSTS))
    victim = next((host for host in sorted(targets) if host != head and targets[host]), None)
    if victim is None or len(targets) != len(HOSTS):
        raise ConfigError(f"the demo needs a copy of every host on another one, placement says {dict(targets)}")
    partner = targets[victim][0]
    first, second = (host for host in HOSTS if host not in (victim, partner))
    allowed = [first, second, f"in({victim},{first},{second})", partner]
    return Seats(victim, partner, [{"host": value} for value in allowed])


def _targets(config: Config, job: str) -> dict[str, list[str]]:
    rows = {j["job"]: j for j in memstore.status(config=config).jobs}
    return {host: list(hosts) for host, hosts in rows[job]["targets"].items()}


def _lose_host(
    cluster: EmbeddedCluster, options: Options, print_line: PrintLine, undisturbed: Run, *, seats: Seats, job: str,
    steps: int, kill_after: int, is_restoring: bool,
) -> LostHostRun:  # fmt: skip
    """Train, and lose the victim on the way; return the run with its checks."""
    watcher = Watcher(
        cluster,
        job=job,
        journal=options.folder / job,
        steps=steps,
        print_line=print_line,
        victim=seats.victim,
        kill_after=kill_after,
    )
    run = _fit(
        cluster, options, print_line, job=job, steps=steps, seats=seats, watcher=watcher, is_restoring=is_restoring
    )
    if watcher.kill is None:
        raise MemstoreError(f"{job}: the training ended before step {kill_after} was committed: use more steps")
    checks = check_all(run, undisturbed, watcher.kill, steps)
    return LostHostRun(
        run, watcher.kill, checks, watcher.detect_s, watcher.detect_why, int(watcher.lost.get("nbytes", 0))
    )


def _fit(
    cluster: EmbeddedCluster, options: Options, print_line: PrintLine, *, job: str, steps: int,
    seats: Seats | None = None, watcher: Watcher | None = None, is_restoring: bool = True,
) -> Run:  # fmt: skip
    """Train one job under Ray Train to its end, with restarts; return the records of its ranks."""
    journal = options.folder / job
    journal.mkdir(parents=True)
    settings = Settings(job, str(journal), cluster.config, steps, is_restoring=is_restoring, size=options.size)
    trainer = TorchTrainer(
        train,
        train_loop_config={"settings": settings},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(
            num_workers=RANKS_COUNT,
            resources_per_worker={"CPU": 1},
            placement_strategy="SPREAD",
            label_selector=seats.selectors if seats is not None else None,
        ),
        run_config=RunConfig(
            name=job, storage_path=str(options.folder / "ray"), failure_config=FailureConfig(max_failures=2)
        ),
    )
    with watcher or Watcher(cluster, job=job, journal=journal, steps=steps, print_line=print_line):
        try:
            trainer.fit()
        except TrainingFailedError as exc:
            raise MemstoreError(f"{job}: Ray Train gave up after its restarts: {exc}") from exc
    return read_run(journal)


def _replace_host(cluster: EmbeddedCluster, host: str) -> None:
    """Add a new machine in the place of the lost one, and wait until the store has started a holder there (R3, R29)."""
    cluster.add_node(host, HOSTS[host])
    deadline_s = time.monotonic() + REPLACEMENT_S
    while time.monotonic() < deadline_s:
        rows = memstore.status(config=cluster.config).hosts
        if any(row["host"] == host and row["status"] == "live" for row in rows):
            return
        time.sleep(0.1)
    look = cluster.config.commands("see `memstore status`")
    raise MemstoreError(f"the replacement of {host} got no holder within {REPLACEMENT_S:g} s: {look}")

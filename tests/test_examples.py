"""The examples run as a user would run them, are stopped, and go on where they were."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import memstore
from memstore.shell.arena_lock import is_alive, process_start_time
from memstore.shell.ray_membership import RayMembership
from memstore.testing.embedded import EmbeddedCluster, descendants

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
README = (EXAMPLES.parent / "README.md").read_text(encoding="utf-8")
DEADLINE_S = 240.0
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[EmbeddedCluster]:
    with EmbeddedCluster({"h1": {}}, cpus_per_host=4) as embedded:
        yield embedded


def environment(cluster: EmbeddedCluster, tmp_path: Path) -> dict[str, str]:
    own = {
        "RAY_ADDRESS": cluster.address,
        "HOME": str(tmp_path),
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
        "RAY_DEDUP_LOGS": "0",
    }
    return {**os.environ, **own, "PYTHONUNBUFFERED": "1"}


def first_steps(output: str) -> set[int]:
    return {int(step) for step in re.findall(r"rank \d+: first step (\d+)", output)}


def losses(output: str) -> dict[tuple[int, int], str]:
    found = re.findall(r"rank (\d+): step (\d+) loss ([0-9.]+)", output)
    return {(int(rank), int(step)): loss for rank, step, loss in found}


def kill_all(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to a launcher and everything below it, then wait until all of it is gone."""
    victims = [(pid, start) for pid in descendants([process.pid]) if (start := process_start_time(pid)) is not None]
    for pid, _ in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait(timeout=10)
    deadline_s = time.monotonic() + 10
    while any(is_alive(pid, start) for pid, start in victims):
        assert time.monotonic() < deadline_s, "ranks survive SIGKILL"
        time.sleep(0.01)  # bounded by the deadline above


def newest_committed(cluster: EmbeddedCluster, job: str) -> int:
    """The newest committed step, -1 for none."""
    rows = {row["job"]: row for row in memstore.status(config=cluster.config).jobs}
    step = rows.get(job, {}).get("committed_step")
    return -1 if step is None else int(step)


def wait_committed(cluster: EmbeddedCluster, job: str, step: int, process: subprocess.Popen[bytes]) -> int:
    """Wait until a step is committed; return the newest one."""
    deadline_s = time.monotonic() + DEADLINE_S
    while True:
        committed = newest_committed(cluster, job)
        if committed >= step:
            return committed
        assert process.poll() is None, f"the ranks ended with {process.returncode} before step {step} was committed"
        assert time.monotonic() < deadline_s, f"step {step} is not committed after {DEADLINE_S:g} s"
        time.sleep(0.05)  # bounded by the deadline above


def command_of(example: str, cluster: EmbeddedCluster, job: str, *options: str) -> list[str]:
    """The command that the README prints for an example, in this store."""
    [line] = re.findall(rf"^((?:python|torchrun) .*examples/{example}\b.*?)(?: +#.*)?$", README, re.MULTILINE)
    launcher, *words = line.split()
    start = ["-m", "torch.distributed.run"] if launcher == "torchrun" else []
    return [sys.executable, *start, *words, "--store", cluster.config.store, "--job", job, *options]


def run(command: list[str], env: dict[str, str]) -> str:
    """What the command prints; it must succeed."""
    done = subprocess.run(
        command, env=env, cwd=EXAMPLES.parent, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


LONG = ("torchtitan_style.py", "lightning_fit.py", "transformers_trainer.py", "megatron_style.py")


@pytest.mark.drill
@pytest.mark.parametrize("example", ["torchrun.py", *(pytest.param(name, marks=pytest.mark.long) for name in LONG)])
def test_an_example_goes_on_after_sigkill(cluster: EmbeddedCluster, tmp_path: Path, example: str) -> None:
    """SIGKILL of everything half-way: the next start goes on at the newest committed step + 1, with equal losses."""
    job = example.removesuffix(".py")
    check_goes_on(cluster, tmp_path, job, command_of(example, cluster, job))


@pytest.mark.drill
@pytest.mark.long
def test_transformers_goes_on_with_two_ranks(cluster: EmbeddedCluster, tmp_path: Path) -> None:
    """The same under torchrun: the Trainer turns to DDP, and every rank resumes from a folder of its own."""
    python, *words = command_of("transformers_trainer.py", cluster, "ddp")
    torchrun = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    check_goes_on(cluster, tmp_path, "ddp", [*torchrun, *words])


def check_goes_on(cluster: EmbeddedCluster, tmp_path: Path, job: str, command: list[str]) -> None:
    """Start, kill after 20 committed steps, start again, compare what both trained."""
    env = environment(cluster, tmp_path)
    with (tmp_path / "first").open("wb") as out:
        launch = subprocess.Popen(
            [*command, "--steps", "100000"], env=env, cwd=EXAMPLES.parent, stdout=out, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        told = wait_committed(cluster, job, 20, launch)
    finally:
        kill_all(launch)
    before = losses((tmp_path / "first").read_text())
    committed = newest_committed(cluster, job)
    ran = max(step for _, step in before)
    output = run([*command, "--steps", str(ran + 10)], env)
    [first] = first_steps(output)
    # What was handed over whole before the kill may still have been committed after it: newer than told is fine.
    assert told <= committed <= first - 1 <= ran + 1
    after = losses(output)
    assert min(step for _, step in after) == first
    assert len({step for _, step in after}) in (ran + 10 - first, ran + 11 - first)  # steps count from 0, or from 1
    both = after.keys() & before.keys()
    assert {key: after[key] for key in both} == {key: before[key] for key in both}


def test_ray_train_goes_on_when_started_again(cluster: EmbeddedCluster, tmp_path: Path) -> None:
    """The script ends, is started again with more steps, and goes on after its last one."""
    env = environment(cluster, tmp_path)
    outputs = [run(command_of("ray_train.py", cluster, "ray-train", "--steps", steps), env) for steps in ("6", "9")]
    assert first_steps(outputs[0]) == {0}
    assert first_steps(outputs[1]) == {6}
    assert {step for _, step in losses(outputs[1])} == {6, 7, 8}


@pytest.mark.long
def test_ray_train_hears_of_a_preemption(tmp_path: Path) -> None:
    """The node of a rank is drained while it trains: every rank is told which ranks lose it, and commits its step."""
    with EmbeddedCluster({"h1": {"rack": "r1"}, "h2": {"rack": "r2"}}, cpus_per_host=2) as cluster:
        env = {**environment(cluster, tmp_path), "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "0.5"}
        command = command_of("ray_train.py", cluster, "preempted", "--preemption", "--steps", "100000")
        with (tmp_path / "out").open("wb") as out:
            launch = subprocess.Popen(command, env=env, cwd=EXAMPLES.parent, stdout=out, stderr=subprocess.STDOUT)
        try:
            wait_committed(cluster, "preempted", 3, launch)
            drained = RayMembership(cluster.config.store).hosts()["h2"]["node"]
            subprocess.run(
                [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", cluster.address,
                 "--node-id", drained, "--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot",
                 "--deadline-remaining-seconds", "600"], check=True, capture_output=True, timeout=DEADLINE_S,
            )  # fmt: skip
            deadline_s = time.monotonic() + DEADLINE_S
            told = re.compile(r"rank (\d): ranks \[\d\] lose their node, step \d+ is safe")
            while {found[1] for found in told.finditer((tmp_path / "out").read_text())} != {"0", "1"}:
                assert launch.poll() is None, (tmp_path / "out").read_text()[-3000:]
                assert time.monotonic() < deadline_s, (tmp_path / "out").read_text()[-3000:]
                time.sleep(0.1)  # bounded by the deadline above
        finally:
            kill_all(launch)


@pytest.mark.long
def test_actors_are_started_again_when_one_dies(cluster: EmbeddedCluster, tmp_path: Path) -> None:
    """A rank dies after step 3 was committed: the driver's next launch goes on at step 4, on all ranks."""
    options = ("--steps", "8", "--die-at", "3")
    output = run(command_of("ray_actors.py", cluster, "actors", *options), environment(cluster, tmp_path))
    assert "a rank died, starting again" in output
    assert first_steps(output) == {0, 4}
    assert "all ranks are done, this launch trained 4 steps" in output
    assert {step for _, step in losses(output)} == set(range(8))

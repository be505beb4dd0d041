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
from memstore.testing.embedded import EmbeddedCluster, descendants

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
DEADLINE_S = 110.0
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[EmbeddedCluster]:
    with EmbeddedCluster({"h1": {}}, cpus_per_host=4) as embedded:
        yield embedded


def environment(cluster: EmbeddedCluster, tmp_path: Path) -> dict[str, str]:
    own = {"RAY_ADDRESS": cluster.address, "HOME": str(tmp_path), "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5"}
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


@pytest.mark.drill
def test_torchrun_goes_on_after_sigkill(cluster: EmbeddedCluster, tmp_path: Path) -> None:
    """SIGKILL of torchrun and its ranks half-way: the next launch goes on at the newest committed step + 1."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        str(EXAMPLES / "torchrun.py"), "--store", cluster.config.store, "--job", "torchrun",
    ]  # fmt: skip
    env = environment(cluster, tmp_path)
    with (tmp_path / "first").open("wb") as out:
        launch = subprocess.Popen([*command, "--steps", "100000"], env=env, stdout=out, stderr=subprocess.STDOUT)
    try:
        told = wait_committed(cluster, "torchrun", 20, launch)
    finally:
        kill_all(launch)
    before = (tmp_path / "first").read_text()
    committed = newest_committed(cluster, "torchrun")
    ran = max(step for _, step in losses(before))
    assert first_steps(before) == {0}
    again = subprocess.run(
        [*command, "--steps", str(ran + 10)], env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert again.returncode == 0, again.stderr[-3000:]
    [first] = first_steps(again.stdout)
    # What was handed over whole before the kill may still have been committed after it: newer than told is fine.
    assert told <= committed <= first - 1 <= ran + 1
    assert re.search(rf"step {first - 1}: newest (whole )?step of the lineage", again.stdout)
    after = losses(again.stdout)
    assert {step for _, step in after} == set(range(first, ran + 10))
    both = after.keys() & losses(before).keys()
    assert {key: after[key] for key in both} == {key: losses(before)[key] for key in both}


def test_ray_train_goes_on_when_started_again(cluster: EmbeddedCluster, tmp_path: Path) -> None:
    """The script ends, is started again with more steps, and goes on after its last one."""
    command = [sys.executable, str(EXAMPLES / "ray_train.py"), "--store", cluster.config.store, "--job", "ray-train"]
    outputs = []
    for steps in (6, 9):
        done = subprocess.run(
            [*command, "--steps", str(steps)],
            env=environment(cluster, tmp_path), capture_output=True, text=True, timeout=DEADLINE_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        outputs.append(done.stdout + done.stderr)
    assert first_steps(outputs[0]) == {0}
    assert first_steps(outputs[1]) == {6}
    assert {step for _, step in losses(outputs[1])} == {6, 7, 8}

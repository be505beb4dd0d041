"""The examples run as a user would run them, are stopped, and go on where they were."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from example_runs import (
    EXAMPLES,
    command_of,
    environment,
    first_steps,
    kill_all,
    losses,
    newest_committed,
    run,
    run_ranks,
    wait_committed,
)

import memstore
from memstore.testing.clusters.embedded import EmbeddedCluster

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[EmbeddedCluster]:
    with EmbeddedCluster({"h1": {}}, cpus_per_host=4) as embedded:
        yield embedded


RESUMABLE = ("torchrun.py", "ddp_shared_shard.py", "torchtitan_style.py", "lightning_fit.py", "accelerate_loop.py")


@pytest.mark.drill
@pytest.mark.parametrize("example", RESUMABLE)
def test_an_example_goes_on_after_sigkill(cluster: EmbeddedCluster, tmp_path: Path, example: str) -> None:
    """SIGKILL of everything half-way: the next start goes on at the newest committed step + 1, with equal losses."""
    job = example.removesuffix(".py")
    check_goes_on(cluster, tmp_path, job, command_of(example, cluster, job))


@pytest.mark.drill
def test_transformers_goes_on_with_two_ranks(cluster: EmbeddedCluster, tmp_path: Path) -> None:
    """The same under torchrun: the Trainer turns to DDP, one rank of a host copies the model, and one rank goes on."""
    python, *words = command_of("transformers_trainer.py", cluster, "ddp")
    torchrun = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    check_goes_on(cluster, tmp_path, "ddp", [*torchrun, *words])
    [job] = [row for row in memstore.status(config=cluster.config).jobs if row["job"] == "ddp"]
    assert (job["world_size"], job["shards"], len(job["writers"])) == (2, 1, 1)
    step = newest_committed(cluster, "ddp")
    output = run([python, *words, "--steps", str(step + 3)], environment(cluster, tmp_path))
    assert first_steps(output) == {step + 1}


@pytest.mark.drill
def test_lightning_goes_on_with_two_ranks(cluster: EmbeddedCluster, tmp_path: Path) -> None:
    """Under torchrun Lightning turns to DDP: one rank of a host copies the model, each goes on from its own trainer."""
    python, *words = command_of("lightning_fit.py", cluster, "fit-ddp")
    torchrun = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    after = check_goes_on(cluster, tmp_path, "fit-ddp", [*torchrun, *words, "--devices", "2"])
    [job] = [row for row in memstore.status(config=cluster.config).jobs if row["job"] == "fit-ddp"]
    assert (job["world_size"], job["shards"], len(job["writers"])) == (2, 1, 1)
    steps = str(max(step for _, step in after))
    unbroken = [*words, "--devices", "2", "--job", "fit-whole", "--steps", steps]
    whole = losses(run([*torchrun, *unbroken], environment(cluster, tmp_path)))
    assert after == {key: whole[key] for key in after}  # dropout, shuffles and a loader's worker are in it


def check_goes_on(cluster: EmbeddedCluster, tmp_path: Path, job: str, command: list[str]) -> dict[tuple[int, int], str]:
    """Start, kill after 20 committed steps, start again, compare what both trained; return the second one's losses."""
    env = environment(cluster, tmp_path)
    with (tmp_path / "first").open("wb") as out:
        launch = subprocess.Popen(
            [*command, "--steps", "100000"], env=env, cwd=EXAMPLES.parent, stdout=out, stderr=subprocess.STDOUT
        )
    try:
        reported = wait_committed(cluster, job, 20, launch)
    finally:
        kill_all(launch)
    before = losses((tmp_path / "first").read_text())
    committed = newest_committed(cluster, job)
    ran = max(step for _, step in before)
    output = run([*command, "--steps", str(ran + 10)], env)
    [first] = first_steps(output)
    # What was submitted whole before the kill may still have been committed after it: newer than reported is fine.
    assert reported <= committed <= first - 1 <= ran + 1
    after = losses(output)
    assert min(step for _, step in after) == first
    assert len({step for _, step in after}) in (ran + 10 - first, ran + 11 - first)  # steps count from 0, or from 1
    both = after.keys() & before.keys()
    assert {key: after[key] for key in both} == {key: before[key] for key in both}
    return after


def test_ray_train_goes_on_when_started_again(cluster: EmbeddedCluster, tmp_path: Path) -> None:
    """The script ends, is started again with more steps, and goes on after its last one."""
    env = environment(cluster, tmp_path)
    outputs = [run(command_of("ray_train.py", cluster, "ray-train", "--steps", steps), env) for steps in ("6", "9")]
    assert first_steps(outputs[0]) == {0}
    assert first_steps(outputs[1]) == {6}
    assert {step for _, step in losses(outputs[1])} == {6, 7, 8}


def test_actors_are_started_again_when_one_dies(cluster: EmbeddedCluster, tmp_path: Path) -> None:
    """A rank dies after step 3 was committed: the driver's next launch goes on at step 4, on all ranks."""
    options = ("--steps", "8", "--die-at", "3")
    output = run(command_of("ray_actors.py", cluster, "actors", *options), environment(cluster, tmp_path))
    assert "a rank died, starting again" in output
    assert first_steps(output) == {0, 4}
    assert "all ranks are done, this launch trained 4 steps" in output
    assert {step for _, step in losses(output)} == set(range(8))


def test_actors_stay_when_another_one_dies(cluster: EmbeddedCluster, tmp_path: Path) -> None:
    """Rank 0 dies after step 10: its replacement and rank 1, in the process that it had, go on from there."""
    command = command_of("in_place_actors.py", cluster, "stay", "--steps", "20", "--die-at", "10")
    output = run(command, environment(cluster, tmp_path))
    begun = re.findall(r"rank (\d), pid (\d+): generation (\d) begins with step (\d+)", output)
    assert {(rank, number, step) for rank, _, number, step in begun} == {
        (rank, *begin) for rank in "01" for begin in (("0", "0"), ("1", "11"))
    }
    pids = {(rank, number): pid for rank, pid, number, _ in begun}
    assert pids["1", "0"] == pids["1", "1"]
    assert pids["0", "0"] != pids["0", "1"]
    assert f"pids at the end: {pids['0', '1']} {pids['1', '1']}" in output


@pytest.mark.skipif(find_spec("nvidia_resiliency_ext") is None, reason="NVRx is not installed")
def test_nvrx_keeps_the_processes_that_are_left(cluster: EmbeddedCluster, tmp_path: Path) -> None:
    """Rank 1 dies after step 10: the process that waited is rank 1, and rank 0 goes on in the process that it had."""
    env, outputs = environment(cluster, tmp_path), {}
    for job, options in (("nvrx", ("--die-at", "10")), ("nvrx-whole", ())):
        command = command_of("nvrx_inprocess.py", cluster, job, "--ranks", "2", "--steps", "20", *options)
        outputs[job] = run_ranks(command, env, 3, tmp_path)
    begun = re.findall(r"rank (\d), pid (\d+): iteration (\d) begins with step (\d+)", outputs["nvrx"])
    assert {(rank, number, step) for rank, _, number, step in begun} == {
        (rank, *begin) for rank in "01" for begin in (("0", "0"), ("1", "11"))
    }
    pids = {(rank, number): pid for rank, pid, number, _ in begun}
    assert pids["0", "0"] == pids["0", "1"]
    assert pids["1", "0"] != pids["1", "1"]
    assert losses(outputs["nvrx"]) == losses(outputs["nvrx-whole"])

"""How tests train with a framework's own loop: two ranks under torchrun, killed whole, started again, compared.

What the ranks have in common is in `framework_rank.py`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from example_runs import kill_all, wait_committed
from framework_rank import HOLDS_AT, STEPS
from repository import ROOT

from memstore.testing.clusters.processes import ProcessCluster

RANKS, KILL_AT = 2, 5
LINE = re.compile(r"rank (\d+): step (\d+) loss (\S+) data (\S+)")
DEADLINE_S = 400.0
Trained = dict[tuple[int, int], tuple[str, str]]  # loss and data by rank and step


def two_hosts(folder: Path) -> ProcessCluster:
    """Return a store of two hosts, each of which has a copy of everything."""
    return ProcessCluster(folder, {"h1": {}, "h2": {}}, replicas=RANKS, arena_bytes=512 << 20)


def trained(output: str) -> Trained:
    return {(int(rank), int(step)): (loss, data) for rank, step, loss, data in LINE.findall(output)}


def command_of(program: str) -> list[str]:
    path = str(ROOT / "tests/support/frameworks" / program)
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), path]


def environment(cluster: ProcessCluster, job: str, hosts: str, options: Mapping[str, str]) -> dict[str, str]:
    fields = {**cluster.config.store_fields(), "replicas": RANKS}
    own = {
        "MEMSTORE_TEST_JOB": job,
        "MEMSTORE_TEST_HOSTS": hosts,
        "MEMSTORE_TEST_CONFIG": json.dumps({name: value for name, value in fields.items() if value is not None}),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests/support"), str(ROOT / "tests/support/frameworks")]),
        "PYTHONUNBUFFERED": "1",
    }
    return {**os.environ, **own, **options}


def run(cluster: ProcessCluster, program: str, job: str, folder: Path, hosts: str = "h1 h2", **options: str) -> Trained:
    """Train to the end; return what was trained."""
    done = subprocess.run(
        command_of(program),
        env=environment(cluster, job, hosts, options),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    assert "state_dict() made that" not in done.stderr  # a put's warning of what no get could fill
    return trained(done.stdout)


def run_killed(cluster: ProcessCluster, program: str, job: str, folder: Path, **options: str) -> Trained:
    """Kill the launcher and all ranks with SIGKILL once a step is committed; return what was trained until then."""
    env = environment(cluster, job, "h1 h2", {**options, "MEMSTORE_TEST_HOLDS": "1"})
    output, errors = folder / f"{job}.out", folder / f"{job}.err"
    with output.open("wb") as out, errors.open("wb") as err:
        launch = subprocess.Popen(command_of(program), env=env, cwd=folder, stdout=out, stderr=err)
    try:
        wait_committed(cluster, job, KILL_AT, launch)
    except AssertionError as error:
        raise AssertionError(errors.read_text()[-6000:]) from error
    finally:
        kill_all(launch)
    return trained(output.read_text())


def check_goes_on(
    cluster: ProcessCluster, program: str, folder: Path, unbroken: Trained, job: str, *, loses: str = "", **options: str
) -> None:
    """Kill, start again, compare each step's loss and data with the unbroken run's; `loses` is lost with its memory."""
    before = run_killed(cluster, program, job, folder, **options)
    if loses:
        cluster.lose_host(loses)
    after = run(cluster, program, job, folder, "h1 h1" if loses else "h1 h2", **options)
    begun = min(step for _, step in after)
    assert KILL_AT < begun <= HOLDS_AT + 1
    assert set(after) == {(rank, step) for rank in range(RANKS) for step in range(begun, STEPS + 1)}
    for part in (before, after):
        assert {key: (value, unbroken[key]) for key, value in part.items() if value != unbroken[key]} == {}

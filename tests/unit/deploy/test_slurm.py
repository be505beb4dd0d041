"""The batch script for Slurm, run with stand-ins for the programs of Slurm and Ray: what it starts, and its code."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner
from ray.scripts.symmetric_run import curate_and_validate_ray_start_args, symmetric_run
from repository import ROOT

SCRIPT = ROOT / "deploy" / "slurm" / "memstore.sbatch"
FAKES = {
    "hostname": 'case "$1" in -I) echo "10.0.0.1 172.17.0.1";; *) echo n1;; esac',
    "srun": 'shift; exec "$@"',  # one node of the allocation; its own option first
    "ray": 'echo "ray $*" >> "$SAID"; while [ "$1" != -- ]; do shift; done; shift; exec "$@"',
    "memstore": 'echo "memstore $*" >> "$SAID"',
    "python": 'echo "python $*" >> "$SAID"; exit "${CODE:-0}"',
}


def played(folder: Path, *arguments: str, **env: str) -> tuple[int, list[str]]:
    """Run the script on one node of four; return its exit code and the commands that it ran."""
    for name, text in FAKES.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (folder / name).chmod(0o755)
    said = folder / "said"
    said.touch()
    around = {"PATH": f"{folder}:{os.environ['PATH']}", "SAID": str(said), "SLURM_JOB_NUM_NODES": "4", **env}
    done = subprocess.run(["bash", str(SCRIPT), *arguments], env=around, timeout=60, capture_output=True, check=False)
    return done.returncode, said.read_text().splitlines()


def test_ray_runs_on_every_node_and_the_store_around_the_training_script(tmp_path: Path) -> None:
    """Up, the script with its arguments, down: in this order, on the head."""
    (tmp_path / "racks").write_text("n0 r0\nn1 r7\n")
    code, said = played(tmp_path, "train.py", "--name", "two words", MEMSTORE_RACKS=str(tmp_path / "racks"))
    assert code == 0
    start, *rest = said
    assert start.startswith("ray symmetric-run --address 10.0.0.1:6379 --min-nodes 4 --labels host=n1,rack=r7 ")
    assert rest == [
        "memstore up --wait 4 --timeout-s 300",
        "python train.py --name two words",
        "memstore status",
        "memstore down",
    ]


def test_the_code_of_the_script_is_the_jobs_and_the_store_goes_down_all_the_same(tmp_path: Path) -> None:
    """So that Slurm sees a failure, and the arenas are left whole; a rack that is not known is no label."""
    code, said = played(tmp_path, "train.py", CODE="3", MEMSTORE_DURABLE="/lustre/steps")
    assert (code, said[-1]) == (3, "memstore down")
    assert "--labels host=n1 " in said[0]
    assert said[1] == "memstore up --wait 4 --timeout-s 300 --durable /lustre/steps"


def test_without_a_script_it_says_how_it_is_used(tmp_path: Path) -> None:
    """And starts nothing."""
    assert played(tmp_path) == (2, [])


@pytest.mark.slow
def test_ray_has_the_command_with_these_options() -> None:
    """`ray symmetric-run` of the Ray that is tested, and no option that it refuses to pass on."""
    line = next(each for each in SCRIPT.read_text().splitlines() if "ray symmetric-run" in each and "exec" in each)
    words = ["--address", "10.0.0.1:6379", "--min-nodes", "4", "--labels", "host=n1", "--object-store-memory", "1"]
    assert {word for word in line.split() if word.startswith("--")} <= {*words}
    assert curate_and_validate_ray_start_args([*words]) == words[4:]
    assert "--min-nodes" in CliRunner().invoke(symmetric_run, ["--help"]).output

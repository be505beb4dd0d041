"""The GPU benchmarks: on a machine with nothing but torch, numpy, msgpack, msgspec, xxhash; no claim without CUDA."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from repository import ROOT
from variants import later

from benchmarks.gpu import put, restore, training
from benchmarks.gpu.training import Size

TINY = Size(parameters=100_000, width=64, rounds=1, warmups=0, chunk_bytes=64 << 10)
WAIT_S = 300.0

# Read by every Python that starts there, so by the store's processes, too. Absent is what the store and its benchmarks
# can use beside the five; torch's own needs are torch's.
BARE_MACHINE = """
from importlib.machinery import PathFinder
ABSENT = {
    "ray", "click", "rich", "cryptography", "psutil", "obstore", "zstandard", "safetensors", "lightning",
    "transformers", "hypothesis", "pytest", "matplotlib",
}
found = PathFinder.find_spec
def find_spec(name, path=None, target=None):
    return None if name.partition(".")[0] in ABSENT else found(name, path, target)
PathFinder.find_spec = find_spec
"""

MEASURE = f"""
import importlib.util, json, torch
assert importlib.util.find_spec("ray") is None
from benchmarks.gpu import put, restore
from benchmarks.gpu.training import Size
records = [one.measure(torch.device("cpu"), {TINY!r}) for one in (put, restore)]
lines = [getattr(ratio.target, "line", None) for record in records for ratio in record.ratios]
print(json.dumps([lines, [record.seconds for record in records]]))
"""


def run(folder: Path, *arguments: str) -> str:
    """Run Python on a bare machine without a GPU; return what it printed."""
    (folder / "sitecustomize.py").write_text(BARE_MACHINE)
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
        env={**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("name", ["gpu.put", *later("gpu.restore")])
def test_without_a_device_they_say_that_nothing_was_measured(name: str, tmp_path: Path) -> None:
    """As a person runs them; they end well."""
    assert run(tmp_path, "-m", f"benchmarks.{name}").splitlines() == [training.NO_DEVICE]


@pytest.mark.slow
def test_they_measure_what_is_promised_where_ray_is_not(tmp_path: Path) -> None:
    """At tiny size on the host's memory, bytes compared, through a store whose processes have as little to import."""
    lines, seconds = json.loads(run(tmp_path, "-c", MEASURE))
    assert sorted(filter(None, lines)) == ["gpu d2h", "gpu h2d", "gpu overlap", "gpu stall"]
    assert all(len(values) == 1 for record in seconds for values in record.values())


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_they_run_on_a_gpu() -> None:
    """With a model of a few MiB: the bytes are compared, the figures mean nothing."""
    for one in (put, restore):
        one.measure(torch.device("cuda", torch.cuda.current_device()), TINY)

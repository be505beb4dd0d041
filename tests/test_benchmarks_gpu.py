"""The GPU benchmarks: on a machine with nothing but torch, numpy, msgpack, xxhash; without CUDA they claim nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_put, gpu_restore, gpu_training, targets
from benchmarks.gpu_training import Size
from benchmarks.harness import Record

TINY = Size(parameters=100_000, width=64, rounds=1, warmups=0, chunk_bytes=64 << 10)
WAIT_S = 120.0

# Everything the store can use beside the four; torch's own needs are torch's.
BARE_MACHINE = """
import importlib.abc, runpy, sys
ABSENT = {
    "ray", "click", "rich", "cryptography", "psutil", "obstore", "zstandard", "safetensors", "lightning",
    "transformers", "hypothesis", "pytest", "matplotlib",
}
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"{name} is not on this machine", name=name)
sys.meta_path.insert(0, Absent())
import memstore.testing.process_main
import torch
torch.cuda.is_available = lambda: False
for name in ("gpu_put", "gpu_restore"):
    sys.argv = [name]
    runpy.run_module(f"benchmarks.{name}", run_name="__main__")
"""


def test_they_run_where_ray_is_not_and_say_that_nothing_was_measured() -> None:
    """The scripts and the processes that they start import nothing more; without a device they end well."""
    done = subprocess.run(
        [sys.executable, "-c", BARE_MACHINE], cwd=Path(__file__).parents[1], capture_output=True, text=True,
        timeout=WAIT_S, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout.splitlines()) == (0, [gpu_training.NO_DEVICE] * 2), done.stderr[-2000:]


@pytest.mark.slow
def test_they_measure_what_is_promised_and_compare_all_bytes() -> None:
    """At tiny size on the host's own memory, through a real store: every promise about GPUs gets its figure."""
    records: list[Record] = [one.measure(torch.device("cpu"), TINY) for one in (gpu_put, gpu_restore)]
    lines = [ratio.target.line for r in records for ratio in r.ratios if isinstance(ratio.target, targets.Target)]
    assert sorted(lines) == ["gpu d2h", "gpu h2d", "gpu overlap", "gpu stall"]
    assert all(len(values) == 1 for record in records for values in record.seconds.values())
    json.dumps([record.seconds for record in records])


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_they_run_on_a_gpu() -> None:
    """With a model of a few MiB: the bytes are compared, the figures mean nothing."""
    for one in (gpu_put, gpu_restore):
        one.measure(torch.device("cuda", torch.cuda.current_device()), TINY)

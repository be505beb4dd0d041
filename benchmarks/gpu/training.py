"""A GPT of a given size in training on one device: what put.py and gpu/restore.py put and get.

Both run by themselves (`python -m benchmarks.gpu.put`) on a machine that has torch, numpy, msgpack, msgspec and
xxhash: the store runs as processes, without Ray.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.report import __main__, results
from benchmarks.report.harness import MIB, Options, Record, Took
from benchmarks.rigs import rig
from benchmarks.rigs.stopwatch import timed
from memstore.client.store import Store
from memstore.testing.clusters.processes import ProcessCluster

NO_DEVICE = "not measured: no CUDA device here"
HEAD_WIDTH = 128
TOKENS, BATCH = 512, 8  # of one micro-batch
PEAK_BYTES = 1 << 30
STATE_COPIES = 3  # a parameter and Adam's two moments
VERSIONS = 3.5  # of the state that the host has room for
FLOAT32_BYTES = 48 << 30  # of a GPU with less the parameters are bfloat16


@dataclass(frozen=True)
class Size:
    """A model and how often it is measured."""

    parameters: int = 1_000_000_000
    width: int = 2048
    rounds: int = 5
    warmups: int = 2
    chunk_bytes: int = 4 * MIB
    dtype: torch.dtype = torch.float32

    @property
    def options(self) -> Options:
        """The same for the harness."""
        nbytes = self.parameters * STATE_COPIES * self.dtype.itemsize
        return Options(nbytes, self.rounds, self.warmups, self.chunk_bytes, with_ray=False)


class Training:
    """A model with Adam on one device, computing in bfloat16."""

    def __init__(self, device: torch.device, size: Size) -> None:
        layers = max(1, round(size.parameters / (12 * size.width**2)))
        self.device = device
        heads = max(1, size.width // HEAD_WIDTH)
        kind: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        self.model = nn.ModuleList(
            nn.TransformerEncoderLayer(size.width, heads, 4 * size.width, device=device, dtype=size.dtype, **kind)
            for _ in range(layers)
        )
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-5)
        self.batch = torch.randn(BATCH, min(TOKENS, size.width), size.width, device=device, dtype=size.dtype)
        self.micro_batches = 1
        self.step()  # makes the moments

    @property
    def state(self) -> dict[str, object]:
        """What is put."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def tensors(self) -> list[torch.Tensor]:
        """All tensors of the state that lie on the device, in an order of their own."""
        parameters = [p.detach() for p in self.model.parameters()]
        moments = [v for values in self.optimizer.state.values() for v in values.values()]
        return parameters + [v for v in moments if v.device == parameters[0].device and v.dim()]

    def forward_backward(self) -> None:
        """Queue gradients for all micro-batches."""
        self.optimizer.zero_grad(set_to_none=True)
        for _ in range(self.micro_batches):
            with torch.autocast(self.device.type, torch.bfloat16):
                hidden = self.batch
                for layer in self.model:
                    hidden = layer(hidden)
                loss = hidden.float().square().mean() / self.micro_batches
            loss.backward()

    def step(self) -> None:
        """Queue a whole step."""
        self.forward_backward()
        self.optimizer.step()

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.get_device_module(self.device).synchronize()

    def timed(self, work: Callable[[], object], pids: Sequence[int] = ()) -> Took:
        """Return what work takes of this process and the ones named; it begins and ends with an idle device."""
        self.synchronize()

        def until_idle() -> None:
            work()
            self.synchronize()

        return timed(until_idle, pids)[0]

    def fit(self, seconds: float) -> None:
        """Choose the micro-batches so that forward and backward take at least this long."""
        self.forward_backward()
        self.micro_batches = max(1, math.ceil(seconds / self.timed(self.forward_backward).wall_s))


def pinned_like(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return host memory for these tensors, pinned where they lie on a GPU."""
    return [torch.zeros(t.shape, dtype=t.dtype, pin_memory=t.is_cuda) for t in tensors]


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Queue plain copies of all."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)


def is_same(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Compare bit for bit, wherever they lie."""
    return len(some) == len(others) and all(
        torch.equal(a.detach().cpu().view(torch.uint8), b.detach().cpu().view(torch.uint8))
        for a, b in zip(some, others, strict=True)
    )


def peaks(device: torch.device, nbytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a large buffer on the device and a pinned one, between which the peak rate is measured."""
    size = min(PEAK_BYTES, nbytes)
    host = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    return torch.zeros(size, dtype=torch.uint8, device=device), host


@contextlib.contextmanager
def store_of_one_host(options: Options) -> Iterator[tuple[Store, list[int]]]:
    """Yield the store of the only rank, and the store's processes; one copy is kept, on this host."""
    with tempfile.TemporaryDirectory() as folder:
        cluster = ProcessCluster(
            Path(folder),
            {rig.NEAR: {}},
            arena_bytes=int(VERSIONS * options.nbytes) + 128 * MIB,
            chunk_bytes=options.chunk_bytes,
            replicas=1,
            stall_budget_s=60.0,
            connect_timeout_s=300.0,
        )
        with cluster, rig.rank_at(rig.NEAR, rig.JOB, cluster.config) as store:
            yield store, rig.pids_of(cluster)


def main(name: str, measure: Callable[[torch.device, Size], Record], arguments: Sequence[str] | None = None) -> None:
    """Measure on the first CUDA device and write the record; without one, say that nothing was measured."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name.replace('_', '.')}")
    parser.add_argument("--parameters", type=int, default=Size.parameters, help="default %(default)s")
    parser.add_argument("--width", type=int, default=Size.width, help="of a layer; default %(default)s")
    parser.add_argument("--rounds", type=int, default=Size.rounds, help="timed rounds; default %(default)s")
    parser.add_argument("--out", type=Path, help="folder whose records.json takes the record")
    chosen = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print(NO_DEVICE)
        return
    device = torch.device("cuda", torch.cuda.current_device())
    is_large = torch.cuda.get_device_properties(device).total_memory >= FLOAT32_BYTES
    dtype = torch.float32 if is_large else torch.bfloat16
    size = Size(chosen.parameters, chosen.width, chosen.rounds, dtype=dtype)
    record = measure(device, size)
    record.about = results.about(size.options, "full")
    record.notes.append(f"device: {torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}, {size.dtype}")
    print(f"{__main__.described(record.about)}\n\n{__main__.HEAD}\n{__main__.rows(record)}")
    for note in record.notes:
        print(f"- {note}")
    if chosen.out is not None:
        results.merge(name, [record], chosen.out)

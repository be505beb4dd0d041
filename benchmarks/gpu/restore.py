"""`python -m benchmarks.gpu.restore`: a restore from this host's memory into a training state that lies on a GPU.

Every chunk is digested after the GPU has copied it, and the clock stops when all are. Beside it a copy of the same
tensors out of pinned memory, and the peak: one large copy out of pinned memory.
"""

from __future__ import annotations

import torch

from benchmarks.gpu import training as gpu_training
from benchmarks.gpu.training import Size, Training
from benchmarks.report import targets
from benchmarks.report.harness import Record, Took, interleave, require

COPY, PEAK, GET = "pinned copy back", "pinned peak", "get"


def measure(device: torch.device, size: Size) -> Record:
    """Return the get's speed over the pinned peak."""
    training = Training(device, size)
    tensors = training.tensors()
    nbytes = sum(tensor.nbytes for tensor in tensors)
    twins = gpu_training.pinned_like(tensors)
    large, host = gpu_training.peaks(device, nbytes)
    with gpu_training.store_of_one_host(size.options) as (store, pids):

        def refresh(number: int) -> None:
            training.step()
            training.timed(lambda: gpu_training.copy_all(twins, tensors))
            store.put(number, training.state).wait("committed", 120.0)

        def wipe() -> None:
            for tensor in tensors:
                tensor.zero_()

        def get(number: int) -> Took:
            wipe()
            took = training.timed(lambda: store.get(number, rank=0, into=training.state), pids)
            require(gpu_training.is_same(tensors, twins), f"get of step {number}")
            return took

        def copy(_: int) -> Took:
            wipe()
            took = training.timed(lambda: gpu_training.copy_all(tensors, twins))
            require(gpu_training.is_same(tensors, twins), "pinned copy back")
            return took

        def peak(_: int) -> Took:
            took = training.timed(lambda: large.copy_(host, non_blocking=True))
            return Took(took.wall_s * nbytes / large.nbytes)

        rounds = interleave({GET: get, COPY: copy, PEAK: peak}, size.options, refresh)
    record = Record("gpu restore", nbytes, rounds.seconds, cpu_seconds=rounds.cpu_seconds)
    record.ratio("get: speed / pinned peak", PEAK, GET, targets.GPU_H2D)
    record.ratio("get / pinned copy back", GET, COPY)
    record.notes.append("The first get of a process pins the slots that it reads; it is among the warm-ups.")
    return record


def main() -> None:
    """Measure, or say why not."""
    gpu_training.main("gpu_restore", measure)


if __name__ == "__main__":
    main()

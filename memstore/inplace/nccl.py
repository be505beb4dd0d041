"""Frees a thread that waits for a NCCL collective: aborting the communicators ends their kernels at once.

A kernel that ends so leaves its result half done, and no exception tells: the training thread computes on with that
until it next calls torch.distributed or the store. What the kernel was to send to another rank may be missing there,
and does not raise either. So a rank's store is closed to it before it aborts anything, and as far as can be known the
stores of the other living ranks to them (D244).
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from memstore.errors import ConfigError

# What torch does by itself once a peer is lost. It reads these when a group is made.
_NEEDED = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # else it ends the process, or aborts while the store is still open
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",  # else an error during an abort ends the process
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "0",  # else the GPU may hang after an abort
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",  # else an abort may wait four times as long, by default 60 s
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # else a thread of the aborted group may end the process minutes later
}
_DUMP = "TORCH_NCCL_DUMP_ON_TIMEOUT"  # of the flight recorder, at every loss


def has_nccl() -> bool:
    """Return whether a process group uses NCCL."""
    return dist.is_initialized() and any("nccl" in config for config in list(c10d._world.pg_backend_config.values()))


def leave_errors_to_us() -> None:
    """Keep torch from ending this process when a peer is lost.

    Raises:
        ConfigError: The environment asks torch for something else.
    """
    os.environ.setdefault(_DUMP, "0")
    for name, value in _NEEDED.items():
        if os.environ.setdefault(name, value) != value:
            raise ConfigError(
                f"{name}={os.environ[name]} is set, and recovery in place needs {name}={value}: unset it", field=name
            )


def make_communicator(gpu: int | None) -> None:
    """Let all ranks make the communicator of the default group now, and not with their first collective.

    A rank that waits for a lost one to join cannot be freed by an abort, but by shutting the sockets that it opened.
    Which they are is known only now.

    Args:
        gpu: Index of the rank's GPU; None: the only one that the process sees, and if it sees more, nothing is made.
    """
    if gpu is not None or torch.cuda.device_count() == 1:
        dist.all_reduce(torch.zeros(1, device=f"cuda:{gpu or 0}"))


def abort() -> None:
    """Abort all communicators, if there are any; any thread may call, once the store is closed to the training thread.

    Their process groups are gone then: what the training thread calls next raises. If one cannot be aborted, torch
    waits for as long as a collective may take.
    """
    if has_nccl():
        c10d._abort_process_group()

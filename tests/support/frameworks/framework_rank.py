"""A rank of the programs that train with a framework's own loop: its host, its job, what it prints.

It is imported before torch: `enter()` says on which host of the test's this rank runs.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import types
from importlib.machinery import ModuleSpec
from typing import Any
from unittest.mock import MagicMock

STEPS = 16
HOLDS_AT = 12  # a run that is to be killed comes no further


def enter() -> int:
    """Take this rank's host of the test's; return the rank."""
    rank = int(os.environ["RANK"])
    os.environ["MEMSTORE_HOST"] = os.environ["MEMSTORE_TEST_HOSTS"].split()[rank]
    return rank


def job() -> str:
    """Return the job; "" where this run has no store."""
    return os.environ["MEMSTORE_TEST_JOB"]


def config() -> Any:
    """Return the job's Config."""
    from memstore.config import Config

    return Config(**json.loads(os.environ["MEMSTORE_TEST_CONFIG"]))


def option(name: str, default: str) -> str:
    return os.environ.get(name, default)


def stub_triton() -> None:
    """Let modules define kernels of triton, which a CPU build of torch lacks; none is called."""
    import torch._functorch.partitioners  # what would take the stub for triton comes first
    import torch._inductor.codecache
    import torch._inductor.runtime.triton_compat
    import torch.utils._triton

    torch.utils._triton.has_triton_package()
    torch.utils._triton.has_triton()
    for name in ("triton", "triton.language"):
        module = types.ModuleType(name)
        module.__getattr__ = lambda asked: MagicMock()
        module.__spec__ = ModuleSpec(name, None)
        sys.modules[name] = module
    sys.modules["triton"].jit = lambda function=None, **_: function or (lambda given: given)


def report(step: int, loss: float, *data: Any) -> None:
    """Print a step's loss and the digest of its batches, bit for bit; hold where the run is to be killed."""
    digest = hashlib.blake2b(b"".join(tensor.numpy().tobytes() for tensor in data), digest_size=6)
    line = f"rank {os.environ['RANK']}: step {step} loss {float(loss).hex()} data {digest.hexdigest()}\n"
    os.write(1, line.encode())  # whole, as ranks share a pipe
    if step == HOLDS_AT and "MEMSTORE_TEST_HOLDS" in os.environ:
        signal.pause()

"""Lets several ranks use one GPU with NCCL, which otherwise refuses: for tests and benchmarks."""

from __future__ import annotations

import os
from collections.abc import Callable


class SharedGpu(str):
    """The device "cuda" for a rank that shares it: an argument of its training function.

    NCCL takes each process that unpickles it for a host of its own, connected by loopback.
    """

    def __new__(cls) -> SharedGpu:
        """Return "cuda"."""
        return super().__new__(cls, "cuda")

    def __reduce__(self) -> tuple[Callable[[], SharedGpu], tuple[()]]:
        return _share, ()


def _share() -> SharedGpu:
    os.environ.update(NCCL_HOSTID=str(os.getpid()), NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    return SharedGpu()

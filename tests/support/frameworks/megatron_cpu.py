"""Lets megatron-core run on the CPU: torch.cuda's names lead to the CPU, and what asks for "cuda" gets it.

Megatron 0.19.2 wants Python 3.12 and nvidia-resiliency-ext 0.6; it runs with Python 3.11 and, as far as these tests go,
with the 0.4.1 whose wheel has what local checkpoints need: it is taken for 0.6.
"""

from __future__ import annotations

import contextlib
import types
import typing
from typing import Any

import framework_rank
import nvidia_resiliency_ext
import torch
import torch._dynamo  # before the names change: it has a table of them
import typing_extensions
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class Stream:
    """A stream, or an event, in which everything has happened."""

    device = CPU

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record_event(self, *_: Any) -> Stream:
        return self

    def __getattr__(self, name: str) -> Any:
        if name in ("wait_stream", "wait_event", "synchronize", "record", "wait", "query"):
            return lambda *_, **__: True
        raise AttributeError(name)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None: ...


def on_the_cpu(value: Any) -> Any:
    is_cuda = isinstance(value, str) and value.startswith("cuda")
    return CPU if is_cuda or (isinstance(value, torch.device) and value.type == "cuda") else value


class CudaIsCpu(TorchFunctionMode):
    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.type and len(args) == 1 and not kwargs:
            return function(*args).replace("torch.", "torch.cuda.", 1)
        if function is torch.Tensor.is_cuda.__get__:
            return True
        given = {name: on_the_cpu(value) for name, value in (kwargs or {}).items()}
        return function(*map(on_the_cpu, args), **given)


def run_on_the_cpu() -> None:
    """Call it before megatron is imported."""
    framework_rank.stub_triton()
    nvidia_resiliency_ext.__version__ = "0.6.0"
    typing.override = typing_extensions.override
    properties = types.SimpleNamespace(multi_processor_count=1, name="cpu", major=8, minor=0, total_memory=1 << 30)
    for name, value in {
        "current_device": lambda: CPU,
        "get_rng_state": lambda *_, **__: torch.random.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.random.set_rng_state(state),
        "manual_seed": torch.manual_seed,
        "is_initialized": lambda: False,
        "Stream": Stream,
        "Event": Stream,
        "current_stream": Stream,
        "default_stream": Stream,
        "stream": lambda _: contextlib.nullcontext(),
        "get_device_capability": lambda *_: (8, 0),
        "get_device_properties": lambda *_: properties,
        **dict.fromkeys(("set_device", "synchronize", "empty_cache"), lambda *_, **__: None),
    }.items():
        setattr(torch.cuda, name, value)
    torch.Tensor.cuda = lambda self, *_, **__: self
    torch.nn.Module.cuda = lambda self, *_, **__: self
    CudaIsCpu().__enter__()
    import megatron.core.tensor_parallel.random as random

    random._get_cuda_rng_state = lambda *_, **__: torch.random.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.random.set_rng_state(state)

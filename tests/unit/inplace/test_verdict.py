"""Which exceptions may come of a lost peer."""

from __future__ import annotations

import json

import pytest
import torch

from memstore.inplace.reentry import innermost_module, may_be_loss


def error_of(code: str, module: str) -> BaseException:
    """Return what a piece of code raises that runs as this module, called from here."""
    try:
        exec(code, {"__name__": module, "torch": torch, "json": json})
    except BaseException as error:
        return error
    raise AssertionError(f"{code!r} raised nothing")


@pytest.mark.parametrize(
    ("code", "module", "is_asked"),
    [
        ("raise RuntimeError('Connection closed by peer')", "torch.distributed.distributed_c10d", True),
        ("raise RuntimeError('attempt 3 is over')", "memstore.client.puts", True),
        ("raise RuntimeError('reset')", "ray.train.v2._internal.execution.checkpoint.sync_actor", True),
        ("raise RuntimeError('Connection closed by peer')", "train", False),
        ("raise RuntimeError('mine')", "torchvision.models", False),
        ("json.loads('{')", "torch.distributed", False),
        ("torch.nn.functional.linear(torch.zeros(2), torch.zeros(3, 3))", "train", True),
        ("int('x')", "train", False),
        ("raise KeyboardInterrupt", "torch.distributed", False),
        ("raise SystemExit(1)", "torch.distributed", False),
    ],
)
def test_the_code_that_raised_says_whether_a_loss_is_asked_for(code: str, module: str, is_asked: bool) -> None:
    """The text says nothing: users raise RuntimeError too, and what they raise is theirs at once."""
    assert may_be_loss(error_of(code, module)) == is_asked


def test_an_exception_that_was_never_raised_is_no_loss() -> None:
    """It has no traceback, so no code of torch raised it."""
    assert innermost_module(None) == ""
    assert not may_be_loss(RuntimeError("Connection closed by peer"))

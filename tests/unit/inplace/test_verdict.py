"""Which exceptions may come of a lost peer, and which silent ranks count as frozen."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memstore.inplace.verdict import frozen_ranks, has_paused, innermost_module, may_be_loss


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


def test_a_rank_is_frozen_once_it_is_silent_for_longer_than_the_limit() -> None:
    """A pause of 2 s is not the end of a rank; one that has never beaten is on its way."""
    seen, frozen = frozen_ranks([(0, 0.0)] * 3, [1, 1, 0], 10.0, 3.0)
    assert not frozen
    seen, frozen = frozen_ranks(seen, [2, 1, 0], 12.0, 3.0)
    assert not frozen
    seen, frozen = frozen_ranks(seen, [3, 1, 0], 13.5, 3.0)
    assert frozen == [1]
    seen, frozen = frozen_ranks(seen, [4, 2, 0], 14.0, 3.0)
    assert not frozen


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(0.01, 1.0)), max_size=60), st.floats(0.5, 5.0))
def test_no_rank_that_beats_in_time_is_frozen(looks: list[tuple[int, float]], hang_after_s: float) -> None:
    """Whatever the moments of the looks: only silence for longer than the limit counts."""
    now, count, beat_s = 0.0, 0, 0.0
    seen = [(0, 0.0)]
    for beats, after_s in looks:
        now += after_s
        if beats:
            count, beat_s = count + beats, now
        seen, frozen = frozen_ranks(seen, [count], now, hang_after_s)
        assert bool(frozen) == (count > 0 and now - beat_s > hang_after_s)


def test_a_pause_of_the_process_that_looks_is_no_silence_of_the_ranks() -> None:
    """A machine or container that is paused as a whole wakes with old counts: no rank is to be killed for it."""
    assert not has_paused(10.0, 10.3, 3.0)
    assert has_paused(10.0, 14.0, 3.0)

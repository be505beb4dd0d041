"""Times and counts of a group that recovers in place are looked at where they are given, not at the first loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

pytest.importorskip("ray.train.v2")

from memstore.adapters.ray_train import InPlaceTorchConfig
from memstore.errors import ConfigError
from memstore.inplace.ray_actors import InPlaceGroup

MADE: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "actors": (partial(InPlaceGroup, 2), ("hang_after_s", "leave_s", "meet_s", "collective_timeout_s")),
    "Ray Train": (InPlaceTorchConfig, ("hang_after_s", "leave_s", "meet_s", "timeout_s")),
}


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("value", [0, -1, -5.0, math.nan, "3", "x", True, [3]])
def test_a_time_that_is_none_is_refused(kind: str, value: object) -> None:
    """The error names the argument and what was given."""
    make, names = MADE[kind]
    for name in names:
        with pytest.raises(ConfigError, match=f"^{name}=.*: use a number of seconds") as caught:
            make(**{name: value})
        assert caught.value.field == name


@pytest.mark.parametrize("kind", MADE)
def test_times_may_be_any_numbers(kind: str) -> None:
    """No watchdog is a choice of its own."""
    make, names = MADE[kind]
    make(**dict.fromkeys(names, 3))
    assert make(hang_after_s=None).hang_after_s is None
    assert make(meet_s=math.inf).meet_s > 0


@pytest.mark.parametrize("name", ["max_losses", "spares"])
@pytest.mark.parametrize("value", [-1, 1.5, "2", None])
def test_a_count_that_is_none_is_refused(name: str, value: object) -> None:
    """A negative number of losses would end the job at the first one."""
    with pytest.raises(ConfigError, match=f"^{name}="):
        InPlaceGroup(2, **{name: value})  # type: ignore[arg-type]

"""The texts of `put_every` and `durable_every`: read once, when a Config is made, and again where they are followed."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from memstore.errors import ConfigError

STEPS_MAX = 1 << 20  # from one put to the next
_UNITS_S = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_PUT_TEXT = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|h|%)\Z", re.ASCII)
_DURABLE_TEXT = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|h|d|steps?)\Z", re.ASCII)


@dataclass(frozen=True, slots=True)
class Every:
    """A distance between puts or between durable steps: steps, or seconds, or of puts a share of the training time.

    None of them: of puts the optimum, or each end of an epoch if `is_epoch`; of durable steps only the first committed
    one, or the optimum if `is_optimal`.
    """

    steps: int | None = None
    interval_s: float | None = None
    overhead: float | None = None
    is_optimal: bool = False
    is_epoch: bool = False


def parse_put_every(value: object) -> Every:
    """Read `put_every`: "step", a number of steps, "30s", "5min", "2h", "2%", "epoch" or "auto".

    Raises:
        ConfigError: Anything else, and zero or less.

    >>> parse_put_every("2%")
    Every(steps=None, interval_s=None, overhead=0.02, is_optimal=False, is_epoch=False)
    """
    if value == "step":
        return Every(steps=1)
    if value == "auto" or value == "epoch":
        return Every(is_epoch=value == "epoch")
    if type(value) is int and 0 < value <= STEPS_MAX:
        return Every(steps=value)
    found = _PUT_TEXT.match(value.strip()) if isinstance(value, str) else None
    number = float(found[1]) if found else 0.0
    if found and found[2] == "%" and 0 < number < 100:
        return Every(overhead=number / 100)
    if found and found[2] != "%" and number > 0:
        return Every(interval_s=number * _UNITS_S[found[2]])
    raise ConfigError(
        f'put_every={value!r} is not understood: use "step", a number of steps up to {STEPS_MAX}, a time such as "30s" '
        'or "5min", a share of the training time such as "2%", "epoch", or "auto"',
        field="put_every",
        value=value,
    )


def parse_every(value: str | int | None) -> Every:
    """Read `durable_every`: "90s", "30min", "2h", "1d", "500 steps", a number of steps, "auto", or None.

    Raises:
        ConfigError: anything else, and zero or less.

    >>> parse_every("30min")
    Every(steps=None, interval_s=1800.0, overhead=None, is_optimal=False, is_epoch=False)
    >>> parse_every(500)
    Every(steps=500, interval_s=None, overhead=None, is_optimal=False, is_epoch=False)
    """
    if value is None:
        return Every()
    if value == "auto":
        return Every(is_optimal=True)
    if type(value) is int and value > 0:
        return Every(steps=value)
    found = _DURABLE_TEXT.match(value.strip()) if isinstance(value, str) else None
    if found:
        number, unit = float(found[1]), found[2]
        if unit in _UNITS_S and 0 < number * _UNITS_S[unit] < math.inf:
            return Every(interval_s=number * _UNITS_S[unit])
        if unit.startswith("step") and found[1].isdigit() and int(found[1]) > 0:
            return Every(steps=int(found[1]))
    raise ConfigError(
        f"durable_every={value!r} is neither a time nor a number of steps above 0: "
        'write "90s", "30min", "2h", "1d", a whole number of steps, or "auto"'
    )

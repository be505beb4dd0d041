"""Reads what another process measured. Pure."""

from __future__ import annotations

from typing import Any


def seconds(value: Any) -> float:
    """Return a duration that another process measured, and 0 for what cannot be one."""
    return float(value) if isinstance(value, int | float) and 0 <= value < 1e9 else 0.0

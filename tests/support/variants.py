"""Parameters that are played with `make test-long` only, since another one of the same test shows the behaviour."""

from __future__ import annotations

from typing import Any

import pytest


def later(*values: Any) -> list[Any]:
    """Return parameters that mark their tests `long`."""
    return [pytest.param(value, marks=pytest.mark.long) for value in values]

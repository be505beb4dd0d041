"""An exception between any two steps of a call, where a signal's handler may raise one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


class Interrupted(Exception):
    """What the handler raises."""


def interrupt(call: Callable[[], Any], at: int) -> Interrupted | None:
    """Make a call, and raise at the `at`-th place where Python looks for signals; None if there is no such place.

    Those places are the beginning of a Python function and the return of one of C (and loops, which have such calls).
    What is raised in a finalizer goes nowhere.
    """
    seen = 0

    def look(frame: FrameType, event: str, what: Any) -> None:
        nonlocal seen
        if event not in ("call", "c_return") or what is sys.setprofile:
            return
        seen += 1
        if seen == at:
            raise Interrupted(f"{frame.f_code.co_filename}:{frame.f_lineno} {getattr(what, '__name__', event)}")

    sys.setprofile(look)
    try:
        call()
    except Interrupted as exc:
        return exc
    finally:
        sys.setprofile(None)
    return Interrupted("went nowhere") if seen >= at else None

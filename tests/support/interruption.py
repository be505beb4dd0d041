"""An exception between any two steps of a call, where a signal's handler may raise one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

SWALLOWED = "swallowed"
IN_A_FINALIZER = "ended a finalizer"


class Interrupted(Exception):
    """What the handler raises."""


def interrupt(call: Callable[[], Any], at: int) -> Interrupted | None:
    """Make a call, and raise at the `at`-th place where Python looks for signals; None if there is no such place.

    Those places are the beginning of a Python function and the return of one of C (and loops, which have such calls).
    What is returned says if a finalizer ended by it, which no caller of Python's ever learns, or if it was swallowed.
    """
    seen = 0
    fate = SWALLOWED
    raised: list[Interrupted] = []

    def look(frame: FrameType, event: str, what: Any) -> None:
        nonlocal seen
        if event not in ("call", "c_return") or what is sys.setprofile:
            return
        seen += 1
        if seen == at:
            place = f"{frame.f_code.co_filename}:{frame.f_lineno} {getattr(what, '__name__', event)}"
            raised.append(Interrupted(place))
            raise raised[0]

    def unraisable(what: Any) -> None:
        nonlocal fate
        if raised and what.exc_value is raised[0]:
            fate = IN_A_FINALIZER

    hook, sys.unraisablehook = sys.unraisablehook, unraisable
    sys.setprofile(look)
    try:
        call()
    except Interrupted as exc:
        return exc
    finally:
        sys.setprofile(None)
        sys.unraisablehook = hook
    return Interrupted(f"{raised[0]}: {fate}") if raised else None

"""Python's cyclic collector stands still while a put blocks training.

A plan of a thousand tensors makes ten thousand containers in a row, all of which die when put returns. To the
collector they look like growth: it looks at all objects of the process every few puts, 100 ms for what torch alone
imports, in the middle of the stall. By the time it may run again they are gone.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Hold cyclic collections of the whole process, unless they are off already, which is left so."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()

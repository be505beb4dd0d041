"""Is the exception that left the training function the loss of a peer, or the user's own bug? Pure.

The text of an exception says little: gloo raises a plain RuntimeError. So only two things count: which code raised
it, and whether what watches over the ranks says that one is lost.
"""

from __future__ import annotations

import dis
from types import TracebackType

# A collective fails in one of these packages; a wait on the store, or on Ray Train's barrier, does too.
OF_LOSSES = ("torch", "memstore", "ray")


def innermost_module(trace: TracebackType | None) -> str:
    """Return the name of the module whose code raised an exception; "" without a traceback."""
    name = ""
    while trace is not None:
        name = str(trace.tb_frame.f_globals.get("__name__", ""))
        trace = trace.tb_next
    return name


def is_of_raise(trace: TracebackType | None) -> bool:
    """Return whether a `raise` of Python code made an exception, not a call of C code, such as `work.wait()`."""
    if trace is None:
        return True
    while trace.tb_next is not None:
        trace = trace.tb_next
    return dis.opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]] in ("RAISE_VARARGS", "RERAISE")


def may_be_loss(error: BaseException) -> bool:
    """Return whether an exception may come of a lost peer: it is worth asking whether one is lost."""
    if not isinstance(error, Exception):
        return False  # KeyboardInterrupt, SystemExit: the process is to end
    if innermost_module(error.__traceback__).split(".")[0] in OF_LOSSES:
        return True
    return isinstance(error, RuntimeError) and not is_of_raise(error.__traceback__)

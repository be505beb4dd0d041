"""Waits for work of a thread pool that may be shut down meanwhile.

`concurrent.futures.wait` waits for ever for a future that `shutdown(cancel_futures=True)` has cancelled: such a future
counts as ended only once a worker has taken it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any


def await_ended(futures: Iterable[Future[Any]], limit_s: float | None = None) -> bool:
    """Wait until each future has ended, or was cancelled; return False once `limit_s` has passed."""
    deadline_s = None if limit_s is None else time.monotonic() + limit_s
    for future in futures:
        try:
            future.exception(None if deadline_s is None else max(0.0, deadline_s - time.monotonic()))
        except CancelledError:
            pass  # it has not begun, and never will
        except FutureTimeout:
            return False
    return True

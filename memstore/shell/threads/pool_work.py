"""Waits for work of a thread pool that may be shut down meanwhile.

`concurrent.futures.wait` waits for ever for a future that `shutdown(cancel_futures=True)` has cancelled: such a future
counts as ended only once a worker has taken it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from concurrent.futures import CancelledError, Future
from typing import Any


def await_ended(futures: Iterable[Future[Any]]) -> None:
    """Wait until each future has ended, or was cancelled."""
    for future in futures:
        with contextlib.suppress(CancelledError):  # it has not begun, and never will
            future.exception()

"""What another thread's future holds, for a caller who shall read one error and not the way it came."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def answer_of(future: Future[T], timeout_s: float | None = None) -> T:
    """Return a future's result, or raise its error without the frames of the threads that it passed through.

    Raises:
        concurrent.futures.TimeoutError: There is none within `timeout_s`.
    """
    error = future.exception(timeout_s)
    if error is not None:
        raise error.with_traceback(None)
    return future.result()

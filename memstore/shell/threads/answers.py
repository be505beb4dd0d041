"""Results of other threads' futures; their errors are raised without the frames of those threads."""

from __future__ import annotations

import contextlib
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

from memstore.shell.threads.safe_condition import SafeCondition

T = TypeVar("T")


class Answer(Future[T]):
    """A future that stays usable for the answering thread after a signal's handler raised in a waiting one."""

    def __init__(self) -> None:
        super().__init__()
        self._condition: Any = SafeCondition()


def is_answered(future: Future[T], timeout_s: float) -> bool:
    """Wait for a future, at most so long; return whether it has an answer or an error."""
    with contextlib.suppress(FutureTimeout):
        future.exception(timeout_s)
    return future.done()


def answer_of(future: Future[T], timeout_s: float | None = None) -> T:
    """Return a future's result, or raise its error without the frames of other threads.

    Raises:
        concurrent.futures.TimeoutError: There is none within `timeout_s`.
    """
    error = future.exception(timeout_s)
    if error is not None:
        raise error.with_traceback(None)
    return future.result()

"""A call that every rank makes and the controller answers for all alike: it says when it waits, and withdraws (R23)."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import wait
from typing import Any

from memstore.errors import PeerTimeout
from memstore.shell.answers import answer_of
from memstore.shell.rank_link import RankLink

log = logging.getLogger("memstore")
GATHER_NOTICE_S = 30.0  # a collective call that waits longer says so in the log (R23)
CALL_SLACK_S = 10.0  # the controller's own deadline comes first and names the missing ranks


@contextlib.contextmanager
def in_turn(lock: threading.Lock, what: str, timeout_s: float) -> Iterator[float]:
    """Threads of one rank ask one after the other: a rank has one place in a round (R23). Gives the seconds left.

    Raises:
        PeerTimeout: Another thread's call took all of `timeout_s`.
    """
    since_s = time.monotonic()
    is_mine = lock.acquire(blocking=False)
    waited_s = 0.0
    if not is_mine:
        is_mine = lock.acquire(timeout=min(max(timeout_s, 0.0), threading.TIMEOUT_MAX))
        waited_s = time.monotonic() - since_s
    if not is_mine:
        raise PeerTimeout(
            f"{what}: another thread of this process was still in such a call after {timeout_s:g} s",
            operation=what, limit_s=timeout_s,
        )  # fmt: skip
    try:
        yield max(0.0, timeout_s - waited_s)
    finally:
        lock.release()


def collective(link: RankLink, verb: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """Ask, withdraw when the deadline passes, and take the result if it is already decided.

    Raises:
        PeerTimeout: It was decided, and not carried out within the deadline again.
        MemstoreError: What the controller refused it with.
    """
    future = link.call_soon(verb, body)
    notice_s = min(GATHER_NOTICE_S, timeout_s)
    if wait([future], notice_s).not_done and timeout_s > notice_s:
        log.warning("memstore %s: %s() still waits after %g s: every rank must call it", body["job"], verb, notice_s)
        wait([future], timeout_s - notice_s)
    if not future.done():
        try:
            link.call("withdraw", body, CALL_SLACK_S)
        except PeerTimeout:
            link.forget_call(future)
            raise
        wait([future], CALL_SLACK_S + timeout_s)
    if not future.done():
        link.forget_call(future)
        raise PeerTimeout(
            f"{verb}() of job {body['job']!r} was decided but not carried out within {2 * timeout_s:g} s: see "
            "`memstore status`, or raise timeout_s",
            operation=verb, limit_s=timeout_s,
        )  # fmt: skip
    return answer_of(future)

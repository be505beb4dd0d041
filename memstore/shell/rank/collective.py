"""A call that every rank makes and the controller answers for all alike; the log says for whom it waits (R20, R23)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from memstore.core.wire.calls import AskRollCall as AskRollCall
from memstore.core.wire.calls import Get, Join, RankCall, ReserveRoom, Rewind, ShardLoaded, Withdraw
from memstore.core.wire.codec import tag_of
from memstore.core.wire.replies import GetAgain, Joined, NothingStored, RollCalled, ShardPlaced, StepAgreed
from memstore.errors import PeerTimeout
from memstore.shell.rank.holder_link import HolderLink
from memstore.shell.threads import answer_of

log = logging.getLogger("memstore")
FIRST_WORD_S = 5.0  # ranks of one launch come within this of each other where nothing is wrong
NEXT_WORD_S = 30.0
ANSWER_S = 5.0  # the controller answers within this if it is there
OPEN_S = 30.0  # once all ranks have come: storage is listed and hosts refuse older ranks, each with a limit of its own
# What people call these requests; others by their tag.
_NAMES: Mapping[type[RankCall], str] = {
    Join: "connect to",
    ReserveRoom: "room for the puts of",
    ShardLoaded: "the end of get of",
}
CALL_SLACK_S = 10.0  # the controller's own deadline comes first and names the missing ranks


def take_turn(lock: Any, what: str, timeout_s: float) -> float:
    """Acquire an RLock for a call that threads of one rank make one after the other (R23); return the seconds left.

    A hold that is left of an earlier call of this thread, which a signal's handler ended before its `finally`, goes.

    Raises:
        PeerTimeout: Another thread's call took all of `timeout_s`.
    """
    while lock._is_owned():
        lock.release()
    since_s = time.monotonic()
    if lock.acquire(blocking=False):
        return timeout_s
    if not lock.acquire(timeout=min(max(timeout_s, 0.0), threading.TIMEOUT_MAX)):
        raise PeerTimeout(
            f"{what}: another thread of this process was still in such a call after {timeout_s:g} s",
            operation=what,
            limit_s=timeout_s,
        )
    return max(0.0, timeout_s - (time.monotonic() - since_s))


def collective(link: HolderLink, request: Get, timeout_s: float) -> NothingStored | StepAgreed | ShardPlaced:
    """Ask, withdraw when the deadline passes, and take the result if it is already decided.

    Raises:
        PeerTimeout: It was decided, and not carried out within the deadline again.
        MemstoreError: The controller's refusal.
    """
    future, roll = link.call_soon(request), RollCall(link, request, timeout_s)
    roll.wait([future], timeout_s)
    if not future.done():
        try:
            withdraw = Withdraw(
                job=request.job, attempt=request.attempt, rank=request.rank, timeout_s=request.timeout_s
            )
            link.call(withdraw, CALL_SLACK_S)
        except PeerTimeout:
            link.forget_call(future)
            raise
        roll.wait([future], CALL_SLACK_S + timeout_s)
    if not future.done():
        link.forget_call(future)
        raise PeerTimeout(
            f"{roll.name} job {request.job!r} was decided but not carried out within {2 * timeout_s:g} s: see "
            f"{link.commands('`memstore status`')}, or raise timeout_s",
            operation="get",
            limit_s=timeout_s,
        )
    answer: NothingStored | StepAgreed | ShardPlaced = answer_of(future)
    if isinstance(answer, NothingStored) and answer.lost:
        log.warning(
            "memstore %s rank %d: there is no step to restore although steps were put: %s. Training begins from "
            "nothing",
            request.job,
            request.rank,
            answer.lost,
        )
    return answer


def loaded_with_all(link: HolderLink, request: ShardLoaded, limit_s: float) -> bool:
    """Say that this rank has loaded what its get() was given; False if every rank is to ask again.

    Raises:
        PeerTimeout: Not every rank said so within `limit_s`.
        RecoveryError: Some rank could not load its state.
    """
    future, roll = link.call_soon(request), RollCall(link, request, limit_s)
    roll.wait([future], limit_s + CALL_SLACK_S)
    if not future.done():
        link.forget_call(future)
        raise PeerTimeout(
            f"get of job {request.job!r}: this rank has loaded, and after {limit_s:g} s get() still waits for "
            f"the others: {roll.words or 'no word of them'} ({link.commands('`memstore status`')}); raise timeout_s",
            operation="get",
            limit_s=limit_s,
        )
    return not isinstance(answer_of(future), GetAgain)


def ask_with_all(link: HolderLink, request: Join | Rewind, *, limit_s: float) -> Joined:
    """Send a call that cannot be withdrawn.

    Raises:
        PeerTimeout: No answer within `limit_s`, and ANSWER_S for the controller's reply; OPEN_S more if all have come.
    """
    future, roll = link.call_soon(request), RollCall(link, request, limit_s)
    roll.wait([future], limit_s + ANSWER_S)
    if roll.look([future]) and roll.is_complete:
        roll.wait([future], OPEN_S - ANSWER_S)
        roll.look([future])
    if not future.done():
        link.forget_call(future)
        raise PeerTimeout(
            f"{roll.name} job {request.job!r} was not answered within {roll.waited_s:.0f} s: {roll.words} "
            f"({link.commands('`memstore status`')})",
            operation=tag_of(request),
            waited_s=roll.waited_s,
            limit_s=limit_s,
        )
    joined: Joined = answer_of(future)
    return joined


class RollCall:
    """A rank's wait for a call that every rank makes: after FIRST_WORD_S, and every NEXT_WORD_S, the log says for whom.

    Attributes: words (ranks that have come, awaited ones), is_complete (all ranks have come), as of the last look.
    """

    def __init__(
        self, link: HolderLink, request: Join | Rewind | Get | ShardLoaded | ReserveRoom, limit_s: float
    ) -> None:
        """The call is made already; `limit_s` is what the log says."""
        self._link, self._verb, self._job, self._limit_s = link, tag_of(request), request.job, limit_s
        is_agreement = isinstance(request, Get) and request.is_agreement
        self.name = "agree_on_step of" if is_agreement else _NAMES.get(type(request), f"{self._verb} of")
        self._began_s, self._word_s = time.monotonic(), FIRST_WORD_S
        self.words, self.is_complete = "", False

    @property
    def waited_s(self) -> float:
        """Return the seconds since it began."""
        return time.monotonic() - self._began_s

    def wait(self, futures: Sequence[Future[Any]], limit_s: float) -> None:
        """Wait for the first of `futures`, at most `limit_s`."""
        last_s = self.waited_s + limit_s
        while True:
            if self._link.wait_any(futures, min(self._word_s, last_s) - self.waited_s):
                return
            if self.waited_s >= last_s or not self.look(futures):
                return
            level = logging.INFO if self.is_complete else logging.WARNING
            log.log(level, "memstore: %s job %s: %s (up to %.0f s)", self.name, self._job, self.words, self._limit_s)
            self._word_s = self.waited_s + NEXT_WORD_S

    def look(self, futures: Sequence[Future[Any]]) -> bool:
        """Ask the controller which ranks have come; False if one of `futures` is done first."""
        if any(future.done() for future in futures):
            return False
        waited_s = self.waited_s
        asked = self._link.call_soon(AskRollCall(job=self._job, of=self._verb))
        is_known = self._link.wait_any([*futures, asked], ANSWER_S)
        self._link.forget_call(asked)
        if any(future.done() for future in futures):
            return False
        answer = asked.result() if is_known and asked.exception() is None else None
        after, self.is_complete = f"after {waited_s:.0f} s", False
        if isinstance(answer, RollCalled):
            self.is_complete = answer.is_complete
            self.words = f"{answer.come} {after}, waiting for {answer.awaited}"
        elif answer is not None:
            self.words = f"no answer {after}, waiting for the controller, which knows of no such call: it is new"
        else:
            self.words = f"the controller does not answer yet {after}, waiting for it"
        return True

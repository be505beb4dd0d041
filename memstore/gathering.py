"""Questions of a rank that are answered when all ranks asked: while it waits, the log says for whom (R20)."""

from __future__ import annotations

import contextlib
import logging
import time
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from memstore.errors import ClosedError, MemstoreError, PeerTimeout
from memstore.shell.answers import answer_of
from memstore.shell.rank_link import RankLink

log = logging.getLogger("memstore")
FIRST_WORD_S = 5.0  # ranks of one launch come within this of each other where nothing is wrong
NEXT_WORD_S = 30.0
ANSWER_S = 5.0  # the controller answers within this if it is there
OPEN_S = 30.0  # once all ranks have come: storage is listed and hosts refuse older ranks, each with a limit of its own


def ask_with_all(link: RankLink, verb: str, body: dict[str, Any], *, limit_s: float) -> dict[str, Any]:
    """Ask what is answered when all ranks asked; log after FIRST_WORD_S, and every NEXT_WORD_S, who is awaited.

    Raises:
        PeerTimeout: No answer within `limit_s`, and ANSWER_S for the controller's word; OPEN_S more if all have come.
    """
    if link.closed.is_set():
        raise ClosedError("this store is closed: connect again")
    job, began_s = str(body["job"]), time.monotonic()
    future = link.call_soon(verb, body)
    next_word_s, last_s = FIRST_WORD_S, limit_s + ANSWER_S
    while True:
        waited_s = time.monotonic() - began_s
        try:
            return answer_of(future, max(0.0, min(next_word_s, last_s) - waited_s))
        except FutureTimeout:
            if future.done():
                raise
        waited_s = time.monotonic() - began_s
        found = _launch(link, job)
        words = _words(found, waited_s)
        if waited_s >= last_s:
            if last_s < limit_s + OPEN_S and found.get("launch") and not found["launch"]["missing"]:
                last_s = limit_s + OPEN_S
                continue
            link.forget_call(future)
            raise PeerTimeout(
                f"{verb} of job {job!r} was not answered within {waited_s:.0f} s: {words} (memstore status)",
                operation=verb, waited_s=waited_s, limit_s=limit_s,
            )  # fmt: skip
        if not future.done():
            log.warning(
                "memstore: %s job %s: %s (up to %.0f s)", "connect to" if verb == "join" else f"{verb} of", job, words,
                limit_s,
            )  # fmt: skip
        next_word_s = waited_s + NEXT_WORD_S


def _launch(link: RankLink, job: str) -> dict[str, Any]:
    """Ask the controller how far the launch is; {} if it does not say."""
    with contextlib.suppress(MemstoreError):
        return link.call("launch", {"job": job}, ANSWER_S)
    return {}


def _words(found: dict[str, Any], waited_s: float) -> str:
    """Return "1 of 2 ranks have come after 5 s, waiting for rank 1"."""
    after = f"after {waited_s:.0f} s"
    if not found:
        return f"the controller does not answer yet {after}, waiting for it"
    if found["launch"] is None:
        return f"no answer {after}, waiting for the controller, which knows of no launch: it has just begun to answer"
    return f"{found['come']} {after}, waiting for {found['launch']['awaited']}"

"""A get() that all ranks make, on one of them (R23, R26).

asked --every rank has compared into= with what is brought for it--> handed out --loaded--> waiting for the others
    over <--all have loaded--'      failed on all ranks: none adopts the step <--not loaded--'
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from memstore.client.checkpoint import Checkpoint, checkpoint, open_shard, restore_line
from memstore.client.puts import Puts
from memstore.client.shared_shard import Resized, check_shard
from memstore.core.cluster.text import error_text
from memstore.core.format.manifest import decode_manifest
from memstore.core.wire.calls import Get, ReadStep, ShardLoaded
from memstore.core.wire.rank_messages import CheckInto, IntoChecked
from memstore.core.wire.replies import RestoreReport, ShardPlaced
from memstore.errors import MemstoreError, WorldSizeError
from memstore.shell.rank.collective import collective, loaded_with_all
from memstore.shell.rank.holder_link import HolderLink
from memstore.shell.rank.shard_read import ShardRead

log = logging.getLogger("memstore")
PROBLEM_SHOWN = 2000  # characters of an error that all ranks are sent


class WholeGet:
    """Asks with all ranks, loads what comes, and goes on only if every rank has loaded."""

    def __init__(self, link: HolderLink, puts: Puts) -> None:
        self._link, self._puts = link, puts
        self._into: Any = None
        self._own_into: Any = None

    def run(self, request: Get, into: Any, own_into: Any) -> Checkpoint | None:
        """Return this rank's checkpoint once all ranks have theirs; None: no history. The log of rank 0 names it.

        Args:
            into: As in `Store.get`.
            own_into: Its rank_state_into=.

        Raises:
            What `Store.get` raises.
        """
        self._into, self._own_into = into, own_into
        try:
            while True:
                found = self._find(request)
                if found is None:
                    return None
                report = _report_of(found)
                with self._telling(request, report):
                    got, answer = self._load(request, found)
                if report is None or self._is_over(request, report):
                    break
        finally:
            self._into = self._own_into = None
        self._puts.loaded("")
        if request.is_adopting:
            self._puts.steps.go_on_from(got.step)
        if request.rank == 0:
            log.info("%s", restore_line(request, got, answer))
        return got

    def check(self, order: CheckInto) -> None:
        """Compare the state given as into= with a shard's manifest, and send the holder what came of it."""
        refusal: tuple[str, str] | None = None
        try:
            check_shard(decode_manifest(order.manifest), self._into, self._own_into, self._puts.shared_shard)
        except MemstoreError as exc:
            refusal = type(exc).__name__, str(exc)
        except Exception as exc:
            refusal = "ManifestMismatch", f"into= cannot be compared: {exc!r}"
        self._link.notify(IntoChecked(read=order.read, refusal=refusal))

    def _find(self, request: Get) -> ShardPlaced | Resized | None:
        """Ask with all ranks; return where this rank's bytes lie, None on a job without history."""
        try:
            answer = collective(self._link, request, request.timeout_s)
        except WorldSizeError:
            shared = self._puts.shared_shard if request.from_job is None else None
            found = shared.find_resized(self._link, request) if shared is not None else None
            if found is None:
                raise
            return found
        return answer if isinstance(answer, ShardPlaced) else None

    def _load(self, request: Get, found: ShardPlaced | Resized) -> tuple[Checkpoint, ShardPlaced]:
        timeout_s = request.timeout_s
        if isinstance(found, ShardPlaced):
            asked = ReadStep(job=request.source, step=found.step, of_attempt=found.attempt, rank=request.rank)
            read = ShardRead(self._link, asked, timeout_s, found)
            return open_shard(read, self._into, rank_state_into=self._own_into, timeout_s=timeout_s), found
        staged, answer, state = found.shard.load_resized(self._link, found, self._into, timeout_s)
        return checkpoint(staged, answer, state), answer

    @contextlib.contextmanager
    def _telling(self, request: Get, report: RestoreReport | None) -> Iterator[None]:
        """Send all ranks an error in here: no get() returns, and no rank adopts the step."""
        try:
            yield
        except BaseException as exc:
            said = error_text(exc, PROBLEM_SHOWN)
            is_half_written = getattr(exc, "is_unusable", False) or not isinstance(exc, Exception)
            if is_half_written and not (self._into is None and self._own_into is None):
                self._puts.loaded(said)
            if report is not None:  # None: the others' get() is over
                self._link.call_soon(self._word(request, report, said))
            raise

    def _is_over(self, request: Get, report: RestoreReport) -> bool:
        """Wait until all ranks have loaded; False if they are to ask again."""
        try:
            return loaded_with_all(self._link, self._word(request, report), request.timeout_s)
        except MemstoreError as exc:
            if not (self._into is None and self._own_into is None):
                self._puts.loaded(str(exc))  # it holds what no rank goes on from
            raise

    def _word(self, request: Get, report: RestoreReport, problem: str | None = None) -> ShardLoaded:
        return ShardLoaded(**self._link.who(), round=report.round, is_adopting=request.is_adopting, problem=problem)


def _report_of(found: ShardPlaced | Resized) -> RestoreReport | None:
    """Return the report of the get() that handed the bytes out; None where no rank waits for another."""
    if isinstance(found, ShardPlaced):
        return found.report
    return found.agreed.report if found.agreed is not None else None

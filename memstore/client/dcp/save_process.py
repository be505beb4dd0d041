"""The save process's place in its rank's attempt: it takes over the staged state, and submits it.

DCP's process mode pickles the writer; what crosses is the address of the holder and the step. The child has a link
of its own, so it needs nothing of its parent from then on (R20).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from memstore.client.pending_put import PendingPut
from memstore.client.puts import Puts
from memstore.client.ticket import TERMINAL, Ticket
from memstore.config import Config
from memstore.core.wire.calls import SkipStep
from memstore.core.wire.rank_messages import AttemptFenced, HolderEvent, StepLevel
from memstore.errors import CommitError, ConfigError, MemstoreError, TransportError
from memstore.shell.rank.holder_link import HolderLink

ADOPT_S = 30.0
# The offer travels on the parent's link and may arrive later; a restarted holder gets parent and offer again.
OFFER_S = 5.0
RETRY_S = 0.05
T = TypeVar("T")


@dataclass(frozen=True)
class StagedShard:
    """Everything a child needs to save what its parent staged. Picklable."""

    folder: Path
    parent: str  # nonce
    job: str
    rank: int
    world_size: int
    attempt: int
    chunk_bytes: int
    config: Config
    nbytes: int
    began_s: float  # when the put began, monotonic: the clock of this machine
    stall_s: float


def staged_shard(puts: Puts, ticket: Ticket) -> StagedShard:
    """Return the data with which a child of this process can submit the staged state."""
    link = puts.link
    return StagedShard(
        link.folder, link.nonce, link.job, link.rank, puts.world_size, link.attempt, puts.chunk_bytes, puts.config,
        ticket.nbytes, ticket.began_s, ticket.stall_s,
    )  # fmt: skip


class SaveProcess:
    """A rank's Puts as far as a writer in the save process needs it."""

    def __init__(self, staged: StagedShard) -> None:
        self.staged = staged
        self.job, self.rank, self.world_size = staged.job, staged.rank, staged.world_size
        self.chunk_bytes, self.config = staged.chunk_bytes, staged.config
        self._link: HolderLink | None = None

    def new_ticket(self, step: int) -> Ticket:
        """Return a ticket of the put that the training process began."""
        ticket = Ticket(step, self.staged.nbytes, self.staged.began_s, self.config.commands)
        ticket.stall_s = self.staged.stall_s
        return ticket

    def adopt(self, step: int) -> tuple[Ticket, PendingPut]:
        """Take over the lease of a step's staged state.

        Raises:
            CommitError: The training process gave it up. TransportError: the holder does not answer.
        """
        staged = self.staged
        nonce = f"{staged.parent}/{os.getpid()}/{step}"
        ticket = self.new_ticket(step)
        until_s = time.monotonic() + OFFER_S
        link = self._link = _patiently(
            lambda: HolderLink(
                staged.folder, nonce=nonce, job=staged.job, rank=staged.rank, parent=staged.parent,
                attempt=staged.attempt,
            ), until_s,
        )  # fmt: skip
        room = PendingPut(link, ticket, world_size=staged.world_size)
        link.adopter = room

        def on_event(event: HolderEvent) -> None:
            if isinstance(event, StepLevel) and event.step == step:
                ticket.raise_level(event.level, event.reason, degraded=event.degraded)
            elif isinstance(event, StepLevel) and event.step > step and event.level in ("committed", "durable"):
                ticket.raise_level("superseded", f"step {event.step} was committed")
            elif isinstance(event, AttemptFenced):
                ticket.raise_level("failed", f"attempt {event.attempt} of the job was opened")
            if ticket.level in TERMINAL:  # the save ended elsewhere: this writer is not called again
                threading.Thread(target=self._leave, args=(room,), name="memstore-save-end", daemon=True).start()

        link.on_event = on_event
        try:
            room.slots = _patiently(lambda: link.adopt(step, ADOPT_S), until_s)
        except BaseException as error:
            self.skip(ticket, f"its save process could not take it over: {error}", "failed")
            link.close()
            raise
        return ticket, room

    def _leave(self, room: PendingPut) -> None:
        room.abandon()
        self.close()

    def skip(self, ticket: Ticket, why: str, level: str = "skipped") -> None:
        """Give the step up on all ranks (R12); if that does not reach the controller, a later step supersedes it."""
        ticket.raise_level(level, why)
        request = SkipStep(
            job=self.job, attempt=self.staged.attempt, rank=self.rank, step=ticket.step, why=why,
            is_failed=level == "failed",
        )  # fmt: skip
        if self._link is not None:
            with contextlib.suppress(MemstoreError):
                self._link.call(request, ADOPT_S)

    def close(self) -> None:
        """Give back slots that were not submitted, and end the link."""
        if self._link is not None:
            self._link.close()


def _patiently(ask: Callable[[], T], until_s: float) -> T:
    """Ask again until it is answered, or `until_s` has passed."""
    while True:
        try:
            return ask()
        except (ConfigError, CommitError, TransportError):
            if time.monotonic() > until_s:
                raise
        time.sleep(RETRY_S)

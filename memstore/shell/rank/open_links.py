"""The open links of this process, whichever store they are of."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol


class OpenLink(Protocol):
    """A link to a holder."""

    job: str
    closed: threading.Event

    def interrupt(self, why: str) -> None:
        """End every wait on it, for good."""

    def forget(self) -> None:
        """Drop it in a forked child."""


_LINKS: weakref.WeakSet[OpenLink] = weakref.WeakSet()


def note_open(link: OpenLink) -> None:
    """Take a link that was opened; it is forgotten with its last reference."""
    _LINKS.add(link)


def interrupt_all(why: str) -> None:
    """Interrupt every open link of a rank in this process."""
    for link in list(_LINKS):
        if link.job and not link.closed.is_set():
            link.interrupt(why)


def _forget_in_child() -> None:
    for link in list(_LINKS):
        link.forget()


os.register_at_fork(after_in_child=_forget_in_child)

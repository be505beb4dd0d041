"""The open links of this process, whichever store they are of, and whether they are interrupted."""

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
_why = ""  # the links of this process are interrupted, also those to come


def note_open(link: OpenLink) -> None:
    """Take a link that was opened; it is forgotten with its last reference."""
    _LINKS.add(link)
    if _why and link.job:  # read after it was added: else interrupt_all() in another thread could miss it
        link.interrupt(_why)


def interrupt_all(why: str) -> None:
    """Interrupt every link of a rank in this process, and each that is opened from now on."""
    global _why
    _why = why
    for link in list(_LINKS):
        if link.job and not link.closed.is_set():
            link.interrupt(why)


def allow_links() -> None:
    """Let links that are opened from now on work."""
    global _why
    _why = ""


def _forget_in_child() -> None:
    for link in list(_LINKS):
        link.forget()


os.register_at_fork(after_in_child=_forget_in_child)

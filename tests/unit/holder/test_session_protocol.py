"""A message that is none ends a holder's session with a warning of its controller (R16)."""

from __future__ import annotations

import queue
import socket
from typing import Any

import pytest

from memstore.core.wire.frame import Kind
from memstore.core.wire.orders import EchoClock
from memstore.shell.controller.controller import Session, SessionEnded
from memstore.shell.net.channel import Channel

WAIT_S = 60.0


def test_a_controller_warns_of_what_is_no_report(caplog: pytest.LogCaptureFixture) -> None:
    """The holder connects again: the log is all that says why."""
    near, far = socket.socketpair()
    ended: queue.Queue[Any] = queue.Queue()
    with Channel(far) as holder:
        Session("a", 1, Channel(near), lambda _, message: ended.put(message)).start()
        holder.send(Kind.EVENT, 0, EchoClock(clock_s=1.0), deadline_s=WAIT_S)
        over = ended.get(timeout=WAIT_S)
    assert isinstance(over, SessionEnded)
    [warning] = [record.getMessage() for record in caplog.records]
    assert "the session of host a at" in warning
    assert over.why in warning

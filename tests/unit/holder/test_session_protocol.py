"""A message that is none ends a session with a warning at the end that read it (R4, R16)."""

from __future__ import annotations

import queue
import socket
import threading
from pathlib import Path
from typing import Any, cast

import pytest

from memstore.core.wire.frame import Kind
from memstore.core.wire.orders import TellClock
from memstore.core.wire.reports import Outranked
from memstore.shell.arena.journal_file import Journal
from memstore.shell.controller.holder_session import Session, SessionEnded
from memstore.shell.holder.controller_session import ControllerSession, ControllerSessions
from memstore.shell.net.channel import Channel

WAIT_S = 60.0


def test_a_holder_warns_of_what_is_no_order(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The session ends, and the next controller is obeyed: the log is all that says why."""
    near, far = socket.socketpair()
    journal = Journal.open(tmp_path / "journal")
    sessions = ControllerSessions("a", journal, 0)
    with Channel(near) as channel, Channel(far) as controller:
        controller.send(Kind.EVENT, 0, Outranked(term=1), deadline_s=WAIT_S)
        serving = threading.Thread(
            target=lambda: sessions.serve(
                channel, 1, inventory=lambda: cast(Any, None), on_open=lambda: None, obey=lambda order: None
            )
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ControllerSession, "open", lambda self, inventory: None)  # it would send what a host holds
            serving.start()
            serving.join(WAIT_S)
    journal.close()
    [warning] = [record.getMessage() for record in caplog.records]
    assert "host a: the session of the controller at" in warning
    assert "ProtocolError" in warning


def test_a_controller_warns_of_what_is_no_report(caplog: pytest.LogCaptureFixture) -> None:
    """Its session ends with the same words."""
    near, far = socket.socketpair()
    ended: queue.Queue[Any] = queue.Queue()
    with Channel(far) as holder:
        Session("a", 1, Channel(near), lambda _, message: ended.put(message)).start()
        holder.send(Kind.EVENT, 0, TellClock(clock_s=1.0), deadline_s=WAIT_S)
        over = ended.get(timeout=WAIT_S)
    assert isinstance(over, SessionEnded)
    [warning] = [record.getMessage() for record in caplog.records]
    assert "the session of host a at" in warning
    assert over.why in warning

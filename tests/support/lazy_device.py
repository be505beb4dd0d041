"""A substitute for a GPU: torch's cpu device, whose side streams copy only when a process waits for them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from memstore.shell.device.side_stream import Piece


class LazyDevice:
    """Copies made by `module.NAME` wait in a queue until an event behind them is waited for, by a host or a stream.

    Attributes: reported (who waited: ("host", thread) or ("stream", thread)), ordered and arrived (copies).
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str) -> None:
        self.waits: list[tuple[str, str]] = []
        self._queue: list[Callable[[], None]] = []
        self.arrived = 0
        self._lock = threading.RLock()
        self.before_copies: Callable[[], None] = lambda: None
        real, device = getattr(module, name), self

        class Event(torch.cpu.Event):
            def record(self, stream: Any = None) -> None:
                self.end = len(device._queue)

            def synchronize(self) -> None:
                device._wait("host", self.end)

        class Stream(torch.cpu.Stream):
            def wait_event(self, event: Any) -> None:
                device._wait("stream", event.end)

        current = Stream()
        monkeypatch.setattr(torch.cpu, "Event", Event)
        monkeypatch.setattr(torch.cpu, "Stream", Stream)
        monkeypatch.setattr(torch.cpu, "current_stream", lambda device=None: current)
        # torch's own keeps one stream for all threads: two copies at once would leave this one behind for later tests.
        monkeypatch.setattr(torch.cpu, "stream", lambda stream: contextlib.nullcontext())

        def later(piece: Piece) -> None:
            self._queue.append(lambda: real(piece))

        monkeypatch.setattr(module, name, later)

    @property
    def ordered(self) -> int:
        """Copies ordered so far."""
        return len(self._queue)

    def _wait(self, who: str, end: int) -> None:
        with self._lock:
            self.waits.append((who, threading.current_thread().name))
            if end > self.arrived:
                self.before_copies()
            for copy in self._queue[self.arrived : end]:
                copy()
            self.arrived = max(self.arrived, end)

"""The virtual hosts of a round: each a holder, a folder under arena_dir, and the ranks that sit on it.

The processes are those of `ProcessCluster`. This file adds what the nemesis needs: which processes are stopped or meant
to be down, successors for processes that end by themselves, clocks that are off, and questions with a short limit that
skip stopped holders.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from memstore.core.wire.calls import RankCall
from memstore.errors import MemstoreError
from memstore.shell.arena import lock as arena_lock
from memstore.shell.rank.admin_link import Tool
from memstore.testing.clusters.processes import Process, ProcessCluster
from memstore.testing.nemesis.ledger import Harm, Ledger
from memstore.testing.nemesis.rank_process import CLOCK_VARIABLE
from memstore.testing.nemesis.story import Story

ASK_S = 3.0
KILL_S = 30.0
RESTART_AFTER_S = 0.5  # a supervisor's delay: Ray needs longer, which is kinder
_SITE = """
import os, time
_s = float(os.environ.get("{name}", "0"))
if _s:
    _t, _n = time.time, time.time_ns
    time.time = lambda: _t() + _s
    time.time_ns = lambda: _n() + int(_s * 1e9)
"""


class Hosts:
    """All hosts of a round; only the round's thread changes them, and the observer asks."""

    def __init__(self, cluster: ProcessCluster, ledger: Ledger, story: Story, domains: Mapping[str, str]) -> None:
        self.cluster, self.ledger, self.story = cluster, ledger, story
        self.domain = dict(domains)
        self.lock = threading.RLock()
        self.stopped: set[str] = set()  # hosts whose holder has SIGSTOP
        self.down: set[str] = set()  # hosts that a fault keeps without a holder
        self.is_controller_stopped = False
        self.is_controller_down = False
        self.away: dict[str, Harm] = {}  # host -> its absence, which has not ended
        self.clocks_s: dict[str, float] = {}  # host, or "controller" -> how far its next process's clock is ahead
        self._gone_s: dict[str, float] = {}  # host, or "controller" -> when the supervisor saw that its process ended
        self.site = cluster.folder / "site"
        self.site.mkdir(parents=True, exist_ok=True)
        (self.site / "sitecustomize.py").write_text(_SITE.format(name=CLOCK_VARIABLE))
        self.cut: set[str] = set()  # hosts whose links are bad
        self.undying: set[str] = set()  # hosts whose machine cannot be lost
        self.frozen: dict[str, int] = {}  # host -> its stopped process, beside which another may run by now
        self.former: dict[int, str] = {}  # pid -> name of a process that was replaced while it ran
        self.extra_env: dict[str, str] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self.domain))

    @contextlib.contextmanager
    def _environment(self, who: str) -> Iterator[None]:
        """Set the environment that the next process inherits from this one."""
        changes = dict(self.extra_env)
        shift_s = self.clocks_s.get(who, 0.0)
        if shift_s:
            path = os.environ.get("PYTHONPATH", "")
            changes[CLOCK_VARIABLE] = str(shift_s)
            changes["PYTHONPATH"] = f"{self.site}{os.pathsep + path if path else ''}"
        before = {name: os.environ.get(name) for name in changes}
        os.environ.update(changes)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value

    # -- processes ------------------------------------------------------------------------------

    def open(self) -> None:
        """Start everything and wait until all hosts are live."""
        with self._environment(""):
            self.cluster.__enter__()

    def close(self) -> None:
        """Kill all processes and remove the arenas."""
        self.cluster.stop()

    def start_holder(self, host: str) -> None:
        """Start a holder, which adopts the files of its folder."""
        with self.lock, self._environment(host):
            self.down.discard(host)
            self.stopped.discard(host)
            self.cluster.start_holder(host)

    def kill_holder(self, host: str, *, is_lost: bool = False) -> None:
        """Kill a host's holder; its folder stays, unless the host is lost."""
        with self.lock:
            self.down.add(host)
            self.stopped.discard(host)
            if host in self.cluster.holders:
                self.mark_away(host)
                process = self.cluster.holders.pop(host)
                process.kill()
                process.wait(KILL_S)
            if is_lost:
                self._lose_former(host)
                self.ledger.harmed(self.domain[host], "lost", time.monotonic())
                shutil.rmtree(self.cluster.arena(host), ignore_errors=True)

    def _lose_former(self, host: str) -> None:
        """Kill the stopped holder of a lost machine whose successor was about to kill it."""
        for process in self.outranked():
            if self.former.get(process.pid) == f"holder of {host}":
                process.kill()
                process.wait(KILL_S)

    def stop_holder(self, host: str) -> None:
        """Stop a host's holder with SIGSTOP."""
        with self.lock:
            if host in self.cluster.holders:
                self.stopped.add(host)
                self.mark_away(host)
                self.cluster.holders[host].send_signal(signal.SIGSTOP)

    def continue_holder(self, host: str) -> None:
        """Let a host's stopped holder go on."""
        with self.lock:
            self.stopped.discard(host)
            if host in self.cluster.holders:
                self.cluster.holders[host].send_signal(signal.SIGCONT)

    def has_lock(self, host: str) -> bool:
        """Say whether the host's holder has its folder's lock already."""
        process, owner = self.cluster.holders.get(host), arena_lock.owner(self.cluster.arena(host))
        return process is not None and owner is not None and owner.pid == process.pid

    def replace_holder(self, host: str) -> None:
        """Start a successor beside a stopped holder; the successor kills it (R2)."""
        with self.lock, self._environment(host):
            self.mark_away(host)
            self.stopped.discard(host)
            if host in self.cluster.holders:
                self.former[self.cluster.replace_holder(host).pid] = f"holder of {host}"

    def start_controller(self) -> None:
        """Start a controller, which outranks one that runs."""
        with self.lock, self._environment("controller"):
            self.is_controller_down = self.is_controller_stopped = False
            if self.cluster.controller is not None:
                self.former[self.cluster.controller.pid] = "controller"
            self.cluster.start_controller()

    def kill_controller(self) -> None:
        """Kill the controller."""
        with self.lock:
            self.is_controller_down, self.is_controller_stopped = True, False
            self.cluster.kill_controller()

    def signal_controller(self, sig: signal.Signals) -> None:
        """Send the controller SIGSTOP or SIGCONT."""
        with self.lock:
            self.is_controller_stopped = sig == signal.SIGSTOP
            if self.cluster.controller is not None:
                self.cluster.controller.send_signal(sig)

    def outranked(self) -> list[Process]:
        """Return the holders and controllers that were replaced and still run."""
        return [process for process in self.cluster.replaced if process.poll() is None]

    def pid(self, host: str) -> int | None:
        """Return the pid of a host's holder if it runs."""
        process = self.cluster.holders.get(host)
        return process.pid if process is not None and process.poll() is None else None

    def kill_everything(self) -> None:
        """Kill every holder and the controller; the hosts' memory stays."""
        for host in self:
            self.kill_holder(host)
        self.kill_controller()

    def start_everything(self, order: list[str]) -> None:
        """Start the processes that `kill_everything` killed, host by host."""
        self.start_controller()
        for host in order:
            if host in self.down:
                self.start_holder(host)

    def supervise(self) -> None:
        """Start successors of holders and controllers that ended by themselves, as Ray and the controller would."""
        with self.lock:
            now_s = time.monotonic()
            for host in self:
                process = self.cluster.holders.get(host)
                has_ended = host not in self.down and (process is None or process.poll() is not None)
                if self._is_due(host, has_ended, now_s):
                    self.story.tell(f"holder {host} ended by itself{_code(process)}; a successor is started")
                    self.mark_away(host)
                    self.start_holder(host)
            controller = self.cluster.controller
            has_ended = not self.is_controller_down and (controller is None or controller.poll() is not None)
            if self._is_due("controller", has_ended, now_s):
                self.story.tell(f"the controller ended by itself{_code(controller)}; a successor is started")
                self.start_controller()

    def _is_due(self, who: str, has_ended: bool, now_s: float) -> bool:
        if not has_ended:
            self._gone_s.pop(who, None)
            return False
        if now_s - self._gone_s.setdefault(who, now_s) < RESTART_AFTER_S:
            return False
        del self._gone_s[who]
        return True

    def mark_away(self, host: str) -> None:
        """Note that a host's holder does not serve, until the observer sees it live again."""
        with self.ledger.lock:
            harm = self.away.get(host)
            if harm is None or harm.until_s is not None:
                self.away[host] = self.ledger.harmed(self.domain[host], "away", time.monotonic())

    def heal(self) -> None:
        """Undo everything that keeps a process from running."""
        with self.lock:
            for host in list(self.stopped):
                self.continue_holder(host)
            for host in list(self.down):
                self.start_holder(host)
            if self.is_controller_stopped:
                self.signal_controller(signal.SIGCONT)
            if self.is_controller_down:
                self.start_controller()

    # -- questions --------------------------------------------------------------------------------

    def ask(self, request: RankCall, timeout_s: float = ASK_S) -> Any:
        """Ask the controller through a holder that runs; MemstoreError or OSError if none answers."""
        problems = []
        for host in self:
            if host in self.stopped or self.pid(host) is None:
                continue
            folder = self.cluster.arena(host)
            if not (folder / "holder.sock").exists():
                continue
            try:
                with Tool(folder) as tool:
                    return tool.ask(request, timeout_s)
            except (MemstoreError, OSError) as exc:
                problems.append(f"{host}: {type(exc).__name__}: {exc}")
        raise MemstoreError(f"no holder answers: {problems}")

    def arena(self, host: str) -> Path:
        """Return a host's folder."""
        return self.cluster.arena(host)


def _code(process: Process | None) -> str:
    return "" if process is None else f" with {process.returncode}"

"""The virtual hosts of a round: each a holder, a folder under arena_dir, and the ranks that sit on it.

The processes are those of a cluster of `memstore.testing.clusters`. This file adds what the nemesis needs: which
processes are stopped or meant to be down, successors for processes that end by themselves, clocks that are off, and
questions with a short limit that skip stopped holders.
"""

from __future__ import annotations

import shutil
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from memstore.core.wire.codec import Request
from memstore.shell.arena import lock as arena_lock
from memstore.testing.clusters.cluster import ask_through
from memstore.testing.clusters.processes import ProcessCluster, StartedProcess
from memstore.testing.clusters.stepped_clock import stepped_clock
from memstore.testing.faults.processes import Process, kill, send, wait_gone, with_start_times
from memstore.testing.nemesis.ledger import Harm, Ledger, Story

R = TypeVar("R")
ASK_S = 3.0
RESTART_AFTER_S = 0.5  # a supervisor's delay: Ray needs longer, which is kinder


class Hosts:
    """All hosts of a round as plain processes; only the round's thread changes them, and the observer asks."""

    def __init__(self, cluster: ProcessCluster, ledger: Ledger, story: Story, domains: Mapping[str, str]) -> None:
        self.cluster, self.ledger, self.story = cluster, ledger, story
        self.domain = dict(domains)
        self.lock = threading.RLock()
        self.stopped: dict[str, Process] = {}  # host -> its holder that has SIGSTOP; another may run beside it by now
        self.down: set[str] = set()  # hosts that a fault keeps without a holder
        self.is_controller_stopped = False
        self.is_controller_down = False
        self.away: dict[str, Harm] = {}  # host -> its absence, which has not ended
        self.clocks_s: dict[str, float] = {}  # host, or "controller" -> how far its next process's clock is ahead
        self._gone_s: dict[str, float] = {}  # host, or "controller" -> when the supervisor saw that its process ended
        self.cut: set[str] = set()  # hosts whose links are bad
        self.undying: set[str] = set()  # hosts whose machine cannot be lost
        self.former: dict[int, str] = {}  # pid -> name of a process that was replaced while it ran
        self.extra_env: dict[str, str] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self.domain))

    def open(self) -> None:
        """Start everything and wait until all hosts are live."""
        for who in [*self, "controller"]:
            self._prepare(who)
        self.cluster.start()

    def close(self) -> None:
        """Kill all processes and remove the arenas."""
        self.cluster.stop()

    def arena(self, host: str) -> Path:
        """Return a host's folder."""
        return self.cluster.arena(host)

    # -- what runs ------------------------------------------------------------------------------

    def holder(self, host: str) -> Process | None:
        """Return a host's holder if it runs."""
        return _running(self.cluster.holders.get(host))

    def controller(self) -> Process | None:
        """Return the controller if it runs."""
        return _running(self.cluster.controller)

    def has_lock(self, host: str) -> bool:
        """Say whether the host's holder has its folder's lock already."""
        process, owner = self.holder(host), arena_lock.owner(self.arena(host))
        return process is not None and owner is not None and owner.pid == process[0]

    def outranked(self) -> list[StartedProcess]:
        """Return the holders and controllers that were replaced and still run."""
        return [process for process in self.cluster.replaced if process.poll() is None]

    def ask(self, request: Request[R], timeout_s: float = ASK_S) -> R:
        """Ask the controller through a holder that runs; MemstoreError if none answers."""
        hosts = [host for host in self if host not in self.stopped and self.holder(host) is not None]
        return ask_through([self.arena(host) for host in hosts], request, timeout_s)

    def mark_away(self, host: str) -> None:
        """Note that a host's holder does not serve, until the observer sees it live again."""
        with self.ledger.lock:
            harm = self.away.get(host)
            if harm is None or harm.until_s is not None:
                self.away[host] = self.ledger.harmed(self.domain[host], "away", time.monotonic())

    # -- signals --------------------------------------------------------------------------------

    def stop_holder(self, host: str) -> None:
        """Stop a host's holder with SIGSTOP."""
        with self.lock:
            process = self.holder(host)
            if process is not None:
                self.mark_away(host)
                self.stopped[host] = process
                send(process, signal.SIGSTOP)

    def continue_holder(self, host: str) -> None:
        """Let a host's stopped holder go on."""
        with self.lock:
            process = self.stopped.pop(host, None)
            if process is not None:
                send(process, signal.SIGCONT)

    def signal_controller(self, sig: signal.Signals) -> None:
        """Send the controller SIGSTOP or SIGCONT."""
        with self.lock:
            self.is_controller_stopped = sig == signal.SIGSTOP
            process = self.controller()
            if process is not None:
                send(process, sig)

    def heal(self) -> None:
        """Undo everything that keeps a process from running."""
        with self.lock:
            for host in list(self.stopped):
                self.continue_holder(host)
            self.start_everything(sorted(self.down))
            if self.is_controller_stopped:
                self.signal_controller(signal.SIGCONT)

    # -- starts and ends ------------------------------------------------------------------------

    def _prepare(self, who: str) -> None:
        """Set the environment of the next process of a host, or of the controller."""
        shift_s = self.clocks_s.get(who, 0.0)
        clock = stepped_clock(self.cluster.folder / "site", shift_s) if shift_s else {}
        self.cluster.environ["" if who == "controller" else who] = {**self.extra_env, **clock}

    def start_holder(self, host: str) -> None:
        """Start a holder, which adopts the files of its folder."""
        with self.lock:
            self._prepare(host)
            self.down.discard(host)
            self.stopped.pop(host, None)
            self.cluster.start_holder(host)

    def kill_holder(self, host: str, *, is_lost: bool = False) -> None:
        """Kill a host's holder; its folder stays, unless the host is lost."""
        with self.lock:
            self.down.add(host)
            self.stopped.pop(host, None)
            if host in self.cluster.holders:
                self.mark_away(host)
                self.cluster.kill_holder(host)
            if is_lost:
                # The stopped holder of a lost machine goes too, though its successor was about to kill it.
                former = [p.pid for p in self.outranked() if self.former.get(p.pid) == f"holder of {host}"]
                ended = with_start_times(former)
                kill(ended)
                wait_gone(ended)
                self.ledger.harmed(self.domain[host], "lost", time.monotonic())
                shutil.rmtree(self.arena(host), ignore_errors=True)

    def replace_holder(self, host: str) -> None:
        """Start a successor beside a stopped holder; the successor kills it (R2)."""
        with self.lock:
            if self.stopped.pop(host, None) is None:
                return  # killed meanwhile: its successor runs, and one more would find the arena locked
            self._prepare(host)
            self.mark_away(host)
            if host in self.cluster.holders:
                self.former[self.cluster.replace_holder(host).pid] = f"holder of {host}"

    def start_controller(self) -> None:
        """Start a controller, which outranks one that runs."""
        with self.lock:
            self._prepare("controller")
            self.is_controller_down = self.is_controller_stopped = False
            if self.cluster.controller is not None:
                self.former[self.cluster.controller.pid] = "controller"
            self.cluster.start_controller()

    def kill_controller(self) -> None:
        """Kill the controller; no other is started until `start_controller`."""
        with self.lock:
            self.is_controller_down, self.is_controller_stopped = True, False
            self.cluster.kill_controller()

    def kill_everything(self) -> None:
        """Kill every holder and the controller; the hosts' memory stays."""
        for host in self:
            self.kill_holder(host)
        self.kill_controller()

    def start_everything(self, order: list[str]) -> None:
        """Start the processes that are down, host by host."""
        if self.is_controller_down:
            self.start_controller()
        for host in order:
            if host in self.down:
                self.start_holder(host)

    def supervise(self) -> None:
        """Start successors of holders and controllers that ended by themselves, as Ray and the controller would."""
        with self.lock:
            for host in self:
                if self._is_due(host, host not in self.down, self.cluster.holders.get(host)):
                    self.mark_away(host)
                    self.start_holder(host)
            if self._is_due("controller", not self.is_controller_down, self.cluster.controller):
                self.start_controller()

    def _is_due(self, who: str, is_wanted: bool, process: StartedProcess | None) -> bool:
        """Return whether a process that is wanted ended some time ago."""
        now_s = time.monotonic()
        if not is_wanted or _running(process) is not None:
            self._gone_s.pop(who, None)
            return False
        if now_s - self._gone_s.setdefault(who, now_s) < RESTART_AFTER_S:
            return False
        del self._gone_s[who]
        code = "" if process is None else f" with {process.returncode}"
        self.story.log(f"the process of {who} ended by itself{code}; a successor is started")
        return True


def _running(process: StartedProcess | None) -> Process | None:
    if process is None or process.poll() is not None:
        return None
    return next(iter(with_start_times([process.pid])), None)

"""Faults of processes and clocks. The class has a method for every kind of fault that a schedule can name.

Each method does its damage at once, and may leave something to undo after `for_s` seconds.
"""

from __future__ import annotations

import contextlib
import heapq
import math
import random
import resource
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

from memstore.testing.nemesis.faults_files import FileFaults
from memstore.testing.nemesis.faults_network import NetworkFaults
from memstore.testing.nemesis.ray_hosts import RayHosts
from memstore.testing.nemesis.schedule import Planned

CATCH_UP_S = 5.0  # a rank that goes on after a stop may take so long to catch up
SPARE_FDS = 0  # the table is full: the process gets EMFILE for the next descriptor


class Faults(FileFaults, NetworkFaults):
    """The faults of one round, undone in `tick` and `heal`; only the round's thread calls it."""

    def tick(self) -> None:
        """Undo the faults whose time is over."""
        while self.undo and self.undo[0][0] <= time.monotonic():
            _, _, action = heapq.heappop(self.undo)
            action()

    def heal(self) -> None:
        """Undo all faults now."""
        while self.undo:
            heapq.heappop(self.undo)[2]()
        self.hosts.heal()

    def play(self, planned: Planned) -> None:
        """Do one fault; if its victim or file has gone meanwhile, nothing happens."""
        rng = random.Random(f"{self.scenario.seed} {planned.at_s} {planned.values.get('draw', 0)}")
        self.last_s = time.monotonic()
        getattr(self, planned.kind)(rng, planned)

    def later(self, planned: Planned, action: Callable[[], None]) -> None:
        """Do something when the fault's time is over."""
        self.order += 1
        heapq.heappush(self.undo, (time.monotonic() + planned.for_s, self.order, self.noted(action)))

    def noted(self, action: Callable[[], None]) -> Callable[[], None]:
        """Return the action that also notes the end of the fault in `last_s`."""

        def act() -> None:
            action()
            self.last_s = time.monotonic()

        return act

    # -- holders --------------------------------------------------------------------------------

    def kill_holder(self, rng: random.Random, planned: Planned) -> None:
        """Kill a holder; its successor comes later."""
        host = self.up(rng, planned)
        if host:
            self.story.fault("kill_holder", f"{host}, for {planned.for_s:g} s")
            self.hosts.kill_holder(host)
            self.later(planned, lambda: self.start(host))

    def start(self, host: str) -> None:
        """Start a host's holder unless it was started meanwhile."""
        if host in self.hosts.down:
            self.story.tell(f"holder {host} is started")
            self.hosts.start_holder(host)

    def stop_holder(self, rng: random.Random, planned: Planned) -> None:
        """Stop a holder for a while."""
        host = self.up(rng, planned)
        if host:
            self.story.fault("stop_holder", f"{host}, for {planned.for_s:g} s")
            self.hosts.stop_holder(host)
            self.later(planned, lambda: self.hosts.continue_holder(host))

    def replace_stopped_holder(self, rng: random.Random, planned: Planned) -> None:
        """Stop a holder and start its successor, which kills it; a holder that only begins has no lock yet."""
        host = self.up(rng, planned)
        if host and self.hosts.has_lock(host):
            self.story.fault("replace_stopped_holder", host)
            self.hosts.stop_holder(host)
            self.later(planned, lambda: self.hosts.replace_holder(host))

    def kill_everything(self, rng: random.Random, planned: Planned) -> None:
        """Kill all holders and the controller, as when Ray's head is lost; most often the ranks too."""
        self.story.fault("kill_everything", f"for {planned.for_s:g} s")
        self.hosts.kill_everything()
        if rng.random() < 0.7:
            self.job.hold("everything was killed")
            self.held_for_restart = True
        order = rng.sample(list(self.hosts), len(list(self.hosts)))
        self.later(planned, lambda: self.hosts.start_everything(order))

    def kill_raylet(self, rng: random.Random, planned: Planned) -> None:
        """On Ray, kill a raylet and all processes below it; another one joins, with the host's memory."""
        host = self.up(rng, planned)
        if isinstance(self.hosts, RayHosts) and host and host not in self.hosts.undying:
            self.story.fault("kill_raylet", host)
            self.hosts.replace_raylet(host)

    def stop_gcs(self, rng: random.Random, planned: Planned) -> None:
        """On Ray, stop the GCS for a while."""
        if isinstance(self.hosts, RayHosts):
            hosts = self.hosts
            self.story.fault("stop_gcs", f"for {planned.for_s:g} s")
            hosts.signal_gcs(signal.SIGSTOP)
            self.later(planned, lambda: hosts.signal_gcs(signal.SIGCONT))

    # -- controllers ----------------------------------------------------------------------------

    def kill_controller(self, rng: random.Random, planned: Planned) -> None:
        """Kill the controller; its successor comes later."""
        if not self.hosts.is_controller_down:
            self.story.fault("kill_controller", f"for {planned.for_s:g} s")
            self.hosts.kill_controller()
            self.later(planned, self._start_controller)

    def _start_controller(self) -> None:
        if self.hosts.is_controller_down:
            self.hosts.start_controller()

    def stop_controller(self, rng: random.Random, planned: Planned) -> None:
        """Stop the controller for a while."""
        if not self.hosts.is_controller_down:
            self.story.fault("stop_controller", f"for {planned.for_s:g} s")
            self.hosts.signal_controller(signal.SIGSTOP)
            self.later(planned, lambda: self.hosts.signal_controller(signal.SIGCONT))

    def second_controller(self, rng: random.Random, planned: Planned) -> None:
        """Start another controller beside the first, which is stopped at that moment in half of the cases."""
        if self.hosts.is_controller_down or self.hosts.is_controller_stopped:
            return
        old = self.hosts.cluster.controller
        is_stopped = rng.random() < 0.5
        self.story.fault("second_controller", f"the first is {'stopped meanwhile' if is_stopped else 'running'}")
        if is_stopped and old is not None:
            old.send_signal(signal.SIGSTOP)
            self.later(planned, lambda: old.send_signal(signal.SIGCONT))
        self.hosts.start_controller()

    # -- ranks ----------------------------------------------------------------------------------

    def kill_rank(self, rng: random.Random, planned: Planned) -> None:
        """Kill one rank; the launcher ends the others and starts all again."""
        ranks = list(self.job.ranks)
        if ranks:
            rank = rng.choice(ranks)
            self.story.fault("kill_rank", f"rank {rank.rank}")
            with contextlib.suppress(OSError):
                rank.send_signal(signal.SIGKILL)

    def stop_rank(self, rng: random.Random, planned: Planned) -> None:
        """Stop one rank for a while."""
        ranks = list(self.job.ranks)
        if not ranks:
            return
        rank, pause_s = rng.choice(ranks), [time.monotonic(), math.inf]
        self.story.fault("stop_rank", f"rank {rank.rank}, for {planned.for_s:g} s")
        self.job.paused_s.append(pause_s)
        with contextlib.suppress(OSError):
            rank.send_signal(signal.SIGSTOP)

        def go_on() -> None:  # later than planned if a fault before it waited for Ray
            pause_s[1] = time.monotonic() + CATCH_UP_S
            with contextlib.suppress(OSError):
                rank.send_signal(signal.SIGCONT)

        self.later(planned, go_on)

    # -- hosts ----------------------------------------------------------------------------------

    def lose_host(self, rng: random.Random, planned: Planned) -> None:
        """Lose a machine with its memory and its ranks; a blank one of the same id joins later."""
        host = self.expendable(rng, planned)
        if host:
            self.story.fault("lose_host", f"{host}; a blank one comes after {planned.for_s:g} s")
            self.job.kill_ranks(host)
            self.hosts.kill_holder(host, is_lost=True)
            self.later(planned, lambda: self.start(host))

    def lose_everything(self, rng: random.Random, planned: Planned) -> None:
        """Lose the memory of all hosts with all processes; the newest durable step must come back."""
        if not self.ledger.durable:
            self.story.tell("nothing is durable yet: nothing is destroyed")
            return
        self.story.fault("lose_everything", f"for {planned.for_s:g} s; durable: {self.ledger.durable[-1]}")
        self.job.hold("all memory is lost")
        self.held_for_restart = True
        self.hosts.kill_everything()
        for host in self.hosts:
            self.hosts.kill_holder(host, is_lost=True)
        order = list(self.hosts)
        self.later(planned, lambda: self.hosts.start_everything(order))

    # -- clocks, descriptors, versions ------------------------------------------------------------

    def step_clock(self, rng: random.Random, planned: Planned) -> None:
        """Kill a process, whose successor has another wall clock."""
        shift_s = planned.values.get("shift_s") or rng.choice((-3600.0, -30.0, 5.0, 3600.0, 200_000.0))
        if planned.values.get("who") == "controller" or rng.random() < 0.3:
            self.story.fault("step_clock", f"the controller is killed; the next has a clock {shift_s:+g} s")
            self.hosts.clocks_s["controller"] = shift_s
            self.hosts.kill_controller()
            self.later(planned, self._start_controller)
            return
        host = self.up(rng, planned)
        if host:
            self.story.fault("step_clock", f"holder {host} is killed; the next has a clock {shift_s:+g} s")
            self.hosts.clocks_s[host] = shift_s
            self.hosts.kill_holder(host)
            self.later(planned, lambda: self.start(host))

    def fill_descriptors(self, rng: random.Random, planned: Planned) -> None:
        """Fill the descriptor table of a holder or the controller for a while."""
        host = self.up(rng, planned)
        controller = self.hosts.cluster.controller
        pid = self.hosts.pid(host) if host else None
        name = f"holder {host}"
        if rng.random() < 0.3 and controller is not None:
            pid, name = controller.pid, "the controller"
        if pid is None:
            return
        with contextlib.suppress(OSError):
            before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
            self.story.fault("fill_descriptors", f"{name}, for {planned.for_s:g} s")
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (3 + SPARE_FDS, before[1]))
            if host and name != "the controller":
                self.hosts.mark_away(host)

            def restore() -> None:
                with contextlib.suppress(OSError):
                    resource.prlimit(pid, resource.RLIMIT_NOFILE, before)

            self.later(planned, restore)

    def speak_another_version(self, rng: random.Random, planned: Planned) -> None:
        """Send a holder the greeting of another version, over TCP and over the Unix socket."""
        host = self.up(rng, planned)
        if not host:
            return
        self.story.fault("speak_another_version", host)
        body = b"\x80"
        hello = b"MSTO" + bytes((250, 1)) + bytes(2) + bytes(8) + len(body).to_bytes(4, "little") + bytes(8 + 4) + body
        for family, address in self._listeners(host):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as sock:
                sock.settimeout(2.0)
                sock.connect(address)
                sock.sendall(rng.choice((hello, hello[:7], rng.randbytes(64), b"")))
                sock.recv(64)

    def _listeners(self, host: str) -> list[tuple[int, Any]]:
        found: list[tuple[int, Any]] = [(socket.AF_UNIX, str(self.hosts.arena(host) / "holder.sock"))]
        with contextlib.suppress(OSError, ValueError, KeyError):
            found.append((socket.AF_INET, self.hosts.cluster.announced(host)()))
        return found

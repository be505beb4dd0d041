"""Faults of processes and clocks, and the table of all kinds: what a schedule names is a method here.

Each method does its damage at once and may leave something to undo after `for_s` seconds.
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

CATCH_UP_S = 5.0  # a rank that goes on after a stop is given so long for what it missed
SPARE_FDS = 0  # a full table: whoever wants one more gets EMFILE


class Faults(FileFaults, NetworkFaults):
    """Carries out the faults of one round; undone in `tick` and `heal`. For the round's thread."""

    def tick(self) -> None:
        """Undo what is over."""
        while self.undo and self.undo[0][0] <= time.monotonic():
            _, _, action = heapq.heappop(self.undo)
            action()

    def heal(self) -> None:
        """Undo everything now."""
        while self.undo:
            heapq.heappop(self.undo)[2]()
        self.hosts.heal()

    def play(self, planned: Planned) -> None:
        """Carry out one fault; a victim or file that has gone meanwhile makes it none."""
        rng = random.Random(f"{self.scenario.seed} {planned.at_s} {planned.values.get('draw', 0)}")
        self.last_s = time.monotonic()
        getattr(self, planned.kind)(rng, planned)

    def later(self, planned: Planned, action: Callable[[], None]) -> None:
        """Do something after the fault's seconds."""
        self.order += 1
        heapq.heappush(self.undo, (time.monotonic() + planned.for_s, self.order, self.noted(action)))

    def noted(self, action: Callable[[], None]) -> Callable[[], None]:
        """The end of a fault counts as its last moment."""

        def act() -> None:
            action()
            self.last_s = time.monotonic()

        return act

    # -- holders --------------------------------------------------------------------------------

    def kill_holder(self, rng: random.Random, planned: Planned) -> None:
        """SIGKILL; its successor comes later."""
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
        """SIGSTOP, SIGCONT."""
        host = self.up(rng, planned)
        if host:
            self.story.fault("stop_holder", f"{host}, for {planned.for_s:g} s")
            self.hosts.stop_holder(host)
            self.later(planned, lambda: self.hosts.continue_holder(host))

    def replace_stopped_holder(self, rng: random.Random, planned: Planned) -> None:
        """A stopped holder gets a successor, which kills it; one that only begins has no lock to be killed for."""
        host = self.up(rng, planned)
        if host and self.hosts.has_lock(host):
            self.story.fault("replace_stopped_holder", host)
            self.hosts.stop_holder(host)
            self.later(planned, lambda: self.hosts.replace_holder(host))

    def kill_everything(self, rng: random.Random, planned: Planned) -> None:
        """All holders and the controller, as with a lost Ray head; the ranks live or die with them."""
        self.story.fault("kill_everything", f"for {planned.for_s:g} s")
        self.hosts.kill_everything()
        if rng.random() < 0.7:
            self.job.hold("everything was killed")
            self.held_for_restart = True
        order = rng.sample(list(self.hosts), len(list(self.hosts)))
        self.later(planned, lambda: self.hosts.start_everything(order))

    def kill_raylet(self, rng: random.Random, planned: Planned) -> None:
        """On Ray: a raylet and all below it die; another one joins, with the host's memory."""
        host = self.up(rng, planned)
        if isinstance(self.hosts, RayHosts) and host and host not in self.hosts.undying:
            self.story.fault("kill_raylet", host)
            self.hosts.replace_raylet(host)

    def stop_gcs(self, rng: random.Random, planned: Planned) -> None:
        """On Ray: the GCS is silent for a while."""
        if isinstance(self.hosts, RayHosts):
            hosts = self.hosts
            self.story.fault("stop_gcs", f"for {planned.for_s:g} s")
            hosts.signal_gcs(signal.SIGSTOP)
            self.later(planned, lambda: hosts.signal_gcs(signal.SIGCONT))

    # -- controllers ----------------------------------------------------------------------------

    def kill_controller(self, rng: random.Random, planned: Planned) -> None:
        """SIGKILL; its successor comes later."""
        if not self.hosts.is_controller_down:
            self.story.fault("kill_controller", f"for {planned.for_s:g} s")
            self.hosts.kill_controller()
            self.later(planned, self._start_controller)

    def _start_controller(self) -> None:
        if self.hosts.is_controller_down:
            self.hosts.start_controller()

    def stop_controller(self, rng: random.Random, planned: Planned) -> None:
        """SIGSTOP, SIGCONT."""
        if not self.hosts.is_controller_down:
            self.story.fault("stop_controller", f"for {planned.for_s:g} s")
            self.hosts.signal_controller(signal.SIGSTOP)
            self.later(planned, lambda: self.hosts.signal_controller(signal.SIGCONT))

    def second_controller(self, rng: random.Random, planned: Planned) -> None:
        """Another controller beside the first, which is stopped at that moment in half of the cases."""
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
        """SIGKILL of one rank: the launcher ends the others and starts all again."""
        ranks = list(self.job.ranks)
        if ranks:
            rank = rng.choice(ranks)
            self.story.fault("kill_rank", f"rank {rank.rank}")
            with contextlib.suppress(OSError):
                rank.send_signal(signal.SIGKILL)

    def stop_rank(self, rng: random.Random, planned: Planned) -> None:
        """SIGSTOP of one rank, SIGCONT."""
        ranks = list(self.job.ranks)
        if not ranks:
            return
        rank, pause_s = rng.choice(ranks), [time.monotonic(), math.inf]
        self.story.fault("stop_rank", f"rank {rank.rank}, for {planned.for_s:g} s")
        self.job.paused_s.append(pause_s)
        with contextlib.suppress(OSError):
            rank.send_signal(signal.SIGSTOP)

        def go_on() -> None:  # later than planned where a fault before it waited for Ray
            pause_s[1] = time.monotonic() + CATCH_UP_S
            with contextlib.suppress(OSError):
                rank.send_signal(signal.SIGCONT)

        self.later(planned, go_on)

    # -- hosts ----------------------------------------------------------------------------------

    def lose_host(self, rng: random.Random, planned: Planned) -> None:
        """The machine is gone with its memory and its ranks; a blank one of the same id joins later."""
        host = self.expendable(rng, planned)
        if host:
            self.story.fault("lose_host", f"{host}; a blank one comes after {planned.for_s:g} s")
            self.job.kill_ranks(host)
            self.hosts.kill_holder(host, is_lost=True)
            self.later(planned, lambda: self.start(host))

    def lose_everything(self, rng: random.Random, planned: Planned) -> None:
        """The memory of all hosts is lost with all processes; what is durable must come back."""
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
        """A process comes back with another wall clock."""
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
        """A holder's or the controller's table of descriptors is full for a while."""
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
        """A process of another version says hello to a holder, over TCP and over the Unix socket."""
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

"""The faults of processes, clocks, links and storage. A method has the name of the kind of fault in a schedule.

Each is a generator: it chooses a victim and does its damage, yields what it did as text, and after the fault's time
undoes it. If a method ends without a yield, because its victim or file has gone meanwhile, nothing has happened.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import math
import random
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from memstore.testing.faults.processes import send
from memstore.testing.nemesis.hosts import Hosts
from memstore.testing.nemesis.ledger import Ledger
from memstore.testing.nemesis.ray_hosts import RayHosts
from memstore.testing.nemesis.reading import Reading
from memstore.testing.nemesis.schedule import Planned, Scenario
from memstore.testing.nemesis.storage import Storage
from memstore.testing.nemesis.story import Story

if TYPE_CHECKING:
    from memstore.testing.nemesis.job import Job

CATCH_UP_S = 5.0  # a rank that goes on after a stop may take so long to catch up
FDS_FULL = 3  # the table is full: the process gets EMFILE for the next descriptor
Fault = Callable[[Any, random.Random, Planned, str], Iterator[str]]


def on(choose: str) -> Callable[[Fault], Callable[[Any, random.Random, Planned], Iterator[str]]]:
    """Give a fault the host that the method `choose` returns; do nothing if that is none."""

    def decorate(fault: Fault) -> Callable[[Any, random.Random, Planned], Iterator[str]]:
        @functools.wraps(fault)
        def chosen(self: Any, rng: random.Random, planned: Planned) -> Iterator[str]:
            host = getattr(self, choose)(rng, planned)
            if host:
                yield from fault(self, rng, planned, host)

        return chosen

    return decorate


class FaultBase:
    """The parts of a round that faults use, the choice of a victim, and the limit on memory that may go."""

    def __init__(
        self, scenario: Scenario, hosts: Hosts, job: Job, ledger: Ledger, story: Story, reading: Reading,
        storage: Storage,
    ) -> None:  # fmt: skip
        self.scenario, self.hosts, self.job = scenario, hosts, job
        self.ledger, self.story, self.reading, self.storage = ledger, story, reading, storage
        self.undo: list[tuple[float, int, Iterator[str]]] = []
        self.order = 0
        self.last_s = time.monotonic()  # when a fault last began or ended
        self.held_for_restart = False  # the job is dead until every host is back

    def start(self, host: str) -> None:
        """Start a host's holder unless it was started meanwhile."""
        if host in self.hosts.down:
            self.story.log(f"holder {host} is started")
            self.hosts.start_holder(host)

    def up(self, rng: random.Random, planned: Planned) -> str:
        """Return the planned host, or one whose holder runs; "" if there is none."""
        running = [h for h in self.hosts if h not in self.hosts.down and h not in self.hosts.stopped]
        running = [h for h in running if self.hosts.holder(h) is not None]
        wanted = planned.values.get("host")
        if wanted is not None:
            return wanted if wanted in running else ""
        return rng.choice(running) if running else ""

    def proxied(self, rng: random.Random, planned: Planned) -> str:
        """Return a host with good links that peers reach through a proxy."""
        host = self.up(rng, planned)
        return host if host in self.hosts.cluster.proxies and host not in self.hosts.cut else ""

    def expendable(self, rng: random.Random, planned: Planned) -> str:
        """Return a host whose memory may go within the promise; "" if its loss would be one too many."""
        host = self.up(rng, planned)
        if not host or host in self.hosts.undying:
            return ""
        with self.ledger.lock:
            newest = self.ledger.newest_commit()
            if newest is None:
                return ""
            since_s = self.ledger.commits[newest].safe_since_s
            open_rot = {h.domain for h in self.ledger.harms if h.kind.startswith("rot") and not h.is_repaired}
            floor_s = self.reading.observer.complete_s if since_s is None else since_s
            damaged = {h.domain for h in self.ledger.harms
                    if h.at_s >= floor_s or (h.kind == "away" and h.until_s is None)}  # fmt: skip
        damaged |= open_rot | {self.hosts.domain[host]}
        return host if len(damaged) < self.scenario.replicas else ""

    def harmed(self, host: str, kind: str) -> None:
        """Note in the ledger that memory of a host is lost or rotten."""
        self.ledger.harmed(self.hosts.domain[host], kind, time.monotonic())


class ProcessFaults(FaultBase):
    """The faults of holders, controllers, ranks and whole hosts."""

    # -- holders --------------------------------------------------------------------------------

    @on("up")
    def kill_holder(self, rng: random.Random, planned: Planned, host: str) -> Iterator[str]:
        """Kill a holder; its successor comes later."""
        self.hosts.kill_holder(host)
        yield host
        self.start(host)

    @on("up")
    def stop_holder(self, rng: random.Random, planned: Planned, host: str) -> Iterator[str]:
        """Stop a holder for a while."""
        self.hosts.stop_holder(host)
        yield host
        self.hosts.continue_holder(host)

    @on("up")
    def replace_stopped_holder(self, rng: random.Random, planned: Planned, host: str) -> Iterator[str]:
        """Stop a holder and start its successor, which kills it; a holder that only begins has no lock yet."""
        if self.hosts.has_lock(host):
            self.hosts.stop_holder(host)
            yield host
            self.hosts.replace_holder(host)

    def kill_everything(self, rng: random.Random, planned: Planned) -> Iterator[str]:
        """Kill all holders and the controller, as when Ray's head is lost; most often the ranks too."""
        self.hosts.kill_everything()
        if rng.random() < 0.7:
            self.job.hold("everything was killed")
            self.held_for_restart = True
        order = rng.sample(list(self.hosts), len(list(self.hosts)))
        yield "all holders and the controller"
        self.hosts.start_everything(order)

    @on("up")
    def kill_raylet(self, rng: random.Random, planned: Planned, host: str) -> Iterator[str]:
        """On Ray, kill a raylet and all processes below it; another one joins, with the host's memory."""
        if isinstance(self.hosts, RayHosts) and host not in self.hosts.undying:
            self.hosts.replace_raylet(host)
            yield host

    def stop_gcs(self, rng: random.Random, planned: Planned) -> Iterator[str]:
        """On Ray, stop the GCS for a while."""
        if isinstance(self.hosts, RayHosts):
            self.hosts.signal_gcs(signal.SIGSTOP)
            yield "the GCS"
            self.hosts.signal_gcs(signal.SIGCONT)

    # -- controllers ----------------------------------------------------------------------------

    def kill_controller(self, rng: random.Random, planned: Planned) -> Iterator[str]:
        """Kill the controller; its successor comes later."""
        if not self.hosts.is_controller_down:
            self.hosts.kill_controller()
            yield "the controller"
            self._start_controller()

    def _start_controller(self) -> None:
        if self.hosts.is_controller_down:
            self.hosts.start_controller()

    def stop_controller(self, rng: random.Random, planned: Planned) -> Iterator[str]:
        """Stop the controller for a while."""
        if not self.hosts.is_controller_down:
            self.hosts.signal_controller(signal.SIGSTOP)
            yield "the controller"
            self.hosts.signal_controller(signal.SIGCONT)

    def second_controller(self, rng: random.Random, planned: Planned) -> Iterator[str]:
        """Start another controller beside the first, which is stopped at that moment in half of the cases."""
        if self.hosts.is_controller_down or self.hosts.is_controller_stopped:
            return
        old, is_stopped = self.hosts.controller(), rng.random() < 0.5
        if is_stopped and old is not None:
            send(old, signal.SIGSTOP)
        self.hosts.start_controller()
        yield f"the first is {'stopped meanwhile' if is_stopped else 'running'}"
        if is_stopped and old is not None:
            send(old, signal.SIGCONT)

    # -- ranks ----------------------------------------------------------------------------------

    def kill_rank(self, rng: random.Random, planned: Planned) -> Iterator[str]:
        """Kill one rank; the launcher ends the others and starts all again."""
        for rank in [rng.choice(ranks) for ranks in [list(self.job.ranks)] if ranks]:
            with contextlib.suppress(OSError):
                rank.send_signal(signal.SIGKILL)
            yield f"rank {rank.rank}"

    def stop_rank(self, rng: random.Random, planned: Planned) -> Iterator[str]:
        """Stop one rank for a while."""
        for rank in [rng.choice(ranks) for ranks in [list(self.job.ranks)] if ranks]:
            pause_s = [time.monotonic(), math.inf]
            self.job.paused_s.append(pause_s)
            with contextlib.suppress(OSError):
                rank.send_signal(signal.SIGSTOP)
            yield f"rank {rank.rank}"
            pause_s[1] = time.monotonic() + CATCH_UP_S  # later than planned if a fault before it waited for Ray
            with contextlib.suppress(OSError):
                rank.send_signal(signal.SIGCONT)

    # -- hosts ----------------------------------------------------------------------------------

    @on("expendable")
    def lose_host(self, rng: random.Random, planned: Planned, host: str) -> Iterator[str]:
        """Lose a machine with its memory and its ranks; a blank one of the same id joins later."""
        self.job.kill_ranks(host)
        self.hosts.kill_holder(host, is_lost=True)
        yield host
        self.start(host)

    def lose_everything(self, rng: random.Random, planned: Planned) -> Iterator[str]:
        """Lose the memory of all hosts with all processes; the newest durable step must come back."""
        if not self.ledger.durable:
            self.story.log("nothing is durable yet: nothing is destroyed")
            return
        self.job.hold("all memory is lost")
        self.held_for_restart = True
        self.hosts.kill_everything()
        for host in self.hosts:
            self.hosts.kill_holder(host, is_lost=True)
        yield f"durable: {self.ledger.durable[-1]}"
        self.hosts.start_everything(list(self.hosts))

    # -- clocks, descriptors, versions ------------------------------------------------------------

    def step_clock(self, rng: random.Random, planned: Planned) -> Iterator[str]:
        """Kill a process, whose successor has another wall clock."""
        shift_s = planned.values.get("shift_s") or rng.choice((-3600.0, -30.0, 5.0, 3600.0, 200_000.0))
        if planned.values.get("who") == "controller" or rng.random() < 0.3:
            self.hosts.clocks_s["controller"] = shift_s
            self.hosts.kill_controller()
            yield f"the controller is killed; the next has a clock {shift_s:+g} s"
            self._start_controller()
            return
        host = self.up(rng, planned)
        if host:
            self.hosts.clocks_s[host] = shift_s
            self.hosts.kill_holder(host)
            yield f"holder {host} is killed; the next has a clock {shift_s:+g} s"
            self.start(host)

    def fill_descriptors(self, rng: random.Random, planned: Planned) -> Iterator[str]:
        """Fill the descriptor table of a holder or the controller for a while."""
        host, controller = self.up(rng, planned), self.hosts.controller()
        process, name = self.hosts.holder(host) if host else None, f"holder {host}"
        if rng.random() < 0.3 and controller is not None:
            process, name, host = controller, "the controller", ""
        if process is None:
            return
        with contextlib.suppress(OSError):
            before = resource.prlimit(process[0], resource.RLIMIT_NOFILE)
            if before[0] == FDS_FULL:  # by a fault that is not over: this one would leave it full for good
                self.story.log(f"the descriptor table of {name} is full already")
                return
            resource.prlimit(process[0], resource.RLIMIT_NOFILE, (FDS_FULL, before[1]))
            if host:
                self.hosts.mark_away(host)
            yield name
            resource.prlimit(process[0], resource.RLIMIT_NOFILE, before)

    @on("up")
    def speak_another_version(self, rng: random.Random, planned: Planned, host: str) -> Iterator[str]:
        """Send a holder the greeting of another version, over TCP and over the Unix socket."""
        body = b"\x80"
        hello = b"MSTO" + bytes((250, 1)) + bytes(2) + bytes(8) + len(body).to_bytes(4, "little") + bytes(8 + 4) + body
        listeners: list[tuple[int, Any]] = [(socket.AF_UNIX, str(self.hosts.arena(host) / "holder.sock"))]
        with contextlib.suppress(OSError, ValueError, KeyError):
            listeners.append((socket.AF_INET, self.hosts.cluster.announced(host)()))
        for family, address in listeners:
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as sock:
                sock.settimeout(2.0)
                sock.connect(address)
                sock.sendall(rng.choice((hello, hello[:7], rng.randbytes(64), b"")))
                sock.recv(64)
        yield host


class LinkFaults(FaultBase):
    """The faults of links and of durable storage, and questions to readers and the command line in between."""

    @on("proxied")
    def cut_link(self, rng: random.Random, planned: Planned, host: str) -> Iterator[str]:
        """Lose or hold back what peers send to a host, or what it answers, for a while."""
        proxy = self.hosts.cluster.proxies[host]
        directions = rng.choice(((proxy.up,), (proxy.down,), (proxy.up, proxy.down)))
        field = rng.choice(("drop", "stall"))
        self.hosts.cut.add(host)
        self.hosts.mark_away(host)
        for direction in directions:
            setattr(direction, field, True)
        yield f"{host}: {len(directions)} directions {field}"
        for direction in directions:
            setattr(direction, field, False)
        self.hosts.cut.discard(host)

    @on("proxied")
    def slow_link(self, rng: random.Random, planned: Planned, host: str) -> Iterator[str]:
        """Make a host's link late and slow for a while."""
        direction = self.hosts.cluster.proxies[host].up
        direction.delay_s, direction.rate_bytes_per_s = rng.choice((0.0, 0.05, 0.3)), rng.choice((0.0, 2e5, 2e6))
        yield f"{host}: {direction.delay_s:g} s late, {direction.rate_bytes_per_s:g} B/s"
        direction.delay_s = direction.rate_bytes_per_s = 0.0

    @on("proxied")
    def reset_links(self, rng: random.Random, planned: Planned, host: str) -> Iterator[str]:
        """Reset every connection of peers to a host, or flip a bit of the next large payload."""
        proxy = self.hosts.cluster.proxies[host]
        if rng.random() < 0.5:
            proxy.reset_all()
            yield f"{host}: all reset"
        else:
            proxy.up.flip("payload", rng.randrange(4096), payload_min=4096, bit=rng.randrange(8))
            yield f"{host}: a bit flips"

    def break_storage(self, rng: random.Random, planned: Planned) -> Iterator[str]:
        """Let durable storage fail, hang up or be away for a while."""
        what, undo = self.storage.damage(rng)
        began_s = time.monotonic()
        self.ledger.lost_storage(began_s)
        yield what
        undo()
        self.ledger.lost_storage(began_s, time.monotonic())

    @on("up")
    def read(self, rng: random.Random, planned: Planned, host: str) -> Iterator[str]:
        """Let a reader read shards on some host; this is no fault."""
        self.reading.begin_read(host, rng)
        yield from ()

    def ask_cli(self, rng: random.Random, planned: Planned) -> Iterator[str]:
        """Ask one verb of the command line, as a person does; this is no fault."""
        self.reading.begin_cli(rng)
        yield from ()


class FaultPlayer(FaultBase):
    """The play of the faults of one round, undone in `tick` and `heal`; only the round's thread calls it."""

    def play(self, planned: Planned) -> None:
        """Do one fault."""
        rng = random.Random(f"{self.scenario.seed} {planned.at_s} {planned.values.get('draw', 0)}")
        self.last_s = time.monotonic()
        fault: Iterator[str] = getattr(self, planned.kind)(rng, planned)
        text = next(fault, None)
        if text is not None:
            self.story.fault(planned.kind, f"{text}, for {planned.for_s:g} s")
            self.order += 1
            heapq.heappush(self.undo, (time.monotonic() + planned.for_s, self.order, fault))

    def tick(self) -> None:
        """Undo the faults whose time is over."""
        while self.undo and self.undo[0][0] <= time.monotonic():
            self._undo_first()

    def heal(self) -> None:
        """Undo all faults now."""
        while self.undo:
            self._undo_first()
        self.hosts.heal()

    def _undo_first(self) -> None:
        next(heapq.heappop(self.undo)[2], None)
        self.last_s = time.monotonic()

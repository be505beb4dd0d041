"""The faults of processes, clocks, links and storage. `PLAYED` has the method of each kind.

Each is a generator: it chooses a victim and does its damage, yields what it did as text, and after the fault's time
undoes it. If a method ends without a yield, because its victim or file has gone meanwhile, nothing has happened.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import math
import os
import random
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from memstore.errors import DrillError
from memstore.testing.faults.arena_files import (
    flip_in_slot,
    flip_somewhere,
    manifest_files,
    remove,
    sealed_slots,
    slot_records,
)
from memstore.testing.faults.catalogue import Fault, plays
from memstore.testing.faults.processes import freeze, process_of, send, thaw, wait_frozen
from memstore.testing.nemesis.hosts import Hosts
from memstore.testing.nemesis.ledger import Ledger, Story
from memstore.testing.nemesis.observers import NemesisReading
from memstore.testing.nemesis.ray_hosts import RayHosts
from memstore.testing.nemesis.schedule import NemesisScenario
from memstore.testing.nemesis.storage import NemesisStorage
from memstore.testing.ranks.rank_process import RankProcess

if TYPE_CHECKING:
    from memstore.testing.nemesis.job import NemesisJob


CATCH_UP_S = 5.0  # a rank that goes on after a stop may take so long to catch up
FDS_FULL = 3  # the table is full: the process gets EMFILE for the next descriptor
Play = Callable[[Any, random.Random, Fault], Iterator[str]]
PLAYED: dict[str, Play] = {}


def on(choose: str) -> Callable[[Callable[[Any, random.Random, Fault, str], Iterator[str]]], Play]:
    """Give a fault the host that the method `choose` returns; do nothing if that is none."""

    def decorate(play: Callable[[Any, random.Random, Fault, str], Iterator[str]]) -> Play:
        @functools.wraps(play)
        def chosen(self: Any, rng: random.Random, fault: Fault) -> Iterator[str]:
            host = getattr(self, choose)(fault)
            if host:
                yield from play(self, rng, fault, host)

        return chosen

    return decorate


class FaultBase:
    """The parts of a round that faults use, the choice of a victim, and the limit on memory that may go."""

    def __init__(
        self,
        scenario: NemesisScenario,
        hosts: Hosts,
        job: NemesisJob,
        ledger: Ledger,
        story: Story,
        reading: NemesisReading,
        storage: NemesisStorage,
    ) -> None:
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

    def up(self, fault: Fault) -> str:
        """Return the fault's host, or the next one whose holder runs; "" if there is none."""
        hosts = list(self.hosts)
        first = fault.hosts[0] % len(hosts)
        for host in [*hosts[first:], *hosts[:first]]:
            if host not in self.hosts.down and host not in self.hosts.stopped and self.hosts.holder(host) is not None:
                return host
        return ""

    def proxied(self, fault: Fault) -> str:
        """Return a host with good links that peers reach through a proxy."""
        host = self.up(fault)
        return host if host in self.hosts.cluster.proxies and host not in self.hosts.cut else ""

    def rank(self, fault: Fault) -> RankProcess | None:
        """Return the fault's rank; None if no rank lives."""
        ranks = list(self.job.ranks)
        return ranks[fault.rank % len(ranks)] if ranks else None

    def expendable(self, fault: Fault) -> str:
        """Return a host whose memory may go within the promise; "" if its loss would be one too many."""
        host = self.up(fault)
        if not host or host in self.hosts.undying:
            return ""
        with self.ledger.lock:
            newest = self.ledger.newest_commit()
            if newest is None:
                return ""
            since_s = self.ledger.commits[newest].safe_since_s
            open_rot = {h.domain for h in self.ledger.harms if h.kind.startswith("rot") and not h.is_repaired}
            floor_s = self.reading.observer.complete_s if since_s is None else since_s
            damaged = {
                h.domain for h in self.ledger.harms if h.at_s >= floor_s or (h.kind == "away" and h.until_s is None)
            }
        damaged |= open_rot | {self.hosts.domain[host]}
        return host if len(damaged) < self.scenario.replicas else ""

    def harmed(self, host: str, kind: str) -> None:
        """Note in the ledger that memory of a host is lost or rotten."""
        self.ledger.harmed(self.hosts.domain[host], kind, time.monotonic())


class ProcessFaults(FaultBase):
    """The faults of holders, controllers, ranks and whole hosts."""

    # -- holders --------------------------------------------------------------------------------

    @plays("kill-holder", PLAYED)
    @on("up")
    def kill_holder(self, rng: random.Random, fault: Fault, host: str) -> Iterator[str]:
        """Kill a holder; its successor comes later."""
        self.hosts.kill_holder(host)
        yield host
        self.start(host)

    @plays("freeze-holder", PLAYED)
    @on("up")
    def freeze_holder(self, rng: random.Random, fault: Fault, host: str) -> Iterator[str]:
        """Stop a holder for a while."""
        self.hosts.stop_holder(host)
        yield host
        self.hosts.continue_holder(host)

    @plays("replace-holder", PLAYED)
    @on("up")
    def replace_holder(self, rng: random.Random, fault: Fault, host: str) -> Iterator[str]:
        """Stop a holder and start its successor, which kills it; a holder that only begins has no lock yet."""
        if self.hosts.has_lock(host):
            self.hosts.stop_holder(host)
            yield host
            self.hosts.replace_holder(host)

    @plays("reboot-all", PLAYED)
    def reboot_all(self, rng: random.Random, fault: Fault) -> Iterator[str]:
        """Kill all holders and the controller, as when Ray's head is lost; most often the ranks too."""
        self.hosts.kill_everything()
        if rng.random() < 0.7:
            self.job.hold("everything was killed")
            self.held_for_restart = True
        order = rng.sample(list(self.hosts), len(list(self.hosts)))
        yield "all holders and the controller"
        self.hosts.start_everything(order)

    @plays("kill-raylet", PLAYED)
    @on("up")
    def kill_raylet(self, rng: random.Random, fault: Fault, host: str) -> Iterator[str]:
        """On Ray, kill a raylet and all processes below it; another one joins, with the host's memory."""
        if isinstance(self.hosts, RayHosts) and host not in self.hosts.undying:
            self.hosts.replace_raylet(host)
            yield host

    @plays("freeze-gcs", PLAYED)
    def freeze_gcs(self, rng: random.Random, fault: Fault) -> Iterator[str]:
        """On Ray, stop the GCS for a while."""
        if isinstance(self.hosts, RayHosts):
            self.hosts.signal_gcs(signal.SIGSTOP)
            yield "the GCS"
            self.hosts.signal_gcs(signal.SIGCONT)

    # -- controllers ----------------------------------------------------------------------------

    @plays("kill-controller", PLAYED)
    def kill_controller(self, rng: random.Random, fault: Fault) -> Iterator[str]:
        """Kill the controller; its successor comes later."""
        if not self.hosts.is_controller_down:
            self.hosts.kill_controller()
            yield "the controller"
            self._start_controller()

    def _start_controller(self) -> None:
        if self.hosts.is_controller_down:
            self.hosts.start_controller()

    @plays("freeze-controller", PLAYED)
    def freeze_controller(self, rng: random.Random, fault: Fault) -> Iterator[str]:
        """Stop the controller for a while."""
        if not self.hosts.is_controller_down:
            self.hosts.signal_controller(signal.SIGSTOP)
            yield "the controller"
            self.hosts.signal_controller(signal.SIGCONT)

    @plays("second-controller", PLAYED)
    def second_controller(self, rng: random.Random, fault: Fault) -> Iterator[str]:
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

    @plays("kill-rank", PLAYED)
    def kill_rank(self, rng: random.Random, fault: Fault) -> Iterator[str]:
        """Kill one rank; the launcher ends the others and starts all again."""
        rank = self.rank(fault)
        if rank is not None:
            with contextlib.suppress(OSError):
                rank.send_signal(signal.SIGKILL)
            yield f"rank {rank.rank}"

    @plays("freeze-rank", PLAYED)
    def freeze_rank(self, rng: random.Random, fault: Fault) -> Iterator[str]:
        """Stop one rank for a while."""
        rank = self.rank(fault)
        if rank is None:
            return
        pause_s = [time.monotonic(), math.inf]
        self.job.paused_s.append(pause_s)
        with contextlib.suppress(OSError):
            rank.send_signal(signal.SIGSTOP)
        yield f"rank {rank.rank}"
        pause_s[1] = time.monotonic() + CATCH_UP_S  # later than planned if a fault before it waited for Ray
        with contextlib.suppress(OSError):
            rank.send_signal(signal.SIGCONT)

    # -- hosts ----------------------------------------------------------------------------------

    @plays("kill-host", PLAYED)
    @on("expendable")
    def kill_host(self, rng: random.Random, fault: Fault, host: str) -> Iterator[str]:
        """Lose a machine with its memory and its ranks; a blank one of the same id joins later."""
        self.job.kill_ranks(host)
        self.hosts.kill_holder(host, is_lost=True)
        yield host
        self.start(host)

    @plays("lose-everything", PLAYED)
    def lose_everything(self, rng: random.Random, fault: Fault) -> Iterator[str]:
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

    @plays("step-clock", PLAYED)
    def step_clock(self, rng: random.Random, fault: Fault) -> Iterator[str]:
        """Kill a process, whose successor has another wall clock."""
        shift_s = rng.choice((-90_000.0, -3600.0, -30.0, 5.0, 3600.0, 200_000.0))
        if rng.random() < 0.3:
            self.hosts.clocks_s["controller"] = shift_s
            self.hosts.kill_controller()
            yield f"the controller is killed; the next has a clock {shift_s:+g} s"
            self._start_controller()
            return
        host = self.up(fault)
        if host:
            self.hosts.clocks_s[host] = shift_s
            self.hosts.kill_holder(host)
            yield f"holder {host} is killed; the next has a clock {shift_s:+g} s"
            self.start(host)

    @plays("fill-descriptors", PLAYED)
    def fill_descriptors(self, rng: random.Random, fault: Fault) -> Iterator[str]:
        """Fill the descriptor table of a holder or the controller for a while."""
        host, controller = self.up(fault), self.hosts.controller()
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

    @plays("speak-another-version", PLAYED)
    @on("up")
    def speak_another_version(self, rng: random.Random, fault: Fault, host: str) -> Iterator[str]:
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

    @plays("partition", PLAYED)
    @on("proxied")
    def partition(self, rng: random.Random, fault: Fault, host: str) -> Iterator[str]:
        """Lose or hold back what peers send to a host and what it answers, for a while."""
        proxy = self.hosts.cluster.proxies[host]
        yield from self._cut(rng, host, (proxy.up, proxy.down))

    @plays("one-way", PLAYED)
    @on("proxied")
    def one_way(self, rng: random.Random, fault: Fault, host: str) -> Iterator[str]:
        """Lose or hold back what peers send to a host, or what it answers, for a while."""
        proxy = self.hosts.cluster.proxies[host]
        yield from self._cut(rng, host, (rng.choice((proxy.up, proxy.down)),))

    def _cut(self, rng: random.Random, host: str, directions: tuple[Any, ...]) -> Iterator[str]:
        field = rng.choice(("drop", "stall"))
        self.hosts.cut.add(host)
        self.hosts.mark_away(host)
        for direction in directions:
            setattr(direction, field, True)
        yield f"{host}: {len(directions)} directions {field}"
        for direction in directions:
            setattr(direction, field, False)
        self.hosts.cut.discard(host)

    @plays("slow-link", PLAYED)
    @on("proxied")
    def slow_link(self, rng: random.Random, fault: Fault, host: str) -> Iterator[str]:
        """Make a host's link late and slow for a while."""
        direction = self.hosts.cluster.proxies[host].up
        direction.delay_s, direction.rate_bytes_per_s = rng.choice((0.0, 0.05, 0.3)), rng.choice((0.0, 2e5, 2e6))
        yield f"{host}: {direction.delay_s:g} s late, {direction.rate_bytes_per_s:g} B/s"
        direction.delay_s = direction.rate_bytes_per_s = 0.0

    @plays("reset-in-transit", PLAYED)
    @on("proxied")
    def reset_in_transit(self, rng: random.Random, fault: Fault, host: str) -> Iterator[str]:
        """Reset every connection of peers to a host."""
        self.hosts.cluster.proxies[host].reset_all()
        yield f"{host}: all reset"

    @plays("flip-in-transit", PLAYED)
    @on("proxied")
    def flip_in_transit(self, rng: random.Random, fault: Fault, host: str) -> Iterator[str]:
        """Flip a bit of the next large payload to a host."""
        up = self.hosts.cluster.proxies[host].up
        up.flip("payload", rng.randrange(4096), payload_min=4096, bit=rng.randrange(8))
        yield f"{host}: a bit flips"

    @plays("durable-broken", PLAYED)
    def durable_broken(self, rng: random.Random, fault: Fault) -> Iterator[str]:
        """Let durable storage fail, hang up or be away for a while."""
        what, undo = self.storage.damage(rng)
        began_s = time.monotonic()
        self.ledger.lost_storage(began_s)
        yield what
        undo()
        self.ledger.lost_storage(began_s, time.monotonic())

    @plays("read", PLAYED)
    @on("up")
    def read(self, rng: random.Random, fault: Fault, host: str) -> Iterator[str]:
        """Let a reader read shards on some host; this is no fault."""
        self.reading.begin_read(host, rng)
        yield from ()

    @plays("ask-cli", PLAYED)
    def ask_cli(self, rng: random.Random, fault: Fault) -> Iterator[str]:
        """Ask one verb of the command line, as a person does; this is no fault."""
        self.reading.begin_cli(rng)
        yield from ()


class FaultPlayer(FaultBase):
    """The play of the faults of one round, undone in `tick` and `heal`; only the round's thread calls it."""

    def play(self, fault: Fault) -> None:
        """Do one fault."""
        rng = random.Random(f"{self.scenario.seed} {fault}")
        self.last_s = time.monotonic()
        played = PLAYED[fault.kind](self, rng, fault)
        text = next(played, None)
        if text is not None:
            self.story.fault(fault.kind, f"{text}, for {fault.for_s:g} s")
            self.order += 1
            heapq.heappush(self.undo, (time.monotonic() + fault.for_s, self.order, played))

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


# -- faults files -------------------------------------------------------------------------------------
# Faults of files that are removed, cut short or rotten, under holders that are down or live; and the class of all.


LIVE_FILES = (("arena", "slots", "manifests", "journal"), ("manifests",), ("journal",), ("slots",), ("arena",), ("*",))
STOPPED_S = 2.0


class FileFaults(FaultBase):
    """The faults of files."""

    @plays("replace-arena", PLAYED)
    def replace_arena(self, rng: random.Random, fault: Fault) -> Iterator[str]:
        """Kill a holder under living ranks, remove a file of its folder or all of it, start a new one."""
        on_ranks = sorted({h for h in self.job.place if self.hosts.holder(h) is not None} - self.hosts.stopped.keys())
        wanted = on_ranks[fault.hosts[0] % len(on_ranks)] if on_ranks else ""
        host = self.expendable(replace(fault, hosts=(list(self.hosts).index(wanted),))) if wanted else ""
        if host:
            name = "*" if fault.count == 1 else rng.choice(("arena", "arena", "slots", "manifests", "journal"))
            self.hosts.kill_holder(host)
            self.harmed(host, "lost")
            remove(self.hosts.arena(host), (name,))
            yield f"{host}: holder killed, {'its folder' if name == '*' else name} removed, ranks live on"
            self.start(host)

    @plays("remove-files", PLAYED)
    @on("expendable")
    def remove_files(self, rng: random.Random, fault: Fault, host: str) -> Iterator[str]:
        """Remove files of a live holder's folder, as a cleaner of temporary files does."""
        names = rng.choice(LIVE_FILES)
        self.harmed(host, "lost")
        self.hosts.mark_away(host)
        remove(self.hosts.arena(host), names)
        yield f"{host}: {', '.join(names)}"

    @plays("truncate-files", PLAYED)
    @on("expendable")
    def truncate_files(self, rng: random.Random, fault: Fault, host: str) -> Iterator[str]:
        """Kill a holder, cut its journal or manifests short, start a new one; files that ranks have mapped stay."""
        what, folder = rng.choice(("journal", "manifests")), self.hosts.arena(host)
        self.hosts.kill_holder(host)
        self.harmed(host, "lost")
        for path in [folder / "journal"] if what == "journal" else manifest_files(folder):
            with contextlib.suppress(OSError):
                os.truncate(path, int(path.stat().st_size * rng.choice((0.0, 0.3, 0.9))))
        yield f"{host}: {what}"
        self.start(host)

    @plays("flip-at-rest", PLAYED)
    @on("expendable")
    def flip_at_rest(self, rng: random.Random, fault: Fault, host: str) -> Iterator[str]:
        """Change bytes of sealed slots, with the holder stopped meanwhile, so that no slot is used again by then."""
        folder, count = self.hosts.arena(host), 0
        with contextlib.suppress(OSError, ValueError, DrillError):
            process = self.hosts.holder(host) or process_of(0)
            freeze(process)
            try:
                wait_frozen(process, STOPPED_S)
                table = slot_records(folder)
                sealed = sealed_slots(table)
                for slot in rng.sample(sealed, min(len(sealed), rng.choice((1, 3, 20)))):
                    flip_in_slot(folder, slot, rng.randrange(int(table["nbytes"][slot])), rng.randrange(8))
                    count += 1
            finally:
                thaw(process)
        if count:
            self.harmed(host, "rot")
            yield f"{host}: {count} sealed slots"

    @plays("rot-manifest", PLAYED)
    @on("expendable")
    def rot_manifest(self, rng: random.Random, fault: Fault, host: str) -> Iterator[str]:
        """Change a byte of some manifests on one host."""
        count = sum(flip_somewhere(rng, path) for path in manifest_files(self.hosts.arena(host)))
        if count:
            self.harmed(host, "rot-file")
            yield f"{host}: {count} manifests"

    @plays("rot-journal", PLAYED)
    @on("expendable")
    def rot_journal(self, rng: random.Random, fault: Fault, host: str) -> Iterator[str]:
        """Change a byte of a journal."""
        if flip_somewhere(rng, self.hosts.arena(host) / "journal"):
            self.harmed(host, "rot-file")
            yield host


class Faults(ProcessFaults, FileFaults, LinkFaults, FaultPlayer):
    """All faults of a round."""

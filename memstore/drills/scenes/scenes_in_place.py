"""Faults of ranks that recover in place: the lost ones are replaced, the others stay in their processes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from memstore.drills.ranks.in_place import ENTERED, RESTORED, TRAINED, Note
from memstore.drills.scenes.scene import Scene
from memstore.drills.scenes.scenes_hosts import ZOMBIE_S, KillHost, KillTwoHosts, RayletScene
from memstore.drills.scenes.scenes_processes import ControllerScene
from memstore.errors import DrillError
from memstore.testing.faults.arena_files import check_silent, secret_of
from memstore.testing.faults.processes import Process, wait_frozen, wait_gone

if TYPE_CHECKING:
    from memstore.drills.sites.in_place_job import InPlaceJob

STEPS_COUNT = 24  # trained from the fault on, with a pause after each: longer than it takes to break something
STOP_S = 2.0  # no rank is lost by a pause of this length; the watchdog waits for 3 s


class InPlaceScene(Scene):
    """A fault while the ranks train; beyond: with the memory of every host with a copy of the victim's shard."""

    is_noticed = False  # what replaces ranks notices it, not the store
    fault_s = 0.0  # when it came
    is_pause = False  # it costs no rank

    def setup(self) -> None:
        super().setup()
        self.lost = set() if self.is_pause else {self.rank, *self.ranks_on(self.hosts)}

    @property
    def in_place(self) -> InPlaceJob:
        """Return the job, as what it is."""
        return cast("InPlaceJob", self.job)

    def ranks_on(self, hosts: list[str]) -> list[int]:
        """Return the ranks on some hosts."""
        return [number for number, rank in enumerate(self.job.ranks) if rank.host in hosts]

    def begin(self) -> None:
        """Let the ranks train to the end, and come back at a random moment."""
        self.in_place.go(STEPS_COUNT)
        time.sleep(self.rng.uniform(0.0, 0.3))
        report = self.context.report
        report.step_before = max(report.step_before or 0, self.job.committed_step())
        self.fault_s = time.monotonic()

    @property
    def victim_process(self) -> Process:
        """Return the victim's process before the fault."""
        return self.victim.pid, self.victim.start


class InPlaceKillRank(InPlaceScene):
    """SIGKILL to one rank."""

    name = "in-place-kill-rank"

    def inject(self) -> str:
        self.begin()
        victim = self.victim
        self.kill(victim.host, self.victim_process)
        return "; ".join([f"SIGKILL to rank {self.rank} (pid {victim.pid}) on {victim.host}", *self.lose_memories()])


class InPlaceFreezeRank(InPlaceScene):
    """SIGSTOP to one rank, until its watchdog kills it."""

    name = "in-place-freeze-rank"

    def inject(self) -> str:
        self.begin()
        host, (pid, _) = self.victim_host, self.victim_process
        self.freeze(host, self.victim_process)
        self.site.do(host, wait_frozen, self.victim_process)  # its watchdog may kill it from now on
        self.frozen = []
        return "; ".join([f"SIGSTOP to rank {self.rank} (pid {pid}, state T) on {host}", *self.lose_memories()])

    def wait_for_effect(self) -> str:
        """Wait until the watchdog has killed it."""
        self.killed.append((self.victim_host, self.victim_process))
        return super().wait_for_effect()


class InPlacePause(InPlaceScene):
    """SIGSTOP to one rank, and SIGCONT before its watchdog takes it for frozen."""

    name = "in-place-pause"
    is_pause = True

    def inject(self) -> str:
        self.begin()
        self.freeze(self.victim_host, self.victim_process)
        return f"SIGSTOP to rank {self.rank} (pid {self.victim.pid}) on {self.victim_host} for {STOP_S:g} s"

    def wait_for_effect(self) -> str:
        words = super().wait_for_effect()
        self.stopped_s = time.monotonic()
        return words

    def recover(self) -> None:
        time.sleep(max(0.0, self.fault_s + STOP_S - time.monotonic()))
        self.woken_s = time.monotonic()
        self.thaw()
        self.say("thawed", f"SIGCONT to rank {self.rank} after {self.woken_s - self.fault_s:.1f} s")

    def check(self) -> None:
        """Require that the rank did nothing meanwhile, or there was no pause."""
        trained = [n for n in self.in_place.notes() if n.what == TRAINED and n.rank == self.rank]
        if any(self.stopped_s < note.at_s < self.woken_s for note in trained):
            raise DrillError(f"rank {self.rank} trained while it was stopped: the fault did not take effect")


class InPlaceKillSpare(InPlaceKillRank):
    """SIGKILL to the spare, then to a rank, whose place a new process has to take."""

    name = "in-place-kill-spare"
    group_options: ClassVar[Mapping[str, Any]] = {"spares": 1}

    def setup(self) -> None:
        super().setup()
        self.spare = self.in_place.wait_spare()

    def victims(self) -> list[str]:
        return [f"the spare (pid {self.spare[0]})", *super().victims()]

    def inject(self) -> str:
        self.kill(self.victim_host, self.spare)
        self.wait_for_effect()
        return f"SIGKILL to the spare (pid {self.spare[0]}); {super().inject()}"

    def check(self) -> None:
        if self.spare[0] in {note.pid for note in self.in_place.notes()}:
            raise DrillError(f"pid {self.spare[0]} was a rank: it was no spare that was killed")


class DuringRecovery(InPlaceKillRank):
    """A second fault after the victim has its replacement, while the other ranks wait for that in get().

    Beyond, no rank is held: those on the hosts that lost their memory are replaced at the same time.
    """

    held: Path | None = None

    def setup(self) -> None:
        super().setup()
        if not self.is_beyond:
            self.held = self.in_place.gate.hold(self.rank, 1)

    def recover(self) -> None:
        note = self.in_place.wait_entered(self.rank)
        if not self.is_beyond:
            self.site.wait_for("the other ranks to wait in get()", lambda: self.job.newest().is_restoring)
        host = {node: host for host, node in self.site.nodes().items()}.get(note.node, self.victim_host)
        when = "during the recovery" if self.is_beyond else "while ranks wait in get()"
        self.say("inject", f"{when}: {self.strike(host, (note.pid, note.start))}")
        self.say("effect", self.wait_for_effect())
        self.release()

    def strike(self, host: str, replacement: Process) -> str:
        """Break something; return what was done, as text."""
        raise NotImplementedError

    def release(self) -> None:
        """Let the replacement get, too."""
        if self.held is not None:
            self.held.unlink(missing_ok=True)
            self.held = None

    def cleanup(self) -> None:
        self.release()
        super().cleanup()


class InPlaceKillReplacement(DuringRecovery):
    """SIGKILL to one rank, and to its replacement during the recovery."""

    name = "in-place-kill-replacement"

    def strike(self, host: str, replacement: Process) -> str:
        self.kill(host, replacement)
        return f"SIGKILL to the replacement of rank {self.rank} (pid {replacement[0]})"


class InPlaceKillController(DuringRecovery, ControllerScene):
    """SIGKILL to one rank, and to the controller during the recovery."""

    name = "in-place-kill-controller"
    struck = Scene.struck

    def victims(self) -> list[str]:
        return [*super().victims(), "the controller"]

    def strike(self, host: str, replacement: Process) -> str:
        return self.kill_controller()


class InPlaceKillHost(InPlaceScene, KillHost):
    """The loss of one rank's host; beyond: of every host with a copy of that rank's shard."""

    name = "in-place-kill-host"

    def inject(self) -> str:
        self.begin()
        return super().inject()


class InPlaceKillTwoHosts(InPlaceKillHost, KillTwoHosts):
    """The loss of two of the three hosts with a copy of a shard at once."""

    name = "in-place-kill-two-hosts"


class InPlaceZombies(InPlaceScene, RayletScene):
    """A host that counts as lost while its processes live; once others train in the place of its ranks, it is back."""

    def setup(self) -> None:
        super().setup()
        self.lost = {self.rank, *self.ranks_on([self.victim_host, *self.hosts])}

    def strike(self, processes: list[Process]) -> str:
        """Break what makes the host count as lost; `processes` are those of the host. Return what was done, as text."""
        raise NotImplementedError

    def wake(self) -> str:
        """Undo what `strike` did; return how, as text."""
        raise NotImplementedError

    def inject(self) -> str:
        processes = self.look()
        self.zombies = [(r.pid, r.start) for r in self.job.ranks if r.host == self.victim_host]
        if not set(self.zombies) <= set(processes):
            raise DrillError(f"ranks {self.zombies} are not below the raylet of {self.victim_host}")
        self.begin()
        self.site.unreachable_hosts.add(self.victim_host)
        return "; ".join([self.strike(processes), *self.lose_memories()])

    def recover(self) -> None:
        """Let the zombies go on while the others train."""
        self.in_place.wait_entered(self.rank)
        if not self.is_beyond:
            self.site.wait_for("training without them", lambda: any(n.generation for n in self._notes(TRAINED)))
        self.woken_s = time.monotonic()
        self.say("woken", self.wake())

    def wait_for_recovery(self) -> None:
        wait_gone([self.raylet, self.process], ZOMBIE_S)
        self.say("fenced", f"raylet and holder of {self.victim_host} have ended by themselves (checked)")
        self.replace()  # Ray's workers outlive their raylet, and so do the ranks in them

    def check(self) -> None:
        """Require that the zombies did no more than to end the step that they were in."""
        pids = {pid for pid, _ in self.zombies}
        for what, most in ((ENTERED, 0), (RESTORED, 0), (TRAINED, 1)):
            found = [n for n in self._notes(what) if n.pid in pids and n.at_s > self.woken_s]
            if len(found) > most * len(pids):
                self.broken(f"zombies have {what} {len(found)} times after they woke")

    def _notes(self, what: str) -> list[Note]:
        return [note for note in self.in_place.notes() if note.what == what]


class InPlaceFreezeHost(InPlaceZombies):
    """SIGSTOP to every process of a host."""

    name = "in-place-freeze-host"
    struck = "every process of {0.victim_host}"

    def strike(self, processes: list[Process]) -> str:
        for process in processes:
            self.freeze(self.victim_host, process)
            wait_frozen(process)
        return f"SIGSTOP to all {len(processes)} processes of {self.victim_host}, {len(self.zombies)} ranks among them"

    def wait_for_effect(self) -> str:
        lost = f"; {', '.join(self.hosts)}: arena file gone (each checked)" if self.hosts else ""
        return f"{len(self.frozen)} processes stopped (state T, each checked){lost}"

    def wake(self) -> str:
        """Let all go on once Ray has given the host up: a raylet that wakes before that lives on, with its holder."""
        self.own_site.wait_given_up(self.node)
        count = len(self.frozen)
        self.thaw()
        return f"SIGCONT to {count} processes of {self.victim_host}"


class InPlaceCutLink(InPlaceZombies):
    """A cut of a host's link in both directions, with no connection reset."""

    name = "in-place-cut-link"
    struck = "the link of {0.victim_host}"
    is_cut = False

    def strike(self, processes: list[Process]) -> str:
        self.record = self.site.record(self.victim_host)
        self.secret = self.site.do(self.victim_host, secret_of, self.site.folder(self.victim_host))
        self.own_site.links.cut(self.victim_host)
        self.is_cut = True
        return f"the link of {self.victim_host} cut; {len(processes)} processes live on, {len(self.zombies)} ranks"

    def wait_for_effect(self) -> str:
        self.site.do(self.victim_host, check_silent, self.victim_host, self.record, self.site.config, self.secret)
        lost = f"; {', '.join(self.hosts)}: arena file gone (each checked)" if self.hosts else ""
        return f"the holder of {self.victim_host} cannot be reached (checked){lost}"

    def wake(self) -> str:
        """Let the link come back once Ray has given the host up: a short cut would cost no rank."""
        self.own_site.wait_given_up(self.node)
        self.heal()
        return f"the link of {self.victim_host} is back"

    def heal(self) -> None:
        """Let the link come back; a second call does nothing."""
        if self.is_cut:
            self.own_site.links.heal(self.victim_host)
            self.site.unreachable_hosts.discard(self.victim_host)
            self.is_cut = False

    def cleanup(self) -> None:
        self.heal()
        super().cleanup()

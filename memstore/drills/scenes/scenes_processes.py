"""Faults of processes: ranks, the controller, and holders, which own the arenas."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from memstore.core.wire.replies import Status
from memstore.drills.scenes.scene import Scene, host_row
from memstore.errors import DrillError
from memstore.testing.faults.arena_files import check_silent, secret_of
from memstore.testing.faults.processes import Process, freeze_in_persist, freeze_in_put, remove_mark

# -- ranks --------------------------------------------------------------------------------------------
# Faults of ranks, the training processes.


class KillRank(Scene):
    """SIGKILL to one rank in the middle of its puts."""

    name = "kill-rank"

    def begin(self, **marks: Any) -> Process:
        """Let the ranks put without a pause; return the victim at a random moment, between two puts or inside one."""
        self.begin_puts(pause_s=0.0, **marks)
        time.sleep(self.rng.uniform(0.0, 0.3))
        return self.victim.pid, self.victim.start

    def inject(self) -> str:
        victim = self.victim
        self.kill(victim.host, (victim.pid, victim.start) if self.is_beyond else self.begin())
        return "; ".join([f"SIGKILL to rank {self.rank} (pid {victim.pid}) on {victim.host}", *self.lose_memories()])

    def detected(self, status: Status, injected_s: float) -> str | None:
        count, newest = len(self.job.ranks), self.newest_attempt(status)
        if newest is None or newest.ranks_alive >= count or super().detected(status, injected_s) is None:
            return None
        return f"{newest.ranks_alive} of {count} ranks alive"

    def dying(self) -> list[str]:
        return self.hosts


class KillRankMidPut(KillRank):
    """SIGKILL to one rank inside a put, which is checked while the rank is stopped."""

    name = "kill-rank-mid-put"
    puts_count = 400  # enough until the rank is caught inside one; the flow ends the other ranks' puts

    def setup(self) -> None:
        super().setup()
        self.mark = f"{tempfile.gettempdir()}/{self.job.name}-put"

    def inject(self) -> str:
        host, process = self.victim_host, self.begin(marks={self.rank: self.mark})
        step = self.site.do(host, freeze_in_put, process, self.mark)
        self.kill(host, process)
        return (
            f"SIGKILL to rank {self.rank} (pid {process[0]}) on {host} inside its put of step {step} (checked while it "
            "was stopped)"
        )

    def cleanup(self) -> None:
        if self.holders:
            self.site.do(self.victim_host, remove_mark, self.mark)


class HangRank(KillRank):
    """A stop of one rank in the middle of its puts, until the launcher gives it up and kills it."""

    name = "hang-rank"
    is_noticed = False  # to find a hanging process is the task of the launcher's watchdog

    def inject(self) -> str:
        self.freeze(self.victim_host, self.begin())
        return f"SIGSTOP to rank {self.rank} (pid {self.victim.pid}) on {self.victim_host}"

    def recover(self) -> None:
        """Kill the hanging rank, as a launcher's watchdog does; the flow kills the rest of the attempt."""
        [(host, process)] = self.frozen
        self.kill(host, process)
        self.frozen = []
        words = self.wait_for_effect()
        self.say("launcher", f"gave rank {self.rank} up, SIGKILL: {words}")


# -- control ------------------------------------------------------------------------------------------
# Faults of the controller.


class ControllerScene(Scene):
    """A death of the controller of a term."""

    struck = "the controller"

    def setup(self) -> None:
        super().setup()
        self.term = self.site.status().term
        self.at, self.process = self.site.controller_process()

    def kill_controller(self) -> str:
        """Kill it; return what was done, as text."""
        self.kill(self.at, self.process)
        return f"SIGKILL to the controller (pid {self.process[0]}, term {self.term})"

    def detected(self, status: Status, injected_s: float) -> str | None:
        return f"a controller of term {status.term} took over" if status.term > self.term else None

    def check(self) -> None:
        term = self.site.status().term
        if term <= self.term:
            raise DrillError(f"the controller is still of term {term}: no other took over, so nothing was proved")


class KillController(ControllerScene):
    """SIGKILL to the controller, while all ranks put."""

    name = "kill-controller"

    def inject(self) -> str:
        self.puts = [] if self.is_beyond else self.begin_puts()
        return "; ".join([self.kill_controller(), *self.lose_memories()])

    def recover(self) -> None:
        if self.puts:
            self.end_puts(self.puts)
            self.commit_again()


class KillControllerPersist(ControllerScene):
    """SIGKILL to the controller while a durable step is half written, which is checked while it is stopped."""

    name = "kill-controller-persist"
    job_fields: ClassVar[Mapping[str, Any]] = {"durable_every": 1}
    puts_count = 24

    def inject(self) -> str:
        self.durable_before = self.job.newest().durable_step or 0
        folder = str(Path(str(self.context.config.durable)) / self.job.name)
        step = self.site.do(self.at, freeze_in_persist, self.process, folder)
        return f"{self.kill_controller()} while step {step} had parts and no marker (checked while it was stopped)"

    def wait_for_recovery(self) -> None:
        """Wait: the next controller finishes the half-written step or gives it up, and persists a newer one."""
        self.wait_durable(self.durable_before, "a durable step after the controller died")


class KillControllerRestore(ControllerScene, KillRank):
    """SIGKILL to a rank, and to the controller in the middle of the restore that follows."""

    name = "kill-controller-restore"
    struck = "rank {0.rank} on {0.victim_host}, and the controller during the restore"

    def detected(self, status: Status, injected_s: float) -> str | None:
        return KillRank.detected(self, status, injected_s)

    def meanwhile(self) -> None:
        """Kill the controller while ranks wait in get()."""
        self.killed = []
        words = self.kill_controller()
        self.say("inject", f"{words} while ranks wait in get(); {self.wait_for_effect()}")

    def check(self) -> None:
        super().check()
        self.say("took over", f"a controller of term {self.site.status().term}")


# -- holders ------------------------------------------------------------------------------------------
# Faults of holders, the processes that own the arenas.


FLAPS = 3  # so many deaths within ten minutes put a host on probation (R29)


class KillHolder(Scene):
    """SIGKILL to the holder of one rank's host, while all ranks put; the arena stays for its successor."""

    name = "kill-holder"
    struck = "the holder of {0.victim_host}"

    def inject(self) -> str:
        if self.is_beyond:
            return "; ".join(self.lose_memories())
        self.record, self.puts, self.kept = (
            self.site.record(self.victim_host),
            self.begin_puts(),
            self.arena(self.victim_host),
        )
        return self.kill_holder()

    def kill_holder(self) -> str:
        """Kill the holder; return what was done, as text."""
        self.process = self.holder(self.victim_host)
        self.kill(self.victim_host, self.process)
        return f"SIGKILL to the holder of {self.victim_host} (pid {self.process[0]}); its arena stays"

    def wait_for_effect(self) -> str:
        words = super().wait_for_effect()
        if self.is_beyond:
            return words
        secret = self.site.do(self.victim_host, secret_of, self.site.folder(self.victim_host))
        self.site.do(self.victim_host, check_silent, self.victim_host, self.record, self.site.config, secret)
        return f"{words}, its port does not answer (checked)"

    def recover(self) -> None:
        if not self.is_beyond:
            self.wait_replaced({self.victim_host: self.process})
            words = (
                f"holder pid {self.site.record(self.victim_host)['pid']} took over the arena of pid {self.process[0]}"
            )
            self.check_adopted(self.victim_host, self.kept, words)
            self.end_puts(self.puts)
            self.commit_again()


class FlapHost(KillHolder):
    """Three deaths of one host's holder, which comes back each time, while all ranks put."""

    name = "flap-host"
    puts_count = 60

    def inject(self) -> str:
        self.killed = []
        return self.kill_holder()

    def wait_for_effect(self) -> str:
        return Scene.wait_for_effect(self)

    def recover(self) -> None:
        for count in range(FLAPS):
            if count:
                what, _ = self.inject(), self.wait_for_effect()
                self.site.wait_for(
                    f"{self.victim_host} to be seen dead", lambda: self.victim_host not in self.site.live_hosts()
                )
                self.say("flap", what)
            self.wait_replaced({self.victim_host: self.process})
        if self.victim_host not in self.site.on_probation():
            self.broken(f"{self.victim_host} died {FLAPS} times and is not on probation (R29)")
        self.say("probation", f"{self.victim_host} is back and is the last to hold an only second copy")


class FreezeHolder(Scene):
    """A stop of the holder of one rank's host, while all ranks put; it goes on before it counts as dead."""

    name = "freeze-holder"
    struck = "the holder of {0.victim_host}"
    puts_count = 20

    def inject(self) -> str:
        process = self.holder(self.victim_host)
        self.site.unreachable_hosts.add(self.victim_host)
        self.freeze(self.victim_host, process)
        return f"SIGSTOP to the holder of {self.victim_host} (pid {process[0]})"

    def detected(self, status: Status, injected_s: float) -> str | None:
        row = host_row(self.victim_host, status)
        return f"{self.victim_host} is {row.status}: {row.why}" if row is not None and row.status != "live" else None

    def recover(self) -> None:
        self.thaw()
        self.say("thawed", f"SIGCONT to the holder of {self.victim_host}")

    def wait_for_recovery(self) -> None:
        self.site.wait_hosts_live([self.victim_host])

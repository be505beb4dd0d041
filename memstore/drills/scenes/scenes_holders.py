"""Faults of holders, the processes that own the arenas."""

from __future__ import annotations

from memstore.core.wire.replies import Status
from memstore.drills.scenes.scene import Scene, host_row
from memstore.testing.faults.arena_files import check_silent, secret_of

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

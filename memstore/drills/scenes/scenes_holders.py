"""Faults of holders, the processes that own the arenas."""

from __future__ import annotations

from typing import Any

from memstore.drills.breaking import faults
from memstore.drills.scenes.scene import Scene
from memstore.errors import DrillError


class KillHolder(Scene):
    """SIGKILL to the holder of one rank's host, while all ranks put; the arena stays for its successor."""

    name = "kill-holder"
    process: faults.Process | None = None

    def victims(self) -> list[str]:
        return [f"the holder of {self.holders[0]}", *self.hosts[1:]]

    def inject(self) -> str:
        host = self.holders[0]
        folder = self.site.folder(host)
        self.record, self.puts = self.site.record(host), [] if self.is_beyond else self.begin_puts()
        if self.is_beyond:
            return "; ".join(self.lose_memories())
        self.arena = self.site.do(host, "arena_identity", folder)
        self.process = self.site.do(host, "holder_process", folder)
        self.site.do(host, "kill", [self.process])
        return f"SIGKILL to the holder of {host} (pid {self.process[0]}); its arena stays"

    def wait_for_effect(self) -> str:
        if self.process is None:
            return "; ".join(["the holder is gone with its memory", *self.memories_gone()])
        host = self.holders[0]
        self.site.do(host, "wait_gone", [self.process])
        secret = self.site.do(host, "secret_of", self.site.folder(host))
        self.site.do(host, "check_silent", self.record, self.site.config, secret)
        return f"pid {self.process[0]} is gone, its port does not answer (checked)"

    def detected(self, body: dict[str, Any], injected_s: float) -> str | None:
        return self.host_noticed(self.holders[0], body, injected_s)

    def recover(self) -> None:
        if self.process is None:
            return
        host, old_pid = self.holders[0], self.process[0]
        new_pid = self.site.wait_for(f"a new holder on {host}", lambda: self._new_pid(host, old_pid))
        if self.site.do(host, "arena_identity", self.site.folder(host)) != self.arena:
            self.context.broken_promises.append(
                f"the new holder of {host} made a new arena instead of adopting the old one"
            )
        self.context.timeline.line("adopted", f"holder pid {new_pid} took over the arena of pid {old_pid}")
        self.end_puts(self.puts)
        self.commit_again()

    def _new_pid(self, host: str, old_pid: int) -> int | None:
        pid = int(self.site.record(host)["pid"])
        return pid if pid != old_pid and host in self.site.live_hosts() else None


class FreezeHolder(Scene):
    """A stop of the holder of one rank's host, while all ranks put; it goes on before it counts as dead."""

    name = "freeze-holder"
    puts_count = 20
    process: faults.Process | None = None

    def victims(self) -> list[str]:
        return [f"the holder of {self.holders[0]}"]

    def inject(self) -> str:
        host = self.holders[0]
        self.process = self.site.do(host, "holder_process", self.site.folder(host))
        self.site.unreachable_hosts.add(host)
        self.site.do(host, "freeze", self.process)
        return f"SIGSTOP to the holder of {host} (pid {self.process[0]})"

    def wait_for_effect(self) -> str:
        if self.process is None:
            raise DrillError("nothing was frozen")
        self.site.do(self.holders[0], "wait_frozen", self.process)
        return f"pid {self.process[0]} is stopped (state T, checked)"

    def detected(self, body: dict[str, Any], injected_s: float) -> str | None:
        row = next((r for r in body["hosts"] if r["host"] == self.holders[0]), None)
        if row is None or row["status"] == "live":
            return None
        return f"{row['host']} is {row['status']}: {row['why']}"

    def recover(self) -> None:
        self.cleanup()
        self.context.timeline.line("thawed", f"SIGCONT to the holder of {self.holders[0]}")

    def wait_for_recovery(self) -> None:
        self.site.wait_hosts_live(self.holders[:1])

    def cleanup(self) -> None:
        if self.process is not None:
            self.site.do(self.holders[0], "thaw", self.process)
            self.site.unreachable_hosts.discard(self.holders[0])


SCENES = {scene.name: scene for scene in (KillHolder, FreezeHolder)}

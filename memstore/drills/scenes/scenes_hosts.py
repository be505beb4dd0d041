"""Faults of whole hosts: one, a rack, or one after the other."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, ClassVar

from memstore.core.wire.calls import DrainHost
from memstore.drills.breaking import faults
from memstore.drills.ranks.ranks import Restored
from memstore.drills.scenes.scene import Scene
from memstore.errors import DrillError

NOTICE_S = 30.0  # clouds give spot instances 30 to 120 s
ZOMBIE_S = 60.0  # limit until a raylet that Ray has declared dead learns that, and ends
FLAPS = 3  # so many deaths within ten minutes put a host on probation (R29)


class KillHost(Scene):
    """The loss of one rank's host; beyond: of every host with a copy of that rank's shard."""

    name = "kill-host"

    def setup(self) -> None:
        super().setup()
        self.hosts = self.hosts or self.holders[:1]

    def victims(self) -> list[str]:
        return self.hosts

    def leaves(self, host: str) -> bool:
        return True  # on a running cluster it comes back empty; but a real launcher would not wait for a lost machine

    def may_hit(self, holders: list[str]) -> bool:
        return self.site.may_lose(holders if self.is_beyond else holders[:1])

    def inject(self) -> str:
        return "; ".join([self.site.lose_host(host, self.context.job.ranks) for host in self.hosts])

    def wait_for_effect(self) -> str:
        # lose_host() has checked each of these.
        return f"{', '.join(self.hosts)}: processes gone, port silent, arena file gone (each checked)"

    def detected(self, body: dict[str, Any], injected_s: float) -> str | None:
        found = [self.host_noticed(host, body, injected_s) for host in self.hosts]
        return "; ".join(str(why) for why in found) if all(found) else None


class PreemptHost(KillHost):
    """The loss of a host after a notice; steps are put until the store needs the host no more."""

    name = "preempt-host"
    copies_left = -1  # copies of each shard when the death was noticed, before any repair

    def inject(self) -> str:
        [host], job, report = self.hosts, self.context.job, self.context.report
        started_s = time.monotonic()
        self.site.ask(DrainHost(host=host, within_s=NOTICE_S))
        step = int(report.step_before or 0)
        job.train(step + 1, step + 2, "after the notice")
        report.step_before = step + 2
        self.site.wait_for(f"the store to do without {host}", self._is_evacuated, NOTICE_S)
        took_s = time.monotonic() - started_s
        self.context.timeline.line("evacuated", f"{host}, of {NOTICE_S:g} s notice", f"{took_s:.1f} s")
        return super().inject()

    def _is_evacuated(self) -> bool:
        row = next(row for row in self.site.status()["hosts"] if row["host"] == self.hosts[0])
        return row["drains_s"] is not None and not row["drain_left"]

    def detected(self, body: dict[str, Any], injected_s: float) -> str | None:
        why = super().detected(body, injected_s)
        if why is not None:
            self.copies_left = next(row["copies"] for row in body["jobs"] if row["job"] == self.context.job.name)
        return why

    def check(self) -> None:
        wanted = self.context.config.replicas
        if self.copies_left < wanted:
            self.context.broken_promises.append(
                f"{self.copies_left} of {wanted} copies were left when {self.hosts[0]} was gone: it was not evacuated"
            )


class KillRack(KillHost):
    """The loss of every host of a rack; beyond: also of every other host with a copy of the victim's shard."""

    name = "kill-rack"

    def setup(self) -> None:
        super().setup()
        self.hosts = self._fallen(self.holders)

    def may_hit(self, holders: list[str]) -> bool:
        return self.site.may_lose(self._fallen(holders))

    def _fallen(self, holders: list[str]) -> list[str]:
        rack = next((hosts for hosts in self.site.racks().values() if holders[0] in hosts), holders[:1])
        return [*rack, *(h for h in holders if self.is_beyond and h not in rack)]


class KillRackStaggered(KillRack):
    """The loss of a rack host by host: each dies while copies that the one before held are still missing."""

    name = "kill-rack-staggered"

    def inject(self) -> str:
        first, *others = self.hosts
        done = [self.site.lose_host(first, self.context.job.ranks)]
        for host in others:
            missing = self.site.wait_for("the store to count copies as missing", self._missing)
            done.append(f"with {missing} copies missing: {self.site.lose_host(host, self.context.job.ranks)}")
        return "; ".join(done)

    def _missing(self) -> int:
        return int(self.context.job.status()["missing_copies"])


class SecondFailure(KillHost):
    """The loss of two hosts with a copy of the same shard, the second while the next attempt waits in get()."""

    name = "second-failure"
    job_fields: ClassVar[Mapping[str, Any]] = {"replicas": 3}

    def setup(self) -> None:
        super().setup()
        self.hosts = self._fallen(self.holders)
        self.second: str | None = self.hosts[1]

    def may_hit(self, holders: list[str]) -> bool:
        return len(holders) == 3 and self.site.may_lose(self._fallen(holders))

    def _fallen(self, holders: list[str]) -> list[str]:
        """Return the rank's own host and a target that may be lost; beyond: every host with a copy."""
        if self.is_beyond:
            return holders
        return [holders[0], next((h for h in holders[1:] if self.site.may_lose([h])), holders[1])]

    def victims(self) -> list[str]:
        return [self.hosts[0], *(f"{host} during the restore" for host in self.hosts[1:])]

    def inject(self) -> str:
        return self.site.lose_host(self.hosts[0], self.context.job.ranks)

    def wait_for_effect(self) -> str:
        return f"{self.hosts[0]}: processes gone, port silent, arena file gone (each checked)"

    def detected(self, body: dict[str, Any], injected_s: float) -> str | None:
        return self.host_noticed(self.hosts[0], body, injected_s)

    def restore(self) -> list[Restored]:
        return self.context.job.restore(is_altered=self.context.options.is_altered, meanwhile=self._lose_more)

    def _lose_more(self) -> None:
        for host in self.hosts[1:]:
            # lose_host() checks that the host is gone.
            self.context.timeline.line("inject", f"while ranks wait in get(): {self.site.lose_host(host, [])}")


class KillRaylet(Scene):
    """SIGKILL to the raylet of one rank's host. Its processes die too, its memory stays, and Ray is started again."""

    name = "kill-raylet"
    is_back = True

    def victims(self) -> list[str]:
        return [f"the raylet of {self.holders[0]}"]

    def may_hit(self, holders: list[str]) -> bool:
        return self.site.may_lose(holders[:1])

    def inject(self) -> str:
        host, site = self.holders[0], self.own_site()
        self.arena = self.site.do(host, "arena_identity", self.site.folder(host))
        self.raylet, self.below = site.cluster.raylet(host), site.cluster.node_processes(host)
        self.holder = self.site.do(host, "holder_process", self.site.folder(host))
        if self.holder not in self.below:
            raise DrillError(f"the holder of {host} is not below its raylet: killing that would not end it")
        self.is_back = False
        self.site.do(host, "kill", [self.raylet])
        return f"SIGKILL to the raylet of {host} (pid {self.raylet[0]}), which had started {len(self.below) - 1} others"

    def wait_for_effect(self) -> str:
        self.site.do(self.holders[0], "wait_gone", [self.raylet, self.holder])
        return f"pid {self.raylet[0]} is gone, and the holder (pid {self.holder[0]}) ended with it (checked)"

    def detected(self, body: dict[str, Any], injected_s: float) -> str | None:
        return self.host_noticed(self.holders[0], body, injected_s)

    def recover(self) -> None:
        host = self.holders[0]
        self.own_site().replace_raylet(host, self.below)
        self.is_back = True
        if self.site.do(host, "arena_identity", self.site.folder(host)) != self.arena:
            self.context.broken_promises.append(
                f"the new holder of {host} made a new arena instead of adopting the old one"
            )
        self.context.timeline.line("adopted", f"a new raylet on {host}, whose holder took over the arena")
        self.context.job.restand(host)

    def cleanup(self) -> None:
        if not self.is_back:
            self.own_site().replace_raylet(self.holders[0], self.below)


class FreezeRaylet(KillHost):
    """A zombie: all processes of a host are stopped until it counts as dead and training has gone on without it."""

    name = "freeze-raylet"
    is_back = True

    def may_hit(self, holders: list[str]) -> bool:
        return self.site.may_lose(holders[:1])

    def inject(self) -> str:
        [host] = self.hosts
        site = self.own_site()
        self.node = site.nodes()[host]
        self.raylet, self.frozen = site.cluster.raylet(host), site.cluster.node_processes(host)
        self.holder = self.site.do(host, "holder_process", self.site.folder(host))
        self.begin_puts()
        site.unreachable_hosts.add(host)
        site.pool.forget(host)
        self.is_back = False
        for process in self.frozen:
            faults.freeze(process)
        return f"SIGSTOP to all {len(self.frozen)} processes of {host}, raylet, holder and rank among them"

    def wait_for_effect(self) -> str:
        for process in self.frozen:
            faults.wait_frozen(process)
        return f"{len(self.frozen)} processes are stopped (state T, each checked)"

    def detected(self, body: dict[str, Any], injected_s: float) -> str | None:
        row = next((r for r in body["hosts"] if r["host"] == self.hosts[0]), None)
        return f"{row['host']} is dead: {row['why']}" if row is not None and row["status"] == "dead" else None

    def recover(self) -> None:
        self.own_site().wait_given_up(self.node)
        self.context.timeline.line("given up", f"Ray calls the node of {self.hosts[0]} dead")

    def wait_for_recovery(self) -> None:
        """Let the zombie go on; wait until it has ended, its successor has its place, and a new step is committed."""
        [host] = self.hosts
        self._thaw()
        self.context.timeline.line("thawed", f"SIGCONT to {len(self.frozen)} processes of {host}")
        faults.wait_gone([self.raylet], ZOMBIE_S)
        faults.wait_gone([self.holder], ZOMBIE_S)
        self.context.timeline.line("fenced", f"raylet and holder of {host} have ended by themselves (checked)")
        self.own_site().replace_raylet(host, self.frozen)
        self.is_back = True
        step = self.context.job.committed_step() + 1
        self.context.job.put(step, step, "put after the zombie")
        self.context.job.wait("committed", "commit after the zombie")
        self.context.job.wait_redundant()
        self.context.timeline.line("converged", f"{host} is back with its memory, step {step} committed")

    def check(self) -> None:
        """Require that every rank can read the newest step: its own shard, and another's."""
        step = self.context.job.committed_step()
        for found in (*self.context.job.read(step, 0), *self.context.job.read(step, 1)):
            if found.error or found.differences or found.bytes_equal != found.nbytes:
                self.context.broken_promises.append(
                    f"after the zombie, reading step {step} of rank {found.rank}: {found.message or found.differences}"
                )

    def cleanup(self) -> None:
        if not self.is_back:
            self._thaw()
            self.own_site().replace_raylet(self.hosts[0], self.frozen)

    def _thaw(self) -> None:
        for process in self.frozen:
            faults.thaw(process)
        self.site.unreachable_hosts.discard(self.hosts[0])


class FlapHost(Scene):
    """Three deaths of one host's holder, which comes back each time, while all ranks put."""

    name = "flap-host"
    puts_count = 60

    def victims(self) -> list[str]:
        return [self.holders[0]]

    def inject(self) -> str:
        host = self.holders[0]
        self.process = self.site.do(host, "holder_process", self.site.folder(host))
        self.site.do(host, "kill", [self.process])
        return f"SIGKILL to the holder of {host} (pid {self.process[0]})"

    def wait_for_effect(self) -> str:
        self.site.do(self.holders[0], "wait_gone", [self.process])
        return f"pid {self.process[0]} is gone (checked)"

    def detected(self, body: dict[str, Any], injected_s: float) -> str | None:
        return self.host_noticed(self.holders[0], body, injected_s)

    def recover(self) -> None:
        host = self.holders[0]
        self._wait_back()
        for _ in range(FLAPS - 1):
            what, _ = self.inject(), self.wait_for_effect()
            self.site.wait_for(f"{host} to be seen dead", lambda: host not in self.site.live_hosts())
            self.context.timeline.line("flap", what)
            self._wait_back()
        row = next(row for row in self.site.status()["hosts"] if row["host"] == host)
        if not row["is_on_probation"]:
            self.context.broken_promises.append(f"{host} died {FLAPS} times and is not on probation (R29)")
        self.context.timeline.line("probation", f"{host} is back and is the last to hold an only second copy")

    def _wait_back(self) -> None:
        host, old_pid = self.holders[0], self.process[0]

        def look() -> bool:
            return int(self.site.record(host)["pid"]) != old_pid and host in self.site.live_hosts()

        self.site.wait_for(f"{host} to be back", look)


SCENES = {
    scene.name: scene
    for scene in (KillHost, PreemptHost, KillRack, KillRackStaggered, SecondFailure, KillRaylet, FreezeRaylet, FlapHost)
}

"""Faults of whole hosts: one, a rack, or one after the other."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, ClassVar

from memstore.core.wire.calls import DrainHost
from memstore.core.wire.replies import Status
from memstore.drills.scenes.scene import Scene, host_row
from memstore.errors import DrillError
from memstore.shell.on_ray.reach import is_there
from memstore.testing.faults.arena_files import arena_identity
from memstore.testing.faults.processes import Process, wait_gone
from memstore.testing.ranks.rank import Restored
from placement.parity_sets import DATA_MIN

NOTICE_S = 30.0  # clouds give spot instances 30 to 120 s
SET_MAX = 16  # shards in a row, so that the ranks of all hosts that a drill may have are one parity set
ZOMBIE_S = 60.0  # limit until a raylet that Ray has declared dead learns that, and ends


class KillHost(Scene):
    """The loss of one rank's host; beyond: of every host with a copy of that rank's shard."""

    name = "kill-host"

    def setup(self) -> None:
        super().setup()
        self.hosts = self.lost_hosts(self.holders)

    def lost_hosts(self, holders: list[str]) -> list[str]:
        """Return the hosts that are lost if the victim's shard is on these."""
        return holders if self.is_beyond else holders[:1]

    def victims(self) -> list[str]:
        return self.hosts

    def leaves(self, host: str) -> bool:
        return True  # on a running cluster it comes back empty; but a real launcher would not wait for a lost machine

    def may_hit(self, holders: list[str]) -> bool:
        return self.site.may_lose(self.lost_hosts(holders))

    def inject(self) -> str:
        return "; ".join([self.site.lose_host(host, self.job.ranks) for host in self.hosts])


class PreemptHost(KillHost):
    """The loss of a host after a notice; steps are put until the store needs the host no more."""

    name = "preempt-host"
    copies_left = -1  # copies of each shard when the death was noticed, before any repair

    def inject(self) -> str:
        [host], report = self.hosts, self.context.report
        started_s = time.monotonic()
        self.site.ask(DrainHost(host=host, within_s=NOTICE_S))
        step = int(report.step_before or 0)
        self.job.train(step + 1, step + 2, "after the notice")
        report.step_before = step + 2
        self.site.wait_for(f"the store to do without {host}", self._is_evacuated, NOTICE_S)
        self.say("evacuated", f"{host}, of {NOTICE_S:g} s notice", f"{time.monotonic() - started_s:.1f} s")
        return super().inject()

    def _is_evacuated(self) -> bool:
        row = host_row(self.hosts[0], self.site.status())
        return row is not None and row.drains_s is not None and not row.drain_left

    def detected(self, status: Status, injected_s: float) -> str | None:
        why = super().detected(status, injected_s)
        newest = self.newest_attempt(status)
        if why is not None and newest is not None:
            self.copies_left = newest.copies
        return why

    def check(self) -> None:
        wanted = self.context.config.replicas
        if self.copies_left < wanted:
            self.broken(
                f"{self.copies_left} of {wanted} copies were left when {self.hosts[0]} was gone: it was not evacuated"
            )


class KillRack(KillHost):
    """The loss of every host of a rack; beyond: also of every other host with a copy of the victim's shard."""

    name = "kill-rack"

    def lost_hosts(self, holders: list[str]) -> list[str]:
        rack = next((hosts for hosts in self.site.racks().values() if holders[0] in hosts), holders[:1])
        return [*rack, *(h for h in holders if self.is_beyond and h not in rack)]


class KillRackStaggered(KillRack):
    """The loss of a rack host by host: each dies while copies that the one before held are still missing."""

    name = "kill-rack-staggered"

    def inject(self) -> str:
        first, *others = self.hosts
        done = [self.site.lose_host(first, self.job.ranks)]
        for host in others:
            missing = self.site.wait_for(
                "the store to count copies as missing", lambda: self.job.newest().missing_copies
            )
            done.append(f"with {missing} copies missing: {self.site.lose_host(host, self.job.ranks)}")
        return "; ".join(done)


class KillTwoHosts(KillHost):
    """The loss of two of the three hosts with a copy of the same shard."""

    job_fields: ClassVar[Mapping[str, Any]] = {"replicas": 3}

    def may_hit(self, holders: list[str]) -> bool:
        return len(holders) == 3 and super().may_hit(holders)

    def lost_hosts(self, holders: list[str]) -> list[str]:
        """Return the rank's own host and a target that may be lost; beyond: every host with a copy."""
        if self.is_beyond:
            return holders
        return [holders[0], next((h for h in holders[1:] if self.site.may_lose([h])), holders[1])]


class SecondFailure(KillTwoHosts):
    """The loss of two hosts with a copy of the same shard, the second while the next attempt waits in get()."""

    name = "second-failure"

    def setup(self) -> None:
        super().setup()
        self.later = self.hosts[1:]

    def victims(self) -> list[str]:
        return [self.victim_host, *(f"{host} during the restore" for host in self.later)]

    def inject(self) -> str:
        self.hosts = [self.victim_host]
        return super().inject()

    def meanwhile(self) -> None:
        """Lose the other hosts; `lose_host` checks that each is gone."""
        for host in self.later:
            self.say("inject", f"while ranks wait in get(): {self.site.lose_host(host, [])}")


class LoseHostParity(KillHost):
    """The loss of as many hosts of a job as its parity survives; beyond: of one more. All ranks are in one set."""

    name = "lose-host-parity"
    job_fields: ClassVar[Mapping[str, Any]] = {"replicas": 2, "parity": SET_MAX}

    def setup(self) -> None:
        ranks_min = DATA_MIN + self.job_fields["replicas"] - 1
        if len(self.job.ranks) < ranks_min:
            raise DrillError(f"{len(self.job.ranks)} ranks keep copies: parity is of {ranks_min} or more (--hosts)")
        super().setup()

    def holders_of(self, rank: int) -> list[str]:
        """Return the rank's own host, and those of all others, which have its shard in their parity."""
        hosts = [each.host for each in self.job.ranks]
        return [hosts[rank], *(host for host in dict.fromkeys(hosts) if host != hosts[rank])]

    def lost_hosts(self, holders: list[str]) -> list[str]:
        """Return the rank's own host and as many others as may be lost with it; beyond: and one more."""
        others = [host for host in holders[1:] if self.site.may_lose([host])]
        return [holders[0], *others[: self.job_fields["replicas"] - 2 + self.is_beyond]]

    def restore(self) -> list[Restored]:
        """Require that what peers gave was decoded, not copied."""
        results = super().restore()
        if results[0].verdict == "peer" and "decoded" not in results[0].reason:
            self.broken(f"no chunk was decoded from parity: {results[0].reason}")
        return results


class LoseTwoHostsParity(LoseHostParity):
    """The same of a job whose parity survives the loss of two."""

    name = "lose-two-hosts-parity"
    job_fields: ClassVar[Mapping[str, Any]] = {"replicas": 3, "parity": SET_MAX}


class RayletScene(Scene):
    """A fault of one host's raylet and of what is below it; Ray is started again on the host, over its memory."""

    struck = "the raylet of {0.victim_host}"
    left: tuple[str, list[Process]] | None = None  # the host, and the processes that Ray's next start ends

    def may_hit(self, holders: list[str]) -> bool:
        return self.site.may_lose(holders[:1])

    def look(self) -> list[Process]:
        """Note raylet, holder and node of the host; return all processes of the host."""
        cluster = self.own_site.cluster
        self.raylet, self.node = cluster.raylet(self.victim_host), self.site.nodes()[self.victim_host]
        self.process, below = self.holder(self.victim_host), cluster.node_processes(self.victim_host)
        if self.process not in below:
            raise DrillError(f"the holder of {self.victim_host} is not below its raylet: killing that would not end it")
        self.left = (self.victim_host, below)
        return below

    def replace(self) -> None:
        """Start Ray again on the host; a second call does nothing."""
        self.thaw()
        if self.left is not None:
            self.own_site.replace_raylet(*self.left)
            self.left = None

    def cleanup(self) -> None:
        self.replace()


class KillRaylet(RayletScene):
    """SIGKILL to the raylet of one rank's host. Its processes die too, its memory stays, and Ray is started again."""

    name = "kill-raylet"

    def inject(self) -> str:
        self.kept, below = self.arena(self.victim_host), self.look()
        self.kill(self.victim_host, self.raylet)
        self.killed.append((self.victim_host, self.process))  # the holder ends with the raylet
        return f"SIGKILL to the raylet of {self.victim_host} (pid {self.raylet[0]}), which had started {len(below) - 1}"

    def recover(self) -> None:
        self.replace()
        self.check_adopted(
            self.victim_host, self.kept, f"a new raylet on {self.victim_host}, whose holder took over the arena"
        )
        self.job.restand(self.victim_host)


class FreezeRaylet(RayletScene):
    """A zombie: all processes of a host are stopped until it counts as dead and training has gone on without it."""

    name = "freeze-raylet"
    struck = "every process of {0.victim_host}"

    def setup(self) -> None:
        super().setup()
        self.hosts = [self.victim_host]

    def leaves(self, host: str) -> bool:
        return True

    def inject(self) -> str:
        processes = self.look()
        self.begin_puts()
        self.site.unreachable_hosts.add(self.victim_host)
        self.site.pool.forget(self.victim_host)
        self.hosts = []  # its memory stays
        for process in processes:
            self.freeze(self.victim_host, process)
        return f"SIGSTOP to all {len(processes)} processes of {self.victim_host}, raylet, holder and rank among them"

    def detected(self, status: Status, injected_s: float) -> str | None:
        row = host_row(self.victim_host, status)
        return f"{self.victim_host} is dead: {row.why}" if row is not None and row.status == "dead" else None

    def recover(self) -> None:
        self.own_site.wait_given_up(self.node)
        self.say("given up", f"Ray calls the node of {self.victim_host} dead")

    def wait_for_recovery(self) -> None:
        """Let the zombie go on; wait until it has ended, its successor has its place, and a new step is committed."""
        count = len(self.frozen)
        self.thaw()
        self.say("thawed", f"SIGCONT to {count} processes of {self.victim_host}")
        wait_gone([self.raylet], ZOMBIE_S)
        wait_gone([self.process], ZOMBIE_S)
        self.say("fenced", f"raylet and holder of {self.victim_host} have ended by themselves (checked)")
        self.replace()
        step = self.job.committed_step() + 1
        self.job.train(step, step, "after the zombie")
        self.job.wait_redundant()
        self.say("converged", f"{self.victim_host} is back with its memory, step {step} committed")

    def check(self) -> None:
        """Require that every rank can read the newest step: its own shard, and another's."""
        step = self.job.committed_step()
        self.check_read([*self.job.read(step, 0), *self.job.read(step, 1)], "after the zombie")


# -- ray ----------------------------------------------------------------------------------------------
# Faults of Ray itself: all of it at once, its head and then the rest, or its head alone. The hosts' memory stays
# (R5, R17, R24).


ENDED_S = 90.0  # with Ray's default, a raylet waits a minute for a head that is gone


class RayScene(Scene):
    """A death of all of Ray; Ray is started again on the same hosts, and `late` joins when ranks wait in get()."""

    is_noticed = False  # no controller is left that could notice it
    late = ""

    def setup(self) -> None:
        super().setup()
        self.hosts = []  # no host loses its memory
        self.rank_hosts = [r.host for r in self.job.ranks]

    def end_ray(self) -> int:
        """Kill what this scene kills; return how many processes."""
        raise NotImplementedError

    def inject(self) -> str:
        site = self.own_site
        # A later call through a handle of this Ray's actors would start another Ray here.
        self.job.ranks, self.job.spares = [], []
        self.before = {host: arena_identity(site.folder(host)) for host in site.cluster.labels}
        return f"SIGKILL to {self.end_ray()} processes of {', '.join(self.victims())}"

    def wait_for_effect(self) -> str:
        gone = [h for h, known in self.before.items() if arena_identity(self.site.folder(h)) != known]
        if gone:
            raise DrillError(f"the arenas of {', '.join(gone)} are not what they were: only processes were to go")
        return f"all gone, {len(self.before)} arena files are still there (both checked)"

    def recover(self) -> None:
        self.own_site.start_ray(without=self.late)
        others = [host for host in self.site.places() if host != self.late]
        self.job.stand_by([h if h != self.late else others[i % len(others)] for i, h in enumerate(self.rank_hosts)])
        self.say("started", f"Ray and the store run again on all hosts{f' but {self.late}' if self.late else ''}")


class RestartRay(RayScene):
    """SIGKILL to every process of every host at once; Ray is started again, and one host joins late."""

    name = "restart-ray"
    struck = "Ray on every host, {0.late} late"

    def setup(self) -> None:
        super().setup()
        self.late = self.rng.choice([host for host in self.rank_hosts if host != self.own_site.head])

    def end_ray(self) -> int:
        return self.own_site.end_ray()

    def meanwhile(self) -> None:
        """Let the late host join."""
        self.own_site.join_late(self.late)
        self.say("joined", f"{self.late}, while ranks wait in get()")

    def cleanup(self) -> None:
        self.own_site.join_late(self.late)


class HeadNode(RayScene):
    """SIGKILL to Ray's head. Without it every other raylet ends; then Ray is started again on the same hosts."""

    name = "head-node"
    struck = "Ray's head on {0.own_site.head}"

    def end_ray(self) -> int:
        return self.own_site.end_head()

    def wait_for_effect(self) -> str:
        took_s = self.own_site.wait_ray_ended(ENDED_S)
        return f"every other raylet and holder ended by itself within {took_s:.0f} s; {super().wait_for_effect()}"


class LoseHead(Scene):
    """SIGKILL to Ray's head, which keeps its tables on disk, while all ranks put; later it is started again."""

    name = "lose-head"
    struck = "Ray's head on {0.own_site.head}"
    is_noticed = False  # until Ray has started its holder again the head's host is dead, and that is no fault of a rank
    hold_s = 10.0  # until it is started again

    def places(self) -> list[str]:
        return [host for host in super().places() if host != self.own_site.head]

    def inject(self) -> str:
        self.kept = self.arena(self.own_site.head)
        return f"SIGKILL to {self.own_site.end_head()} processes of Ray's head on {self.own_site.head}"

    def wait_for_effect(self) -> str:
        if is_there(self.own_site.cluster.address):
            raise DrillError(f"something still listens at {self.own_site.cluster.address}, where Ray's head was")
        return "all gone, its port does not answer (both checked)"

    def recover(self) -> None:
        ended = self.own_site.start_head()
        if ended:
            self.broken(f"raylets or holders of other hosts ended while the head was away: pids {ended}")
        self.check_adopted(
            self.own_site.head, self.kept, "Ray's head runs again, its host's holder took over the arena"
        )

    def wait_for_recovery(self) -> None:
        """Kill a holder: Ray must start another one, at the word of the controller."""
        holder = self.holder(self.victim_host)
        self.kill(self.victim_host, holder)
        self.wait_replaced({self.victim_host: holder})
        self.job.wait_redundant()
        self.say("supervised", f"the holder of {self.victim_host} was killed and replaced")

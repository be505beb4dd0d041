"""A network split in halves, with the controller on the side that is cut off from the membership (R17)."""

from __future__ import annotations

import time

from memstore.drills.scenes.scenes_network import NetworkScene
from memstore.drills.sites.scratch import ScratchJob
from memstore.drills.sites.site_namespaces import VIA
from memstore.errors import ConfigError, DrillError

LEAVES_S = 20.0
STEPS = 3  # steps that each half puts before the split, and that the minority puts during it


class PartitionHalf(NetworkScene):
    """A split with a job on each half, besides the drill's own on both; beyond: all copies of a shard are cut off."""

    name = "partition-half"
    puts_count = 8
    hold_s = 2.0

    def setup(self) -> None:
        super().setup()
        self.minority, self.majority = self._halves()
        self.hosts = self.minority if self.is_beyond else []
        self.jobs: dict[str, ScratchJob] = {}
        self.steps: dict[str, int] = {}
        if self.is_beyond:
            return
        options = self.context.options
        for side, hosts in (("minority", self.minority), ("majority", self.majority)):
            config = self.context.config.with_fields({"durable": None})
            job = ScratchJob(self.site, f"drill-{side}", config, seed=options.seed + 1, nbytes=options.nbytes)
            self.jobs[side] = job
            job.start(hosts)
            job.train(0, STEPS - 1, f"of the {side}")
            self.steps[side] = STEPS - 1

    def _halves(self) -> tuple[list[str], list[str]]:
        """Return the hosts with the victim's copies, and the other hosts.

        Raises:
            ConfigError: the other hosts are too few for the copies of a job of their own.
        """
        places, replicas = self.context.places, self.context.config.replicas
        majority = [host for host in places if host not in self.holders]
        if len(majority) < replicas:
            raise ConfigError(
                f"{len(places)} hosts with replicas={replicas} make no two halves that could each commit: "
                f"use --hosts {2 * replicas} or more"
            )
        return sorted(self.holders), majority

    @property
    def cut(self) -> list[str]:
        return self.minority

    def victims(self) -> list[str]:
        return [f"the links between {', '.join(self.minority)} and {', '.join(self.majority)}"]

    def leaves(self, host: str) -> bool:
        return True

    def inject(self) -> str:
        net = self.net
        here, there = list(self.minority), [*self.majority, VIA, net.spare_host]
        self.site.unreachable_hosts.update(self.minority)
        (there if self.is_beyond else here).append(net.controller_host)
        net.rig.partition(here, there)
        if self.is_beyond:
            return f"{', '.join(here)} cut from all other hosts, with every copy of rank {self.rank}'s shard"
        net.cut_membership()
        self.lease_end_s = (
            time.time() + net.cluster.config.lease_s
        )  # until then its lease lets the old controller record commits (R17)
        net.elect_spare()
        return f"{', '.join(here)} with the controller | {', '.join(there)} with the membership"

    def wait_for_effect(self) -> str:
        net = self.net
        for a, b in ((self.minority[0], self.majority[0]), (self.majority[-1], self.minority[-1])):
            net.check_silent_between(a, b)
        if not self.is_beyond:
            if not net.reaches(self.minority[0], net.spare_host):
                raise DrillError(f"{self.minority[0]} receives nothing from its controller: these are no two halves")
            everywhere = net.commits([*self.minority, *self.majority])
            self.step_at_fault = max(fact.step for fact in everywhere if fact.job == self.context.job.name)
        return "nothing crosses, checked in both directions; within a half all is well"

    def recover(self) -> None:
        if self.is_beyond:  # the ranks are restarted while the halves are apart
            return
        net = self.net
        self._commit("majority")
        minority = self.jobs["minority"]
        minority.put(self.steps["minority"] + 1, self.steps["minority"] + STEPS, "put of the minority")
        self.steps["minority"] += STEPS
        if net.old_controller.poll() is not None:
            raise DrillError("the minority's controller ended by itself: nothing was there that could have committed")
        late = {(f.job, f.attempt, f.step) for f in net.commits(self.minority) if f.wall_s > self.lease_end_s}
        if late:
            self.broken(f"the minority committed {sorted(late)[:3]} while it was cut off (R17)")
        else:
            self.say("minority", f"{STEPS} steps put, none committed; its controller lives")
        net.rig.heal_all()
        net.connect_membership()
        self.site.unreachable_hosts.clear()
        self.site.wait_for("the old controller to leave", lambda: net.old_controller.poll() is not None, LEAVES_S)
        self.say("healed", "one network again; the old controller has left")

    def _commit(self, side: str) -> None:
        """Require that a new step of one half's job is committed within the promised time."""
        job, before = self.jobs[side], self.steps[side]
        for _ in range(int(self.context.promise.resume_s)):
            self.steps[side] += 1
            job.put(self.steps[side], self.steps[side], f"put of the {side}")
            try:
                newest = self.site.wait_for("a commit", lambda: max(0, job.committed_step() - before), 1.0) + before
            except DrillError:
                continue
            self.say(side, f"step {newest} committed")
            return
        self.broken(f"the {side} committed nothing within {self.context.promise.resume_s:g} s")

    def wait_for_recovery(self) -> None:
        if self.is_beyond:
            return
        self.site.wait_hosts_live([*self.minority, *self.majority])
        for side, job in self.jobs.items():
            self._commit(side)
            job.wait_redundant()

    def check(self) -> None:
        if self.is_beyond:
            return
        committed: dict[tuple[str, int, int], set[tuple[str, ...]]] = {}
        for fact in self.net.commits([*self.minority, *self.majority]):
            committed.setdefault((fact.job, fact.attempt, fact.step), set()).add(fact.digests)
        for key, digests in committed.items():
            if len(digests) > 1:
                self.broken(f"step {key[2]} of {key[0]} was committed {len(digests)} times with other bytes")
        for side, job in self.jobs.items():
            self.check_read(job.read(job.committed_step(), 1), side)

    def cleanup(self) -> None:
        super().cleanup()
        for job in getattr(self, "jobs", {}).values():
            job.remove()

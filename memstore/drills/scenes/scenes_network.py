"""Faults of the network between hosts: one-way, slow, cut one by one, cut in mid-put, flipped bits."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, ClassVar

from memstore.config import MIB
from memstore.core.wire.calls import VerifyStore
from memstore.core.wire.replies import Status
from memstore.drills.scenes.scene import Scene, host_row
from memstore.drills.sites.scratch import ScratchJob
from memstore.drills.sites.site_namespaces import VIA, NamespacesSite
from memstore.errors import ConfigError, DrillError

BUDGET_S = 1.0  # stall budget of the scratch job; shorter than each of these faults
SLOW_BITS_PER_S = 10_000_000
SLOW_MAX = 1.25  # a measured rate may be so much higher than the limit, because a burst passes at full speed
PROBE_BYTES = MIB // 4
MID_PUT_BITS_PER_S = 40_000_000  # slow enough to cut the link while a shard is on its way
CUT_PAUSE_S = 0.4
CATCH_S = 20.0
FLIPS_COUNT = 3
PAYLOAD_MIN = 4096


class NetworkScene(Scene):
    """A fault of a victim host's links; the cleanup repairs every link."""

    struck = "the links of {0.cut_text}"
    job_fields: ClassVar[Mapping[str, Any]] = {"stall_budget_s": BUDGET_S}

    @property
    def net(self) -> NamespacesSite:
        """Return the site if its hosts are in network namespaces; else raise DrillError."""
        if not isinstance(self.site, NamespacesSite):
            raise DrillError(f"{self.name} cuts links, and this cluster has none: it needs hosts in network namespaces")
        return self.site

    @property
    def cut(self) -> list[str]:
        """Return the hosts that are cut off."""
        return [self.victim_host]

    @property
    def cut_text(self) -> str:
        """Return the hosts that are cut off, as text."""
        return ", ".join(self.cut)

    def wait_for_effect(self) -> str:
        for host in self.cut:
            self.net.check_silent_between(VIA, host)
        return f"nothing arrives from {self.cut_text} (checked)"

    def detected(self, status: Status, injected_s: float) -> str | None:
        """Return the status of the hosts that are cut off, once none of them counts as live."""
        rows = {host: host_row(host, status) for host in self.cut}
        states = {host: row.status if row is not None else "gone" for host, row in rows.items()}
        if "live" in states.values():
            return None
        return "; ".join(f"{host} is {state}" for host, state in states.items())

    def recover(self) -> None:
        self.net.heal()
        self.say("healed", "every link is as it was; what was lost or damaged is sent again by itself")

    def wait_for_recovery(self) -> None:
        self.site.wait_hosts_live(self.cut)

    def cleanup(self) -> None:
        self.net.heal()


class PartitionOneWay(NetworkScene):
    """Loss of all packets from one host to the host with its copies; every other link works."""

    name = "partition-one-way"
    struck = "what {0.victim_host} sends to {0.holders[1]}"
    is_noticed = False  # both hosts still reach the controller; so it must suspect neither
    hold_s = 3.0

    def inject(self) -> str:
        victim_host, target = self.holders[:2]
        self.net.rig.block(victim_host, target, one_way=True)
        return f"packets from {victim_host} to {target} vanish; from {target} to {victim_host} they arrive"

    def wait_for_effect(self) -> str:
        victim_host, target = self.holders[:2]
        self.net.check_silent_between(target, victim_host)
        if not self.net.reaches(victim_host, target):
            raise DrillError(f"{victim_host} receives nothing from {target} either: this is no one-way fault")
        return f"a datagram from {victim_host} to {target} is lost, one back arrives (checked)"

    def recover(self) -> None:
        self.net.check_silent_between(self.holders[1], self.victim_host)
        super().recover()

    def check(self) -> None:
        dead = [row.host for row in self.site.status().hosts if row.status != "live"]
        if dead:
            self.broken(f"{', '.join(dead)} is not live although it reached the controller all the time")


class SlowLink(NetworkScene):
    """A link of 10 Mbit/s for one host, while all ranks put."""

    name = "slow-link"
    is_noticed = False  # a slow host is not dead; only skipped steps and stalls show the fault

    def inject(self) -> str:
        self.net.rig.shape(self.victim_host, SLOW_BITS_PER_S)
        return f"the link of {self.victim_host} has {SLOW_BITS_PER_S / 1e6:g} Mbit/s, both ways"

    def wait_for_effect(self) -> str:
        rate = self.net.bits_per_s(self.victim_host, VIA, PROBE_BYTES)
        if rate > SLOW_MAX * SLOW_BITS_PER_S:
            raise DrillError(f"{self.victim_host} sends {rate / 1e6:.1f} Mbit/s: its link is not slow")
        self.step_at_fault = self.job.committed_step() + 1  # one more step may have crossed before
        return f"{PROBE_BYTES >> 10} KiB crossed it at {rate / 1e6:.1f} Mbit/s (measured)"


class SwizzleClog(NetworkScene):
    """Cuts of the links of random hosts one by one, which are repaired one by one in another order."""

    name = "swizzle-clog"
    hold_s = 4.0  # together with the pauses between cuts, long enough for the first host to count as dead

    def setup(self) -> None:
        super().setup()
        others = [host for host in self.context.places if host != self.victim_host]
        self._cut = [self.victim_host, *self.rng.sample(others, self.rng.randrange(1, max(2, len(others))))]
        self.rng.shuffle(self._cut)

    @property
    def cut(self) -> list[str]:
        return self._cut

    def inject(self) -> str:
        for host in self.cut:
            self.site.unreachable_hosts.add(host)
            self.net.rig.cut(host)
            time.sleep(CUT_PAUSE_S)
        return f"links cut one by one, {CUT_PAUSE_S:g} s apart: {self.cut_text}"

    def recover(self) -> None:
        order = list(self.cut)
        while order == self.cut:
            self.rng.shuffle(order)
        for host in order:
            self.net.rig.heal(host)
            self.site.unreachable_hosts.discard(host)
            time.sleep(CUT_PAUSE_S)
        self.say("healed", f"in this order: {', '.join(order)}")


class FlipInTransit(NetworkScene):
    """Flipped bits in chunks on the way from a rank's host to the host with its copies."""

    name = "flip-in-transit"
    struck = f"what {{0.victim_host}} sends to {VIA}"

    def places(self) -> list[str]:
        """Return the live hosts with VIA first: what its peers send to VIA passes the proxy."""
        return [VIA, *self.site.places()]

    def may_hit(self, holders: list[str]) -> bool:
        return VIA in holders[1:]

    def errors_count(self, status: Status) -> int:
        """Return how many chunks have arrived at VIA with a wrong digest so far."""
        row = host_row(VIA, status)
        return row.stats.digest_errors if row is not None and row.stats is not None else 0

    def setup(self) -> None:
        super().setup()
        self.errors_before = self.errors_count(self.site.status())
        self.flips_before = self.net.proxy.up.flips_count

    @property
    def flips_count(self) -> int:
        """Return how many bits were flipped for this drill."""
        return self.net.proxy.up.flips_count - self.flips_before

    def inject(self) -> str:
        for _ in range(FLIPS_COUNT):
            at, bit = self.rng.randrange(PAYLOAD_MIN), self.rng.randrange(8)
            self.net.proxy.up.flip("payload", at, payload_min=PAYLOAD_MIN, bit=bit)
        return f"one bit each of the next {FLIPS_COUNT} chunks to {VIA}"

    def wait_for_effect(self) -> str:
        self.site.wait_for("the bits to flip", lambda: self.flips_count == FLIPS_COUNT, CATCH_S)
        self.step_at_fault = self.job.committed_step()
        return f"{FLIPS_COUNT} bits flipped on the way (counted by the proxy)"

    def detected(self, status: Status, injected_s: float) -> str | None:
        found = self.errors_count(status) - self.errors_before
        return f"{VIA} counts {found} chunks with a wrong digest" if found >= FLIPS_COUNT else None

    def check(self) -> None:
        found = self.errors_count(self.site.status()) - self.errors_before
        if found != self.flips_count:
            self.broken(f"{self.flips_count} bits flipped and {found} digest errors were counted")
        damaged = self.site.ask(VerifyStore(job=self.job.name), 60.0).found[VIA].damaged
        if damaged:
            self.broken(f"{damaged} damaged chunks were stored on {VIA}")


class CablePulled(NetworkScene):
    """A cut of one host's link while a shard of its rank is on its way to a peer."""

    name = "cable-pulled"
    hold_s = 2.0

    def begin_puts(self, pause_s: float | None = None, marks: Mapping[int, str] | None = None) -> list[Any]:
        self.net.rig.shape(self.victim_host, MID_PUT_BITS_PER_S)
        self.sent_before = self.net.rig.sent_bytes(self.victim_host)
        return super().begin_puts(pause_s, marks)

    def sent(self) -> int:
        """Return how many bytes have left the victim since the puts began."""
        return self.net.rig.sent_bytes(self.victim_host) - self.sent_before

    def inject(self) -> str:
        nbytes, host, deadline_s = self.context.options.nbytes, self.victim_host, time.monotonic() + CATCH_S
        while (sent := self.sent()) < nbytes // 8:
            if time.monotonic() > deadline_s:
                raise DrillError(f"{host} sent {sent} bytes of a shard of {nbytes} within {CATCH_S:g} s: no put to hit")
            time.sleep(0.002)
        self.site.unreachable_hosts.add(host)
        self.net.rig.cut(host)
        self.share = self.sent() / nbytes
        self.step_at_fault = self.job.committed_step()
        self.net.rig.unshape(host)
        return f"the cable of {host} is pulled, {self.share:.0%} of a shard had left it"

    def wait_for_effect(self) -> str:
        if self.share >= 1 or self.step_at_fault > (self.context.report.step_before or 0):
            raise DrillError(
                f"{self.share:.0%} of the shard had left {self.victim_host} when its link was cut, step "
                f"{self.step_at_fault} "
                "was committed: it was no mid-put"
            )
        return f"{super().wait_for_effect()}; the step under way is not committed (checked)"


# -- partition ----------------------------------------------------------------------------------------
# A network split in halves, with the controller on the side that is cut off from the membership (R17).


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
        committed: dict[tuple[str, int, int], set[bytes]] = {}
        for fact in self.net.commits([*self.minority, *self.majority]):
            committed.setdefault((fact.job, fact.attempt, fact.step), set()).add(fact.digests.root)
        for key, digests in committed.items():
            if len(digests) > 1:
                self.broken(f"step {key[2]} of {key[0]} was committed {len(digests)} times with other bytes")
        for side, job in self.jobs.items():
            self.check_read(job.read(job.committed_step(), 1), side)

    def cleanup(self) -> None:
        super().cleanup()
        for job in getattr(self, "jobs", {}).values():
            job.remove()

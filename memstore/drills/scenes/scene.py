"""The base of every drill's scene: a victim drawn by the seed, and one hook for each phase of a drill.

A scene breaks something and checks that it is broken. The flow (`run/flows.py`) has the ranks' part and the judgement.
A scene overrides `inject`, and the other hooks that it needs. `kill` and `freeze` note the processes that they hit; the
default hooks check that these are gone or stopped, find them in the status, and let them go on.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from memstore.core.wire.replies import Status
from memstore.core.wire.status_rows import AttemptStatus, HostRow
from memstore.drills.ranks.ranks import Rank
from memstore.drills.sites.scratch import DrillContext, put_rows
from memstore.drills.sites.site import EmbeddedSite
from memstore.errors import ConfigError, DrillError
from memstore.testing.faults.arena_files import arena_identity, holder_process
from memstore.testing.faults.processes import Process, freeze, kill, thaw, wait_frozen, wait_gone
from memstore.testing.ranks.rank import Restored

STALL_SLACK_S = 1.0  # above the stall budget: on a busy machine a put may return so much later
COMMIT_PAUSE_S = 0.25


class Scene:
    """One fault on a victim rank, its host, or the hosts with a copy of its shard."""

    name: ClassVar[str]  # as in the catalogue
    struck: ClassVar[str] = "rank {0.rank} on {0.victim_host}"  # the victim as text, with the scene's attributes
    job_fields: ClassVar[Mapping[str, Any]] = {}  # fields of the scratch job's Config that override the person's
    group_options: ClassVar[Mapping[str, Any]] = {}  # of the InPlaceGroup, if ranks recover in place
    puts_count = 12  # puts per rank during the fault, if ranks put during it
    pause_s = 0.25  # between two of these puts
    hold_s = 0.0  # how long the fault lasts at least after it is noticed, if training goes on
    step_at_fault = -1  # newest step whose bytes may have been sent before the fault, if training goes on
    is_noticed = True  # the store's status must show the fault; False where the store cannot, or need not, notice it

    def __init__(self, context: DrillContext) -> None:
        self.context, self.site, self.rng, self.job = context, context.site, context.rng, context.job
        self.rank = -1
        self.holders: list[str] = []  # hosts with a copy of the victim's shard, its own host first
        self.hosts: list[str] = []  # hosts that lose their memory
        self.is_beyond = context.options.is_beyond
        self.killed: list[tuple[str, Process]] = []  # host, process
        self.frozen: list[tuple[str, Process]] = []
        self.puts: list[Any] = []  # calls of the puts during the fault, if the scene itself started them

    # -- the phases ---------------------------------------------------------------------------

    def setup(self) -> None:
        """Draw the victim; all copies are in place, and nothing is broken yet.

        Raises:
            ConfigError: the host named with --victim has no rank of the drill.
            DrillError: every possible victim would take Ray's head.
        """
        victim, hosts = self.context.options.victim, [r.host for r in self.job.ranks]
        candidates = [i for i, host in enumerate(hosts) if victim in (None, host)]
        if not candidates:
            raise ConfigError(f"--victim {victim}: the drill's ranks are on {', '.join(hosts)}; name one of them")
        candidates = [i for i in candidates if self.may_hit(self.holders_of(i))]
        if not candidates:
            raise DrillError(
                "every choice would take Ray's head, which carries the drill itself: run it with more hosts (--hosts)"
            )
        self.rank = self.rng.choice(candidates)
        self.holders = self.holders_of(self.rank)
        if self.is_beyond:
            self.hosts = list(self.holders)

    def inject(self) -> str:
        """Break something; return what was done, as text."""
        raise NotImplementedError

    def wait_for_effect(self) -> str:
        """Check that the fault is there; return how, as text. Raise DrillError if the fault is not there."""
        for host, process in self.killed:
            self.site.do(host, wait_gone, [process])
        for host, process in self.frozen:
            self.site.do(host, wait_frozen, process)
        found = [f"{pids_text(self.killed)} gone (checked)"] if self.killed else []
        found += [f"{pids_text(self.frozen)} stopped (state T, checked)"] if self.frozen else []
        if self.hosts:
            found.append(f"{', '.join(self.hosts)}: processes gone, port silent, arena file gone (each checked)")
        if not found:
            raise DrillError("no process was hit and no memory destroyed: nothing is broken")
        return "; ".join(found)

    def detected(self, status: Status, injected_s: float) -> str | None:
        """Return how the store's status shows the fault, as text; None while it does not.

        Called by another thread, and only if `is_noticed`. By default: that all hosts with a dead holder died.
        """
        found = [self.host_noticed(host, status, injected_s) for host in self.dying()]
        return "; ".join(str(why) for why in found) if all(found) else None

    def recover(self) -> None:
        """End the fault if it does not end by itself (thaw, repair, reconnect); or wait for the victim's successor."""

    def restore(self) -> list[Restored]:
        """Let all ranks of the next attempt get and compare; called only if a launcher restarts the ranks."""
        return self.job.restore(is_altered=self.context.options.is_altered, meanwhile=self.meanwhile)

    meanwhile: Any = None  # a method that is called when all ranks but one have called get()

    def wait_for_recovery(self) -> None:
        """Wait for what this scene needs besides the copies and commits for which the flow waits."""

    def check(self) -> None:
        """Compare the scene's own findings with the promise; report what is broken with `broken`."""

    def cleanup(self) -> None:
        """Undo what is still broken; called however far the drill came, also if nothing is broken."""
        self.thaw()

    def places(self) -> list[str]:
        """Return the live hosts in the order in which they get ranks."""
        return self.site.places()

    # -- about the victim ---------------------------------------------------------------------

    @property
    def victim_host(self) -> str:
        """Return the victim rank's own host."""
        return self.holders[0]

    @property
    def victim(self) -> Rank:
        """Return the victim rank."""
        return self.job.ranks[self.rank]

    @property
    def own_site(self) -> EmbeddedSite:
        """Return the drill's own embedded cluster; raise DrillError if the raylets are not the drill's to break."""
        if not isinstance(self.site, EmbeddedSite):
            raise DrillError(f"{self.name} breaks raylets: it is played on a cluster of its own only (--embedded)")
        return self.site

    def may_hit(self, holders: list[str]) -> bool:
        """Return whether a rank whose shard is on these hosts may be the victim."""
        return True

    def holders_of(self, rank: int) -> list[str]:
        """Return the hosts with a copy of a rank's newest shard: its own host, then the targets of that host."""
        victim_host = self.job.ranks[rank].host
        before = self.context.job_before
        return [victim_host, *(before.targets.get(victim_host, ()) if before is not None else ())]

    def victims(self) -> list[str]:
        """Return the names of the victims for the first line and for --json."""
        return [self.struck.format(self), *self.hosts]

    def dying(self) -> list[str]:
        """Return the hosts whose holders die."""
        return self.hosts or self.holders[:1]

    def leaves(self, host: str) -> bool:
        """Return whether a host that loses its memory stays away, so that its ranks need another host."""
        return False

    # -- what is said -------------------------------------------------------------------------

    def say(self, label: str, text: str, note: str = "") -> None:
        """Add a line to the timeline."""
        self.context.timeline.line(label, text, note)

    def broken(self, text: str) -> None:
        """Note that a promise is broken; the drill goes on."""
        self.context.broken_promises.append(text)

    # -- breaking -----------------------------------------------------------------------------

    def kill(self, host: str, process: Process) -> None:
        """Send SIGKILL; raise DrillError if the process was gone before."""
        if not self.site.do(host, kill, [process]):
            raise DrillError(f"pid {process[0]} on {host} was gone before it was killed")
        self.killed.append((host, process))

    def freeze(self, host: str, process: Process) -> None:
        """Send SIGSTOP; `cleanup` lets the process go on."""
        self.frozen.append((host, process))
        self.site.do(host, freeze, process)

    def thaw(self) -> None:
        """Let all frozen processes go on."""
        for host, process in self.frozen:
            self.site.do(host, thaw, process)
            self.site.unreachable_hosts.discard(host)
        self.frozen = []

    def holder(self, host: str) -> Process:
        """Return the holder's process on a host."""
        return self.site.do(host, holder_process, self.site.folder(host))

    def arena(self, host: str) -> Any:
        """Return what tells the arena file of a host from a later one."""
        return self.site.do(host, arena_identity, self.site.folder(host))

    def lose_memories(self) -> list[str]:
        """Destroy the memory of all `self.hosts` and check each; return what was done, one text per host."""
        return [
            f"{host} lost its holder and its arena ({self.site.lose_memory(host, self.job.ranks) >> 20} MiB)"
            for host in self.hosts
        ]

    # -- looking ------------------------------------------------------------------------------

    def newest_attempt(self, status: Status) -> AttemptStatus | None:
        """Return the newest attempt of the drill's job in a status; None if it is not there."""
        return next((row.newest for row in status.jobs if row.job == self.job.name), None)

    def host_noticed(self, host: str, status: Status, injected_s: float) -> str | None:
        """Return how the controller noticed a holder's death, also if the holder is back; None if it has not."""
        row = host_row(host, status)
        if row is None:
            return f"{host} is no longer a member"
        if row.status == "dead":
            return f"{host}: {row.why}"
        is_newer = row.status_s < time.monotonic() - injected_s
        return f"{host} {row.why}" if is_newer and row.why == "joined again" else None

    def wait_replaced(self, processes: Mapping[str, Process]) -> None:
        """Wait until the holders of these hosts are live and other ones than these."""

        def look() -> bool:
            is_new = all(int(self.site.record(host)["pid"]) != pid for host, (pid, _) in processes.items())
            return is_new and set(processes) <= set(self.site.live_hosts())

        self.site.wait_for(f"new holders on {', '.join(processes)}", look)

    def check_adopted(self, host: str, arena: Any, words: str) -> None:
        """Require that the host's holder has taken over this arena."""
        if self.arena(host) != arena:
            self.broken(f"the new holder of {host} made a new arena instead of adopting the old one")
        self.say("adopted", words)

    def check_read(self, results: Iterable[Restored], when: str) -> None:
        """Require that every shard that was read is whole and right."""
        for found in results:
            if found.problem:
                self.broken(f"{when}, reading rank {found.rank} of step {found.step}: {found.problem}")

    def wait_durable(self, newer_than: int, what: str) -> None:
        """Wait for a newer durable step."""

        def look() -> int | None:
            newest = self.job.newest().durable_step
            return newest if newest is not None and newest > newer_than else None

        self.say("durable", f"step {self.site.wait_for(what, look)} is durable")

    # -- puts during an outage ------------------------------------------------------------------

    def begin_puts(self, pause_s: float | None = None, marks: Mapping[int, str] | None = None) -> list[Any]:
        """Start the puts that all ranks make during the fault; return their calls for `end_puts`."""
        first = (self.context.report.step_before or 0) + 1
        pause_s = self.pause_s if pause_s is None else pause_s
        return self.job.begin_puts(first, first + self.puts_count - 1, pause_s, marks)

    def end_puts(self, calls: list[Any]) -> None:
        """Wait for the puts of `begin_puts`; require that each returned within its budget and raised nothing."""
        rows = put_rows(calls, "puts during the outage")
        worst = max(rows, key=lambda row: row.stall_s)
        self.context.report.stall_s = round(worst.stall_s, 3)
        raised = [row for row in rows if row.error]
        self.context.broken_promises += [f"a put of step {row.step} raised {row.error}" for row in raised][:3]
        budget_s = self.context.config.stall_budget_s + STALL_SLACK_S
        if worst.stall_s > budget_s:
            self.broken(f"the put of step {worst.step} took {worst.stall_s:.1f} s of at most {budget_s:.1f} s")
        self.say(
            "training",
            f"{len(rows)} puts during the outage, {len(raised) or 'none'} raised, longest stall "
            f"{worst.stall_s * 1e3:.0f} ms",
        )

    def commit_again(self) -> float | None:
        """Require that a new step of all ranks is committed; return the seconds that it took, None if too many."""
        step = first = (self.context.report.step_before or 0) + self.puts_count + 1
        limit_s, started_s = self.context.promise.resume_s, time.monotonic()
        while True:
            self.job.put(step, step, "put after the outage")
            newest = self.job.committed_step()
            took_s = time.monotonic() - started_s
            if newest >= first:
                break
            if took_s > limit_s:
                self.broken(f"no step was committed within {limit_s:g} s after the outage")
                return None
            step += 1
            time.sleep(COMMIT_PAUSE_S)
        self.say("resumed", f"step {newest} committed after the outage", f"{took_s:.1f} s")
        return round(took_s, 3)


def host_row(host: str, status: Status) -> HostRow | None:
    """Return a host's row in a status; None if it is no member."""
    return next((row for row in status.hosts if row.host == host), None)


def pids_text(processes: list[tuple[str, Process]]) -> str:
    """Return "pid 7 is", "pids 7, 8 are" or "12 processes are"."""
    pids = [str(pid) for _, (pid, _) in processes]
    if len(pids) > 3:
        return f"{len(pids)} processes are"
    return f"pids {', '.join(pids)} are" if len(pids) > 1 else f"pid {pids[0]} is"

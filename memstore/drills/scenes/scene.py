"""The base of every drill's scene: a victim drawn by the seed, and one hook for each phase of a drill.

A scene breaks something and checks that it is broken. The flow (`run/flows.py`) has the ranks' part and the judgement.
A new scene overrides `inject`, `wait_for_effect` and `detected`, and the other hooks that it needs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, ClassVar

from memstore.drills.ranks.ranks import PutRow, Restored, collect
from memstore.drills.sites.drill_context import DrillContext
from memstore.drills.sites.site import EmbeddedSite
from memstore.errors import ConfigError, DrillError

STALL_SLACK_S = 1.0  # above the stall budget: on a busy machine a put may return so much later
COMMIT_PAUSE_S = 0.25


class Scene:
    """One fault on a victim rank, its host, or the hosts with a copy of its shard."""

    name: ClassVar[str]  # as in the catalogue
    job_fields: ClassVar[Mapping[str, Any]] = {}  # fields of the scratch job's Config that override the person's
    puts_count = 12  # puts per rank during the fault, if ranks put during it
    pause_s = 0.25  # between two of these puts
    hold_s = 0.0  # how long the fault lasts at least after it is noticed, if training goes on
    step_at_fault = -1  # newest step whose bytes may have been sent before the fault, if training goes on
    is_noticed = True  # the store's status must show the fault; False where the store cannot, or need not, notice it

    def __init__(self, context: DrillContext) -> None:
        self.context, self.site, self.rng = context, context.site, context.rng
        self.rank = -1
        self.holders: list[str] = []  # hosts with a copy of the victim's shard, its own host first
        self.hosts: list[str] = []  # hosts that lose their memory
        self.is_beyond = context.options.is_beyond

    # -- the phases ---------------------------------------------------------------------------

    def setup(self) -> None:
        """Draw the victim; all copies are in place, and nothing is broken yet.

        Raises:
            ConfigError: the host named with --victim has no rank of the drill.
            DrillError: every possible victim would take Ray's head.
        """
        ranks = self.context.job.ranks
        candidates = [i for i, r in enumerate(ranks) if self.context.options.victim in (None, r.host)]
        if not candidates:
            have = ", ".join(r.host for r in ranks)
            raise ConfigError(
                f"--victim {self.context.options.victim}: the drill's ranks are on {have}; name one of them"
            )
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
        raise NotImplementedError

    def detected(self, body: dict[str, Any], injected_s: float) -> str | None:
        """Return how the store's status shows the fault, as text; None while it does not.

        Called by another thread, and only if `is_noticed`.
        """
        raise NotImplementedError

    def recover(self) -> None:
        """End the fault if it does not end by itself (thaw, repair, reconnect); or wait for the victim's successor."""

    def restore(self) -> list[Restored]:
        """Let all ranks of the next attempt get and compare; called only if a launcher restarts the ranks."""
        return self.context.job.restore(is_altered=self.context.options.is_altered)

    def wait_for_recovery(self) -> None:
        """Wait for what this scene needs besides the copies and commits for which the flow waits."""

    def check(self) -> None:
        """Compare the scene's own findings with the promise; append to `self.context.broken_promises`."""

    def cleanup(self) -> None:
        """Undo what is still broken; called however far the drill came, also if nothing is broken."""

    def places(self) -> list[str]:
        """Return the live hosts in the order in which they get ranks."""
        return self.site.places()

    # -- about the victim ---------------------------------------------------------------------

    def may_hit(self, holders: list[str]) -> bool:
        """Return whether a rank whose shard is on these hosts may be the victim."""
        return True

    def holders_of(self, rank: int) -> list[str]:
        """Return the hosts with a copy of a rank's newest shard: its own host, then the targets of that host."""
        home = self.context.job.ranks[rank].host
        return [home, *self.context.job_before["targets"].get(home, ())]

    def victims(self) -> list[str]:
        """Return the names of the victims for the first line and for --json."""
        return [f"rank {self.rank} on {self.holders[0]}", *self.hosts]

    def leaves(self, host: str) -> bool:
        """Return whether a host that loses its memory stays away, so that its ranks need another host."""
        return False

    def lose_memories(self) -> list[str]:
        """Destroy the memory of all `self.hosts` and check each; return what was done, one text per host."""
        return [
            f"{host} lost its holder and its arena ({self.site.lose_memory(host, self.context.job.ranks) >> 20} MiB)"
            for host in self.hosts
        ]

    def memories_gone(self) -> list[str]:
        """Return how the losses of `lose_memories` were checked, as text; no text if there were none."""
        if not self.hosts:
            return []
        return [f"{', '.join(self.hosts)}: processes gone, ports silent, arena files gone (each checked)"]

    def own_site(self) -> EmbeddedSite:
        """Return the drill's own embedded cluster; raise DrillError if the raylets are not the drill's to break."""
        if not isinstance(self.site, EmbeddedSite):
            raise DrillError(f"{self.name} breaks raylets: it is played on a cluster of its own only (--embedded)")
        return self.site

    def host_noticed(self, host: str, body: dict[str, Any], injected_s: float) -> str | None:
        """Return how the controller noticed a holder's death, also if the holder is back; None if it has not."""
        row = next((r for r in body["hosts"] if r["host"] == host), None)
        if row is None:
            return f"{host} is no longer a member"
        if row["status"] == "dead":
            return f"{host}: {row['why']}"
        is_newer = row["status_s"] < time.monotonic() - injected_s
        return f"{host} {row['why']}" if is_newer and row["why"] == "joined again" else None

    # -- puts during an outage ------------------------------------------------------------------

    def begin_puts(self, pause_s: float | None = None, marks: Mapping[int, str] | None = None) -> list[Any]:
        """Start the puts that all ranks make during the fault; return their calls for `end_puts`."""
        first = (self.context.report.step_before or 0) + 1
        pause_s = self.pause_s if pause_s is None else pause_s
        return self.context.job.begin_puts(first, first + self.puts_count - 1, pause_s, marks)

    def end_puts(self, calls: list[Any]) -> None:
        """Wait for the puts of `begin_puts`; require that each returned within its budget and raised nothing."""
        rows: list[PutRow] = [row for rows in collect(calls, "puts during the outage") for row in rows]
        worst = max(rows, key=lambda row: row.stall_s)
        self.context.report.stall_s = round(worst.stall_s, 3)
        raised = [row for row in rows if row.error]
        self.context.broken_promises += [f"a put of step {row.step} raised {row.error}" for row in raised][:3]
        budget_s = self.context.config.stall_budget_s + STALL_SLACK_S
        if worst.stall_s > budget_s:
            self.context.broken_promises.append(
                f"the put of step {worst.step} took {worst.stall_s:.1f} s of at most {budget_s:.1f} s"
            )
        self.context.timeline.line(
            "training",
            f"{len(rows)} puts during the outage, {len(raised) or 'none'} raised, longest stall "
            f"{worst.stall_s * 1e3:.0f} ms",
        )

    def commit_again(self) -> float | None:
        """Require that a new step of all ranks is committed; return the seconds that it took, None if too many."""
        context, job = self.context, self.context.job
        step = first = (context.report.step_before or 0) + self.puts_count + 1
        started_s = time.monotonic()
        while True:
            job.put(step, step, "put after the outage")
            newest = job.committed_step()
            took_s = time.monotonic() - started_s
            if newest >= first:
                break
            if took_s > context.promise.resume_s:
                context.broken_promises.append(
                    f"no step was committed within {context.promise.resume_s:g} s after the outage"
                )
                return None
            step += 1
            time.sleep(COMMIT_PAUSE_S)
        context.timeline.line("resumed", f"step {newest} committed after the outage", f"{took_s:.1f} s")
        return round(took_s, 3)

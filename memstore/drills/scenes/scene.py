"""What every drill's scene has: a victim drawn by the seed, and one hook for each phase of a drill's life.

A scene breaks things and knows by what it is seen that they are broken; what the ranks do meanwhile and how the
outcome is judged is the flow's (`flows.py`). A new scene overrides `inject`, `wait_for_effect` and `detected`, and
whichever of the other hooks it needs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, ClassVar

from memstore.drills.ranks.ranks import PutRow, Restored, collect
from memstore.drills.sites.drill_context import DrillContext
from memstore.drills.sites.site import EmbeddedSite
from memstore.errors import ConfigError, DrillError

STALL_SLACK_S = 1.0  # a put may take its budget, and a busy machine this much to give the thread back
COMMIT_PAUSE_S = 0.25


class Scene:
    """A victim rank drawn by the seed, its host, and every host with a copy of its shard."""

    name: ClassVar[str]  # of its entry in the catalogue
    job_fields: ClassVar[Mapping[str, Any]] = {}  # of the scratch job, over what the person chose
    puts_count = 12  # puts per rank during the fault, where ranks put during it
    pause_s = 0.25  # between two of them
    hold_s = 0.0  # how long the fault lasts at least once it is noticed, where training goes on
    step_at_fault = -1  # the newest that may owe something to the time before the fault, where training goes on
    is_noticed = True  # the store's status shows the fault; a slow link may be too slow for nobody

    def __init__(self, context: DrillContext) -> None:
        self.context, self.site, self.rng = context, context.site, context.rng
        self.rank = -1
        self.holders: list[str] = []  # the rank's own host first
        self.hosts: list[str] = []  # hosts that lose their memory
        self.is_beyond = context.options.is_beyond

    # -- the phases ---------------------------------------------------------------------------

    def setup(self) -> None:
        """Draw the victim; the copies are all in place now. Breaks nothing yet.

        Raises:
            ConfigError: the host named with --victim has no rank of the drill.
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
        """Do it; return what was done, in words."""
        raise NotImplementedError

    def wait_for_effect(self) -> str:
        """Return how it was checked that the fault is there; DrillError if it is not, for then nothing is proved."""
        raise NotImplementedError

    def detected(self, body: dict[str, Any], injected_s: float) -> str | None:
        """Say by what the store's status shows that it noticed; None while it does not. Called by another thread."""
        raise NotImplementedError

    def recover(self) -> None:
        """End the fault if it does not end by itself: thaw, mend, reconnect; or wait for what replaces the victim."""

    def restore(self) -> list[Restored]:
        """All ranks of the next attempt get and compare, where the launcher restarts them."""
        return self.context.job.restore(is_altered=self.context.options.is_altered)

    def wait_for_recovery(self) -> None:
        """Wait for what this fault needs besides the copies and the commits that the flow waits for."""

    def check(self) -> None:
        """Hold what only this scene knows against the promise: append to `self.context.broken_promises`."""

    def cleanup(self) -> None:
        """Undo what is still broken, however far the drill came; must do no harm if nothing is."""

    def places(self) -> list[str]:
        """Live hosts in the order in which ranks are given to them."""
        return self.site.places()

    # -- about the victim ---------------------------------------------------------------------

    def may_hit(self, holders: list[str]) -> bool:
        """Say whether the drill may be played on a rank with its shard on these hosts."""
        return True

    def holders_of(self, rank: int) -> list[str]:
        """Every host with a copy of a rank's newest shard: its own, then its targets."""
        home = self.context.job.ranks[rank].host
        return [home, *self.context.job_before["targets"].get(home, ())]

    def victims(self) -> list[str]:
        """Names for the first line and for --json."""
        return [f"rank {self.rank} on {self.holders[0]}", *self.hosts]

    def leaves(self, host: str) -> bool:
        """Say whether a host that loses its memory stays away, so that its ranks need another."""
        return False

    def lose_memories(self) -> list[str]:
        """The twin's part: every host with a copy loses its memory; checked host by host. Return it in words."""
        return [
            f"{host} lost its holder and its arena ({self.site.lose_memory(host, self.context.job.ranks) >> 20} MiB)"
            for host in self.hosts
        ]

    def memories_gone(self) -> list[str]:
        """How the loss of `lose_memories` was checked, in words."""
        if not self.hosts:
            return []
        return [f"{', '.join(self.hosts)}: processes gone, ports silent, arena files gone (each checked)"]

    def own_site(self) -> EmbeddedSite:
        """The drill's own cluster; DrillError on another, where raylets are not ours to break."""
        if not isinstance(self.site, EmbeddedSite):
            raise DrillError(f"{self.name} breaks raylets: it is played on a cluster of its own only (--embedded)")
        return self.site

    def host_noticed(self, host: str, body: dict[str, Any], injected_s: float) -> str | None:
        """Say how the controller learned that a host's holder died; one that is back already counts too."""
        row = next((r for r in body["hosts"] if r["host"] == host), None)
        if row is None:
            return f"{host} is no longer a member"
        if row["status"] == "dead":
            return f"{host}: {row['why']}"
        is_newer = row["status_s"] < time.monotonic() - injected_s
        return f"{host} {row['why']}" if is_newer and row["why"] == "joined again" else None

    # -- puts during an outage ------------------------------------------------------------------

    def begin_puts(self, pause_s: float | None = None, marks: Mapping[int, str] | None = None) -> list[Any]:
        """All ranks go on putting while the fault happens."""
        first = (self.context.report.step_before or 0) + 1
        pause_s = self.pause_s if pause_s is None else pause_s
        return self.context.job.begin_puts(first, first + self.puts_count - 1, pause_s, marks)

    def end_puts(self, calls: list[Any]) -> None:
        """Every put must have returned within its budget and raised nothing."""
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
        """One more step by all ranks must be committed; return the seconds until it was, None if the promise broke."""
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

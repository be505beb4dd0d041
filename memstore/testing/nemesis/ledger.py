"""The record of puts, commits, losses and restores of one round, and the promise that follows from it. Pure.

A step that was committed and not degraded must be restored, or a newer one of its lineage, while fewer than `replicas`
failure domains have lost their memory since it was put, or since its copies were seen to be complete. If some memory
was lost, a domain whose holder was stopped or away meanwhile counts as well, because a later step may have been
committed without it.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, field

Step = tuple[int, int]  # attempt, step


@dataclass
class Commit:
    """A step whose commit was reported to a rank."""

    step: Step
    safe_since_s: float | None  # since when every copy was there; None: it was committed degraded


@dataclass
class Harm:
    """A loss or an absence that a fault caused in a failure domain."""

    domain: str
    at_s: float
    kind: str  # "lost": memory destroyed; "rot": slots changed; "rot-file": other files; "away": holder does not serve
    until_s: float | None = None  # away: when it was seen live again
    is_repaired: bool = False  # rot: everything was verified since


@dataclass
class Ledger:
    """The record; the job, the faults and the observer write it, each in a thread of its own."""

    replicas: int
    keep_steps: int
    domains: frozenset[str]
    lock: threading.RLock = field(default_factory=threading.RLock)
    put_s: dict[Step, float] = field(default_factory=dict)  # when the first rank began to put it
    put_ranks: dict[Step, set[int]] = field(default_factory=dict)
    commits: dict[Step, Commit] = field(default_factory=dict)
    durable: list[Step] = field(default_factory=list)
    harms: list[Harm] = field(default_factory=list)
    storage_away: list[tuple[float, float | None]] = field(default_factory=list)
    timeline: list[Step] = field(default_factory=list)  # every step so far in the lineage of the newest attempt
    parents: dict[int, Step | None] = field(default_factory=dict)  # attempt -> what it restored

    # -- what happened ------------------------------------------------------------------------

    def began_put(self, attempt: int, step: int, rank: int, now_s: float) -> None:
        """Note that a rank puts a step."""
        with self.lock:
            key = (attempt, step)
            if key not in self.put_s:
                self.put_s[key] = now_s
                self.timeline.append(key)
            self.put_ranks.setdefault(key, set()).add(rank)

    def committed(self, step: Step, *, degraded: bool) -> bool:
        """Note that a commit was reported to a rank; return whether it is the first report."""
        with self.lock:
            known = self.commits.get(step)
            if known is None:
                self.commits[step] = Commit(step, None if degraded else self.put_s.get(step))
                return True
            if degraded:
                known.safe_since_s = None
            return False

    def became_durable(self, step: Step) -> None:
        """Note that a rank was sent that a step is on durable storage."""
        with self.lock:
            if step not in self.durable:
                self.durable.append(step)

    def complete(self, attempt: int, step: int, now_s: float) -> None:
        """Note that the store reported every copy of its newest commit."""
        with self.lock:
            for commit in self.commits.values():
                if commit.step == (attempt, step):
                    commit.safe_since_s = max(now_s, commit.safe_since_s or 0.0)

    def harmed(self, domain: str, kind: str, now_s: float) -> Harm:
        """Note a fault that takes memory or a holder away."""
        with self.lock:
            harm = Harm(domain, now_s, kind)
            self.harms.append(harm)
            return harm

    def lost_storage(self, from_s: float, to_s: float | None = None) -> None:
        """Note that durable storage failed from one moment on; a later call adds the end."""
        with self.lock:
            self.storage_away = [row for row in self.storage_away if row[0] != from_s]
            self.storage_away.append((from_s, to_s))

    def emptied_storage(self) -> None:
        """Note that all durable steps are gone."""
        with self.lock:
            self.durable.clear()

    def verified(self, now_s: float) -> None:
        """Note that everything was digested again and repaired, so that earlier rot is over."""
        with self.lock:
            for harm in self.harms:
                harm.is_repaired = harm.is_repaired or (harm.kind == "rot" and harm.at_s < now_s)

    def restored(self, attempt: int, step: Step | None) -> None:
        """Note the step that an attempt restored; later steps of the timeline leave its lineage."""
        with self.lock:
            if attempt in self.parents:
                return
            self.parents[attempt] = step
            self.timeline = [] if step is None else self.timeline[: self.timeline.index(step) + 1]

    # -- what follows ---------------------------------------------------------------------------

    def is_in_lineage(self, step: Step) -> bool:
        """Return whether the newest attempt may go on from a step."""
        with self.lock:
            return step in self.timeline

    def newest_commit(self) -> Step | None:
        """Return the newest step of the lineage whose commit was reported to a rank."""
        with self.lock:
            return next((step for step in reversed(self.timeline) if step in self.commits), None)

    def demanded(self, from_s: float, to_s: float) -> Step | None:
        """Return the oldest step that a restore between two moments may return; None if nothing is promised."""
        with self.lock:
            newest = [step for step in reversed(self.timeline) if step in self.commits][: self.keep_steps]
            kept = [step for step in newest if not self.excuse(self.commits[step], from_s, to_s)]
            if not any(began_s <= to_s and (end_s is None or end_s >= from_s) for began_s, end_s in self.storage_away):
                kept += [step for step in self.timeline if step in self.durable]
            return max(kept, key=self.timeline.index, default=None)

    def excuse(self, commit: Commit, from_s: float, to_s: float) -> str:
        """Say why a commit may be missing between two moments, or "" if it must be there."""
        since_s = commit.safe_since_s
        put_s = self.put_s.get(commit.step, 0.0)
        lost = {
            h.domain
            for h in self.harms
            if (h.kind == "lost" and h.at_s >= (since_s if since_s is not None else put_s))
            or (h.kind == "rot-file" and h.at_s >= put_s)
            or (h.kind == "rot" and not h.is_repaired)
        }
        gone_now = {h.domain for h in self.harms if h.kind == "away" and _overlaps(h, from_s, to_s)}
        if not lost | gone_now:
            return ""
        if since_s is None:
            return f"it was committed degraded, and {sorted(lost | gone_now)} lost memory or were away"
        away = {h.domain for h in self.harms if h.kind == "away" and _overlaps(h, since_s, to_s)}
        bad = lost | gone_now | away
        return f"{sorted(bad)} lost memory or were away" if len(bad) >= self.replicas else ""

    def may_have_no_history(self) -> bool:
        """Return whether nothing was committed, or the memory of every domain was destroyed and nothing is durable."""
        with self.lock:
            lost = {h.domain for h in self.harms if h.kind == "lost"}
            has_commits = any(step in self.commits for step in self.timeline)
            return not has_commits or (lost >= self.domains and not self.durable)


def _overlaps(harm: Harm, from_s: float, to_s: float) -> bool:
    return harm.at_s <= to_s and (harm.until_s is None or harm.until_s >= from_s)


# -- story --------------------------------------------------------------------------------------------
# What happened in a round, in order, for a person: faults, observations, verdicts.


@dataclass(frozen=True)
class BrokenPromise:
    """A promise that was broken."""

    kind: str
    at_s: float
    text: str


@dataclass
class Story:
    """The lines of a round, with the seconds since it began; every thread of the round may write."""

    began_s: float = field(default_factory=time.monotonic)
    lines: list[str] = field(default_factory=list)
    violations: list[BrokenPromise] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)  # gets, bytes, commits and the like
    faults: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def now_s(self) -> float:
        """Return the seconds since the round began."""
        return time.monotonic() - self.began_s

    def log(self, text: str) -> None:
        """Add a line."""
        with self.lock:
            self.lines.append(f"{self.now_s():8.2f}  {text}")

    def fault(self, kind: str, text: str) -> None:
        """Add a fault."""
        with self.lock:
            self.faults[kind] += 1
        self.log(f"FAULT {kind}: {text}")

    def violate(self, kind: str, text: str) -> None:
        """Note that a promise was broken; the round goes on, to show the consequences."""
        with self.lock:
            self.violations.append(BrokenPromise(kind, self.now_s(), text))
        self.log(f"VIOLATION {kind}: {text}")

    def add(self, what: str, count: int = 1) -> None:
        """Count something."""
        with self.lock:
            self.counts[what] += count

"""Checks of gets, puts and reads; tests feed wrong answers to them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from memstore.testing.nemesis.ledger import Ledger, Step, Story
from memstore.testing.nemesis.load_meter import LoadMeter
from memstore.testing.nemesis.schedule import NemesisScenario
from memstore.testing.ranks.rank import disagreements
from memstore.testing.ranks.rank_process import RankFailed

STALL_MARGIN_S = 1.0
LATE_FACTOR = 3.0  # so many seconds a put may take for each second that the machine overslept
# The first put claims memory on all hosts, so its bound is connect_timeout_s (60) with some slack, not the budget.
FIRST_PUT_S = 75.0


class RestoreCheck:
    """The judge of every collective get of a round."""

    def __init__(self, scenario: NemesisScenario, ledger: Ledger, story: Story) -> None:
        self.scenario, self.ledger, self.story = scenario, ledger, story

    def judge(
        self,
        attempt: int,
        got: Sequence[dict[str, Any]],
        failed: Sequence[RankFailed],
        began_s: float,
        ended_s: float,
        place: Sequence[str],
    ) -> None:
        """Check the replies of all ranks: one step, right bytes, in the lineage, and as new as was promised."""
        demanded = self.ledger.demanded(began_s, ended_s)
        if failed:
            self._judge_failure(failed, demanded)
            return
        self.story.add("gets", len(got))
        self.story.add("bytes_compared", sum(int(reply["nbytes"]) for reply in got))
        for kind, words in disagreements(got):
            self.story.violate(kind, words)
        first = got[0]
        found: Step | None = None if first["step"] is None else (int(first["attempt"]), int(first["step"]))
        self.story.log(
            f"restored {found} in {ended_s - began_s:.2f} s: {first.get('reason') or 'no history'}"
            f" (newest commit {self.ledger.newest_commit()}, demanded {demanded})"
        )
        self.check_step(found, demanded)
        known = found if found is None or self.ledger.is_in_lineage(found) else self.ledger.newest_commit()
        self.ledger.restored(attempt, known)

    def check_step(self, found: Step | None, demanded: Step | None) -> None:
        """Check that the step is of the lineage, and that no committed step is lost within the promise."""
        if found is None:
            if not self.ledger.may_have_no_history():
                self.story.violate(
                    "lost-history", f"get() returned None; the newest commit was {self.ledger.newest_commit()}"
                )
            return
        if not self.ledger.is_in_lineage(found):
            self.story.violate("foreign-step", f"restored {found}, which is not in the lineage of the newest attempt")
        elif demanded is not None and self._order(found) < self._order(demanded):
            self.story.violate("lost-step", f"restored {found}, but {demanded} was committed and within the promise")

    def _order(self, step: Step) -> int:
        return self.ledger.timeline.index(step)

    def _judge_failure(self, failed: Sequence[RankFailed], demanded: Step | None) -> None:
        """Check a get that failed: RecoveryError is right only if no step is promised."""
        words = "; ".join(sorted({f"{f.error}: {f.message}" for f in failed}))[:1500]
        lost = [f for f in failed if f.error == "RecoveryError"]
        if lost and demanded is not None:
            self.story.violate("lost-step", f"{demanded} was committed and within the promise; get raised {words}")
        else:
            self.story.log(f"get failed on {len(failed)} ranks: {words}")
        foreign = [
            f
            for f in failed
            if f.error
            in ("TypeError", "KeyError", "ValueError", "AttributeError", "AssertionError", "IndexError", "OSError")
        ]
        if foreign:
            self.story.violate("foreign-error", words)


def check_put(
    scenario: NemesisScenario,
    story: Story,
    meter: LoadMeter,
    paused_s: Sequence[Sequence[float]],
    rank: int,
    row: dict[str, Any],
) -> None:
    """Check that a put did not raise, and blocked no longer than its budget and what the machine overslept."""
    story.add("puts")
    step, stall_s, began_s, ended_s = row["step"], row["stall_s"], row["began_s"], row["ended_s"]
    if row["error"]:
        kind = "first-put-raised" if row["is_first"] else "put-raised"
        story.violate(kind, f"rank {rank} step {step}: {row['error']}")
        return
    bound_s = stall_bound_s(scenario.stall_budget_s, meter.late_s(began_s, ended_s), is_first=row["is_first"])
    bound_s += sum(max(0.0, min(ended_s, to) - max(began_s, since)) for since, to in paused_s)
    if stall_s > bound_s:
        story.violate(
            "stall",
            f"rank {rank} step {step} blocked for {stall_s:.2f} s; bound {bound_s:.2f} s, machine late by "
            f"{meter.late_s(began_s, ended_s):.2f} s in {ended_s - began_s:.2f} s",
        )


def stall_bound_s(budget_s: float, late_s: float, *, is_first: bool) -> float:
    """Return how long a put may block on a machine that overslept so many seconds meanwhile."""
    return (FIRST_PUT_S if is_first else budget_s) + STALL_MARGIN_S + LATE_FACTOR * late_s


def check_read(rows: Sequence[dict[str, Any]], story: Story, where: str) -> None:
    """Check the bytes that a reader got; while faults go on it may be refused."""
    for row in rows:
        if row.get("error"):
            story.add("reads_refused")
            story.log(f"reader on {where}: rank {row['rank']}: {row['error'][:300]}")
            continue
        story.add("reads")
        story.add("bytes_compared", int(row["nbytes"]))
        if row["problem"]:
            story.violate(
                "wrong-bytes",
                f"reader on {where}: rank {row['rank']} step {row['step']} of attempt {row['attempt']}: "
                f"{row['problem']}",
            )


def wait_limit_s(limit_s: float, meter: LoadMeter, since_s: float) -> float:
    """Return a limit, lengthened by what the machine overslept since a moment."""
    return limit_s + LATE_FACTOR * meter.late_s(since_s, time.monotonic())

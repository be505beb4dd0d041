"""What breaks a promise of a drill whose training goes on; judged on what ranks brought back, no cluster."""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import Any, cast

import pytest

import memstore.drills.scenes.scene as scene_module
from memstore.config import Config
from memstore.drills.model.catalogue import find
from memstore.drills.model.options import Options
from memstore.drills.model.promises import GOES_ON, Promise
from memstore.drills.model.report import Report, Timeline
from memstore.drills.run.flows import GoesOn, Restart
from memstore.drills.scenes.scene import Scene
from memstore.drills.sites.drill_context import DrillContext
from memstore.errors import DrillError
from memstore.testing.ranks.rank import PutRow, Restored

GOOD = Restored(0, step=9, verdict="local", nbytes=64, bytes_equal=64)


class FakeJob:
    """A job with a newest committed step, and with what its ranks read."""

    def __init__(self, committed: int, read: list[Restored]) -> None:
        self.committed, self.results = committed, read

    def committed_step(self) -> int:
        return self.committed

    def put(self, first: int, last: int, what: str) -> list[PutRow]:
        return []

    def read(self, step: int, shift: int, *, is_altered: bool = False) -> list[Restored]:
        return self.results

    def copies_text(self) -> str:
        return "2 of 2 copies"

    def wait_redundant(self) -> dict[str, Any]:
        raise DrillError("a copy is missing")


def goes_on(*, committed: int = 9, read: list[Restored] | None = None, promise: Promise | None = None) -> GoesOn:
    """A flow whose job had committed step 5 before the fault; no site is there, so a call to it would fail."""
    report = Report("freeze-holder", 7, "", step_before=5)
    context = DrillContext(
        find("freeze-holder"),
        cast(Any, None),
        Options(seed=7),
        Config(stall_budget_s=1.0),
        promise or Promise("", resume_s=0.01),
        random.Random(7),
        report,
        Timeline(report, lambda line: None),
        job=cast(Any, FakeJob(committed, [GOOD] if read is None else read)),
    )
    return GoesOn(context, Scene(context))


def test_a_whole_newest_step_keeps_the_promise() -> None:
    """Every shard read twice, each byte equal: verified, nothing lost."""
    flow = goes_on()
    flow.check()
    assert flow.context.broken_promises == []
    report = flow.context.report
    assert (report.verdict, report.step_restored, report.rpo_steps, report.is_verified) == (GOES_ON, 9, 0, True)
    assert report.bytes_compared == 128


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (Restored(1, step=9, nbytes=64, bytes_equal=63, differences=("state: 1 of 64 bytes differ",)), "bytes differ"),
        (Restored(1, error="RecoveryError", message="nothing is whole"), "nothing is whole"),
        (Restored(1, step=9, nbytes=0, bytes_equal=0), "differs from the one made again"),
    ],
)
def test_a_byte_that_differs_or_a_shard_that_cannot_be_read_breaks_it(bad: Restored, words: str) -> None:
    """One shard of all is enough, and so is one of which nothing was compared."""
    flow = goes_on(read=[GOOD, bad])
    flow.check()
    broken = flow.context.broken_promises
    assert not flow.context.report.is_verified
    assert any(words in text for text in broken), broken


@pytest.mark.parametrize(
    ("row", "words"),
    [(PutRow(7, 2.5), "took 2.5 s of at most 2.0 s"), (PutRow(7, 0.1, "OSError: no"), "step 7 raised OSError: no")],
)
def test_a_put_that_stalls_or_raises_breaks_it(monkeypatch: pytest.MonkeyPatch, row: PutRow, words: str) -> None:
    """A stall beyond the budget and a second of slack, or any exception, is named with its step (promise 5)."""
    monkeypatch.setattr(scene_module, "put_rows", lambda calls, what: [PutRow(6, 1.9), row])
    flow = goes_on()
    flow.scene.end_puts([])
    broken = flow.context.broken_promises
    assert len(broken) == 1
    assert words in broken[0]
    assert flow.context.report.stall_s == max(1.9, row.stall_s)


@pytest.mark.parametrize(("committed", "is_kept"), [(5, False), (6, True)])
def test_commits_that_were_promised_meanwhile_must_come(
    monkeypatch: pytest.MonkeyPatch, committed: int, is_kept: bool
) -> None:
    """With the fault in place a newer step is committed in time, or the promise is broken."""
    monkeypatch.setattr(scene_module, "put_rows", lambda calls, what: [PutRow(6, 0.0)])
    flow = goes_on(committed=committed, promise=Promise("", resume_s=0.01, has_commits_meanwhile=True))
    flow.recover()
    broken = flow.context.broken_promises
    assert (broken == []) == is_kept, broken
    assert {line.label for line in flow.context.report.timeline} == {"training", *(["committed"] if is_kept else [])}


@pytest.mark.parametrize(
    ("committed", "words"),
    [
        (17, "no step was committed within 0.01 s after the outage"),
        (18, "copies are not complete again: a copy is mis"),
    ],
)
def test_after_the_fault_a_new_step_and_all_copies_must_come(committed: int, words: str) -> None:
    """A step beyond those put during the fault (5 and 12 more) must be committed; then every copy must be there."""
    flow = goes_on(committed=committed)
    flow.wait_for_recovery()
    assert len(flow.context.broken_promises) == 1
    assert words in flow.context.broken_promises[0]
    assert (flow.context.report.seconds["resume"] is not None) == (committed > 17)


@pytest.mark.parametrize(
    ("moved_to", "is_kept"), [({"h3"}, True), ({"h1", "h3"}, False), ((), False)], ids=["elsewhere", "to one", "none"]
)
def test_bytes_that_are_local_on_a_host_without_a_copy_came_from_a_peer_by_repair(
    moved_to: Collection[str], is_kept: bool
) -> None:
    """A slow restart finds repair done; on a host that had a copy, local bytes show that the fault took nothing."""
    context = goes_on(promise=Promise("", verdicts=frozenset({"peer", "mixed"}), needs="peer")).context
    context.report.step_before, context.report.is_verified = 9, True
    flow = Restart(context, Scene(context))
    flow.scene.holders, flow.moved_to, flow.results = ["h1", "h2"], frozenset(moved_to), (GOOD,)
    context.report.bytes_by_tier = {"local": 64, "peer": 0, "durable": 0}
    flow.check()
    assert (context.broken_promises == []) == is_kept, context.broken_promises

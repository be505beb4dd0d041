"""What breaks a promise of a drill whose training goes on; judged on what ranks brought back, no cluster."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

import memstore.drills.scenes.scene as scene_module
from memstore.config import Config
from memstore.drills.model.promises import GOES_ON, Promise
from memstore.drills.model.report import Report, Timeline
from memstore.drills.ranks.ranks import PutRow, Restored
from memstore.drills.run.flows import GoesOn
from memstore.drills.run.runner import DrillRun
from memstore.drills.scenes.scene import Scene

GOOD = Restored(0, step=9, verdict="local", nbytes=64, bytes_equal=64)


class FakeJob:
    """Knows the newest committed step, and what ranks read."""

    def __init__(self, committed: int, read: list[Restored]) -> None:
        self.committed, self.results = committed, read

    def committed_step(self) -> int:
        return self.committed

    def read(self, step: int, shift: int, *, is_altered: bool = False) -> list[Restored]:
        return self.results


def fake_run(*, committed: int = 9, read: list[Restored] | None = None, promise: Promise | None = None) -> Any:
    """As much of a run as a flow looks at: step 5 was committed before the fault."""
    report = Report("fake", 7, "", step_before=5)
    run = SimpleNamespace(
        site=None, rng=None, options=SimpleNamespace(is_beyond=False, is_altered=False),
        config=Config(stall_budget_s=1.0), promise=promise or Promise("", resume_s=0.01), report=report,
        timeline=Timeline(report, lambda line: None), broken=[],
        job=FakeJob(committed, [GOOD] if read is None else read),
    )  # fmt: skip
    run.scene = Scene(cast(DrillRun, run))
    return run


def test_a_whole_newest_step_keeps_the_promise() -> None:
    """Every shard read twice, each byte equal: verified, nothing lost."""
    run = fake_run()
    GoesOn(run).check()
    assert run.broken == []
    report = run.report
    assert (report.verdict, report.step_restored, report.rpo_steps, report.is_verified) == (GOES_ON, 9, 0, True)
    assert report.bytes_compared == 128


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (Restored(1, step=9, nbytes=64, bytes_equal=63, differences=("state: 1 of 64 bytes differ",)), "bytes differ"),
        (Restored(1, error="RecoveryError", message="nothing is whole"), "nothing is whole"),
        (Restored(1, step=9, nbytes=0, bytes_equal=0), "differs from the one made anew"),
    ],
)
def test_a_byte_that_differs_or_a_shard_that_cannot_be_read_breaks_it(bad: Restored, words: str) -> None:
    """One shard of all is enough, and so is one of which nothing was compared."""
    run = fake_run(read=[GOOD, bad])
    GoesOn(run).check()
    assert not run.report.is_verified
    assert any(words in text for text in run.broken), run.broken


@pytest.mark.parametrize(
    ("row", "words"),
    [(PutRow(7, 2.5), "took 2.5 s of at most 2.0 s"), (PutRow(7, 0.1, "OSError: no"), "step 7 raised OSError: no")],
)
def test_a_put_that_stalls_or_raises_breaks_it(monkeypatch: pytest.MonkeyPatch, row: PutRow, words: str) -> None:
    """A stall beyond the budget and a second of slack, or any exception, is named with its step (promise 5)."""
    monkeypatch.setattr(scene_module, "collect", lambda calls, what: [[PutRow(6, 1.9), row]])
    run = fake_run()
    run.scene.end_puts([])
    assert len(run.broken) == 1
    assert words in run.broken[0]
    assert run.report.stall_s == max(1.9, row.stall_s)


@pytest.mark.parametrize(("committed", "is_kept"), [(5, False), (6, True)])
def test_commits_that_were_promised_meanwhile_must_come(
    monkeypatch: pytest.MonkeyPatch, committed: int, is_kept: bool
) -> None:
    """With the fault in place a step beyond the one of before is committed in time, or the promise is broken."""
    monkeypatch.setattr(scene_module, "collect", lambda calls, what: [[PutRow(6, 0.0)]])
    run = fake_run(committed=committed, promise=Promise("", resume_s=0.01, has_commits_meanwhile=True))
    GoesOn(run).recover()
    assert (run.broken == []) == is_kept, run.broken

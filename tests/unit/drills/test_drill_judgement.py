"""What breaks the promise of a drill; judged on what ranks brought back or noted, no cluster."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Collection
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

import memstore.drills.scenes.scene as scene_module
from memstore.adapters.data import SampleOrder
from memstore.config import Config
from memstore.drills.model.catalogue import BEYOND_REFUSED, GOES_ON, IN_PLACE, REFUSED, Options, Promise, find
from memstore.drills.model.report import Report, Timeline
from memstore.drills.ranks.in_place import ENTERED, LEFT, RESTORED, TRAINED, Gate, Note, RankEnd, notes
from memstore.drills.ranks.in_place_model import Samples, unbroken
from memstore.drills.run.flows import GoesOn, InPlaceFlow, Restart
from memstore.drills.run.judgement import Played, broken_in_place
from memstore.drills.scenes.scene import Scene
from memstore.drills.scenes.scenes_in_place import InPlaceKillRank, InPlacePause
from memstore.drills.sites.scratch import DrillContext
from memstore.errors import DrillError
from memstore.testing.ranks.rank import PutRow, Restored

# -- drill flows --------------------------------------------------------------------------------------
# What breaks a promise of a drill whose training goes on; judged on what ranks brought back, no cluster.


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


# -- drill in place -----------------------------------------------------------------------------------
# What breaks a promise of recovery in place; judged on what ranks noted, no cluster.


SEED, RANKS, LAST, LOST, BEFORE = 7, 3, 9, 1, 4  # step BEFORE is restored after LOST is lost in step BEFORE + 2
ORACLE = unbroken(SEED, RANKS, LAST + 1)
PIDS = {rank: 100 + rank for rank in range(RANKS)}
IN_PLACE_GOOD = Restored(0, step=LAST, verdict="local", nbytes=64, bytes_equal=64)


def made(rank: int, generation: int, what: str, step: int = -1, **fields: Any) -> Note:
    """Make a note; the lost rank has a new process from generation 1 on."""
    pid = 200 + rank if generation and rank == LOST else PIDS[rank]
    return Note(what, 10.0 * generation + step, rank, generation, pid, step=step, **fields)


def trained(rank: int, generation: int, step: int) -> Note:
    return made(rank, generation, TRAINED, step, loss=ORACLE.losses[rank][step])


def played(*, is_refused: bool = False) -> Played:
    """Play what is as promised: one rank is lost, the steps that were not committed are trained again."""
    found = []
    for rank in range(RANKS):
        restored = (
            Restored(rank, error="RecoveryError", message="rank 1 is lost, with h1 and h2")
            if is_refused
            else (
                Restored(
                    rank,
                    BEFORE,
                    "local",
                    nbytes=64,
                    bytes_equal=64,
                    seconds_by_phase={"gather": 0.1, "transfer": 0.1, "load": 0.1},
                    bytes_by_tier={"local": 64, "peer": 0, "durable": 0},
                )
            )
        )
        found += [made(rank, 0, ENTERED), *(trained(rank, 0, step) for step in range(BEFORE + 3))]
        found += [made(rank, 0, LEFT)] if rank != LOST else []
        found += [made(rank, 1, ENTERED), made(rank, 1, RESTORED, restored=restored)]
        found += [] if is_refused else [trained(rank, 1, step) for step in range(BEFORE + 1, LAST + 1)]
    ends = [] if is_refused else [RankEnd(1, [list(b) for b in ORACLE.batches], IN_PLACE_GOOD) for _ in range(RANKS)]
    return Played(sorted(found, key=lambda note: note.at_s), ends, LAST, PIDS, {LOST})


def without(found: Played, is_left_out: Callable[[Note], bool]) -> Played:
    return replace(found, notes=[note for note in found.notes if not is_left_out(note)])


def with_history(change: Callable[[list[list[int]]], None]) -> Played:
    found = played()
    change(found.ends[2].history)
    return found


def with_note(old: Note, **fields: Any) -> Played:
    found = played()
    at = next(i for i, n in enumerate(found.notes) if (n.what, n.rank, n.generation, n.step) == _key(old))
    changed = msgspec.structs.replace(found.notes[at], **fields)
    return replace(found, notes=[*found.notes[:at], changed, *found.notes[at + 1 :]])


def _key(note: Note) -> tuple[str, int, int, int]:
    return note.what, note.rank, note.generation, note.step


def test_a_recovery_as_promised_breaks_nothing() -> None:
    """The others keep their processes, all losses are equal, each sample is there once."""
    assert broken_in_place(played(), ORACLE) == []
    assert broken_in_place(played(is_refused=True), ORACLE) == []


def other_bit(loss: str) -> str:
    """Return a loss whose last digit is another one."""
    head, tail = loss.split("p")
    return f"{head[:-1]}{'1' if head[-1] == '0' else '0'}p{tail}"


LOSS = ORACLE.losses[0][8]
BROKEN: dict[str, tuple[Played, str]] = {
    "doubled-sample": (with_history(lambda h: h[6].__setitem__(0, h[6][1])), "step 6: too many"),
    "missing-sample": (with_history(lambda h: h[6].pop()), r"step 6: too many \[\], missing \[\d+\]"),
    "doubled-step": (with_history(lambda h: h.insert(6, h[5])), "committed with 11 steps, not 10"),
    "missing-step": (with_history(lambda h: h.pop()), "committed with 9 steps, not 10"),
    "swapped-steps": (with_history(lambda h: h.insert(5, h.pop(6))), "other samples in step 5"),
    "changed-pid": (with_note(made(2, 1, ENTERED), pid=999), "rank 2 was not lost, and has changed its process: 102"),
    "kept-pid": (with_note(made(LOST, 1, ENTERED), pid=101), "rank 1 was lost, and nothing has taken the place"),
    "other-loss": (with_note(made(0, 1, TRAINED, 8), loss=other_bit(LOSS)), "rank 0, step 8, generation 1: the loss"),
    "other-loss-that-broke-off": (
        with_note(made(0, 0, TRAINED, 6), loss=other_bit(ORACLE.losses[0][6])),
        "rank 0, step 6, generation 0",
    ),
    "step-left-out": (without(played(), lambda n: (n.rank, n.step) == (2, 8)), r"rank 2 never trained the steps \[8\]"),
    "needless-generation": (replace(played(), lost=()), "no rank was lost, and all were brought into generation 1"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_whatever_differs_from_a_training_without_a_fault_breaks_the_promise(name: str) -> None:
    """One sample, one step, one bit of one loss or one process is enough, and is named."""
    found, words = BROKEN[name]
    text = "; ".join(broken_in_place(found, ORACLE))
    assert re.search(words, text), text


def test_the_oracle_has_the_samples_that_the_order_promises() -> None:
    """All ranks together, epoch after epoch; another seed has other samples and losses."""
    samples, batches = Samples(RANKS), []
    for epoch in range(4):
        orders = [
            SampleOrder(len(samples), global_batch=samples.global_batch, rank=rank, world_size=RANKS, seed=SEED)
            for rank in range(RANKS)
        ]
        for order in orders:
            order.go_to(epoch, 0)
        batches += [[*chain(*parts)] for parts in zip(*orders, strict=True)]
    assert batches[: LAST + 1] == ORACLE.batches
    assert unbroken(SEED, RANKS, LAST + 1) == ORACLE
    other = unbroken(SEED + 1, RANKS, LAST + 1)
    assert other.batches != ORACLE.batches
    assert not set(other.losses[0]) & set(ORACLE.losses[0])
    assert len({tuple(losses) for losses in ORACLE.losses}) == RANKS, "each rank has layers and samples of its own"


def test_a_note_that_was_broken_off_is_not_read(tmp_path: Path) -> None:
    """What a killed rank wrote in part is no note; the others are sorted by time."""
    first, second = trained(0, 0, 3), trained(1, 0, 2)
    data = msgspec.json.encode(first) + b"\n"
    (tmp_path / "0-100.notes").write_bytes(data + data[:20])
    (tmp_path / "1-101.notes").write_bytes(msgspec.json.encode(second) + b"\n")
    assert notes(tmp_path) == [second, first]


def test_the_gate_ends_after_its_last_step(tmp_path: Path) -> None:
    """A step may be trained up to the limit; after the last one there is none."""
    gate = Gate(tmp_path)
    gate.open(3)
    assert gate.wait(3)
    gate.open(5, is_last=True)
    assert [gate.wait(step) for step in (4, 5, 6)] == [True, True, False]


class InPlaceFakeJob:
    """A job whose training has ended."""

    limit = LAST

    def __init__(self, found: Played, error: str) -> None:
        self.found, self.error = found, error
        self.ranks = []

    def finish(self) -> tuple[list[RankEnd], str]:
        return list(self.found.ends), self.error

    def notes(self) -> list[Note]:
        return list(self.found.notes)

    def wait_redundant(self) -> None:
        raise DrillError("a copy is missing")


def flow_of(found: Played, *, error: str = "", is_pause: bool = False, promise: Promise | None = None) -> InPlaceFlow:
    """Make a flow that has the training behind it; no site is there, so a call to it would fail."""
    drill = find("in-place-pause" if is_pause else "in-place-kill-rank")
    report = Report(drill.name, SEED, "", step_before=BEFORE)
    context = DrillContext(
        drill,
        cast(Any, None),
        Options(seed=SEED),
        Config(),
        promise or drill.promise,
        random.Random(SEED),
        report,
        Timeline(report, lambda line: None),
        job=cast(Any, InPlaceFakeJob(found, error)),
    )
    scene = (InPlacePause if is_pause else InPlaceKillRank)(context)
    scene.lost, scene.rank, scene.holders = set(found.lost), LOST, ["h1", "h2"]
    scene.stopped_s = scene.woken_s = 0.0  # type: ignore[attr-defined]
    scene.recover = lambda: None  # type: ignore[method-assign]
    flow = InPlaceFlow(context, scene)
    flow.pids = PIDS
    flow.recover()
    flow.check()
    return flow


def test_the_flow_keeps_the_promise_of_a_lost_rank() -> None:
    """Nothing is lost, the report has the restore, and the last line says what was compared."""
    flow = flow_of(played())
    assert flow.context.broken_promises == []
    assert flow.context.report.rpo_steps == 0
    words = flow.pass_words()
    assert "2 of 3 ranks kept their processes" in words
    assert "36 losses equal, bit for bit · 60 samples committed, each once" in words


def test_the_flow_keeps_the_promise_of_a_pause() -> None:
    """No rank is restored; the bytes that were read at the end count."""
    found = without(replace(played(), lost=()), lambda note: note.generation == 1 or note.what == LEFT)
    found = replace(found, notes=[*found.notes, *(trained(r, 0, s) for r in range(RANKS) for s in range(7, LAST + 1))])
    flow = flow_of(found, is_pause=True)
    assert flow.context.broken_promises == []
    assert (flow.context.report.verdict, flow.context.report.is_verified) == (IN_PLACE, True)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"bytes_equal": 63, "differences": ("state: 1 of 64 bytes differ",)}, "1 of 64 bytes differ"),
        ({"step": BEFORE - 1}, "ranks got different steps"),
        ({"verdict": "durable"}, "ranks got different steps"),
    ],
)
def test_a_restore_that_differs_on_one_rank_breaks_it(bad: dict[str, Any], words: str) -> None:
    """Every rank gets the same step from the same place, and every byte of it."""
    found = played()
    restored = next(n.restored for n in found.notes if n.what == RESTORED and n.rank == 2)
    assert restored is not None
    flow = flow_of(with_note(made(2, 1, RESTORED), restored=replace(restored, **bad)))
    assert words in "; ".join(flow.context.broken_promises)


def test_bytes_of_the_newest_step_that_differ_break_it() -> None:
    """The read at the end counts as much as the restore."""
    found = played()
    bad = replace(IN_PLACE_GOOD, bytes_equal=63, differences=("state: 1 of 64 bytes differ",))
    flow = flow_of(replace(found, ends=[*found.ends[:2], replace(found.ends[2], read=bad)]))
    assert not flow.context.report.is_verified
    assert "1 of 64 bytes differ" in "; ".join(flow.context.broken_promises)


def test_copies_that_stay_missing_break_it() -> None:
    """After the training every copy has to be there again."""
    flow = flow_of(played())
    flow.wait_for_recovery()
    assert "copies are not complete again: a copy is missing" in flow.context.broken_promises[0]


def test_beyond_the_tolerance_a_refusal_on_every_rank_is_promised() -> None:
    """Within it the same refusal breaks the promise, and so does any other end of the training."""
    refusal = "RecoveryError: no"
    flow = flow_of(played(is_refused=True), error=refusal, promise=BEYOND_REFUSED)
    assert flow.context.broken_promises == []
    assert flow.context.report.verdict == REFUSED
    assert flow.pass_words().startswith("refused: rank 1 is lost")
    assert "get() refused" in "; ".join(flow_of(played(is_refused=True), error=refusal).context.broken_promises)
    ended = flow_of(replace(played(), ends=[]), error="ValueError: a bug", promise=BEYOND_REFUSED)
    assert "the training ended by ValueError: a bug" in ended.context.broken_promises

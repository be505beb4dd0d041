"""What breaks a promise of recovery in place; judged on what ranks noted, no cluster."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from memstore.adapters.data import SampleOrder
from memstore.config import Config
from memstore.drills.model.catalogue import find
from memstore.drills.model.options import Options
from memstore.drills.model.promises import BEYOND_REFUSED, IN_PLACE, REFUSED, Promise
from memstore.drills.model.report import Report, Timeline
from memstore.drills.ranks.in_place import ENTERED, LEFT, RESTORED, TRAINED, Gate, Note, RankEnd, notes
from memstore.drills.ranks.in_place_model import Samples, unbroken
from memstore.drills.run.flows import InPlaceFlow
from memstore.drills.run.judgement_in_place import Played, broken_in_place
from memstore.drills.scenes.scenes_in_place import InPlaceKillRank, InPlacePause
from memstore.drills.sites.drill_context import DrillContext
from memstore.errors import DrillError
from memstore.testing.ranks.rank import Restored

SEED, RANKS, LAST, LOST, BEFORE = 7, 3, 9, 1, 4  # step BEFORE is restored after LOST is lost in step BEFORE + 2
ORACLE = unbroken(SEED, RANKS, LAST + 1)
PIDS = {rank: 100 + rank for rank in range(RANKS)}
GOOD = Restored(0, step=LAST, verdict="local", nbytes=64, bytes_equal=64)


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
    ends = [] if is_refused else [RankEnd(1, [list(b) for b in ORACLE.batches], GOOD) for _ in range(RANKS)]
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


class FakeJob:
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
        job=cast(Any, FakeJob(found, error)),
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
    bad = replace(GOOD, bytes_equal=63, differences=("state: 1 of 64 bytes differ",))
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

"""The demo's checks must fail on what they exist to catch: each gets records of a run that went wrong in one way."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from memstore.demo.records import (
    FROM_PEER,
    KEPT,
    NOTHING_REDONE,
    RESUMED,
    SAME_LOSSES,
    JoinedRecord,
    Kill,
    RestoredRecord,
    RunRecord,
    StepRun,
    check_all,
    check_in_place,
    committed_step,
    read_run,
    steps_redone,
    write,
)

STEPS = 8
HOSTS = ["h1", "h3", "h2", "h4"]
KILL = Kill("h2", 3, 100.0)


def loss(step: int) -> str:
    return (1.0 / (step + 3)).hex()


def ran(attempt: int, steps: range, start_s: float, rank: int = 0) -> list[StepRun]:
    return [StepRun(attempt, rank, s, loss(s), s - 1, 0.001, start_s + i) for i, s in enumerate(steps)]


def joined(attempt: int, hosts: list[str], wall_s: float) -> list[JoinedRecord]:
    return [
        JoinedRecord(attempt, rank, host, 100 * attempt + rank, wall_s, 0.1, wall_s) for rank, host in enumerate(hosts)
    ]


def restored(step: int, moved: tuple[int, ...], nbytes: dict[str, int]) -> list[RestoredRecord]:
    return [RestoredRecord(2, rank, step, 100, "peer", 0, moved, nbytes, {}, 0.5, 110.0) for rank in range(4)]


def good_run() -> RunRecord:
    return RunRecord(
        joined=[*joined(1, HOSTS, 90.0), *joined(2, ["h1", "h3", "h3", "h4"], 109.0)],
        restored=restored(4, (2,), {"local": 300, "peer": 100, "durable": 0}),
        steps=[*ran(1, range(5), 91.0), *ran(2, range(5, STEPS), 111.0)],
    )


UNDISTURBED = RunRecord(steps=ran(1, range(STEPS), 0.0))


def failed(run: RunRecord) -> set[str]:
    return {check.name for check in check_all(run, UNDISTURBED, KILL, STEPS) if not check.is_ok}


def test_a_good_run_passes() -> None:
    """Step 4 was committed in the moment of the kill and restored: nothing is lost and nothing runs twice."""
    assert failed(good_run()) == set()
    assert committed_step(good_run(), KILL) == 4


def test_starting_over_is_caught() -> None:
    """Without restore the losses repeat themselves exactly, so three other checks have to notice."""
    run = replace(good_run(), restored=[], steps=[*ran(1, range(5), 91.0), *ran(2, range(STEPS), 111.0)])
    assert failed(run) == {RESUMED, NOTHING_REDONE, FROM_PEER}


def test_an_older_step_is_caught() -> None:
    """Going back to step 1 runs committed steps again."""
    run = replace(
        good_run(),
        restored=restored(1, (2,), {"peer": 100}),
        steps=[*ran(1, range(5), 91.0), *ran(2, range(2, STEPS), 111.0)],
    )
    assert failed(run) == {RESUMED, NOTHING_REDONE}


def test_a_step_in_flight_may_run_twice() -> None:
    """Step 4 ran but was not committed: doing it again is counted, not an error."""
    run = replace(
        good_run(),
        restored=restored(3, (2,), {"peer": 100}),
        steps=[*ran(1, range(5), 91.0), *ran(2, range(4, STEPS), 111.0)],
    )
    assert failed(run) == set()
    assert steps_redone(run) == [4]


def test_a_skipped_step_is_caught() -> None:
    """Claiming a step that never ran leaves a hole in the losses."""
    run = replace(good_run(), steps=[*ran(1, range(5), 91.0), *ran(2, range(6, STEPS), 111.0)])
    assert failed(run) == {RESUMED, SAME_LOSSES}


@pytest.mark.parametrize(
    ("moved", "nbytes"),
    [((2,), {"local": 400, "peer": 0}), ((1,), {"local": 300, "peer": 100}), ((2,), {"peer": 100, "durable": 1})],
)
def test_bytes_from_elsewhere_are_caught(moved: tuple[int, ...], nbytes: dict[str, int]) -> None:
    """No peer bytes, another rank's bytes, or help from a disk do not count as the peer's memory."""
    assert failed(replace(good_run(), restored=restored(4, moved, nbytes))) == {FROM_PEER}


def test_a_host_without_ranks_proves_nothing() -> None:
    """If no rank lived on the killed host, the run shows nothing."""
    run = replace(good_run(), joined=[*joined(1, ["h1", "h3", "h1", "h4"], 90.0), *good_run().joined[4:]])
    assert failed(run) == {FROM_PEER}


def test_one_changed_bit_is_caught() -> None:
    """A loss that differs in its last bit on one rank of one step is another loss."""
    steps = good_run().steps
    value = float.fromhex(steps[6].loss)
    other = replace(steps[6], rank=1, loss=(value * (1 + 2**-52)).hex())
    assert failed(replace(good_run(), steps=[*steps, other])) == {SAME_LOSSES}


def test_fresh_weights_at_the_right_step_are_caught() -> None:
    """Resuming the counter without the state passes by the steps and fails by the losses."""
    bad = [replace(s, loss=(5.0).hex()) for s in ran(2, range(5, STEPS), 111.0)]
    assert failed(replace(good_run(), steps=[*ran(1, range(5), 91.0), *bad])) == {SAME_LOSSES}


def test_nothing_after_the_kill_is_caught() -> None:
    """A run that never came back fails, also if it wrote a result before."""
    run = replace(good_run(), restored=[], steps=ran(1, range(5), 91.0))
    assert failed(run) == {RESUMED, FROM_PEER, SAME_LOSSES}


@pytest.mark.parametrize(
    ("pids", "is_kept"),
    [({}, True), ({0: 200, 1: 201, 2: 202, 3: 203}, False), ({3: 203}, False), ({2: 102}, False)],
    ids=["the lost one is new", "all are new", "a survivor is new", "the lost one is the same"],
)
def test_a_survivor_with_a_new_process_is_caught(pids: dict[int, int], is_kept: bool) -> None:
    """In place, the process of rank 2, which was lost, is a new one, and each other rank's is the one it was."""
    before, after = good_run().joined[:4], good_run().joined[4:]
    expected = {0: 100, 1: 101, 2: 202, 3: 103, **pids}
    run = replace(good_run(), joined=[*before, *(replace(joined, pid=expected[joined.rank]) for joined in after)])
    bad = {check.name for check in check_in_place(run, UNDISTURBED, KILL, STEPS) if not check.is_ok}
    assert bad == (set() if is_kept else {KEPT})


def test_a_journal_keeps_what_was_written(tmp_path: Path) -> None:
    """Records come back equal; a line that a kill cut short is left out."""
    run = good_run()
    for record in [*run.joined, *run.restored, *run.steps]:
        write(tmp_path, record)
    file = next(tmp_path.glob("rank0-*.jsonl"))
    whole = read_run(tmp_path)
    with file.open("a") as cut:
        cut.write('{"kind": "step", "attempt": 2')
    assert read_run(tmp_path) == whole
    assert sorted(whole.steps, key=lambda s: s.wall_s) == run.steps
    assert whole.restored == run.restored
    assert whole.joined == run.joined

"""What counts without Ray, from journals and copies alone: pure (R16, R22, R24, R31, R37)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from parity_sums import added

from memstore.core.cluster.facts import AttemptOpened, ByRank, RestoreDecided, StepCommitted, StepRetired, kept_by
from memstore.core.format.manifest import chunk_digest
from memstore.core.journal.records import Entry
from memstore.core.salvage import SalvagedFacts, check_same_run, choose, decode_row, jobs_of
from memstore.errors import ConfigError, IntegrityError
from recovery.inventory import Copy, ShardId, ShardSpec

CONFIG = {"replicas": 2, "in_flight": 1, "parity": 0, "scatter": 1, "keep_steps": 1}


def spec(rank: int, step: int) -> ShardSpec:
    """Return the spec of a shard of two chunks."""
    return ShardSpec(f"{rank:016x}{step:016x}", 8, 4, 2, 2)


def copy(rank: int, step: int, *, attempt: int = 1, host: str = "h0", missing: tuple[int, ...] = ()) -> Copy:
    """Return a copy of a rank's shard."""
    return Copy(ShardId("train", attempt, step, rank), spec(rank, step), host, frozenset(missing))


def opened(attempt: int, *, parent: int | None = None, wall_s: float = 100.0) -> AttemptOpened:
    """Return the fact of an attempt of two ranks."""
    hosts = ("h0", "h1")
    return AttemptOpened(
        "train", attempt, 2, parent, None, False, "host", CONFIG, kept_by(hosts, hosts), hosts, "run", wall_s
    )


def committed(step: int, attempt: int = 1) -> StepCommitted:
    """Return the fact of a commit."""
    digests, hosts = (spec(0, step).digest, spec(1, step).digest), (("h0", "h1"), ("h0", "h1"))
    return StepCommitted("train", attempt, step, 2, ByRank.of(digests, hosts), "host", False, "", 100.0)


def journal(*facts: AttemptOpened | StepCommitted | StepRetired | RestoreDecided) -> list[Entry]:
    """Return a journal with these facts."""
    return [Entry(1, number, fact) for number, fact in enumerate(facts, 1)]


def both(step: int, **fields: int) -> list[Copy]:
    """Return a whole copy of each rank's shard."""
    return [copy(rank, step, **fields) for rank in (0, 1)]


def test_a_step_is_put_together_from_what_two_hosts_have() -> None:
    """Each host has other chunks of the newest committed step: together they are whole."""
    halves = [copy(0, 5, missing=(0,)), copy(0, 5, host="h1", missing=(1,)), copy(1, 5, host="h1")]
    job = jobs_of([journal(opened(1), committed(4), committed(5))], [*both(4), *halves])["train"]
    assert getattr(choose(job).step, "step", None) == 5


def test_a_step_that_lacks_chunks_is_named_and_an_older_one_taken() -> None:
    """The reason says of which rank what lacks, and where it was."""
    job = jobs_of([journal(opened(1), committed(4), committed(5))], [*both(4), copy(0, 5)])["train"]
    found = choose(job)
    assert getattr(found.step, "step", None) == 4
    assert "no tier has all bytes of rank 1" in found.why
    assert "h0, h1" in found.why


def test_an_uncommitted_step_is_named_and_taken_only_if_asked() -> None:
    """A get could return it; without Ray a person decides."""
    job = jobs_of([journal(opened(1), committed(4))], [*both(4), *both(5)])["train"]
    assert getattr(choose(job).step, "step", None) == 4
    assert "attempt 1 step 5 is whole" in choose(job).why
    assert getattr(choose(job, has_uncommitted=True).step, "step", None) == 5


def test_the_lineage_and_retired_steps_count_as_for_a_get() -> None:
    """A rewind hides what it left behind, and a retired step is passed over."""
    rewound = journal(
        opened(1), committed(4), committed(5), opened(2, parent=1), RestoreDecided("train", 2, 0, 1, 4, 100.0)
    )
    assert getattr(choose(jobs_of([rewound], [*both(4), *both(5)])["train"]).step, "step", None) == 4
    retired = journal(opened(1), committed(4), committed(5), StepRetired("train", 1, 5, "it killed the job"))
    assert getattr(choose(jobs_of([retired], [*both(4), *both(5)])["train"]).step, "step", None) == 4


def test_what_a_newer_commit_gave_up_is_not_offered() -> None:
    """A host that was away still has an older step that was never committed."""
    job = jobs_of([journal(opened(1), committed(4))], [*both(3), *both(4)])["train"]
    assert {step.step for step in job.copies} == {4}
    assert getattr(choose(job, has_uncommitted=True).step, "step", None) == 4


def test_journals_that_are_parts_of_one_are_one() -> None:
    """A host that died early has the first part of it, and one without a journal adds its copies."""
    whole = journal(opened(1), committed(4), committed(5))
    job = jobs_of([whole[:2], whole, []], both(5))["train"]
    assert getattr(choose(job).step, "step", None) == 5


def test_two_runs_of_one_name_are_refused() -> None:
    """An attempt of one number that was opened at another moment is another run's; a marker says it, too."""
    here = journal(opened(1), opened(2, parent=1, wall_s=200.0))
    check_same_run("train", here, journal(opened(1)), "there")
    check_same_run("train", here, {2: 200.0, 3: 1.0}, "there")
    for other in (journal(opened(1, wall_s=7.0)), {1: 7.0}):
        with pytest.raises(ConfigError, match="there has another run of job 'train': its attempt 1"):
            check_same_run("train", here, other, "there")


def test_facts_come_back_or_are_refused() -> None:
    """Any flipped bit, and any cut, is an IntegrityError; records that cannot be read are passed over."""
    facts = SalvagedFacts("h0", (journal(opened(1))[0].record, b"no record"), (b"manifest",))
    data = facts.encode()
    assert SalvagedFacts.decode(data) == facts
    assert [entry.fact for entry in facts.entries] == [opened(1)]
    sound = data[:-16].replace(b"manifests", b"manifesto")
    with pytest.raises(IntegrityError, match="bad contents"):
        SalvagedFacts.decode(sound + chunk_digest(sound))
    for at in range(len(data)):
        for bad in (data[:at], data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]):
            with pytest.raises(IntegrityError):
                SalvagedFacts.decode(bad)


@given(st.lists(st.binary(min_size=1, max_size=9), min_size=1, max_size=5), st.data())
def test_a_row_gives_any_one_chunk_back(chunks: list[bytes], data: st.DataObject) -> None:
    """By the definition of exclusive or, on numbers; chunks of a row may have different sizes."""
    lost = data.draw(st.integers(0, len(chunks) - 1))
    others = chunks[:lost] + chunks[lost + 1 :]
    parts = [(each, 1) for each in (added(chunks), *others)]
    assert decode_row(parts, len(chunks[lost])) == chunks[lost]


def test_copies_without_a_journal_are_those_of_the_newest_attempt() -> None:
    """Nothing says that they were committed, nor which attempt went on from which."""
    job = jobs_of([], [*both(4, attempt=1), *both(3, attempt=2)])["train"]
    assert choose(job).step is None
    found = choose(job, has_uncommitted=True).step
    assert found is not None
    assert (found.attempt, found.step) == (2, 3)

"""Of an attempt that is over journals keep its number, its parent and its key, not its processes (R16, R20, R22)."""

from __future__ import annotations

import pytest

from memstore.core import capacity
from memstore.core.cluster.facts import AttemptOpened, kept_by
from memstore.core.journal.fact_log import FactLog
from memstore.core.journal.records import Entry, entries_of
from memstore.testing.controller.holder import DirectedHolder
from memstore.testing.controller.world import ControllerWorld, trained

STEPS = 24  # of a launch: enough that half of a journal is needed no more


@pytest.fixture(autouse=True)
def _short_journals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "JOURNAL_NBYTES_MIN", 0)


def opened(holder: DirectedHolder) -> dict[int, AttemptOpened]:
    facts = [entry.fact for entry in entries_of("", holder.journal)]
    return {fact.attempt: fact for fact in facts if isinstance(fact, AttemptOpened)}


def restarted(world: ControllerWorld, last: int) -> None:
    """The job is launched again, goes on and commits some steps, which shortens the journals."""
    ranks = world.launch(3)
    world.check_restored(world.get(ranks))
    for step in range(last + 1, last + 1 + STEPS):
        assert world.put_all(ranks, step)
    world.run(1.0)


def test_only_the_newest_attempt_keeps_its_processes() -> None:
    """In the journals of all holders and in the controller; what lineage and launch keys need is there."""
    world, _ = trained(3, last=2)
    for number in range(4):
        restarted(world, 2 + STEPS * number)
    for holder in world.holders.values():
        found = opened(holder)
        assert sorted(found) == [1, 2, 3, 4, 5]
        assert [len(fact.hosts) for fact in found.values()] == [0, 0, 0, 0, 3]
        assert [len(fact.nonces) for fact in found.values()] == [0, 0, 0, 0, 3]
        assert len({fact.key for fact in found.values()}) == 5
    job = world.job()
    assert [len(attempt.members) for attempt in job.attempts.values()] == [0, 0, 0, 0, 3]
    assert [span.attempt for span in job.spans(5)] == [5, 4, 3, 2, 1]


def test_a_successor_goes_on_from_short_journals() -> None:
    """It knows the lineage, refuses spent keys, and all journals are as they were."""
    world, ranks = trained(3, last=2)
    spent = ranks[0].key
    for number in range(3):
        restarted(world, 2 + STEPS * number)
    before = world.job().spans(4)
    world.crash_controller()
    world.run(6.0)
    assert world.job().spans(4) == before
    again = world.join(0, 3, spent)
    world.run(1.0)
    assert again.error("join").startswith("FencedError")
    ranks = world.launch(3)
    answers = world.get(ranks)
    world.check_restored(answers)
    assert {answer["step"] for answer in answers} == {2 + 3 * STEPS}
    assert world.put_all(ranks, 3 + 3 * STEPS)


def test_an_attempt_keeps_its_processes_until_a_later_one_has_committed() -> None:
    """Until then it is what the job would go back to."""
    world, _ = trained(3, last=2)
    ranks = world.launch(3)
    world.get(ranks)
    world.run(2.0)
    assert [len(fact.hosts) for fact in opened(world.holders["h0"]).values()] == [3, 3]


def test_a_late_host_with_the_long_form_has_the_short_one_afterwards() -> None:
    """Its journal is of an earlier time: it is written again, and adds nothing to what the others know."""
    world, _ = trained(4, 3, last=2)
    world.kill_host("h3", keep_memory=True)
    world.run(7.0)
    restarted(world, 2)
    restarted(world, 2 + STEPS)
    assert len(opened(world.holders["h3"])[1].hosts) == 3
    world.return_host("h3")
    world.run(3.0)
    assert [len(fact.hosts) for fact in opened(world.holders["h3"]).values()] == [0, 0, 3]
    assert [len(attempt.members) for attempt in world.job().attempts.values()] == [0, 0, 3]


@pytest.mark.parametrize("is_long_first", [True, False])
def test_of_two_forms_of_a_fact_the_shorter_is_adopted(is_long_first: bool) -> None:
    """A controller died while it had the journals shortened: some holders had obeyed."""
    nonces, hosts = tuple(f"nonce-{n}" for n in range(9)), ("a", "b", "c") * 3
    long = AttemptOpened(
        "train", 1, 9, None, "k", False, "host", {"replicas": 2}, kept_by(nonces, hosts), hosts, "l", 1.0
    )
    short = AttemptOpened("train", 1, 9, None, "k", False, "host", {"replicas": 2}, kept_by((), ()), (), "l", 1.0)
    journals = [[Entry(1, 1, long)], [Entry(1, 1, short)]]
    log = FactLog(term=2)
    assert log.adopt(journals if is_long_first else journals[::-1]) == [short]

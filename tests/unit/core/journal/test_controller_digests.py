"""No committed step is lost although journals name its root digest alone, and a few hosts come late (R16, R24)."""

from __future__ import annotations

from itertools import product

import pytest

from memstore.core.cluster.facts import ByRank, StepCommitted
from memstore.core.journal.records import Entry, entries_of, with_parts
from memstore.core.salvage import choose, jobs_of
from memstore.testing.controller.world import ControllerWorld, trained
from recovery.inventory import Copy, ShardId, ShardSpec, StepId

STEP = StepId(1, 1)
WORLD = 3


def moved(world: ControllerWorld, rank: int) -> set[str]:
    """Have repair move a rank's copies to hosts that keep no digest of it: those that do are lost one by one."""
    keepers = set(world.job().commits[STEP].digests.keepers[rank])
    for host in sorted(keepers):
        world.kill_host(host)
        assert world.run_until(lambda: len(world.holders_of(STEP, rank)) == 2, 60.0)
    now = set(world.holders_of(STEP, rank))
    assert not now & keepers
    return now


def restarted(world: ControllerWorld) -> ByRank:
    """Replace the controller; return what the next one knows of the step's digests."""
    world.crash_controller()
    world.run(8.0)
    return world.job().commits[STEP].digests


def test_a_step_whose_copies_have_moved_is_proved_by_its_root() -> None:
    """No journal that is left has the digest of one rank; that of its copies has the root with the others'."""
    world, _ = trained(8, WORLD)
    moved(world, 0)
    digests = restarted(world)
    assert (digests.is_known, 0 in digests.keepers) == (True, False)
    assert not world.job().unproven
    answers = world.get(world.launch(WORLD))
    assert [answer["step"] for answer in answers] == [1] * WORLD
    world.check_restored(answers)


def test_copies_that_cannot_be_proved_yet_stay_until_late_hosts_come() -> None:
    """Of one rank nothing is here, so another's that has moved is unproved: a get waits, and nothing is freed."""
    world, _ = trained(9, 5)
    here = moved(world, 0)
    world.run(60.0)
    other = next(rank for rank in range(1, 5) if not here.intersection(world.holders_of(STEP, rank)))
    late = set(world.holders_of(STEP, other))
    for host in late:
        world.kill_host(host, keep_memory=True)
    digests = restarted(world)
    assert set(world.job().unproven) == {STEP}
    assert (digests[0], digests[other]) == ("", "")
    assert set(world.holders_of(STEP, 0)) == here
    ranks = world.launch(5)
    for rank in ranks:
        world.call(rank, "get", step=None, timeout_s=60.0)
    world.run(5.0)
    assert not any(rank.answers.get("get") or rank.errors.get("get") for rank in ranks)
    for host in late:
        world.return_host(host)
    assert world.run_until(lambda: all(rank.answers.get("get") for rank in ranks), 20.0)
    answers = [rank.answers["get"][-1] for rank in ranks]
    assert [answer["step"] for answer in answers] == [1] * 5
    world.check_restored(answers)
    assert not world.job().unproven


def test_a_late_hosts_processes_are_known_once_it_comes() -> None:
    """Only its own journal names them: they count as the ranks that they are, and the job goes on with them."""
    world, ranks = trained(3, WORLD)
    world.crash_controller()
    world.kill_host("h2", keep_memory=True)
    world.run(8.0)
    member = world.job().attempts[1].members[2]
    assert member.nonce == ""
    world.return_host("h2")
    world.run(3.0)
    assert member.nonce == ranks[2].nonce


# -- two shards of one name ---------------------------------------------------------------------------


def spec(digest: str) -> ShardSpec:
    """A shard of one chunk, of two ranks."""
    return ShardSpec(digest * 32, 4, 4, 1, 2)


def copies_of(rank: int, *digests: str) -> list[Copy]:
    """Whole copies of a rank's shard, each of other bytes, on a host of its own."""
    return [Copy(ShardId("train", 1, 1, rank), spec(d), f"x{d}") for d in digests]


def chosen(host: str, rank_0: str, rank_1: str) -> dict[int, str] | None:
    """What would be restored of a step that was committed with digests a and b, by the journal of one host."""
    digests = ByRank.of([spec("a").digest, spec("b").digest], [("h0",), ("h1",)])
    made = Entry(1, 1, StepCommitted("train", 1, 1, 2, digests, "host", False, "", 0.0))
    journal = entries_of(host, with_parts([made], host))
    job = jobs_of([journal], [*copies_of(0, *rank_0), *copies_of(1, *rank_1)])["train"]
    found = choose(job)
    return {rank: digest[0] for rank, digest in found.digests.items()} if found.step is not None else None


CASES = list(product(["h0", "h1", "h9"], ["a", "ac", "c"], ["b", "bc", "c", ""]))


@pytest.mark.parametrize(("host", "rank_0", "rank_1"), CASES)
def test_of_two_shards_of_one_name_the_committed_one_counts(host: str, rank_0: str, rank_1: str) -> None:
    """Whether a journal that is here keeps its digest or none does; without it the step is not whole."""
    is_there = "a" in rank_0 and "b" in rank_1
    assert chosen(host, rank_0, rank_1) == ({0: "a", 1: "b"} if is_there else None)

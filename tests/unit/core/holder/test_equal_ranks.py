"""A writer that does not put holds no offer up for long, and a removed job is forgotten (R13, R34)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from holder_io import ScriptedIo, halt

from memstore.core.arena.replica_index import StoredReplica
from memstore.core.holder.puts import equal_ranks
from memstore.core.holder.puts.shared_shards import HolderSharedShards
from memstore.core.wire.orders import PushTargets, RankTargets
from recovery.inventory import ShardId, ShardSpec

CHUNK_BYTES = 64 << 10
DIGESTS = (b"a" * 16, b"b" * 16)


@dataclass(eq=False)
class Link:
    """A connection of a rank's process."""

    rank: int
    attempt: int = 1
    job: str = "job"


@dataclass(eq=False)
class Host(ScriptedIo):
    """A holder with what its store has, on which offers wait."""

    lock = contextlib.nullcontext()
    index: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(shards={}))

    async def wait_for(self, is_there: Callable[[], bool], limit_s: float | None = None) -> bool:
        assert limit_s == equal_ranks.WRITER_WAIT_S
        return bool(await halt(is_there))

    @property
    def known(self) -> HolderSharedShards:
        return self.state.shared_shards

    def offer(self, step: int, attempt: int = 1, rank: int = 1) -> Offer:
        """Begin to answer the offer of rank 1, or another."""
        return Offer(self, ShardId("job", attempt, step, rank))

    def waits(self, step: int, attempt: int = 1, rank: int = 1) -> bool:
        """Whether such an offer waits for rank 0's put; its time passes and nothing comes."""
        offer = self.offer(step, attempt, rank)
        waited = offer.is_waiting
        offer.time_is_over()
        return waited

    def compare(self, copy: StoredReplica) -> None:
        """Store a copy and compare it."""
        self.index.shards[copy.shard, ""] = copy
        self.play(equal_ranks.compare(self, self.state, copy.shard))


class Offer:
    """An offer whose answer may wait."""

    def __init__(self, host: Host, shard: ShardId) -> None:
        self.steps = equal_ranks.await_own(host, host.state, shard)
        self.is_there: Callable[[], bool] | None = next(self.steps.__await__(), None)

    @property
    def is_waiting(self) -> bool:
        """Whether what it waits for is not there."""
        return self.is_there is not None and not self.is_there()

    def time_is_over(self) -> None:
        """Let the wait end, with or without what it is for."""
        if self.is_there is not None:
            self.go_on(self.is_there())

    def go_on(self, was_there: bool) -> None:
        """Answer the offer, whose wait has ended."""
        with pytest.raises(StopIteration):
            self.steps.send(was_there)


def stored(rank: int, step: int, attempt: int = 1, digests: tuple[bytes, ...] = DIGESTS) -> StoredReplica:
    spec = ShardSpec("", 2 * CHUNK_BYTES, CHUNK_BYTES, 2, 2)
    return StoredReplica(ShardId("job", attempt, step, rank), spec, digests, [None, None])


def test_no_offer_waits_for_a_rank_that_names_no_shard() -> None:
    """Equal chunks alone say nothing of the next put: only ranks that name one shard are waited for."""
    host = Host()
    host.known.put_sealed(stored(0, 1), None)
    host.compare(stored(1, 1))
    assert not host.waits(2)


def test_a_declared_equal_rank_is_one_of_its_attempt() -> None:
    """In the next attempt this host may have no such rank, and no seal of it would ever end the wait."""
    host = Host()
    host.known.declare(copying(1))
    assert not host.waits(2, attempt=2)
    assert host.waits(2)


def copying(attempt: int) -> PushTargets:
    """Rank 0 copies for ranks 1 and 2."""
    return PushTargets(job="job", attempt=attempt, targets=(), ranks=(RankTargets(0, ("h1", "h2"), (1, 2)),))


def test_a_frozen_writer_is_waited_for_once_until_it_seals_again() -> None:
    """Else each offer of each of the other writers would hold a thread of its sender for seconds, and others'
    copies wait.
    """
    host = Host()
    host.known.declare(copying(1))
    assert host.waits(1)
    assert not host.waits(1, rank=2)
    assert not host.waits(2)
    host.known.put_sealed(stored(0, 1), 2)
    assert not host.waits(1)
    assert host.waits(3)
    host.known.declare(copying(2))
    assert host.waits(4, attempt=2)


def test_all_offers_that_wait_for_one_rank_go_with_the_first() -> None:
    """Rank 2's offer gives up while rank 1's waits, which ends then."""
    host = Host()
    host.known.declare(copying(1))
    first, second = host.offer(2), host.offer(2, rank=2)
    assert first.is_waiting
    second.time_is_over()
    assert not first.is_waiting
    first.time_is_over()
    assert host.known.late == {("job", 0): 1}


@pytest.mark.parametrize(
    "happens",
    [
        lambda known: known.put_sealed(stored(0, 2), 2),
        lambda known: known.declare(copying(2)),
        lambda known: known.forget("job", 1),
    ],
    ids=["sealed", "newer attempt", "removed"],
)
def test_what_happened_after_the_wait_ended_counts(happens: Callable[[HolderSharedShards], object]) -> None:
    """An offer's time is over, and before it goes on the rank has sealed, or its attempt is over: it is not late."""
    host = Host()
    host.known.declare(copying(1))
    offer = host.offer(2)
    assert offer.is_waiting
    happens(host.known)
    offer.go_on(was_there=False)
    assert not host.known.late


@pytest.mark.parametrize(
    "ends", [lambda known: known.declare(copying(2)), lambda known: known.forget("job", 1)], ids=["newer", "removed"]
)
def test_offers_that_wait_end_with_the_attempt(ends: Callable[[HolderSharedShards], object]) -> None:
    """Its ranks are fenced or gone: no later seal of them has to be awaited."""
    host = Host()
    host.known.declare(copying(1))
    offer = host.offer(2)
    ends(host.known)
    assert not offer.is_waiting
    offer.time_is_over()
    assert not host.known.late


def test_no_rank_is_late_because_the_holder_stops() -> None:
    """The offers that wait then end at once."""
    host = Host()
    host.known.declare(copying(1))
    offer = host.offer(2)
    host.is_stopping = True
    assert not offer.is_waiting
    offer.time_is_over()
    assert not host.known.late


def test_the_rank_that_put_a_differing_shard_is_notified_once_and_again_when_it_is_equal() -> None:
    """On its link of that attempt, and no other rank gets it."""
    host = Host()
    host.known.declare(copying(1))
    mine = Link(0)
    links: list[Any] = [mine, Link(0, attempt=2), Link(1), Link(0, job="other")]
    host.state.ranks.links.update({str(number): link for number, link in enumerate(links)})
    other = (DIGESTS[0], b"c" * 16)
    for step, theirs in ((1, DIGESTS), (2, other), (3, other), (4, DIGESTS)):
        host.known.put_sealed(stored(0, step), 2)
        host.compare(stored(1, step, digests=theirs))
    notices = host.of("send_to_rank")
    assert [link for link, _ in notices] == [mine, mine]
    assert [(event.step, event.count, event.chunks) for _, event in notices] == [(2, 1, (1,)), (4, 0, ())]


def test_a_removed_job_leaves_nothing_and_a_newer_attempt_stays() -> None:
    """A host that serves thousands of jobs keeps no digests of those that are gone."""
    host = Host()
    host.known.declare(copying(1))
    host.known.put_sealed(stored(0, 1), 2)
    assert host.waits(2, rank=2)
    host.known.forget("job", 0)
    assert [len(kept) for kept in (host.known.declared, host.known.late, host.known.newest)] == [1, 1, 1]
    host.known.forget("job", 1)
    assert (host.known.declared, host.known.late, host.known.newest) == ({}, {}, {})

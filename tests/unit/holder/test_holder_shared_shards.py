"""A writer that does not put holds no offer up for long, and a removed job is forgotten (R13, R34)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from memstore.core.arena.replica_index import StoredReplica
from memstore.core.wire.orders import PushTargets, WriterTargets
from memstore.shell.arena.replica_store import ReplicaStore
from memstore.shell.holder import shared_shards as module
from memstore.shell.holder.shared_shards import HolderSharedShards
from memstore.testing.clusters.scratch_folder import scratch_folder
from recovery.inventory import ShardId, ShardSpec

CHUNK_BYTES = 64 << 10
DIGESTS = (b"a" * 16, b"b" * 16)


class CountedWaits(threading.Condition):
    """Where offers wait: no time passes, and nothing comes but what `meanwhile` does."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.meanwhile: list[Callable[[], object]] = []

    def wait_for(self, predicate: Any, timeout: float | None = None) -> bool:
        assert timeout == module.WRITER_WAIT_S
        if predicate():
            return True
        self.count += 1
        if self.meanwhile:
            self.meanwhile.pop()()
        return bool(predicate())


@pytest.fixture
def shared_shards() -> Iterator[HolderSharedShards]:
    with scratch_folder() as folder:
        replicas = ReplicaStore.open(folder, limit_bytes=8 * CHUNK_BYTES, chunk_bytes=CHUNK_BYTES)
        made = HolderSharedShards(replicas, threading.Event(), lambda shard, event: None)
        made.changed = CountedWaits()
        yield made
        replicas.close()


def stored(rank: int, step: int, attempt: int = 1) -> StoredReplica:
    spec = ShardSpec("", 2 * CHUNK_BYTES, CHUNK_BYTES, 2, 2)
    return StoredReplica(ShardId("job", attempt, step, rank), spec, DIGESTS, [None, None])


def put_equal(shared_shards: HolderSharedShards, step: int, shared_count: int | None) -> None:
    """Rank 0 is here, and rank 1, of another host, put the same."""
    shared_shards.put_sealed(stored(0, step), shared_count)
    copy = stored(1, step)
    with shared_shards.replicas.lock:
        shared_shards.replicas.index.shards = {(copy.shard, ""): copy}
    shared_shards.compare(copy.shard)


def waits(shared_shards: HolderSharedShards, step: int, attempt: int = 1, rank: int = 1) -> bool:
    """Whether an offer of rank 1, or another, waits for rank 0's put."""
    before = cast(CountedWaits, shared_shards.changed).count
    shared_shards.await_own(ShardId("job", attempt, step, rank))
    return cast(CountedWaits, shared_shards.changed).count > before


def test_no_offer_waits_for_a_rank_that_names_no_shard(shared_shards: HolderSharedShards) -> None:
    """Equal chunks alone say nothing of the next put: only ranks that name one shard are waited for."""
    put_equal(shared_shards, 1, None)
    assert not waits(shared_shards, 2)


def test_a_declared_equal_rank_is_one_of_its_attempt(shared_shards: HolderSharedShards) -> None:
    """In the next attempt this host may have no such rank, and no seal of it would ever end the wait."""
    shared_shards.declare(copying(1))
    assert not waits(shared_shards, 2, attempt=2)
    assert waits(shared_shards, 2)


def copying(attempt: int) -> PushTargets:
    """Rank 0 copies for ranks 1 and 2."""
    return PushTargets(job="job", attempt=attempt, targets=(), writers=(WriterTargets(0, ("h1", "h2"), (1, 2)),))


def test_a_frozen_writer_is_waited_for_once_until_it_seals_again(shared_shards: HolderSharedShards) -> None:
    """Else each offer of each of the other writers would hold a thread of its sender for seconds, and others'
    copies wait.
    """
    shared_shards.declare(copying(1))
    assert waits(shared_shards, 1)
    assert not waits(shared_shards, 1, rank=2)
    assert not waits(shared_shards, 2)
    shared_shards.put_sealed(stored(0, 1), 2)
    assert not waits(shared_shards, 1)
    assert waits(shared_shards, 3)
    shared_shards.declare(copying(2))
    assert waits(shared_shards, 4, attempt=2)


def test_all_offers_that_wait_for_one_rank_go_with_the_first(shared_shards: HolderSharedShards) -> None:
    """Rank 2's offer gives up while rank 1's waits, which ends then."""
    shared_shards.declare(copying(1))
    cast(CountedWaits, shared_shards.changed).meanwhile = [lambda: waits(shared_shards, 2, rank=2)]
    assert waits(shared_shards, 2)
    assert shared_shards.late == {("job", 0): 1}


def test_a_removed_job_leaves_nothing_and_a_newer_attempt_stays(shared_shards: HolderSharedShards) -> None:
    """A host that serves thousands of jobs keeps no digests of those that are gone."""
    shared_shards.declare(copying(1))
    put_equal(shared_shards, 1, 2)
    assert waits(shared_shards, 2, rank=2)
    shared_shards.forget("job", 0)
    assert [len(kept) for kept in (shared_shards.declared, shared_shards.late, shared_shards.newest)] == [1, 1, 1]
    shared_shards.forget("job", 1)
    assert (shared_shards.declared, shared_shards.late, shared_shards.newest) == ({}, {}, {})

"""Rows of parity while they are added up: each chunk once, in any order, and every slot back when it is given up."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parity_hosts import ATTEMPT, JOB, STEP, RankShard, open_parity, rows_of

import memstore.core.arena.replica_store as replica_store
from memstore.core.arena.claimed_memory import Limit
from memstore.core.arena.parity_rows import IncomingParity
from memstore.core.arena.replica_index import StoredReplica
from memstore.core.arena.replica_store import ReplicaStore
from memstore.core.format.manifest import LAYOUT_BYTES_MAX, decode_manifest, spec_of
from memstore.errors import IntegrityError
from memstore.shell.arena.arena import open_store
from memstore.testing.clusters.scratch import scratch_folder
from recovery.inventory import ShardId
from recovery.parity import ParitySet, set_of

CHUNK_BYTES, SLOTS = 4096, 64
RANKS, OWNER = ParitySet((1, 4, 6, 9)), 6
OTHERS = (1, 4, 9)
SIZES = st.lists(st.integers(0, 11 * CHUNK_BYTES), min_size=4, max_size=4)
EVEN = [9 * CHUNK_BYTES + 100] * 4


@pytest.fixture
def replicas() -> Iterator[ReplicaStore]:
    with scratch_folder() as folder:
        made = open_store(folder, chunk_bytes=CHUNK_BYTES, limit=Limit(SLOTS * CHUNK_BYTES))
        made.ensure_free(SLOTS)
        yield made
        made.close()


@pytest.fixture(autouse=True)
def free_again(replicas: ReplicaStore) -> Iterator[None]:
    """Whatever a test did: once the step is dropped every slot is free."""
    yield
    replicas.drop_step(JOB, ATTEMPT, STEP)
    assert len(replicas.table.free) == SLOTS
    replicas.table.validate()


def shards_of(sizes: list[int], seed: int = 0) -> dict[int, RankShard]:
    """Shards of the set."""
    return {
        rank: RankShard.of(rank, nbytes, CHUNK_BYTES, seed=seed)
        for rank, nbytes in zip(RANKS.ranks, sizes, strict=True)
    }


def add(replicas: ReplicaStore, parity: IncomingParity, shard: RankShard, chunk: int) -> None:
    """Add one chunk, which was verified."""
    digest = decode_manifest(shard.manifest).chunks[chunk].digest
    replicas.add_to_parity(parity, shard.rank, chunk, digest, memoryview(bytearray(shard.chunks[chunk])))


def add_all(replicas: ReplicaStore, parity: IncomingParity, shards: dict[int, RankShard]) -> None:
    """Add all chunks and name the shards."""
    for rank in OTHERS:
        for chunk in shards[rank].at(RANKS, OWNER):
            add(replicas, parity, shards[rank], chunk)
        shards[rank].name_in(parity)


def rows_in(replicas: ReplicaStore, stored: StoredReplica) -> list[bytes]:
    """Return the rows that are stored, each digested."""
    assert replicas.verify(stored) == []
    views = [replicas.chunk_view(stored, row) for row in range(len(stored.slots))]
    return [bytes(view) for view in views if view is not None]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(SIZES, st.randoms(use_true_random=False), st.integers(0, 99))
def test_chunks_in_any_order_and_again_give_the_same_rows(
    replicas: ReplicaStore, sizes: list[int], order: random.Random, seed: int
) -> None:
    """Pushes break off and come again, several at once: a chunk that is in its row already changes nothing (R37)."""
    replicas.drop_step(JOB, ATTEMPT, STEP)
    shards = shards_of(sizes, seed)
    due = [(rank, chunk) for rank in OTHERS for chunk in shards[rank].at(RANKS, OWNER)]
    due += order.sample(due, len(due) // 2)
    order.shuffle(due)
    parity = open_parity(replicas, RANKS, OWNER, shards)
    for rank, chunk in due:
        add(replicas, parity, shards[rank], chunk)
    for rank in order.sample(OTHERS, 3):
        shards[rank].name_in(parity)
    assert parity.is_named
    stored = replicas.finish_parity(parity)
    assert stored is not None
    assert rows_in(replicas, stored) == rows_of(RANKS, OWNER, shards)
    assert (replicas.index.parity, replicas.index.incoming) == ({}, {})
    assert set_of(stored.shard, stored.spec) == RANKS
    assert [(s.rank, s.digest, s.nbytes) for s in stored.spec.summands] == [
        (rank, shards[rank].digest, sizes[RANKS.ranks.index(rank)]) for rank in OTHERS
    ]
    for rank in OTHERS:
        assert replicas.manifest_in_parity(shards[rank].shard, shards[rank].digest) == shards[rank].manifest
    manifest = decode_manifest(replicas.manifest(stored))
    assert (manifest.shard, spec_of(manifest, stored.spec.digest)) == (stored.shard, stored.spec)
    assert SLOTS - len(replicas.table.free) == len(set(stored.digests))
    assert replicas.finish_parity(parity) is None
    replicas.drop(stored.shard)
    assert len(replicas.table.free) == SLOTS


def test_other_bytes_in_a_chunks_place_are_refused(replicas: ReplicaStore) -> None:
    """Nothing tells what a row was before: a second content of a chunk is never added beside the first (R37)."""
    mine, others = shards_of(EVEN), shards_of(EVEN, seed=1)
    parity = open_parity(replicas, RANKS, OWNER, mine)
    chunk = mine[4].at(RANKS, OWNER)[0]
    add(replicas, parity, mine[4], chunk)
    with pytest.raises(IntegrityError, match="with other bytes"):
        add(replicas, parity, others[4], chunk)
    with pytest.raises(IntegrityError, match="with other bytes"):
        parity.lacking(4, decode_manifest(others[4].manifest))


def test_a_shorter_shard_does_not_take_the_place_of_a_longer_one(replicas: ReplicaStore) -> None:
    """Chunks of the longer one are in rows that the shorter has none for: its rows would decode to nothing (R37)."""
    longer = shards_of(EVEN)
    chunk_count = len(longer[4].chunks) - 4
    shorter = RankShard.of(4, chunk_count * CHUNK_BYTES, CHUNK_BYTES)
    assert shorter.chunks == longer[4].chunks[:chunk_count]
    parity = open_parity(replicas, RANKS, OWNER, longer)
    for chunk in longer[4].at(RANKS, OWNER):
        add(replicas, parity, longer[4], chunk)
    with pytest.raises(IntegrityError, match="with other bytes"):
        parity.lacking(4, decode_manifest(shorter.manifest))


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize(
    "end",
    [
        lambda replicas: replicas.abort_older(JOB, ATTEMPT + 1),
        lambda replicas: replicas.drop_step(JOB, ATTEMPT, STEP),
        lambda replicas: replicas.abort_parity(lambda parity: True),
    ],
)
def test_what_ends_while_a_chunk_is_added_gives_every_slot_back(
    replicas: ReplicaStore, monkeypatch: pytest.MonkeyPatch, end: Callable[[ReplicaStore], None], is_first: bool
) -> None:
    """A fence, a drop or an abort comes between two bytes of a row: its slot goes when the thread is out of it."""
    shards = shards_of(EVEN)
    parity = open_parity(replicas, RANKS, OWNER, shards)
    real, free_meanwhile = replicas.add_into, list[int]()
    for chunk in () if is_first else shards[1].at(RANKS, OWNER):
        add(replicas, parity, shards[1], chunk)

    def interrupted(row: memoryview, nbytes: int, chunk: memoryview, factor: int) -> None:
        end(replicas)
        free_meanwhile.append(len(replicas.table.free))
        real(row, nbytes, chunk, factor)

    monkeypatch.setattr(replicas, "add_into", interrupted)
    add(replicas, parity, shards[4], shards[4].at(RANKS, OWNER)[0])
    assert free_meanwhile == [SLOTS - 1]
    assert len(replicas.table.free) == SLOTS
    assert replicas.index.parity == {}
    add(replicas, parity, shards[4], shards[4].at(RANKS, OWNER)[1])
    assert len(free_meanwhile) == 1


def test_a_row_that_was_half_added_is_given_up_with_its_parity(
    replicas: ReplicaStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What went wrong in the middle of a row leaves bytes that nobody knows: none of it is kept."""
    shards = shards_of(EVEN)
    parity = open_parity(replicas, RANKS, OWNER, shards)
    for chunk in shards[1].at(RANKS, OWNER):
        add(replicas, parity, shards[1], chunk)

    def failing(row: memoryview, nbytes: int, chunk: memoryview, factor: int) -> None:
        raise MemoryError

    monkeypatch.setattr(replicas, "add_into", failing)
    with pytest.raises(MemoryError):
        add(replicas, parity, shards[4], shards[4].at(RANKS, OWNER)[0])
    assert (len(replicas.table.free), replicas.index.parity) == (SLOTS, {})


def test_a_row_without_a_slot_leaves_its_chunk_lacking(replicas: ReplicaStore) -> None:
    """The sender hears of it at its seal, and sends that chunk again once there is room."""
    shards = shards_of(EVEN)
    parity = open_parity(replicas, RANKS, OWNER, shards)
    taken = replicas.take_slots(SLOTS - 1)
    here = shards[1].at(RANKS, OWNER)
    for chunk in here:
        add(replicas, parity, shards[1], chunk)
    assert parity.lacking(1, decode_manifest(shards[1].manifest)) == list(here)[1:]
    replicas.give_back(taken)
    add_all(replicas, parity, shards)
    stored = replicas.finish_parity(parity)
    assert stored is not None
    assert rows_in(replicas, stored) == rows_of(RANKS, OWNER, shards)


def test_a_step_that_is_dropped_while_its_rows_are_digested_is_not_stored(
    replicas: ReplicaStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Digesting takes no lock: what was given up meanwhile stays so."""
    shards = shards_of(EVEN)
    parity = open_parity(replicas, RANKS, OWNER, shards)
    add_all(replicas, parity, shards)
    real = replica_store.chunk_digest

    def dropping(view: memoryview) -> bytes:
        replicas.drop_step(JOB, ATTEMPT, STEP)
        return real(view)

    monkeypatch.setattr(replica_store, "chunk_digest", dropping)
    assert replicas.finish_parity(parity) is None
    assert (len(replicas.table.free), replicas.index.shards) == (SLOTS, {})


def test_two_seals_at_once_store_it_once(replicas: ReplicaStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last seal came twice, over two connections: the second finds it stored while it digests (R37)."""
    shards = shards_of(EVEN)
    parity = open_parity(replicas, RANKS, OWNER, shards)
    add_all(replicas, parity, shards)
    real, stored = replica_store.chunk_digest, list[StoredReplica | None]()

    def meanwhile(view: memoryview) -> bytes:
        if not stored:
            stored.append(None)
            stored[0] = replicas.finish_parity(parity)
        return real(view)

    monkeypatch.setattr(replica_store, "chunk_digest", meanwhile)
    assert replicas.finish_parity(parity) is None
    assert stored[0] is not None
    assert rows_in(replicas, stored[0]) == rows_of(RANKS, OWNER, shards)


def test_only_rows_that_went_bad_are_added_again(replicas: ReplicaStore) -> None:
    """Stored parity lacks two rows: they alone come again, and it is what it was before (R30, R37)."""
    shards = shards_of(EVEN)
    parity = open_parity(replicas, RANKS, OWNER, shards)
    add_all(replicas, parity, shards)
    stored = replicas.finish_parity(parity)
    assert stored is not None
    for row in (0, 2):
        slot = stored.slots[row]
        assert slot is not None
        replicas.arena.view(slot, 1)[:] = bytes([replicas.arena.view(slot, 1)[0] ^ 1])
    assert replicas.verify(stored) == [0, 2]
    again = open_parity(replicas, RANKS, OWNER, shards)
    again.stored_rows = {row: stored.digests[row] for row in (1, 3)}
    lacking = {rank: again.lacking(rank, decode_manifest(shards[rank].manifest)) for rank in OTHERS}
    assert lacking == {rank: [c for r, c in enumerate(shards[rank].at(RANKS, OWNER)) if r in (0, 2)] for rank in OTHERS}
    add_all(replicas, again, shards)
    assert set(again.rows) == {0, 2}
    assert replicas.finish_parity(again) is stored
    assert rows_in(replicas, stored) == rows_of(RANKS, OWNER, shards)


def test_manifests_too_long_for_parity_are_refused_and_keep_no_slot(replicas: ReplicaStore) -> None:
    """The manifests of all shards are in that of the parity, whose layout has the limit of any (R14)."""
    layout = bytes(LAYOUT_BYTES_MAX // 2)
    shards = {rank: RankShard.of(rank, 5 * CHUNK_BYTES, CHUNK_BYTES, layout=layout) for rank in RANKS.ranks}
    parity = open_parity(replicas, RANKS, OWNER, shards)
    add_all(replicas, parity, shards)
    with pytest.raises(IntegrityError, match="layout"):
        replicas.finish_parity(parity)
    assert (len(replicas.table.free), replicas.index.incoming, replicas.index.parity) == (SLOTS, {}, {})


def test_a_new_holder_frees_rows_that_are_not_full_and_adopts_stored_parity() -> None:
    """What was added to a row is known to the dead process alone; stored parity names the shards in it (R6, R37)."""
    full, half = shards_of(EVEN), shards_of(EVEN, seed=1)
    with scratch_folder() as folder:
        before = open_store(folder, chunk_bytes=CHUNK_BYTES, limit=Limit(SLOTS * CHUNK_BYTES))
        before.ensure_free(SLOTS)
        parity = open_parity(before, RANKS, OWNER, full)
        add_all(before, parity, full)
        stored = before.finish_parity(parity)
        assert stored is not None
        unfinished = open_parity(before, RANKS, 9, half)
        for chunk in half[4].at(RANKS, 9):
            add(before, unfinished, half[4], chunk)
        assert len(unfinished.rows) == 3
        before.close()
        after = open_store(folder, chunk_bytes=CHUNK_BYTES, limit=Limit(SLOTS * CHUNK_BYTES))
        assert after.adoption_notes == []
        (adopted,) = after.index.shards.values()
        assert (adopted.shard, adopted.spec, adopted.missing) == (stored.shard, stored.spec, frozenset())
        assert rows_in(after, adopted) == rows_of(RANKS, OWNER, full)
        assert len(after.table.free) == SLOTS - len(adopted.slots)
        pinned = after.pin_parity_of(ShardId(JOB, ATTEMPT, STEP, 4), full[4].digest)
        assert pinned is not None
        assert pinned[0] is adopted
        assert after.pin_parity_of(ShardId(JOB, ATTEMPT, STEP, 4), half[4].digest) is None
        after.close()


def test_a_row_counts_as_full_only_once_its_slot_is_let_go(replicas: ReplicaStore) -> None:
    """The last seal, on another connection, stores the parity as soon as a row is full: its slots stay its own."""
    shards = shards_of(EVEN)
    parity = open_parity(replicas, RANKS, OWNER, shards)
    for shard in (shards[rank] for rank in OTHERS):
        parity.named[shard.rank] = decode_manifest(shard.manifest), shard.manifest
    *most, last = [(rank, chunk) for rank in OTHERS for chunk in shards[rank].at(RANKS, OWNER)]
    for rank, chunk in most:
        add(replicas, parity, shards[rank], chunk)
    stored: list[StoredReplica | None] = []

    class Watched(dict[int, bytes]):
        def __setitem__(self, rank: int, digest: bytes) -> None:
            super().__setitem__(rank, digest)
            stored.append(replicas.finish_parity(parity))

    row = parity.rows[RANKS.rows_at(OWNER, last[0], last[1] + 1)[last[1]]]
    row.added = Watched(row.added)
    add(replicas, parity, shards[last[0]], last[1])
    [found] = stored
    assert found is not None
    assert rows_in(replicas, found) == rows_of(RANKS, OWNER, shards)
    assert not set(found.slots) & set(replicas.table.free)

"""Rows of parity while they are added up: each chunk once, in any order, and every slot back when it is given up."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parity_fleet import ATTEMPT, JOB, STEP, RankShard, open_parity, rows_of
from parity_sums import scaled, xor

import memstore.core.arena.replica_store as replica_store
from memstore.core.arena.claimed_memory import Limit
from memstore.core.arena.parity_rows import IncomingParity, add_into
from memstore.core.arena.replica_index import StoredReplica
from memstore.core.arena.replica_store import ReplicaStore
from memstore.core.format.manifest import LAYOUT_BYTES_MAX, decode_manifest, spec_of
from memstore.errors import CapacityError, IntegrityError
from memstore.shell.arena.arena import open_store
from memstore.testing.clusters.scratch import scratch_folder
from recovery.inventory import ShardId
from recovery.parity import ParitySet, set_of

CHUNK_BYTES, SLOTS = 4096, 64
RANKS, OWNER = ParitySet((1, 4, 6, 9)), 6
OTHERS = (1, 4, 9)
TWO = ParitySet((1, 4, 6, 9, 11), spare=2)  # every chunk is in two rows, of three chunks each
SIZES = st.lists(st.integers(0, 11 * CHUNK_BYTES), min_size=5, max_size=5)
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
    for step in (STEP, STEP + 1):
        replicas.drop_step(JOB, ATTEMPT, step)
    assert len(replicas.table.free) == SLOTS
    replicas.table.validate()


def shards_of(sizes: list[int], seed: int = 0, ranks: ParitySet = RANKS) -> dict[int, RankShard]:
    """Shards of a set."""
    pairs = zip(ranks.ranks, sizes, strict=True)
    return {rank: RankShard.of(rank, nbytes, CHUNK_BYTES, seed=seed) for rank, nbytes in pairs}


def add(replicas: ReplicaStore, parity: IncomingParity, shard: RankShard, chunk: int) -> None:
    """Add one chunk, which was verified."""
    digest = decode_manifest(shard.manifest).chunks[chunk].digest
    replicas.add_to_parity(parity, shard.rank, chunk, digest, memoryview(bytearray(shard.chunks[chunk])))


def add_all(replicas: ReplicaStore, parity: IncomingParity, shards: dict[int, RankShard]) -> None:
    """Add all chunks and name the shards."""
    for rank in parity.ranks.others(OWNER):
        for chunk in shards[rank].at(parity.ranks, OWNER):
            add(replicas, parity, shards[rank], chunk)
        shards[rank].name_in(parity)


def rows_in(replicas: ReplicaStore, stored: StoredReplica) -> list[bytes]:
    """Return the rows that are stored, each digested."""
    assert replicas.verify(stored) == []
    views = [replicas.chunk_view(stored, row) for row in range(len(stored.slots))]
    return [bytes(view) for view in views if view is not None]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from([RANKS, TWO]), SIZES, st.randoms(use_true_random=False), st.integers(0, 99))
def test_chunks_in_any_order_and_again_give_the_same_rows(
    replicas: ReplicaStore, ranks: ParitySet, sizes: list[int], order: random.Random, seed: int
) -> None:
    """Pushes break off and come again, several at once: a chunk that is in its row already changes nothing (R37)."""
    replicas.drop_step(JOB, ATTEMPT, STEP)
    shards = shards_of(sizes[: len(ranks.ranks)], seed, ranks)
    others = ranks.others(OWNER)
    due = [(rank, chunk) for rank in others for chunk in shards[rank].at(ranks, OWNER)]
    due += order.sample(due, len(due) // 2)
    order.shuffle(due)
    parity = open_parity(replicas, ranks, OWNER, shards)
    for rank, chunk in due:
        add(replicas, parity, shards[rank], chunk)
    for rank in order.sample(others, len(others)):
        shards[rank].name_in(parity)
    assert parity.is_named
    stored = replicas.finish_parity(parity)
    assert stored is not None
    assert rows_in(replicas, stored) == rows_of(ranks, OWNER, shards)
    assert (replicas.index.parity, replicas.index.incoming) == ({}, {})
    assert set_of(stored.shard, stored.spec) == ranks
    assert [(s.rank, s.digest, s.nbytes) for s in stored.spec.summands] == [
        (rank, shards[rank].digest, sizes[ranks.ranks.index(rank)]) for rank in others
    ]
    for rank in others:
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
    """What went wrong in the middle of a row leaves bytes that are unknown: none of it is kept."""
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
    """The sender gets the error at its seal, and sends that chunk again once there is room."""
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


# -- rows with factors, and rows without chunks -------------------------------------------------------


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(min_size=1, max_size=40), st.binary(max_size=40), st.integers(0, 40))
def test_a_chunk_times_any_factor_is_added(replicas: ReplicaStore, chunk: bytes, row: bytes, more: int) -> None:
    """What the row had not reached yet is the product alone, whatever lies there; behind the chunk nothing changes."""
    room = row + b"\xaa" * max(0, len(chunk) + more - len(row))
    for factor in range(1, 256):
        for each in (add_into, replicas.add_into):
            found = bytearray(room)
            each(memoryview(found), len(row), memoryview(chunk), factor)
            expected = xor(row, scaled(chunk, factor))
            assert found == expected + room[len(expected) :]


def test_what_is_added_plainly_is_the_sum(replicas: ReplicaStore) -> None:
    """Without a factor: that of plain rows."""
    row = bytearray(b"abc")
    add_into(memoryview(row), 3, memoryview(b"abd"))
    assert row == bytes([0, 0, ord("c") ^ ord("d")])


# At rank 6 only rank 4 has chunks: those in plain rows alone, so that rows 1 and 3 have none.
SPARSE = [0, 6 * CHUNK_BYTES + 100, 0, 0, 0]


def test_rows_without_a_chunk_are_zeros(replicas: ReplicaStore) -> None:
    """They lie between others, and take one slot together: the number of a row says what is in it (R37)."""
    shards = shards_of(SPARSE, ranks=TWO)
    parity = open_parity(replicas, TWO, OWNER, shards)
    add_all(replicas, parity, shards)
    assert sorted(parity.rows) == [0, 2, 4]
    stored = replicas.finish_parity(parity)
    assert stored is not None
    rows = rows_in(replicas, stored)
    assert rows == rows_of(TWO, OWNER, shards)
    assert [len(row) for row in rows] == [CHUNK_BYTES] * 4 + [100]
    assert rows[1] == rows[3] == bytes(CHUNK_BYTES)
    assert SLOTS - len(replicas.table.free) == 4


def test_a_row_of_short_chunks_is_filled_up_with_zeros(replicas: ReplicaStore) -> None:
    """The last chunk of a short shard is alone in a row before others; what lay in the slot before is not left."""
    shards = shards_of([100, 9 * CHUNK_BYTES, 0, 0, 0], ranks=TWO)
    dirty = replicas.take_slots(8)
    for slot in dirty:
        replicas.arena.view(slot, CHUNK_BYTES)[:] = b"x" * CHUNK_BYTES
    replicas.give_back(dirty)
    parity = open_parity(replicas, TWO, OWNER, shards)
    add_all(replicas, parity, shards)
    stored = replicas.finish_parity(parity)
    assert stored is not None
    rows = rows_in(replicas, stored)
    assert rows == rows_of(TWO, OWNER, shards)
    assert rows[1] == shards[1].chunks[0] + bytes(CHUNK_BYTES - 100)


@pytest.mark.parametrize("free_count", [0, 1])
def test_parity_without_a_slot_for_a_row_of_no_chunk_is_stored_later(replicas: ReplicaStore, free_count: int) -> None:
    """The seal is refused, nothing that was added is lost, and once there is room it is stored."""
    shards = shards_of(SPARSE, ranks=TWO)
    parity = open_parity(replicas, TWO, OWNER, shards)
    taken = replicas.take_slots(SLOTS - 3 - free_count)
    add_all(replicas, parity, shards)
    for _ in range(2):
        with pytest.raises(CapacityError, match="no chunk in it, and there is no slot"):
            replicas.finish_parity(parity)
    assert replicas.index.parity == {parity.shard: parity}
    replicas.give_back(taken)
    stored = replicas.finish_parity(parity)
    assert stored is not None
    assert rows_in(replicas, stored) == rows_of(TWO, OWNER, shards)
    replicas.table.validate()


def test_a_row_without_a_chunk_that_went_bad_comes_back_from_nowhere(replicas: ReplicaStore) -> None:
    """No other rank has anything to send for it."""
    shards = shards_of(SPARSE, ranks=TWO)
    parity = open_parity(replicas, TWO, OWNER, shards)
    add_all(replicas, parity, shards)
    stored = replicas.finish_parity(parity)
    assert stored is not None
    replicas.arena.view(stored.slots[3] or 0, 1)[0] = 1
    assert replicas.verify(stored) == [1, 3]
    again = open_parity(replicas, TWO, OWNER, shards)
    again.stored_rows = {row: stored.digests[row] for row in (0, 2, 4)}
    for rank in TWO.others(OWNER):
        shards[rank].name_in(again)
    assert replicas.finish_parity(again) is stored
    assert rows_in(replicas, stored) == rows_of(TWO, OWNER, shards)


def test_a_chunk_that_belongs_into_no_row_here_changes_nothing(replicas: ReplicaStore) -> None:
    """Of a rank's chunks some are in no row of another one."""
    shards = shards_of([9 * CHUNK_BYTES] * 5, ranks=TWO)
    strange = {*range(9)} - {*shards[9].at(TWO, OWNER)}
    assert strange
    parity = open_parity(replicas, TWO, OWNER, shards)
    for chunk in strange:
        add(replicas, parity, shards[9], chunk)
    assert parity.rows == {}


# -- steps that follow one another --------------------------------------------------------------------


def stored_first(replicas: ReplicaStore, shards: dict[int, RankShard]) -> StoredReplica:
    """Add all up and store it."""
    parity = open_parity(replicas, TWO, OWNER, shards)
    add_all(replicas, parity, shards)
    stored = replicas.finish_parity(parity)
    assert stored is not None
    return stored


def next_shards(shards: dict[int, RankShard], chunks: dict[int, tuple[bytes, ...]]) -> dict[int, RankShard]:
    """The shards of the next step: as they were, or of other chunks."""
    step = STEP + 1
    return {
        rank: RankShard.made(ShardId(JOB, ATTEMPT, step, rank), chunks.get(rank, shard.chunks), CHUNK_BYTES)
        for rank, shard in shards.items()
    }


def stored_next(
    replicas: ReplicaStore, shards: dict[int, RankShard]
) -> tuple[StoredReplica, set[tuple[int, int]], set[tuple[int, int]]]:
    """Do as a server does at the next step; return the parity, what was sent and what was fetched."""
    shard = ShardId(JOB, ATTEMPT, STEP + 1, OWNER, is_parity=True)
    parity = IncomingParity(shard, TWO, ATTEMPT, 0.0, before=replicas.parity_before(shard, TWO))
    parity.rows_count = max(TWO.rows_count(len(each.chunks)) for each in shards.values())
    replicas.index.parity[shard] = parity
    sent: set[tuple[int, int]] = set()
    for rank in TWO.others(OWNER):
        for chunk in parity.lacking(rank, decode_manifest(shards[rank].manifest)):
            add(replicas, parity, shards[rank], chunk)
            sent.add((rank, chunk))
        shards[rank].name_in(parity)
    fetched = {(rank, chunk) for rank, chunks in parity.owed().items() for chunk in chunks}
    for rank, chunk in sorted(fetched):
        add(replicas, parity, shards[rank], chunk)
    assert parity.owed() == {}, "what was fetched is not asked for again"
    stored = replicas.finish_parity(parity)
    assert stored is not None
    return stored, sent, fetched


def test_the_last_row_of_a_step_is_another_one_once_rows_follow_it(replicas: ReplicaStore) -> None:
    """It was as short as its chunk; now it has zeros behind it, so its unchanged chunk is fetched, once (R37)."""
    short = {4: 3 * CHUNK_BYTES + 100}  # its chunks 0 and 3 are in rows 0 and 2 of rank 6, the last one short
    first = shards_of([short.get(rank, 0) for rank in TWO.ranks], ranks=TWO)
    before = stored_first(replicas, first)
    assert [before.spec.chunk_nbytes(row) for row in range(3)] == [CHUNK_BYTES, CHUNK_BYTES, 100]
    longer = RankShard.of(9, 7 * CHUNK_BYTES, CHUNK_BYTES).chunks
    now = next_shards(first, {9: longer})
    found, sent, fetched = stored_next(replicas, now)
    assert rows_in(replicas, found) == rows_of(TWO, OWNER, now)
    assert (4, 3) in fetched
    assert {rank for rank, _ in sent} == {9}


def test_of_a_changed_row_the_rest_is_fetched_and_the_others_are_shared(replicas: ReplicaStore) -> None:
    """One chunk changes: of its two rows one is here, and lies in a slot of its own; the others keep theirs."""
    first = shards_of([9 * CHUNK_BYTES] * 5, ranks=TWO)
    before = stored_first(replicas, first)
    (chunk, row), *_ = TWO.rows_at(OWNER, 4, 9).items()
    changed = (*first[4].chunks[:chunk], bytes(CHUNK_BYTES), *first[4].chunks[chunk + 1 :])
    now = next_shards(first, {4: changed})
    found, sent, fetched = stored_next(replicas, now)
    assert rows_in(replicas, found) == rows_of(TWO, OWNER, now)
    assert sent == {(4, chunk)}
    assert fetched == {(r, c) for r in (1, 9, 11) for c, at in TWO.rows_at(OWNER, r, 9).items() if at == row}
    assert [old == new for old, new in zip(before.slots, found.slots, strict=True)] == [n != row for n in range(6)]


def test_rows_without_a_chunk_are_shared_with_the_step_before(replicas: ReplicaStore) -> None:
    """Nothing is sent, fetched or written for what has not changed."""
    first = shards_of(SPARSE, ranks=TWO)
    before = stored_first(replicas, first)
    found, sent, fetched = stored_next(replicas, next_shards(first, {}))
    assert (sent, fetched, found.slots) == (set(), set(), before.slots)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(SIZES, SIZES, st.randoms(use_true_random=False), st.sets(st.integers(0, 7), max_size=2))
def test_any_step_after_any_other_has_the_rows_of_its_own_shards(
    replicas: ReplicaStore, sizes: list[int], later: list[int], order: random.Random, bad: set[int]
) -> None:
    """Shards grow, shrink and change in places, and rows of the step before went bad: nothing of that is left (R37)."""
    for step in (STEP, STEP + 1):
        replicas.drop_step(JOB, ATTEMPT, step)
    first = shards_of(sizes, ranks=TWO)
    before = stored_first(replicas, first)
    for row in bad & {*range(len(before.slots))}:
        view = replicas.arena.view(before.slots[row] or 0, 1)
        view[0] ^= 1
    replicas.verify(before)
    chunks = {}
    for rank, nbytes in zip(TWO.ranks, later, strict=True):
        fresh, kept = RankShard.of(rank, nbytes, CHUNK_BYTES, seed=1).chunks, first[rank].chunks
        if order.random() < 0.5:  # as it was, but for a place or two
            some = {*order.sample(range(len(kept)), min(len(kept), order.randrange(3)))}
            chunks[rank] = tuple(bytes(len(c)) if at in some else c for at, c in enumerate(kept))
        else:  # of another length, with what it had in common
            common = [c for c, new in zip(kept, fresh, strict=False) if len(c) == len(new)]
            chunks[rank] = (*common, *fresh[len(common) :])
    now = next_shards(first, chunks)
    found, sent, fetched = stored_next(replicas, now)
    assert rows_in(replicas, found) == rows_of(TWO, OWNER, now)
    assert not sent & fetched
    replicas.table.validate()

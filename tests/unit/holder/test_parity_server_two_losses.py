"""Parity of two rows between six real holders over sockets: any two of them may be lost (R37)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

import pytest
from parity_fleet import ATTEMPT, CHUNK_BYTES, HOSTS, JOB, OWNER, PARITY, STEP, Fleet, Sender, nowhere, rows_of
from parity_sums import places

from memstore.core.arena.replica_index import StoredReplica
from memstore.core.format.manifest import decode_manifest
from memstore.core.wire.frame import Kind
from memstore.core.wire.peer_messages import Done, HasCopy, Ping, Refused, ShardHost
from memstore.errors import TransportError
from memstore.shell.holder.holder import Holder
from memstore.shell.peer.parity import OtherHolder
from memstore.testing.clusters.two_holders import some_holders
from recovery.inventory import Copy, ShardId
from recovery.parity import ParitySet

RANKS = ParitySet((0, 1, 2, 3, 4, 5), spare=2)  # four chunks in a row
SIZES = [9 * CHUNK_BYTES + 5, 0, 2 * CHUNK_BYTES + 100, 4 * CHUNK_BYTES, 6 * CHUNK_BYTES, 5 * CHUNK_BYTES + 7]


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with some_holders(HOSTS, CHUNK_BYTES) as holders:
        for holder in holders:
            holder.replicas.ensure_free(60)
        yield Fleet(holders, RANKS, SIZES)


@pytest.fixture
def whole(fleet: Fleet) -> Fleet:
    """A fleet in which every host has its shard, and parity of all others."""
    fleet.put_everywhere()
    return fleet


def plain_chunks(rank: int) -> list[int]:
    """Return the chunks of a rank whose plain row host e has."""
    return [chunk for chunk, row in RANKS.rows_at(OWNER, rank, -(-SIZES[rank] // CHUNK_BYTES)).items() if row % 2 == 0]


def second_chunks(rank: int) -> list[int]:
    """Return the chunks of a rank whose second row host e has."""
    return [chunk for chunk, row in RANKS.rows_at(OWNER, rank, -(-SIZES[rank] // CHUNK_BYTES)).items() if row % 2]


def as_put(fleet: Fleet, rank: int, chunks: Sequence[int]) -> list[bytes]:
    """Return chunks of a rank as they were put."""
    return [fleet.shards[rank].chunks[chunk] for chunk in chunks]


def found(data: Sequence[bytearray]) -> list[bytes]:
    """Return what came, to compare."""
    return [bytes(each) for each in data]


def stored_shard(fleet: Fleet, rank: int) -> StoredReplica:
    """Return a rank's shard on its host."""
    stored = fleet.holders[rank].replicas.index.find(fleet.shards[rank].shard)
    assert stored is not None
    return stored


def test_every_host_keeps_the_rows_that_definition_says(whole: Fleet) -> None:
    """Of unequal shards, one without a byte; every host has reported its parity once (R16, R37)."""
    for owner, holder in enumerate(whole.holders):
        stored = whole.stored_parity(owner)
        assert holder.replicas.verify(stored) == []
        rows = [bytes(holder.replicas.chunk_view(stored, row) or b"") for row in range(len(stored.slots))]
        assert rows == rows_of(RANKS, owner, whole.shards)
        assert stored.spec.spare == 2
        assert [copy.shard for copy in whole.sealed[HOSTS[owner]]] == [
            ShardId(JOB, ATTEMPT, STEP, owner, is_parity=True)
        ]


def test_any_two_lost_shards_are_decoded_bit_for_bit(whole: Fleet) -> None:
    """Each chunk from the host of its plain row, or if that is lost from the second's; no host of the two is asked."""
    for pair in combinations(RANKS.ranks, 2):
        for rank in pair:
            whole.lose(rank)
        for rank in pair:
            others = whole.others(rank, gone=pair)
            by_owner: dict[int, list[int]] = {}
            for chunk in range(len(whole.shards[rank].chunks)):
                owner = next(place.owner for place in places(RANKS, rank, chunk) if place.owner not in pair)
                by_owner.setdefault(owner, []).append(chunk)
            for owner, chunks in by_owner.items():
                asker = min({*RANKS.ranks} - {owner, *pair})
                data = whole.client(asker, owner).fetch_bytes(whole.request(rank, chunks, others))
                assert found(data) == as_put(whole, rank, chunks), (pair, rank, owner)
        for rank in pair:
            whole.seal(rank)
    assert [copy.missing for copies in whole.sealed.values() for copy in copies if copy.missing] == []


def test_with_one_lost_shard_both_rows_of_a_chunk_give_it(whole: Fleet) -> None:
    """The plain row by itself, the second one by the rank's factor; its host asks for no other's row (R37)."""
    whole.lose(0)
    for chunks in (plain_chunks(0), second_chunks(0)):
        assert chunks
        assert found(whole.decode(0, chunks)) == as_put(whole, 0, chunks)
    only_shards = [row for row in whole.others(0) if row.parity is None]
    assert found(whole.decode(0, second_chunks(0), only_shards)) == as_put(whole, 0, second_chunks(0))


def test_a_second_row_alone_gives_none_of_two_lost_chunks(whole: Fleet) -> None:
    """Two are lost: one row is one equation, so what is asked of its host is empty, and no damage is looked for."""
    whole.lose(0)
    whole.lose(5)
    chunks = second_chunks(0)
    both = [chunk for chunk in chunks if shares_row(chunk, 5)]
    assert both
    data = dict(zip(chunks, found(whole.decode(0, chunks, whole.others(0, gone=(0, 5)))), strict=True))
    assert {chunk for chunk, each in data.items() if not each} == {*both}
    assert all(copies == copies[:1] for copies in whole.sealed.values())


def shares_row(chunk: int, other: int) -> bool:
    """Return whether another rank has a chunk in the row of e that a chunk of rank 0 is in."""
    count = -(-SIZES[other] // CHUNK_BYTES)
    return RANKS.row_of(OWNER, 0, chunk) in RANKS.rows_at(OWNER, other, count).values()


def test_a_second_row_that_nobody_names_is_not_asked_for(whole: Fleet) -> None:
    """Two are lost, and the next host too, as far as is told: chunks that are alone in their row come all the same."""
    whole.lose(0)
    whole.lose(3)
    chunks = plain_chunks(0)
    others = [row for row in whole.others(0, gone=(0, 3)) if row.parity is None]
    expected = [b"" if shares_row(chunk, 3) else whole.shards[0].chunks[chunk] for chunk in chunks]
    assert b"" in expected
    assert found(whole.decode(0, chunks, others)) == expected


def test_a_second_row_that_is_gone_meanwhile_gives_empty_chunks(whole: Fleet) -> None:
    """The next host has dropped its parity since the controller named it: that is no damage here."""
    whole.lose(0)
    whole.lose(3)
    others = whole.others(0, gone=(0, 3))
    whole.holders[5].replicas.drop(ShardId(JOB, ATTEMPT, STEP, 5, is_parity=True))
    chunks = plain_chunks(0)
    expected = [b"" if shares_row(chunk, 3) else whole.shards[0].chunks[chunk] for chunk in chunks]
    assert found(whole.decode(0, chunks, others)) == expected
    assert [copy.missing for copy in whole.sealed["e"]] == [frozenset()]


def test_a_chunk_that_its_host_turns_out_to_lack_is_solved_with_the_second_row(whole: Fleet) -> None:
    """The controller still counts on it; its host has dropped it, or has lost that one chunk (R25, R37)."""
    whole.lose(0)
    chunks, others = plain_chunks(0), whole.others(0)
    stored = stored_shard(whole, 3)
    lacking = next(chunk for chunk, row in RANKS.rows_at(OWNER, 3, 4).items() if row % 2 == 0)
    whole.rot(whole.holders[3], stored, lacking)
    assert whole.holders[3].replicas.verify(stored) == [lacking]
    assert found(whole.decode(0, chunks, others)) == as_put(whole, 0, chunks)
    whole.lose(3)
    assert found(whole.decode(0, chunks, others)) == as_put(whole, 0, chunks)


def test_two_chunks_that_their_hosts_turn_out_to_lack_are_too_many(whole: Fleet) -> None:
    """With the wanted one they are three, of two rows: empty, while the rows that lack fewer give theirs."""
    whole.lose(0)
    chunks, others = plain_chunks(0), whole.others(0)
    whole.lose(3)
    whole.lose(2)
    expected = [
        b"" if shares_row(chunk, 3) and shares_row(chunk, 2) else whole.shards[0].chunks[chunk] for chunk in chunks
    ]
    assert b"" in expected
    assert found(whole.decode(0, chunks, others)) == expected


def test_a_rotten_chunk_of_another_shard_is_found_and_solved_for(whole: Fleet) -> None:
    """Wrong bytes never leave; its host reports it, and as it is lost then the second row is taken for it (R25)."""
    whole.lose(0)
    chunks, others = plain_chunks(0), whole.others(0)
    bad = next(chunk for chunk, row in RANKS.rows_at(OWNER, 3, 4).items() if row % 2 == 0)
    assert RANKS.row_of(OWNER, 3, bad) in {RANKS.row_of(OWNER, 0, chunk) for chunk in chunks}
    whole.rot(whole.holders[3], stored_shard(whole, 3), bad)
    assert found(whole.decode(0, chunks, others)) == as_put(whole, 0, chunks)
    reported = [(copy.shard.rank, copy.missing) for copy in whole.sealed["d"] if not copy.shard.is_parity]
    assert reported == [(3, frozenset({bad}))]
    assert [copy.missing for copy in whole.sealed["e"]] == [frozenset()], "the row here is good"


def test_a_rotten_chunk_is_solved_for_where_its_row_is(whole: Fleet) -> None:
    """A host decodes for itself: what it calls lost is taken for a lost row, and so for lost chunks (R25)."""
    whole.lose(0)
    chunks = decode_manifest(whole.shards[0].manifest).chunks
    replicas, shard = whole.e.replicas, whole.shards[0]
    bad = next(chunk for chunk, row in RANKS.rows_at(OWNER, 3, 4).items() if row % 2 == 0)
    whole.rot(whole.holders[3], stored_shard(whole, 3), bad)
    replica = replicas.open_incoming("r", shard.shard, [c.digest for c in chunks], [c.nbytes for c in chunks], ATTEMPT)
    assert whole.e.peer_server.parity.decode_into(replica, shard.digest, plain_chunks(0), whole.others(0)) == []
    replicas.abort_incoming("r", shard.shard)


def test_a_rotten_second_row_is_found_at_its_host(whole: Fleet) -> None:
    """What it would give is not returned; the next host reports the row, and no other host is accused (R25, R30)."""
    whole.lose(0)
    whole.lose(3)
    chunks, others = plain_chunks(0), whole.others(0, gone=(0, 3))
    (spoilt, *_) = [chunk for chunk in chunks if shares_row(chunk, 3)]
    row = RANKS.row_of(OWNER, 0, spoilt)
    assert row is not None
    whole.rot(whole.holders[5], whole.stored_parity(5), row + 1)
    expected = [b"" if chunk == spoilt else whole.shards[0].chunks[chunk] for chunk in chunks]
    assert found(whole.decode(0, chunks, others)) == expected
    reported = {host: [copy for copy in copies if copy.missing] for host, copies in whole.sealed.items()}
    spec = whole.stored_parity(5).spec
    parity = ShardId(JOB, ATTEMPT, STEP, 5, is_parity=True)
    assert reported.pop("f") == [Copy(parity, spec, "f", frozenset({row + 1}))]
    assert not any(reported.values())


def test_a_rotten_plain_row_is_found_here(whole: Fleet) -> None:
    """Two are lost and the row itself is bad: its host reports it, and the second row of one lost chunk still gives."""
    whole.lose(0)
    whole.lose(3)
    chunks, others = plain_chunks(0), whole.others(0, gone=(0, 3))
    (spoilt, *_) = [chunk for chunk in chunks if shares_row(chunk, 3)]
    row = RANKS.row_of(OWNER, 0, spoilt)
    assert row is not None
    whole.rot(whole.e, whole.parity(), row)
    assert found(whole.decode(0, chunks, others))[chunks.index(spoilt)] == b""
    assert whole.sealed["e"][-1] == Copy(PARITY, whole.parity().spec, "e", frozenset({row}))
    whole.seal(3)
    data = whole.client(3, 5).fetch_bytes(whole.request(0, [spoilt], whole.others(0)))
    assert found(data) == as_put(whole, 0, [spoilt])


def test_a_next_host_out_of_reach_is_a_fault_of_transport(whole: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """The asker gets the error on its connection, and nothing is reported; chunks that need no second come."""
    whole.lose(0)
    whole.lose(3)
    server, real = whole.e.peer_server.parity, whole.e.peer_server.parity.reach

    def reach(host: str) -> OtherHolder:
        return nowhere(host) if host == "f" else real(host)

    monkeypatch.setattr(server, "reach", reach)
    others = whole.others(0, gone=(0, 3))
    with whole.client(1, OWNER).channel() as channel:
        with pytest.raises(TransportError, match="decode"):
            channel.request(whole.request(0, plain_chunks(0), others), timeout_s=60.0)
        assert channel.request(Ping(), timeout_s=60.0).kind is Kind.REPLY
    assert [copy.missing for copy in whole.sealed["e"]] == [frozenset()]
    whole.seal(3)
    rest = [row for row in whole.others(0) if row.host != "f"]
    assert found(whole.decode(0, plain_chunks(0), rest)) == as_put(whole, 0, plain_chunks(0))


def test_a_host_decodes_two_lost_shards_into_its_own_slots(whole: Fleet) -> None:
    """As an incoming replica, verified: those of rows here; for the plain ones the next host gives its row."""
    whole.lose(0)
    whole.lose(3)
    shard, replicas = whole.shards[0], whole.e.replicas
    chunks = decode_manifest(shard.manifest).chunks
    replica = replicas.open_incoming("r", shard.shard, [c.digest for c in chunks], [c.nbytes for c in chunks], ATTEMPT)
    here, others = plain_chunks(0), whole.others(0, gone=(0, 3))
    assert whole.e.peer_server.parity.decode_into(replica, shard.digest, here, others) == []
    assert {*here}.isdisjoint(replica.missing)
    views = [replicas.arena.view(replica.slots[chunk] or 0, chunks[chunk].nbytes) for chunk in here]
    assert list(map(bytes, views)) == as_put(whole, 0, here)
    replicas.abort_incoming("r", shard.shard)


def next_step(fleet: Fleet, changes: dict[int, dict[int, bytes]]) -> None:
    """Go on with the shards of the next step."""
    fleet.shards = {r: shard.next_step(changes.get(r, {}), CHUNK_BYTES) for r, shard in fleet.shards.items()}


def test_of_two_rows_of_a_changed_chunk_each_host_fetches_what_has_not_changed(fleet: Fleet) -> None:
    """The changed chunk is sent to both hosts of its rows, the rest of these rows is fetched, all else is shared."""
    before = fleet.put()
    changed = plain_chunks(0)[0]
    row = RANKS.row_of(OWNER, 0, changed)
    next_step(fleet, {0: {changed: b"n" * CHUNK_BYTES}})
    received = fleet.e.peer_server.parity.received_bytes
    stored = fleet.put()
    assert fleet.rows() == rows_of(RANKS, OWNER, fleet.shards)
    assert [now == was for now, was in zip(stored.slots, before.slots, strict=True)] == [
        number != row for number in range(len(stored.slots))
    ]
    in_row = [
        len(shard.chunks[chunk])
        for rank, shard in fleet.shards.items()
        for chunk, at in RANKS.rows_at(OWNER, rank, len(shard.chunks)).items()
        if rank != OWNER and at == row
    ]
    assert len(in_row) > 1
    assert fleet.e.peer_server.parity.received_bytes - received == sum(in_row)


def full_arena(holder: Holder, left: int) -> list[int]:
    """Take all slots of a host but some."""
    return holder.replicas.take_slots(len(holder.replicas.table.free) - left)


def test_parity_without_room_for_a_row_of_no_chunk_is_refused_and_stored_later() -> None:
    """The last seal is told, not finally; it comes again when there is room, and nothing is sent twice (R10)."""
    with some_holders(HOSTS, CHUNK_BYTES) as holders:
        for holder in holders:
            holder.replicas.ensure_free(60)
        # Only rank 3 has chunks, at e in plain rows alone: row 1 has none.
        fleet = Fleet(holders, RANKS, [0, 0, 0, 5 * CHUNK_BYTES, 0, 0])
        senders = [Sender(fleet, rank) for rank in RANKS.others(OWNER)]
        assert [sender.offer() for sender in senders] == [Done()] * 5
        taken = full_arena(fleet.e, left=2)
        for sender in senders:
            sender.send_all()
        assert [sender.seal() for sender in senders[:-1]] == [Done()] * 4
        assert senders[-1].seal() == Refused(
            why=f"row 1 of {PARITY} has no chunk in it, and there is no slot for it", is_final=False
        )
        received = fleet.e.peer_server.parity.received_bytes
        fleet.e.replicas.give_back(taken)
        assert senders[-1].seal() == HasCopy()
        assert fleet.rows() == rows_of(RANKS, OWNER, fleet.shards)
        assert fleet.e.peer_server.parity.received_bytes == received
        assert [copy.shard for copy in fleet.sealed["e"]] == [PARITY]


def test_a_parity_row_in_the_others_is_no_host_of_a_shard(whole: Fleet) -> None:
    """The next rank's shard is lost, its parity is not: the one is not asked for at the other's host."""
    whole.lose(0)
    whole.lose(5)
    others = whole.others(0, gone=(0,))
    told = [row for row in others if (row.rank, row.parity) != (5, None)]
    assert ShardHost(5, "f", whole.stored_parity(5).spec.digest) in told
    chunks = plain_chunks(0)
    assert found(whole.decode(0, chunks, told)) == as_put(whole, 0, chunks)

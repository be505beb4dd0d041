"""Parity between real holders over sockets: four hosts add their shards to a fifth one's, and it decodes them (R37)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from parity_fleet import (
    ATTEMPT,
    CHUNK_BYTES,
    HOSTS,
    JOB,
    OWNER,
    PARITY,
    STEP,
    Fleet,
    RankShard,
    Sender,
    nowhere,
    rows_of,
    until,
)

from memstore.core.format.manifest import chunk_digest, decode_manifest
from memstore.core.holder.puts import push
from memstore.core.wire.frame import Kind
from memstore.core.wire.ids import WireShard
from memstore.core.wire.orders import PushTargets, RankTargets
from memstore.core.wire.peer_messages import (
    ChunkBatch,
    Done,
    FetchChunks,
    FetchManifest,
    HasCopy,
    Offer,
    OfferedChunk,
    ParityOf,
    Ping,
    Refused,
    Seal,
    ShardHost,
    Verify,
)
from memstore.errors import TransportError
from memstore.testing.clusters.two_holders import some_holders
from recovery.inventory import Copy, ShardId
from recovery.parity import ParitySet

RANKS = (0, 1, 2, 3, 4)
SET = ParitySet(RANKS)
SIZES = [9 * CHUNK_BYTES + 5, 0, 100, 4 * CHUNK_BYTES, 6 * CHUNK_BYTES]


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with some_holders(HOSTS[:5], CHUNK_BYTES) as holders:
        for holder in holders:
            holder.replicas.ensure_free(60)
        yield Fleet(holders, SET, SIZES)


def test_four_unequal_shards_are_added_at_once(fleet: Fleet) -> None:
    """One has no byte and one a single chunk; the rows are what definition says, the last seal reports them."""
    stored = fleet.put()
    assert fleet.rows() == rows_of(SET, OWNER, fleet.shards)
    assert [s.rank for s in stored.spec.summands] == [0, 1, 2, 3]
    assert (fleet.failed, fleet.e.replicas.index.parity, fleet.e.replicas.index.incoming) == ([], {}, {})
    assert [copy.shard for copy in fleet.sealed["e"]] == [PARITY]
    received = sum(len(fleet.shards[r].chunks[c]) for r in RANKS[:4] for c in fleet.shards[r].at(SET, OWNER))
    assert fleet.e.peer_server.parity.received_bytes == received
    fleet.push(0)
    assert fleet.e.peer_server.parity.received_bytes == received
    assert [copy.shard for copy in fleet.sealed["e"]] == [PARITY] * 2, "the report may be lost: it is told again"


def test_rows_that_have_not_changed_are_shared_and_of_mixed_ones_the_rest_is_fetched(fleet: Fleet) -> None:
    """One chunk has changed at the next step: it alone is sent, and the unchanged ones of its row are fetched."""
    before = fleet.put()
    changed = fleet.shards[0].at(SET, OWNER)[0]
    new = {0: {changed: b"new" * 1000 + fleet.shards[0].chunks[changed][3000:]}}
    fleet.shards = {r: shard.next_step(new.get(r, {}), CHUNK_BYTES) for r, shard in fleet.shards.items()}
    received = fleet.e.peer_server.parity.received_bytes
    stored = fleet.put()
    assert fleet.rows() == rows_of(SET, OWNER, fleet.shards)
    assert [now == was for now, was in zip(stored.slots, before.slots, strict=True)] == [False, True]
    in_row = [fleet.shards[r].chunks[c] for r in RANKS[:4] for c in list(fleet.shards[r].at(SET, OWNER))[:1]]
    assert fleet.e.peer_server.parity.received_bytes - received == sum(map(len, in_row))
    assert len(in_row) > 1
    fleet.e.replicas.drop(before.shard)
    fleet.lose(3)
    wanted = list(fleet.shards[3].at(SET, OWNER))
    request = FetchChunks(
        shard=WireShard.of(fleet.shards[3].shard),
        digest=fleet.shards[3].digest,
        chunks=tuple(wanted),
        others=fleet.others(3),
    )
    found = fleet.client(0, OWNER).fetch_bytes(request)
    assert [bytes(each) for each in found] == [fleet.shards[3].chunks[chunk] for chunk in wanted]


def test_rows_whose_parity_before_went_bad_are_sent_whole(fleet: Fleet) -> None:
    """A row of the step before was found bad: nothing of it is used again."""
    before = fleet.put()
    fleet.rot(fleet.e, before, 0)
    assert fleet.e.replicas.verify(before) == [0]
    fleet.shards = {r: shard.next_step({}, CHUNK_BYTES) for r, shard in fleet.shards.items()}
    received = fleet.e.peer_server.parity.received_bytes
    fleet.put()
    assert fleet.rows() == rows_of(SET, OWNER, fleet.shards)
    first = [
        shard.chunks[shard.at(SET, OWNER)[0]]
        for r, shard in fleet.shards.items()
        if r != OWNER and shard.at(SET, OWNER)
    ]
    assert fleet.e.peer_server.parity.received_bytes - received == sum(map(len, first))


def test_every_hosts_parity_decodes_a_lost_shard_bit_for_bit(fleet: Fleet) -> None:
    """Each chunk from the host that has its row; its manifest too."""
    for rank in RANKS:
        fleet.seal(rank)
    for owner in RANKS:
        for rank in (r for r in RANKS if r != owner):
            fleet.push(rank, owner)
    assert fleet.failed == []
    for lost in (0, 2, 4):
        shard, wire = fleet.shards[lost], WireShard.of(fleet.shards[lost].shard)
        fleet.lose(lost)
        others = tuple(ShardHost(r, HOSTS[r]) for r in RANKS if r != lost)
        for owner in (r for r in RANKS if r != lost):
            client = fleet.client(lost, owner)
            assert client.call(FetchManifest(shard=wire, digest=shard.digest)).manifest == shard.manifest
            wanted = tuple(shard.at(SET, owner))
            found = client.fetch_bytes(FetchChunks(shard=wire, digest=shard.digest, chunks=wanted, others=others))
            assert [bytes(each) for each in found] == [shard.chunks[chunk] for chunk in wanted]
        fleet.seal(lost)


def test_a_host_with_the_parity_of_two_ranks_decodes_from_both(fleet: Fleet) -> None:
    """Two ranks of the set have moved there: each chunk is in the rows of one of them, and bad rows of both count."""
    fleet.put()
    fleet.seal(OWNER, by=3)  # its rank has moved
    for rank in SET.others(3):
        fleet.push(rank, 3, at=OWNER, by=3 if rank == OWNER else None)
    fleet.lose(0)
    shard = fleet.shards[0]
    wanted = sorted({*shard.at(SET, OWNER), *shard.at(SET, 3)})
    assert min(len(shard.at(SET, owner)) for owner in (OWNER, 3)) > 0
    others = [ShardHost(rank, HOSTS[3 if rank == OWNER else rank]) for rank in SET.others(0)]
    assert [bytes(each) for each in fleet.decode(0, wanted, others)] == [shard.chunks[chunk] for chunk in wanted]
    kept = [each for each in fleet.e.replicas.index.shards.values() if each.shard.is_parity]
    for stored in kept:
        fleet.rot(fleet.e, stored, 0)
    rotten = {c for owner in (OWNER, 3) for c in wanted if SET.row_of(owner, 0, c) == 0}
    request = Verify(shard=WireShard.of(shard.shard), digest=shard.digest, chunks=tuple(wanted))
    assert set(fleet.client(3, OWNER).call(request).chunks) == rotten
    assert len(kept) == len(rotten) == 2


def test_a_host_decodes_into_its_own_slots(fleet: Fleet) -> None:
    """A shard that was lost is brought to the host that has its parity: as an incoming replica, verified."""
    fleet.put()
    fleet.lose(0)
    shard, replicas = fleet.shards[0], fleet.e.replicas
    chunks = decode_manifest(shard.manifest).chunks
    replica = replicas.open_incoming("r", shard.shard, [c.digest for c in chunks], [c.nbytes for c in chunks], ATTEMPT)
    here = shard.at(SET, OWNER)
    assert fleet.e.peer_server.parity.decode_into(replica, shard.digest, here, fleet.others(0)) == []
    assert replica.missing == [chunk for chunk in range(len(chunks)) if chunk not in here]
    replicas.abort_incoming("r", shard.shard)


def test_a_bad_chunk_of_another_shard_gives_an_empty_one_and_is_reported(fleet: Fleet) -> None:
    """What is decoded is digested: wrong bytes never leave, and the host of the bad ones says what it lacks (R25)."""
    fleet.put()
    stored = fleet.holders[3].replicas.index.find(fleet.shards[3].shard)
    assert stored is not None
    wanted = list(fleet.shards[0].at(SET, OWNER))
    bad = fleet.shards[3].at(SET, OWNER)[0]
    fleet.rot(fleet.holders[3], stored, bad)
    fleet.lose(0)
    found = fleet.decode(0, wanted)
    assert [bytes(each) for each in found] == [b"", *(fleet.shards[0].chunks[chunk] for chunk in wanted[1:])]
    assert [(copy.shard.rank, copy.missing) for copy in fleet.sealed["d"]] == [(3, frozenset({bad}))]
    assert [copy.missing for copy in fleet.sealed["e"]] == [frozenset()]


def test_a_bad_row_gives_an_empty_chunk_and_is_reported(fleet: Fleet) -> None:
    """The row is quarantined; a push again brings that row alone, and it decodes as before (R30)."""
    stored = fleet.put()
    fleet.rot(fleet.e, stored, 1)
    wanted = list(fleet.shards[0].at(SET, OWNER))
    fleet.lose(0)
    assert [bool(each) for each in fleet.decode(0, wanted)] == [row != 1 for row in range(len(wanted))]
    assert fleet.sealed["e"][-1] == Copy(PARITY, stored.spec, "e", frozenset({1}))
    fleet.seal(0)
    before = fleet.e.peer_server.parity.received_bytes
    for rank in RANKS[:4]:
        fleet.push(rank)
    assert fleet.rows() == rows_of(SET, OWNER, fleet.shards)
    again = sum(len(fleet.shards[r].chunks[c]) for r in RANKS[:4] for c in list(fleet.shards[r].at(SET, OWNER))[1:2])
    assert fleet.e.peer_server.parity.received_bytes - before == again
    assert fleet.parity() is stored
    fleet.lose(0)
    assert [bytes(each) for each in fleet.decode(0, wanted)] == [fleet.shards[0].chunks[chunk] for chunk in wanted]


def test_a_host_that_is_out_of_reach_is_no_evidence_and_ends_no_connection(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The asker gets a fault of transport, on the connection that it has; nothing is reported (R25)."""
    fleet.put()
    fleet.lose(0)
    monkeypatch.setattr(fleet.e.peer_server.parity, "reach", nowhere)
    line = fleet.client(1, OWNER)
    with line.channel() as channel:
        request = FetchChunks(
            shard=WireShard.of(fleet.shards[0].shard),
            digest=fleet.shards[0].digest,
            chunks=tuple(fleet.shards[0].at(SET, OWNER)),
            others=fleet.others(0),
        )
        with pytest.raises(TransportError) as raised:
            channel.request(request, timeout_s=60.0)
        assert "decode" in str(raised.value)
        assert channel.request(Ping(), timeout_s=60.0).kind is Kind.REPLY
    assert [copy.missing for copy in fleet.sealed["e"]] == [frozenset()]


def test_a_chunk_that_came_damaged_is_no_evidence_against_the_others(fleet: Fleet) -> None:
    """The host of the parity digests its rows, says what it lacks of them, and reports them (R25)."""
    stored = fleet.put()
    fleet.lose(0)
    request = Verify(shard=WireShard.of(fleet.shards[0].shard), digest=fleet.shards[0].digest, chunks=None)
    assert fleet.client(1, OWNER).call(request).chunks == ()
    fleet.rot(fleet.e, stored, 1)
    assert fleet.client(1, OWNER).call(request).chunks == (fleet.shards[0].at(SET, OWNER)[1],)
    assert [copy.missing for copy in fleet.sealed["e"]] == [frozenset(), frozenset(), frozenset({1})]


def test_a_host_with_part_of_the_shard_decodes_the_rest(fleet: Fleet) -> None:
    """A lost shard was decoded onto the host of the parity, and a chunk went bad there: its row gives it again."""
    fleet.put()
    fleet.lose(0)
    shard, replicas = fleet.shards[0], fleet.e.replicas
    slots = replicas.take_slots(len(shard.chunks))
    for slot, chunk in zip(slots, shard.chunks, strict=True):
        replicas.arena.view(slot, len(chunk))[:] = chunk
    nbytes = sum(map(len, shard.chunks))
    stored = replicas.seal_local(shard.shard, world_size=64, layout=b"", nbytes=nbytes, slots=slots, attempt=ATTEMPT)
    assert stored.spec.digest == shard.digest
    bad = shard.at(SET, OWNER)[0]
    fleet.rot(fleet.e, stored, bad)
    replicas.verify(stored)
    found = fleet.decode(0, range(len(shard.chunks)))
    assert [bytes(each) for each in found] == list(shard.chunks)


def test_a_chunk_that_has_no_row_here_is_empty_and_makes_no_one_search(fleet: Fleet) -> None:
    """Its row is at another host: that is no damage here."""
    fleet.put()
    fleet.lose(0)
    strange = [chunk for chunk in range(9) if chunk not in fleet.shards[0].at(SET, OWNER)][:2]
    assert fleet.decode(0, strange) == [b"", b""]
    assert fleet.sealed["d"] == []


def test_a_chunk_that_is_damaged_on_the_way_is_not_added(fleet: Fleet) -> None:
    """It is lacking at the seal, and is sent again: the row has it once (R37)."""
    sender, here = Sender(fleet, 0), list(fleet.shards[0].at(SET, OWNER))
    assert sender.offer() == Done()
    assert sender.begin(here) == here
    good = [fleet.shards[0].chunks[chunk] for chunk in here]
    sender.send(bytes(len(good[0])), *good[1:])
    assert sender.end() is Kind.REPLY
    assert list(sender.seal().chunks) == here[:1]
    assert sender.begin(here) == here[:1]
    sender.send(b"")  # the sender has just lost it: nothing came, and nothing came damaged
    assert sender.end() is Kind.REPLY
    assert fleet.e.peer_server.damage.stats()["digest_errors"] == 1
    assert list(sender.seal().chunks) == here[:1]
    assert sender.begin(here) == here[:1]
    sender.send(good[0])
    assert sender.end() is Kind.REPLY
    assert [sender.seal() for _ in range(2)] == [Done(), Done()]
    for rank in (1, 2, 3):
        fleet.seal(rank)
        fleet.push(rank)
    assert fleet.rows() == rows_of(SET, OWNER, fleet.shards)
    assert sender.seal() == HasCopy(), "the answer was lost, and the seal comes again"
    assert isinstance(sender.offer(), Refused), "which bytes it has is not known"
    assert sender.offer(is_known=True) == HasCopy()


def test_a_sender_that_dies_in_a_batch_and_comes_again_sends_the_rest(fleet: Fleet) -> None:
    """What was added before stays added, and is not asked for again."""
    first, here = Sender(fleet, 0), list(fleet.shards[0].at(SET, OWNER))
    assert first.offer() == Done()
    assert first.begin(here) == here
    first.send(fleet.shards[0].chunks[here[0]])
    parity = fleet.e.replicas.index.parity[PARITY]
    until(lambda: 0 in parity.rows and 0 in parity.rows[0].added)
    first.channel.close()
    second = Sender(fleet, 0)
    assert second.offer() == Done()
    assert second.begin(here) == here[1:]
    second.send(*(fleet.shards[0].chunks[chunk] for chunk in here[1:]))
    assert second.end() is Kind.REPLY
    assert second.seal() == Done()
    for rank in (1, 2, 3):
        Sender(fleet, rank).send_all()
    assert [Sender(fleet, rank).seal() for rank in (1, 2, 3)] == [Done(), Done(), HasCopy()]
    assert fleet.rows() == rows_of(SET, OWNER, fleet.shards)


def test_two_connections_that_add_to_the_same_row_take_turns(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are in the row at once as far as threads allow: it is the sum of both (R37)."""
    for rank in RANKS[:4]:
        fleet.seal(rank)
    for rank in (1, 2):
        fleet.push(rank)
    meet = threading.Barrier(2)
    real = fleet.e.replicas.add_to_parity

    def together(*given: Any) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            meet.wait(2.0)
        real(*given)

    monkeypatch.setattr(fleet.e.replicas, "add_to_parity", together)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(fleet.push, (0, 3)))
    assert fleet.failed == []
    assert fleet.rows() == rows_of(SET, OWNER, fleet.shards)


def test_a_fence_in_the_middle_frees_the_rows_and_a_new_attempt_begins_again(fleet: Fleet) -> None:
    """What a fenced attempt has added is gone with its slots; its sender is told at the next word (R21)."""
    free = len(fleet.e.replicas.table.free)
    sender = Sender(fleet, 0)
    sender.send_all()
    assert len(fleet.e.replicas.table.free) < free
    fleet.e.replicas.abort_older(JOB, ATTEMPT + 1)
    assert len(fleet.e.replicas.table.free) == free
    assert isinstance(sender.seal(), Refused)
    assert sender.begin([3]) == [-1]


def test_a_set_of_other_ranks_is_refused_by_name(fleet: Fleet) -> None:
    """A controller that chose other sets meanwhile: nothing of one set is added into rows of another (R37)."""
    sender = Sender(fleet, 0)
    sender.send_all()
    other = ParityOf(OWNER, (0, 4, 9), spare=1)
    shard = fleet.shards[0]
    offer = Offer(
        shard=sender.wire, sender="a", parity=other, digest=None, attempt=ATTEMPT, chunks_count=len(shard.chunks)
    )
    assert isinstance(sender.ask(offer), Refused)
    offered = tuple(OfferedChunk(c, chunk_digest(shard.chunks[c]), len(shard.chunks[c])) for c in (0,))
    nine = WireShard(JOB, ATTEMPT, STEP, 9)
    batch = ChunkBatch(shard=nine, sender="a", parity=other, chunks=offered)
    assert isinstance(sender.ask(batch), Refused)
    seal = Seal(shard=nine, sender="a", parity=other, manifest=RankShard.of(9, 5, CHUNK_BYTES).manifest)
    assert isinstance(sender.ask(seal), Refused)
    assert sender.seal() == Done()


def test_a_put_is_added_where_the_targets_say(fleet: Fleet) -> None:
    """Every host pushes its rank's shard to all others of the set, and each of them keeps parity of the rest (R13)."""
    members = tuple(ShardHost(r, HOSTS[r]) for r in RANKS)
    for rank, holder in enumerate(fleet.holders):
        row = RankTargets(rank=rank, targets=(), other_writers=(), parity_set=members, spare=1)
        holder.state.shared_shards.declare(PushTargets(job=JOB, attempt=ATTEMPT, targets=(), ranks=(row,)))
        stored = fleet.seal(rank)
        assert holder.io.run(push.replicate, holder.state, stored.shard, stored.spec.digest)
    for rank, holder in enumerate(fleet.holders):
        shard = ShardId(JOB, ATTEMPT, STEP, rank, is_parity=True)
        until(lambda holder=holder, shard=shard: holder.replicas.index.find(shard) is not None)
        until(lambda holder=holder: not holder.state.pushes.under_way)
    assert fleet.rows() == rows_of(SET, OWNER, fleet.shards)
    assert fleet.failed == []

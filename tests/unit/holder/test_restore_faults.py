"""Transfers between two holders that break or rot: what counts as evidence, and what is only bad luck (R13, R25)."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from memstore.core.arena import replica_store
from memstore.core.arena.replica_index import StoredReplica
from memstore.core.arena.replica_store import VERIFY_AGE_S, ReplicaStore
from memstore.core.format.manifest import manifest_name
from memstore.core.holder import persist
from memstore.core.holder.holder_io import HolderIo
from memstore.core.holder.inventory import report_copy
from memstore.core.holder.puts import push
from memstore.core.holder.puts.push import Push
from memstore.core.holder.reads import bring, fetch, ready
from memstore.core.holder.state import HolderState
from memstore.core.wire.codec import Request
from memstore.core.wire.ids import WireShard, WireSpec, WireStep
from memstore.core.wire.orders import Bring, FreeCopies, FreeStep, Order, Run, StepLevel, TermNumber
from memstore.core.wire.peer_messages import FetchManifest, Verify
from memstore.core.wire.reports import Brought, Freed, HolderMessage, Report, Sealed, StepFreed
from memstore.errors import CapacityError, IntegrityError, PeerUnreachable
from memstore.shell.holder.holder import Holder
from memstore.shell.peer.client import PeerClient
from memstore.testing.clusters.two_holders import two_holders
from recovery.inventory import ShardId

CHUNK_BYTES = 64 << 10
SHARD = ShardId("train", 1, 2, 0)
Reports = list[HolderMessage]


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Holder, Holder]]:
    """Two holders that know each other, without a controller."""
    monkeypatch.setattr(fetch, "RETRY_S", 0.01)
    with two_holders(CHUNK_BYTES) as found:
        yield found


def seal(replicas: ReplicaStore, shard: ShardId, fills: bytes = b"\1\2\3\4") -> StoredReplica:
    """Store a shard of one chunk per fill byte, as a rank's put would."""
    replicas.ensure_free(len(fills))
    slots = replicas.take_slots(len(fills))
    for slot, fill in zip(slots, fills, strict=True):
        replicas.arena.view(slot, CHUNK_BYTES)[:] = bytes([fill]) * CHUNK_BYTES
    return replicas.seal_local(
        shard, world_size=1, layout=b"", nbytes=len(fills) * CHUNK_BYTES, slots=slots, attempt=shard.attempt
    )


def rot(replicas: ReplicaStore, stored: StoredReplica, index: int) -> None:
    """Flip a bit of a sealed chunk behind all processes' back."""
    slot = stored.slots[index]
    assert slot is not None
    replicas.arena.view(slot, CHUNK_BYTES)[7] ^= 1


def age(replicas: ReplicaStore) -> None:
    """Everything was verified too long ago to be trusted unseen."""
    for slot in replicas.table.slots:
        slot.verified_s -= 2 * VERIFY_AGE_S


def reports_of(holder: Holder, monkeypatch: pytest.MonkeyPatch) -> Reports:
    """Collect what a holder tells the controller."""
    found: Reports = []
    monkeypatch.setattr(holder.state, "report", found.append)
    return found


def order(stored: StoredReplica) -> Bring:
    """Bring the whole shard from host a, for a get of all ranks."""
    return Bring(
        read=1,
        job="train",
        shard=WireShard.of(stored.shard),
        spec=WireSpec.of(stored.spec),
        chunks=None,
        attempt=2,
        holders=("a",),
        runs=(Run("peer", "a", 0, 4),),
        durable=None,
        reader="",
        use="get",
    )


def brought(holder: Holder, order: Bring) -> dict[str, list[int]]:
    """Carry out an order."""
    bring.begin(holder.state, order)
    return holder.io.run(bring._bring, holder.state, order)


async def only_at_once(io: HolderIo, state: HolderState, order: Bring, until_s: float) -> bool:
    """In the place of `may_wait`: another try only while the planned source has one left, and without a pause."""
    return until_s == float("inf")


async def never(io: HolderIo, state: HolderState, order: Bring, until_s: float) -> bool:
    """In the place of `may_wait`: no other try."""
    return False


def await_lane(holder: Holder, kind: str) -> None:
    """Wait until all that was begun on a lane has ended; nothing more can be begun there."""
    pool = holder.io._lanes[kind]
    assert isinstance(pool, ThreadPoolExecutor)
    pool.shutdown(wait=True)


def staged(holder: Holder, order: Bring, reports: Reports) -> Brought:
    """Stage and return the report."""
    holder.obey(order)
    await_lane(holder, "read")
    return next(report for report in reports if isinstance(report, Brought))


def break_calls(monkeypatch: pytest.MonkeyPatch, kind: type[Request[Any]], error: Exception, times: int) -> None:
    """The first requests of a kind raise `error`."""
    real, left = PeerClient.call, [times]

    def broken(self: PeerClient, request: Request[Any], timeout_s: float = 30.0) -> Any:
        if isinstance(request, kind) and left[0] > 0:
            left[0] -= 1
            raise error
        return real(self, request, timeout_s)

    monkeypatch.setattr(PeerClient, "call", broken)


@pytest.mark.parametrize("kind", [FetchManifest, Verify])
def test_a_reset_connection_costs_another_try(
    pair: tuple[Holder, Holder], monkeypatch: pytest.MonkeyPatch, kind: type[Request[Any]]
) -> None:
    """A connection that breaks once during a restore is no evidence about the bytes: it is asked again (R25)."""
    a, b = pair
    stored, reports = seal(a.replicas, SHARD), reports_of(b, monkeypatch)
    break_calls(monkeypatch, kind, PeerUnreachable("connection reset"), times=1)
    report = staged(b, order(stored), reports)
    assert (report.problem, report.bad) == (None, {})
    assert b.state.reads.ready[1].sources == {"a": [0, 1, 2, 3]}


@pytest.mark.parametrize("error", [PeerUnreachable("connection reset"), CapacityError("the arena is full")])
def test_bad_luck_is_reported_without_evidence(
    pair: tuple[Holder, Holder], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """When the tries are used up the report names the cause and blames no chunk of the source (R25)."""
    a, b = pair
    stored, reports = seal(a.replicas, SHARD), reports_of(b, monkeypatch)
    monkeypatch.setattr(fetch, "may_wait", only_at_once)
    break_calls(monkeypatch, Verify, error, times=1000)
    report = staged(b, order(stored), reports)
    assert report.bad == {}
    assert str(error) in str(report.problem)
    assert not b.replicas.index.incoming


def test_a_rotten_chunk_is_believed_on_the_sources_own_word(
    pair: tuple[Holder, Holder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source digests its bytes again and tells the controller what it lacks: then the chunk counts as bad (R25)."""
    a, b = pair
    stored, reports, from_a = seal(a.replicas, SHARD), reports_of(b, monkeypatch), reports_of(a, monkeypatch)
    rot(a.replicas, stored, 2)
    assert staged(b, order(stored), reports).bad == {"a": (2,)}
    assert [report.copy.missing for report in from_a if isinstance(report, Sealed)] == [(2,)]


@pytest.mark.parametrize("kind", ["abandon", "drop", "drop the step"])
def test_what_was_brought_for_a_reader_goes_with_its_step(
    pair: tuple[Holder, Holder], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Soon after a step was abandoned or dropped, not with the pin: puts need its slots (R7, R12)."""
    a, _ = pair
    stored = seal(a.replicas, SHARD)
    assert brought(a, order(stored)) == {}
    monkeypatch.setattr(replica_store, "DROPPED_READ_S", -1.0)
    free = len(a.replicas.table.free)
    orders = {
        "abandon": StepLevel(job="train", attempt=1, step=2, level="skipped", reason="given up", resume=3),
        "drop": FreeCopies(shards=(WireShard.of(SHARD),), number=None),
        "drop the step": FreeStep(job="train", step=WireStep(1, 2), number=TermNumber(3, 7)),
    }
    a.obey(orders[kind])
    await_lane(a, "drop")
    assert not a.replicas.index.shards
    a.io.run(ready.expire, a.state)
    assert len(a.replicas.table.free) == free + len(stored.slots)
    assert not a.state.reads.ready


@pytest.mark.parametrize("is_step", [True, False])
@pytest.mark.parametrize("can_free", [True, False])
def test_a_holder_says_when_it_has_freed_a_copy(
    pair: tuple[Holder, Holder], monkeypatch: pytest.MonkeyPatch, can_free: bool, is_step: bool
) -> None:
    """The controller counts no copy that it ordered to go until then; also where freeing it failed (R19)."""
    a, _ = pair
    seal(a.replicas, SHARD)
    others = [SHARD._replace(step=3), SHARD._replace(attempt=2), SHARD._replace(job="other")]
    for other in others:
        seal(a.replicas, other)
    reports, seen = reports_of(a, monkeypatch), []
    drop, report = a.replicas.drop, a.state.report

    def dropped(shard: ShardId) -> None:
        if not can_free:
            raise OSError("its manifest cannot be removed")
        drop(shard)

    def noted(reported: Report) -> None:
        seen.append(SHARD in [copy.shard for copy in a.replicas.index.copies("a", "train")])
        report(reported)

    monkeypatch.setattr(a.replicas, "drop", dropped)
    monkeypatch.setattr(a.state, "report", noted)
    shards, number = (WireShard.of(SHARD),), TermNumber(3, 7)
    step = WireStep(SHARD.attempt, SHARD.step)
    orders: list[Order] = [FreeCopies(shards=shards, number=number), FreeStep(job=SHARD.job, step=step, number=number)]
    a.obey(orders[is_step])
    await_lane(a, "drop")
    freed: list[Report] = [Freed(shards=shards, number=number), StepFreed(job=SHARD.job, step=step, number=number)]
    assert reports == [freed[is_step]]
    assert seen == [not can_free]
    assert {shard for shard, _ in a.replicas.index.shards} >= {*others}


def test_a_copy_that_was_dropped_meanwhile_is_not_reported(
    pair: tuple[Holder, Holder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that was sealed or looked at before it was dropped would be counted after it is gone (R7,
    R19).
    """
    a, _ = pair
    reports, stored = reports_of(a, monkeypatch), seal(a.replicas, SHARD)
    report_copy(a.state, stored)
    assert [type(report) for report in reports] == [Sealed]
    read = a.replicas.pin(SHARD)
    a.replicas.drop(SHARD)
    report_copy(a.state, stored)  # still there for its reader, and for no other process
    assert read is not None
    a.replicas.unpin(*read)
    report_copy(a.state, stored)
    assert [type(report) for report in reports] == [Sealed]


def test_a_staging_that_fails_leaves_nothing_pinned(
    pair: tuple[Holder, Holder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its manifest is damaged and the other copy out of reach: a pin would keep the slots for minutes (R7)."""
    a, _ = pair
    stored = seal(a.replicas, SHARD)
    damage_manifest(a, stored)
    monkeypatch.setattr(fetch, "may_wait", never)
    with pytest.raises(PeerUnreachable):
        brought(a, structs.replace(order(stored), holders=("a", "gone")))
    assert not stored.pins


def damage_manifest(holder: Holder, stored: StoredReplica) -> None:
    """Flip a bit in the file of a manifest."""
    path = holder.folder / "manifests" / manifest_name(stored.shard, stored.spec.digest)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("is_rotten", [False, True])
def test_a_have_is_verified_and_reported(
    pair: tuple[Holder, Holder], monkeypatch: pytest.MonkeyPatch, is_rotten: bool
) -> None:
    """An offered shard that is here already is digested again when old, repaired if rotten, and reported (R13)."""
    a, b = pair
    a.state.limits = replace(a.state.limits, whole_bytes=0)
    mine, theirs = seal(a.replicas, SHARD), seal(b.replicas, SHARD)
    b.replicas.ensure_free(4)
    age(b.replicas)
    if is_rotten:
        rot(b.replicas, theirs, 1)
    reports = reports_of(b, monkeypatch)
    a.io.run(push.run, a.state, Push(SHARD, mine.spec.digest, "b"))
    assert a.peers.peer("b").sent_bytes == (CHUNK_BYTES if is_rotten else 0)
    last = reports[-1]
    assert isinstance(last, Sealed)
    assert last.copy.missing == ()
    assert not b.replicas.verify(theirs)


def test_a_restore_does_not_lean_on_rotten_content(pair: tuple[Holder, Holder]) -> None:
    """A chunk that lies here for another shard is digested again before a restore counts on it, however young (R23)."""
    a, b = pair
    wanted, beside = seal(a.replicas, SHARD), seal(b.replicas, ShardId("train", 1, 1, 0))
    rot(b.replicas, beside, 1)
    assert brought(b, order(wanted)) == {}
    read = b.state.reads.ready[1]
    assert read.sources == {"a": [1]}
    assert [slot is None for slot in read.replica.slots] == [False, True, False, False]
    assert beside.missing == {1}


def test_a_put_does_not_lean_on_rotten_content(pair: tuple[Holder, Holder]) -> None:
    """Fresh bytes equal to an old chunk that has rotted are stored, not dropped for it (R13)."""
    replicas = pair[0].replicas
    old = seal(replicas, SHARD)
    age(replicas)
    rot(replicas, old, 0)
    new = seal(replicas, ShardId("train", 1, 3, 0))
    assert not replicas.verify(new)
    assert old.missing == {0}


def test_an_incoming_replica_loses_a_chunk_that_went_bad(pair: tuple[Holder, Holder]) -> None:
    """What an incoming replica holds by reference is lacking again once it is quarantined, so the shard cannot be
    sealed (R30).
    """
    replicas = pair[0].replicas
    old = seal(replicas, SHARD)
    sizes = [CHUNK_BYTES] * 4
    replica = replicas.open_incoming("a", ShardId("train", 1, 3, 0), old.digests, sizes, 1)
    assert replica.missing == []
    rot(replicas, old, 3)
    replicas.verify(old)
    assert replica.missing == [3]


def test_a_rotten_chunk_is_not_persisted(pair: tuple[Holder, Holder], monkeypatch: pytest.MonkeyPatch) -> None:
    """A durable part is written from verified bytes only; what is bad is taken out and reported (R30, R31)."""
    a, _ = pair
    stored, reports = seal(a.replicas, SHARD), reports_of(a, monkeypatch)
    rot(a.replicas, stored, 1)
    with pytest.raises(IntegrityError, match="chunk 1"):
        a.io.run(persist._copied, a.state, SHARD, stored.spec.digest, 0)
    assert stored.missing == {1}
    assert isinstance(reports[-1], Sealed)

"""Transfers between two holders that break or rot: what counts as evidence, and what is only bad luck (R13, R25)."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, cast

import pytest
from msgspec import structs

from memstore.core.arena.replica_index import StagedKey, StoredReplica
from memstore.core.arena.replica_store import VERIFY_AGE_S, ReplicaStore
from memstore.core.arena.slot_table import Owner
from memstore.core.format.manifest import manifest_name
from memstore.core.holder import persist
from memstore.core.holder.holder_io import HolderIo
from memstore.core.holder.inventory import report_copy
from memstore.core.holder.puts import push
from memstore.core.holder.puts.push import Push
from memstore.core.holder.reads import fetch, stage
from memstore.core.holder.state import HolderState
from memstore.core.wire.codec import Request
from memstore.core.wire.ids import WireShard, WireSpec
from memstore.core.wire.orders import (
    Bring,
    FreeCopies,
    OrderCheck,
    ReadShard,
    Run,
    StageShard,
    StepLevel,
    TermNumber,
)
from memstore.core.wire.peer_messages import FetchManifest, Verify
from memstore.core.wire.reports import Freed, HolderMessage, IntoChecked, Report, Sealed, StageEnded
from memstore.errors import CapacityError, IntegrityError, PeerUnreachable
from memstore.shell.holder.holder import Holder
from memstore.shell.holder.rank_connections import RankConnection
from memstore.shell.peer.client import Peer
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


def order(stored: StoredReplica, number: int = 1) -> StageShard:
    """Stage the whole shard from host a."""
    return StageShard(
        job="train", round=number, rank=0, shard=WireShard.of(stored.shard), spec=WireSpec.of(stored.spec), attempt=2,
        holders=("a",), runs=(Run("peer", "a", 0, 4),), durable=None,
    )  # fmt: skip


def reading(stored: StoredReplica) -> ReadShard:
    """Bring the whole shard for one reader of rank 0."""
    return ReadShard(
        job="train", read=1, rank=0, shard=WireShard.of(stored.shard), spec=WireSpec.of(stored.spec), attempt=2,
        holders=("a",), runs=(Run("peer", "a", 0, 4),), durable=None, reader="",
    )  # fmt: skip


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


def staged(holder: Holder, order: StageShard, reports: Reports) -> StageEnded:
    """Stage and return the report."""
    holder.obey(order)
    await_lane(holder, "stage")
    return next(report for report in reports if isinstance(report, StageEnded))


def break_calls(monkeypatch: pytest.MonkeyPatch, kind: type[Request[Any]], error: Exception, times: int) -> None:
    """The first requests of a kind raise `error`."""
    real, left = Peer.call, [times]

    def broken(self: Peer, request: Request[Any], timeout_s: float = 30.0) -> Any:
        if isinstance(request, kind) and left[0] > 0:
            left[0] -= 1
            raise error
        return real(self, request, timeout_s)

    monkeypatch.setattr(Peer, "call", broken)


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
    assert b.state.partial_reads.known["train", 0].sources == {"a": [0, 1, 2, 3]}


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


def test_a_read_does_not_unpin_what_a_get_staged(pair: tuple[Holder, Holder]) -> None:
    """A reader of the same rank leaves the get's shard staged: its check still finds it (R26)."""
    a, _ = pair
    stored = seal(a.replicas, SHARD)
    for bring in (order(stored), reading(stored)):
        assert a.io.run(stage.stage, a.state, bring, SHARD) == {}
    assert a.replicas.staged(StagedKey("train", 0, "round", 1)) is stored


@pytest.mark.parametrize("kind", ["abandon", "drop"])
def test_what_a_restore_staged_goes_with_its_step(pair: tuple[Holder, Holder], kind: str) -> None:
    """An order to abandon or drop a step that a restore staged frees its slots at once, not with the pin (R7, R12)."""
    a, _ = pair
    stored = seal(a.replicas, SHARD)
    assert a.io.run(stage.stage, a.state, order(stored, 1), SHARD) == {}
    free = len(a.replicas.table.free)
    orders = {
        "abandon": StepLevel(job="train", attempt=1, step=2, level="skipped", reason="given up", resume=3),
        "drop": FreeCopies(shards=(WireShard.of(SHARD),), number=None),
    }
    a.obey(orders[kind])
    await_lane(a, "drop")
    assert len(a.replicas.table.free) == free + len(stored.slots)
    assert not a.replicas.index.shards
    assert not a.replicas.index.staged


@pytest.mark.parametrize("can_free", [True, False])
def test_a_holder_says_when_it_has_freed_a_copy(
    pair: tuple[Holder, Holder], monkeypatch: pytest.MonkeyPatch, can_free: bool
) -> None:
    """The controller counts no copy that it ordered to go until then; also where freeing it failed (R19)."""
    a, _ = pair
    seal(a.replicas, SHARD)
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
    a.obey(FreeCopies(shards=shards, number=number))
    await_lane(a, "drop")
    assert reports == [Freed(shards=shards, number=number)]
    assert seen == [not can_free]


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


def test_what_is_dropped_while_it_is_staged_is_not_kept(pair: tuple[Holder, Holder]) -> None:
    """A drop that comes while a restore digests the bytes ends the staging, and nothing stays pinned (R7, R23)."""
    a, _ = pair
    stored = seal(a.replicas, SHARD)
    verify = a.replicas.verify

    def dropped_meanwhile(*given: Any) -> list[int]:
        a.replicas.drop(SHARD)
        return verify(*given)

    a.replicas.verify = dropped_meanwhile  # type: ignore[method-assign]
    with pytest.raises(IntegrityError, match="was dropped while it was staged"):
        a.io.run(stage.stage, a.state, order(stored, 1), SHARD)
    assert not a.replicas.index.shards
    assert len(a.replicas.table.free) == len(a.replicas.table.slots)


def test_a_staging_that_fails_leaves_nothing_pinned(
    pair: tuple[Holder, Holder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its manifest is damaged and the other copy out of reach: a pin would keep the slots for minutes (R7)."""
    a, _ = pair
    stored = seal(a.replicas, SHARD)
    damage_manifest(a, stored)
    monkeypatch.setattr(fetch, "may_wait", never)
    with pytest.raises(PeerUnreachable):
        a.io.run(stage.stage, a.state, structs.replace(order(stored), holders=("a", "gone")), SHARD)
    assert not stored.pins


def damage_manifest(holder: Holder, stored: StoredReplica) -> None:
    """Flip a bit in the file of a manifest."""
    path = holder.folder / "manifests" / manifest_name(stored.shard, stored.spec.digest)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_check_whose_manifest_was_damaged_since_is_answered(
    pair: tuple[Holder, Holder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The get fails by name, and brings the manifest from another copy when it is called again."""
    a, _ = pair
    stored = seal(a.replicas, SHARD)
    assert a.io.run(stage.stage, a.state, order(stored), SHARD) == {}
    damage_manifest(a, stored)
    a.state.ranks.links["n"] = RankConnection(cast(Any, None), Owner(1, 1, 1), "n", "train", 0)
    reports = reports_of(a, monkeypatch)
    a.obey(OrderCheck(job="train", round=1, rank=0))
    [report] = reports
    assert isinstance(report, IntoChecked)
    assert "was damaged after it was written" in str(report.error)


def test_a_check_of_nothing_is_answered(pair: tuple[Holder, Holder], monkeypatch: pytest.MonkeyPatch) -> None:
    """An order to check what is not staged any more ends the get with an error instead of its deadline."""
    a, _ = pair
    reports = reports_of(a, monkeypatch)
    a.obey(OrderCheck(job="train", round=7, rank=0))
    [report] = reports
    assert isinstance(report, IntoChecked)
    assert report.error is not None
    assert report.error.error == "RecoveryError"


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
    ordered = order(wanted)
    stage.begin(b.state, ordered)
    assert b.io.run(stage.stage, b.state, ordered, SHARD) == {}
    read = b.state.partial_reads.known["train", 0]
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

"""Steps that can never be whole, and copies that no rank can restore, give their room back (R10, R12, R19, R22)."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from parity_fleet import no_parity

from memstore.core.arena.claimed_memory import Limit
from memstore.core.arena.replica_index import StoredReplica
from memstore.core.arena.replica_store import ReplicaStore
from memstore.core.arena.slot_table import PeerShare
from memstore.core.cluster.facts import StepSkipped
from memstore.core.journal.records import Entry
from memstore.core.wire.ids import WireShard
from memstore.core.wire.orders import FreeStep, PushCopy, Reserve
from memstore.core.wire.peer_messages import Done, Offer
from memstore.errors import CapacityError
from memstore.shell.arena.arena import open_store
from memstore.shell.peer.server import INCOMING_IDLE_S, PeerServer
from memstore.testing.clusters.scratch import scratch_folder
from memstore.testing.controller.world import JOB, trained
from recovery.inventory import ShardId, StepId


def test_an_open_step_whose_owner_lost_a_chunk_is_repaired_from_a_peer() -> None:
    """The last rank's put is late; meanwhile rank 0's own copy is damaged: a peer's copy repairs it and it commits."""
    world, ranks = trained(2, 2)
    world.put(ranks[0], 2)
    world.run(3.0)
    world.holders["h0"].damage(ShardId(JOB, 1, 2, 0))
    world.run(3.0)
    world.put(ranks[1], 2)
    assert world.run_until(lambda: ranks[1].tickets[2] == "committed", 20.0)
    assert world.holders_of(StepId(1, 2), 0) == ["h0", "h1"]


def test_an_open_step_whose_owner_lost_the_whole_copy_is_repaired_from_a_peer() -> None:
    """The last rank's put is late; meanwhile a new arena replaces rank 0's, while rank 0 lives: a peer's copy is pushed
    back, for rank 0 was informed that its put is over and hands nothing over again.
    """
    world, ranks = trained(2, 2)
    world.put(ranks[0], 2)
    world.run(3.0)
    world.kill_host("h0")
    world.return_host("h0")
    ranks[0].is_dead = False
    world.run(3.0)
    world.put(ranks[1], 2)
    assert world.run_until(lambda: ranks[1].tickets[2] == "committed", 20.0)
    assert world.holders_of(StepId(1, 2), 0) == ["h0", "h1"]
    assert not world.job().commits[StepId(1, 2)].is_degraded


def test_an_open_step_with_a_chunk_that_no_process_has_is_given_up() -> None:
    """Every copy of rank 0's shard lost the same chunk: the step is abandoned on all ranks and the next one commits."""
    world, ranks = trained(2, 2)
    world.put(ranks[0], 2)
    world.run(3.0)
    for holder in world.holders.values():
        holder.refuses_copies = "no room"  # nothing repairs it meanwhile
        holder.damage(ShardId(JOB, 1, 2, 0))
    world.run(8.0)
    assert [ranks[0].tickets[2], world.holders["h0"].held.get(ShardId(JOB, 1, 2, 0))] == ["skipped", None]
    for holder in world.holders.values():
        holder.refuses_copies = ""
    assert world.put_all(ranks, 3)


def test_damage_that_only_an_inventory_tells_is_seen_too() -> None:
    """The controller was away when every copy of an open step was damaged: its successor gives the step up (R12)."""
    world, ranks = trained(2, 2)
    world.put(ranks[0], 2)
    world.run(3.0)
    shard = ShardId(JOB, 1, 2, 0)
    world.crash_controller()
    for holder in world.holders.values():
        if shard in holder.held:
            holder.damage(shard)
    world.run(20.0)
    assert shard not in world.holders["h0"].held
    assert world.put_all(ranks, 3)


def test_a_get_that_failed_does_not_allow_the_first_put() -> None:
    """`try: get() except: start at 0` must not evict what could not be read: the first put is refused (R19)."""
    world, _ = trained(3, 3, last=5)
    ranks = world.launch(3)
    for holder in world.holders.values():
        holder.staging_fails = "no room"
    assert all("error" in answer for answer in world.get(ranks))
    for holder in world.holders.values():
        holder.staging_fails = ""
    world.reserve(ranks)
    world.run(5.0)
    assert {rank.error("reserve").partition(":")[0] for rank in ranks} == {"CommitError"}
    assert world.holders_of(StepId(1, 5), 0)


def test_a_rewind_keeps_its_step_from_a_commit_under_way() -> None:
    """keep_steps=1: step 2 commits while rewind(1) is under way; step 1 is what get() returns afterwards (R22)."""
    world, ranks = trained(1, 1, last=1, keep_steps=1)
    world.put(ranks[0], 2)
    world.call(ranks[0], "rewind", step=1, nonce=ranks[0].nonce, key=ranks[0].key)
    world.run(5.0)
    assert world.get(ranks)[0].get("step") == 1


def test_a_skip_that_only_a_late_host_remembers_frees_the_copies_elsewhere() -> None:
    """Copies were counted before the host that knows of the skip came: they go from every host then (R12, R16)."""
    world, ranks = trained(3, 3)
    world.kill_host("h2", keep_memory=True)
    record = Entry(world.term, 10_000, StepSkipped(JOB, 1, 2, 4)).record
    world.crash_controller()
    world.run(6.0)
    world.put(ranks[0], 2)
    world.run(3.0)
    assert world.holders_of(StepId(1, 2), 0)
    world.holders["h2"].journal.append(record)
    world.return_host("h2")
    world.run(3.0)
    assert world.holders_of(StepId(1, 2), 0) == []


def test_a_step_that_retention_dropped_is_not_rebuilt() -> None:
    """One host missed the order to drop an old step: nothing is copied from it, and a restore's first put frees it."""
    world, _ = trained(3, 3, last=1)
    old = ShardId(JOB, 1, 1, 0)
    world.holders["h0"].instead[FreeStep] = lambda order: None  # as if the order had died with a session
    ranks = [r for _, r in sorted(world.ranks.items())]
    assert world.put_all(ranks, 2)
    world.run(2.0)
    assert old in world.holders["h0"].held
    world.crash_controller()
    for holder in world.holders.values():
        holder.orders.clear()
    world.holders["h0"].instead.clear()
    world.run(12.0)
    pushed = [order.shard.id for holder in world.holders.values() for order in holder.received(PushCopy)]
    assert old not in pushed
    ranks = world.launch(3)
    world.get(ranks)
    assert world.put_all(ranks, 3)
    world.run(2.0)
    assert old not in world.holders["h0"].held


def test_an_uncommitted_step_of_an_older_attempt_goes_when_its_host_returns() -> None:
    """Its host was away when the next attempt put for the first time.

    No process can restore the step any more (R22).
    """
    world, ranks = trained(3, 3)
    world.put(ranks[0], 2)
    world.run(1.0)
    shard = ShardId(JOB, 1, 2, 0)
    world.kill_host("h0", keep_memory=True)
    hosts = ["h1", "h2", "h1"]
    ranks = [world.join(r, 3, "again", host=hosts[r], launcher="launcher") for r in range(3)]
    world.run(8.0)
    world.get(ranks)
    assert world.put_all(ranks, 3)
    assert shard in world.holders["h0"].held
    world.return_host("h0")
    world.run(5.0)
    assert shard not in world.holders["h0"].held


def test_a_host_that_had_no_room_when_it_joined_is_asked_again() -> None:
    """Its file system was full at that moment: it gets its share, and the copies, once there is room (R9, R10)."""
    world, _ = trained(2, 2)
    world.kill_host("h1")
    ranks = [world.join(r, 2, "again", host="h0", launcher="launcher") for r in range(2)]
    world.run(8.0)
    world.get(ranks)
    assert world.put_all(ranks, 2)
    holder = world.holders["h1"]
    holder.refuses_room = "the file system is full"
    world.return_host("h1")
    world.run(2.0)
    asked = len(holder.received(Reserve))
    assert asked
    world.run(6.0)
    assert len(holder.received(Reserve)) > asked
    world.holders["h1"].refuses_room = ""
    world.run(12.0)
    asked = len(holder.received(Reserve))
    world.run(12.0)
    assert len(holder.received(Reserve)) == asked, "it has its room and is left alone"


def test_an_open_step_does_not_wait_for_ever_for_a_host_that_died_often() -> None:
    """Its push broke with the host's last death, and repair trusts it with no second copy: the open step goes on."""
    world, ranks = trained(2, 2)
    for step in range(2, 9):
        world.kill_host("h0", keep_memory=True)
        world.put(ranks[1], step)  # its push to h0 breaks
        world.run(0.5)
        world.return_host("h0")
        ranks[0].is_dead = False  # only the holder had died: rank 0 has connected again
        ranks[0].connect(world.holders["h0"])
        world.run(2.0)
        world.put(ranks[0], step)
        assert world.run_until(lambda s=step: ranks[0].tickets[s] == "committed", 20.0), step  # type: ignore[misc]


# -- the same on one host's replica store -----------------------------------------------------------------

CHUNK_BYTES = 64 << 10


OFFER = Offer(shard=WireShard(JOB, 1, 2, 0), digest=None, attempt=1, sender="a", chunks_count=3)


class LateClock:
    """The time module, later by `late_s`."""

    late_s = 0.0

    def time(self) -> float:
        """Time of day."""
        return time.time() + self.late_s

    def monotonic(self) -> float:
        """Seconds."""
        return time.monotonic() + self.late_s


@pytest.fixture
def replicas() -> Iterator[ReplicaStore]:
    """A replica store with room for eight chunks."""
    with scratch_folder() as folder:
        made = open_store(folder, chunk_bytes=CHUNK_BYTES, limit=Limit(8 * CHUNK_BYTES))
        made.ensure_free(8)
        yield made
        made.close()


def test_an_incoming_replica_that_no_process_feeds_gives_its_room_back(replicas: ReplicaStore) -> None:
    """The sender gave up and its word was lost: after DRAFT_IDLE_S the peer gives up too (R13)."""
    replicas.clock = clock = LateClock()
    server = PeerServer(
        replicas, "b", is_fenced=lambda *_: False, on_sealed=lambda copy: None, parity=no_parity(replicas)
    )
    assert isinstance(server._offer(object(), OFFER), Done)  # type: ignore[arg-type]
    clock.late_s = INCOMING_IDLE_S - 5.0
    server.give_up_idle()
    assert replicas.index.incoming
    clock.late_s = INCOMING_IDLE_S + 5.0
    server.give_up_idle()
    assert not replicas.index.incoming


def test_lost_chunks_come_back_into_a_full_file_system(replicas: ReplicaStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest is there already: the repair of a copy writes none, so that it needs no room for one (R30)."""
    slots = replicas.take_slots(2)
    for number in slots:
        replicas.arena.view(number, CHUNK_BYTES)[:] = bytes([number + 1]) * CHUNK_BYTES
    shard = ShardId(JOB, 1, 2, 0)
    kept = replicas.seal_local(shard, world_size=1, layout=b"", nbytes=2 * CHUNK_BYTES, slots=slots, attempt=1)
    data, good = replicas.manifest(kept), bytes(replicas.arena.view(slots[0], CHUNK_BYTES))
    replicas.arena.view(slots[0], CHUNK_BYTES)[0] ^= 1
    assert replicas.verify(kept) == [0]

    def full(name: str, data: bytes) -> None:
        raise CapacityError("the file system is full")

    monkeypatch.setattr(replicas.manifests, "save", full)
    replica = replicas.open_incoming("a", shard, kept.digests, [CHUNK_BYTES] * 2, 1)
    (number,) = replicas.take_slots(1)
    replicas.arena.view(number, CHUNK_BYTES)[:] = good
    assert replicas.keep_chunks(replica, [(0, number, CHUNK_BYTES, kept.digests[0])]) == []
    assert replicas.finish("a", data) is kept
    assert replicas.verify(kept) == []


def put(replicas: ReplicaStore, step: int, fills: list[int]) -> StoredReplica:
    """Store a shard of one chunk per fill, as a rank's put does."""
    slots = replicas.take_slots(len(fills))
    for number, fill in zip(slots, fills, strict=True):
        replicas.arena.view(number, CHUNK_BYTES)[:] = bytes([fill]) * CHUNK_BYTES
    return replicas.seal_local(
        ShardId(JOB, 1, step, 0), world_size=1, layout=b"", nbytes=len(fills) * CHUNK_BYTES, slots=slots, attempt=1
    )


def test_damage_of_a_shared_slot_is_reported_of_every_replica(replicas: ReplicaStore) -> None:
    """Two steps share a chunk that rots: verifying one reports the other as well, so that both are repaired (R30)."""
    reported: list[StoredReplica] = []
    replicas.on_damaged = reported.append
    one, other = put(replicas, 1, [1, 2]), put(replicas, 2, [1, 3])
    number = one.slots[0]
    assert number is not None
    replicas.arena.view(number, CHUNK_BYTES)[0] ^= 1
    assert replicas.verify(one) == [0]
    assert (reported, other.missing) == ([other], {0})


def test_an_offer_again_is_not_refused_for_its_own_old_copy(replicas: ReplicaStore) -> None:
    """The first try broke and its abort was lost: its room is the second try's (R13)."""
    replicas.claim(JOB, PeerShare(1, {}, 4))
    server = PeerServer(
        replicas, "b", is_fenced=lambda *_: False, on_sealed=lambda copy: None, parity=no_parity(replicas)
    )
    replies = [server._offer(object(), OFFER) for _ in range(2)]  # type: ignore[arg-type]
    assert [type(reply) for reply in replies] == [Done, Done]


def test_a_job_removed_while_its_room_grows_leaves_no_share(
    replicas: ReplicaStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim under way would put the share back after its removal: the removal waits for it (R10)."""
    go, inside, grow = threading.Event(), threading.Event(), replicas.room.grow_to

    def slow(slots_count: int, *args: Any) -> None:
        inside.set()
        go.wait(10.0)
        grow(slots_count, *args)

    monkeypatch.setattr(replicas.room, "grow_to", slow)
    claiming = threading.Thread(target=replicas.claim, args=(JOB, PeerShare(1, {0: 4}, 0)))
    removing = threading.Thread(target=replicas.drop_all, args=([], (JOB, 1)))
    claiming.start()
    assert inside.wait(10.0)
    removing.start()
    go.set()
    for thread in (claiming, removing):
        thread.join(10.0)
    assert JOB not in replicas.index.shares

"""Slots of an arena: free ones lose their pages and get them again; samples of them are compared (R8, R9)."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memstore.core.arena.claimed_memory import Limit, gib
from memstore.core.arena.replica_index import ReplicaIndex
from memstore.core.arena.replica_store import ReplicaStore
from memstore.core.arena.slot_table import Owner, PeerShare, SlotState, SlotTable
from memstore.core.wire.rank_messages import SlotSample
from memstore.errors import CapacityError, ClosedError, IntegrityError
from memstore.shell.arena import arena as arena_module
from memstore.shell.arena.arena import Arena, open_store
from memstore.shell.arena.lock import process_start_time
from memstore.shell.arena.manifests import ManifestFolder
from memstore.shell.arena.mapping import LINE_BYTES, LINES_COUNT, ArenaMapping, differing, sample
from memstore.shell.arena.slot_headers import SlotHeaders
from memstore.testing.clusters.scratch import scratch_folder
from recovery.inventory import ShardId

# -- unbacked slots -----------------------------------------------------------------------------------
# Room is given back: free slots lose their pages and get them again before they are used (R9).


CHUNK = 64 << 10
LIMIT = 32 * CHUNK
ME = Owner(os.getpid(), process_start_time(os.getpid()) or 0, 1)


@pytest.fixture
def folder() -> Iterator[Path]:
    with scratch_folder() as path:
        yield path


def open_replica_store(folder: Path, limit_bytes: int = LIMIT) -> ReplicaStore:
    return open_store(folder, chunk_bytes=CHUNK, limit=Limit(limit_bytes))


def on_disk(folder: Path) -> int:
    """Chunks' worth of memory behind the arena."""
    return (folder / "arena").stat().st_blocks * 512 // CHUNK


def put(replicas: ReplicaStore, job: str, step: int, count: int = 3) -> ShardId:
    """Lease, write and seal a shard of a job that has reserved room; what else was leased goes back."""
    shard = ShardId(job, 1, step, 0)
    slots = replicas.lease(ME, job, 0, 1)
    for index, number in enumerate(slots[:count]):
        replicas.arena.view(number)[:] = bytes([step, index]) * (replicas.chunk_bytes // 2)
    with replicas.lock:
        assert replicas.table.submit(ME, slots[:count])
        replicas.table.reclaim(ME)
        replicas.flush()
    replicas.seal_local(
        shard, world_size=1, layout=b"", nbytes=count * replicas.chunk_bytes, slots=slots[:count], attempt=1
    )
    return shard


def share(slots: int) -> PeerShare:
    return PeerShare(1, {0: slots}, 0)


@pytest.mark.parametrize("seed", range(30))
def test_a_slot_without_pages_is_given_to_no_process(seed: int) -> None:
    """After any leases, frees, give-backs and fills: the lists agree, and a kept slot stays as it is."""
    chosen = random.Random(seed)
    table = SlotTable(12)
    owner, kept = Owner(1, 1), {chosen.randrange(12) for _ in range(2)}
    for _ in range(60):
        match chosen.randrange(4):
            case 0:
                leased = table.lease(owner, chosen.randint(1, 4), attempt=1)
                assert not set(leased) & set(table.unbacked)
            case 1:
                table.reclaim(owner)
            case 2:
                emptied = table.empty(chosen.randint(0, 6), kept)
                assert not set(emptied) & kept
                assert all(table.slots[number].state is SlotState.FREE for number in emptied)
            case 3:
                table.fill(table.unbacked[: chosen.randint(0, 4)])
        table.validate()
        assert table.claimed_count == 12 - len(table.unbacked)


def test_what_present_jobs_have_reserved_is_not_spare() -> None:
    """Free slots beyond their shares are; a job that was removed keeps nothing."""
    table = SlotTable(12)
    replica_index = ReplicaIndex(table)
    assert replica_index.spare_count() == 12
    replica_index.set_share("a", share(5))
    replica_index.set_share("b", share(4))
    assert replica_index.spare_count() == 3
    replica_index.drop_share("b", 1)
    assert replica_index.spare_count() == 7


def test_rm_of_one_job_of_two_gives_its_room_back_and_leaves_the_others(folder: Path) -> None:
    """The pages go, the other job's bytes and the slots that it recycles stay; a new job claims them again."""
    replicas = open_replica_store(folder)
    replicas.claim("a", share(9))
    first = put(replicas, "a", 1)
    replicas.claim("b", share(9))
    kept = put(replicas, "b", 2)
    assert on_disk(folder) == 18
    replicas.drop_all([first], ("a", 1))
    assert on_disk(folder) == 9
    stats = replicas.stats()
    assert (stats["claimed_bytes"], stats["reserved_bytes"], stats["used_bytes"]) == (9 * CHUNK, 9 * CHUNK, 3 * CHUNK)
    before = on_disk(folder)
    for step in range(3, 40):  # steady state: slots are recycled, and none is emptied or filled
        replicas.drop(kept)
        kept = put(replicas, "b", step)
        assert (on_disk(folder), len(replicas.table.unbacked)) == (before, 9)
    replicas.claim("c", share(14))
    assert (on_disk(folder), replicas.arena.slots_count, replicas.table.unbacked) == (23, 23, [])
    put(replicas, "c", 1)
    stored = replicas.index.find(kept)
    assert stored is not None
    assert replicas.verify(stored) == []
    replicas.close()


def test_what_a_restored_job_will_put_into_stays_until_it_claims_it_or_goes(folder: Path) -> None:
    """A process that ends gives back what no job reserved, but not this; another job's claim may take it."""
    replicas = open_replica_store(folder)
    room, index = replicas.room, replicas.index
    replicas.claim("a", share(4))
    room.prepare("a", PeerShare(2, {0: 9}, 3))
    room.release()
    assert on_disk(folder) == 12
    replicas.claim("b", share(8))
    assert on_disk(folder) == 12, "what is only prepared is there for any job that claims it"
    replicas.claim("b", share(0))
    replicas.claim("a", PeerShare(2, {0: 6}, 0))
    assert on_disk(folder) == 6, "it claimed less than was prepared"
    room.prepare("a", PeerShare(2, {0: 9}, 0))
    index.end_preparation("a", before=2)
    room.release()
    assert on_disk(folder) == 9
    index.end_preparation("a", before=3)
    room.release()
    assert on_disk(folder) == 6
    room.prepare("c", PeerShare(1, {0: 4}, 0))
    room.keep_shares(["a", "b"])
    assert on_disk(folder) == 6, "a job that the controller does not know"
    replicas.close()


def test_a_rank_leases_nothing_before_its_attempt_may_put(folder: Path) -> None:
    """A share of an older attempt, or of its own from before its get is over, leaves the free slots to the get."""
    replicas = open_replica_store(folder)
    replicas.claim("a", share(4))
    assert not replicas.lease(ME, "a", 0, 2)
    replicas.claim("a", PeerShare(2, {0: 4}, 0, may_lease=False))
    assert not replicas.lease(ME, "a", 0, 2)
    replicas.room.prepare("a", PeerShare(2, {0: 6}, 0))
    assert len(replicas.lease(ME, "a", 0, 2)) == 4, "no more than the share that is claimed"
    replicas.claim("a", PeerShare(2, {0: 6}, 0))
    assert len(replicas.lease(ME, "a", 0, 2)) == 2
    replicas.close()


def test_a_restored_job_has_memory_ready_for_a_version_less_where_all_is_too_much(folder: Path) -> None:
    """Of three versions, two of them in flight, the limit allows two: the first put claims these, and finds them."""
    replicas = open_replica_store(folder, 17 * CHUNK)
    replicas.room.prepare("a", PeerShare(2, {0: 9}, 9, versions=3))
    assert on_disk(folder) == 12
    with pytest.raises(CapacityError):
        replicas.claim("a", PeerShare(2, {0: 9}, 9, versions=3))
    replicas.claim("a", PeerShare(2, {0: 6}, 6, versions=2))
    assert on_disk(folder) == 12
    replicas.close()


def rows_of(refusal: CapacityError) -> list[list[str]]:
    """Return the table of reservations of a refusal, cell by cell."""
    words, *table = str(refusal).partition("Reserved on this host:\n")[2].splitlines()
    return [words.split()] + [row.split() for row in table]


def test_a_refused_claim_has_a_table_of_all_reservations(folder: Path) -> None:
    """Who has reserved most first, with the processes that have slots; ten of them; alone a job reads no table."""
    replicas = open_replica_store(folder)
    with pytest.raises(CapacityError) as alone:
        replicas.claim("late", share(LIMIT // CHUNK + 1))
    assert "Reserved on this host" not in str(alone.value)
    replicas.claim("eval", share(2))
    replicas.claim("train", share(3))
    put(replicas, "train", 1, count=2)
    assert replicas.lease(ME, "train", 0, 1)
    with pytest.raises(CapacityError, match=r"`memstore rm JOB` gives back") as refused:
        replicas.claim("late", share(LIMIT // CHUNK))
    assert rows_of(refused.value) == [
        ["JOB", "RESERVED", "HOLDS", "PROCESSES", "HERE"],
        ["train", *gib(3 * CHUNK).split(), *gib(2 * CHUNK).split(), "pid", str(os.getpid())],
        ["eval", *gib(2 * CHUNK).split(), *gib(0).split(), "none"],
    ]
    with pytest.raises(CapacityError, match="Reserved on this host"):
        replicas.take_slots_growing(LIMIT // CHUNK + 1)
    for number in range(9):
        replicas.claim(f"small{number}", share(1))
    with pytest.raises(CapacityError) as crowded:
        replicas.claim("late", share(LIMIT // CHUNK))
    rows = rows_of(crowded.value)
    assert [row[0] for row in rows[1:4]] == ["train", "eval", "small0"]
    assert rows[-1] == ["and", "3", "more"]
    replicas.close()


def test_a_job_reserves_no_more_than_its_quota(folder: Path) -> None:
    """Where the arena has room as well; its own quota, else that of every job; what others have counts for nothing."""
    limit = Limit(LIMIT, quotas={"": 4 * CHUNK, "large": 9 * CHUNK, "none": 0})
    replicas = open_store(folder, chunk_bytes=CHUNK, limit=limit)
    replicas.claim("large", share(9))
    replicas.claim("eval", share(4))
    for job, slots in (("large", 10), ("eval", 5), ("none", 1)):
        with pytest.raises(
            CapacityError, match=rf"job '{job}' asks for .*, and its quota is .*--quota {job}="
        ) as refused:
            replicas.claim(job, share(slots))
        assert [row[0] for row in rows_of(refused.value)] == ["JOB", "large", "eval"]
    with pytest.raises(CapacityError, match="its quota is"):
        replicas.room.prepare("eval", share(5))
    assert (on_disk(folder), replicas.stats()["reserved_bytes"]) == (13, 13 * CHUNK)
    replicas.claim("eval", share(3))
    replicas.close()


def test_a_refused_share_gives_its_room_back_and_peers_that_move_do_not(folder: Path) -> None:
    """The first put was refused elsewhere: the share is 0 again. Peers come and go with flapping hosts."""
    replicas = open_replica_store(folder)
    replicas.claim("a", PeerShare(1, {0: 8}, 8))
    replicas.claim("a", PeerShare(1, {0: 8}, 2))
    assert on_disk(folder) == 16
    replicas.claim("a", PeerShare(1, {0: 0}, 0))
    assert on_disk(folder) == 0
    replicas.close()


HELD = """
import sys
from memstore.shell.arena.mapping import ArenaMapping
mapping = ArenaMapping.open(sys.argv[1])
assert mapping.hold(1, 2)
reader = mapping.reading()
reader.add([5])
print("held", flush=True)
sys.stdin.readline()
reader.close()
print("read", flush=True)
sys.stdin.readline()
"""


def test_pages_that_a_living_process_pins_or_reads_stay_until_it_is_gone(folder: Path) -> None:
    """No word of it reaches the holder: the kernel knows, also for a successor of the holder."""
    replicas = open_replica_store(folder)
    replicas.claim("a", share(8))
    with subprocess.Popen(
        [sys.executable, "-c", HELD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        replicas.drop_all([], ("a", 1))
        assert sorted(replicas.table.free) == [1, 2, 5]
        replicas.close()
        replicas = open_replica_store(folder)
        replicas.room.release()
        assert (sorted(replicas.table.free), on_disk(folder)) == ([1, 2, 5], 3)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "read\n"
        replicas.room.release()
        assert sorted(replicas.table.free) == [1, 2]
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=10)
    replicas.room.release()
    assert (replicas.table.free, on_disk(folder)) == ([], 0)
    replicas.close()


def test_a_child_forked_under_a_reader_keeps_no_pages(folder: Path) -> None:
    """A loader's workers live as long as training: what a get was reading when they began must not stay claimed."""
    replicas = open_replica_store(folder)
    replicas.claim("a", share(4))
    mapping = ArenaMapping.open(folder)
    reader = mapping.reading()
    reader.add([1])
    over, end = os.pipe()
    runs, begun = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(end)
        os.write(begun, b"r")
        os.read(over, 1)
        os._exit(0)
    os.close(over)
    reader.close()
    try:
        assert os.read(runs, 1) == b"r"
        replicas.drop_all([], ("a", 1))
        assert on_disk(folder) == 0
    finally:
        for fd in (end, runs, begun):
            os.close(fd)
        os.waitpid(child, 0)
        mapping.close()
        replicas.close()


def test_slots_whose_reader_outlived_its_pin_keep_their_pages(folder: Path) -> None:
    """It may still look at them, and a page that is missing on a full file system would kill it (R7)."""
    replicas = open_replica_store(folder)
    replicas.claim("a", share(6))
    shard = put(replicas, "a", 1)
    pinned = replicas.pin(shard)
    assert pinned is not None
    replicas.drop_all([shard], ("a", 1))
    assert on_disk(folder) == 3
    pinned[0].pins[pinned[1]] = -1.0  # past its deadline
    replicas.expire_pins()
    replicas.room.release()
    assert (on_disk(folder), len(replicas.table.free)) == (3, 3)
    replicas.close()


def test_room_that_another_process_took_meanwhile_is_a_refusal_and_no_sigbus(tmp_path: Path) -> None:
    """A full file system refuses to fill unbacked slots; none of them is leased, and what is stored can be read."""
    mounted = tmp_path / "shm"
    mounted.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "memstore-test", str(mounted)], check=False)
    if made.returncode:
        pytest.skip("only root can mount a file system")
    try:
        with scratch_folder(mounted) as folder:
            replicas = open_store(folder, chunk_bytes=1 << 20, limit=Limit(32 << 20))
            replicas.claim("a", share(24))
            replicas.claim("b", share(4))
            replicas.drop_all([], ("a", 1))
            other = mounted / "other"
            with other.open("wb") as file, contextlib.suppress(OSError):
                while file.write(bytes(1 << 20)):
                    file.flush()
            with pytest.raises(CapacityError, match=r"cannot grow by .*do one of"):
                replicas.claim("c", share(24))
            assert (len(replicas.table.free), len(replicas.table.unbacked)) == (4, 24)
            assert len(replicas.lease(ME, "b", 0, 1)) == 4
            other.unlink()
            replicas.claim("c", share(24))
            assert len(replicas.table.free) == 24
            replicas.close()
    finally:
        subprocess.run(["umount", "-l", str(mounted)], check=True)


class Killed(BaseException):
    """The holder's process died before this write."""


class Writes:
    """Every write of an arena, counted; from the one with number `last` on none happens any more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, last: int) -> None:
        self.count, self.last = 0, last
        for owner, name in (
            (arena_module, "_punch_hole"),
            (arena_module, "_allocate"),
            (ArenaMapping, "populate"),
            (SlotHeaders, "write"),
            (ManifestFolder, "save"),
            (ManifestFolder, "remove"),
        ):
            monkeypatch.setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if self.count > self.last:
                raise Killed
            return real(*args, **kwargs)

        return counted


def remove_and_claim(replicas: ReplicaStore, shards: list[ShardId]) -> None:
    """A job is removed, its room given back and claimed again for another: every write that there is."""
    replicas.drop_all(shards, ("a", 1))
    replicas.claim("c", share(10))
    put(replicas, "c", 1)


def test_a_holder_killed_at_any_write_of_it_leaves_an_arena_that_is_adopted_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other job's bytes are whole, slots with and without pages are distinguished, and all of it is usable."""
    last = 0
    while True:
        with scratch_folder() as folder, monkeypatch.context() as patched:
            replicas = open_replica_store(folder)
            replicas.claim("a", share(8))
            gone = [put(replicas, "a", 1), put(replicas, "a", 2)]
            replicas.claim("b", share(8))
            kept = put(replicas, "b", 3)
            writes = Writes(patched, last)
            is_over = True
            try:
                remove_and_claim(replicas, gone)
            except Killed:
                is_over = False
            patched.undo()
            del writes
            replicas.close()

            replicas = open_replica_store(folder)
            replicas.table.validate()
            stored = replicas.index.find(kept)
            assert stored is not None
            assert not stored.missing
            assert replicas.verify(stored) == []
            assert on_disk(folder) == replicas.table.claimed_count, f"after {last} writes"
            for shard in {stored.shard for stored in replicas.index.shards.values()}:
                replicas.drop(shard)
            replicas.table.reclaim(ME)
            replicas.room.release()
            assert on_disk(folder) == 0
            replicas.claim("d", share(30))
            put(replicas, "d", 1, count=20)
            replicas.close()
        if is_over:
            break
        last += 1
    assert last > 20, "the writes were counted"


def test_a_slot_in_use_that_lost_its_pages_gets_them_again_on_adoption(folder: Path) -> None:
    """As zeros, which its digest tells; touching it would be a SIGBUS where the file system is full."""
    replicas = open_replica_store(folder)
    replicas.claim("a", share(6))
    shard = put(replicas, "a", 1)
    stored = replicas.index.find(shard)
    assert stored is not None
    number = stored.slots[0]
    assert number is not None
    replicas.close()
    with (folder / "arena").open("r+b") as file:
        arena_module._punch_hole(file.fileno(), number * CHUNK, CHUNK)
    replicas = open_replica_store(folder)
    assert (replicas.arena.unbacked, on_disk(folder)) == ([], 6)
    again = replicas.index.find(shard)
    assert again is not None
    assert again.missing == {0}
    replicas.close()
    Arena.destroy(folder)


# -- slot sample --------------------------------------------------------------------------------------
# A sample of what a process sees in slots: the same memory gives the same, other bytes are found (R8).


SLOTS = [5, 0, 3, 7]


@pytest.fixture
def arena() -> Iterator[Arena]:
    with scratch_folder() as path:
        made = Arena.open(path, limit_bytes=8 * CHUNK, chunk_bytes=CHUNK)
        made.grow(8)
        for slot in range(8):
            made.view(slot)[:] = np.random.default_rng(slot).bytes(CHUNK)
        yield made
        made.close()


@pytest.mark.parametrize("last_bytes", [1, LINE_BYTES, CHUNK - 1, CHUNK])
def test_two_mappings_of_one_file_see_the_same(arena: Arena, last_bytes: int) -> None:
    """For any length of the last chunk, and for any seed."""
    rank = ArenaMapping.open(arena.folder)
    nbytes = 3 * CHUNK + last_bytes
    try:
        for seed in range(50):
            assert differing(arena.mapping, SLOTS, nbytes, sample(rank, SLOTS, nbytes, seed)) == []
    finally:
        rank.close()
    with pytest.raises(ClosedError):
        sample(rank, SLOTS, nbytes, 1)


def test_chunks_of_other_bytes_are_named(arena: Arena) -> None:
    """A chunk that was written since differs wherever one looks; the others do not."""
    for seed in range(50):
        seen = sample(arena.mapping, SLOTS, 4 * CHUNK, seed)
        for index in (1, 3):
            arena.view(SLOTS[index])[:] = np.random.default_rng((seed, index)).bytes(CHUNK)
        assert differing(arena.mapping, SLOTS, 4 * CHUNK, seen) == [1, 3]


def test_no_two_puts_look_at_the_same_places(arena: Arena) -> None:
    """A single line that differs is found by its share of the looks, so that none is passed over for ever."""
    found = 0
    for seed in range(4000):
        seen = sample(arena.mapping, [0], CHUNK, seed)
        arena.view(0)[777] ^= 1
        found += bool(differing(arena.mapping, [0], CHUNK, seen))
    wanted = 4000 * LINES_COUNT * LINE_BYTES / CHUNK
    assert wanted / 2 < found < wanted * 2


def test_only_what_was_filled_is_looked_at(arena: Arena) -> None:
    """A short last chunk is looked at within its last line's bounds: what lies behind it may belong to others."""
    for seed in range(200):
        seen = sample(arena.mapping, SLOTS, 3 * CHUNK + 100, seed)
        arena.view(SLOTS[3])[2 * LINE_BYTES :] = np.random.default_rng(seed).bytes(CHUNK - 2 * LINE_BYTES)
        assert differing(arena.mapping, SLOTS, 3 * CHUNK + 100, seen) == []


@pytest.mark.parametrize("count", [0, 31, 33])
def test_nonsense_is_no_sample(arena: Arena, count: int) -> None:
    """A sample without one digest a chunk is refused."""
    with pytest.raises(IntegrityError, match="without a sample of its 4 chunks"):
        differing(arena.mapping, SLOTS, 4 * CHUNK, SlotSample(seed=1, digests=bytes(count)))


def test_slots_that_are_not_claimed_are_refused(arena: Arena) -> None:
    """Touching them would be a SIGBUS."""
    with pytest.raises(IndexError):
        sample(arena.mapping, [8], CHUNK, 1)

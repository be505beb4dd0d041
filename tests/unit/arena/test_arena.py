"""The arena: adoption, growth, full file systems, damage and forks (R6, R7, R8, R9)."""

from __future__ import annotations

import os
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TextIO

import pytest
import xxhash

from memstore.core.arena.slot_table import SlotState
from memstore.core.cluster.hosts import HostTable
from memstore.core.format.manifest import manifest_name
from memstore.core.wire.ids import Endpoint
from memstore.core.wire.messages import HostInfo
from memstore.core.wire.orders import TakeIncarnation
from memstore.errors import CapacityError, ClosedError, ConfigError, IntegrityError
from memstore.shell.arena import folder as arena_folder
from memstore.shell.arena import lock as arena_lock
from memstore.shell.arena.arena import Arena
from memstore.shell.arena.folder import INCARNATION_NAME, next_incarnation
from memstore.shell.arena.journal_file import JournalFile
from memstore.shell.arena.lock import ArenaLock, LockOwner
from memstore.shell.arena.manifests import ManifestFolder
from memstore.shell.arena.mapping import ArenaMapping
from memstore.shell.arena.slot_headers import DAMAGED_NAME, HEADER_NBYTES, RECORD_NBYTES, SlotHeader
from memstore.testing.clusters.processes import ProcessCluster, wait_for
from memstore.testing.clusters.scratch import scratch_folder
from memstore.testing.clusters.stepped_clock import stepped_clock
from memstore.testing.controller.world import ControllerWorld, trained
from memstore.testing.ranks.fleet import Fleet
from memstore.testing.ranks.rank_process import RankNursery, together
from recovery.inventory import ShardId

CHUNK = 1 << 20
LIMIT = 1 << 30
SEALED = SlotHeader(SlotState.SEALED, CHUNK, bytes(range(16)), 7, 8, 9, 10, 11.5)

HOLDER = """
import signal, sys
from memstore.shell.arena.arena import Arena
from memstore.shell.arena.lock import ArenaLock
from memstore.shell.arena.slot_headers import SlotHeader, SlotState
lock = ArenaLock.take(sys.argv[1], timeout_s=5)
arena = Arena.open(sys.argv[1], limit_bytes=1 << 30, chunk_bytes=1 << 20)
arena.grow(3)
arena.view(2)[:] = b"x" * (1 << 20)
arena.headers.write(2, SlotHeader(SlotState.SEALED, 1 << 20, bytes(range(16)), 7, 8, 9, 10, 11.5))
print("sealed", "multiprocessing" in sys.modules, "torch" in sys.modules, "ray" in sys.modules, flush=True)
signal.pause()
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    with scratch_folder() as path:
        yield path
    assert not path.parent.exists()


def open_arena(folder: Path, limit_bytes: int = LIMIT, chunk_bytes: int = CHUNK) -> Arena:
    return Arena.open(folder, limit_bytes=limit_bytes, chunk_bytes=chunk_bytes)


def claimed_on_disk(folder: Path) -> int:
    return (folder / "arena").stat().st_blocks * 512


def test_adoption_after_sigkill(folder: Path) -> None:
    """A holder's sealed bytes and claimed slots outlive its SIGKILL (R6, R8)."""
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    with holder.stdout as lines:
        assert lines.readline() == "sealed False False False\n"
        holder.kill()
        holder.wait(timeout=120)
    lock = ArenaLock.take(folder, timeout_s=5)
    arena = open_arena(folder)
    assert (arena.slots_count, arena.freed) == (3, {})
    assert arena.headers.read(2) == SEALED
    assert bytes(arena.view(2)) == b"x" * CHUNK
    assert arena.prefault(range(3)) == 3 * CHUNK
    arena.close()
    Arena.destroy(folder, lock=lock)
    assert not folder.exists()


def test_growth_is_claimed_and_written_down(folder: Path) -> None:
    """R9: the file is sparse at its full length; grow allocates exactly what it says and is idempotent."""
    arena = open_arena(folder)
    assert (folder / "arena").stat().st_size == LIMIT
    assert claimed_on_disk(folder) == 0
    assert arena.grow(70) == 70  # more than one 64 MiB step
    assert arena.grow(5) == 70
    assert claimed_on_disk(folder) == 70 * CHUNK
    with pytest.raises(IndexError, match="70 claimed"):
        arena.view(70)
    with pytest.raises(CapacityError, match="raise arena_bytes"):
        arena.grow(1025)
    assert arena.grow(200, should_stop=lambda: claimed_on_disk(folder) > 100 * CHUNK) == 70
    assert claimed_on_disk(folder) == 70 * CHUNK
    arena.close()


def test_adoption_checks_the_configuration(folder: Path) -> None:
    """Another chunk size is an error that names both; a larger limit lengthens, a smaller keeps what is claimed."""
    arena = open_arena(folder, limit_bytes=4 * CHUNK)
    arena.grow(4)
    arena.close()
    with pytest.raises(ConfigError, match=f"chunk_bytes={CHUNK}.*{2 * CHUNK}"):
        open_arena(folder, chunk_bytes=2 * CHUNK)
    for bad in (0, 100, CHUNK + 1):
        with pytest.raises(ConfigError, match="multiple"):
            open_arena(folder, chunk_bytes=bad)
    with pytest.raises(ConfigError, match="no room for one chunk"):
        open_arena(folder, limit_bytes=CHUNK - 1)
    small = open_arena(folder, limit_bytes=CHUNK)
    assert (small.slots_count, small.limit_slots) == (4, 4)
    small.close()
    large = open_arena(folder, limit_bytes=8 * CHUNK)
    assert large.grow(8) == 8
    large.view(7)[:] = b"y" * CHUNK
    large.close()


def test_growth_cut_short_by_death_is_given_back(folder: Path) -> None:
    """R9: what a predecessor allocated but never wrote down does not stay claimed."""
    arena = open_arena(folder)
    arena.grow(2)
    os.posix_fallocate(arena._fd, 2 * CHUNK, 10 * CHUNK)
    arena.close()
    assert claimed_on_disk(folder) == 12 * CHUNK
    open_arena(folder).close()
    assert claimed_on_disk(folder) == 2 * CHUNK


def test_truncated_arena_is_reported_not_sigbus(folder: Path) -> None:
    """Slots whose bytes are gone are freed with the reason, and can be written again."""
    arena = open_arena(folder)
    arena.grow(3)
    for slot in range(3):
        arena.headers.write(slot, SEALED)
    arena.close()
    os.truncate(folder / "arena", CHUNK + 5)
    arena = open_arena(folder)
    assert sorted(arena.freed) == [1, 2]
    assert arena.headers.read(0) == SEALED
    assert arena.headers.read(1) == SlotHeader()
    arena.view(2)[:] = b"z" * CHUNK
    arena.close()


def test_impossible_records_are_freed_and_named(folder: Path) -> None:
    """R6: a record that cannot be true is free after adoption, and why is said; others stay."""
    arena = open_arena(folder)
    arena.grow(4)
    for slot in range(4):
        arena.headers.write(slot, SEALED)
    arena.close()
    with (folder / "slots").open("r+b") as file:
        file.seek(HEADER_NBYTES + RECORD_NBYTES)
        file.write(b"\x09")
        file.seek(HEADER_NBYTES + 2 * RECORD_NBYTES + 4)
        file.write(b"\xff\xff\xff\xff")
    arena = open_arena(folder)
    assert arena.freed == {1: "state 9 does not exist", 2: f"4294967295 bytes do not fit into {CHUNK}"}
    assert [arena.headers.read(slot).state for slot in range(4)] == [3, 0, 0, 3]
    table = arena.headers.all()
    assert table["state"].tolist() == [3, 0, 0, 3]
    assert bytes(table["digest"][3]) == SEALED.digest
    assert table["last_verified"][3] == 11.5
    arena.close()


@pytest.mark.parametrize(
    ("at", "data"),
    [(0, b"NOTSLOTS"), (8, b"\x01"), (8, b"\x83"), (12, b"\xff"), (16, b"\xff" * 8), (30, b"\xff" * 2), (-1, b"")],
)
def test_a_damaged_table_is_put_aside_and_the_host_begins_empty(folder: Path, at: int, data: bytes) -> None:
    """Ranks refuse it; a holder renames it, says why, and serves a new arena. At -1: the file is empty."""
    first = open_arena(folder)
    first.grow(2)
    first.close()
    with (folder / "slots").open("r+b") as file:
        file.seek(max(0, at))
        file.write(data)
        if at < 0:
            file.truncate(0)
    damaged = (folder / "slots").read_bytes()
    with pytest.raises(IntegrityError):
        ArenaMapping.open(folder)
    arena = open_arena(folder)
    assert "header damaged or missing" in arena.headers.put_aside
    assert (folder / DAMAGED_NAME).read_bytes() == damaged
    assert (arena.slots_count, arena.identity == first.identity) == (0, False)
    arena.grow(1)
    arena.close()
    again = open_arena(folder)
    assert (again.headers.put_aside, again.slots_count) == ("", 1)
    again.close()


@pytest.mark.parametrize("checksum", ["none", "right"])
def test_a_table_of_another_version_is_refused(folder: Path, checksum: str) -> None:
    """One without a checksum is of an earlier version; with one, what it says of its version is so."""
    open_arena(folder).close()
    with (folder / "slots").open("r+b") as file:
        header = bytearray(file.read(HEADER_NBYTES))
        header[8] += 1 if checksum == "right" else -1
        rest = header[:16] + header[24:-8]
        header[-8:] = bytes(8) if checksum == "none" else struct.pack("<Q", xxhash.xxh3_64_intdigest(rest))
        file.seek(0)
        file.write(header)
    with pytest.raises(ConfigError, match="this memstore reads 3"):
        open_arena(folder)
    assert not (folder / DAMAGED_NAME).exists()


def test_seal_is_never_seen_with_another_digest(folder: Path) -> None:
    """R7: in every prefix of a write's stores the slot is not sealed, or sealed with its own digest."""
    arena = open_arena(folder)
    arena.grow(1)
    headers = arena.headers
    other = SlotHeader(SlotState.SEALED, 5, b"o" * 16)
    real, seen = headers._map, []

    class Recorder:
        def __getitem__(self, key: int | slice) -> object:
            return real[key]

        def __setitem__(self, key: int | slice, value: object) -> None:
            real[key] = value  # type: ignore[index, assignment]
            seen.append((real[HEADER_NBYTES], bytes(real[HEADER_NBYTES + 8 : HEADER_NBYTES + 24])))

    headers._map = Recorder()  # type: ignore[assignment]
    for header in (SEALED, other, SlotHeader(), SEALED):
        headers.write(0, header)
    headers._map = real
    sealed = {digest for state, digest in seen if state == SlotState.SEALED}
    assert len(seen) > 8
    assert sealed == {SEALED.digest, other.digest}
    first_of_other = seen.index((SlotState.SEALED, other.digest))
    assert seen[first_of_other - 1] == (SlotState.FREE, other.digest)
    arena.close()


def test_rank_maps_what_the_holder_claims(folder: Path) -> None:
    """A rank's mapping shares bytes with the holder's, and sees slots claimed after it was opened (R9)."""
    with pytest.raises(ConfigError, match="no arena"):
        ArenaMapping.open(folder)
    arena = open_arena(folder)
    rank = ArenaMapping.open(folder)
    with pytest.raises(IndexError):
        rank.view(0)
    arena.grow(3)
    assert rank.slots_count == 3
    assert rank.prefault([2, 0, 1]) == 3 * CHUNK
    assert rank.prefault(range(3), should_stop=lambda: True) == 0
    view = rank.view(1, 5)
    view[:] = b"hello"
    assert bytes(arena.view(1, 5)) == b"hello"
    arena.close()
    rank.close()
    rank.close()
    assert bytes(view) == b"hello"  # a view that is still held keeps the memory
    with pytest.raises(ClosedError):
        rank.view(1)


def test_forked_child_has_no_mapping(folder: Path) -> None:
    """R8: a forked child cannot reach the slots, and its exit harms no process."""
    arena = open_arena(folder)
    arena.grow(1)
    rank = ArenaMapping.open(folder)
    held = rank.view(0)
    child = os.fork()
    if child == 0:
        try:
            rank.view(0)
        except ClosedError:
            with open("/proc/self/maps", encoding="ascii") as maps:
                os._exit(3 if any(line.rstrip().endswith("/arena") for line in maps) else 0)
        os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    held[:3] = b"abc"
    assert bytes(arena.view(0, 3)) == b"abc"
    held.release()
    rank.close()
    arena.close()


def test_destroy_refuses_a_live_holder(folder: Path) -> None:
    """`down --discard` does not pull the arena from under a live holder; without one it removes all."""
    lock = ArenaLock.take(folder, timeout_s=1)
    open_arena(folder).close()
    with pytest.raises(ConfigError, match="held by live pid"):
        Arena.destroy(folder)
    lock.release()
    Arena.destroy(folder)
    assert not folder.parent.exists()
    Arena.destroy(folder)


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    where = tmp_path / "shm"
    where.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m,mode=0755", "tmpfs", str(where)], capture_output=True
    )
    if done.returncode:
        pytest.skip("mounting a tmpfs needs root")
    try:
        yield where
    finally:
        subprocess.run(["umount", str(where)], check=True)


def test_full_file_system_is_an_error_and_harms_nothing(small_tmpfs: Path) -> None:
    """R9: on a 64 MB file system growth ends in CapacityError with the numbers, never SIGBUS; earlier slots stay."""
    with scratch_folder(small_tmpfs) as folder:
        arena = open_arena(folder)  # limit far above the file system
        arena.grow(40)
        for slot in range(40):
            arena.view(slot)[:] = bytes([slot]) * CHUNK
        with pytest.raises(CapacityError, match="cannot grow") as caught:
            arena.grow(200)
        assert caught.value.needed_bytes == 160 * CHUNK
        assert 20 * CHUNK < caught.value.free_bytes < 24 * CHUNK
        assert arena.slots_count == 40
        assert claimed_on_disk(folder) == 40 * CHUNK
        assert all(bytes(arena.view(slot)) == bytes([slot]) * CHUNK for slot in range(40))
        assert arena.grow(60) == 60
        room = os.statvfs(small_tmpfs)
        manifests, journal = ManifestFolder.open(folder), JournalFile.open(folder / "journal")
        name = manifest_name(ShardId("j", 1, 2, 3), "ab")
        manifests.save(name, b"small")
        journal.append([b"fact"])
        too_large = bytes(room.f_bavail * room.f_frsize + 1)
        with pytest.raises(CapacityError):
            manifests.save(name, too_large)
        for write in (journal.append, journal.rewrite):
            with pytest.raises(CapacityError):
                write([too_large])
        assert list(manifests.load_all()) == [(name, b"small")]
        assert journal.records() == [b"fact"]
        journal.append([b"more"])
        assert journal.records() == [b"fact", b"more"]
        journal.close()
        manifests.close()
        arena.close()


def test_no_room_even_for_the_slot_table(small_tmpfs: Path) -> None:
    """A table that does not fit is a CapacityError that leaves no half table behind (R9)."""
    with scratch_folder(small_tmpfs) as folder:
        with pytest.raises(CapacityError, match="slot table"):
            open_arena(folder, limit_bytes=(2 << 20) * CHUNK)
        assert sorted(os.listdir(folder)) == ["arena"]
        arena = open_arena(folder)
        assert arena.grow(1) == 1
        arena.close()


# -- arena files --------------------------------------------------------------------------------------
# Files of an arena that were removed, written again from what a holder has open (R35).


FILES_CHUNK = 64 << 10


@pytest.fixture
def files_folder() -> Iterator[Path]:
    with scratch_folder() as path:
        yield path


def files_open_arena(files_folder: Path) -> Arena:
    return Arena.open(files_folder, limit_bytes=16 * FILES_CHUNK, chunk_bytes=FILES_CHUNK)


@pytest.mark.parametrize("what", [("arena", "slots"), ("arena",), ("slots",)])
def test_removed_files_are_written_again_with_what_is_sealed(files_folder: Path, what: tuple[str, ...]) -> None:
    """Every sealed slot is in the new files under its number, all others are free, and the old pages are let go of."""
    arena = files_open_arena(files_folder)
    arena.grow(6)
    for slot in range(6):
        arena.view(slot)[:] = bytes([slot + 1]) * FILES_CHUNK
        state = SlotState.SEALED if slot % 2 else SlotState.LEASED
        arena.headers.write(slot, SlotHeader(state, FILES_CHUNK - slot, bytes(16), owner_pid=1))
    for name in what:
        (files_folder / name).unlink()
    assert arena.files_present() == {name: name not in what for name in ("arena", "slots")}
    pages = os.fstat(arena._fd).st_blocks
    arena.write_again()
    if "arena" in what:
        assert os.fstat(arena._fd).st_blocks * 2 == pages
    again = files_open_arena(files_folder)
    assert again.identity != arena.identity
    assert [again.headers.read(n).state for n in range(6)] == [SlotState.FREE, SlotState.SEALED] * 3
    for slot in (1, 3, 5):
        assert again.headers.read(slot).nbytes == FILES_CHUNK - slot
        assert bytes(again.view(slot, FILES_CHUNK - slot)) == bytes([slot + 1]) * (FILES_CHUNK - slot)
    for one in (arena, again):
        one.close()


# -- lock ---------------------------------------------------------------------------------------------
# The arena's lock and folder: one owner, replaced only when frozen, never behind a link (R2, R5, R8).


OWNER = """
import signal, sys
from memstore.shell.arena.lock import ArenaLock
lock = ArenaLock.take(sys.argv[1], timeout_s=5, cluster="c1", address="10.0.0.1:7")
print("locked", flush=True)
signal.pause()
"""


@pytest.fixture
def other(folder: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", OWNER, str(folder)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        yield process
    finally:
        process.kill()
        process.wait(timeout=120)
        process.stdout.close()


def test_live_owner_is_named_and_left_alone(folder: Path, other: subprocess.Popen[str]) -> None:
    """R5: a live lock is an error that names pid, address, cluster and the way out."""
    with pytest.raises(ConfigError, match=rf"pid {other.pid} at 10.0.0.1:7 of Ray cluster c1.*memstore down"):
        ArenaLock.take(folder, timeout_s=5, replace_frozen=lambda owner: False)
    with pytest.raises(ConfigError):
        ArenaLock.take(folder, timeout_s=5)
    assert other.poll() is None
    assert arena_lock.is_held(folder)


def test_frozen_owner_is_killed_and_no_other_process(folder: Path, other: subprocess.Popen[str]) -> None:
    """R2: a successor of a stopped owner kills exactly that pid and gets the lock."""
    bystander = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    try:
        other.send_signal(signal.SIGSTOP)
        asked: list[LockOwner] = []
        lock = ArenaLock.take(folder, timeout_s=10, replace_frozen=lambda owner: asked.append(owner) or True)
        assert [owner.pid for owner in asked] == [other.pid]
        assert other.wait(timeout=120) == -signal.SIGKILL
        assert bystander.poll() is None
        owner = arena_lock.owner(folder)
        assert owner is not None
        assert owner.pid == os.getpid()
        lock.release()
    finally:
        bystander.kill()
        bystander.wait(timeout=120)


def test_lock_of_a_killed_owner_is_free(folder: Path, other: subprocess.Popen[str]) -> None:
    """R2: the lock ends with its owner; the record of a dead owner stops no process."""
    other.kill()
    other.wait(timeout=120)
    record = arena_lock.owner(folder)
    assert record is not None
    assert not record.is_alive()
    assert not arena_lock.is_held(folder)
    ArenaLock.take(folder, timeout_s=1).release()
    assert arena_lock.owner(folder) is None


def test_recycled_pid_is_not_killed(folder: Path, other: subprocess.Popen[str]) -> None:
    """R2: a pid that another process has now, by its start time, is not touched."""
    start = arena_lock.process_start_time(other.pid)
    assert start is not None
    impostor = LockOwner(other.pid, start - 1, arena_lock.boot_id(), arena_lock.pid_namespace())
    arena_lock._kill_exactly(folder, impostor)
    other.send_signal(signal.SIGTERM)
    assert other.wait(timeout=120) == -signal.SIGTERM, "it lived until this signal, which came later"


def test_forked_child_does_not_keep_the_lock(folder: Path) -> None:
    """A child forked by the owner does not hold the lock after the owner gave it up (R2)."""
    lock = ArenaLock.take(folder, timeout_s=1)
    release, wait = os.pipe()[::-1]
    child = os.fork()
    if child == 0:
        os.close(release)
        os.read(wait, 1)
        os._exit(0)
    try:
        lock.release()
        again = ArenaLock.take(folder, timeout_s=5)
        assert again.is_current(), "taken while the child lives, which had the same descriptors"
        again.release()
    finally:
        os.close(release)
        os.close(wait)
        os.waitpid(child, 0)


def test_zombie_counts_as_dead() -> None:
    """R8: a process that ended and was not reaped is not alive."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    start = arena_lock.process_start_time(child)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert start is not None
    assert not arena_lock.is_alive(child, start)
    os.waitpid(child, 0)
    assert arena_lock.process_start_time(child) is None
    mine = arena_lock.process_start_time(os.getpid())
    assert mine is not None
    assert arena_lock.is_alive(os.getpid(), mine)
    assert not arena_lock.is_alive(os.getpid(), mine + 1)


def test_describe_and_garbage(folder: Path) -> None:
    """The record can be rewritten in place; garbage in it names no process."""
    lock = ArenaLock.take(folder, timeout_s=1)
    lock.describe(cluster="c2", address="a:1")
    owner = arena_lock.owner(folder)
    assert owner is not None
    assert (owner.cluster, owner.address) == ("c2", "a:1")
    (folder / "lock").write_bytes(b"[1, 2")
    assert arena_lock.owner(folder) is None
    with pytest.raises(ConfigError, match="not given up within 0 s"):
        ArenaLock.take(folder, timeout_s=0)
    lock.release()


@pytest.mark.parametrize("name", ["", "..", ".hidden", "a/b", "x" * 129, "a\0b"])
def test_names_cannot_leave_the_folder(name: str) -> None:
    """R5: a store or host name is one plain folder name."""
    with pytest.raises(ConfigError, match="cannot be a folder name"):
        arena_folder.arena_folder("/dev/shm", store=name, host="h1")


def test_unsafe_folders_are_refused(tmp_path: Path) -> None:
    """R5: links, open modes, foreign owners and a root where others could swap folders are refused."""
    root = tmp_path / "root"
    root.mkdir(mode=0o755)
    top = root / f"memstore-{os.geteuid()}"
    top.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="symbolic link"):
        arena_folder.make_folder(root, store="s", host="h")
    top.unlink()
    folder = arena_folder.make_folder(root, store="s", host="h")
    assert [path.stat().st_mode & 0o777 for path in (top, folder.parent, folder)] == [0o700] * 3
    folder.chmod(0o750)
    with pytest.raises(ConfigError, match="mode 0750"):
        arena_folder.check_folder(folder)
    folder.chmod(0o700)
    (folder / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="cannot open"):
        ArenaLock.take(folder, timeout_s=0)
    assert not (tmp_path / "elsewhere").exists()
    if os.geteuid() == 0:
        os.chown(folder, 12345, -1)
        with pytest.raises(ConfigError, match="belongs to user 12345"):
            arena_folder.check_folder(folder)
    root.chmod(0o777)
    with pytest.raises(ConfigError, match="sticky"):
        arena_folder.make_folder(root, store="s", host="h2")


def test_secret_is_kept_private(folder: Path) -> None:
    """R4: the secret comes back, is 0600, and a damaged one is refused."""
    assert arena_folder.read_secret(folder) is None
    arena_folder.write_secret(folder, bytes(range(32)))
    assert arena_folder.read_secret(folder) == bytes(range(32))
    assert (folder / "secret").stat().st_mode & 0o777 == 0o600
    (folder / "secret").write_bytes(b"short")
    with pytest.raises(ConfigError, match="5 bytes"):
        arena_folder.read_secret(folder)


# -- test incarnation ---------------------------------------------------------------------------------
# A holder's incarnation only grows, also if its clock goes back or its folder is lost (R3).


HOUR_S = 3600.0


def open_private(path: Path) -> TextIO:
    """Make a file that no other process may read."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w")


def test_a_folder_counts_its_lives(tmp_path: Path) -> None:
    """Each life is the next one; a controller that knows a higher one is gone beyond."""
    first = next_incarnation(tmp_path)
    assert [next_incarnation(tmp_path) for _ in range(2)] == [first + 1, first + 2]
    assert next_incarnation(tmp_path, above=first + 100) == first + 101
    assert next_incarnation(tmp_path) == first + 102
    assert next_incarnation(tmp_path, above=5) == first + 103


def test_the_kits_holder_counts_its_lives_as_a_folder_does(tmp_path: Path) -> None:
    """Ordered above a life that it is past already, it does not go back; else a test would miss such an order."""
    world = ControllerWorld(1)
    holder = world.holders["h0"]
    above = [100, 5, 300]
    first = next_incarnation(tmp_path, above=holder.info.incarnation)
    folder = [next_incarnation(tmp_path, above=first + each) - first for each in above]
    first, kit = holder.info.incarnation, list[int]()
    for each in above:
        holder.obey(TakeIncarnation(above=first + each))
        kit.append(holder.info.incarnation - first)
    assert kit == folder == [101, 102, 301]


def test_a_folder_that_was_lost_repeats_no_number(tmp_path: Path) -> None:
    """Lives before and after are never taken for one; a torn file is no number."""
    numbers = set()
    for _ in range(20):
        numbers.add(next_incarnation(tmp_path))
        (tmp_path / INCARNATION_NAME).write_text("12")
    assert len(numbers) == 20


def test_the_table_names_the_later_life() -> None:
    """An older life of a host is distinguished from the next one, and from a new session of the same."""
    table = HostTable(suspect_after_s=1.5, dead_after_s=5.0, failure_domains=())
    lives = [HostInfo("a", n, (Endpoint("10.0.0.1", 7000),)) for n in (6, 7, 8)]
    table.up(0.0, lives[1])
    assert [table.later_life(info) for info in lives] == [lives[1], None, None]


def is_back(world: ControllerWorld) -> bool:
    """The controller counts the present life of h2 live."""
    machine = world.machine
    state = machine.hosts.states.get("h2") if machine is not None and machine.is_settled else None
    return state is not None and state.status == "live" and state.info == world.holders["h2"].info


@pytest.mark.parametrize("is_taken_over", [False, True])
def test_a_host_whose_folder_was_lost_is_back_at_once(is_taken_over: bool) -> None:
    """Its holder begins with a lower number: the controller refuses it aloud, it takes the next, and commits go on."""
    world, ranks = trained(3, last=2)
    for _ in range(3):
        world.kill_host("h2", keep_memory=True)
        world.return_host("h2")
        assert world.run_until(lambda: is_back(world), 5.0)
    before = world.holders["h2"].info.incarnation
    world.kill_host("h2", keep_memory=True)
    world.return_host("h2")
    holder = world.holders["h2"]
    holder.state.info = replace(holder.info, incarnation=1)
    if is_taken_over:  # the host shows itself twice while the new controller gathers: the later life counts
        world.crash_controller()
    assert world.run_until(lambda: is_back(world), 10.0)
    if not is_taken_over:
        assert holder.info.incarnation == before + 1
        assert any("incarnation 1" in note and "higher" in note for note in world.notes)
    ranks = world.launch(3)
    world.get(ranks)
    assert world.put_all(ranks, 3)


def test_a_clock_set_back_between_two_lives(tmp_path: Path, nursery: RankNursery) -> None:
    """An hour back, then a day ahead: the host is back in seconds each time, and steps commit with all copies."""
    with ProcessCluster(tmp_path / "cluster", {"h0": {}, "h1": {}}) as cluster:
        fleet = Fleet(cluster, nursery)
        ranks = fleet.begin(["h0", "h1"], last_step=2)
        for n, step_s in enumerate((-HOUR_S, 24 * HOUR_S, -HOUR_S)):
            cluster.kill_holder("h1")
            cluster.environ["h1"] = stepped_clock(tmp_path / "clock", step_s)
            cluster.start_holder("h1")
            cluster.wait_live("h0", "h1")
            together(ranks, "train", first=3 + 3 * n, last=5 + 3 * n)
            wait_for(lambda: (cluster.job("train") or {}).get("copies") == 2, "both copies")
        assert cluster.job("train")["committed_step"] == 11  # type: ignore[index]


def test_a_lost_number_is_refused_and_taken_above(tmp_path: Path, nursery: RankNursery) -> None:
    """The folder is lost and the new one has a lower number: both sides log it, and the host is back in seconds."""
    with ProcessCluster(tmp_path / "cluster", {"h0": {}, "h1": {}}) as cluster:
        fleet = Fleet(cluster, nursery)
        ranks = fleet.begin(["h0", "h1"], last_step=2)
        cluster.kill_holder("h1")
        number = int((cluster.arena("h1") / INCARNATION_NAME).read_text())
        ranks[1].kill()
        shutil.rmtree(cluster.arena("h1"))
        cluster.arena("h1").mkdir(mode=0o700)
        with open_private(cluster.arena("h1") / INCARNATION_NAME) as file:
            file.write(f"{1:020d}")
        cluster.start_holder("h1")
        cluster.wait_live("h0", "h1")
        assert int((cluster.arena("h1") / INCARNATION_NAME).read_text()) == number + 1
        assert "ordered to take a higher one" in cluster.logs()
        assert "the controller refused incarnation 2" in cluster.logs()
        ranks[0].kill()
        ranks, got = fleet.resume(["h0", "h1"])
        assert got["step"] == 2
        together(ranks, "train", first=3, last=5)

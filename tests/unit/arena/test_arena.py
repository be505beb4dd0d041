"""The arena: adoption, growth, full file systems, damage and forks (R6, R7, R8, R9)."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash

from memstore.core.arena.slot_table import SlotState
from memstore.core.format.manifest import manifest_name
from memstore.errors import CapacityError, ClosedError, ConfigError, IntegrityError
from memstore.shell.arena.arena import Arena
from memstore.shell.arena.journal_file import JournalFile
from memstore.shell.arena.lock import ArenaLock
from memstore.shell.arena.manifests import ManifestFolder
from memstore.shell.arena.mapping import ArenaMapping
from memstore.shell.arena.slot_headers import DAMAGED_NAME, HEADER_NBYTES, RECORD_NBYTES, SlotHeader
from memstore.testing.clusters.scratch import scratch_folder
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
    with pytest.raises(ConfigError, match="run the version that wrote it"):
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

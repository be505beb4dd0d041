"""The facts journal and the manifest folder: whole records or none (R7, R14, R16)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from memstore.core.format.manifest import manifest_name
from memstore.errors import CapacityError, ClosedError, ConfigError
from memstore.shell.arena import journal_file as journal_module
from memstore.shell.arena.journal_file import JournalFile
from memstore.shell.arena.manifests import ManifestFolder
from memstore.testing.clusters.scratch import scratch_folder
from recovery.inventory import ShardId

RECORDS = [b"one", b"", b"three" * 100]
FRAME_NBYTES = 12


@pytest.fixture
def folder() -> Iterator[Path]:
    with scratch_folder() as path:
        yield path
    assert not path.parent.exists()


def written(folder: Path) -> Path:
    path = folder / "journal"
    journal = JournalFile.open(path)
    journal.append(RECORDS[:1])
    journal.append(RECORDS[1:])
    journal.close()
    return path


def test_records_come_back_in_order(folder: Path) -> None:
    """R16: what was appended is there after reopening, and appending goes on behind it."""
    journal = JournalFile.open(written(folder))
    assert (journal.records(), journal.dropped_nbytes) == (RECORDS, 0)
    assert journal.nbytes == (folder / "journal").stat().st_size
    journal.append([b"four"])
    assert journal.records() == [*RECORDS, b"four"]
    journal.close()
    with pytest.raises(ClosedError):
        journal.append([b"five"])


def test_every_torn_tail_keeps_the_whole_records(folder: Path) -> None:
    """R16: cut at any byte, the records before the cut stay, the rest is dropped, counted and overwritten."""
    path = written(folder)
    whole = path.read_bytes()
    ends = [0]
    for record in RECORDS:
        ends.append(ends[-1] + FRAME_NBYTES + len(record))
    for cut in [*range(60), len(whole) - 1]:
        path.write_bytes(whole[:cut])
        journal = JournalFile.open(path)
        kept = sum(end <= cut for end in ends[1:])
        assert journal.records() == RECORDS[:kept]
        assert journal.dropped_nbytes == cut - ends[kept]
        journal.append([b"next"])
        assert journal.records() == [*RECORDS[:kept], b"next"]
        journal.close()


@pytest.mark.parametrize("at", [0, 3, 5, FRAME_NBYTES + 3, FRAME_NBYTES + 3 + 3, 40])
def test_a_flipped_bit_ends_the_journal_there(folder: Path, at: int) -> None:
    """R16: a damaged length, digest or payload is never returned as a fact, nor anything after it."""
    path = written(folder)
    data = bytearray(path.read_bytes())
    data[at] ^= 0x40
    path.write_bytes(data)
    journal = JournalFile.open(path)
    records = journal.records()
    assert records == RECORDS[: len(records)]
    assert len(records) < len(RECORDS)
    assert journal.dropped_nbytes > 0
    journal.close()


def test_what_is_appended_behind_damage_is_read_once_the_journal_was_shown(folder: Path) -> None:
    """R16: a controller sends what a shown journal lacks at its end: it must not lie behind a damaged record."""
    journal = JournalFile.open(written(folder))
    with (folder / "journal").open("r+b") as file:
        file.seek(-10, 2)
        file.write(b"?")
    assert journal.records() == RECORDS[:2]
    assert journal.dropped_nbytes > 0
    journal.append(RECORDS[2:])
    assert journal.records() == RECORDS
    journal.close()
    journal = JournalFile.open(folder / "journal")
    assert (journal.records(), journal.dropped_nbytes) == (RECORDS, 0)
    journal.close()


def test_rewrite_replaces_all_at_once(folder: Path) -> None:
    """A compaction leaves the new records and no temporary file, and can be appended to."""
    journal = JournalFile.open(written(folder))
    journal.rewrite([b"snapshot"])
    journal.append([b"after"])
    journal.close()
    journal = JournalFile.open(folder / "journal")
    assert journal.records() == [b"snapshot", b"after"]
    journal.rewrite([])
    assert (journal.records(), journal.nbytes) == ([], 0)
    journal.close()
    assert [path.name for path in folder.iterdir()] == ["journal"]


def test_oversized_records_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record above the cap is refused, with the others of its batch; a longer length on disk is damage."""
    path = written(folder)
    monkeypatch.setattr(journal_module, "RECORD_NBYTES_MAX", 100)
    journal = JournalFile.open(path)
    assert journal.records() == RECORDS[:2]
    for write in (journal.append, journal.rewrite):
        with pytest.raises(CapacityError, match="101 bytes exceeds the limit of 100"):
            write([b"fine", bytes(101)])
    assert journal.records() == RECORDS[:2]
    journal.close()


def test_manifest_names_are_safe_and_distinct() -> None:
    """R14: for any job name the file name is hex; another shard or digest is another name."""
    shards = [
        ShardId("../../x\0\ud800", 1, 2, 3),
        ShardId("a", 1, 2, 3),
        ShardId("a", 1, 23, 3),
        ShardId("a", 12, 3, 3),
    ]
    names = {manifest_name(shard, digest) for shard in shards for digest in ("00", "01")}
    assert len(names) == 8
    assert all(len(name) == 40 and set(name) <= set("0123456789abcdef") for name in names)


def test_what_a_cleaner_removes_is_still_read(folder: Path) -> None:
    """Journal and manifests without their names are read as before, said to be gone, and written to another place."""
    manifests, journal = ManifestFolder.open(folder), JournalFile.open(folder / "journal")
    names = sorted(manifest_name(ShardId("j", 1, 2, rank), "d") for rank in range(2))
    for name in names:
        manifests.save(name, name.encode())
    journal.append([b"one"])
    assert (manifests.is_whole(), journal.is_current()) == (True, True)
    (manifests.path / names[1]).unlink()
    journal.path.unlink()
    assert (manifests.is_whole(), journal.is_current()) == (False, False)
    journal.append([b"two"])
    assert journal.records() == [b"one", b"two"]
    assert manifests.load(names[1]) == names[1].encode()
    again = ManifestFolder.open(folder)
    manifests.copy_to(again)
    assert [name for name, _ in again.load_all()] == names
    manifests.remove(names[0])
    with pytest.raises(FileNotFoundError):
        manifests.load(names[0])
    for part in (manifests, again, journal):
        part.close()


def test_manifests_are_whole_or_absent(folder: Path) -> None:
    """R7: saved manifests come back, half-written ones are removed, strangers are skipped with a reason."""
    manifests = ManifestFolder.open(folder)
    names = sorted(manifest_name(ShardId("j", 1, 2, rank), "d") for rank in range(3))
    for name in names:
        manifests.save(name, name.encode())
    manifests.save(names[0], b"again")
    manifests.remove(names[2])
    manifests.remove(names[2])
    (manifests.path / f".new-{names[1]}").write_bytes(b"half")
    (manifests.path / "stranger").write_bytes(b"?")
    (manifests.path / names[2]).symlink_to("/etc/hostname")
    manifests.close()
    adopted = ManifestFolder.open(folder)
    assert list(adopted.load_all()) == [(names[0], b"again"), (names[1], names[1].encode())]
    assert sorted(adopted.skipped) == sorted(["stranger", names[2]])
    assert not (manifests.path / f".new-{names[1]}").exists()
    for bad in ("../journal", "", names[0].upper() + "/"):
        with pytest.raises(ConfigError, match="not a manifest name"):
            manifests.save(bad, b"")

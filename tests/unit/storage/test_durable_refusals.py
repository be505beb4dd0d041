"""The durable tier is never fooled by what lies in the folder, and its errors say what to do (R31)."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from memstore.errors import CapacityError, ConfigError, IntegrityError, MemstoreError, TransportError
from memstore.shell.durable import objects
from memstore.shell.durable.codec import Codec
from memstore.shell.durable.directory import DirectoryFiles
from memstore.shell.durable.tier import PartsTier, files_from_url
from memstore.testing.durable_steps import (
    CHUNK,
    JOB,
    files_under,
    markers_of,
    names_of,
    shard_of,
    spec_of,
    write_part,
    write_step,
)
from recovery.inventory import StepId


@pytest.fixture
def tier(tmp_path: Path) -> PartsTier:
    (tmp_path / "durable").mkdir()
    return PartsTier(DirectoryFiles(tmp_path / "durable"))


def test_marker_of_another_step_is_not_trusted(tier: PartsTier) -> None:
    """A sound marker copied into another step's folder names the wrong bytes and is reported."""
    write_step(tier, 1)
    write_part(tier, shard_of(2))
    step = Path(tier.files.where, JOB, "1")
    (step / "2" / "marker").write_bytes((step / "1" / "marker").read_bytes())
    markers, problems = markers_of(tier, JOB)
    assert [marker.step.step for marker in markers] == [1]
    assert "belongs to" in problems[0]


def test_oversized_marker_is_refused_before_it_is_read(tier: PartsTier) -> None:
    """A sparse file of a terabyte in the marker's place costs no memory."""
    write_step(tier, 1)
    os.truncate(Path(tier.files.where, JOB, "1", "1", "marker"), 1 << 40)
    assert "the limit is" in markers_of(tier, JOB)[1][0]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_symbolic_links_below_the_root_are_not_followed(tier: PartsTier, tmp_path: Path, depth: int) -> None:
    """Job, attempt or step as a link to a folder elsewhere: nothing is written, read, listed or removed through it."""
    write_step(tier, 1, ranks=1)
    names = [JOB, "1", "1"][:depth]
    inside, outside = Path(tier.files.where, *names), tmp_path / "outside"
    inside.rename(outside)
    inside.symlink_to(outside)
    before = files_under(str(outside))
    with pytest.raises(IntegrityError):
        write_part(tier, shard_of(1))
    with pytest.raises(IntegrityError):
        tier.read_manifest(shard_of(1), spec_of(shard_of(1), 0, 1))
    with pytest.raises(IntegrityError):
        tier.remove_step(JOB, StepId(1, 1))
    if depth == 1:
        with pytest.raises(IntegrityError):
            markers_of(tier, JOB)
    else:
        markers, problems = markers_of(tier, JOB)
        assert markers == []
        assert "symbolic link" in problems[0]
    assert files_under(str(outside)) == before


@pytest.mark.parametrize("name", [names_of(shard_of(1))[0], "marker"], ids=["slice", "marker"])
@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_files_of_another_kind_are_refused(tier: PartsTier, tmp_path: Path, name: str, kind: str) -> None:
    """A link, a pipe or a folder in the place of a part or marker is refused at once and never waited for."""
    spec = write_step(tier, 1, ranks=1).specs[0]
    path = Path(tier.files.where, JOB, "1", "1", name)
    path.rename(tmp_path / "elsewhere")
    if kind == "link":
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    if name == "marker":
        assert len(markers_of(tier, JOB)[1]) == 1
        assert markers_of(tier, JOB)[0] == []
    else:
        with pytest.raises(IntegrityError):
            tier.read_manifest(shard_of(1), spec)


def test_missing_root_is_never_an_empty_history(tmp_path: Path) -> None:
    """An unmounted share is an error that says so, not a job that no process knows (R23)."""
    tier = PartsTier(DirectoryFiles(tmp_path / "unmounted"))
    for call in (lambda: markers_of(tier, JOB), lambda: tier.sweep(JOB, ())):
        with pytest.raises(ConfigError, match="mount or create it"):
            call()
    (tmp_path / "unmounted").mkdir()
    assert markers_of(tier, JOB) == ([], [])


def test_probe_creates_the_last_folder_and_leaves_no_file(tmp_path: Path) -> None:
    """Probing a new folder below an existing one succeeds, as often as asked; a missing parent is refused."""
    tier = DirectoryFiles(tmp_path / "new")
    tier.probe()
    tier.probe()
    assert list((tmp_path / "new").iterdir()) == []
    with pytest.raises(ConfigError, match="ENOENT") as caught:
        DirectoryFiles(tmp_path / "not-mounted" / "new").probe()
    assert "mount" in str(caught.value)


def test_probe_of_a_folder_without_write_access_says_what_to_do() -> None:
    """The message names the path, the errno and the remedy."""
    with tempfile.TemporaryDirectory() as root:
        os.chmod(root, 0o555)
        if os.geteuid() == 0:
            os.seteuid(65534)  # root may write anywhere
            try:
                error = probe_error(DirectoryFiles(root))
            finally:
                os.seteuid(0)
        else:
            error = probe_error(DirectoryFiles(root))
    assert root in error
    assert "EACCES" in error
    assert "write access" in error


def probe_error(tier: DirectoryFiles) -> str:
    with pytest.raises(ConfigError) as caught:
        tier.probe()
    return str(caught.value)


@pytest.fixture
def small_disk() -> Iterator[str]:
    """A file system of 256 KiB."""
    root = tempfile.mkdtemp()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "none", root]
    try:
        if os.geteuid() != 0 or subprocess.run(command, capture_output=True, timeout=120).returncode != 0:
            pytest.skip("needs the right to mount a small tmpfs")
        try:
            yield root
        finally:
            subprocess.run(["umount", root], check=True, timeout=120)
    finally:
        os.rmdir(root)


def test_full_disk_is_a_capacity_error_and_gives_the_room_back(small_disk: str) -> None:
    """A slice that does not fit leaves nothing; with the step gone its room is back; others stay and still fit."""
    tier = PartsTier(DirectoryFiles(small_disk))
    tier.files.probe()
    first = write_step(tier, 1, ranks=1)
    before = os.statvfs(small_disk).f_bavail
    with pytest.raises(CapacityError, match="ENOSPC"):
        write_part(tier, shard_of(2), 200 * CHUNK)
    assert not any(name.startswith(".tmp") for name in files_under(small_disk))
    tier.remove_step(JOB, StepId(1, 1), only_unmarked=True)
    tier.remove_step(JOB, StepId(1, 2), only_unmarked=True)
    assert os.statvfs(small_disk).f_bavail == before
    second = write_step(tier, 2, ranks=1)
    assert markers_of(tier, JOB) == ([first, second], [])


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (errno.EIO, TransportError),
        (errno.ESTALE, TransportError),
        (errno.ETIMEDOUT, TransportError),
        (errno.EDQUOT, CapacityError),
        (errno.EROFS, ConfigError),
        (errno.ENOENT, IntegrityError),
    ],
)
def test_errors_say_what_they_prove(
    tier: PartsTier, monkeypatch: pytest.MonkeyPatch, code: int, expected: type[MemstoreError]
) -> None:
    """An I/O error or a stale handle is no evidence about the bytes (R25); every error names the path."""
    spec = write_step(tier, 1, ranks=1).specs[0]

    def fail(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(expected, match=errno.errorcode[code]) as caught:
        tier.read_manifest(shard_of(1), spec)
    assert "rank-0" in str(caught.value)
    assert isinstance(caught.value, IntegrityError) == (expected is IntegrityError)


def test_folders_that_cannot_be_synced_are_tolerated(tier: PartsTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some network file systems refuse to sync a folder; only that refusal is passed over."""
    real = os.fsync

    def sync(fd: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EINVAL, "not on folders")
        real(fd)

    monkeypatch.setattr(os, "fsync", sync)
    marker = write_step(tier, 1)
    assert markers_of(tier, JOB) == ([marker], [])


def test_no_descriptor_is_leaked(tier: PartsTier) -> None:
    """Reads, writes, refusals and listings leave no file open."""
    spec = write_step(tier, 1, ranks=1).specs[0]
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        write_part(tier, shard_of(2))
        tier.read_manifest(shard_of(1), spec)
        with pytest.raises(IntegrityError):
            tier.read_manifest(shard_of(9), spec)
        markers_of(tier, JOB)
        tier.sweep(JOB, ())
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("url", ["/mnt/ckpt", "file:///mnt/ckpt", "file://localhost/mnt/ckpt", "file:///mnt/%63kpt"])
def test_paths_and_file_urls_are_directories(url: str) -> None:
    """A plain absolute path and file:// name the same files."""
    files = files_from_url(url)
    assert isinstance(files, DirectoryFiles)
    assert files.where == "/mnt/ckpt"


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://bucket/key", "no storage that memstore knows"),
        ("memory:///x", "no storage that memstore knows"),
        ("s3://", "write s3://bucket/folder"),
        ("s3://[", "no URL"),
        ("s3://b/../c", "write s3://bucket/folder"),
        ("s3://b//c", "write s3://bucket/folder"),
        ("gs://b/c\n", "write gs://bucket/folder"),
        ("s3://b/c?versionId=1", "no place in it"),
        ("az://account/c?sig=SECRET", "no place in it.*write az://bucket/folder.*AZURE_STORAGE_ACCOUNT_NAME"),
        ("az://container@account.blob.core.windows.net/c", "no place in it.*AZURE_STORAGE_ACCOUNT_NAME"),
        ("s3://KEY:SECRET@bucket/c", "no place in it"),
        ("s3://KEY@bucket/c", "no place in it"),
        ("s3://KEY:a/SECRET@bucket/c", "no place in it"),
        ("file://elsewhere/x", "without host"),
        ("file:///x?y=1", "without host"),
        ("relative/path", "not an absolute path"),
        ("~/ckpt", "not an absolute path"),
        ("", "not an absolute path"),
        ("/a\0b", "NUL"),
        ("file:///a%00b", "NUL"),
    ],
)
def test_other_urls_are_refused_with_the_way_out(url: str, reason: str) -> None:
    """Other schemes, other hosts, relative paths and credentials are ConfigErrors, which repeat no secret."""
    with pytest.raises(ConfigError, match=reason) as caught:
        files_from_url(url)
    assert "SECRET" not in str(caught.value)
    assert "KEY" not in str(caught.value).replace("AWS_ACCESS_KEY_ID", "")


def test_an_account_that_is_not_named_is_asked_for() -> None:
    """Only Azure's store needs more than its URL says: the refusal is one line, with the variable."""
    pytest.importorskip("obstore")
    objects._store.cache_clear()
    with pytest.raises(ConfigError, match=r"^.*Account must be specified.*AZURE_STORAGE_ACCOUNT_NAME.*$"):
        files_from_url("az://bucket/x")


def test_a_missing_package_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Object stores, compression and encryption are optional: without a package the message says what to install."""
    for package in ("obstore", "obstore.store", "zstandard", "cryptography.hazmat.primitives.kdf.hkdf"):
        monkeypatch.setitem(sys.modules, package, None)
    objects._store.cache_clear()
    spec = spec_of(shard_of(1), CHUNK, 1)
    for call, package in (
        (lambda: files_from_url("s3://bucket/x"), "obstore"),
        (lambda: Codec(is_compressing=True).seal(spec, 0, b"m", [bytes(CHUNK)]), "zstandard"),
        (lambda: Codec(key=bytes(32)).seal(spec, 0, b"m", [bytes(CHUNK)]), "cryptography"),
    ):
        with pytest.raises(ConfigError, match=rf"pip install {package}$"):
            call()


# -- test durable directory ---------------------------------------------------------------------------
# The durable tier on a directory: whole or not at all, marker last, marker first to go (R31).


@pytest.fixture
def test_everything_is_synced_before_it_is_named(tier: PartsTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is synced before the rename and the folder after it, for parts and markers alike."""
    calls: list[str] = []
    real_sync, real_rename = os.fsync, os.rename

    def sync(fd: int) -> None:
        calls.append("folder" if os.path.isdir(f"/proc/self/fd/{fd}") else "file")
        real_sync(fd)

    def rename(old: str, new: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        calls.append(new)
        real_rename(old, new, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "rename", rename)
    write_step(tier, 1, ranks=1)
    first, second = names_of(shard_of(1))
    made = ["folder"] * 3
    assert calls == [*made, "file", first, "folder", *made, "file", second, "folder", *made, "file", "marker", "folder"]


def test_marker_goes_first_and_durably(tier: PartsTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Retention unlinks the marker and syncs the folder before it touches a part, so no crash leaves a marked step
    without parts.
    """
    write_step(tier, 1)
    kept = write_step(tier, 2)
    calls: list[str] = []
    real_unlink, real_sync = os.unlink, os.fsync

    def unlink(name: str, *, dir_fd: int) -> None:
        calls.append(name)
        real_unlink(name, dir_fd=dir_fd)

    def sync(fd: int) -> None:
        calls.append("sync")
        real_sync(fd)

    monkeypatch.setattr(os, "unlink", unlink)
    monkeypatch.setattr(os, "fsync", sync)
    tier.remove_step(JOB, StepId(1, 1))
    assert calls[:2] == ["marker", "sync"]
    assert {*calls[2:]} - {"sync"} == {*names_of(shard_of(1)), *names_of(shard_of(1, 1))}
    tier.remove_step(JOB, StepId(1, 1))
    assert markers_of(tier, JOB) == ([kept], [])
    assert not Path(tier.files.where, JOB, "1", "1").exists()


def test_a_removed_step_leaves_strangers_alone(tier: PartsTier) -> None:
    """All of a step goes; a file another process put there stays, with the folders above it."""
    write_step(tier, 1)
    stranger = Path(tier.files.where, JOB, "1", "1", "notes.txt")
    stranger.write_text("mine")
    tier.remove_step(JOB, StepId(1, 1))
    assert files_under(tier.files.where) == {f"{JOB}/1/1/notes.txt"}


def test_sweep_removes_what_crashes_left(tier: PartsTier) -> None:
    """Temporary files and unmarked steps go, unless a live write may own them."""
    marker = write_step(tier, 1)
    for step in (2, 3, 4):
        write_part(tier, shard_of(step))
    for step in (1, 2, 3):
        Path(tier.files.where, JOB, "1", str(step), ".tmp-rank-0.0-00").write_bytes(b"half")
    assert tier.sweep(JOB, {StepId(1, 3)}) == (StepId(1, 2),)
    whole = ["marker", *names_of(shard_of(1)), *names_of(shard_of(1, 1))]
    left = {*(f"1/{name}" for name in whole), *(f"3/{name}" for name in names_of(shard_of(3))), "3/.tmp-rank-0.0-00"}
    left |= {f"4/{name}" for name in names_of(shard_of(4))}
    assert files_under(tier.files.where) == {f"{JOB}/1/{name}" for name in left}
    assert tier.sweep(JOB, ()) == (StepId(1, 3), StepId(1, 4))
    assert markers_of(tier, JOB) == ([marker], [])

"""Files that a process put in the way, and what other users of the machine can reach: nothing (R4, R5, I20)."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from memstore import errors
from memstore.config import Config
from memstore.shell.arena import folder as arena_folder
from memstore.shell.arena.arena import Arena
from memstore.shell.arena.folder import IdleTime, next_incarnation
from memstore.shell.arena.journal_file import JournalFile
from memstore.shell.arena.lock import ArenaLock
from memstore.shell.arena.manifests import ManifestFolder
from memstore.shell.durable.directory import DirectoryFiles
from memstore.shell.durable.tier import PartsTier
from memstore.shell.net.listener import Listener
from memstore.testing.clusters.processes import ProcessCluster, wait_for
from memstore.testing.durable_steps import markers_of
from memstore.testing.ranks.fleet import Fleet
from memstore.testing.ranks.rank_process import RankNursery, together
from recovery.inventory import ShardId, ShardSpec, StepId

VICTIM = b"a user's thesis\n" * 5000
NAME = "0" * 40  # of a manifest
OPENERS: dict[str, Callable[[Path], Any]] = {
    "lock": lambda folder: ArenaLock.take(folder, timeout_s=0).release(),
    "secret": arena_folder.read_secret,
    f".secret-{os.getpid()}": lambda folder: arena_folder.write_secret(folder, bytes(32)),
    "seen": IdleTime,
    "incarnation": next_incarnation,
    "arena": lambda folder: Arena.open(folder, limit_bytes=1 << 16, chunk_bytes=4096).close(),
    "slots": lambda folder: Arena.open(folder, limit_bytes=1 << 16, chunk_bytes=4096).close(),
    "journal": lambda folder: JournalFile.open(folder / "journal").close(),
    ".journal-new": lambda folder: _rewrite(folder),
    f"manifests/{NAME}": lambda folder: ManifestFolder.open(folder).load(NAME),
    f"manifests/.new-{NAME}": lambda folder: ManifestFolder.open(folder).save(NAME, b"manifest"),
    "holder.sock": lambda folder: Listener.unix(folder / "holder.sock", on_channel=lambda *_: None).close(),
}


def without_pid(name: str) -> str:
    """Return a file's name as every process that collects these tests has it."""
    return name.replace(f"-{os.getpid()}", "-PID")


def _rewrite(folder: Path) -> None:
    journal = JournalFile.open(folder / "journal")
    try:
        journal.rewrite([b"fact"])
    finally:
        journal.close()


def plant(kind: str, path: Path, victim: Path) -> None:
    """Put something of a kind where a file of ours belongs."""
    if kind == "link":
        path.symlink_to(victim)
    elif kind == "second name":
        os.link(victim, path)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        os.mknod(path, 0o600 | stat.S_IFSOCK)
    elif kind == "device":
        os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))
    else:
        path.mkdir()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An arena folder with its manifests folder."""
    made = arena_folder.make_folder(tmp_path, store="s", host="h")
    ManifestFolder.open(made)
    return made


@pytest.mark.parametrize("kind", ["link", "second name", "pipe", "socket", "device", "folder"])
@pytest.mark.parametrize("name", OPENERS, ids=without_pid)
def test_what_lies_in_the_place_of_an_arenas_file_is_neither_written_nor_read(
    folder: Path, tmp_path: Path, name: str, kind: str
) -> None:
    """Links, second names, pipes, devices: refused at once, and the file they lead to keeps every byte."""
    if kind == "device" and os.geteuid() != 0:
        pytest.skip("only root makes device files")
    if name == "holder.sock" and kind == "socket":
        pytest.skip("a stale socket of ours is replaced: tests/unit/net/test_listener.py")
    victim = tmp_path / "victim"
    victim.write_bytes(VICTIM)
    victim.chmod(0o600)
    os.utime(victim, ns=(1, 1))
    plant(kind, folder / name, victim)
    with pytest.raises(errors.ConfigError):
        OPENERS[name](folder)
    assert victim.read_bytes() == VICTIM
    assert victim.stat().st_mtime_ns == 1


@pytest.mark.parametrize("name", OPENERS, ids=without_pid)
def test_a_link_to_nothing_makes_no_file_elsewhere(folder: Path, tmp_path: Path, name: str) -> None:
    """A dangling link is not followed to create what it names."""
    (folder / name).symlink_to(tmp_path / "elsewhere")
    try:
        OPENERS[name](folder)
    except errors.ConfigError:
        assert (folder / name).is_symlink()
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("is_link", [True, False])
def test_a_manifests_folder_that_is_not_ours_alone_is_refused(folder: Path, tmp_path: Path, is_link: bool) -> None:
    """A link in its place, or a mode that lets others in, is a ConfigError."""
    path = folder / "manifests"
    if is_link:
        path.rmdir()
        path.symlink_to(tmp_path)
    else:
        path.chmod(0o755)
    with pytest.raises(errors.ConfigError, match="symbolic link" if is_link else "0755"):
        ManifestFolder.open(folder)


def test_strange_entries_among_manifests_are_skipped_by_name(folder: Path) -> None:
    """Pipes, folders and names that are no digest are listed as skipped; the good manifest is read."""
    manifests = ManifestFolder.open(folder)
    manifests.save(NAME, b"good")
    os.mkfifo(manifests.path / ("1" * 40))
    (manifests.path / ("2" * 40)).mkdir()
    (manifests.path / ".new-x").mkdir()
    (manifests.path / "..\n").touch()
    assert list(manifests.load_all()) == [(NAME, b"good")]
    assert len(manifests.skipped) == 4


SPEC = ShardSpec("00" * 16, 0, 0, 0, 1)
JOBS = ["../../x", "..", "", "x" * 65, "x" * 300, "naïve", "a\0b", "a/b", ".hidden", "-rf", "a\n", "a b"]


@pytest.mark.parametrize("job", JOBS)
def test_no_jobs_name_leaves_the_durable_directory(tmp_path: Path, job: str) -> None:
    """Reading, writing, listing and removing refuse the name; nothing appears in or beside the root."""
    tier = PartsTier(DirectoryFiles(tmp_path / "root"))
    tier.files.probe()
    shard = ShardId(job, 1, 1, 0)
    for call in (
        lambda: tier.write_slice(shard, SPEC, 0, b"m", [], should_stop=lambda: False),
        lambda: tier.read_manifest(shard, SPEC),
        lambda: markers_of(tier, job),
        lambda: tier.remove_step(job, StepId(1, 1)),
    ):
        with pytest.raises(errors.ConfigError):
            call()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["root"]


@pytest.mark.parametrize(
    "numbers", [(-1, 0, 0), (0, -1, 0), (0, 0, -1), (1 << 63, 0, 0), (True, 0, 0), ("../..", 0, 0)]
)
def test_no_number_leaves_the_durable_directory(tmp_path: Path, numbers: tuple[Any, ...]) -> None:
    """Negative, huge and mistyped attempts, steps and ranks make no file outside the job's folders."""
    tier = PartsTier(DirectoryFiles(tmp_path / "root"))
    tier.files.probe()
    with contextlib.suppress(errors.MemstoreError):
        tier.write_slice(ShardId("job", *numbers), SPEC, 0, b"m", [], should_stop=lambda: False)
    assert [path.name for path in tmp_path.iterdir()] == ["root"]
    assert all("-1" not in path.name and ".." not in path.name for path in tmp_path.rglob("*"))


# -- other users ----------------------------------------------------------------------------------

STRANGER = """
import json, os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
opened = []
for path in json.loads(sys.stdin.read()):
    for flags in (os.O_RDONLY, os.O_WRONLY):
        try:
            os.close(os.open(path, flags | os.O_NONBLOCK))
            opened.append(path)
        except OSError:
            pass
    try:
        os.listdir(path)
        opened.append(path)
    except OSError:
        pass
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(path)
        opened.append(path)
    except OSError:
        pass
print(json.dumps(opened))
"""


def opened_by_a_stranger(paths: list[Path]) -> list[str]:
    """Let a process of user 65534 open, list and connect to each path; return those where it could."""
    done = subprocess.run(
        [sys.executable, "-c", STRANGER],
        input=json.dumps([str(path) for path in paths]),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found: list[str] = json.loads(done.stdout)
    return found


@pytest.fixture
def open_place() -> Iterator[Path]:
    """A folder that all reaches, under a umask that takes nothing away: what is closed is closed by us."""
    before = os.umask(0)
    place = Path(tempfile.mkdtemp(prefix="memstore-open-"))
    place.chmod(0o755)
    yield place
    shutil.rmtree(place)
    os.umask(before)


@pytest.mark.root
def test_other_users_of_the_machine_can_open_nothing(tmp_path: Path, open_place: Path, nursery: RankNursery) -> None:
    """Arena, slots, manifests, journal, secret, socket, durable files; and no process shows the secret as an argument.

    Every entry is tried by a process of another user, the modes are looked at, and a folder that is open on purpose
    shows that the stranger can open what is open.
    """
    if os.geteuid() != 0:
        pytest.skip("only root becomes another user")
    durable = open_place / "durable"
    DirectoryFiles(durable).probe()
    with ProcessCluster(tmp_path / "cluster", {"h0": {"memstore": "replica"}}) as cluster:
        fleet = Fleet(cluster, nursery, durable=str(durable), durable_every=1)
        ranks = fleet.begin(["h0"], last_step=1)
        wait_for(lambda: list(durable.rglob("marker")), "a durable step")
        arena = cluster.arena("h0")
        ours = [arena.parent.parent, *arena.parent.parent.rglob("*"), durable, *durable.rglob("*")]
        assert {"arena", "slots", "journal", "secret", "lock", "holder.sock", "manifests", "rank-0", "marker"} <= {
            path.name.partition(".0.")[0] for path in ours
        }
        for path in ours:
            try:
                status = path.lstat()
            except FileNotFoundError:
                continue  # of a step that was dropped since the folders were listed
            assert stat.S_IMODE(status.st_mode) == (0o700 if stat.S_ISDIR(status.st_mode) else 0o600), path
        control = open_place / "open"
        control.touch(0o644)
        assert opened_by_a_stranger([*ours, control]) == [str(control)]
        for process in (*cluster.holders.values(), cluster.controller):
            assert process is not None
            assert cluster.secret.hex() not in Path(f"/proc/{process.pid}/cmdline").read_text()
        assert cluster.secret.hex() not in cluster.logs()
        assert repr(cluster.secret) not in cluster.logs()
        together(ranks, "train", first=2, last=2)


@pytest.mark.root
def test_a_process_of_another_user_is_refused_by_its_credentials(tmp_path: Path) -> None:
    """Even where the socket file stands open, the kernel's word about the peer decides (SO_PEERCRED)."""
    if os.geteuid() != 0:
        pytest.skip("only root becomes another user")
    folder = Path("/dev/shm") / f"memstore-credentials-p{os.getpid()}"
    folder.mkdir(mode=0o755)
    try:
        with Listener.unix(folder / "holder.sock", on_channel=lambda *_: None) as server:
            (folder / "holder.sock").chmod(0o666)
            assert opened_by_a_stranger([folder / "holder.sock"]) == [str(folder / "holder.sock")]
            wait_for(lambda: server.refused == 1, "the refusal")
            assert "user 65534" in server.last_refusal
    finally:
        shutil.rmtree(folder)


def test_an_arena_that_another_process_made_first_is_not_used(tmp_path: Path) -> None:
    """A folder squatted under our name by another user is a ConfigError that says whose it is."""
    if os.geteuid() != 0:
        pytest.skip("only root gives files away")
    top = tmp_path / f"memstore-{os.geteuid()}"
    top.mkdir(mode=0o700)
    os.chown(top, 65534, 65534)
    with pytest.raises(errors.ConfigError, match="belongs to user 65534"):
        arena_folder.make_folder(Config(arena_dir=str(tmp_path)).arena_dir, store="s", host="h")

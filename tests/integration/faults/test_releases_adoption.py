"""A holder finds the arena of another release: it adopts it whole, or touches nothing and names who reads it (R40)."""

from __future__ import annotations

import logging
import shutil
import struct
import tarfile
from pathlib import Path

import pytest
import xxhash
from repository import ROOT

from memstore.core.format.releases import FORMATS, RELEASES
from memstore.core.wire import frame
from memstore.core.wire.calls import AskStatus
from memstore.core.wire.frame import Kind
from memstore.core.wire.rank_messages import ToolHello
from memstore.errors import ConfigError
from memstore.shell.arena.slot_headers import FORMAT_VERSION
from memstore.shell.holder.holder import Holder
from memstore.shell.identity import HostIdentity
from memstore.shell.net.listener import connect_unix
from memstore.shell.rank.holder_link import HolderLink
from memstore.testing.clusters.processes import ProcessCluster, wait_for
from memstore.testing.ranks.fleet import Fleet
from memstore.testing.ranks.rank_process import RankNursery

READABLE = [name for name, formats in RELEASES.items() if formats == FORMATS]
HOST = {"h0": {"rack": "r0"}}
SIZES = {"chunk_bytes": 4 << 10, "arena_bytes": 512 << 10}  # of the golden arena


def unpack(release: str, folder: Path) -> Path:
    """Return the folder in which a release's store lies now: a host's folder, and durable storage."""
    with tarfile.open(ROOT / "tests" / "golden" / release / "store.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


def put_in_place(release: str, cluster: ProcessCluster, folder: Path) -> Path:
    """Give a host, whose holder has not been started, the arena of a release; return its folder."""
    home = cluster.arena("h0")
    home.parent.parent.mkdir(mode=0o700, exist_ok=True)  # `parents=True` would leave it open to others
    home.parent.mkdir(mode=0o700)
    shutil.move(unpack(release, folder) / "h0", home)
    for path in (home.parent, home, home / "manifests"):
        path.chmod(0o700)
    return home


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("release", READABLE)
def test_the_arena_of_a_release_is_adopted_and_restored(release: str, tmp_path: Path, nursery: RankNursery) -> None:
    """Both ranks' shards lie on the one host; every byte is the one that was put under that release."""
    cluster = ProcessCluster(tmp_path / "cluster", HOST, **SIZES)
    put_in_place(release, cluster, tmp_path / "golden")
    with cluster:
        assert len(cluster.manifests("h0")) == 4, "none was dropped"
        fleet = Fleet(cluster, nursery, job="copies", kib=56)
        ranks, got = fleet.resume(["h0", "h0"])
        assert (got["step"], got["steps_lost"], got["verdict"]) == (1, 0, "local")
        fleet.kill(ranks)


@pytest.mark.parametrize("release", READABLE)
def test_the_durable_steps_of_a_release_are_restored(release: str, tmp_path: Path, nursery: RankNursery) -> None:
    """On hosts that know nothing of the job."""
    durable = unpack(release, tmp_path / "golden") / "durable"
    with ProcessCluster(tmp_path / "cluster", HOST) as cluster:
        fleet = Fleet(cluster, nursery, job="copies", kib=56, durable=str(durable))
        ranks, got = fleet.resume(["h0", "h0"])
        assert (got["step"], got["verdict"]) == (1, "durable")
        fleet.kill(ranks)


@pytest.mark.parametrize(
    ("part", "number", "words"),
    [
        ("slots", 2, "has format 2, this memstore reads 3: a build before 0.2.0 wrote it"),
        ("slots", 9, "has format 9, this memstore reads 3: a release after 0.2.0 wrote it: use that one"),
        ("journal", 9, f"format 9, not {FORMATS['journal']}: a build before 0.2.0 wrote it"),
        ("journal", 99, f"format 99, not {FORMATS['journal']}: a release after 0.2.0 wrote it: use that one"),
    ],
)
def test_the_arena_of_another_release_is_refused_before_it_is_touched(
    part: str, number: int, words: str, tmp_path: Path
) -> None:
    """Not a byte of the folder changes, and no lock is taken."""
    cluster = ProcessCluster(tmp_path / "cluster", HOST, **SIZES)
    home = put_in_place(sorted(RELEASES)[-1], cluster, tmp_path / "golden")
    data = bytearray((home / part).read_bytes())
    if part == "slots":
        assert struct.unpack_from("<I", data, 8) == (FORMAT_VERSION,)
        struct.pack_into("<I", data, 8, number)
        struct.pack_into("<Q", data, 4088, xxhash.xxh3_64_intdigest(bytes(data[:16] + data[24:4088])))
    else:
        nbytes = int.from_bytes(data[:4], "little")
        data[12 + 16] = number
        struct.pack_into("<Q", data, 4, xxhash.xxh3_64_intdigest(bytes(data[12 : 12 + nbytes])))
    (home / part).write_bytes(data)
    before = contents(home)
    try:
        with pytest.raises(ConfigError) as refused:
            Holder(HostIdentity("h0", "machine", True, {}), cluster.config, secret=bytes(32), arena_limit_bytes=1 << 19)
        assert words in str(refused.value)
        assert "--leftovers --discard --host h0`" in str(refused.value)
        assert contents(home) == before
    finally:
        cluster.stop()


def test_a_process_of_another_wire_version_is_told_both_numbers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A holder answers in its own version; a rank that outlives an upgrade logs why its holder refuses it."""
    with ProcessCluster(tmp_path / "cluster", HOST) as cluster:
        link = HolderLink(cluster.arena("h0"), nonce="old")
        try:
            assert link.call(AskStatus(), timeout_s=20.0).hosts
            with connect_unix(cluster.arena("h0") / "holder.sock", timeout_s=20.0) as channel:
                monkeypatch.setattr(frame, "VERSION", frame.VERSION + 1)
                channel.send(Kind.EVENT, 0, ToolHello(nonce="new", life=0, pid=0), deadline_s=20.0)
                monkeypatch.undo()
                assert channel.recv(timeout_s=20.0).kind is Kind.BYE  # in the holder's version
            monkeypatch.setattr(frame, "VERSION", frame.VERSION + 1)
            with caplog.at_level(logging.WARNING, "memstore"):
                cluster.kill_holder("h0")
                cluster.start_holder("h0")
                words = f"the peer speaks wire version {FORMATS['wire']}, this process {FORMATS['wire'] + 1}"
                wait_for(lambda: words in caplog.text, "the reason")
        finally:
            monkeypatch.undo()
            link.close()

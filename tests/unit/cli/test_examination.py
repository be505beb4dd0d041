"""What an examiner sees of its own host, and of a neighbour, with real sockets, files and file systems."""

from __future__ import annotations

import contextlib
import os
import pwd
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memstore.config import MIB, Config
from memstore.core.report.findings import ClusterFacts, HostFacts, findings
from memstore.errors import ConfigError
from memstore.shell.arena.folder import make_folder
from memstore.shell.arena.lock import ArenaLock
from memstore.shell.durable.directory import DirectoryFiles
from memstore.shell.on_ray import examination
from memstore.shell.on_ray.examination import Examiner, file_system, idle_timeout_s, is_ipc_removed, tmpfiles_lines
from memstore.testing.clusters.scratch import scratch_folder, scratch_store_name
from memstore.testing.faults.mounts import mount_problem, mount_tmpfs, unmount

TOKEN = bytes(16)


def examiner(host: str = "h1", token: bytes = TOKEN, **fields: Any) -> Examiner:
    """Return an examiner as Ray would start it on a host of this machine."""
    config = Config(**{"store": scratch_store_name("d"), "interface": "127.0.0.1", **fields})
    return Examiner(config.start_fields(), {"host": host, "rack": "r1"}, 1, 0, token)


def found(each: Examiner) -> dict[str, str]:
    """Return what is wrong with the host, as subject -> sentence."""
    known = HostFacts.__dataclass_fields__
    seen = HostFacts(node="n1", **{name: value for name, value in each.look().items() if name in known})
    rows = findings(ClusterFacts(hosts=[seen], config=each.config.with_fields({"replicas": 1})))
    return {row.subject: row.what for row in rows if row.level == "FAIL"}


@contextlib.contextmanager
def taken_port() -> Iterator[int]:
    """Give a port on which a stranger listens."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        yield stranger.getsockname()[1]


def test_a_host_sees_itself() -> None:
    """All that this machine shows, and nothing that fails here."""
    each = examiner(arena_bytes=64 * MIB)
    seen = each.look()
    assert (seen["host"], seen["labels"]["rack"]) == ("h1", "r1")
    assert seen["versions"]["python"] == f"{sys.version_info.major}.{sys.version_info.minor}"
    assert (seen["arena_fs"], seen["arena_limit_bytes"]) == ("tmpfs", 64 * MIB)
    assert 0 < seen["available_bytes"] <= seen["memory_bytes"]
    assert found(each) == {}


def test_a_strangers_port_is_a_fault_and_the_own_holders_is_none() -> None:
    """The lock of the arena's folder tells which: its holder has written where it listens."""
    with taken_port() as port, scratch_folder() as folder:
        store = folder.parent.name
        assert f"port {port} of 127.0.0.1 cannot be had" in found(examiner(port=port, store=store))["port"]
        lock = ArenaLock.take(folder, timeout_s=1.0, address=f"127.0.0.1:{port}")
        try:
            assert "port" not in found(examiner(port=port, store=store))
        finally:
            lock.release()


def test_what_is_configured_and_absent_is_found(tmp_path: Path) -> None:
    assert "matches no address" in found(examiner(interface="nosuch0"))["interface"]
    assert str(tmp_path) in found(examiner(tls_dir=str(tmp_path)))["TLS"]
    assert "cannot be used" in found(examiner(arena_dir=str(tmp_path / "absent")))["arena memory"]
    assert "can ever be had here" in found(examiner(arena_bytes="900TiB"))["arena memory"]


def test_an_arena_folder_that_is_open_to_others_is_found(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, store="open", host="h1")
    folder.chmod(0o755)
    assert "open to others" in found(examiner(arena_dir=str(tmp_path), store="open"))["arena memory"]


@pytest.mark.root
@pytest.mark.skipif(mount_problem() is not None, reason=mount_problem() or "")
def test_a_small_tmpfs_is_found(tmp_path: Path) -> None:
    """As a container's /dev/shm of 64 MB."""
    mount_tmpfs(tmp_path, 64 * MIB)
    try:
        assert "64.0 MiB" in found(examiner(arena_dir=str(tmp_path)))["arena_dir"]
        assert file_system(str(tmp_path)) == "tmpfs"
        assert file_system("/proc/self") == "proc"
    finally:
        unmount(tmp_path)


# -- neighbours ---------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send less than a real examination: what comes is the same."""
    monkeypatch.setattr(examination, "LINK_S", 0.05)


def test_neighbours_measure_both_ways() -> None:
    one, other = examiner("h1"), examiner("h2")
    other.look()
    with contextlib.closing(other):
        [(there, back, problem)] = one.measure(other.listen())
    assert problem == ""
    assert there is not None
    assert back is not None
    assert there > 0 < back


def test_a_neighbour_that_cannot_be_reached_is_told_with_its_address() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and does not listen
        port = closed.getsockname()[1]
        [(there, back, problem)] = examiner().measure([("127.0.0.1", port)])
    assert (there, back) == (None, None)
    assert problem.startswith(f"127.0.0.1 port {port}: ")


def test_a_stranger_gets_nothing_from_an_examiner() -> None:
    """Who does not know the token of this examination is hung up on, and the next one is served."""
    one = examiner()
    one.look()
    with contextlib.closing(one):
        ends = one.listen()
        [(there, _, problem)] = examiner(token=b"x" * 16).measure(ends)
        assert (there, bool(problem)) == (None, True)
        assert examiner().measure(ends)[0][2] == ""


def test_the_configured_port_is_the_one_that_is_tried() -> None:
    """A firewall opens that one alone."""
    with taken_port() as port:
        pass
    one = examiner(port=port)
    one.look()
    with contextlib.closing(one):
        assert one.listen() == [("127.0.0.1", port)]


# -- storage ------------------------------------------------------------------------------------------


def test_hosts_of_one_storage_see_one_anothers_files(tmp_path: Path) -> None:
    """And leave nothing there."""
    one, other, url = examiner("h1"), examiner("h2"), f"file://{tmp_path}"
    one.probe(url, "a", True)
    other.probe(url, "b", True)
    assert one.probes(url) == other.probes(url) == {"a", "b"}
    one.probe(url, "a", False)
    other.probe(url, "b", False)
    assert os.listdir(tmp_path) == []


def test_a_probe_of_a_place_that_is_no_folder_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot be written on this host"):
        DirectoryFiles(tmp_path / "file" / "ckpt").probe()


# -- the machine's settings ---------------------------------------------------------------------------


def planted(root: Path, path: str = "run/systemd/system/x", text: str = "") -> Path:
    """Write a file below a root; without one such as systemd has where it runs."""
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text, encoding="utf-8")
    return root


def test_remove_ipc_is_read_as_systemd_reads_it(tmp_path: Path) -> None:
    """Yes unless somebody said no; a drop-in has the last word; a user that lingers keeps its files."""
    user, uid = pwd.getpwuid(os.getuid()).pw_name, os.getuid()
    assert is_ipc_removed(tmp_path, uid) is None, "systemd does not run"
    assert is_ipc_removed(planted(tmp_path), uid) is True
    assert is_ipc_removed(planted(tmp_path, "etc/systemd/logind.conf", "[Login]\n#RemoveIPC=no\n"), uid) is True
    assert is_ipc_removed(planted(tmp_path, "etc/systemd/logind.conf", "[Login]\nRemoveIPC=no\n"), uid) is False
    assert is_ipc_removed(planted(tmp_path, "run/systemd/logind.conf.d/a.conf", "RemoveIPC = yes"), uid) is True
    assert is_ipc_removed(planted(tmp_path, f"var/lib/systemd/linger/{user}"), uid) is False


def test_a_file_of_etc_takes_the_place_of_its_namesake(tmp_path: Path) -> None:
    """So tmp.conf of a distribution is switched off by an empty one."""
    planted(tmp_path, "usr/lib/tmpfiles.d/tmp.conf", "q /tmp 1777 root root 10d\n")
    assert tmpfiles_lines(tmp_path) == [], "systemd does not run"
    assert tmpfiles_lines(planted(tmp_path)) == ["q /tmp 1777 root root 10d"]
    assert tmpfiles_lines(planted(tmp_path, "etc/tmpfiles.d/tmp.conf")) == []


def test_the_autoscalers_idle_time_is_read_from_its_cluster_file(tmp_path: Path) -> None:
    """That of the process that runs; a monitor without a cluster file ends no host."""
    planted(tmp_path, "proc/1/cmdline", "python\0/ray/autoscaler/_private/monitor.py\0--logs-dir=/tmp")
    assert idle_timeout_s(tmp_path / "proc") is None
    file = (
        planted(tmp_path, "cluster.yaml", "max_workers: 2\nidle_timeout_minutes: 5 # as by default\n") / "cluster.yaml"
    )
    planted(tmp_path, "proc/2/cmdline", f"python\0/ray/autoscaler/v2/monitor.py\0--autoscaling-config={file}")
    assert idle_timeout_s(tmp_path / "proc") == 300.0

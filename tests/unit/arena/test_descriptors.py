"""A holder that runs out of file descriptors says so while it lasts, and serves again as soon as there are some."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from memstore.client.connect import connect
from memstore.config import check_name
from memstore.core.report.problems import DEGRADED
from memstore.errors import ConfigError
from memstore.shell import identity as host_id_module
from memstore.shell.identity import (
    HostIdentity,
    current_node_labels,
    holder_hosts,
    host_identity,
    local_identity,
    rank_host,
    read_boot_id,
)
from memstore.testing.clusters.processes import ProcessCluster, wait_for

WAIT_S = 60.0
SPARE = 30  # enough for a rank, its copies and its host's peers


def short_rows(cluster: ProcessCluster) -> list[dict[str, Any]]:
    return [row for row in cluster.status()["problems"] if row["kind"] == "descriptors"]


def lowest_free(pid: int) -> int:
    """Return the number that the next descriptor of a process has: with this limit it opens none.

    What it opens for a moment, such as a file of /proc, is not seen by all of these looks.
    """
    taken = set.intersection(*({int(each.name) for each in Path(f"/proc/{pid}/fd").iterdir()} for _ in range(50)))
    return next(number for number in range(1 << 20) if number not in taken)


def processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


@pytest.mark.parametrize("way", ["others leave", "the printed remedy"])
def test_a_holder_without_descriptors_is_a_problem_that_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Ranks wait while it is full, at no cost to it, and connect once it is not; the remedy works on it as it runs."""
    monkeypatch.setenv("MEMSTORE_HOST", "h1")
    with ProcessCluster(tmp_path, {"h1": {}, "h2": {}}) as cluster, ThreadPoolExecutor(1) as pool:
        holder = cluster.holders["h1"]
        assert not short_rows(cluster)
        hard = resource.prlimit(holder.pid, resource.RLIMIT_NOFILE)[1]
        limit = len(list(Path(f"/proc/{holder.pid}/fd").iterdir())) + SPARE
        resource.prlimit(holder.pid, resource.RLIMIT_NOFILE, (limit, hard))
        idle = []
        for _ in range(2 * SPARE):  # more than it can accept
            idle.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            idle[-1].connect(str(cluster.arena("h1") / "holder.sock"))
        (row,) = wait_for(lambda: short_rows(cluster), "the problem", WAIT_S)
        assert (row["severity"], row["about"]) == (DEGRADED, "h1")
        assert f" of {limit} file descriptors" in row["cause"]
        before_s = processor_s(holder.pid)
        later = pool.submit(connect, "later", rank=0, world_size=1, config=cluster.config)
        with pytest.raises(FutureTimeout):
            later.result(2.0)
        assert processor_s(holder.pid) - before_s < 1.0
        if way == "others leave":
            for one in idle:
                one.close()
        else:
            subprocess.run(row["remedy"].split("`")[1].split(), check=True)
        with later.result(WAIT_S) as store:
            wait_for(lambda: not short_rows(cluster), "no problem any more", WAIT_S)
            state = {"a": torch.ones(4)}
            store.put(1, state).wait("committed", WAIT_S)
            with connect("first", rank=0, world_size=1, config=cluster.config) as other:
                resource.prlimit(holder.pid, resource.RLIMIT_NOFILE, (lowest_free(holder.pid), hard))
                put = pool.submit(other.put, 1, state)
                with pytest.raises(FutureTimeout):  # a first put waits for them, and is not said to be too large
                    put.result(2.0)
                resource.prlimit(holder.pid, resource.RLIMIT_NOFILE, (hard, hard))
                put.result(WAIT_S).wait("committed", WAIT_S)
        assert holder.poll() is None
        for one in idle:
            one.close()


# -- test host id -------------------------------------------------------------------------------------
# Host ids from labels, variables and machines, and how a rank finds its holder (R1, R4).


BOOT = "0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0"


@pytest.fixture
def listen(tmp_path: Path) -> Iterator[object]:
    """Return a function that opens a listening Unix socket in a host folder; all are closed at the end."""
    with ExitStack() as stack:

        def start(host: str, *, backlog: int = 8) -> socket.socket:
            folder = tmp_path / host
            folder.mkdir()
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            listener.bind(str(folder / "holder.sock"))
            listener.listen(backlog)
            return listener

        yield start


def test_label_beats_variable_beats_machine() -> None:
    """The order of R1: node label, MEMSTORE_HOST, hostname with boot id; only the label is explicit."""
    labels, env = {"host": "h1", "rack": "r1"}, {"MEMSTORE_HOST": "named"}
    assert host_identity(labels, env, hostname="box", boot_id=BOOT) == HostIdentity("h1", BOOT, True, labels)
    assert host_identity({"rack": "r1"}, env, hostname="box", boot_id=BOOT) == HostIdentity(
        "named", BOOT, False, {"rack": "r1"}
    )
    assert host_identity({}, {}, hostname="box", boot_id=BOOT).host_id == "box-0f1e2d3c"


def test_reboot_changes_the_id_of_an_unnamed_host_only() -> None:
    """Memory does not survive a reboot, so the default id does not either; a given name does."""
    other = "ffffffff" + BOOT[8:]
    assert host_identity({}, {}, hostname="box", boot_id=BOOT) != host_identity({}, {}, hostname="box", boot_id=other)
    named = [host_identity({"host": "h1"}, {}, hostname="box", boot_id=boot).host_id for boot in (BOOT, other)]
    assert named == ["h1", "h1"]


@pytest.mark.parametrize(
    "hostname", ["a" * 64, "trainer-" + "x" * 50 + "-worker-1", "_odd name/..", "", ".hidden", "ü"]
)
def test_any_hostname_gives_a_legal_name(hostname: str) -> None:
    """Long and odd hostnames still name a folder."""
    check_name("host", host_identity({}, {}, hostname=hostname, boot_id=BOOT).host_id)


def test_long_hostnames_that_differ_at_the_end_stay_distinct() -> None:
    """Pods on one machine share the boot id and differ only in the tail of a long name."""
    ids = {host_identity({}, {}, hostname=f"{'p' * 60}{n}", boot_id=BOOT).host_id for n in range(3)}
    ids |= {host_identity({}, {}, hostname=name, boot_id=BOOT).host_id for name in ("a b", "a_b/", "a-b")}
    assert len(ids) == 6


@pytest.mark.parametrize("name", ["../up", "a/b", ".x", "a" * 65, "a b"])
def test_a_name_that_is_no_folder_is_refused(name: str) -> None:
    """A label or variable that could leave the arena folder is refused, and the message says which it was."""
    with pytest.raises(ConfigError, match="node label host"):
        host_identity({"host": name}, {}, hostname="box", boot_id=BOOT)
    with pytest.raises(ConfigError, match="MEMSTORE_HOST"):
        host_identity({}, {"MEMSTORE_HOST": name}, hostname="box", boot_id=BOOT)
    with pytest.raises(ConfigError, match="MEMSTORE_HOST"):
        rank_host({"MEMSTORE_HOST": name}, "unused", None)


def test_boot_id_is_the_kernels(tmp_path: Path) -> None:
    """The boot id is read from /proc, and a missing or strange one is refused with its path."""
    assert read_boot_id() == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with pytest.raises(ConfigError, match="nowhere"):
        read_boot_id(str(tmp_path / "nowhere"))
    (tmp_path / "odd").write_text("no such thing\n")
    with pytest.raises(ConfigError, match="'no such thing'"):
        read_boot_id(str(tmp_path / "odd"))


def test_local_identity_is_this_machine() -> None:
    """Without labels or variable the identity is made of the hostname and boot id of this machine."""
    found = local_identity({}, {})
    assert found == host_identity({}, {}, hostname=socket.gethostname(), boot_id=read_boot_id())


def test_rank_follows_variable_then_ray_node(tmp_path: Path) -> None:
    """R4: MEMSTORE_HOST wins over the Ray node; an unlabelled Ray node is the machine."""
    assert rank_host({"MEMSTORE_HOST": "h9"}, tmp_path, {"host": "h1"}) == "h9"
    assert rank_host({}, tmp_path, {"host": "h1"}) == "h1"
    assert rank_host({}, tmp_path, {}) == local_identity({}, {}).host_id


def test_rank_outside_of_ray_takes_the_only_holder(tmp_path: Path, listen: object) -> None:
    """One answering holder is taken, also beside dead folders."""
    listen("h1")  # type: ignore[operator]
    (tmp_path / "dead").mkdir()
    socket_file = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    socket_file.bind(str(tmp_path / "dead" / "holder.sock"))
    socket_file.close()  # the file stays behind, as after a kill
    (tmp_path / "note.txt").write_text("not a host")
    assert holder_hosts(tmp_path) == {"dead": False, "h1": True}
    assert rank_host({}, tmp_path, None) == "h1"


def test_rank_takes_the_only_folder_while_its_holder_is_replaced(tmp_path: Path) -> None:
    """With one folder and no process that answers, the rank still knows which holder to wait for."""
    (tmp_path / "h1").mkdir()
    assert rank_host({}, tmp_path, None) == "h1"


def test_several_holders_are_listed(tmp_path: Path, listen: object) -> None:
    """With two holders on one machine the rank needs the host's name; the error lists both and names the variable."""
    listen("h2")  # type: ignore[operator]
    listen("h1")  # type: ignore[operator]
    with pytest.raises(ConfigError, match=r"2 holders on this machine \(h1, h2\).*MEMSTORE_HOST") as caught:
        rank_host({}, tmp_path, None)
    assert caught.value.hosts == ["h1", "h2"]  # type: ignore[attr-defined]


def test_no_holder_says_how_to_start_one(tmp_path: Path) -> None:
    """A machine without a store is refused with the command that starts one."""
    with pytest.raises(ConfigError, match="memstore up"):
        rank_host({}, tmp_path / "absent", None)


def test_a_holder_whose_backlog_is_full_still_counts(tmp_path: Path, listen: object) -> None:
    """A frozen holder is there: its full backlog must not make the rank pick a dead neighbour."""
    listen("h1", backlog=0)  # type: ignore[operator]
    with ExitStack() as stack:
        for _ in range(4):
            client = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            client.setblocking(False)
            client.connect_ex(str(tmp_path / "h1" / "holder.sock"))
        assert holder_hosts(tmp_path) == {"h1": True}


def test_a_path_longer_than_a_socket_address_is_probed(tmp_path: Path) -> None:
    """A store in a deep folder is found although its socket's path exceeds 107 bytes."""
    root = tmp_path / ("d" * 120)
    (root / "h1").mkdir(parents=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        short = tmp_path / "s"
        listener.bind(str(short))
        listener.listen(1)
        short.rename(root / "h1" / "holder.sock")
        assert holder_hosts(root) == {"h1": True}


def test_node_labels_are_none_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that never imported Ray is not on a Ray node, and importing this module does not change that."""
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    assert current_node_labels() is None
    assert "ray" not in vars(host_id_module)

"""The worker's container of the manifests, run here: killed, started again, replaced by a pod without its memory."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from manifests import composed
from pods import Pod, available, holder_command, train
from repository import SUPPORT

from memstore.config import Config
from memstore.testing.clusters.process_main import DirectoryMembership
from memstore.testing.clusters.processes import kill, wait_for
from memstore.testing.clusters.scratch import scratch_store_name

PROBLEM = available()
pytestmark = [
    pytest.mark.root,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM)),
]
RACKS = {"h1": "r1", "h2": "r2", "h3": "r1"}
LAST = 4


class Pods:
    """Workers' pods by host, and a controller."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        cluster = next(each for each in composed(()) if each["kind"] == "RayCluster")
        self.spec: dict[str, Any] = cluster["spec"]["workerGroupSpecs"][0]["template"]["spec"]
        self.folder, self.stack, self.secret = folder, stack, secrets.token_bytes(32)
        self.store = scratch_store_name()
        [arena_dir] = [e["value"] for e in self.spec["containers"][0]["env"] if e["name"] == "MEMSTORE_ARENA_DIR"]
        self.config = Config(store=self.store, arena_dir=arena_dir, interface="127.0.0.1", detect=2.0)
        self.members = folder / "members"
        DirectoryMembership(self.members)
        for each in (self.members, *self.members.iterdir()):
            os.chown(each, int(self.spec["securityContext"]["runAsUser"]), -1)
        self.pods: dict[str, Pod] = {}
        self._start_controller()

    def _start_controller(self) -> None:
        spec = {"role": "controller", "parent": os.getpid(), "membership": str(self.members), "settle_s": 5.0}
        spec |= {"secret": self.secret.hex(), "config": self.config.start_fields()}
        log = self.stack.enter_context((self.folder / "controller.log").open("ab"))
        argv = [sys.executable, "-m", "memstore.testing.clusters.process_main"]
        process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=log, stderr=log)
        self.stack.callback(kill, process)
        assert process.stdin
        with process.stdin as pipe:
            pipe.write(json.dumps(spec).encode())

    def add(self, host: str) -> Pod:
        """Make a host's pod with empty volumes, and start its container."""
        self.pods[host] = self.stack.enter_context(Pod(host, self.spec, self.folder / host, self.members))
        self.start(host)
        return self.pods[host]

    def start(self, host: str) -> None:
        """Start the container of a pod."""
        self.pods[host].start(
            *holder_command(self.pods[host], self.config.start_fields(), self.secret, self.labels(host))
        )

    def labels(self, host: str) -> dict[str, str]:
        """Return the labels that the init container would have written."""
        return {"zone": "z1", "rack": RACKS[host]}

    def status(self, host: str) -> dict[str, Any]:
        """Return what `memstore status` prints in a container."""
        said = self.pods[host].popen([sys.executable, "-m", "memstore.cli", "status", "--json", "--store", self.store])
        out, _ = said.communicate(timeout=120)
        return dict(json.loads(out)) if out else {}

    def wait_live(self, *hosts: str) -> dict[str, dict[str, Any]]:
        """Return the rows of hosts once they are live, as a container asks."""

        def rows() -> dict[str, dict[str, Any]]:
            found = {row["host"]: row for row in self.status(hosts[0]).get("hosts", [])}
            are_live = all(host in found and found[host]["status"] == "live" for host in hosts)
            return found if are_live else {}

        return dict(wait_for(rows, f"live hosts {hosts}", seen=self.pods[hosts[0]].log))

    def train(self, first: int, last: int, *hosts: str) -> list[dict[str, Any]]:
        """Run the steps on these hosts, as `pods.train`."""
        return train([self.pods[host] for host in hosts], self.store, first, last)


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    """Two workers in two racks."""
    with ExitStack() as stack:
        made = Pods(tmp_path, stack)
        for host in ("h1", "h2"):
            made.add(host)
        made.wait_live("h1", "h2")
        yield made


def test_steps_outlive_a_container_with_its_pod_and_a_pod_with_its_peers(pods: Pods) -> None:
    """A container that is killed adopts what the pod's volume kept; a new pod gets it from the other rack."""
    h1 = pods.pods["h1"]
    for path in ("/etc/x", "/x", str(SUPPORT / "x")):
        with pytest.raises(AssertionError, match="Read-only file system"):
            h1.run("touch", path)
    assert h1.run("id", "-u").strip() == str(h1.user) != "0"
    assert "64M" in h1.run("df", "-h", "/dev/shm")
    [first, _] = pods.train(0, LAST, "h1", "h2")
    assert first["step"] is None

    h1.kill()  # the container, its ranks with it
    pods.pods["h2"].kill_ranks()
    pods.start("h1")
    pods.wait_live("h1", "h2")
    limit, held, elsewhere = map(int, h1.run(sys.executable, "-c", MEASURE, pods.store).split())
    assert limit == h1.limit_bytes
    assert elsewhere > held // 2 > 0, "pages that the first container wrote are not counted"
    again = pods.train(LAST + 1, LAST + 2, "h1", "h2")
    assert again == [{"step": LAST, "is_whole": True, "source": "local"}] * 2

    h1.kill()
    pods.pods["h2"].kill_ranks()
    pods.add("h3")  # another pod takes the place, its volume empty: repair fills it, or the get asks the peer
    pods.wait_live("h2", "h3")
    restored = pods.train(LAST + 3, LAST + 3, "h3", "h2")
    assert all(each["is_whole"] and each["step"] == LAST + 2 for each in restored)


MEASURE = """
import os, sys
from memstore.shell.arena.folder import arena_folder
from memstore.shell.arena.memory_limits import measure
where = os.environ["MEMSTORE_ARENA_DIR"]
found = measure(where, folder=arena_folder(where, store=sys.argv[1], host=os.environ["MEMSTORE_HOST"]))
counted = measure(where)  # what the cgroup itself says
print(found.cgroup_limit_bytes, found.held_bytes, found.cgroup_used_bytes - counted.cgroup_used_bytes)
"""

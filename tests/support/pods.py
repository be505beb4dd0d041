"""Pods on this machine: the containers of deploy/kubernetes in namespaces and cgroups, with volumes that outlive them.

A container has what the manifest's has: its user and no capability, a read-only root, the pod's volumes and nothing
else to write to, a memory limit, process ids of its own. /dev/shm is 64 MB, as where no larger one is mounted. The
root is this machine's, seen through an overlay. The network is this machine's too, unless one is given. Needs root.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from repository import ROOT, SUPPORT

from memstore.testing.clusters.processes import wait_for

CGROUPS = Path("/sys/fs/cgroup")
COMMAND_S = 120.0
UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}
_ENTER = """
echo 0 > "$CGROUP/cgroup.procs"
exec $NETWORK unshare --mount --pid --cgroup --fork --kill-child bash -euc "$INSIDE" bash "$@"
"""
_INSIDE = """
mount --make-rprivate /
mount -t tmpfs layer "$LAYER"; mkdir "$LAYER/up" "$LAYER/work" "$LAYER/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$LAYER/up,workdir=$LAYER/work" "$LAYER/root"
cd "$LAYER/root"
mkdir -p arena members; chmod 755 root
mount -t proc proc proc; mount --bind /dev dev; mount -t tmpfs -o size=64m,mode=1777 shm dev/shm
mount -t tmpfs cgroups sys; mkdir -p "./$CGROUP_AT"; mount --bind "$CGROUP" "./$CGROUP_AT"
mount --bind "$VOLUMES/arena" arena; mount --bind "$VOLUMES/tmp" tmp; mount --bind "$MEMBERS" members
mount -o remount,ro "$LAYER/root"
exec chroot . env -u CGROUP -u INSIDE setpriv --reuid "$USER_ID" --regid "$USER_ID" --clear-groups --no-new-privs \
  --bounding-set=-all --inh-caps=-all bash -c 'cd /tmp; exec "$@"' bash "$@"
"""


def available() -> str | None:
    """Say why no pod can run here, or None."""
    if os.geteuid() != 0:
        return "pods need root"
    missing = [tool for tool in ("unshare", "nsenter", "setpriv", "chroot", "mount") if shutil.which(tool) is None]
    if missing:
        return f"pods need the tools {', '.join(missing)}"
    if _memory_cgroups() is None:
        return "pods need a memory cgroup that this process may make"
    probe = "mount --make-rprivate / && mount -t tmpfs x /mnt && mkdir /mnt/u /mnt/w /mnt/r && mount -t overlay x -o "
    probe += "lowerdir=/,upperdir=/mnt/u,workdir=/mnt/w /mnt/r"
    done = subprocess.run(["unshare", "--mount", "--pid", "--cgroup", "--fork", "bash", "-c", probe], check=False)
    return "namespaces or overlays do not work here" if done.returncode else None


def _memory_cgroups() -> tuple[Path, str, str] | None:
    """Return where memory cgroups are made, the name of the limit's file, and where a container sees its own."""
    version_2 = CGROUPS / "cgroup.subtree_control"
    with contextlib.suppress(OSError):
        if (CGROUPS / "memory" / "memory.limit_in_bytes").exists():
            return CGROUPS / "memory", "memory.limit_in_bytes", "sys/fs/cgroup/memory"
        if "memory" in version_2.read_text().split():
            return CGROUPS, "memory.max", "sys/fs/cgroup"
    return None


def nbytes(quantity: str) -> int:
    """Return the bytes of a quantity such as 9Gi."""
    return int(quantity[:-2]) * UNITS[quantity[-2:]]


class Pod:
    """One pod: its volumes, and the container that runs in it now. A context manager that leaves nothing behind."""

    def __init__(self, name: str, spec: Mapping[str, Any], folder: Path, members: Path, *, network: str = "") -> None:
        """Prepare a pod of the specification `spec`, with its volumes in `folder`.

        `members` is a folder that all pods share; `network` is the path of the pod's network namespace, "" for ours.
        """
        [container] = spec["containers"]
        self.name, self.folder, self.members, self.network = name, folder, members, network
        self.user = int(spec["securityContext"]["runAsUser"])
        self.limit_bytes = nbytes(container["resources"]["limits"]["memory"])
        sources = {"metadata.name": name}
        self.environ = {
            each["name"]: each.get("value") or sources[each["valueFrom"]["fieldRef"]["fieldPath"]]
            for each in container["env"]
        }
        [arena] = [each for each in spec["volumes"] if each["name"] == "arena"]
        self.size_bytes = nbytes(arena["emptyDir"]["sizeLimit"])
        [prepare] = [each for each in spec["initContainers"] if each["name"] == "prepare"]
        self.prepare = prepare["args"][0].split(" && ")[0]  # the folder; the labels are asked of an API server
        self.starts, self.container, self.cgroup = 0, None, Path()
        self._running: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> Pod:
        """Mount the volumes as the kubelet does: open to all, of the pod's group; run the init container's command."""
        for volume in ("arena", "tmp", "layer"):
            (self.folder / volume).mkdir(parents=True)
        options = f"size={self.size_bytes},mode=2777,gid={self.user}"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "pod", str(self.folder / "arena")], check=True)
        (self.folder / "tmp").chmod(0o777)
        self.start(["bash", "-ec", self.prepare])
        assert self.container
        if self.container.wait(timeout=COMMAND_S) != 0:
            raise AssertionError(f"the init container of {self.name} failed: {self.log()}")
        self.kill()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.kill_ranks()
        subprocess.run(["umount", str(self.folder / "arena")], check=True)
        self.cgroup.parent.rmdir()

    def start(self, argv: Sequence[str], stdin: str = "") -> None:
        """Start the container with this command, in a new cgroup of the pod's, as the kubelet does."""
        found = _memory_cgroups()
        assert found
        where, limit_name, seen_at = found
        pod_cgroup = where / f"memstore-pod-{os.getpid()}-{self.name}"
        self.starts += 1
        self.cgroup = pod_cgroup / f"container-{self.starts}"
        self.cgroup.mkdir(parents=True)
        if where == CGROUPS:
            (pod_cgroup / "cgroup.subtree_control").write_text("+memory")
        for folder in (pod_cgroup, self.cgroup):
            (folder / limit_name).write_text(str(self.limit_bytes))
        around = {
            "CGROUP": str(self.cgroup),
            "CGROUP_AT": seen_at,
            "INSIDE": _INSIDE,
            "LAYER": str(self.folder / "layer"),
            "VOLUMES": str(self.folder),
            "MEMBERS": str(self.members),
            "USER_ID": str(self.user),
            "NETWORK": f"nsenter --net={self.network}" if self.network else "",
        }
        with (self.folder / "log").open("ab") as log:
            self.container = subprocess.Popen(
                ["bash", "-euc", _ENTER, "bash", *argv],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**self.environment(), **around},
                start_new_session=True,
            )
        assert self.container.stdin
        with self.container.stdin as pipe:
            pipe.write(stdin.encode())

    def environment(self) -> dict[str, str]:
        """Return the variables of a process in the container: the manifest's, the image's, and where Python is."""
        kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
        return {**kept, **self.environ, "HOME": "/tmp", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def first_pid(self) -> int:
        """Return the container's first process, as this machine counts."""

        def find() -> int:
            assert self.container
            children = Path(f"/proc/{self.container.pid}/task/{self.container.pid}/children").read_text().split()
            is_inside = children and Path(f"/proc/{children[0]}/root/members").is_dir()  # its root is the container's
            return int(children[0]) if is_inside else 0

        return int(wait_for(find, f"the first process of {self.name}", seen=self.log))

    def popen(self, argv: Sequence[str]) -> subprocess.Popen[str]:
        """Start another process in the container, as `kubectl exec` does."""
        pid = self.first_pid()
        enter = (
            f'echo 0 > "{self.cgroup}/cgroup.procs"; exec nsenter --target {pid} --mount --pid --cgroup --net --root '
        )
        enter += f"setpriv --reuid {self.user} --regid {self.user} --clear-groups --no-new-privs --bounding-set=-all "
        enter += 'bash -c \'cd /tmp; exec "$@"\' bash "$@"'  # nsenter's own folder is not in the container
        process = subprocess.Popen(
            ["bash", "-euc", enter, "bash", *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment(),
        )
        self._running.append(process)
        return process

    def run(self, *argv: str) -> str:
        """Run a command in the container; return what it prints, AssertionError with its words if it fails."""
        process = self.popen(argv)
        out, err = process.communicate(timeout=COMMAND_S)
        if process.returncode:
            raise AssertionError(f"{argv} in {self.name} ended with {process.returncode}: {err}{out}{self.log()}")
        return out

    def kill_ranks(self) -> None:
        """Kill what `popen` started and still runs; the container's own process stays."""
        for each in self._running:
            each.kill()  # nsenter: its child reads the end of its input, and ends
            each.communicate(timeout=COMMAND_S)
        self._running.clear()

    def kill(self) -> None:
        """Kill every process of the container, as the kernel does for memory; return when none is left."""
        if self.container is None:
            return
        wait_for(self._is_killed, f"the end of every process of {self.name}", COMMAND_S)
        self.container.kill()
        self.container.wait(timeout=COMMAND_S)
        self.container = None
        wait_for(lambda: _removed(self.cgroup), f"the end of the container's cgroup {self.cgroup}")

    def _is_killed(self) -> bool:
        """Kill every process that is in the container now; return whether there was none."""
        pids = (self.cgroup / "cgroup.procs").read_text().split()
        for pid in map(int, pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not pids

    def log(self) -> str:
        """Return the end of what the containers printed."""
        return (self.folder / "log").read_text()[-4000:]


def _removed(cgroup: Path) -> bool:
    with contextlib.suppress(OSError):
        cgroup.rmdir()
    return not cgroup.exists()


def train(pods: Sequence[Pod], store: str, first: int, last: int) -> list[dict[str, Any]]:
    """Start a rank in each container, let them put steps, and return what each got first; they stay alive."""
    program, size = str(SUPPORT / "pod_rank.py"), len(pods)
    ranks = [
        pod.popen([sys.executable, program, store, *map(str, (rank, size, first, last))])
        for rank, pod in enumerate(pods)
    ]
    got = []
    for rank in ranks:
        if rank.stdout is None or rank.stderr is None:
            raise AssertionError("a rank has no pipes")
        lines = [rank.stdout.readline(), rank.stdout.readline()]
        if not all(lines) or json.loads(lines[1]) != {"committed": last}:
            raise AssertionError(f"a rank ended: {lines} {rank.stderr.read()}")
        got.append(json.loads(lines[0]))
    return got


def holder_command(
    pod: Pod, config: Mapping[str, Any], secret: bytes, labels: Mapping[str, str]
) -> tuple[list[str], str]:
    """Return the command and the input of a holder without Ray, for `Pod.start`."""
    spec = {
        "role": "holder",
        "parent": 0,  # it is the container's first process
        "membership": "/members",
        "secret": secret.hex(),
        "config": dict(config),
        "host": pod.name,
        "labels": dict(labels),
        "peer_address": None,
        "hosts_on_machine": 1,
        "durable_gate": "",
    }
    return [sys.executable, "-m", "memstore.testing.clusters.process_main"], json.dumps(spec)

"""Ray in the containers of the manifests, with the command that KubeRay makes of them: up, steps, a killed container.

Each pod has a network namespace of its own, as in Kubernetes, so that all have the same ports.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from manifests import composed
from pods import Pod, available, train

from memstore.testing.clusters import namespaces
from memstore.testing.clusters.namespaces import NamespaceRig
from memstore.testing.clusters.processes import wait_for

PROBLEM = available() or namespaces.available()
pytestmark = [
    pytest.mark.root,
    pytest.mark.ray,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM)),
]
LAST = 3
HEALTH = """
import sys, urllib.request
urllib.request.urlopen(sys.argv[1], timeout=5)
"""


class RayPod(Pod):
    """A pod in which Ray runs: of which group of the RayCluster, at which address, started how."""

    group: Mapping[str, Any]
    address = options = ""

    def environment(self) -> dict[str, str]:
        """Return the variables of the image: its programs are on the path, and Ray asks for no token here."""
        found = super().environment()
        path = f"{Path(sys.executable).parent}:{found['PATH']}"
        return {**found, "PATH": path, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}

    def run_ray(self) -> None:
        """Start the container as KubeRay does, and as the kubelet again if it ends; return once its probe succeeds."""
        given = " ".join(f"--{name}={value}" for name, value in self.group["rayStartParams"].items())
        labels = ",".join(f"{name}={value}" for name, value in self.group.get("labels", {}).items())
        given += f" --labels={labels}" if labels else ""
        line = f"export PATH={self.environment()['PATH']}; ulimit -n 4096; ray start {self.options} {given} "
        command = ["bash", "-lc", f"{line} --dashboard-agent-listen-port=52365 --metrics-export-port=8080 --block"]
        self.start(command)

        def is_ready() -> bool:
            assert self.container
            if self.container.poll() is not None:  # as on a machine so busy that Ray's own limits pass
                self.kill()
                self.start(command)
            probe = self.group["template"]["spec"]["containers"][0]["readinessProbe"]["httpGet"]
            url = f"http://{self.address}:{probe['port']}{probe['path']}"
            done = subprocess.run(
                ["nsenter", f"--net={self.network}", sys.executable, "-c", HEALTH, url],
                capture_output=True,
                check=False,
            )
            return done.returncode == 0

        wait_for(is_ready, f"Ray in {self.name}", timeout_s=400.0, seen=self.log)


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[dict[str, RayPod]]:
    """A head and two workers in two racks, with Ray in them."""
    documents = composed(())
    cluster = next(each for each in documents if each["kind"] == "RayCluster")["spec"]
    head, [workers] = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    (tmp_path / "members").mkdir()
    with ExitStack() as stack:
        rig = stack.enter_context(NamespaceRig(["head", "w1", "w2"]))
        made = {}
        for name in rig.hosts:
            # The head's volumes are the workers' here: it uses /tmp and /dev/shm of them.
            spec = workers["template"]["spec"]
            pod = RayPod(name, spec, tmp_path / name, tmp_path / "members", network=rig.namespace(name))
            made[name] = stack.enter_context(pod)
            pod.group, pod.address = head if name == "head" else workers, rig.address(name)
            way = "--head" if name == "head" else f"--address={rig.address('head')}:6379"
            pod.options = f"{way} --node-ip-address={pod.address}"
            labels = {"zone": "z1", "rack": f"r{name[-1]}"}
            (tmp_path / name / "tmp" / "labels.yaml").write_text(json.dumps(labels))
            pod.run_ray()
        yield made


def test_a_killed_container_of_ray_finds_its_steps_again(pods: dict[str, RayPod]) -> None:
    """`memstore up` as the RayJob runs it; the raylet, the holder and the rank die at once, and nothing is lost."""
    head, w1, w2 = pods.values()
    entrypoint = next(each for each in composed(()) if each["kind"] == "RayJob")["spec"]["entrypoint"]
    up = entrypoint.replace("--wait 4", "--wait 2").split()
    head.run(*up)
    status = json.loads(w1.run("memstore", "status", "--json"))
    assert {row["host"]: row["labels"]["rack"] for row in status["hosts"]} == {"w1": "r1", "w2": "r2"}
    assert [each["step"] for each in train([w1, w2], "default", 0, LAST)] == [None, None]

    w1.kill()
    w2.kill_ranks()
    w1.run_ray()
    head.run(*up)
    again = train([w1, w2], "default", LAST + 1, LAST + 1)
    assert again == [{"step": LAST, "is_whole": True, "source": "local"}] * 2
    for pod in (w1, w2):
        pod.kill_ranks()

    hook = w1.group["template"]["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    said = w1.popen(hook)
    _, err = said.communicate(timeout=300)
    assert said.returncode == 4, err
    assert "host w1 must not go" in err, "two workers: no third can take the copies"

"""The manifests for Kubernetes: composed as Kustomize does, valid by the CRDs, of quantities that memstore takes."""

from __future__ import annotations

import http.server
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from manifests import COMPONENTS, KUBERNETES, composed, crd_schema, pods
from repository import ROOT

from memstore.cli import main
from memstore.cli.bill import Terms
from memstore.shell.arena.memory_limits import MemoryLimits, admission, auto_bytes

GIB = 1 << 30
CHOICES = [(), *((each,) for each in COMPONENTS), COMPONENTS]
UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}


@pytest.fixture(params=CHOICES, ids=lambda choice: "+".join(choice) or "base")
def manifests(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Return the documents of the base with none, one or all of the components."""
    return composed(request.param)


def named(documents: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    """Return the only document of a kind."""
    [found] = [each for each in documents if each["kind"] == kind]
    return found


def worker(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the pod of the workers."""
    [group] = named(documents, "RayCluster")["spec"]["workerGroupSpecs"]
    return dict(group["template"]["spec"])


def nbytes(quantity: str) -> int:
    """Return the bytes of a quantity such as 9Gi."""
    return int(quantity[:-2]) * UNITS[quantity[-2:]]


# -- composition and schemas ------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl, which has Kustomize in it, is not installed")
@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: "+".join(choice) or "base")
def test_the_composition_of_these_tests_is_that_of_kustomize(choice: tuple[str, ...], tmp_path: Path) -> None:
    """What the other tests look at is what `kubectl apply -k` would send."""
    overlay = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [os.path.relpath(KUBERNETES / "base", tmp_path)],
        "components": [os.path.relpath(KUBERNETES / "components" / each, tmp_path) for each in choice],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    done = subprocess.run(["kubectl", "kustomize", str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    theirs = {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(done.stdout)}
    assert theirs == {(each["kind"], each["metadata"]["name"]): each for each in composed(choice)}


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl, which has Kustomize in it, is not installed")
def test_an_overlay_names_the_image_and_the_namespace_once() -> None:
    """All pods take the image of the overlay, the submitter's and those of init containers included."""
    overlay = KUBERNETES / "overlays" / "example"
    done = subprocess.run(["kubectl", "kustomize", str(overlay)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    documents = list(yaml.safe_load_all(done.stdout))
    [image] = yaml.safe_load((overlay / "kustomization.yaml").read_text())["images"]
    images = {each["image"] for pod in pods(documents) for each in pod.get("initContainers", []) + pod["containers"]}
    assert images == {f"{image['newName']}:{image['newTag']}"}
    spaces = {each["metadata"].get("namespace") for each in documents if not each["kind"].startswith("ClusterRole")}
    assert spaces == {"memstore"} == {named(documents, "ClusterRoleBinding")["subjects"][0]["namespace"]}


@pytest.mark.slow
def test_the_custom_resources_are_valid(manifests: list[dict[str, Any]]) -> None:
    """No field is unknown to KubeRay's CRDs, no value of another type, in the pods' templates too."""
    jsonschema = pytest.importorskip("jsonschema")
    train = yaml.safe_load((KUBERNETES / "train.yaml").read_text())
    looked = 0
    for each in [*manifests, train]:
        if each["apiVersion"] == "ray.io/v1":
            schema = crd_schema(each["kind"])
            if schema is None:
                pytest.skip("KubeRay's CRDs are not here: set MEMSTORE_KUBERAY_CRDS to the folder of ray.io_*.yaml")
            jsonschema.Draft202012Validator(schema).validate(each)
            looked += 1
    assert looked == 3


def test_what_is_kubernetes_own_is_valid(manifests: list[dict[str, Any]]) -> None:
    """By Kubernetes' own schemas, which a package carries: 22 MB, so that it is no requirement of the tests."""
    validator = pytest.importorskip("kubernetes_validate")
    own = [each for each in manifests if each["apiVersion"] != "ray.io/v1"]
    own += [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": pod} for pod in pods(manifests)]
    for each in own:
        validator.validate(each, "1.32", strict=True)
    assert len(own) == 8


# -- quantities -------------------------------------------------------------------------------


def test_the_example_state_fits_by_the_bill_and_by_admission(manifests: list[dict[str, Any]]) -> None:
    """The volume and the container's limit hold what `memstore plan --bill` says of the state in the comment."""
    text = (KUBERNETES / "base" / "raycluster.yaml").read_text()
    stated = re.search(r"(\d+) GiB put per host, replicas=(\d+), keep_steps=(\d+), in_flight=(\d+)", text)
    sums = re.search(r"\((\d+) \+ (\d+) \+ (\d+)\) / 0\.855 = ([\d.]+), so (\d+)Gi", text)
    assert stated
    assert sums
    put, replicas, keep_steps, in_flight = map(int, stated.groups())
    terms = Terms(replicas=replicas, keep_steps=keep_steps, in_flight=in_flight)
    arena = int(terms.scheme.memory(terms.versions) * put * GIB)
    pod = worker(manifests)
    [container] = pod["containers"]
    limit, volumes = nbytes(container["resources"]["limits"]["memory"]), {v["name"]: v for v in pod["volumes"]}
    shm = nbytes(volumes["shm"]["emptyDir"]["sizeLimit"])
    said = [int(each) for each in (*sums.groups()[:3], sums[5])]
    assert [arena // GIB, shm // GIB, limit // GIB] == [said[0], said[1], said[3]]
    is_on_node = "hostPath" in volumes["arena"]
    size = 64 * GIB if is_on_node else nbytes(volumes["arena"]["emptyDir"]["sizeLimit"])
    limits = MemoryLimits(
        "/arena", 256 * GIB, 0, size, size, cgroup_limit_bytes=limit, cgroup_used_bytes=shm + said[2] * GIB
    )
    assert admission(limits, asked_bytes=arena, claimed_bytes=0) is None
    assert arena <= auto_bytes(limits)
    smaller = MemoryLimits(
        "/arena", 256 * GIB, 0, size, size, cgroup_limit_bytes=limit - 2 * GIB, cgroup_used_bytes=shm
    )
    assert admission(smaller, asked_bytes=arena + said[2] * GIB, claimed_bytes=0), "the limit is larger than it need be"


def test_a_volume_in_memory_has_a_limit_and_fits_into_its_container(manifests: list[dict[str, Any]]) -> None:
    """Without a sizeLimit a volume in memory may take all of the node's."""
    for pod in pods(manifests):
        sizes = [v["emptyDir"]["sizeLimit"] for v in pod["volumes"] if v.get("emptyDir", {}).get("medium") == "Memory"]
        limit = nbytes(pod["containers"][0]["resources"]["limits"]["memory"])
        assert sum(map(nbytes, sizes)) < limit


# -- what belongs together --------------------------------------------------------------------


def test_counts_follow_the_number_of_workers(manifests: list[dict[str, Any]]) -> None:
    """`up` waits for all of them, the budget lets one go, and nothing scales them."""
    cluster = named(manifests, "RayCluster")
    [group] = cluster["spec"]["workerGroupSpecs"]
    assert group["replicas"] == group["minReplicas"] == group["maxReplicas"]
    assert not cluster["spec"]["enableInTreeAutoscaling"]
    words = shlex.split(named(manifests, "RayJob")["spec"]["entrypoint"])
    assert words[words.index("--wait") + 1] == str(group["replicas"])
    budget = named(manifests, "PodDisruptionBudget")["spec"]
    assert budget["minAvailable"] == group["replicas"] - 1
    assert "maxUnavailable" not in budget


def test_every_command_is_one_that_memstore_has(manifests: list[dict[str, Any]]) -> None:
    """`up` and `drain` with options that they know."""
    stop = worker(manifests)["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1]
    for text in (named(manifests, "RayJob")["spec"]["entrypoint"], stop.replace('"$MEMSTORE_HOST"', "h1")):
        program, verb, *words = shlex.split(text)
        assert program == "memstore"
        main.commands[verb].make_context(verb, words)


def test_a_pod_that_goes_has_time_to_drain_and_to_end(manifests: list[dict[str, Any]]) -> None:
    """The kubelet counts the hook in the grace period; a container that ends by itself is started again."""
    pod = worker(manifests)
    words = shlex.split(pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1])
    assert int(words[words.index("--within") + 1]) + 30 <= pod["terminationGracePeriodSeconds"]
    assert pod["restartPolicy"] == "Always"


def test_a_probe_kills_only_after_minutes(manifests: list[dict[str, Any]]) -> None:
    """A restore and an adoption take the processor and the network for a while; neither may end the pod."""
    spec = named(manifests, "RayCluster")["spec"]
    for pod in (spec["headGroupSpec"]["template"]["spec"], worker(manifests)):
        probe = pod["containers"][0]["livenessProbe"]
        assert probe["periodSeconds"] * probe["failureThreshold"] >= 600
        assert probe["timeoutSeconds"] >= 10


def test_nothing_is_written_but_in_volumes_and_by_no_root(manifests: list[dict[str, Any]]) -> None:
    """But for the one step that gives a folder of the node to the pod's user."""
    for pod in pods(manifests):
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["runAsUser"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        for each in pod.get("initContainers", []) + pod["containers"]:
            context = each["securityContext"]
            assert context["readOnlyRootFilesystem"], each["name"]
            assert not context["allowPrivilegeEscalation"], each["name"]
            assert context["capabilities"]["drop"] == ["ALL"]
            assert context.get("runAsUser") != 0 or each["name"] == "arena-folder"
            assert {mount["name"] for mount in each["volumeMounts"]} <= volumes
            assert each["resources"]["limits"]["memory"]
    for container in (pods(manifests)[0]["containers"][0], worker(manifests)["containers"][0]):
        assert {"/tmp", "/dev/shm"} <= {mount["mountPath"] for mount in container["volumeMounts"]}


def test_arena_labels_and_host_name_are_where_they_are_looked_for(manifests: list[dict[str, Any]]) -> None:
    """The folder that the init container makes, the labels file that Ray reads; the name lives as long as the arena."""
    pod = worker(manifests)
    prepare = next(each for each in pod["initContainers"] if each["name"] == "prepare")
    environment = {each["name"]: each for each in pod["containers"][0]["env"]}
    folder = environment["MEMSTORE_ARENA_DIR"]["value"]
    assert f"-m 0700 {folder} " in prepare["args"][0]
    [group] = named(manifests, "RayCluster")["spec"]["workerGroupSpecs"]
    assert prepare["args"][0].endswith(f"> {group['rayStartParams']['labels-file']}")
    on_node = any("hostPath" in volume for volume in pod["volumes"])
    source = environment["MEMSTORE_HOST"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert source == ("spec.nodeName" if on_node else "metadata.name")


def test_versions_and_the_image_are_those_of_the_repository() -> None:
    """Ray as constraints.txt pins it, and an image of files that are here."""
    pinned = re.search(r"^ray==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned
    assert named(composed(()), "RayCluster")["spec"]["rayVersion"] == pinned[1]
    lines = (ROOT / "deploy" / "Dockerfile").read_text().splitlines()
    assert len(lines) <= 20
    sent = [
        line[1:] for line in (ROOT / "deploy" / "Dockerfile.dockerignore").read_text().splitlines() if line[:1] == "!"
    ]
    copied = [line.split()[1] for line in lines if line.startswith("COPY") and "--from" not in line]
    assert copied
    assert {name for name in copied if name != "."} <= set(sent)
    assert all((ROOT / name).exists() for name in sent)
    built = {"pyproject.toml", "setup.py", "README.md", "LICENSE", "memstore", "placement", "recovery"}
    assert built <= set(sent), "the wheel cannot be built without them"


# -- labels of a node -------------------------------------------------------------------------


@pytest.fixture
def script() -> ModuleType:
    """Return the init container's program."""
    spec = importlib.util.spec_from_file_location("node_labels", KUBERNETES / "base" / "node_labels.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def api_server() -> Iterator[str]:
    """Serve one node as Kubernetes does, to the right token only."""

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_known = self.headers["Authorization"] == "Bearer right" and self.path == "/api/v1/nodes/n1"
            self.send_response(200 if is_known else 403)
            self.end_headers()
            labels = {"topology.kubernetes.io/zone": "z1", "example.com/rack": "r7", "other": "x"}
            self.wfile.write(json.dumps({"metadata": {"labels": labels}}).encode() if is_known else b"{}")

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.network
def test_a_nodes_zone_and_rack_become_labels_of_ray(script: ModuleType, api_server: str, tmp_path: Path) -> None:
    """In a file that Ray reads; a label that the node lacks is left out, and named."""
    found = script.node_labels("n1", api_server, "right", None)
    assert script.ray_labels(found, {"zone": "topology.kubernetes.io/zone", "rack": "none"}) == (
        {"zone": "z1"},
        ["none"],
    )
    labels, missing = script.ray_labels(found, {"zone": "topology.kubernetes.io/zone", "rack": "example.com/rack"})
    assert (labels, missing) == ({"zone": "z1", "rack": "r7"}, [])
    assert yaml.safe_load(json.dumps(labels)) == labels


@pytest.mark.network
def test_a_refusal_of_the_api_server_names_both_ways_out(script: ModuleType, api_server: str) -> None:
    """The right to read nodes, or labels by hand."""
    with pytest.raises(SystemExit, match=r"403 .*ClusterRole memstore-node-labels .*labels: \{zone"):
        script.node_labels("n1", api_server, "wrong", None)
    with pytest.raises(SystemExit, match="cannot be asked for node n1"):
        script.node_labels("n1", "http://127.0.0.1:9", "right", None)

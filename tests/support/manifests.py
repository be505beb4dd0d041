"""The manifests of deploy/kubernetes, composed without Kustomize: resources, a ConfigMap of files, JSON patches.

Only what these manifests use; a test compares it with `kubectl kustomize` where that is installed.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from repository import ROOT

KUBERNETES = ROOT / "deploy" / "kubernetes"
COMPONENTS = ("hostpath", "tls", "gcs-rocksdb")
CRDS_VARIABLE = "MEMSTORE_KUBERAY_CRDS"  # the folder of ray.io_rayclusters.yaml and ray.io_rayjobs.yaml


def composed(components: Sequence[str]) -> list[dict[str, Any]]:
    """Return the documents of the base, changed by components."""
    base = KUBERNETES / "base"
    layer = yaml.safe_load((base / "kustomization.yaml").read_text())
    documents = [each for name in layer["resources"] for each in yaml.safe_load_all((base / name).read_text())]
    for made in layer["configMapGenerator"]:
        data = {name: (base / name).read_text() for name in made["files"]}
        documents.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": made["name"]}, "data": data})
    documents = copy.deepcopy(documents)  # anchors make shared objects: a patch of one would change the others
    documents = [yaml.load(yaml.dump(each, Dumper=_NoAliases), yaml.CSafeLoader) for each in documents]
    for name in components:
        component = yaml.safe_load((KUBERNETES / "components" / name / "kustomization.yaml").read_text())
        for patch in component["patches"]:
            target = patch["target"]
            for each in documents:
                if (each["kind"], each["metadata"]["name"]) == (target["kind"], target["name"]):
                    for change in yaml.safe_load(patch["patch"]):
                        _change(each, **change)
    return documents


class _NoAliases(yaml.CSafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _change(document: dict[str, Any], op: str, path: str, value: Any) -> None:
    """Apply one operation of a JSON patch (RFC 6902)."""
    *way, last = path.lstrip("/").split("/")
    place: Any = document
    for step in way:
        place = place[int(step) if isinstance(place, list) else step]
    key = last if isinstance(place, dict) else len(place) if last == "-" else int(last)
    if op == "add" and isinstance(place, list):
        place.insert(key, copy.deepcopy(value))
    elif op == "test":
        if place[key] != value:
            raise AssertionError(f"{path} is {place[key]!r}, the patch is for {value!r}")
    else:
        if op == "replace" and (isinstance(place, dict) and key not in place):
            raise AssertionError(f"{path} is not there to be replaced")
        place[key] = copy.deepcopy(value)


def pods(documents: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the specification of every pod: head, workers, submitter."""
    found = []
    for each in documents:
        spec = each.get("spec", {})
        if each["kind"] == "RayCluster":
            templates = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
            found += [each["template"]["spec"] for each in templates]
        elif "submitterPodTemplate" in spec:
            found.append(spec["submitterPodTemplate"]["spec"])
    return found


@functools.cache
def crd_schema(kind: str) -> dict[str, Any] | None:
    """Return the schema of a custom resource of KubeRay, closed to unknown fields; None where the CRDs are not."""
    beside = [parent / "shared" / "data" / "kuberay" for parent in ROOT.parents[:2]]
    given = os.environ.get(CRDS_VARIABLE)
    for folder in [Path(given)] if given else beside:
        path = folder / f"ray.io_{kind.lower()}s.yaml"
        if path.is_file():
            crd = yaml.load(path.read_text(), yaml.CSafeLoader)
            [version] = [each for each in crd["spec"]["versions"] if each["name"] == "v1"]
            schema = _closed(version["schema"]["openAPIV3Schema"])
            schema["properties"]["metadata"] = {"type": "object"}
            return schema
    return None


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a structural schema that refuses fields which the API server would warn of and drop."""
    found = {key: value for key, value in schema.items() if not key.startswith("x-")}
    if "properties" in schema:
        found["properties"] = {name: _closed(each) for name, each in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            found["additionalProperties"] = False
    if isinstance(schema.get("items"), dict):
        found["items"] = _closed(schema["items"])
    if "properties" not in schema and isinstance(schema.get("additionalProperties"), dict):
        found["additionalProperties"] = _closed(schema["additionalProperties"])
    return found

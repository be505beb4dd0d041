"""Print the zone and the rack of this pod's Kubernetes node as a labels file of Ray.

An init container runs it. Kubernetes gives a pod the name of its node and not the node's labels, so it asks the API
server for one node: NODE_NAME says which, ZONE_LABEL and RACK_LABEL say how the cluster calls them. A node without one
of them gets no such label, and a warning: memstore then counts the host as a domain of its own.
"""

from __future__ import annotations

import json
import os
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
ASK_S = 30.0


def ray_labels(node: Mapping[str, str], names: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return Ray's labels for a node's, and the names of those that the node lacks."""
    found = {label: node[name] for label, name in names.items() if node.get(name)}
    return found, [name for label, name in names.items() if label not in found]


def node_labels(name: str, server: str, token: str, context: ssl.SSLContext | None) -> dict[str, str]:
    """Ask the API server for the labels of a node; end the process with the remedy if it refuses."""
    request = urllib.request.Request(f"{server}/api/v1/nodes/{name}", headers={"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, timeout=ASK_S, context=context) as answer:
            labels = json.load(answer)["metadata"].get("labels", {})
    except urllib.error.HTTPError as error:
        sys.exit(
            f"the API server answers {error.code} to a read of node {name}: bind the ClusterRole memstore-node-labels "
            "to this pod's service account, or give each worker group `labels: {zone: ..., rack: ...}` instead"
        )
    except OSError as error:
        sys.exit(f"the API server at {server} cannot be asked for node {name}: {error}")
    return {str(key): str(value) for key, value in labels.items()}


def main() -> None:
    """Print the labels file; name what is missing on stderr."""
    names = {"zone": os.environ["ZONE_LABEL"], "rack": os.environ["RACK_LABEL"]}
    server = f"https://{os.environ['KUBERNETES_SERVICE_HOST']}:{os.environ['KUBERNETES_SERVICE_PORT_HTTPS']}"
    context = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    labels = node_labels(os.environ["NODE_NAME"], server, (ACCOUNT / "token").read_text().strip(), context)
    found, missing = ray_labels(labels, names)
    for name in missing:
        sys.stderr.write(f"node {os.environ['NODE_NAME']} has no label {name}: set ZONE_LABEL or RACK_LABEL\n")
    sys.stdout.write(json.dumps(found) + "\n")  # JSON is YAML


if __name__ == "__main__":
    main()

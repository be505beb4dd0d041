"""Write the bill of materials of a wheel as CycloneDX JSON: what it needs, as installed in this environment.

sbom.py WHEEL > sbom.json
"""

from __future__ import annotations

import hashlib
import json
import sys
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from lend import needed, requirements_of


def component(name: str) -> dict[str, Any]:
    """Return the entry of an installed distribution."""
    found = distribution(name)
    said = found.metadata.get("License-Expression") or found.metadata.get("License") or ""
    plain = said.strip().splitlines()[0][:100] if said.strip() else ""  # some put the whole text there
    return {
        "type": "library",
        "name": found.metadata["Name"],
        "version": found.version,
        "purl": f"pkg:pypi/{name.replace('_', '-')}@{found.version}",
        **({"licenses": [{"license": {"name": plain}}]} if plain else {}),
    }


def main() -> None:
    """Print the document."""
    wheel = Path(sys.argv[1])
    name, version = wheel.name.split("-")[:2]
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    made: dict[str, Any] = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "name": name.replace("_", "-"),
                "version": version,
                "purl": f"pkg:pypi/{name.replace('_', '-')}@{version}",
                "licenses": [{"license": {"id": "Apache-2.0"}}],
                "hashes": [{"alg": "SHA-256", "content": digest}],
            }
        },
        "components": [component(one) for one in sorted(needed(requirements_of(wheel)))],
    }
    print(json.dumps(made, indent=1))


if __name__ == "__main__":
    main()

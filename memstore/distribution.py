"""The name under which memstore is installed, its version, and the versions that it works with.

The package is imported as `memstore`; `memstore` on PyPI is another project, so it is installed by this name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

DISTRIBUTION = "ray-memstore"
VERSION = "0.2.0"  # of the code that runs: what lies on disk may be newer by now
OLDEST = {"torch": "2.6", "ray": "2.49"}  # pyproject.toml has them, too; docs/reference/versions.md says what was run


def refused_versions(found: Mapping[str, str | None]) -> str:
    """Return which installed package is too old for memstore, and what works; "" if none is. One may be absent."""
    for package, oldest in OLDEST.items():
        here = found.get(package)
        if here is not None and _numbers(here) < _numbers(oldest):
            return (
                f"memstore {VERSION} works with {package} {oldest} or newer, and {here} is installed: "
                f"pip install '{package}>={oldest}', or in a clone `pip install . -c constraints.txt`, the tested set"
            )
    return ""


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)[:2]))


def installed_versions() -> dict[str, str | None]:
    """Return the versions of the packages in `OLDEST` as their metadata says; None of one that is not installed."""
    found: dict[str, str | None] = {}
    for package in OLDEST:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found

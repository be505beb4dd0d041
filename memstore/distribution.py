"""The name under which memstore is installed, and the version that is.

The package is imported as `memstore`; `memstore` on PyPI is another project, so versions are asked for by this name.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

DISTRIBUTION = "ray-memstore"


def installed_version() -> str:
    """Return the installed version of memstore, "unknown" in a bare source tree."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "unknown"

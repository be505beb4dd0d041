"""The name under which memstore is installed, its version, and the versions that it works with.

The package is imported as `memstore`; `memstore` on PyPI is another project, so it is installed by this name.
"""

from __future__ import annotations

DISTRIBUTION = "ray-memstore"
VERSION = "0.2.0"  # of the code that runs: what lies on disk may be newer by now

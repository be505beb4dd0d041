"""The cluster on which the drills of a file play."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

HOSTS = {"h1": {"rack": "r1"}, "h2": {"rack": "r2"}, "h3": {"rack": "r1"}}  # h1 is Ray's head and cannot be lost


@pytest.fixture(scope="module")
def site() -> Iterator[object]:
    """Start three hosts in two racks, an EmbeddedSite for all drills of a file; a file may have a `site` of its own."""
    pytest.importorskip("ray")
    from memstore.drills.sites.site import EmbeddedSite
    from memstore.testing.clusters.embedded import EmbeddedCluster

    with EmbeddedCluster(HOSTS) as cluster:
        site = EmbeddedSite(cluster)
        yield site
        site.close()

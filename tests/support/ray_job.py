"""The drills' job and ranks on the raylets of a test."""

from __future__ import annotations

from typing import Any

from memstore.drills.sites.scratch import ScratchJob
from memstore.drills.sites.site import EmbeddedSite
from memstore.testing.clusters.embedded import EmbeddedCluster


def ray_job(cluster: EmbeddedCluster, name: str = "", **fields: Any) -> ScratchJob:
    """Return a job that is yet to start; `fields` are of its Config."""
    job = ScratchJob(EmbeddedSite(cluster), "job", cluster.config.with_fields(fields), seed=1, nbytes=200_000)
    job.name = name or job.name
    return job

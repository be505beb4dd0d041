"""What the next host's turn waits for in a rolling upgrade (R40.5)."""

from __future__ import annotations

from typing import cast

from msgspec.structs import replace

from memstore.admin.upgrade import awaited
from memstore.core.wire.replies import Status
from memstore.core.wire.status_rows import AttemptStatus, HostRow, JobRow
from memstore.testing.fuzz.messages import blank


def status(*, h2: str = "live", missing: int = 0, is_restoring: bool = False) -> Status:
    """Return the status of two hosts and a job."""
    hosts = [replace(blank(HostRow), host=host, status=is_now) for host, is_now in (("h1", "live"), ("h2", h2))]
    newest = replace(blank(AttemptStatus), missing_copies=missing, committed_step=7, is_restoring=is_restoring)
    return cast(Status, replace(blank(Status), hosts=hosts, jobs=[replace(blank(JobRow), job="train", newest=newest)]))


def test_the_next_turn_is_once_all_is_as_before() -> None:
    """Each host runs, no restore is under way, and no job lacks more copies than at the beginning."""
    assert awaited(status(), ["h1", "h2"], {}) == ""
    assert awaited(status(missing=2), ["h1", "h2"], {"train": 2}) == ""
    assert awaited(status(missing=2), ["h1", "h2"], {"train": 1}) == "job train lacks 2 copies of step 7"
    assert awaited(status(h2="dead"), ["h1", "h2"], {}) == "host h2 is dead"
    assert awaited(status(h2="dead"), ["h1"], {}) == "", "a host that Ray has lost for good holds nobody up"
    assert awaited(status(), ["h3"], {}) == "host h3 is not there"
    assert awaited(status(is_restoring=True), ["h1"], {}) == "job train is being restored"

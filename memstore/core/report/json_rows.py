"""What `memstore status --json` and `ls --json` print of the answers. Pure."""

from __future__ import annotations

from typing import Any

from memstore.core.wire.codec import fields_of
from memstore.core.wire.replies import Status
from memstore.core.wire.status_rows import HostRow, JobRow


def status_fields(status: Status) -> dict[str, Any]:
    """Return plain values of a status."""
    rows = {"hosts": [host_fields(row) for row in status.hosts], "jobs": [job_fields(row) for row in status.jobs]}
    return {**fields_of(status), **rows}


def host_fields(row: HostRow) -> dict[str, Any]:
    """Return plain values of a host; {} for the numbers of one whose heartbeat has not come yet."""
    fields = fields_of(row)
    return fields if row.stats is not None else {**fields, "stats": {}}


def job_fields(row: JobRow) -> dict[str, Any]:
    """Return plain values of a job, those of its newest attempt among them; none of those if it has no attempt."""
    fields = fields_of(row)
    return {**fields, **(fields.pop("newest") or {})}

"""Remembers the newest step that this host's ranks trained, put or not, for the controller (rank/trained.py)."""

from __future__ import annotations

from memstore.core.wire.ids import WireStep


class TrainedSteps:
    """The newest trained step of each job, from any of its ranks here; it stays when they die."""

    def __init__(self) -> None:
        self._newest: dict[str, tuple[int, int]] = {}

    def report(self, job: str, attempt: int, step: int) -> None:
        """Note a step that a rank has trained."""
        self._newest[job] = max((attempt, step), self._newest.get(job, (0, -1)))

    def forget(self, job: str) -> None:
        """Forget a removed job."""
        self._newest.pop(job, None)

    def newest(self) -> dict[str, WireStep]:
        """Return the newest step of each job, for a heartbeat."""
        return {job: WireStep(*newest) for job, newest in list(self._newest.items())}

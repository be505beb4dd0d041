"""What hosts were told last of every job, so that a change tells only those whom it concerns. Pure (R10, R13)."""

from __future__ import annotations

from memstore.core.wire.messages import Body


class Told:
    """Orders by host, kind and job. Who begins a session, or refused, has been told nothing."""

    def __init__(self) -> None:
        self._bodies: dict[str, dict[tuple[str, str], Body]] = {}

    def is_known(self, host: str, kind: str, body: Body) -> bool:
        """True if the host goes by this very order already."""
        return self._bodies.get(host, {}).get((kind, str(body["job"]))) == body

    def note(self, host: str, kind: str, body: Body) -> None:
        """The host is told now."""
        self._bodies.setdefault(host, {})[kind, str(body["job"])] = body

    def refused(self, host: str, kind: str, job: str) -> None:
        """The host does not go by it: it is told again."""
        self._bodies.get(host, {}).pop((kind, job), None)

    def forget_host(self, host: str) -> None:
        """It died, or has begun anew."""
        self._bodies.pop(host, None)

    def forget(self, name: str) -> None:
        """The job was removed."""
        for bodies in self._bodies.values():
            for key in [key for key in bodies if key[1] == name]:
                del bodies[key]

"""Keeps the records of holders and controllers as small files in one folder: processes on one machine without Ray."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from memstore.errors import TransportError


class DirectoryMembership:
    """Records as files; a term is claimed by creating its file exclusively."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        for name in ("hosts", "terms"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)

    def announce(self, host_id: str, record: dict[str, Any]) -> None:
        path = self.folder / "hosts" / host_id
        temporary = self.folder / f".{host_id}.{os.getpid()}"
        with self._reachable():
            temporary.write_text(json.dumps(record))
            temporary.replace(path)

    def hosts(self) -> dict[str, dict[str, Any]]:
        found = {}
        with self._reachable():
            paths = sorted((self.folder / "hosts").iterdir())
        for path in paths:
            try:
                found[path.name] = json.loads(path.read_text())
            except (OSError, ValueError):
                continue  # withdrawn while we looked
        return found

    def withdraw(self, host_id: str) -> None:
        with self._reachable():
            (self.folder / "hosts" / host_id).unlink(missing_ok=True)

    def claim_term(self, above: int) -> int:
        term = max(above, self.newest_term()) + 1
        while True:
            try:
                with self._reachable():
                    os.close(os.open(self.folder / "terms" / str(term), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
                return term
            except FileExistsError:
                term += 1

    def newest_term(self) -> int:
        with self._reachable():
            return max((int(p.name) for p in (self.folder / "terms").iterdir()), default=0)

    @contextlib.contextmanager
    def _reachable(self) -> Iterator[None]:
        """Say as TransportError that the folder is out of reach: its file system is gone, or full."""
        try:
            yield
        except FileExistsError:
            raise
        except OSError as exc:
            raise TransportError(f"the membership in {self.folder} does not answer: {exc}") from exc

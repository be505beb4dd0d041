"""A host's records of dropped jobs, in the store's folder, so that they outlive the host's folder (R5, R23).

<arena_dir>/memstore-<uid>/<store>/.dropped-<host>      {"job": "its committed steps ... were dropped ..."}
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

from memstore.errors import ConfigError
from memstore.shell.arena.folder import open_file

log = logging.getLogger("memstore")


def tombstone_path(folder: Path) -> Path:
    """Return the file of a host, by the path of its arena folder."""
    return folder.parent / f".dropped-{folder.name}"


class Tombstones:
    """The reasons by job, as the file has them. One writer, which holds the lock of the host's arena."""

    def __init__(self, folder: Path) -> None:
        self._path = tombstone_path(folder)
        self.stories = self._read()

    def _read(self) -> dict[str, str]:
        try:
            with os.fdopen(open_file(self._path.parent, self._path.name, os.O_RDONLY)) as file:
                return {str(job): str(story) for job, story in json.load(file).items()}
        except FileNotFoundError:
            return {}
        except (ConfigError, OSError, ValueError, AttributeError) as exc:
            log.warning("the records of dropped jobs cannot be read in %s: %s", self._path, exc)
            return {}

    def take(self, job: str, story: str) -> None:
        """Record why a job was dropped, or forget the job ("")."""
        if self.stories.get(job, "") == story:
            return
        stories = {name: kept for name, kept in {**self.stories, job: story}.items() if kept}
        if not stories:
            self._path.unlink(missing_ok=True)
            self.stories = stories
            return
        temporary = f"{self._path.name}-new"
        with os.fdopen(open_file(self._path.parent, temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w") as file:
            json.dump(stories, file, indent=1)
        os.rename(self._path.parent / temporary, self._path)
        self.stories = stories  # not before: after a failed write a repeated order writes it

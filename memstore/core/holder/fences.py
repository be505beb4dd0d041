"""Remembers, for each job, the first attempt whose processes this host still serves (R21)."""

from __future__ import annotations


class JobFences:
    """The fences of one holder. They only rise; a job without one has none of its attempts refused."""

    def __init__(self) -> None:
        self._first: dict[str, int] = {}
        self._removed: dict[str, int] = {}  # job -> the fence that its removal set

    def first(self, job: str) -> int:
        """Return the job's first attempt that may be served; 0 if none was fenced."""
        return self._first.get(job, 0)

    def is_fenced(self, job: str, attempt: int) -> bool:
        """Return whether processes of an attempt are refused."""
        return attempt < self.first(job)

    def is_removed(self, job: str) -> bool:
        """Return whether the job's fence stands because the job was removed."""
        return job in self._removed and self._removed[job] == self.first(job)

    def open(self, job: str, attempt: int) -> None:
        """Refuse the processes of all attempts before this one."""
        self._first[job] = max(self.first(job), attempt)

    def remove(self, job: str, attempt: int) -> None:
        """Refuse this attempt of a removed job, and all before it."""
        self._removed[job] = attempt + 1
        self.open(job, attempt + 1)

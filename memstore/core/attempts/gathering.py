"""Processes that wait for their place in an attempt, until all its ranks are there. Plain data; see `join.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from memstore.core.cluster.job import Attempt, Call, Replies
from memstore.core.cluster.text import ranks_text
from memstore.core.wire.calls import InPlace, Join, Rewind
from recovery.inventory import StepId


@dataclass(slots=True)
class Entrant:
    """A process that joins, or rewinds with its attempt."""

    call: Call[Join] | Call[Rewind]
    rank: int
    nonce: str
    key: str | None = None
    launcher: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    pid: int = 0
    shard: int | None = None
    shards: int | None = None
    is_fresh: bool = False
    in_place: InPlace | None = None
    limit_s: float = 0.0  # how long it waits from its question on: what is left of its connect(), or its attempt's
    is_gone: bool = False  # it died before its attempt opened
    groups: Mapping[str, int] = field(default_factory=dict)

    @property
    def question(self) -> tuple[str, str | None]:
        """Return what is the same when the process asks again."""
        return self.nonce, self.key


def joining(call: Call[Join]) -> Entrant:
    """Return the process that joins."""
    asked = call.request
    return Entrant(
        call,
        asked.rank,
        asked.nonce,
        asked.key,
        asked.launcher,
        asked.config,
        asked.pid,
        asked.shard,
        asked.shards,
        asked.fresh,
        asked.in_place,
        asked.limit_s,
        groups=asked.groups,
    )


def rewinding(call: Call[Rewind], attempt: Attempt) -> Entrant:
    """Return a process of an attempt that goes on in the next one, as it joined this one."""
    asked = call.request
    shard = attempt.shard_of[asked.rank] if attempt.shard_of else None
    return Entrant(
        call,
        asked.rank,
        asked.nonce,
        asked.key,
        attempt.launcher,
        attempt.config,
        attempt.members[asked.rank].pid,
        shard,
        max(attempt.shard_of) + 1 if attempt.shard_of else None,
        limit_s=float(attempt.config["connect_timeout_s"]),
        groups={name: numbers[asked.rank] for name, numbers in attempt.groups.items()},
    )


def groups_refusal(name: str, named: Sequence[Mapping[str, int]]) -> str | None:
    """Say why the ranks of a launch, in order, do not all name the same groups, or None (R18.8)."""
    by_names: dict[str, list[int]] = {}
    for rank, groups in enumerate(named):
        by_names.setdefault(", ".join(sorted(groups)) or "none", []).append(rank)
    if len(by_names) < 2:
        return None
    said = "; ".join(
        f"{ranks_text(ranks)} {'names' if len(ranks) == 1 else 'name'} {n}" for n, ranks in by_names.items()
    )
    return f"job {name!r}: all ranks must name the same groups in connect(groups=), or all of them none: {said}"


class Entrants(dict[int, Entrant]):
    """Rank -> the process that waits for it."""

    def refuse_all(self, out: Replies, error: str, message: str) -> None:
        """Refuse every process alike."""
        for entrant in self.values():
            out.refuse(entrant.call, error, message)


@dataclass(slots=True)
class Gathering:
    """Joins of one launch that wait for the rest of their ranks."""

    key: str | None
    world_size: int
    joins: Entrants = field(default_factory=Entrants)
    rewind: tuple[int, int | None] | None = None  # the ranks of an open attempt go back to (step, of which attempt)
    rewind_to: StepId | None = None  # that step, once it is found
    markers_call: int = 0  # all ranks have come; the markers in durable storage are listed first (R31)
    listing_since_s: float = 0.0
    on_listed: Callable[[str], None] | None = None  # goes on, with why storage could not be read
    knew: int | None = None  # all ranks have come; the job's newest attempt that a host here knew then, 0: none
    late_hosts: frozenset[str] = frozenset()  # all ranks have come; announced hosts may know more of the job (R20)
    level_asked: str | None = None  # the spread of a job that had begun without them: their racks count (R18)

    @property
    def opens_by_s(self) -> float:
        """Return when it opens without hosts that are late: half of the shortest connect() is left then."""
        return min(entrant.call.since_s + entrant.limit_s / 2 for entrant in self.joins.values())

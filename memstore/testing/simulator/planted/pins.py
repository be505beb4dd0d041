"""Planted bugs in pins and leases: steps and slots that must be kept."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from memstore.core.cluster.job import Job, LeaseRoom
from memstore.core.cluster.state import Holds
from memstore.core.cluster.step_lookup import kept_steps
from memstore.core.history.pins import Pins
from memstore.core.holder.reads import ready
from memstore.core.holder.state import HolderState
from memstore.core.repair import repair
from memstore.core.restore.followers import Followers
from memstore.testing.faults.catalogue import Fault
from memstore.testing.simulator.planted.bug import planted, row
from recovery.inventory import StepId

PINNED = Fault(4.0, "pin-step")
BROKEN_LINKS = [Fault(2.0 + 0.4 * n, "break-link", rank=n % 3) for n in range(24)]


@planted("retention-ignores-pins", "R19", "R19", PINNED)
@contextmanager
def retention_ignores_pins() -> Iterator[None]:
    """Retention drops a step although it is pinned."""

    def nothing(*_: Any) -> set[StepId]:
        return set()

    with patch.object(Pins, "_held", nothing), patch.object(Job, "pinned_steps", nothing):
        yield


LEASED = Fault(4.0, "lease-step", for_s=6.0)


@planted("retention-ignores-leases", "R36", "R36", LEASED, step_s=0.2, at=(Holds, "steps"))
def retention_ignores_leases(real: Any, self: Any, job: Job) -> set[StepId]:
    """Retention drops a step although a reader has leased it."""
    return real(self, job) - job.leased.keys()  # type: ignore[no-any-return]


@planted("leases-without-room", "R36", "I16", Fault(4.0, "lease-step", for_s=0.0), at=(Followers, "_claim"))
def leases_without_room(real: Any, self: Any, job: Job, call: Any, step: StepId) -> None:
    """A step is leased before its room is claimed: puts lack theirs for as long as its reader reads."""
    job.lease_room = LeaseRoom((1 << 20,) * job.commits[step].world_size, 1)
    self._take(job, call, step)


@planted(
    "pins-numbered-by-link", "R7", "R7", *BROKEN_LINKS, reads_ranges=True, reads_shards=True, reads_every=1, step_s=0.2
)
def pins_numbered_by_link() -> Any:
    """Readers' pins are numbered from 1 on each link, so a late unpin of an older link frees another reader's pin."""
    counts: Counter[Any] = Counter()

    def numbered(state: HolderState, link: Any, release: Callable[[], None]) -> int:
        counts[link] += 1
        return hold(replace(state, pin_numbers=itertools.count(counts[link])), link, release)

    hold = ready.hold
    return patch.object(ready, "hold", numbered)


ROWS = (
    row(
        "pins-not-repaired",
        "R29",
        "I16",
        (repair, "redundant_steps"),
        kept_steps,
        "Repair looks only at steps that retention keeps, so pinned steps stay without copies.",
        PINNED,
        Fault(6.0, "kill-host", (1,), for_s=2.0),
    ),
)

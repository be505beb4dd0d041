"""The scratch job of a drill: ranks that join, put and restore, and are removed at the end.

Every state is made from (seed, rank, step); so a restored one can be compared without the help of the store.
"""

from __future__ import annotations

import contextlib
import random
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from memstore.config import Config
from memstore.core.wire.calls import RemoveJob
from memstore.core.wire.status_rows import AttemptStatus
from memstore.drills.model.catalogue import Drill, Options, Promise
from memstore.drills.model.report import Report, Timeline
from memstore.drills.ranks.ranks import CALL_S, Rank, collect, kill_actors
from memstore.drills.sites.site import Site
from memstore.errors import DrillError, MemstoreError
from memstore.testing.ranks.rank import PutRow, Restored

RESTORE_S = 120.0
SETTLE_S = 60.0  # limit for: all copies before the fault, notice of the fault, all copies after the restore


class ScratchJob:
    """A job on a site that only the drill uses."""

    def __init__(self, site: Site, name: str, config: Config, *, seed: int, nbytes: int) -> None:
        self.site, self.config, self.seed, self.nbytes = site, config, seed, nbytes
        self.name = f"{name}-{secrets.token_hex(4)}"
        self.ranks: list[Rank] = []
        self.spares: list[Rank] = []

    # -- processes ----------------------------------------------------------------------------

    def start(self, hosts: Sequence[str]) -> None:
        """Take one rank process per entry of `hosts`, and open the first attempt of the job."""
        self.ranks = self.site.pool.take(hosts, self.site.nodes())
        self.join(fresh=True)

    def stand_by(self, hosts: Sequence[str]) -> None:
        """Take the processes of the next attempt now, as a launcher with warm spares does."""
        self.spares = self.site.pool.take(hosts, self.site.nodes())

    def join(self, *, fresh: bool) -> None:
        """Let all ranks open the next attempt."""
        fields = {
            "job": self.name,
            "world_size": len(self.ranks),
            "attempt": secrets.token_hex(8),
            "fresh": fresh,
            "config": asdict(self.config),
            "seed": self.seed,
            "nbytes": self.nbytes,
        }
        collect([r.call("connect", rank=i, **fields) for i, r in enumerate(self.ranks)], "connect")

    def all(self, do: str, **command: Any) -> list[Any]:
        """Begin a command of all ranks; return the calls for `collect`."""
        return [r.call(do, **command) for r in self.ranks]

    def restand(self, host: str) -> None:
        """Replace the next attempt's processes on a host that died and is back."""
        self.spares = [self.site.pool.take([host], self.site.nodes())[0] if r.host == host else r for r in self.spares]

    def restart(self) -> None:
        """Kill the attempt's processes as a launcher does, and open the next attempt on the spares."""
        kill_actors(self.ranks)
        self.ranks, self.spares = self.spares, []
        self.site.wait_hosts_live(sorted({r.host for r in self.ranks}))
        self.join(fresh=False)

    # -- what the ranks do --------------------------------------------------------------------

    def put(self, first: int, last: int, what: str = "put") -> list[PutRow]:
        """Let all ranks put the steps `first` to `last`; raise DrillError if one of the puts raised."""
        rows = put_rows(self.all("puts", first=first, last=last), what)
        errors = [row.error for row in rows if row.error]
        if errors:
            raise DrillError(f"{what}: a put raised {errors[0]}")
        return rows

    def train(self, first: int, last: int, what: str) -> None:
        """Put the steps `first` to `last`, and wait for each commit; else a busy machine could skip the next put."""
        for step in range(first, last + 1):
            self.put(step, step, f"put {what}")
            self.wait("committed", f"commit {what}")

    def leave(self, timeout_s: float = CALL_S) -> None:
        """Let all ranks leave the job; their processes can join again."""
        collect(self.all("close"), "leave", timeout_s)

    def begin_puts(self, first: int, last: int, pause_s: float, marks: Mapping[int, str] | None = None) -> list[Any]:
        """Start puts of all ranks, with `pause_s` after each; return their calls for `put_rows`.

        `marks` names by rank the file in which the rank marks that a put is under way.
        """
        found = marks or {}
        fields = {"first": first, "last": last, "pause_s": pause_s}
        return [r.call("puts", mark=found.get(i, ""), **fields) for i, r in enumerate(self.ranks)]

    def wait(self, level: str, what: str) -> None:
        """Wait until the newest put of every rank has reached a level."""
        collect(self.all("flush", level=level, timeout_s=SETTLE_S), what)

    def restore(self, *, is_altered: bool = False, meanwhile: Callable[[], None] | None = None) -> list[Restored]:
        """Let all ranks get and compare. `meanwhile` is called when all ranks but the last have called get()."""
        *first, last = self.ranks
        fields = {"timeout_s": RESTORE_S, "is_altered": is_altered}
        calls = [r.call("restore", **fields) for r in first]
        if meanwhile is not None:
            self.site.wait_for("the round of the get to open", lambda: self.newest().is_restoring)
            meanwhile()
        calls.append(last.call("restore", **fields))
        return msgspec.convert(collect(calls, "get", RESTORE_S + CALL_S), list[Restored])

    def read(self, step: int, shift: int, *, is_altered: bool = False) -> list[Restored]:
        """Let every rank i read and compare the shard of rank i + `shift`, while training goes on (R27)."""
        count = len(self.ranks)
        calls = [
            r.call("restore", timeout_s=RESTORE_S, is_altered=is_altered, step=step, rank=(i + shift) % count)
            for i, r in enumerate(self.ranks)
        ]
        return msgspec.convert(collect(calls, "read", RESTORE_S + CALL_S), list[Restored])

    # -- what the store says ------------------------------------------------------------------

    def newest(self) -> AttemptStatus:
        """Return the store's status of the job's newest attempt; raise DrillError if the store knows none."""
        found = self.site.job(self.name).newest
        if found is None:
            raise DrillError(f"the store knows no attempt of job {self.name!r}")
        return found

    def committed_step(self) -> int:
        """Return the newest committed step; -1 if there is none, or if the controller does not answer."""
        with contextlib.suppress(MemstoreError):
            found = self.newest().committed_step
            return -1 if found is None else found
        return -1

    def copies_text(self) -> str:
        """Return how many copies every shard of the newest committed step has, as text."""
        newest = self.newest()
        return f"{newest.copies} of {newest.replicas} copies"

    def wait_redundant(self) -> AttemptStatus:
        """Wait until the newest committed step has all copies that live hosts allow; return the attempt's status."""

        def look() -> AttemptStatus | None:
            newest, live = self.newest(), self.site.live_hosts()
            wanted = min(newest.replicas, len(live))
            is_whole = newest.committed_step is not None and newest.copies >= wanted
            return newest if is_whole and (wanted < newest.replicas or not newest.missing_copies) else None

        found: AttemptStatus = self.site.wait_for("every copy of the newest committed step", look, SETTLE_S)
        return found

    # -- the end ------------------------------------------------------------------------------

    def remove(self) -> None:
        """End the ranks, and remove the job; skip what does not answer."""
        self.end_ranks()
        with contextlib.suppress(MemstoreError):
            self.site.ask(RemoveJob(job=self.name, force=True), CALL_S / 4)
        if self.config.durable is not None:
            shutil.rmtree(Path(self.config.durable) / self.name, ignore_errors=True)

    def end_ranks(self) -> None:
        """Give the processes back to the pool; kill those that do not leave."""
        kill_actors(self.spares)
        try:
            self.leave(CALL_S / 4)
            self.site.pool.give_back(self.ranks)
        except MemstoreError:
            kill_actors(self.ranks)
        self.ranks, self.spares = [], []


def put_rows(calls: Sequence[Any], what: str) -> list[PutRow]:
    """Return the rows of puts that all ranks made."""
    return msgspec.convert([row for mine in collect(calls, what) for row in mine["rows"]], list[PutRow])


# -- drill context ------------------------------------------------------------------------------------
# The context of one drill, which its scene, its flow, the judgement and the runner share.


@dataclass
class DrillContext:
    """The drill, its site, its scratch job and the findings so far. It refers to none of the parts that use it."""

    drill: Drill
    site: Site
    options: Options
    config: Config  # the scratch job's
    promise: Promise  # a flow may replace it: with two hosts no byte needs to come from a peer
    rng: random.Random  # seeded with the drill and its options; draws the victims and the moments
    report: Report
    timeline: Timeline
    job: ScratchJob
    job_before: AttemptStatus | None = None  # the job's status right before the fault
    places: list[str] = field(default_factory=list)  # live hosts, in the order in which they get ranks
    broken_promises: list[str] = field(default_factory=list)

"""The scratch job of a drill or canary: ranks that join, put, restore and are cleaned up after.

States are made anew from (seed, rank, step), so that what comes back can be compared without asking the store.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from memstore.config import Config
from memstore.drills.ranks.ranks import CALL_S, PutRow, Rank, Restored, collect, kill_actors
from memstore.drills.sites.site import Site
from memstore.errors import DrillError, MemstoreError

RESTORE_S = 120.0
SETTLE_S = 60.0  # copies complete before the drill, noticed after the fault, complete again after the restore


class ScratchJob:
    """One job that only the drill knows, on a site."""

    def __init__(self, site: Site, name: str, config: Config, *, seed: int, nbytes: int) -> None:
        self.site, self.config, self.seed, self.nbytes = site, config, seed, nbytes
        self.name = f"{name}-{secrets.token_hex(4)}"
        self.ranks: list[Rank] = []
        self.spares: list[Rank] = []

    # -- processes ----------------------------------------------------------------------------

    def start(self, hosts: Sequence[str]) -> None:
        """Take one rank process per entry of `hosts` and join a fresh job."""
        self.ranks = self.site.pool.take(hosts, self.site.nodes())
        self.join(fresh=True)

    def stand_by(self, hosts: Sequence[str]) -> None:
        """Take the processes of the next attempt, as a launcher with warm spares has them."""
        self.spares = self.site.pool.take(hosts, self.site.nodes())

    def join(self, *, fresh: bool) -> None:
        """Open the next attempt; collective."""
        key = secrets.token_hex(8)
        collect(
            [
                r.actor.join.remote(
                    self.name, i, len(self.ranks), key, self.config, fresh=fresh, seed=self.seed, nbytes=self.nbytes
                )
                for i, r in enumerate(self.ranks)
            ],
            "connect",
        )

    def restand(self, host: str) -> None:
        """The next attempt's processes on a host died with it: take new ones, now that it is back."""
        self.spares = [self.site.pool.take([host], self.site.nodes())[0] if r.host == host else r for r in self.spares]

    def restart(self) -> None:
        """End the attempt's processes as a launcher does, open the next attempt on the spares."""
        kill_actors(self.ranks)
        self.ranks, self.spares = self.spares, []
        self.site.wait_hosts_live(sorted({r.host for r in self.ranks}))
        self.join(fresh=False)

    # -- what the ranks do --------------------------------------------------------------------

    def put(self, first: int, last: int, what: str = "put") -> list[PutRow]:
        """All ranks put the steps first to last; DrillError if one raised."""
        calls = [r.actor.put.remote(first, last) for r in self.ranks]
        rows: list[PutRow] = [row for mine in collect(calls, what) for row in mine]
        errors = [row.error for row in rows if row.error]
        if errors:
            raise DrillError(f"{what}: a put raised {errors[0]}")
        return rows

    def train(self, first: int, last: int, what: str) -> None:
        """Put the steps first to last and wait for each commit: on a busy machine the next put could have to skip."""
        for step in range(first, last + 1):
            self.put(step, step, f"put {what}")
            self.wait("committed", f"commit {what}")

    def put_measured(self, step: int, level: str) -> list[PutRow]:
        """All ranks put one step at once, its states made before; return how long it took to reach a level."""
        collect([r.actor.prepare.remote(step) for r in self.ranks], "making the states")
        rows: list[PutRow] = collect([r.actor.put_and_wait.remote(step, level, CALL_S) for r in self.ranks], "put")
        return rows

    def rejoin(self) -> None:
        """The same processes leave and open the next attempt."""
        collect([r.actor.leave.remote() for r in self.ranks], "leave")
        self.join(fresh=False)

    def drop(self, rank: int, host: str) -> dict[str, Any]:
        """Drop one copy of the newest committed step through the controller, which refuses if it is the last."""
        job = self.status()
        body = {
            "job": self.name, "attempt": job["committed_attempt"], "step": job["committed_step"], "rank": rank,
            "host": host,
        }  # fmt: skip
        return self.site.ask("drop", body)

    def begin_puts(self, first: int, last: int, pause_s: float, marks: Mapping[int, str] | None = None) -> list[Any]:
        """All ranks begin to put, resting between steps; return their calls for `collect`.

        `marks` names by rank the file that says whether a put is under way.
        """
        found = marks or {}
        return [r.actor.put.remote(first, last, pause_s, found.get(i, "")) for i, r in enumerate(self.ranks)]

    def wait(self, level: str, what: str) -> None:
        """Wait until the newest put of every rank has reached a level."""
        collect([r.actor.wait.remote(level, SETTLE_S) for r in self.ranks], what)

    def restore(self, *, is_altered: bool = False, meanwhile: Callable[[], None] | None = None) -> list[Restored]:
        """All ranks get and compare; collective. `meanwhile` happens after all ranks but the last have asked."""
        *first, last = self.ranks
        calls = [r.actor.restore.remote(RESTORE_S, is_altered=is_altered) for r in first]
        if meanwhile is not None:
            self.site.wait_for("the round of the get to open", lambda: self.status()["is_restoring"])
            meanwhile()
        calls.append(last.actor.restore.remote(RESTORE_S, is_altered=is_altered))
        results: list[Restored] = collect(calls, "get", RESTORE_S + CALL_S)
        return results

    def read(self, step: int, shift: int, *, is_altered: bool = False) -> list[Restored]:
        """Every rank reads and compares the shard of the rank `shift` places on, while training goes on (R27)."""
        count = len(self.ranks)
        calls = [
            r.actor.read.remote(step, (i + shift) % count, RESTORE_S, is_altered=is_altered)
            for i, r in enumerate(self.ranks)
        ]
        results: list[Restored] = collect(calls, "read", RESTORE_S + CALL_S)
        return results

    # -- what the store says ------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """The store's status of the job; DrillError if it does not know it."""
        return self.site.job(self.name)

    def committed_step(self) -> int:
        """The newest committed step; -1 while there is none or the controller is away."""
        with contextlib.suppress(MemstoreError):
            found = self.status()["committed_step"]
            return -1 if found is None else int(found)
        return -1

    def copies_text(self) -> str:
        """How many copies every shard of the newest committed step has."""
        job = self.status()
        return f"{job['copies']} of {job['replicas']} copies"

    def wait_redundant(self) -> dict[str, Any]:
        """Wait until the newest committed step has every copy that the live hosts allow; return the job's status."""

        def look() -> dict[str, Any] | None:
            job, live = self.status(), self.site.live_hosts()
            wanted = min(int(job["replicas"]), len(live))
            is_whole = job["committed_step"] is not None and job["copies"] >= wanted
            return job if is_whole and (wanted < job["replicas"] or not job["missing_copies"]) else None

        found: dict[str, Any] = self.site.wait_for("every copy of the newest committed step", look, SETTLE_S)
        return found

    # -- the end ------------------------------------------------------------------------------

    def remove(self) -> None:
        """Leave nothing of the job; idle processes serve the next drill. Never raises for what is broken anyway."""
        kill_actors(self.spares)
        try:
            collect([r.actor.leave.remote() for r in self.ranks], "leave", CALL_S / 4)
            self.site.pool.give_back(self.ranks)
        except MemstoreError:
            kill_actors(self.ranks)
        self.ranks, self.spares = [], []
        with contextlib.suppress(MemstoreError):
            self.site.ask("rm", {"job": self.name, "force": True}, CALL_S / 4)
        if self.config.durable is not None:
            shutil.rmtree(Path(self.config.durable) / self.name, ignore_errors=True)

"""What asks while faults go on, each in a thread of its own: status twice a second, readers, the command line."""

from __future__ import annotations

import json
import queue
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from memstore.core.wire.calls import AskStatus
from memstore.core.wire.replies import Status
from memstore.core.wire.status_rows import AttemptStatus
from memstore.errors import MemstoreError
from memstore.testing.nemesis.checks import check_read
from memstore.testing.nemesis.hosts import Hosts
from memstore.testing.nemesis.ledger import Story
from memstore.testing.nemesis.schedule import NemesisScenario
from memstore.testing.ranks.rank_process import RankFailed, RankNursery

# -- observer -----------------------------------------------------------------------------------------
# A thread that asks for status twice a second, and notes in the ledger when hosts are live and copies complete.


PERIOD_S = 0.5
SILENT_MAX_S = 1.0
SETTLED_S = 1.0  # a status this soon after a fault may not know of it yet


class Observer:
    """The thread that keeps the newest status, a context manager."""

    def __init__(self, hosts: Hosts, story: Story, job: str) -> None:
        self.hosts, self.story, self.job = hosts, story, job
        self.newest: Status | None = None
        self.newest_s = 0.0
        self.complete_s = 0.0  # when copies were last seen to be complete
        self._why = ""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nemesis-observer", daemon=True)

    def __enter__(self) -> Observer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(30)

    def _run(self) -> None:
        while not self._over.wait(PERIOD_S):
            began_s = time.monotonic()
            try:
                status = self.hosts.ask(AskStatus())
            except (MemstoreError, OSError) as exc:
                self._note(f"status: no answer ({type(exc).__name__})")
                continue
            self.take(status, began_s)

    def take(self, status: Status, asked_s: float) -> None:
        """Note in the ledger what one status shows."""
        self.newest, self.newest_s = status, asked_s
        live = self._live(status, asked_s)
        row = next((job.newest for job in status.jobs if job.job == self.job), None)
        why = incomplete(row, live, set(self.hosts))
        if not why and row is not None and row.committed_attempt is not None and row.committed_step is not None:
            self.complete_s = asked_s
            if not row.parity or all(each.tolerated for each in row.survives):  # else ranks of a set share a host
                self.hosts.ledger.complete(row.committed_attempt, row.committed_step, asked_s)
        self._note(f"status: {why or 'copies complete'}")

    def _live(self, status: Status, asked_s: float) -> set[str]:
        """Return the hosts that are live, and end their absence in the ledger."""
        found = set()
        for row in status.hosts:
            host, harm = row.host, self.hosts.away.get(row.host)
            is_here = row.status == "live" and row.silent_s < SILENT_MAX_S
            is_held = host in self.hosts.stopped or host in self.hosts.down or self.hosts.holder(host) is None
            if not is_here or is_held or (harm is not None and asked_s < harm.at_s + SETTLED_S):
                continue
            found.add(host)
            if harm is not None and harm.until_s is None and host not in self.hosts.cut:
                harm.until_s = asked_s
        return found

    def _note(self, why: str) -> None:
        if why != self._why:
            self._why = why
            self.story.log(why)


def incomplete(newest: AttemptStatus | None, live: set[str], wanted: set[str]) -> str:
    """Return which copies of a job's newest attempt are missing, or ""."""
    if live != wanted:
        return f"hosts {', '.join(sorted(wanted - live))} are not live"
    if newest is None or newest.committed_step is None:
        return "nothing is committed"
    if newest.missing_copies or newest.short_shards:
        refusals = "; ".join(newest.refusals)
        return f"step {newest.committed_step}: {newest.missing_copies} copies missing ({refusals or 'no refusal'})"
    return ""


# -- reading ------------------------------------------------------------------------------------------
# Readers and the command line, in a thread of their own, while faults go on.


REPLY_S = 150.0
CLI_S = 120.0
VERBS = (("status",), ("ls",), ("ls", "{job}"), ("verify",), ("events", "{job}"), ("status", "--check"))
EXIT_CODES = (0, 1, 2, 3, 4)


class NemesisReading:
    """The thread that asks, a context manager; a question that comes while another one is asked is dropped."""

    def __init__(
        self, scenario: NemesisScenario, hosts: Hosts, nursery: RankNursery, observer: Observer, story: Story, job: str
    ) -> None:
        self.scenario, self.hosts, self.nursery = scenario, hosts, nursery
        self.observer, self.story, self.job = observer, story, job
        self._work: queue.Queue[Callable[[], object] | None] = queue.Queue(1)
        self._thread = threading.Thread(target=self._run, name="nemesis-reading", daemon=True)

    def __enter__(self) -> NemesisReading:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._work.put(None)
        self._thread.join(REPLY_S + CLI_S)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception as exc:
                self.story.log(f"reading: {type(exc).__name__}: {exc}")

    def _begin(self, work: Callable[[], object]) -> None:
        try:
            self._work.put_nowait(work)
        except queue.Full:
            self.story.log("reading: the last question is still under way")

    def begin_read(self, host: str, rng: random.Random) -> None:
        """Read some ranks' newest shards on a host."""
        ranks = rng.sample(range(self.scenario.world_size), rng.randint(1, self.scenario.world_size))
        self._begin(lambda: self.read(host, ranks))

    def read(self, host: str, ranks: list[int], step: int | None = None) -> list[dict[str, Any]]:
        """Read, now; return a row for each rank."""
        rank = self.nursery.start(0, {"MEMSTORE_HOST": host, "RAY_ADDRESS": ""})
        config = {**asdict(self.hosts.cluster.config), **self.scenario.job_fields}
        try:
            rank.begin(
                "read",
                job=self.job,
                config=config,
                seed=self.scenario.seed,
                nbytes=self.scenario.kib << 10,
                ranks=ranks,
                step=step,
            )
            rows: list[dict[str, Any]] = rank.finish(REPLY_S)["rows"]
        except RankFailed as failed:
            rows = [{"rank": ranks[0], "error": str(failed)}]
        except TimeoutError:
            self.story.violate("hang", f"a reader on {host} did not end within {REPLY_S:g} s (its limit is 20 s)")
            rows = []
        finally:
            rank.kill()
        check_read(rows, self.story, host)
        return rows

    def begin_cli(self, rng: random.Random) -> None:
        """Ask one verb of the command line."""
        verb = [word.format(job=self.job) for word in rng.choice(VERBS)]
        self._begin(lambda: self.cli(verb))

    def cli(self, verb: list[str]) -> tuple[int, Any]:
        """Ask, now; the answer is JSON, and an error is one line and no traceback."""
        config = self.hosts.cluster.config
        where = ["--store", config.store, "--arena-dir", config.arena_dir, "--json"]
        try:
            done = subprocess.run(
                [sys.executable, "-m", "memstore.cli", *verb, *where], capture_output=True, text=True, timeout=CLI_S
            )
        except subprocess.TimeoutExpired:
            self.story.violate("hang", f"memstore {' '.join(verb)} did not end within {CLI_S:g} s")
            return -1, None
        self.story.add("cli_calls")
        if done.returncode not in EXIT_CODES or "Traceback" in done.stderr:
            self.story.violate("cli", f"memstore {' '.join(verb)} exited with {done.returncode}: {done.stderr[-600:]}")
        return done.returncode, _documents(done.stdout)


def _documents(text: str) -> Any:
    """Return the JSON on stdout: one document, or one a line."""
    try:
        return json.loads(text)
    except ValueError:
        return [json.loads(line) for line in text.splitlines() if line.startswith("{")]

"""Readers and the command line, in a thread of their own, while faults go on."""

from __future__ import annotations

import json
import queue
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from memstore.testing.nemesis.checks import check_read
from memstore.testing.nemesis.hosts import Hosts
from memstore.testing.nemesis.observer import Observer
from memstore.testing.nemesis.schedule import NemesisScenario
from memstore.testing.nemesis.story import Story
from memstore.testing.ranks.rank_process import RankFailed, RankNursery

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

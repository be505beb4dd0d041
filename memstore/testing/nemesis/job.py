"""The job and its launcher: ranks that are started together, train in step, and are killed together when one is gone.

It is a thread of the round. In every launch all ranks connect and get, and the result is compared with the oracle. Then
each rank puts step after step; no rank goes on before all have put, as with the collectives of training.
"""

from __future__ import annotations

import contextlib
import random
import re
import select
import signal
import threading
import time
from dataclasses import asdict
from typing import Any

from memstore.testing.clusters.stepped_clock import CLOCK_VARIABLE
from memstore.testing.nemesis.checks import RestoreCheck, check_put
from memstore.testing.nemesis.hosts import Hosts
from memstore.testing.nemesis.ledger import Ledger, Story
from memstore.testing.nemesis.load_meter import LoadMeter
from memstore.testing.nemesis.schedule import NemesisScenario
from memstore.testing.ranks.rank_process import RankFailed, RankNursery, RankProcess

JOB = "train"
CONNECT_S = 60.0
GET_S = 60.0
CLOCKS_OFF_SHARE = 0.05  # of the ranks
LAUNCHER = {"TORCHELASTIC_RUN_ID": "nemesis", "RAY_ADDRESS": ""}
REPLY_S = 120.0  # a rank without a reply for longer hangs, on a loaded machine too


class JobEnded(Exception):
    """The end of a launch: a rank is gone, or the round demands it."""


class NemesisJob(threading.Thread):
    """The thread that launches the job until `end`; `hold` keeps it dead, `release` lets it be launched again."""

    def __init__(
        self,
        scenario: NemesisScenario,
        hosts: Hosts,
        nursery: RankNursery,
        ledger: Ledger,
        story: Story,
        meter: LoadMeter,
    ) -> None:
        super().__init__(name="nemesis-job", daemon=True)
        self.scenario, self.hosts, self.nursery = scenario, hosts, nursery
        self.ledger, self.story, self.meter = ledger, story, meter
        self.rng = random.Random(f"job {scenario.seed}")
        self.ranks: list[RankProcess] = []
        self.place: list[str] = []  # host by rank
        self.attempt = -1
        self._skips_logged: set[str] = set()  # reasons since the last commit
        self.is_broken = False
        self.lives_count = 0
        self.commit_s = 0.0  # when a new commit was last reported
        self.paused_s: list[list[float]] = []  # (from, to) of ranks that had SIGSTOP
        self.restores = RestoreCheck(scenario, ledger, story)
        self.first_counts: list[dict[str, int]] = []
        self.last_counts: list[dict[str, int]] = []
        self._held, self._over, self._closing = threading.Event(), threading.Event(), threading.Event()
        self._is_dead = threading.Event()
        self._is_dead.set()

    # -- the round's side ---------------------------------------------------------------------

    def hold(self, why: str) -> None:
        """Kill all ranks and start none until `release`."""
        self.story.log(f"the job is killed: {why}")
        self._held.set()
        self.kill_ranks()
        if not self._is_dead.wait(REPLY_S):
            raise AssertionError("the job's thread does not end its life")

    def close(self) -> None:
        """Let all ranks leave the job after their current step, and start none until `release`."""
        self.story.log("the job is closed")
        self._closing.set()
        self._held.set()
        if not self._is_dead.wait(REPLY_S):
            raise AssertionError("the job's thread does not close its life")

    def release(self) -> None:
        """Let the job be launched again."""
        self._closing.clear()
        self._held.clear()

    def kill_ranks(self, on_host: str = "") -> None:
        """Kill the ranks of one host, or all."""
        for rank in list(self.ranks):
            if not on_host or self.place[rank.rank] == on_host:
                with contextlib.suppress(OSError):
                    rank.send_signal(signal.SIGKILL)

    def end(self) -> None:
        """Kill the job for good."""
        self._over.set()
        self._held.set()
        self.kill_ranks()
        self.join(REPLY_S)

    # -- the thread ---------------------------------------------------------------------------

    def run(self) -> None:
        """Launch again and again."""
        while not self._over.is_set():
            if self._held.is_set():
                time.sleep(0.02)
                continue
            self._is_dead.clear()
            try:
                self._live()
            except JobEnded as exc:
                self.story.log(f"job: {exc}")
            except Exception as exc:  # a defect of the nemesis must not count as a clean round
                self.story.violate("nemesis-broke", f"{type(exc).__name__}: {exc}")
                self.is_broken = True
                self._over.set()
            finally:
                for rank in self.ranks:
                    with contextlib.suppress(OSError, ValueError):
                        rank.kill()
                self.ranks = []
                self._is_dead.set()
            if not self._held.is_set():
                self._over.wait(self.scenario.restart_delay_s)

    def _live(self) -> None:
        self.lives_count += 1
        self._place_ranks()
        self._connect()
        step = self._restore()
        while not self._closing.is_set():
            began_s = time.monotonic()
            self._put(step)
            step += 1
            left_s = self.scenario.step_s - (time.monotonic() - began_s)
            if left_s > 0:
                time.sleep(left_s)
        self._leave()

    def _leave(self) -> None:
        """Wait for puts that are not finished, count what the ranks hold, close."""
        time.sleep(self.scenario.step_s)
        for do in ("levels", "counts", "close"):
            replies = [reply for reply in self._all(do, REPLY_S) if isinstance(reply, dict)]
            if do == "counts":
                self.last_counts = replies
            for reply in replies if do == "levels" else ():
                self._take_levels(reply["levels"])
        raise JobEnded("closed")

    def _place_ranks(self) -> None:
        """Start the ranks on the hosts that are up, in turn or shuffled, as the scenario says."""
        usable = [host for host in self.hosts if host not in self.hosts.down] or sorted(self.hosts)
        if self.lives_count > 1 and self.rng.random() < self.scenario.shuffle_share:
            self.rng.shuffle(usable)
        elif len(usable) > self.scenario.world_size and self.scenario.leaves_hosts_without_ranks:
            usable = usable[: self.scenario.world_size]
        self.place = [usable[rank % len(usable)] for rank in range(self.scenario.world_size)]
        self.story.log(f"launch {self.lives_count}: ranks on {' '.join(self.place)}")
        self.paused_s = []
        self.ranks = [
            self.nursery.start(rank, {**self._clock(rank), "MEMSTORE_HOST": host, **LAUNCHER})
            for rank, host in enumerate(self.place)
        ]

    def _clock(self, rank: int) -> dict[str, str]:
        """Choose how far a rank's wall clock is off, most often not at all."""
        if self.rng.random() > CLOCKS_OFF_SHARE:
            return {}
        shift_s = self.rng.choice((-90_000.0, -60.0, 60.0, 90_000.0))
        self.story.fault("step_clock", f"rank {rank} has a clock {shift_s:+g} s")
        return {CLOCK_VARIABLE: str(shift_s)}

    def _all(self, do: str, reply_s: float, **command: Any) -> list[dict[str, Any] | RankFailed]:
        """Send all ranks one command; JobEnded if one is gone, or the round ends the launch.

        A rank that puts does not know that another is gone, so all others put the step as well. A first put waits for
        all ranks, longer than any launcher takes to notice; so what has not come soon after that is not waited for.
        """
        if self._held.is_set() and not self._closing.is_set():
            raise JobEnded("held")
        begun, gone = [], ""
        for rank in self.ranks:
            try:
                rank.begin(do, **({"rank": rank.rank} if do == "connect" else {}), **command)
                begun.append(rank)
            except OSError:
                gone = f"rank {rank.rank} was gone before {do}"
        replies: dict[int, dict[str, Any] | RankFailed] = {}
        alone_s = self.scenario.notice_s + self.scenario.stall_budget_s
        until_s = time.monotonic() + (alone_s if gone else reply_s)
        while begun and (not gone or do == "puts"):  # in any order, because the rank that others wait for may be gone
            channels = [rank.channel for rank in begun]
            ready, _, _ = select.select(channels, [], [], max(0.0, until_s - time.monotonic()))
            if not ready and gone:
                raise JobEnded(gone)
            if not ready:
                if not self._held.is_set():
                    names = ", ".join(str(rank.rank) for rank in begun)
                    self.story.violate("hang", f"ranks {names} did not answer {do!r} within {reply_s:g} s")
                raise JobEnded(f"rank {begun[0].rank} hangs in {do}")
            for rank in [rank for rank in begun if rank.channel in ready]:
                begun.remove(rank)
                try:
                    replies[rank.rank] = rank.finish(REPLY_S)
                except RankFailed as failed:
                    replies[rank.rank] = failed
                except (EOFError, OSError):
                    gone = f"rank {rank.rank} was gone in {do}"
                    until_s = min(until_s, time.monotonic() + alone_s)
        if gone:
            if not self._held.is_set():
                time.sleep(self.scenario.notice_s)  # the launcher notices late
            raise JobEnded(gone)
        return [reply for _, reply in sorted(replies.items())]

    def _connect(self) -> None:
        config = {**asdict(self.hosts.cluster.config), **self.scenario.job_fields, "connect_timeout_s": CONNECT_S}
        key = f"launch-{self.lives_count}" if self.scenario.has_key else None
        replies = self._all(
            "connect",
            REPLY_S,
            job=JOB,
            world_size=self.scenario.world_size,
            config=config,
            seed=self.scenario.seed,
            nbytes=self.scenario.kib << 10,
            attempt=key,
        )
        failed = [reply for reply in replies if isinstance(reply, RankFailed)]
        if failed:
            raise JobEnded(f"connect failed: {failed[0]}")
        self.attempt = max(int(reply["attempt"]) for reply in replies if isinstance(reply, dict))
        self.first_counts = [reply for reply in replies if isinstance(reply, dict)]

    def _restore(self) -> int:
        """Get on all ranks and judge the replies; return the step to go on with."""
        began_s = time.monotonic()
        replies = self._all("get", REPLY_S, timeout_s=GET_S)
        failed = [reply for reply in replies if isinstance(reply, RankFailed)]
        got = [reply for reply in replies if isinstance(reply, dict)]
        self.restores.judge(self.attempt, got, failed, began_s, time.monotonic(), self.place)
        if failed:
            raise JobEnded(f"get failed: {failed[0]}")
        return 0 if got[0]["step"] is None else int(got[0]["step"]) + 1

    def _put(self, step: int) -> None:
        now_s = time.monotonic()
        for process in self.ranks:
            self.ledger.began_put(self.attempt, step, process.rank, now_s)
        for rank, reply in enumerate(self._all("puts", REPLY_S, first=step, last=step)):
            if isinstance(reply, RankFailed):
                self.story.violate("rank-failed", f"rank {rank} step {step}: {reply}")
                raise JobEnded(f"put failed: {reply}")
            self._take_levels(reply["levels"])
            row = reply["rows"][0]
            check_put(self.scenario, self.story, self.meter, self.paused_s, rank, row)
            if row["error"]:
                raise JobEnded(f"put raised on rank {rank}: {row['error']}")

    def _log_skip(self, step: int, level: str, reason: str) -> None:
        """Add a line about skipped steps to the story: one for each reason until the next commit."""
        shape = re.sub(r"[0-9a-f]{8,}|\d+", "#", f"{level}: {reason}")
        if level != "superseded" and shape not in self._skips_logged:
            self._skips_logged.add(shape)
            self.story.log(f"step {step} {level}: {reason}")

    def _take_levels(self, levels: list[list[Any]]) -> None:
        for step, level, is_degraded, reason in levels:
            key = (self.attempt, int(step))
            if level in ("committed", "durable"):
                if self.ledger.committed(key, degraded=bool(is_degraded)):
                    self.commit_s = time.monotonic()
                    self._skips_logged.clear()
                    self.story.add("steps_committed")
                if level == "durable":
                    self.ledger.became_durable(key)
                    self.story.add("tickets_durable")
            elif level in ("skipped", "superseded", "failed"):
                self.story.add(f"tickets_{level}")
                self._log_skip(int(step), str(level), str(reason))

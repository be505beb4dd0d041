"""One round: a store and a job of its own, the faults of its schedule, then all that must hold afterwards."""

from __future__ import annotations

import contextlib
import random
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from memstore.testing.clusters.processes import ProcessCluster
from memstore.testing.faults.catalogue import Fault
from memstore.testing.nemesis import leaks
from memstore.testing.nemesis.checks import wait_limit_s
from memstore.testing.nemesis.faults import Faults
from memstore.testing.nemesis.hosts import Hosts
from memstore.testing.nemesis.job import JOB, NemesisJob
from memstore.testing.nemesis.ledger import Ledger, Story
from memstore.testing.nemesis.load_meter import LoadMeter
from memstore.testing.nemesis.observers import NemesisReading, Observer, incomplete
from memstore.testing.nemesis.ray_hosts import RayHosts
from memstore.testing.nemesis.schedule import NemesisScenario
from memstore.testing.nemesis.storage import NemesisStorage
from memstore.testing.ranks.rank_process import LOG_VARIABLE, RankNursery

ARENA_BYTES = 192 << 20
TICK_S = 0.02
FIRST_COMMIT_S = 90.0  # limit of a start on a loaded machine
COMMITS_RESUME_S = 30.0
COPIES_COMPLETE_S = 60.0
HOSTS_LIVE_S = 30.0
QUIET_S = 1.0


class NemesisRound:
    """A round of one scenario; `story` has what happened."""

    def __init__(
        self, scenario: NemesisScenario, nursery: RankNursery, meter: LoadMeter, folder: Path, run: str, shm: Path
    ) -> None:
        self.scenario, self.nursery, self.meter, self.folder, self.run = scenario, nursery, meter, folder, run
        self.story = Story()
        domains = scenario.domains()
        self.ledger = Ledger(scenario.replicas, scenario.keep_steps, frozenset(domains.values()))
        self.arena_dir = shm / f"nemesis-{secrets.token_hex(4)}"
        self.domains = domains
        self.rng = random.Random(f"ending {scenario.seed}")

    def play(self) -> Story:
        """Play the round; count and remove what it leaves behind."""
        self.story.log(self.scenario.text())
        known = leaks.processes(self.run)
        self.arena_dir.mkdir(mode=0o700)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.nursery.env[LOG_VARIABLE] = str(self.folder / "ranks.log")
        try:
            with contextlib.ExitStack() as stack:
                self._play(stack)
            leaks.check_gone(self.run, known, self.arena_dir, self.story)
        except Exception as exc:
            self.story.violate("nemesis-broke", f"{type(exc).__name__}: {exc}")
        finally:
            shutil.rmtree(self.arena_dir, ignore_errors=True)
        return self.story

    def _play(self, stack: contextlib.ExitStack) -> None:
        scenario = self.scenario
        storage = stack.enter_context(NemesisStorage(scenario.storage, self.folder / "storage"))
        if scenario.shape == "ray":
            self.hosts: Hosts = RayHosts(scenario, self.ledger, self.story, self.arena_dir, ARENA_BYTES)
        else:
            self.hosts = Hosts(self._processes(), self.ledger, self.story, self.domains)
        stack.callback(self.hosts.close)
        self.hosts.extra_env = storage.environment
        if storage.url is not None:
            scenario.job_fields.update(durable=storage.url, durable_every=5)
        self.hosts.open()
        self.job = NemesisJob(scenario, self.hosts, self.nursery, self.ledger, self.story, self.meter)
        self.observer = stack.enter_context(Observer(self.hosts, self.story, JOB))
        self.reading = stack.enter_context(
            NemesisReading(scenario, self.hosts, self.nursery, self.observer, self.story, JOB)
        )
        self.faults = Faults(scenario, self.hosts, self.job, self.ledger, self.story, self.reading, storage)
        stack.callback(self.job.end)
        self.job.start()
        if not self._until(lambda: self.job.commit_s > 0, FIRST_COMMIT_S, "the first commit"):
            self.story.violate("no-commits", f"nothing was committed in {FIRST_COMMIT_S:g} s before any fault")
            return
        self._break_things()
        self._repair_and_check()

    def _processes(self) -> ProcessCluster:
        scenario = self.scenario
        return ProcessCluster(
            self.folder / "cluster",
            scenario.hosts,
            arena_bytes=ARENA_BYTES,
            arena_dir=str(self.arena_dir),
            proxied=list(scenario.hosts) if scenario.has_proxies else (),
            **scenario.store_fields,
        )

    # -- phases -------------------------------------------------------------------------------

    def _break_things(self) -> None:
        began_s = time.monotonic()
        for fault in self.scenario.faults:
            due_s = began_s + fault.at_s
            while time.monotonic() < due_s:
                self._tick()
                time.sleep(TICK_S)
            self.faults.play(fault)
        self._until(lambda: not self.faults.undo, 15.0, "")

    def _repair_and_check(self) -> None:
        self.faults.heal()
        healed_s = max(time.monotonic(), self.faults.last_s)
        self.story.log("everything is repaired")
        if self.faults.held_for_restart or self.scenario.ending == "dead":
            self.job.hold("the round ends with a dead job")
            self._await_hosts()
        else:
            self._check_resume(healed_s)
            if self.scenario.ending == "closed":
                self.job.close()
                self._let_time_pass()
        self._verify()
        if self.scenario.shape != "memory_lost":  # there no copy exists until a launch asks for the durable step
            self._check_complete(healed_s)
            if self.scenario.ending == "dead":
                self._lose_one_more()
        self.job.hold("the round restarts it")
        leaks.check_folders(self.hosts, self.story)
        if self.scenario.shape != "memory_lost":
            self._read_all()
        restarted_s = time.monotonic()
        self._await_hosts()
        self.job.release()
        self._check_resume(max(restarted_s, time.monotonic()))
        self._check_complete(restarted_s)
        self.job.close()
        leaks.check_rank_growth(self.job.first_counts, self.job.last_counts, self.story)
        leaks.check_processes_at_rest(self.hosts, self.story)
        self.story.log("the round is over")

    def _until(self, condition: Callable[[], bool], limit_s: float, what: str) -> bool:
        """Keep the round going until a condition holds; False if that took longer than the limit and the load."""
        began_s = time.monotonic()
        while not condition():
            self._tick()
            if self.job_broke():
                raise RuntimeError("the job's thread broke")
            time.sleep(TICK_S)
            if time.monotonic() - began_s > wait_limit_s(limit_s, self.meter, began_s):
                if what:
                    self.story.log(f"waited {time.monotonic() - began_s:.1f} s in vain for {what}")
                return False
        return True

    def job_broke(self) -> bool:
        """Say whether the job's thread ended by a mistake of its own."""
        return hasattr(self, "job") and self.job.is_broken

    def _tick(self) -> None:
        """Undo faults whose time is over, and start processes that ended by themselves."""
        if hasattr(self, "faults"):
            self.faults.tick()
        self.hosts.supervise()

    # -- checks -------------------------------------------------------------------------------

    def _await_hosts(self) -> None:
        """Demand that the controller counts all hosts live again."""

        def are_live() -> bool:
            return all(harm.until_s is not None for harm in self.hosts.away.values())

        if not self._until(are_live, HOSTS_LIVE_S, "all hosts to be live"):
            away = sorted(host for host, harm in self.hosts.away.items() if harm.until_s is None)
            self.story.violate("host-away", f"{', '.join(away)} not live {HOSTS_LIVE_S:g} s after the last fault")

    def _check_resume(self, since_s: float) -> None:
        self.job.release()
        limit_s = COMMITS_RESUME_S + self.scenario.restart_delay_s + self.scenario.notice_s
        if not self._until(lambda: self.job.commit_s > since_s, limit_s, "a commit"):
            self.story.violate("no-commits", f"nothing was committed within {limit_s:g} s of the last fault")

    def _check_complete(self, since_s: float) -> None:
        if self.ledger.newest_commit() is None or self._expires():
            return
        if not self._until(lambda: self.observer.complete_s > since_s, COPIES_COMPLETE_S, "complete copies"):
            self.story.violate("copies-incomplete", f"{COPIES_COMPLETE_S:g} s after the last fault: {self._missing()}")

    def _expires(self) -> bool:
        """Return whether the job leaves memory soon after it closed, as its steps are durable."""
        return bool(self.scenario.storage) and self.scenario.job_ttl_s < COPIES_COMPLETE_S

    def _missing(self) -> str:
        status = self.observer.newest
        if status is None:
            return "no status"
        newest = next((job.newest for job in status.jobs if job.job == JOB), None)
        live = {row.host for row in status.hosts if row.status == "live"}
        return incomplete(newest, live, set(self.hosts)) or "complete by now"

    def _verify(self) -> None:
        """Digest everything again, so that all rot is found."""
        before_s = time.monotonic()
        code, answer = self.reading.cli(["verify"])
        self.story.log(f"verify exits with {code}: {answer.get('damaged') if isinstance(answer, dict) else answer} bad")
        if code in (0, 4):
            self.ledger.verified(before_s)

    def _let_time_pass(self) -> None:
        """Let `job_ttl_s` pass: a closed job leaves memory if its newest step is durable, and stays otherwise."""
        if not self._expires():
            return
        if self.rng.random() < 0.5 and self.faults.storage.empty():
            self.ledger.emptied_storage()
            self.story.fault("empty_storage", "all that was durable is removed")
        self._until(lambda: False, self.scenario.job_ttl_s + 2.0, "")

    def _lose_one_more(self) -> None:
        """Lose replicas - 1 domains, which the promise allows once the store reports all copies."""
        hosts = [host for host in self.hosts if self.scenario.shape != "rack_then_host" or self.domains[host] == "b"]
        if self.scenario.replicas > 1 and self.observer.complete_s:
            host = list(self.hosts).index(self.rng.choice(hosts))
            self.faults.play(Fault(0.0, "kill-host", (host,), for_s=0.5))
            self._until(lambda: not self.faults.undo, 15.0, "")
            self._until(lambda: False, QUIET_S, "")

    def _read_all(self) -> None:
        """Demand that a reader gets every rank's newest shard."""
        live = [host for host in self.hosts if self.hosts.holder(host) is not None]
        if live and self.ledger.newest_commit() is not None:
            self.reading.read(self.rng.choice(live), list(range(self.scenario.world_size)))

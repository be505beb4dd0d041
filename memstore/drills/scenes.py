"""One class per drill: whom to hit, how, and how the store is seen to notice. The phases are the runner's."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any

from memstore.cluster import ask
from memstore.drills.ranks import PutRow, collect
from memstore.errors import ConfigError, DrillError

if TYPE_CHECKING:
    from memstore.drills.runner import DrillRun

OUTAGE_STEPS = 12
OUTAGE_PAUSE_S = 0.25
RESUME_S = 60.0  # commits go on well within this after any of these faults
VERIFY_S = 300.0
STALL_SLACK_S = 1.0  # a put may take its budget, and a busy machine this much to give the thread back


class Scene:
    """What is common: a victim rank drawn by the seed, its host, and every host with a copy of its shard."""

    def __init__(self, run: DrillRun) -> None:
        self.run, self.site = run, run.site
        self.rng: random.Random = run.rng
        self.rank = -1
        self.holders: list[str] = []  # the rank's own host first
        self.hosts: list[str] = []  # hosts that lose their memory
        self.effect = ""  # how it was checked that the fault is there, once it is

    def choose(self) -> None:
        """Draw the victim; the copies are all in place now.

        Raises:
            ConfigError: the host named with --victim has no rank of the drill.
        """
        candidates = [i for i, r in enumerate(self.run.ranks) if self.run.options.victim in (None, r.host)]
        if not candidates:
            have = ", ".join(r.host for r in self.run.ranks)
            raise ConfigError(f"--victim {self.run.options.victim}: the drill's ranks are on {have}; name one of them")
        candidates = [i for i in candidates if self.may_hit(self.holders_of(i))]
        if not candidates:
            raise DrillError(
                "every choice would take Ray's head, which carries the drill itself: run it with more hosts (--hosts)"
            )
        self.rank = self.rng.choice(candidates)
        self.holders = self.holders_of(self.rank)
        if self.run.options.is_beyond:
            self.hosts = list(self.holders)

    def may_hit(self, holders: list[str]) -> bool:
        """Say whether the drill may be played on a rank with its shard on these hosts."""
        return True

    def holders_of(self, rank: int) -> list[str]:
        """Every host with a copy of a rank's newest shard: its own, then its targets."""
        home = self.run.ranks[rank].host
        return [home, *self.run.job_before["targets"].get(home, ())]

    def victims(self) -> list[str]:
        """Names for the first line and for --json."""
        return [f"rank {self.rank} on {self.holders[0]}", *self.hosts]

    def leaves(self, host: str) -> bool:
        """Say whether a host that loses its memory stays away, so that its ranks need another."""
        return False

    def inject(self) -> str:
        """Do it; return what was done, in words. Returns only when it has taken effect."""
        raise NotImplementedError

    def detected(self, body: dict[str, Any], injected_s: float) -> str | None:
        """Say by what the store's status shows that it noticed; None while it does not."""
        raise NotImplementedError

    def settle(self) -> None:
        """What must happen between the store's noticing and the launcher's restart."""

    def lose_memories(self) -> list[str]:
        """The twin's part: every host with a copy loses its memory; checked host by host."""
        if self.hosts:
            self.effect += f"; {', '.join(self.hosts)}: processes gone, ports silent, arena files gone (each checked)"
        return [
            f"{host} lost its holder and its arena ({self.site.lose_memory(host, self.run.ranks) >> 20} MiB)"
            for host in self.hosts
        ]

    def host_noticed(self, host: str, body: dict[str, Any], injected_s: float) -> str | None:
        """Say how the controller learned that a host's holder died; one that is back already counts too."""
        row = next((r for r in body["hosts"] if r["host"] == host), None)
        if row is None:
            return f"{host} is no longer a member"
        if row["status"] == "dead":
            return f"{host}: {row['why']}"
        is_newer = row["status_s"] < time.monotonic() - injected_s
        return f"{host} {row['why']}" if is_newer and row["why"] == "joined again" else None

    # -- puts during an outage ------------------------------------------------------------------

    def begin_puts(self, count: int = OUTAGE_STEPS, pause_s: float = OUTAGE_PAUSE_S) -> list[Any]:
        """All ranks go on putting while the fault happens."""
        first = self.run.report.step_before or 0
        return [r.actor.put.remote(first + 1, first + count, pause_s) for r in self.run.ranks]

    def end_puts(self, calls: list[Any]) -> None:
        """Every put must have returned within its budget and raised nothing; then commits must go on."""
        rows: list[PutRow] = [row for rows in collect(calls, "puts during the outage") for row in rows]
        worst = max(rows, key=lambda row: row.stall_s)
        self.run.report.stall_s = round(worst.stall_s, 3)
        self.run.broken += [f"a put of step {row.step} raised {row.error}" for row in rows if row.error][:3]
        budget_s = self.run.options.config.stall_budget_s + STALL_SLACK_S
        if worst.stall_s > budget_s:
            self.run.broken.append(
                f"the put of step {worst.step} took {worst.stall_s:.1f} s of at most {budget_s:.1f} s"
            )
        self.run.timeline.line(
            "training", f"{len(rows)} puts during the outage, none raised, longest stall {worst.stall_s * 1e3:.0f} ms"
        )

    def commit_again(self) -> None:
        """One more step by all ranks must be committed."""
        step = (self.run.report.step_before or 0) + OUTAGE_STEPS + 1
        first = step
        deadline_s = time.monotonic() + RESUME_S
        while True:
            collect([r.actor.put.remote(step, step) for r in self.run.ranks], "put after the outage")
            newest = self.site.job(self.run.job)["committed_step"]
            if newest is not None and newest >= first:
                break
            if time.monotonic() > deadline_s:
                self.run.broken.append(f"no step was committed within {RESUME_S:g} s after the outage")
                return
            step += 1
            time.sleep(OUTAGE_PAUSE_S)
        self.run.timeline.line("resumed", f"step {newest} committed after the outage")


class KillHost(Scene):
    """The host of one rank; beyond: every host with a copy of that rank's shard."""

    def choose(self) -> None:
        super().choose()
        self.hosts = self.hosts or self.holders[:1]
        for host in self.hosts if not self.site.is_own else ():
            others = [job for job in self.site.do(host, "jobs_here", self.site.folder(host)) if job != self.run.job]
            if others and not self.run.options.allows_data_loss:
                raise DrillError(
                    f"host {host} also holds shards of {', '.join(others[:5])}: destroying its arena would cost them a "
                    "copy. Name another host with --victim, or pass --allow-data-loss"
                )

    def victims(self) -> list[str]:
        return self.hosts

    def leaves(self, host: str) -> bool:
        return True  # on a running cluster it comes back empty, but a launcher would not wait for the machine

    def may_hit(self, holders: list[str]) -> bool:
        hosts = holders if self.run.options.is_beyond else holders[:1]
        return self.site.may_lose(hosts)

    def inject(self) -> str:
        done = "; ".join([self.site.lose_host(host, self.run.ranks) for host in self.hosts])
        self.effect = f"{', '.join(self.hosts)}: processes gone, port silent, arena file gone (each checked)"
        return done

    def detected(self, body: dict[str, Any], injected_s: float) -> str | None:
        found = [self.host_noticed(host, body, injected_s) for host in self.hosts]
        return "; ".join(str(why) for why in found) if all(found) else None


class KillRank(Scene):
    """One rank in the middle of its puts."""

    def inject(self) -> str:
        victim = self.run.ranks[self.rank]
        if not self.run.options.is_beyond:
            self.begin_puts(pause_s=0.0)
            time.sleep(self.rng.uniform(0.0, 0.3))  # somewhere between two puts or inside one
        process = [(victim.pid, victim.start)]
        if not self.site.do(victim.host, "kill", process):
            raise DrillError(f"rank {self.rank} (pid {victim.pid}) was gone before it was killed")
        self.site.do(victim.host, "wait_gone", process)
        self.effect = f"pid {victim.pid} is gone (checked)"
        return "; ".join([f"SIGKILL to rank {self.rank} (pid {victim.pid}) on {victim.host}", *self.lose_memories()])

    def detected(self, body: dict[str, Any], injected_s: float) -> str | None:
        job = next((j for j in body["jobs"] if j["job"] == self.run.job), None)
        if job is None or job.get("ranks_alive", 0) >= len(self.run.ranks):
            return None
        found = [self.host_noticed(host, body, injected_s) for host in self.hosts]
        return f"{job['ranks_alive']} of {len(self.run.ranks)} ranks alive" if all(found) else None


class KillHolder(Scene):
    """The holder of one rank's host, while all ranks put; the arena stays for its successor."""

    def victims(self) -> list[str]:
        return [f"the holder of {self.holders[0]}", *self.hosts[1:]]

    def inject(self) -> str:
        host = self.holders[0]
        folder, record = self.site.folder(host), self.site.record(host)
        if self.run.options.is_beyond:
            self.effect = "the holder is gone with its memory"
            return "; ".join(self.lose_memories())
        self.arena = self.site.do(host, "arena_identity", folder)
        self.puts = self.begin_puts()
        process = self.site.do(host, "holder_process", folder)
        self.site.do(host, "kill", [process])
        self.site.do(host, "wait_gone", [process])
        self.old_pid = process[0]
        self.site.do(host, "check_silent", record, self.site.config.store, self.site.do(host, "secret_of", folder))
        self.effect = f"pid {process[0]} is gone, its port does not answer (checked)"
        return f"SIGKILL to the holder of {host} (pid {process[0]}); its arena stays"

    def detected(self, body: dict[str, Any], injected_s: float) -> str | None:
        return self.host_noticed(self.holders[0], body, injected_s)

    def settle(self) -> None:
        if self.run.options.is_beyond:
            return
        host = self.holders[0]
        folder = self.site.folder(host)
        new_pid = self.site.wait_for(f"a new holder on {host}", lambda: self._new_pid(host))
        if self.site.do(host, "arena_identity", folder) != self.arena:
            self.run.broken.append(f"the new holder of {host} made a new arena instead of adopting the old one")
        self.run.timeline.line("adopted", f"holder pid {new_pid} took over the arena of pid {self.old_pid}")
        self.end_puts(self.puts)
        self.commit_again()

    def _new_pid(self, host: str) -> int | None:
        pid = int(self.site.record(host)["pid"])
        return pid if pid != self.old_pid and host in self.site.live_hosts() else None


class KillController(Scene):
    """The controller, while all ranks put."""

    def choose(self) -> None:
        super().choose()
        self.term = int(self.site.status()["term"])

    def victims(self) -> list[str]:
        return ["the controller", *self.hosts]

    def inject(self) -> str:
        host, process = self.site.controller_process()
        self.puts = [] if self.run.options.is_beyond else self.begin_puts()
        self.site.do(host, "kill", [process])
        self.site.do(host, "wait_gone", [process])
        self.effect = f"pid {process[0]} is gone (checked)"
        return "; ".join([f"SIGKILL to the controller (pid {process[0]}, term {self.term})", *self.lose_memories()])

    def detected(self, body: dict[str, Any], injected_s: float) -> str | None:
        return f"a controller of term {body['term']} took over" if body["term"] > self.term else None

    def settle(self) -> None:
        if self.puts:
            self.end_puts(self.puts)
            self.commit_again()


class CorruptChunk(Scene):
    """One chunk of one copy; beyond: the same chunk of every copy."""

    def choose(self) -> None:
        super().choose()
        self.hosts = []  # nobody loses a whole memory here
        self.where = self.rng.random()
        self.flips: dict[str, dict[str, Any]] = {}
        self.answer: dict[str, Any] | None = None
        self.hit = self.holders if self.run.options.is_beyond else [self.rng.choice(self.holders)]

    def victims(self) -> list[str]:
        return [f"rank {self.rank}'s copy on {host}" for host in self.hit]

    def inject(self) -> str:
        step = self.run.report.step_before
        flips = {
            host: self.site.do(host, "flip_chunk", self.site.folder(host), self.run.job, step, self.rank, self.where)
            for host in self.hit
        }
        self.effect = f"its slot in {len(flips)} arena file{'s' * (len(flips) > 1)} has another digest now (checked)"
        self.flips = flips
        return (
            f"one bit of chunk {flips[self.hit[0]]['chunk']} of rank {self.rank}, step {step}, on {', '.join(self.hit)}"
        )

    def detected(self, body: dict[str, Any], injected_s: float) -> str | None:
        if not self.flips:
            return None
        if self.answer is None:
            self.answer = ask("verify", {"job": self.run.job}, config=self.site.config, timeout_s=VERIFY_S)
        for host, flip in self.flips.items():
            if self.site.do(host, "is_sealed_damage", self.site.folder(host), flip):
                return None
        found = {host: self.answer["hosts"][host]["damaged"] for host in self.hit}
        by_verify = ", ".join(f"{count} on {host}" for host, count in found.items() if count)
        return f"verify took out {by_verify}" if by_verify else "the scrubber had taken it out before verify came"

    def settle(self) -> None:
        if not self.run.options.is_beyond:
            self.run.wait_redundant()
            self.run.timeline.line("repaired", f"{self.run.copies_text()} again, from a peer")


SCENES: dict[str, type[Scene]] = {
    "kill-host": KillHost,
    "kill-rank": KillRank,
    "kill-holder": KillHolder,
    "kill-controller": KillController,
    "corrupt-chunk": CorruptChunk,
}

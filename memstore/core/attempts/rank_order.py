"""assign_ranks() is collective: all ranks of an untouched attempt are renumbered once, by one fact. Pure (R20, R27).

asked --all ranks--> [hosts awaited, R24] --> AttemptOpened with `order` recorded --spread--> fencing --> answered
"""

from __future__ import annotations

from dataclasses import dataclass, field

from memstore.core.attempts.gathering import Entrant
from memstore.core.attempts.join import Attempts
from memstore.core.cluster.collective import attempt_of, gather_timeout, job_removed, missing_ranks, newer_attempt
from memstore.core.cluster.effects import Effects
from memstore.core.cluster.job import Attempt, Call, Job
from memstore.core.cluster.rank_calls import RankCalls
from memstore.core.cluster.state import ClusterState
from memstore.core.journal.replication import Journal
from memstore.core.targets.targets import ClusterView
from memstore.core.wire.calls import AssignRanks
from recovery.mesh_order import MeshOrder, mesh_order


@dataclass(slots=True)
class Asked:
    """Ranks that called assign_ranks() in one attempt."""

    attempt: int
    together: int
    since_s: float
    complete_s: float | None = None
    calls: RankCalls[AssignRanks] = field(default_factory=RankCalls)


class MeshOrders:
    """The orders of ranks, of all jobs."""

    def __init__(
        self, state: ClusterState, out: Effects, journal: Journal, view: ClusterView, attempts: Attempts
    ) -> None:
        self.state, self.out, self.journal, self.view, self.attempts = state, out, journal, view, attempts
        self.asked: dict[str, Asked] = {}

    def ask(self, now: float, call: Call[AssignRanks]) -> None:
        """Handle a rank's call for the order. An attempt keeps its order once it has got, put or prepared."""
        request, found = call.request, attempt_of(self.state, self.out, call)
        if found is None:
            return
        (job, attempt), entrant = found, _entrant(call)
        if self.attempts.is_repeated(job.name, entrant):
            return
        if attempt.order or attempt.has_restored or attempt.has_put or attempt.needs:
            self.attempts.answer_member(job.name, attempt, entrant)
            return
        asked = self.asked.get(job.name)
        if asked is None or asked.attempt != attempt.attempt_number:
            asked = self.asked[job.name] = Asked(attempt.attempt_number, request.together, now)
        if asked.together != request.together:
            self.out.refuse(
                call, "ConfigError",
                f"job {job.name!r}: this rank asks for together={request.together}, the ranks waiting for "
                f"together={asked.together}: all ranks must pass the same to assign_ranks()",
            )  # fmt: skip
            return
        asked.calls[request.rank] = call
        if len(asked.calls) == attempt.world_size:
            asked.complete_s = now
            self._decide(now, job, attempt, asked)

    def _decide(self, now: float, job: Job, attempt: Attempt, asked: Asked) -> None:
        """Decide from the fence's inventories (R21), after waiting for hosts that the newest commit names (R24)."""
        if attempt.phase != "open" or asked.complete_s is None:
            return
        is_grace_over = now - asked.complete_s >= self.state.rules.recovery_grace_s
        found = self._order(job, attempt, asked, is_grace_over=is_grace_over)
        if found is None or (found.wait_for and not is_grace_over):
            return
        del self.asked[job.name]
        self.out.log(
            f"job {job.name!r}: assign_ranks() moves {found.moved_bytes:,} bytes instead of "
            f"{found.moved_bytes_before:,}"
        )
        self.attempts.opening.setdefault(job.name, []).extend(map(_entrant, asked.calls.values()))
        renumbered = attempt.written_again(job.name, self.state.wall_s, found.order)
        self.journal.record(self.view.with_writers(renumbered))

    def _order(self, job: Job, attempt: Attempt, asked: Asked, *, is_grace_over: bool) -> MeshOrder | None:
        try:
            return mesh_order(
                job.inventory(
                    live=self.state.hosts.live_ids(),
                    silent=() if is_grace_over else self.view.silent_hosts(job),
                ),
                job.spans(attempt.attempt_number),
                process_hosts={rank: member.host_id for rank, member in attempt.members.items()},
                together=asked.together,
            )
        except ValueError as exc:
            self._dismiss(job.name, "ConfigError", f"job {job.name!r}: {exc}")
            return None

    def rank_gone(self, job: Job, rank: int) -> None:
        """Drop the call of a dead rank: the others wait for the process that takes its place."""
        asked = self.asked.get(job.name)
        if asked is not None and asked.calls.pop(rank, None) is not None:
            asked.complete_s = None

    def forget(self, name: str) -> None:
        """Forget a removed job."""
        self._dismiss(name, *job_removed(name))

    def tick(self, now: float) -> None:
        """Check deadlines: of ranks that never asked, attempts that are over, hosts that were awaited."""
        for name, asked in list(self.asked.items()):
            job = self.state.jobs[name]
            attempt = job.newest
            if attempt is None or attempt.attempt_number != asked.attempt:
                self._dismiss(name, *newer_attempt(name))
            elif asked.complete_s is not None:
                self._decide(now, job, attempt, asked)
            elif now - asked.since_s > float(attempt.config["connect_timeout_s"]):
                refusal = gather_timeout(
                    f"assign_ranks() of job {name!r}", round(now - asked.since_s),
                    missing_ranks(attempt.world_size, asked.calls), attempt.world_size, "called it",
                    "Every rank must call it, before get() and put()",
                )  # fmt: skip
                self._dismiss(name, *refusal)

    def _dismiss(self, name: str, error: str, message: str) -> None:
        asked = self.asked.pop(name, None)
        if asked is not None:
            asked.calls.refuse_all(self.out, error, message)


def _entrant(call: Call[AssignRanks]) -> Entrant:
    return Entrant(call, call.request.rank, call.request.nonce)

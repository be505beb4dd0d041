"""What a get() would recover now, or after the loss of hosts, from where and for how many bytes. Pure (R24, R27)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from memstore.core.cluster.effects import Effects
from memstore.core.cluster.job import Attempt, Call, Job
from memstore.core.cluster.state import ClusterState
from memstore.core.durable.checks import DurableLooks
from memstore.core.durable.states import DurableStates
from memstore.core.report.redundancy import survival_rows
from memstore.core.report.timeline import gone_rows, gone_steps
from memstore.core.restore.single_read import job_of, newest_attempt
from memstore.core.wire.calls import AskPlan
from memstore.core.wire.replies import Plan
from memstore.core.wire.status_rows import BytesByTier, RejectedStep, TransferRow
from recovery.inventory import StepId
from recovery.parity import set_of, summand_spec
from recovery.planner import RecoveryPlan, relaunch, what_if
from recovery.transfers import Transfer

DECODING = "decoding"  # the tier of what a host that decodes fetches: it goes to no rank


class DryRuns:
    """Answers `memstore plan`."""

    def __init__(self, state: ClusterState, out: Effects, states: DurableStates, looks: DurableLooks) -> None:
        self.state, self.out, self.states, self.looks = state, out, states, looks

    def ask(self, call: Call[AskPlan]) -> None:
        """Say what a get would recover now, from where, if the named hosts, or none, were lost before it."""
        job = job_of(self.state, self.out, call)
        attempt = newest_attempt(self.out, call, job)
        if job is None or attempt is None:
            return
        lost = list(call.request.lose)
        unknown = [h for h in lost if h not in self.state.hosts.states]
        if unknown:
            known = ", ".join(sorted(self.state.hosts.states))
            self.out.refuse(call, "ConfigError", f"no host {', '.join(unknown)} in the store: it has {known}")
            return
        result = self._what_if(job, attempt, lost, attempt.world_size)
        if result.step is not None and result.world_size not in (None, attempt.world_size):
            result = self._what_if(job, attempt, lost, result.world_size)
        committed = max((s.step for s in job.commits), default=None)
        there = self._survivors(lost)
        brought = [t for t in result.transfers if t.tier != "local"]
        fed = _fed(job, result.step, brought, there) if result.step is not None else []
        stays = sum(t.nbytes for t in brought if t.source == t.target_host)
        trained = max((attempt.trained_step, *(s.step for s in job.commits)))
        self.out.answer(
            call,
            Plan(
                job=job.name,
                lost_hosts=lost,
                verdict=result.verdict,
                why=result.why,
                step=result.step.step if result.step is not None else None,
                attempt=result.step.attempt if result.step is not None else None,
                committed_step=committed,
                steps_lost=max(0, trained - result.step.step) if result.step is not None else None,
                ranks_moved=list(result.ranks_moved),
                world_size=attempt.world_size,
                step_world_size=result.world_size,
                moved_bytes=result.moved_bytes,
                starts_on=self._starts_on(attempt, lost),
                bytes=BytesByTier(
                    local=result.bytes_local,
                    peer=result.bytes_peer - stays + sum(row.nbytes for row in fed),
                    durable=result.bytes_durable,
                ),
                transfers=[
                    *(TransferRow(t.rank, t.tier, t.source, _said(t.target_host, there), t.nbytes) for t in brought),
                    *fed,
                ][:1000],
                rejected=[RejectedStep(r.step.attempt, r.step.step, r.reason) for r in result.rejected[:20]],
                gone=gone_rows(job, result.gone),
                unlisted=self.looks.unlisted(job),
                odds=survival_rows(job, self.state.hosts.live_ids(), attempt.replicas + 1),
            ),
        )

    def _starts_on(self, attempt: Attempt, lost: list[str]) -> dict[str, list[int]]:
        """Return where ranks of lost hosts are taken to start, by host that survives: `_what_if` decides it alike."""
        members = {rank: member.host_id for rank, member in attempt.members.items()}
        gone = set(members.values()) - self._survivors(lost)
        found: dict[str, list[int]] = {}
        for rank, host in sorted(relaunch(members, gone).items()):
            if host != members[rank]:
                found.setdefault(host, []).append(rank)
        return found

    def _survivors(self, lost: list[str]) -> set[str]:
        return set(self.state.hosts.live_ids()) - set(lost)

    def _what_if(self, job: Job, attempt: Attempt, lost: list[str], world_size: int) -> RecoveryPlan:
        """Plan a get after the loss for so many ranks; ranks that the attempt lacks are on its hosts in turn.

        Where none of its hosts is left, the ranks are on the store's others, but for spare ones.
        """
        members = {rank: member.host_id for rank, member in attempt.members.items()}
        hosts, there = sorted(set(members.values())), self._survivors(lost)
        if there.isdisjoint(hosts):
            states = self.state.hosts.states
            members, hosts = {}, sorted(h for h in there if states[h].info.labels.get("memstore") != "replica") or hosts
        gone = gone_steps(self.state, self.states, job)  # before the loss, to report step by step what it takes
        return what_if(
            job.inventory(live=self.state.hosts.live_ids(), silent=(), gone=gone),
            job.spans(attempt.attempt_number),
            {*lost, *(host for host in hosts if host not in there)},
            world_size=world_size,
            rank_hosts={rank: members.get(rank, hosts[rank % len(hosts)]) for rank in range(world_size)},
        )


def _fed(job: Job, step: StepId, brought: Iterable[Transfer], there: Collection[str]) -> list[TransferRow]:
    """Return what hosts that decode a rank's chunks fetch for that: the other chunks in the same rows."""
    found: Counter[tuple[int, str, str]] = Counter()
    for transfer in (each for each in brought if each.tier == "parity"):
        host, rank = transfer.source or "", transfer.rank
        kept = [hosts[host] for hosts in job.parity.get(step, {}).values() if host in hosts]
        parity = next(copy for copy in kept if any(each.rank == rank for each in copy.spec.summands))
        ranks, owner = set_of(parity.shard, parity.spec), parity.shard.rank
        chunks = [transfer.first_chunk + n * transfer.stride for n in range(transfer.chunks_count)]
        rows = [row for chunk in chunks if (row := ranks.row_of(owner, rank, chunk)) is not None]
        for other in (each for each in parity.spec.summands if each.rank != rank):
            copies = {h: c for h, c in job.copies[step].get(other.rank, {}).items() if h in there}
            spec = summand_spec(parity.spec, other)
            added = [ranks.chunk_in(owner, other.rank, row) for row in rows]
            sizes = [spec.chunk_nbytes(chunk) for chunk in added if chunk is not None and chunk < spec.chunks_count]
            # As the order to decode says: the one that lacks fewest chunks. In place of a lost one come second rows.
            second = job.parity.get(step, {}).get(ranks.next(owner), {}) if ranks.spare > 1 else {}
            found_at = copies or {h: c for h, c in second.items() if h in there}
            source = min(found_at, key=lambda h: (len(found_at[h].missing), h), default=host)
            if source != host:
                found[rank, source, host] += sum(sizes)
    return [TransferRow(rank, DECODING, source, host, n) for (rank, source, host), n in sorted(found.items())]


def _said(host: str, there: set[str]) -> str:
    """Return a host's name, or that of the one that takes its place."""
    return host if host in there else f"replacement of {host}"

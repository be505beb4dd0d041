"""Which step is restored, from where, and why not a newer one? The planner's verdict with its reasons (R22-R27).

Pure: moves no byte and raises only for a caller's contradiction.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from recovery.candidates import Evidence, Rejected, Whole, evidence_by_step, judge, name_some
from recovery.inventory import Inventory, ShardSpec, StepId
from recovery.lineage import Span, in_lineage
from recovery.transfers import DURABLE, LOCAL, PARITY, PEER, Tier, Transfer, transfers_for

NONE, WAIT, MIXED = "none", "wait", "mixed"


@dataclass(frozen=True, slots=True)
class RecoveryPlan:
    """What to restore and how. `verdict` is "local", "peer", "mixed", "durable", "none" or "wait".

    "local": every chunk is on its rank's host. "peer": all in RAM, some on other hosts. "durable": nothing in RAM.
    "mixed": both. "none": nothing to restore; None for the caller only if not `has_history`, else a RecoveryError
    from `rejected` (R23). "wait": ask again when the hosts in `wait_for` answered or are known dead (R24).
    """

    verdict: str
    why: str
    has_history: bool
    step: StepId | None = None
    world_size: int | None = None  # the step's own; differs from the one asked for: WorldSizeError (R27), no transfers
    digests: Mapping[int, str] = field(default_factory=dict)  # rank -> shard digest
    specs: Mapping[int, ShardSpec] = field(default_factory=dict)  # rank -> shard
    transfers: tuple[Transfer, ...] = ()  # by rank, then chunk
    rejected: tuple[Rejected, ...] = ()  # every candidate newer than `step`, newest first
    gone: tuple[StepId, ...] = ()  # newer than `step` too; not judged, as the inventory says that no byte is left
    ranks_moved: tuple[int, ...] = ()  # no complete copy on the rank's host, though another host has one
    bytes_local: int = 0
    bytes_peer: int = 0
    bytes_durable: int = 0
    moved_bytes: int = 0  # of those, what ranks that moved get from elsewhere than their own host
    wait_for: frozenset[str] = frozenset()


def plan(
    inventory: Inventory,
    spans: tuple[Span, ...],
    *,
    world_size: int,
    rank_hosts: Mapping[int, str],
    only_step: StepId | None = None,
    not_steps: Collection[StepId] = (),
    among: Collection[StepId] | None = None,
) -> RecoveryPlan:
    """Return the plan that restores the newest whole step of the lineage (R24).

    Args:
        inventory: Verified copies, facts and markers of one job.
        spans: Its lineage, from `lineage.lineage`.
        world_size: Ranks that ask. A step of another size is still chosen, for the caller to refuse (R27).
        rank_hosts: Present host of every rank below `world_size`.
        only_step: Consider this step alone, `get(step=S)`.
        not_steps: Steps whose staging failed in this get (R23).
        among: Consider these steps alone, `get(trusted=True)`; None: all (R38).

    Raises:
        ValueError: `rank_hosts` lacks a rank below `world_size`.

    Complexity: linear in copies plus the transfers that are not local; see `balance.share`.
    """
    homeless = [rank for rank in range(world_size) if rank not in rank_hosts]
    if homeless:
        raise ValueError(f"rank_hosts lacks {len(homeless)} of {world_size} ranks, first {homeless[:10]}")
    table = evidence_by_step(inventory)
    known = set(table).union(inventory.retired, inventory.abandoned)
    if not known:
        silent = f"; {name_some(inventory.silent_hosts)} did not answer" if inventory.silent_hosts else ""
        return RecoveryPlan(NONE, f"no history: no copy, fact or marker knows job {inventory.job!r}{silent}", False)
    if only_step is not None:
        candidates = [only_step]
    else:
        wanted = known if among is None else known.intersection(among)
        candidates = sorted((step for step in wanted if in_lineage(spans, step)), reverse=True)
    rejected: list[Rejected] = []
    gone: list[StepId] = []
    for step in candidates:
        if step in inventory.gone:
            gone.append(step)
            continue
        barred = _barred(inventory, spans, step, not_steps)
        if barred is None:
            evidence = table.get(step) or Evidence(step)
            verdict = judge(evidence) if step in table else Rejected(step, "no copy, fact or marker of it is known")
            if isinstance(verdict, Whole):
                return _chosen(verdict, world_size, rank_hosts, tuple(rejected), tuple(gone))
            rejected.append(verdict)
            late = _late_hosts(evidence, verdict, inventory.silent_hosts)
            if late:
                why = f"{_name(step)} is {verdict.reason}; waiting for {name_some(late)}"
                return RecoveryPlan(WAIT, why, True, rejected=tuple(rejected), gone=tuple(gone), wait_for=late)
        else:
            rejected.append(Rejected(step, barred))
    return RecoveryPlan(NONE, _why_none(rejected, gone), True, rejected=tuple(rejected), gone=tuple(gone))


def _why_none(rejected: Sequence[Rejected], gone: Sequence[StepId]) -> str:
    if rejected:
        what = f"{_name(rejected[0].step)} cannot be restored"
        if rejected[1:]:
            what = f"none of {len(rejected)} steps can be restored; the newest, {_name(rejected[0].step)}"
        more = f"; {len(gone)} more committed before are gone" if gone else ""
        return f"there is history, but {what}: {rejected[0].reason}{more}"
    if gone:
        return f"no byte is left of the {len(gone)} steps that were committed; the newest was {_name(gone[0])}"
    return "there is history, but no step of it belongs to the lineage"


def _barred(inventory: Inventory, spans: tuple[Span, ...], step: StepId, not_steps: Collection[StepId]) -> str | None:
    if not in_lineage(spans, step):
        newest = f" of attempt {spans[0].attempt}" if spans else ""
        return f"not in the lineage{newest} (R22)"
    if step in inventory.retired:
        return f"retired: {inventory.retired[step]}"
    if step in inventory.abandoned:
        return "abandoned: some rank skipped it (R12)"
    if step in not_steps:
        return "staging it failed earlier in this get"
    return None


def _late_hosts(evidence: Evidence, verdict: Rejected, silent_hosts: frozenset[str]) -> frozenset[str]:
    """Return the silent hosts that may have had copies of the step: they may still make it whole (R24).

    R24 speaks of the newest commit fact; the same reason holds for each committed step on the way down from it.
    """
    if not silent_hosts or not verdict.ranks_count:
        return frozenset()
    named = {host for commit in evidence.commits for hosts in commit.hosts.values() for host in hosts}
    return silent_hosts & named.union(*(commit.named for commit in evidence.commits))


def _chosen(
    whole: Whole,
    world_size: int,
    rank_hosts: Mapping[int, str],
    rejected: tuple[Rejected, ...],
    gone: tuple[StepId, ...],
) -> RecoveryPlan:
    transfers: tuple[Transfer, ...] = ()
    moved: tuple[int, ...] = ()
    moved_bytes = 0
    nbytes = {LOCAL: 0, PEER: 0, PARITY: 0, DURABLE: 0}
    if whole.world_size == world_size:
        transfers, moved = transfers_for(whole, rank_hosts)
        for transfer in transfers:
            nbytes[transfer.tier] += transfer.nbytes
        movers = frozenset(moved)
        moved_bytes = sum(t.nbytes for t in transfers if t.tier != LOCAL and t.rank in movers)
        tiers = {transfer.tier for transfer in transfers}
        note = f"{nbytes[LOCAL]} bytes local, {nbytes[PEER]} from peers, {nbytes[DURABLE]} durable"
        note += f", {nbytes[PARITY]} decoded by peers" if nbytes[PARITY] else ""
    else:
        # A shard of another world size fits no rank; the verdict says where the bytes are, for a reader to use.
        elsewhere = dict.fromkeys(range(whole.world_size), "")
        tiers = {transfer.tier for transfer in transfers_for(whole, elsewhere)[0]}
        note = f"put by {whole.world_size} ranks, asked for by {world_size}: nothing is staged (R27)"
    which = "newest whole step" if rejected or gone else "newest step"
    fact = "committed" if whole.is_committed else "uncommitted but whole"
    why = f"{_name(whole.step)}: {which} of the lineage, {fact}; {note}"
    if rejected:
        why += f"; not used: {_name(rejected[0].step)}, {rejected[0].reason}"
        why += f", and {len(rejected) - 1} more" if len(rejected) > 1 else ""
    return RecoveryPlan(
        verdict=_verdict(tiers),
        why=why,
        has_history=True,
        step=whole.step,
        world_size=whole.world_size,
        digests={rank: spec.digest for rank, spec in whole.specs.items()},
        specs=whole.specs,
        transfers=transfers,
        rejected=rejected,
        gone=gone,
        ranks_moved=moved,
        bytes_local=nbytes[LOCAL],
        bytes_peer=nbytes[PEER] + nbytes[PARITY],
        bytes_durable=nbytes[DURABLE],
        moved_bytes=moved_bytes,
    )


def _verdict(tiers: set[Tier]) -> str:
    if DURABLE in tiers:
        return MIXED if len(tiers) > 1 else DURABLE
    return PEER if tiers & {PEER, PARITY} else LOCAL


def _name(step: StepId) -> str:
    return f"attempt {step.attempt} step {step.step}"


# -- dry runs -----------------------------------------------------------------------------------------
# What would happen if these hosts were lost? Dry runs of the planner, moving nothing: behind `memstore plan --lose`.


def lose(inventory: Inventory, hosts: Collection[str]) -> Inventory:
    """Return the inventory after `hosts` died: their copies are gone and no host waits for them.

    Facts and markers stay: they are journalled on every live holder and on durable storage (R16, R31).
    """
    dead = frozenset(hosts)
    copies = tuple(copy for copy in inventory.copies if copy.host not in dead)
    return replace(inventory, copies=copies, silent_hosts=inventory.silent_hosts - dead)


def relaunch(rank_hosts: Mapping[int, str], lost_hosts: Collection[str]) -> dict[int, str]:
    """Return the hosts of all ranks after those on lost hosts went, rank by rank, to the surviving host with fewest.

    If no host of the job survives, replacements under the old names are assumed, with empty memory.
    """
    dead = frozenset(lost_hosts)
    counts: dict[str, int] = {}
    for host in rank_hosts.values():
        if host not in dead:
            counts[host] = counts.get(host, 0) + 1
    if not counts:
        return dict(rank_hosts)
    heap = [(count, host) for host, count in counts.items()]
    heapq.heapify(heap)
    moved: dict[int, str] = {}
    for rank in sorted(rank_hosts):
        if rank_hosts[rank] in dead:
            count, host = heap[0]
            heapq.heapreplace(heap, (count + 1, host))
            moved[rank] = host
    return {**rank_hosts, **moved}


def what_if(
    inventory: Inventory,
    spans: tuple[Span, ...],
    lost_hosts: Collection[str],
    *,
    world_size: int,
    rank_hosts: Mapping[int, str],
    relaunched: Mapping[int, str] | None = None,
) -> RecoveryPlan:
    """Return the plan that would follow if `lost_hosts` died now.

    Args:
        inventory: The present one.
        spans: The lineage.
        lost_hosts: Hosts to lose; unknown names change nothing.
        world_size: Ranks of the job.
        rank_hosts: Present host of every rank.
        relaunched: Where ranks run afterwards, for the ranks it names; the others follow `relaunch`.
    """
    after = {**relaunch(rank_hosts, lost_hosts), **(relaunched or {})}
    return plan(lose(inventory, lost_hosts), spans, world_size=world_size, rank_hosts=after)

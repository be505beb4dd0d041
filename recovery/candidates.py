"""Is this step whole across all tiers, and under which digests? Judges one step at a time (R18, R24).

Pure. Imports `inventory` and `parity`. Read `balance.py`, then `transfers.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from recovery.inventory import CommitFact, Copy, DurableMarker, Inventory, ShardSpec, StepId
from recovery.parity import decoded

RANKS_LISTED_MAX = 10  # a reason is read by a person; the count beside the list has the rest


@dataclass(slots=True)
class Evidence:
    """Everything the inventory says about one step."""

    step: StepId
    copies: list[Copy] = field(default_factory=list)
    parity: list[Copy] = field(default_factory=list)  # of ranks' hosts, of other ranks' shards
    commits: list[CommitFact] = field(default_factory=list)
    markers: list[DurableMarker] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Whole:
    """A step of which every chunk of every rank is somewhere, each shard under one spec."""

    step: StepId
    world_size: int
    specs: dict[int, ShardSpec]  # rank -> shard, in rank order
    copies: dict[int, list[Copy]]  # rank -> the copies of exactly that shard; decoded ones where the others lack some
    durable: frozenset[int]  # ranks whose shard the marker lists
    is_committed: bool


@dataclass(frozen=True, slots=True)
class Rejected:
    """A step that was not chosen, with the reason in words and the shards it lacks (R23)."""

    step: StepId
    reason: str
    ranks: tuple[int, ...] = ()  # the first RANKS_LISTED_MAX ranks whose shard is not whole
    ranks_count: int = 0  # how many there are
    hosts: tuple[str, ...] = ()  # hosts that had those shards by the commit fact, sorted


def evidence_by_step(inventory: Inventory) -> dict[StepId, Evidence]:
    """Return the inventory's entries by step of its job; copies of other jobs are left out."""
    grouped: dict[tuple[int, int], list[Copy]] = {}
    for copy in inventory.copies:
        shard = copy.shard
        if shard.job == inventory.job:
            key = (shard.attempt, shard.step)
            if key in grouped:
                grouped[key].append(copy)
            else:
                grouped[key] = [copy]
    table: dict[StepId, Evidence] = {}
    for key, copies in grouped.items():
        parity = [copy for copy in copies if copy.shard.is_parity]
        plain = [copy for copy in copies if not copy.shard.is_parity] if parity else copies
        table[StepId(*key)] = Evidence(StepId(*key), plain, parity)
    for commit in inventory.commits:
        table.setdefault(commit.step, Evidence(commit.step)).commits.append(commit)
    for marker in inventory.markers:
        table.setdefault(marker.step, Evidence(marker.step)).markers.append(marker)
    return table


def is_whole(spec: ShardSpec, copies: Sequence[Copy]) -> bool:
    """Return whether the copies together hold every chunk of `spec`."""
    for copy in copies:
        if not copy.missing:
            return True
    if not copies:
        return False
    return not _chunks_lacking(spec, copies)


def judge(evidence: Evidence) -> Whole | Rejected:
    """Return the step as whole, or why it cannot be restored.

    The commit fact's digests are the truth; without one the durable marker's are, because a marker is written only
    for a committed step (R31). With neither, an uncommitted step counts if every rank has exactly one digest that is
    whole: two would be a guess, and a restore never guesses.
    """
    commits, markers = evidence.commits, evidence.markers
    first = commits[0] if commits else None
    if first is not None:
        for other in commits[1:]:
            if other.world_size != first.world_size or other.digests != first.digests:
                return Rejected(evidence.step, "ambiguous: two commit facts name different shards for this step")
        return _judge_at(evidence, first.world_size)
    held = (*evidence.copies, *evidence.parity)  # all copies may be lost, and parity alone be left
    sizes = {marker.world_size for marker in markers} or {copy.spec.world_size for copy in held}
    verdicts = [_judge_at(evidence, size) for size in sorted(sizes)]
    wholes = [verdict for verdict in verdicts if isinstance(verdict, Whole)]
    if len(wholes) == 1:
        return wholes[0]
    if wholes:
        found = ", ".join(str(whole.world_size) for whole in wholes)
        return Rejected(evidence.step, f"ambiguous: whole under several world sizes ({found}) and no commit fact")
    broken = [verdict for verdict in verdicts if isinstance(verdict, Rejected)]
    return min(broken, key=lambda rejected: rejected.ranks_count)


def _judge_at(evidence: Evidence, world_size: int) -> Whole | Rejected:
    commit = evidence.commits[0] if evidence.commits else None
    has_truth = commit is not None or bool(evidence.markers)
    by_rank: dict[int, list[Copy]] = {}
    for copy in evidence.copies:
        if has_truth or copy.spec.world_size == world_size:
            rank = copy.shard.rank
            if rank in by_rank:
                by_rank[rank].append(copy)
            else:
                by_rank[rank] = [copy]
    specs: dict[int, ShardSpec] = {}
    held: dict[int, list[Copy]] = {}
    durable: set[int] = set()
    lacking: list[int] = []
    for rank in range(world_size):
        stored = {marker.specs[rank] for marker in evidence.markers if rank in marker.specs}
        copies = by_rank.get(rank, [])
        if commit is not None:
            truths = {commit.digests.get(rank)}
            stored = {spec for spec in stored if spec.digest in truths}
        else:
            truths = {spec.digest for spec in stored}
        if has_truth:
            copies = [copy for copy in copies if copy.spec.digest in truths]
        if evidence.parity and not _whole_specs(copies, set()):
            found = (copy for each in evidence.parity for copy in decoded(each, rank, by_rank, evidence.parity))
            copies = [*copies, *(copy for copy in found if not has_truth or copy.spec.digest in truths)]
        options = _whole_specs(copies, stored)
        if len(options) > 1:
            return _ambiguous(evidence.step, rank, options)
        if not options:
            held[rank] = copies
            lacking.append(rank)
            continue
        spec = options[0]
        specs[rank] = spec
        held[rank] = [copy for copy in copies if copy.spec == spec]
        if spec in stored:
            durable.add(rank)
    if lacking:
        return _incomplete(evidence, world_size, lacking, held)
    return Whole(evidence.step, world_size, specs, held, frozenset(durable), has_truth)


def _whole_specs(copies: Sequence[Copy], stored: set[ShardSpec]) -> list[ShardSpec]:
    if len(copies) == 1 and not stored:
        return [copies[0].spec] if is_whole(copies[0].spec, copies) else []
    options: dict[ShardSpec, list[Copy]] = {spec: [] for spec in sorted(stored, key=lambda spec: spec.digest)}
    for copy in copies:
        options.setdefault(copy.spec, []).append(copy)
    return [spec for spec, found in options.items() if spec in stored or is_whole(spec, found)]


def _chunks_lacking(spec: ShardSpec, copies: Sequence[Copy]) -> int:
    nowhere = frozenset.intersection(*(copy.missing for copy in copies))
    return sum(0 <= chunk < spec.chunks_count for chunk in nowhere)


def _ambiguous(step: StepId, rank: int, options: Sequence[ShardSpec]) -> Rejected:
    digests = ", ".join(sorted(spec.digest for spec in options))
    reason = f"ambiguous: rank {rank} has {len(options)} different whole shards ({digests}) and nothing to choose by"
    return Rejected(step, reason, (rank,), 1)


def _incomplete(
    evidence: Evidence, world_size: int, lacking: Sequence[int], by_rank: dict[int, list[Copy]]
) -> Rejected:
    listed = ", ".join(_shortfall(rank, by_rank.get(rank, [])) for rank in lacking[:RANKS_LISTED_MAX])
    more = ", ..." if len(lacking) > RANKS_LISTED_MAX else ""
    state = "" if evidence.commits else "never committed; "
    ranks = f"rank{'s' if len(lacking) != 1 else ''} {listed}{more}"
    reason = f"{state}not whole: no tier has all bytes of {ranks} ({len(lacking)} of {world_size})"
    hosts: set[str] = set()
    for commit in evidence.commits:
        for rank in lacking:
            hosts.update(commit.hosts.get(rank, ()))
    if hosts:
        reason += f"; when it was committed they were on {name_some(hosts)}"
    return Rejected(evidence.step, reason, tuple(lacking[:RANKS_LISTED_MAX]), len(lacking), tuple(sorted(hosts)))


def _shortfall(rank: int, copies: Sequence[Copy]) -> str:
    """Return the rank, with the chunks that are nowhere when all its copies are of one shard."""
    specs = {copy.spec for copy in copies}
    if len(specs) != 1:
        return str(rank)
    spec = copies[0].spec
    return f"{rank}: {_chunks_lacking(spec, copies)} of {spec.chunks_count} chunks"


def name_some(names: Iterable[str]) -> str:
    """Return the names sorted and joined, at most RANKS_LISTED_MAX of them, with the count of the rest."""
    ordered = sorted(names)
    rest = len(ordered) - RANKS_LISTED_MAX
    return ", ".join(ordered[:RANKS_LISTED_MAX]) + (f" and {rest} more" if rest > 0 else "")

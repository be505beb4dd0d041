"""Ranks with equal state: which of them write, where a writer's copies go, what is reported when they differ. Pure.

Ranks of one launch that name one shard hold equal state; those of them that copy the shared state are its *writers*
(R34). Writers are chosen when the attempt opens and stand in its fact. Their hosts are one another's targets before any
other host is: the chunks are there already.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from memstore.core.cluster.effects import Effects
from memstore.core.cluster.facts import AttemptOpened
from memstore.core.cluster.job import Attempt, Call, Job, group_levels, group_numbers
from memstore.core.cluster.state import ClusterState
from memstore.core.cluster.text import listed, plural, ranks_text
from memstore.core.wire.calls import ReportDiffering
from memstore.core.wire.orders import RankTargets
from memstore.core.wire.replies import Noted, SharedShardPlace
from memstore.core.wire.status_rows import DifferingRow
from placement.groups import Placement
from placement.topology import Topology, spread_level, with_groups

# -- writers ------------------------------------------------------------------------------------------
# Which ranks copy where several hold equal state: as many as there are to be copies, none in another's domain.


def choose_writers(
    shard_of: Sequence[int],
    hosts: Sequence[str],
    topology: Topology,
    *,
    level: str,
    replicas: int,
    avoid: Collection[str] = (),
) -> tuple[int, ...]:
    """Return the ranks that copy, in order.

    Of every shard as many as can sit in distinct domains, at most `replicas`. Which of several hosts is a matter of
    load: the one with the fewest writers so far, then the lowest rank, so that a host with ranks of many shards copies
    no more of them than its neighbours. The last one of a shard is outside a group that all others are in, if one can.

    Args:
        shard_of: By rank: the number of the shard whose state it holds.
        hosts: By rank: the host it sits on.
        topology: Hosts and their labels; one that is not in it is in a domain of its own, and chosen last.
        level: The level of the domains that are to be distinct.
        replicas: Copies per shard.
        avoid: Hosts to be chosen only in a domain that has no other, such as those about to go.

    Returns:
        The same ranks for the same input.

    Raises:
        ValueError: `replicas` below 1, or not one host for every rank.

    Complexity: O(ranks x replicas).
    """
    if replicas < 1 or len(shard_of) != len(hosts):
        raise ValueError(f"{len(shard_of)} ranks on {len(hosts)} hosts with {replicas} replicas")
    domains, groups = topology.domains(level), [topology.domains(each) for each in topology.groups_apart]
    members: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, shard in enumerate(shard_of):
        known = domains.get(hosts[rank])
        members[shard][f"unknown:{hosts[rank]}" if known is None else f"known:{known}"].append(rank)
    load: Counter[str] = Counter()

    def cost(rank: int) -> tuple[bool, int, int]:
        host = hosts[rank]
        return host in avoid or host not in topology.hosts, load[host], rank

    chosen: list[int] = []
    for shard in sorted(members):
        left, found, count = members[shard], list[int](), min(replicas, len(members[shard]))
        while len(found) < count:
            near = groups if len(found) == count - 1 else ()
            near = [group for group in near if len({group.get(hosts[rank]) for rank in found}) == 1]
            _, (*_, rank), domain = min(
                ([group.get(hosts[rank]) == group.get(hosts[found[0]]) for group in near], cost(rank), domain)
                for domain, ranks in left.items()
                for rank in ranks
            )
            found.append(rank)
            del left[domain]
        load.update(hosts[rank] for rank in found)
        chosen += found
    return tuple(sorted(chosen))


# -- shared shards ------------------------------------------------------------------------------------
# Where a writer's copies go, and what is reported when ranks differ.


NAMED_MAX = 10  # tensors named in one event
NAME_CHARS_MAX = 200


@dataclass(slots=True)
class Routes:
    """Where the writers of one attempt push, for one placement."""

    placement: Placement
    attempt: int
    domains: Mapping[str, str]  # of the hosts placed
    # writer -> hosts of the other writers of its shard, as far as they are placed
    other_writers: dict[int, tuple[str, ...]]


@dataclass(slots=True)
class Differing:
    """Two writers of one shard whose shared bytes differ."""

    ranks: tuple[int, int]
    attempt: int
    step: int  # the first of a row
    since_s: float
    names: tuple[str, ...] = field(default_factory=tuple)


class SharedShards:
    """Ranks with equal state, of all jobs."""

    def __init__(self, state: ClusterState, out: Effects) -> None:
        self.state, self.out = state, out
        self.routes: dict[str, Routes] = {}
        self.differing: dict[str, dict[tuple[int, int], Differing]] = {}

    # -- opening ------------------------------------------------------------------------------

    def refusal(self, name: str, named: Sequence[tuple[int | None, int | None]]) -> str | None:
        """Say why the ranks of a launch, in order, do not name (shard, shards) so that all are there, or None."""
        by_count: dict[int | None, list[int]] = {}
        for rank, (_, count) in enumerate(named):
            by_count.setdefault(count, []).append(rank)
        if list(by_count) == [None]:
            return None
        if len(by_count) > 1:
            said = "; ".join(f"{ranks_text(ranks)} {_named(ranks, count)}" for count, ranks in by_count.items())
            return f"job {name!r}: all ranks of one launch must name the same shard_count: {said}"
        count = next(iter(by_count))
        if count is None or count > len(named):
            most = f"{plural(len(named), 'rank')} can hold at most {plural(len(named), 'shard')}"
            return f"job {name!r}: shard_count={count}, but {most}"
        shards = [shard for shard, _ in named]
        wrong = [rank for rank, shard in enumerate(shards) if shard is None or shard >= count]
        if wrong:
            known = "the only shard is 0" if count == 1 else f"shards are numbered 0 to {count - 1}"
            said = ", ".join(f"rank {rank} names shard_rank={shards[rank]}" for rank in wrong[:10])
            return f"job {name!r}: with shard_count={count} {known}, but {said}"
        missing = sorted(set(range(count)).difference(shards))
        if missing:
            return (
                f"job {name!r}: no rank names shard_rank {listed(missing)} of shard_count={count}: every shard "
                "needs a rank that holds it, else it could not be restored"
            )
        return None

    def chosen(self, fact: AttemptOpened, eligible: Collection[str]) -> tuple[int, ...]:
        """Return the ranks that copy, for the hosts that the ranks of the attempt are on."""
        hosts, replicas = self.state.hosts, int(fact.config["replicas"])
        topology = hosts.topology(hosts.live_ids())
        topology = with_groups(topology, group_levels(group_numbers(fact.groups), fact.hosts))
        level = spread_level(topology, replicas, among=eligible).level
        leaving = {host for host in set(fact.hosts) if self.state.is_draining(host)}
        return choose_writers(fact.shard_of, fact.hosts, topology, level=level, replicas=replicas, avoid=leaving)

    def joined(self, attempt: Attempt, rank: int) -> SharedShardPlace | None:
        """Return a rank's role in its shard; rank 0 keeps the list of all writers, for readers of its shard (R27)."""
        if not attempt.shard_of:
            return None
        table = self._writers_by_shard(attempt)
        mine = attempt.shard_of[rank]
        writers_by_shard = tuple(tuple(table[shard]) for shard in sorted(table)) if rank == 0 else ()
        return SharedShardPlace(mine, max(attempt.shard_of) + 1, tuple(table[mine]), writers_by_shard)

    @staticmethod
    def _writers_by_shard(attempt: Attempt) -> dict[int, list[int]]:
        table: dict[int, list[int]] = {}
        for rank in attempt.writers:
            table.setdefault(attempt.shard_of[rank], []).append(rank)
        return table

    # -- targets ------------------------------------------------------------------------------

    def targets(self, job: Job, attempt: Attempt, rank: int, owner: str, ordinary: Iterable[str]) -> list[str]:
        """Return the hosts that hold a rank's shard besides its owner's: those of the other writers first (R13, R34).

        What placement names comes after them, as far as there are too few in domains of their own.
        """
        others = [host for host in ordinary if host != owner]
        if not attempt.writers or job.placement is None:
            return others
        routes = self._routes(job, attempt, job.placement)
        if rank not in routes.other_writers:
            return others
        covered, found = {routes.domains.get(owner, owner)}, list[str]()
        for host in (*routes.other_writers[rank], *others):
            domain = routes.domains.get(host, host)
            if domain not in covered and len(found) < attempt.replicas - 1:
                covered.add(domain)
                found.append(host)
        covered -= {routes.domains.get(host, host) for host in found[-1:]}
        near = [each for each in job.group_domains if found and len({each.get(h, h) for h in (owner, *found)}) == 1]
        for host in others if near else ():  # all in one group: the last of them gives way to one outside (R18.8)
            is_outside = all(each.get(host, host) != each.get(owner, owner) for each in near)
            if is_outside and routes.domains.get(host, host) not in covered:
                found[-1] = host
                break
        rest = [host for host in others if host not in found]  # a copy in a domain that has one is better than none
        return [*found, *rest[: max(0, len(others) - len(found))]]

    def _routes(self, job: Job, attempt: Attempt, placement: Placement) -> Routes:
        known = self.routes.get(job.name)
        if known is not None and known.placement is placement and known.attempt == attempt.attempt_number:
            return known
        domains = self.state.hosts.topology(placement.targets).domains(placement.level)
        other_writers: dict[int, tuple[str, ...]] = {}
        for ranks in self._writers_by_shard(attempt).values():
            for rank in ranks:
                hosts = [attempt.members[other].host_id for other in ranks if other != rank]
                other_writers[rank] = tuple(host for host in hosts if host in domains)
        known = self.routes[job.name] = Routes(placement, attempt.attempt_number, domains, other_writers)
        return known

    def rows(self, attempt: Attempt, peer_hosts: Callable[[int], list[str]]) -> dict[str, list[RankTargets]]:
        """Return, by host, [writer, its targets, the ranks that write the same] of every writer that puts there."""
        table: dict[str, list[RankTargets]] = {}
        for ranks in self._writers_by_shard(attempt).values():
            for rank in ranks:
                row = RankTargets(rank, tuple(peer_hosts(rank)), tuple(other for other in ranks if other != rank))
                table.setdefault(attempt.members[rank].host_id, []).append(row)
        return table

    # -- what differs -------------------------------------------------------------------------

    def reported(self, call: Call[ReportDiffering]) -> None:
        """Take a rank's report of tensors in which two writers differ, or its holder's that they are equal again."""
        request = call.request
        self.out.answer(call, Noted())
        job = self.state.jobs.get(request.job)
        attempt = job.newest if job is not None else None
        ranks = request.ranks
        if (
            job is None
            or attempt is None
            or attempt.attempt_number != request.attempt
            or not set(ranks) <= set(attempt.members)
        ):
            return
        known, step = self.differing.setdefault(job.name, {}), request.step
        place = {
            "job": job.name,
            "attempt": attempt.attempt_number,
            "step": step,
            "rank": ranks[0],
            "ranks": list(ranks),
        }
        if not request.chunks:
            if known.pop(ranks, None) is not None:
                self.out.note("replicas_agree", **place)
            return
        names = tuple(name[:NAME_CHARS_MAX] for name in request.names[:NAMED_MAX])
        if ranks not in known:
            known[ranks] = Differing(ranks, attempt.attempt_number, step, self.state.now, names)
            shard = attempt.shard_of[ranks[0]] if attempt.shard_of else 0
            self.out.note("replicas_differ", **place, names=names, chunks=request.chunks, shard=shard)

    def differing_rows(self, job: Job, attempt: Attempt) -> list[DifferingRow]:
        """Return the ranks of an attempt that name one shard and put different bytes."""
        now = self.state.now
        found = [d for d in self.differing.get(job.name, {}).values() if d.attempt == attempt.attempt_number]
        return [
            DifferingRow(ranks=list(d.ranks), step=d.step, names=list(d.names), since_s=now - d.since_s)
            for d in sorted(found, key=lambda d: d.ranks)
        ]

    def forget(self, name: str) -> None:
        """Forget a removed job."""
        self.routes.pop(name, None)
        self.differing.pop(name, None)


def _named(ranks: Sequence[int], count: int | None) -> str:
    return f"name{'s' if len(ranks) == 1 else ''} {'none' if count is None else f'shard_count={count}'}"

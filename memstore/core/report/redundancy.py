"""How safe the copies are: what is short, and since when; which losses the present ones survive. Pure (R18, R29).

The monitor notes the beginning and the end of a job short of copies, and of a repair. It looks at the controller's
state on ticks and seals, for the recorder; changes nothing in it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from msgspec import structs

from memstore.core.cluster.job import Job
from memstore.core.cluster.state import ClusterState
from memstore.core.cluster.text import plural
from memstore.core.durable.departures import Departures
from memstore.core.repair import RepairPushes
from memstore.core.wire.status_rows import OddsRow, ShortStep, SurvivalRow
from placement.odds import bonds_of, survival_odds
from placement.topology import HOST_LEVEL, Topology, levels_of, name_some
from recovery.inventory import Copy, ShardId, StepId

LOOK_S = 1.0  # how often jobs are counted through
ROWS_MAX = 32  # steps named in one event
STATES_MAX = 5_000  # counted for odds: the controller must not be busy for long


@dataclass(slots=True)
class OpenRepair:
    """One repair of one job."""

    since_s: float
    shards: int = 0
    nbytes: int = 0


class RedundancyMonitor:
    """Conditions of all jobs; `add` takes an event that begins or ends one."""

    def __init__(
        self, state: ClusterState, pushes: RepairPushes, departures: Departures, add: Callable[..., None]
    ) -> None:
        self.state, self.pushes, self.departures, self._add = state, pushes, departures, add
        self.short_s: dict[str, float] = {}  # job -> since when its newest commit has too few or too near copies
        self.open_repairs: dict[str, OpenRepair] = {}
        self.drained: dict[str, list[ShortStep]] = {}  # host that is to go -> what was last reported short
        self.looked_s = 0.0

    def sealed(self, copy: Copy, host: str) -> None:
        """Note a copy that arrived, if repair ordered it there."""
        if (copy.shard, host) in self.pushes.under_way and self._is_kept(copy.shard):
            open_repair = self._begin(copy.shard.job)
            open_repair.shards, open_repair.nbytes = open_repair.shards + 1, open_repair.nbytes + copy.spec.nbytes

    def tick(self, now: float) -> None:
        """Note, after repair's scan, its pushes under way and the jobs short of copies."""
        busy = {shard.job for shard, _ in self.pushes.under_way if self._is_kept(shard)}
        for name in sorted(busy):
            self._begin(name)
        for name in [n for n in self.open_repairs if n not in busy]:
            self._end(name)
        if now - self.looked_s >= LOOK_S:
            self.looked_s = now
            for name in [n for n in self.short_s if n not in self.state.jobs]:
                del self.short_s[name]
            for job in self.state.jobs.values():
                self._look(job)
            self._look_at_drains()

    def short_for_s(self, job: str) -> float:
        """Return for how long the job's newest commit has had too few or too near copies; 0 while it has enough."""
        return self.state.now - self.short_s[job] if job in self.short_s else 0.0

    # -- hosts that are to go -------------------------------------------------------------------

    def _look_at_drains(self) -> None:
        """Report once for every host with notice whether it can go, and again when that has changed."""
        self.drained = {host: rows for host, rows in self.drained.items() if self.state.is_draining(host)}
        for host in self.state.draining:
            remains = self.departures.remains(host)
            was_ready = host in self.drained and not self.drained[host]
            if not self.state.hosts.is_live(host) or remains.may_come or (was_ready and not remains.short):
                continue
            rows = [structs.replace(row, step=0) for row in remains.short]  # the step changes with every commit
            if host not in self.drained or rows != self.drained[host]:
                self.drained[host] = rows
                short, durable = remains.short[:ROWS_MAX], remains.durable[:ROWS_MAX]
                self._add("drained", host=host, short=short, durable=durable)

    # -- repair ---------------------------------------------------------------------------------

    def _is_kept(self, shard: ShardId) -> bool:
        job = self.state.jobs.get(shard.job)
        return job is not None and StepId(shard.attempt, shard.step) in job.commits

    def _begin(self, name: str) -> OpenRepair:
        if name not in self.open_repairs:
            self.open_repairs[name] = OpenRepair(self.state.now)
            self._add("repair", job=name, missing=self._missing(name))
        return self.open_repairs[name]

    def _end(self, name: str) -> None:
        done = self.open_repairs.pop(name)
        took_s = self.state.now - done.since_s
        self._add(
            "repaired",
            job=name,
            shards=done.shards,
            nbytes=done.nbytes,
            missing=self._missing(name),
            seconds={"repair": took_s},
        )

    def _missing(self, name: str) -> int:
        job = self.state.jobs.get(name)
        return sum(self.short_shards(job).values()) if job is not None else 0

    # -- copies ---------------------------------------------------------------------------------

    def short_shards(self, job: Job) -> dict[int, int]:
        """Rank -> whole copies that its shard of the newest committed step lacks; those with enough are left out."""
        step, attempt = job.newest_committed, job.newest
        if step is None or attempt is None:
            return {}
        ranks = job.copies.get(step, {})
        whole = {rank: len(ranks.get(rank, ())) for rank in range(job.commits[step].world_size)}
        for rank in whole if step in job.damaged else ():
            whole[rank] = sum(not copy.missing for copy in ranks.get(rank, {}).values())
        for rank in job.parity_sets(step):
            whole[rank] += job.parity_copies(step, rank)
        return {rank: attempt.replicas - count for rank, count in whole.items() if count < attempt.replicas}

    def _look(self, job: Job) -> None:
        step, short = job.newest_committed, self.short_shards(job)
        commit = job.commits[step] if step is not None else None
        is_short = commit is not None and (bool(short) or commit.is_degraded)
        if commit is not None and is_short and job.name not in self.short_s:
            self.short_s[job.name] = self.state.now
            self._add(
                "degraded",
                job=job.name,
                attempt=commit.attempt,
                step=commit.step,
                shards=len(short),
                missing=sum(short.values()),
                why=commit.reason if commit.is_degraded else "copies were lost",
            )
        elif job.name in self.short_s and not is_short:
            since_s = self.short_s.pop(job.name)
            ended = {} if commit is None else {"attempt": commit.attempt, "step": commit.step}
            took_s = self.state.now - since_s
            self._add("whole", job=job.name, **ended, seconds={"degraded": took_s})


# -- survival -----------------------------------------------------------------------------------------
# The losses that the present copies survive, counted from the copies that exist, not from the planned ones (R18).


def survival(
    shards: Sequence[Collection[Copy]],
    topology: Topology,
    parity: Mapping[int, tuple[int, Sequence[str]]] | None = None,
) -> list[SurvivalRow]:
    """Return, coarsest level first, how many domains may be lost with every shard keeping a whole copy.

    -1: some chunk is nowhere even now. `fatal` names the domains each of which alone has the only copy of something.

    Args:
        shards: For every rank, the verified copies of its committed shard. Copies that lack chunks count for the
            chunks they have, as a restore takes chunks from several sources.
        topology: The hosts that are not dead. Copies on other hosts do not count. A level that labels none of them
            is left out; hosts without the label share one domain (R18), and hosts on one machine that are not
            explicit share that of the machine (R1).
        parity: By rank, for how many copies its parity stands, and the hosts of its set that have it, its own first.
            For one fewer with each of them that is in the domain of another.

    Complexity: copies + levels x (different places + their damaged chunks); ranks of one host lie in the same places.
    Source: ours.
    """
    found = []
    ranks = {
        (frozenset((copy.host, copy.missing) for copy in copies), (parity or {}).get(rank) and rank): rank
        for rank, copies in enumerate(shards)
    }.values()
    for level in (*levels_of(topology.failure_domains)[:-1], *topology.groups, HOST_LEVEL):
        if level != HOST_LEVEL and not any(host.domain(level) for host in topology.hosts.values()):
            continue
        least, fatal = len(topology.hosts), set()
        for rank in ranks:
            copies, (count, members) = shards[rank], (parity or {}).get(rank, (0, ()))
            there = {topology.hosts[host].domain(level) for host in members if host in topology.hosts}
            more = max(0, count - (len(members) - len(there)))
            for domains in _domains_by_chunk([c for c in copies if c.host in topology.hosts], level, topology):
                least = min(least, len(domains) + more)
                fatal |= domains if len(domains) + more == 1 else set()
        words = sorted(_in_words(topology, level, domain) for domain in fatal) if least == 1 else []
        found.append(SurvivalRow(level=level, tolerated=least - 1, fatal=words))
    return found


def survival_rows(job: Job, live_hosts: Iterable[str], lost_max: int) -> list[OddsRow]:
    """Return by hosts lost at once, one to `lost_max`, the chance that RAM keeps every shard of the newest commit.

    It is at least that, and said to be, where a copy lacks chunks, or a shard is too short for each row of its parity
    set: these survive some losses that are counted here as fatal.
    """
    step, live = job.newest_committed, frozenset(live_hosts)
    if step is None:
        return []
    cases, is_exact, sets = set[tuple[frozenset[str], frozenset[str], int]](), True, job.parity_sets(step)
    for rank in range(job.commits[step].world_size):
        copies = [copy for host, copy in job.copies.get(step, {}).get(rank, {}).items() if host in live]
        is_short = rank in sets and any(copy.spec.chunks_count < sets[rank].data for copy in copies)
        is_exact = is_exact and not is_short and not any(copy.missing for copy in copies)
        there = ([host for host in hosts if host in live] for hosts in job.parity_hosts(step, rank).values())
        parity = frozenset(min(hosts) for hosts in there if hosts)
        cases.add((frozenset(c.host for c in copies if not c.missing), parity, job.parity_copies(step, rank, live)))
    fatal = {own.union(more) for own, parity, count in cases for more in combinations(sorted(parity), count)}
    odds = survival_odds(bonds_of(fatal), len(live), min(lost_max, len(live)), states_max=STATES_MAX)
    return [OddsRow(lost, float(each.chance), is_exact and each.is_exact) for lost, each in enumerate(odds) if lost]


def beyond_text(odds: Iterable[OddsRow]) -> str:
    """Return ", 2 hosts: 3.2% fatal" of the fewest lost hosts that may be fatal, or "" where all such losses are."""
    first = next((row for row in odds if row.chance < 1), None)
    if first is None or first.chance == 0:
        return ""
    return (
        f", {plural(first.lost, 'host')}: {'' if first.is_exact else 'at most '}{100 * (1 - first.chance):.2g}% fatal"
    )


def held_for(
    rank_hosts: Mapping[int, str], ranks: Mapping[int, Collection[str]], hosts: Iterable[str]
) -> dict[str, list[str]]:
    """Return, per host, the hosts of the ranks whose shards it holds: itself first if it holds its own.

    Args:
        rank_hosts: Host of every rank.
        ranks: rank -> hosts with its shard of one step.
        hosts: The hosts to answer for.
    """
    table: dict[str, set[str]] = {host: set() for host in hosts}
    for rank, copies in ranks.items():
        for host in copies:
            if host in table and rank in rank_hosts:
                table[host].add(rank_hosts[rank])
    return {host: own_first(host, owners) for host, owners in table.items()}


def own_first(host: str, owners: Iterable[str]) -> list[str]:
    """Return hosts in order, but for one that comes first."""
    return sorted(owners, key=lambda owner: (owner != host, owner))


def _domains_by_chunk(copies: list[Copy], level: str, topology: Topology) -> Iterable[set[str]]:
    """Yield the set of domains that hold a chunk, once per different case."""
    yield {topology.hosts[c.host].domain(level) for c in copies}  # chunks that no copy lacks, if there are any
    for index in sorted(set().union(*(c.missing for c in copies))):
        yield {topology.hosts[c.host].domain(level) for c in copies if index not in c.missing}


def _in_words(topology: Topology, level: str, domain: str) -> str:
    members = [host.host_id for host in topology.hosts.values() if host.domain(level) == domain]
    if level != HOST_LEVEL:
        return f"{level} {domain}" if domain else f"the hosts without a {level} label ({name_some(members)})"
    return members[0] if len(members) == 1 else f"the machine of {name_some(members)}"

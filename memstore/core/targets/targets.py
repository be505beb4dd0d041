"""Which hosts hold copies of a job, and what every host must know of the others. Pure (R13, R18, R29).

Placement is kept per job and moved as little as possible when hosts come and go. Read `commits.py` for the rules of
these hosts, `repair.py` for how copies get there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace as replace_host
from functools import partial
from typing import cast

from msgspec.structs import replace

from memstore.core.cluster.effects import Effects, SentOrders
from memstore.core.cluster.facts import AttemptOpened
from memstore.core.cluster.job import Attempt, Job
from memstore.core.cluster.state import ClusterState
from memstore.core.cluster.step_lookup import versions_count
from memstore.core.cluster.text import named_hosts
from memstore.core.targets.drain import Drains
from memstore.core.targets.shared_shards import SharedShards
from memstore.core.wire.orders import HostAddress, HostNews, PushTargets, RankTargets
from memstore.core.wire.peer_messages import ShardHost
from placement.groups import Placement, Strategy
from placement.parity_sets import crowded_groups, parity_groups, parity_sets
from placement.scatter import scattered
from placement.topology import Topology, levels_of, spread_level, with_groups
from recovery.inventory import StepId
from recovery.parity import ParitySet
from recovery.planner import RecoveryPlan


class PeerHostLookup:
    """`ClusterView.peer_hosts` for many ranks in a row, while nothing changes: once a host and placement."""

    def __init__(self, view: ClusterView, job: Job, attempt: Attempt, step: StepId | None = None) -> None:
        self._view, self._job, self._attempt, self._step = view, job, attempt, step
        self._sets = attempt.parity_sets if step is None else job.parity_sets(step)
        self._found: dict[tuple[str, int], list[str]] = {}  # by the rank's own host and placement

    def peer_hosts(self, rank: int) -> list[str]:
        """As `ClusterView.peer_hosts`."""
        attempt, hosts = self._attempt, self._view.state.hosts
        member = attempt.members.get(rank)
        if member is None or attempt.writers or self._sets or not hosts.is_live(member.host_id):
            # It depends on the rank, not on its host alone.
            return self._view.peer_hosts(self._job, attempt, rank, self._step)
        key = member.host_id, rank % attempt.scatter
        if key not in self._found:
            self._found[key] = self._view.peer_hosts(self._job, attempt, rank, self._step)
        return self._found[key]


class ClusterView:
    """Placement and addresses of all jobs and hosts."""

    def __init__(self, state: ClusterState, out: Effects, sent: SentOrders, drains: Drains) -> None:
        self.state, self.out, self.sent, self.drains = state, out, sent, drains
        self.shared_shards = SharedShards(state, out)
        self.news: set[str] = set()  # hosts that came, moved or went, not yet announced to all
        self._sent_addresses: dict[str, HostAddress] = {}  # host -> where it is, as last sent to all

    def eligible_hosts(
        self, rank_hosts: Iterable[str], replicas: int, *, prefer: Iterable[str] = (), level_asked: str = "host"
    ) -> set[str]:
        """Return the hosts that may hold copies: those with ranks, those labelled for it, and substitutes (R13).

        Substitutes take the places of dead hosts (R29), and make up the number where ranks sit on fewer hosts than
        there are to be copies (R18: as many as the cluster allows). Those in `prefer` stay, so that a newcomer moves
        nothing. A host that is to go counts as gone, unless there are not enough others.
        """
        hosts, now = self.state.hosts, self.state.now
        wanted = set(rank_hosts)
        leaving = [h for h in hosts.live_ids() if self.state.is_draining(h)]
        if leaving == hosts.live_ids():
            leaving = []  # no host stays: moving copies about gains nothing
        live = {h for h in wanted if hosts.is_live(h) and h not in leaving}
        others = [h for h in hosts.live_ids() if h not in wanted and h not in leaving]
        labelled = {h for h in others if hosts.states[h].info.labels.get("memstore") == "replica"}
        kept = set(prefer)
        spare = sorted((h for h in others if h not in labelled), key=lambda h: (h not in kept, h))
        substitutes = [h for h in spare if not hosts.is_on_probation(now, h)]
        count = max(len(wanted) - len(live), replicas - len(live | labelled), 0)
        chosen = live | labelled | set(substitutes[:count])
        if level_asked != "host":
            covered = {hosts.states[h].info.labels.get(level_asked) for h in chosen} - {None}
            for host in substitutes[count:]:
                value = hosts.states[host].info.labels.get(level_asked)
                if len(covered) < replicas and value is not None and value not in covered:
                    chosen.add(host)
                    covered.add(value)
        # A copy on a host that dies often is worth more than none; one on a host that is to go will surely be gone.
        flaky = [h for h in spare if hosts.is_on_probation(now, h)]
        chosen.update(flaky[: max(0, replicas - len(chosen))])
        leaving.sort(key=lambda h: (h not in wanted, h not in kept, h))
        return chosen | set(leaving[: max(0, replicas - len(chosen))])

    def asked_level(self, rank_hosts: Iterable[str], replicas: int, before: Iterable[str]) -> str:
        """Return the coarsest spread level the job ever had, by which fewer racks are measured (R18).

        `before` are those of its attempts: one that began without knowing of an older one may have a finer level.

        A job that spreads over every live host would spread over the dead ones too: racks that are lost at its begin
        count. A host that went with notice is no loss.
        """
        hosts, drains = self.state.hosts, self.drains
        eligible = self.eligible_hosts(rank_hosts, replicas)
        if eligible.issuperset(hosts.live_ids()):
            eligible.update(h for h in hosts.states if not drains.went(h))
        level = spread_level(hosts.topology(sorted(eligible)), replicas).level
        levels = levels_of(hosts.failure_domains)
        return min([level, *(each for each in before if each in levels)], key=levels.index)

    def with_writers(self, fact: AttemptOpened) -> AttemptOpened:
        """Return the fact of an attempt with its writers, for the hosts that its ranks are on."""
        if not fact.shard_of:
            return fact
        eligible = self.eligible_hosts(fact.hosts, int(fact.config["replicas"]), level_asked=fact.level_asked)
        return replace(fact, writers=self.shared_shards.chosen(fact, eligible))

    def placement(self, job: Job) -> Placement | None:
        """Return where the newest attempt's copies go, among the hosts that are not dead.

        If a host comes back before anything was copied in its place, the old placement is restored: moves are counted
        from `Job.last_copied_placement`, not from the interim placement.
        """
        attempt = job.newest
        if attempt is None:
            return None
        if job.placement is None:
            rank_hosts = (member.host_id for member in attempt.members.values())
            before = job.last_copied_placement
            prefer = before.targets if before is not None else ()
            hosts = self.eligible_hosts(rank_hosts, attempt.replicas, prefer=prefer, level_asked=attempt.level_asked)
            if not hosts:
                return None
            topology = self.topology(attempt, hosts)
            strategy = cast(Strategy, str(attempt.config["placement"]))
            place = partial(scattered, before, replicas=attempt.replicas, strategy=strategy, scatter=attempt.scatter)
            job.placement = place(topology)
            if (limited := self._with_limits(job, attempt, topology, job.placement)) is not None:
                by_room = place(limited[0], demand_bytes=limited[1])
                if all(each.target for each in by_room.unmet):  # else the hosts say with numbers what lacks
                    job.placement = by_room
            job.group_domains = [topology.domains(level) for level in topology.groups_apart]
            self._say_groups(job, topology, job.placement)
        return job.placement

    def _with_limits(
        self, job: Job, attempt: Attempt, topology: Topology, placed: Placement
    ) -> tuple[Topology, dict[str, int]] | None:
        """Return the hosts with their room for copies, and what those take by owner, if a host has less than it gets.

        None also while the ranks' needs are not known, and where copies are not those of placement alone. What other
        jobs have claimed is not looked at: their hosts refuse with numbers.
        """
        is_plain = attempt.scatter == 1 and not attempt.shard_of and not attempt.parity_sets
        if not self.state.rules.chunk_bytes or len(attempt.needs) < attempt.world_size or not is_plain:
            return None
        own, hosts = Counter[str](), self.state.hosts.states
        for rank, member in attempt.members.items():
            own[member.host_id] += attempt.needs[rank] * versions_count(job, attempt) * self.state.rules.chunk_bytes
        limits = {host: hosts[host].info.limit_bytes for host in topology.hosts}
        free = {host: max(0, limit - own[host]) for host, limit in limits.items() if limit}
        taken = Counter[str]()
        for owner, held in placed.targets.items():
            taken.update(dict.fromkeys(held, own[owner]))
        if all(nbytes <= free.get(host, nbytes) for host, nbytes in taken.items()):
            return None
        limited = (replace_host(host, capacity_bytes=free.get(host.host_id)) for host in topology.hosts.values())
        return Topology.of(limited, topology.failure_domains, topology.groups), own

    def fit(self, job: Job, attempt: Attempt) -> None:
        """Give hosts with less memory fewer copies, now that the needs of all ranks are known (R10)."""
        placement = self.placement(job)
        if placement is not None and self._with_limits(
            job, attempt, self.topology(attempt, placement.targets), placement
        ):
            job.placement = None
            if self.placement(job) != placement:
                self.send_targets(job)

    def topology(self, attempt: Attempt, hosts: Iterable[str]) -> Topology:
        """Return some hosts with their domains, the groups of the attempt's ranks among them (R18.8)."""
        found = self.state.hosts.topology(sorted(hosts))
        return with_groups(found, attempt.group_levels()) if attempt.groups else found

    def _say_groups(self, job: Job, topology: Topology, placed: Placement) -> None:
        """Log, when it changes, which groups of ranks have all copies of a shard within them, and why."""
        enclosed = [each for one in placed.placements for each in one.unmet if each.level in topology.groups]
        said = [*topology.group_warnings(placed.level)]
        for level in dict.fromkeys(each.level for each in enclosed):
            owners = sorted({each.owner for each in enclosed if each.level == level})
            why = next(each.why for each in enclosed if each.level == level)
            said.append(f"{named_hosts(owners)}: {why}. Losing that {level} as one would lose steps")
        for text in said if said != job.groups_said else ():
            self.out.log(f"job {job.name!r}: {text}", "warning")
        job.groups_said = said

    def owner_host(self, job: Job, attempt: Attempt, rank: int) -> str:
        """Return the host whose targets a rank's copies follow: its own, or a live holder's if that is dead."""
        member = attempt.members.get(rank)
        if member is not None and self.state.hosts.is_live(member.host_id):
            return (
                self._substitute_for(job, member.host_id) if self.state.is_draining(member.host_id) else member.host_id
            )
        for step in sorted(job.copies, reverse=True):
            live = sorted(h for h in job.copies[step].get(rank, {}) if self.state.hosts.is_live(h))
            if live:
                placed = job.placement.targets if job.placement is not None else {}
                # The only holder may be about to go too: then its copies follow its substitute.
                return next((h for h in live if h in placed), None) or self._substitute_for(job, live[0])
        return member.host_id if member is not None else ""

    def wanted(self, job: Job, attempt: Attempt, rank: int, step: StepId | None = None) -> list[str]:
        """Return the hosts that are to hold a rank's shard: its owner, and its targets or other writers' (R34).

        Only its owner, if the shard is added into other ranks' parity: at a step, or at the next one.
        """
        placement, owner = self.placement(job), self.owner_host(job, attempt, rank)
        if rank in (job.parity_sets(step) if step is not None else attempt.parity_sets):
            return [owner]
        targets = placement.targets_of(owner, rank) if placement is not None else ()
        return [owner, *self.shared_shards.targets(job, attempt, rank, owner, targets)]

    def place_of(self, placement: Placement, attempt: Attempt, rank: int) -> tuple[str, int] | None:
        """Return what decides which hosts are to hold a rank's copies, where it is the same for many ranks; else None.

        Its host and its turn among the placements, unless that host is dead or ranks share a state.
        """
        member = attempt.members.get(rank)
        if member is None or attempt.writers or not self.state.hosts.is_live(member.host_id):
            return None
        return member.host_id, rank % len(placement.placements)

    def peer_hosts(self, job: Job, attempt: Attempt, rank: int, step: StepId | None = None) -> list[str]:
        """Return the hosts that are to hold a rank's shard besides the rank's own, of a step or of the next one."""
        member = attempt.members.get(rank)
        return [h for h in self.wanted(job, attempt, rank, step) if member is None or h != member.host_id]

    def parity_sets(self, job: Job, attempt: Attempt, needs: Sequence[int]) -> dict[int, ParitySet]:
        """Return the sets of ranks whose shards are to be added into one another's parity, by rank.

        None where ranks share shards, and none in which no shard has two chunks: a copy is cheap, and quick.

        Args:
            job: The job.
            attempt: Its newest attempt.
            needs: The slots of one version, by rank.
        """
        placement = self.placement(job)
        if not attempt.parity or attempt.shard_of or placement is None:
            return {}
        ranks_of: dict[str, list[int]] = {}
        for rank, member in attempt.members.items():
            ranks_of.setdefault(member.host_id, []).append(rank)
        spare = attempt.replicas - 1
        topology = self.topology(attempt, ranks_of)
        groups = parity_groups(topology, placement.level, attempt.parity, spare)
        for level in crowded_groups(topology, groups, spare):
            why = f"there are too few or too large ones to keep parity that survives the loss of one {level}"
            self.out.log(f"job {job.name!r}: {why}", "warning")
        found = [ranks for ranks in parity_sets(groups, ranks_of, spare) if max(needs[rank] for rank in ranks) > 1]
        return {rank: ParitySet(ranks, spare) for ranks in found for rank in ranks}

    def _substitute_for(self, job: Job, leaving: str) -> str:
        """Return a staying host to replace one that is to go; one that has its copies already, if there is one."""
        placement = self.placement(job)
        if placement is None or leaving in placement.targets:
            return leaving  # there is no other
        if job.substitute_for.get(leaving) not in placement.targets:
            before = job.last_copied_placement.targets.get(leaving, ()) if job.last_copied_placement is not None else ()
            load = [*job.substitute_for.values(), *(t for targets in placement.targets.values() for t in targets)]
            held = job.holders_for(leaving)
            near = sorted(placement.targets, key=lambda h: (h not in held, h not in before, load.count(h), h))
            job.substitute_for[leaving] = near[0]
        return job.substitute_for[leaving]

    def send_targets(self, job: Job, only: Collection[str] | None = None, *, is_news_only: bool = False) -> None:
        """Send hosts (all of the job, some, or those to which it is news) where to push what is put (R13)."""
        placement, attempt = self.placement(job), job.newest
        if placement is None or attempt is None or attempt.phase == "fencing":
            return
        self.send_news()
        targets = {host: list(others) for host, others in placement.targets.items()}
        for rank, member in attempt.members.items() if self.state.draining else ():
            if member.host_id not in targets and self.state.is_draining(member.host_id):
                targets[member.host_id] = self.peer_hosts(job, attempt, rank)
        rows = self._rank_targets(job, attempt)
        for host, others in targets.items():
            if only is None or host in only:
                order = PushTargets(
                    job=job.name, attempt=attempt.attempt_number, targets=tuple(others), ranks=tuple(rows.get(host, ()))
                )
                if not (is_news_only and self.sent.is_known(host, order)):
                    self.sent.note(host, order)
                    self.out.send(host, order)

    def _rank_targets(self, job: Job, attempt: Attempt) -> dict[str, list[RankTargets]]:
        """Return, by host, the targets of the ranks there that are not simply those of their host."""
        lookup = PeerHostLookup(self, job, attempt)
        found = self.shared_shards.rows(attempt, lookup.peer_hosts)
        for rank, member in attempt.members.items():
            ranks = attempt.parity_sets.get(rank)
            if ranks or (rank % attempt.scatter and rank not in attempt.writers):
                others, spare = (ranks.ranks, ranks.spare) if ranks is not None else ((), 0)
                members = tuple(ShardHost(each, attempt.members[each].host_id) for each in others)
                row = RankTargets(rank, tuple(lookup.peer_hosts(rank)), (), members, spare)
                found.setdefault(member.host_id, []).append(row)
        return found

    def send_initial_state(self, hosts: Iterable[str]) -> None:
        """Send hosts whose session has just begun the addresses of all others, and which jobs there are."""
        rows = tuple(self._row(host) for host in self.state.hosts.live_ids())
        order = HostNews(hosts=rows, gone=None, jobs=tuple(self.state.jobs))
        for host in hosts:
            self.out.send(host, order)

    def send_news(self) -> None:
        """Send all hosts the changes of the others' addresses, if there are any (R3, R28)."""
        rows, gone = [], []
        for host in sorted(self.news):
            row = self._row(host) if self.state.hosts.is_live(host) else None
            if row is not None and row != self._sent_addresses.get(host):
                rows.append(row)
                self._sent_addresses[host] = row
            elif row is None and self._sent_addresses.pop(host, None) is not None:
                gone.append(host)
        self.news.clear()
        if rows or gone:
            order = HostNews(hosts=tuple(rows), gone=tuple(gone), jobs=tuple(self.state.jobs))
            for host in self.state.hosts.live_ids():
                self.out.send(host, order)

    def settled(self, hosts: Iterable[str]) -> None:
        """Send all hosts all addresses at once, as a new controller."""
        self._sent_addresses = {host: self._row(host) for host in hosts}
        self.news.clear()

    def _row(self, host: str) -> HostAddress:
        info = self.state.hosts.states[host].info
        return HostAddress(info.host_id, info.endpoints, info.incarnation)

    def awaited_hosts(self, job: Job, found: RecoveryPlan) -> frozenset[str]:
        """Return the hosts that a get waits for: they may have a newer step, or its bytes in RAM (R23, R24)."""
        if found.verdict == "wait":
            return found.wait_for
        if found.verdict == "none":
            return frozenset(self.silent_hosts(job))
        return frozenset(self.late_hosts() if found.bytes_durable else ())

    def silent_hosts(self, job: Job) -> set[str]:
        """Return hosts that may know the job, neither answering nor known to be gone for long (R24)."""
        named = {host for step in job.commits for host in job.committed_on(step)}
        return self._silent(named) | self.late_hosts()

    def late_hosts(self) -> set[str]:
        """Return the announced hosts that have not come yet, just after a start: any of them may know any job."""
        is_early = self.state.now < self.state.late_until_s
        return self._silent(self.state.expected_hosts) if is_early else set()

    def _silent(self, names: set[str]) -> set[str]:
        hosts, now = self.state.hosts, self.state.now
        known_gone = {
            h for h, s in hosts.states.items() if s.status == "dead" and now - s.since_s > self.state.rules.dead_after_s
        }
        return {h for h in names if not hosts.is_answering(h)} - known_gone

"""Targets per host: which hosts can still take a peer's copies.

Room, balance and separation, one (owner, target) at a time.

The replica groups of `groups.py` know neither capacity nor history. TargetAssignment takes pairs that ought
to be kept, refuses those that break a limit, and fills the gaps with the fewest new pairs.
Pure: no torch, ray, socket, clock, environment or file access. Read `groups.py` next.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from placement.topology import Topology, levels_of

DISPLACEMENT_STEPS_MAX = 500_000  # peers and domains looked at while making room; about a second in all


class TargetAssignment:
    """Targets per owner and peers per host, both always consistent.

    A host takes at most `peers_max` peers: its fair share (all copies to place, divided by the
    hosts that can hold any), rounded up, plus `extra`. With room everywhere that is `replicas - 1 + extra`.
    """

    def __init__(
        self, topology: Topology, *, level: str, replicas: int, demand_bytes: Mapping[str, int], extra: int = 1
    ) -> None:
        ids = sorted(topology.hosts)
        self.wanted = replicas - 1
        self.targets: dict[str, list[str]] = {host: [] for host in ids}
        self.peers: dict[str, dict[str, None]] = {host: {} for host in ids}
        self.demand = {host: demand_bytes.get(host, 0) for host in ids}
        self._free = {host: topology.hosts[host].capacity_bytes for host in ids}
        self._least = min(self.demand.values())
        holders_count = sum(self._has_room(host, self._least) for host in ids)
        self.peers_max = -(-len(ids) * self.wanted // max(1, holders_count)) + extra
        levels = levels_of(topology.failure_domains)
        rungs = levels[levels.index(level) :]
        self._domains = [topology.domains(rung) for rung in rungs]
        self._domains.append({host: host for host in ids})  # last resort: merely another host
        self._by_domain: dict[str, list[str]] = defaultdict(list)
        for host in ids:
            self._by_domain[self._domains[0][host]].append(host)
        self._pools: dict[int, _Pool] = {}
        self._kept: set[tuple[str, str]] = set()
        self._steps_left = DISPLACEMENT_STEPS_MAX
        self._hopeless: set[tuple[frozenset[str], int]] = set()

    def order(self) -> list[str]:
        """Return the owners in the order to serve them: largest demand first, then by id."""
        return sorted(self.targets, key=lambda owner: (-self.demand[owner], owner))

    def keep(self, owner: str, target: str) -> bool:
        """Assign a pair that should stay; False if it breaks separation, balance or capacity."""
        if target == owner or len(self.targets[owner]) >= self.wanted or target in self.targets[owner]:
            return False
        if self._domains[0][target] in self._taken(owner, 0) or not self._is_open(target):
            return False
        if not self._has_room(target, self.demand[owner]):
            return False
        self._assign(owner, target)
        self._kept.add((owner, target))
        return True

    def fill(self, owner: str, spare: Iterable[str] = ()) -> None:
        """Give `owner` the targets it lacks: in other domains, else as far apart as can be.

        At each level, from the spread level down to "any other host", the `spare` targets (old
        ones that could not be kept) come first, then the host with the fewest peers. Leaves
        the owner short only if no host has room.
        """
        known = [host for host in spare if host in self.targets]
        for rung in range(len(self._domains)):
            while len(self.targets[owner]) < self.wanted and self._assign_one(owner, rung, known):
                pass

    def _assign_one(self, owner: str, rung: int, spare: Sequence[str]) -> bool:
        taken = self._taken(owner, rung)
        for host in spare:
            fits = self._is_open(host) and self._has_room(host, self.demand[owner])
            if fits and host not in self.targets[owner] and self._domains[rung][host] not in taken:
                self._assign(owner, host)
                self._kept.add((owner, host))
                return True
        best = self._pool(rung).best(taken, partial(self._is_better, owner, ()))
        if best is not None:
            self._assign(owner, best)
            return True
        return rung == 0 and self._displace(owner)

    def _displace(self, owner: str) -> bool:
        """Make room for `owner` by moving peers on, along the cheapest chain of moves.

        Shortest augmenting path, where moving a pair that is new anyway costs nothing and moving
        a kept one costs one: with unit room this keeps the number of new pairs minimal.
        Complexity: O(hosts x replicas) a search, DISPLACEMENT_STEPS_MAX steps over the life of
        the object; where they run out the pair stays unmet, and is reported.
        Source: successive shortest paths on the owner-domain-host flow; the budget is ours.
        """
        pool = self._pool(0)
        hopeless = (frozenset(self._taken(owner, 0)), self.demand[owner])
        if pool.is_empty() or hopeless in self._hopeless:
            return False
        moves: dict[str, tuple[str, str]] = {}  # peer to move on -> (who gets its place, where)
        seen = {owner}
        untried = dict(self._by_domain)
        self._steps_left -= len(untried)
        queue = deque([owner])
        while queue and self._steps_left > 0:
            mover = queue.popleft()
            lost = [host for _, host in _chain(moves, mover)]  # each takes one newcomer already
            taken = self._taken(mover, 0, but=lost[0] if lost else "")
            found = pool.best(taken, partial(self._is_better, mover, lost))
            if found is not None:
                self._shift(owner, moves, mover, found)
                return True
            for host in (each for name in [n for n in untried if n not in taken] for each in untried.pop(name)):
                for peer in self.peers[host]:
                    self._steps_left -= 1
                    if peer in seen or not self._has_room(host, self.demand[mover] - self.demand[peer]):
                        continue
                    seen.add(peer)
                    moves[peer] = (mover, host)
                    (queue.append if (peer, host) in self._kept else queue.appendleft)(peer)
        self._hopeless.add(hopeless)
        return False

    def _shift(self, owner: str, moves: Mapping[str, tuple[str, str]], mover: str, host: str) -> None:
        for next_mover, left in list(_chain(moves, mover)):
            self._unassign(mover, left)
            self._assign(mover, host)
            mover, host = next_mover, left
        self._assign(owner, host)

    def _taken(self, owner: str, rung: int, but: str = "") -> set[str]:
        domain = self._domains[rung]
        return {domain[owner], *(domain[host] for host in self.targets[owner] if host != but)}

    def _has_room(self, host: str, nbytes: int) -> bool:
        free = self._free[host]
        return free is None or free >= nbytes

    def _is_better(self, owner: str, lost: Sequence[str], host: str) -> bool:
        return host not in lost and self._has_room(host, self.demand[owner])

    def _is_open(self, host: str) -> bool:
        return len(self.peers[host]) < self.peers_max

    def _assign(self, owner: str, host: str) -> None:
        self.targets[owner].append(host)
        self.peers[host][owner] = None
        self._account(host, self.demand[owner])

    def _unassign(self, owner: str, host: str) -> None:
        self.targets[owner].remove(host)
        del self.peers[host][owner]
        self._kept.discard((owner, host))
        self._account(host, -self.demand[owner])

    def _account(self, host: str, nbytes: int) -> None:
        free = self._free[host]
        if free is not None:
            self._free[host] = free - nbytes
        for pool in self._pools.values():
            pool.update(host, self._load(host))

    def _load(self, host: str) -> int | None:
        return len(self.peers[host]) if self._is_open(host) and self._has_room(host, self._least) else None

    def _pool(self, rung: int) -> _Pool:
        if rung not in self._pools:
            self._pools[rung] = _Pool(self._domains[rung], {host: self._load(host) for host in self.peers})
        return self._pools[rung]


def _chain(moves: Mapping[str, tuple[str, str]], mover: str) -> Iterable[tuple[str, str]]:
    """Follow the chain of taken places from `mover` back to the owner that started."""
    while mover in moves:
        yield moves[mover]
        mover = moves[mover][0]


class _Pool:
    """Hosts with a free place, least loaded first, whole domains skipped at once.

    Two levels of heaps with stale entries dropped when they surface: every domain that has a
    free place stands in `_tops` under a key no larger than its least loaded host's.
    """

    def __init__(self, domain: Mapping[str, str], loads: Mapping[str, int | None]) -> None:
        self._domain = domain
        self._load = {host: load for host, load in loads.items() if load is not None}
        self._heaps: dict[str, list[tuple[int, str]]] = {name: [] for name in domain.values()}
        for host, load in self._load.items():
            self._heaps[domain[host]].append((load, host))
        for heap in self._heaps.values():
            heapq.heapify(heap)
        self._tops = [(*heap[0], name) for name, heap in self._heaps.items() if heap]
        heapq.heapify(self._tops)

    def is_empty(self) -> bool:
        return not self._load

    def update(self, host: str, load: int | None) -> None:
        """Change a host's load; None closes it."""
        if load is None:
            self._load.pop(host, None)
        elif self._load.get(host) != load:
            self._load[host] = load
            heapq.heappush(self._heaps[self._domain[host]], (load, host))
            heapq.heappush(self._tops, (load, host, self._domain[host]))

    def best(self, taken: set[str], fits: Callable[[str], bool]) -> str | None:
        """Return the least loaded host outside the `taken` domains that fits, if any."""
        aside: dict[str, tuple[int, str, str]] = {}
        found = None
        while self._tops and found is None:
            load, host, name = heapq.heappop(self._tops)
            heap = self._heaps[name]
            while heap and self._load.get(heap[0][1]) != heap[0][0]:
                heapq.heappop(heap)
            if name in aside or not heap:
                continue
            if heap[0] != (load, host):
                heapq.heappush(self._tops, (*heap[0], name))
                continue
            aside[name] = (load, host, name)
            if name not in taken:
                found = next((each for _, each in self._live(heap) if fits(each)), None)
        for entry in aside.values():
            heapq.heappush(self._tops, entry)
        return found

    def _live(self, heap: list[tuple[int, str]]) -> Iterable[tuple[int, str]]:
        yield heap[0]
        yield from (entry for entry in sorted(heap) if self._load.get(entry[1]) == entry[0])

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
from dataclasses import dataclass
from functools import partial
from itertools import product

from placement.topology import Topology, levels_of

Cell = tuple[str, ...]  # the domains of a host: at the level that copies are spread over, and at each level of groups

DISPLACEMENT_STEPS_MAX = 500_000  # peers and domains looked at while making room; about a second in all


class TargetAssignment:
    """Targets per owner and peers per host, both always consistent.

    A host takes at most `peers_max` peers: its fair share (all copies to place, divided by the
    hosts that can hold any), rounded up, plus `extra`. With room everywhere that is `replicas - 1 + extra`.

    The targets of an owner lie in distinct domains of `level`, and not all of them in its own domain of the first
    `groups_kept` levels of groups; of the further ones only where that costs no other pair its place.
    """

    def __init__(
        self,
        topology: Topology,
        *,
        level: str,
        replicas: int,
        demand_bytes: Mapping[str, int],
        extra: int = 1,
        groups_kept: int = 0,
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
        groups = [topology.domains(each) for each in topology.groups_apart]
        self._cells = [
            {host: (domains[host], *(each[host] for each in groups)) for host in ids} for domains in self._domains
        ]
        self._by_cell: dict[Cell, list[str]] = defaultdict(list)
        for host in ids:
            self._by_cell[self._cells[0][host]].append(host)
        # Which levels of groups are given up, the finest first; of the first ones none.
        self._waivers = list(product((False, True), repeat=len(groups)))
        self._kept_waiver = tuple(at >= groups_kept for at in range(len(groups)))
        self._pools: dict[int, _Pool] = {}
        self._kept: set[tuple[str, str]] = set()
        self._steps_left = DISPLACEMENT_STEPS_MAX
        self._hopeless: set[tuple[object, int]] = set()

    def order(self) -> list[str]:
        """Return the owners in the order to serve them: largest demand first, then by id."""
        return sorted(self.targets, key=lambda owner: (-self.demand[owner], owner))

    def keep(self, owner: str, target: str) -> bool:
        """Assign a pair that should stay; False if it breaks separation, balance or capacity."""
        if target == owner or len(self.targets[owner]) >= self.wanted or target in self.targets[owner]:
            return False
        if not self._is_open(target) or not self._wish(owner, 0, self._kept_waiver).allows(self._cells[0][target]):
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
        for rung, waiver in product(range(len(self._domains)), self._waivers):
            while len(self.targets[owner]) < self.wanted and self._assign_one(owner, rung, waiver, known):
                pass

    def _assign_one(self, owner: str, rung: int, waiver: tuple[bool, ...], spare: Sequence[str]) -> bool:
        wish, cells = self._wish(owner, rung, waiver), self._cells[rung]
        for host in spare:
            fits = self._is_open(host) and self._has_room(host, self.demand[owner])
            if fits and host not in self.targets[owner] and wish.allows(cells[host]):
                self._assign(owner, host)
                self._kept.add((owner, host))
                return True
        best = self._pool(rung).best(wish.allows, partial(self._is_better, owner, ()))
        if best is not None:
            self._assign(owner, best)
            return True
        return rung == 0 and waiver == self._kept_waiver and self._displace(owner)

    def _displace(self, owner: str) -> bool:
        """Make room for `owner` by moving peers on, along the cheapest chain of moves.

        Shortest augmenting path, where moving a pair that is new anyway costs nothing and moving
        a kept one costs one: with unit room this keeps the number of new pairs minimal.
        Complexity: O(hosts x replicas) a search, DISPLACEMENT_STEPS_MAX steps over the life of
        the object; where they run out the pair stays unmet, and is reported.
        Source: successive shortest paths on the owner-domain-host flow; the budget is ours.
        """
        pool = self._pool(0)
        hopeless = (self._wish(owner, 0, self._kept_waiver), self.demand[owner])
        if pool.is_empty() or hopeless in self._hopeless:
            return False
        moves: dict[str, tuple[str, str]] = {}  # peer to move on -> (who gets its place, where)
        seen = {owner}
        untried = dict(self._by_cell)
        self._steps_left -= len(untried)
        queue = deque([owner])
        while queue and self._steps_left > 0:
            mover = queue.popleft()
            lost = [host for _, host in _chain(moves, mover)]  # each takes one newcomer already
            wish = self._wish(mover, 0, self._kept_waiver, but=lost[0] if lost else "")
            found = pool.best(wish.allows, partial(self._is_better, mover, lost))
            if found is not None:
                self._shift(owner, moves, mover, found)
                return True
            for host in (each for cell in [c for c in untried if wish.allows(c)] for each in untried.pop(cell)):
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

    def _wish(self, owner: str, rung: int, waiver: tuple[bool, ...], but: str = "") -> _Wish:
        """Return where the next target of an owner may lie, if it had not the one named."""
        cells = self._cells[rung]
        own, held = cells[owner], [cells[host] for host in self.targets[owner] if host != but]
        lacking = (at for at, is_waived in enumerate(waiver, 1) if not is_waived)
        return _Wish(
            frozenset({own[0], *(cell[0] for cell in held)}),
            tuple((at, own[at]) for at in lacking if all(cell[at] == own[at] for cell in held)),
            self.wanted - len(held) - 1,
        )

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
            self._pools[rung] = _Pool(self._cells[rung], {host: self._load(host) for host in self.peers})
        return self._pools[rung]


def _chain(moves: Mapping[str, tuple[str, str]], mover: str) -> Iterable[tuple[str, str]]:
    """Follow the chain of taken places from `mover` back to the owner that started."""
    while mover in moves:
        yield moves[mover]
        mover = moves[mover][0]


@dataclass(frozen=True, slots=True)
class _Wish:
    """Where a target may lie: in no domain that is taken, and outside the groups that all copies are in so far.

    As many of these may wait as there are targets to follow.
    """

    taken: frozenset[str]
    lacking: tuple[tuple[int, str], ...]  # where in a cell, and the owner's own group
    following: int

    def allows(self, cell: Cell) -> bool:
        return cell[0] not in self.taken and (
            len(self.lacking) <= self.following or sum(cell[at] == own for at, own in self.lacking) <= self.following
        )


class _Pool:
    """Hosts with a free place, least loaded first, whole cells skipped at once.

    Two levels of heaps with stale entries dropped when they surface: every cell that has a
    free place stands in `_tops` under a key no larger than its least loaded host's.
    """

    def __init__(self, cells: Mapping[str, Cell], loads: Mapping[str, int | None]) -> None:
        self._cells = cells
        self._load = {host: load for host, load in loads.items() if load is not None}
        self._heaps: dict[Cell, list[tuple[int, str]]] = {cell: [] for cell in cells.values()}
        for host, load in self._load.items():
            self._heaps[cells[host]].append((load, host))
        for heap in self._heaps.values():
            heapq.heapify(heap)
        self._tops = [(*heap[0], cell) for cell, heap in self._heaps.items() if heap]
        heapq.heapify(self._tops)

    def is_empty(self) -> bool:
        return not self._load

    def update(self, host: str, load: int | None) -> None:
        """Change a host's load; None closes it."""
        if load is None:
            self._load.pop(host, None)
        elif self._load.get(host) != load:
            self._load[host] = load
            heapq.heappush(self._heaps[self._cells[host]], (load, host))
            heapq.heappush(self._tops, (load, host, self._cells[host]))

    def best(self, allows: Callable[[Cell], bool], fits: Callable[[str], bool]) -> str | None:
        """Return the least loaded host of the cells that are allowed that fits, if any."""
        aside: dict[Cell, tuple[int, str, Cell]] = {}
        found = None
        while self._tops and found is None:
            load, host, cell = heapq.heappop(self._tops)
            heap = self._heaps[cell]
            while heap and self._load.get(heap[0][1]) != heap[0][0]:
                heapq.heappop(heap)
            if cell in aside or not heap:
                continue
            if heap[0] != (load, host):
                heapq.heappush(self._tops, (*heap[0], cell))
                continue
            aside[cell] = (load, host, cell)
            if allows(cell):
                found = next((each for _, each in self._live(heap) if fits(each)), None)
        for entry in aside.values():
            heapq.heappush(self._tops, entry)
        return found

    def _live(self, heap: list[tuple[int, str]]) -> Iterable[tuple[int, str]]:
        yield heap[0]
        yield from (entry for entry in sorted(heap) if self._load.get(entry[1]) == entry[0])

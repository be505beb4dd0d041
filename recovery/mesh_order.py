"""Which process should be which rank, so that the fewest bytes cross the network in the next restore? (R27)

Launchers assign ranks again at every attempt; the copies stay where they are. Pure. Imports `inventory`, `planner`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from recovery.inventory import Copy, Inventory, ShardSpec, StepId
from recovery.lineage import Span
from recovery.planner import plan

NOWHERE = -1  # the place of a unit without a gain anywhere: it takes a free one


@dataclass(frozen=True, slots=True)
class MeshOrder:
    """`order[rank]` is the process, by its launcher's number, that should take logical rank `rank`."""

    order: tuple[int, ...]
    step: StepId | None = None  # the step that the order is for; None: nothing to restore, so no rank moves
    moved_bytes: int = 0  # to be fetched by hosts that lack them, with this order
    moved_bytes_before: int = 0  # the same with the launcher's ranks
    wait_for: frozenset[str] = frozenset()  # hosts that may know better (R24)


def mesh_order(
    inventory: Inventory,
    spans: tuple[Span, ...],
    *,
    process_hosts: Mapping[int, str],
    together: int = 1,
) -> MeshOrder:
    """Return the order of least moved bytes for the step that a get would restore now.

    Of equal orders the one is taken that leaves most processes the rank their launcher gave them, so the identity
    wins when nothing is gained.

    Args:
        inventory: Verified copies, facts and markers of one job.
        spans: Its lineage, from `lineage.lineage`.
        process_hosts: Host of every process, by its launcher's rank, 0 to world size - 1.
        together: So many neighbouring ranks (one tensor-parallel group, say) share a host.

    Raises:
        ValueError: `together` does not divide the processes of some host.

    Complexity: linear in copies plus `assign`.
    """
    world_size = len(process_hosts)
    blocks = _blocks(process_hosts, together)
    identity = tuple(range(world_size))
    found = plan(inventory, spans, world_size=world_size, rank_hosts=process_hosts)
    if found.step is None or found.world_size != world_size:
        return MeshOrder(identity, wait_for=found.wait_for)
    held = _held_bytes(inventory, found.step, found.specs)
    units = [range(first, first + together) for first in range(0, world_size, together)]
    hosts = sorted(blocks)
    gains = []
    for unit in units:
        own = {process_hosts[rank] for rank in unit}
        saved = {host: sum(held[rank].get(host, 0) for rank in unit) for host in own.union(*(held[r] for r in unit))}
        gains.append(
            {
                place: saved[host] * (len(units) + 1) + (own == {host})
                for place, host in enumerate(hosts)
                if host in saved and (saved[host] or own == {host})
            }
        )
    places = assign(gains, [len(blocks[host]) for host in hosts])
    order = _assigned(units, [hosts[place] if place != NOWHERE else None for place in places], blocks)
    total = sum(spec.nbytes for spec in found.specs.values())
    return MeshOrder(
        order,
        found.step,
        total - sum(held[rank].get(process_hosts[process], 0) for rank, process in enumerate(order)),
        total - sum(held[rank].get(process_hosts[rank], 0) for rank in identity),
    )


def assign(gains: Sequence[Mapping[int, int]], room: Sequence[int]) -> list[int]:
    """Return a place for each unit, or NOWHERE, so that the gains add up to the most possible.

    Args:
        gains: For each unit its gain at each place with one; above zero.
        room: How many units each place takes.

    Source: successive augmentation along the path of greatest gain, which keeps an assignment optimal while its
        units come in one at a time (Jonker and Volgenant 1987 for the dense problem). Searching only the places
        that gain something, Bellman-Ford with a queue, is ours.
    Complexity: a unit whose best place has room costs its gains; any other one search over the units already placed.
    """
    found = [NOWHERE] * len(gains)
    members: list[set[int]] = [set() for _ in room]
    for unit in range(len(gains)):
        path = _best_path(unit, gains, room, members)
        for mover, place in path:  # from the unit that comes in to the one that finds room, or drops out
            if found[mover] != NOWHERE:
                members[found[mover]].discard(mover)
            found[mover] = place
            if place != NOWHERE:
                members[place].add(mover)
    return found


def _best_path(
    unit: int, gains: Sequence[Mapping[int, int]], room: Sequence[int], members: Sequence[set[int]]
) -> list[tuple[int, int]]:
    """Return the moves for `unit` to come in: the path of greatest total gain."""
    best = {place: gain for place, gain in gains[unit].items() if room[place]}
    came_from: dict[int, tuple[int, int]] = dict.fromkeys(best, (unit, NOWHERE))  # place -> (unit, its place before)
    free = [place for place in best if len(members[place]) < room[place]]
    if free and max(best[place] for place in free) == max(best.values()):
        # Nothing beats the unit's own best place: moving others on from a full one never gains (it is optimal so far).
        place = max(free, key=lambda place: (best[place], -place))
        return [(unit, place)]
    end, end_gain, dropped = NOWHERE, 0, unit  # staying out gains nothing and costs nothing
    queue = deque(sorted(best))
    while queue:
        place = queue.popleft()
        if len(members[place]) < room[place]:
            continue
        for mover in sorted(members[place]):
            left = best[place] - gains[mover][place]
            for other, gain in gains[mover].items():
                if other != place and room[other] and left + gain > best.get(other, 0):
                    best[other], came_from[other] = left + gain, (mover, place)
                    queue.append(other)
    for place in sorted(best):
        if len(members[place]) < room[place]:
            if best[place] > end_gain:
                end, end_gain, dropped = place, best[place], NOWHERE
            continue
        for mover in sorted(members[place]):
            if best[place] - gains[mover][place] > end_gain:
                end, end_gain, dropped = place, best[place] - gains[mover][place], mover
    path = [(dropped, NOWHERE)] if dropped != NOWHERE else []
    while end != NOWHERE:
        mover, before = came_from[end]
        path.append((mover, end))
        end = before
    return path[::-1]


def _blocks(process_hosts: Mapping[int, str], together: int) -> dict[str, list[tuple[int, ...]]]:
    """Return each host's processes in blocks of `together`, by number."""
    if together < 1:
        raise ValueError(f"together={together}: at least 1 rank is a group")
    on_host: dict[str, list[int]] = {}
    for process in sorted(process_hosts):
        on_host.setdefault(process_hosts[process], []).append(process)
    for host, processes in on_host.items():
        if len(processes) % together:
            raise ValueError(f"together={together}: host {host} runs {len(processes)} ranks, no multiple of it")
    return {
        host: [tuple(processes[n : n + together]) for n in range(0, len(processes), together)]
        for host, processes in on_host.items()
    }


def _held_bytes(inventory: Inventory, step: StepId, specs: Mapping[int, ShardSpec]) -> list[dict[str, int]]:
    """Return for each rank how many bytes of its shard each host holds."""
    held: list[dict[str, int]] = [{} for _ in specs]
    for copy in inventory.copies:
        shard = copy.shard
        is_of_step = (shard.job, shard.attempt, shard.step) == (inventory.job, step.attempt, step.step)
        if is_of_step and copy.spec == specs.get(shard.rank):
            held[shard.rank][copy.host] = _nbytes(copy)
    return held


def _nbytes(copy: Copy) -> int:
    lacking = sum(copy.spec.chunk_nbytes(n) for n in copy.missing if 0 <= n < copy.spec.chunks_count)
    return copy.spec.nbytes - lacking


def _assigned(
    units: Sequence[range], hosts: Sequence[str | None], blocks: Mapping[str, Sequence[tuple[int, ...]]]
) -> tuple[int, ...]:
    """Return the process of every rank: on the unit's host its own block if it is there, else the next free one."""
    free = {host: list(found) for host, found in blocks.items()}
    assigned: dict[int, tuple[int, ...]] = {}
    for number, (unit, host) in enumerate(zip(units, hosts, strict=True)):
        if host is not None and tuple(unit) in free[host]:
            assigned[number] = tuple(unit)
            free[host].remove(tuple(unit))
    for number, host in enumerate(hosts):
        if number not in assigned and host is not None:
            assigned[number] = free[host].pop(0)
    left = sorted(block for found in free.values() for block in found)
    for number in range(len(units)):
        if number not in assigned:
            assigned[number] = left.pop(0)
    return tuple(process for number in range(len(units)) for process in assigned[number])

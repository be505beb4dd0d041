"""The planner against brute force: every set of lost hosts of small clusters, with real placements (R24)."""

from __future__ import annotations

from itertools import combinations

import pytest

from recovery import CommitFact, Copy, DurableMarker, Inventory, ShardId, ShardSpec, Span, StepId, relaunch, what_if

JOB = "job"
SPANS = (Span(1, None),)
CHUNKS = 5


def shard(rank: int, step: int, world_size: int) -> ShardSpec:
    """Return a shard of five chunks, the last of them short."""
    return ShardSpec(f"{step}-{rank}", CHUNKS * 10 - 3, 10, CHUNKS, world_size)


def holders(kind: str, hosts_count: int, replicas: int) -> list[tuple[int, ...]]:
    """Return for each host the hosts that hold its shards: Gemini's ring, or groups with the remainder as a ring."""
    if kind == "ring":
        return [tuple((host + k) % hosts_count for k in range(replicas)) for host in range(hosts_count)]
    full = max(0, hosts_count // replicas - 1) * replicas  # the last group and the remainder form one ring
    table = []
    for host in range(hosts_count):
        if host < full:
            start = host - host % replicas
            table.append(tuple([host] + [start + k for k in range(replicas) if start + k != host]))
        else:
            size = hosts_count - full
            table.append(tuple(full + (host - full + k) % size for k in range(replicas)))
    return table


def cluster(kind: str, hosts_count: int, replicas: int, *, steps: tuple[int, ...], ranks_per_host: int = 1):
    """Return the inventory of a job whose steps are all committed, and its ranks' hosts."""
    world_size = hosts_count * ranks_per_host
    rank_hosts = {rank: f"h{rank // ranks_per_host}" for rank in range(world_size)}
    table = holders(kind, hosts_count, replicas)
    copies, commits = [], []
    for step in steps:
        by_rank = {rank: tuple(f"h{host}" for host in table[rank // ranks_per_host]) for rank in range(world_size)}
        specs = {rank: shard(rank, step, world_size) for rank in range(world_size)}
        copies += [Copy(ShardId(JOB, 1, step, rank), specs[rank], host) for rank in by_rank for host in by_rank[rank]]
        digests = {rank: spec.digest for rank, spec in specs.items()}
        commits.append(CommitFact(StepId(1, step), world_size, digests, by_rank))
    return Inventory(JOB, tuple(copies), tuple(commits)), rank_hosts


def check_bytes(found, inventory: Inventory, lost: set[str]) -> None:
    """Every chunk of every rank arrives once, from a live host that has it, with local first and durable last."""
    live = [c for c in inventory.copies if c.host not in lost and (c.shard.attempt, c.shard.step) == _pair(found.step)]
    arrived: dict[tuple[int, int], int] = {}
    for item in found.transfers:
        for chunk in range(item.first_chunk, item.first_chunk + item.chunks_count):
            arrived[item.rank, chunk] = arrived.get((item.rank, chunk), 0) + 1
            having = {c.host for c in live if c.shard.rank == item.rank and chunk not in c.missing}
            if item.tier == "durable":
                assert item.source is None
                assert not having
            else:
                assert item.source in having
                assert (item.tier == "local") == (item.source == item.target_host)
                assert (item.target_host in having) == (item.tier == "local")
    expected = {(rank, chunk) for rank, spec in found.specs.items() for chunk in range(spec.chunks_count)}
    assert set(arrived) == expected
    assert set(arrived.values()) <= {1}
    total = sum(spec.nbytes for spec in found.specs.values())
    assert found.bytes_local + found.bytes_peer + found.bytes_durable == total
    assert sum(item.nbytes for item in found.transfers) == total


def _pair(step: StepId) -> tuple[int, int]:
    return step.attempt, step.step


@pytest.mark.parametrize("kind", ["ring", "group"])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_every_subset_of_lost_hosts_matches_the_oracle(kind: str, replicas: int) -> None:
    """A step is recovered if and only if no shard lost all its holders, for every subset of up to eight hosts."""
    refused = recovered = 0
    for hosts_count in range(replicas, 9):
        table = holders(kind, hosts_count, replicas)
        assert all(len(set(row)) == replicas for row in table)
        inventory, rank_hosts = cluster(kind, hosts_count, replicas, steps=(7,))
        for count in range(hosts_count + 1):
            for chosen in combinations(range(hosts_count), count):
                lost = {f"h{host}" for host in chosen}
                found = what_if(inventory, SPANS, lost, world_size=hosts_count, rank_hosts=rank_hosts)
                oracle = all(set(row) - set(chosen) for row in table)
                assert (found.step == StepId(1, 7)) == oracle, (hosts_count, chosen, found.why)
                if oracle:
                    recovered += 1
                    after = relaunch(rank_hosts, lost)
                    at_own_host = all(after[rank] in {f"h{host}" for host in row} for rank, row in enumerate(table))
                    assert found.verdict == ("local" if at_own_host else "peer")
                    check_bytes(found, inventory, lost)
                else:
                    refused += 1
                    dead = [rank for rank, row in enumerate(table) if set(row) <= set(chosen)]
                    assert found.verdict == "none"
                    assert found.has_history
                    assert found.rejected[0].ranks == tuple(dead)[:10]
                    assert found.rejected[0].ranks_count == len(dead)
                    assert set(found.rejected[0].hosts) == {f"h{host}" for rank in dead for host in table[rank]}
                if count < replicas:
                    assert oracle, "fewer losses than replicas are always survived"
    assert recovered
    assert refused


@pytest.mark.parametrize("replicas", [2, 3])
def test_two_ranks_per_host_and_durable_bytes_for_what_ram_lacks(replicas: int) -> None:
    """With a marker every loss is survived; durable bytes are exactly those of shards that lost all holders."""
    hosts_count, ranks_per_host = 5, 2
    world_size = hosts_count * ranks_per_host
    inventory, rank_hosts = cluster("ring", hosts_count, replicas, steps=(7,), ranks_per_host=ranks_per_host)
    specs = {rank: shard(rank, 7, world_size) for rank in range(world_size)}
    inventory = Inventory(JOB, inventory.copies, inventory.commits, (DurableMarker(StepId(1, 7), world_size, specs),))
    table = holders("ring", hosts_count, replicas)
    seen = set()
    for count in range(hosts_count + 1):
        for chosen in combinations(range(hosts_count), count):
            lost = {f"h{host}" for host in chosen}
            found = what_if(inventory, SPANS, lost, world_size=world_size, rank_hosts=rank_hosts)
            gone = [rank for rank in range(world_size) if set(table[rank // ranks_per_host]) <= set(chosen)]
            assert found.step == StepId(1, 7)
            assert found.bytes_durable == sum(specs[rank].nbytes for rank in gone)
            check_bytes(found, inventory, lost)
            after = relaunch(rank_hosts, lost)
            at_own_host = all(
                after[r] in {f"h{host}" for host in table[r // ranks_per_host]} for r in range(world_size)
            )
            expected = "durable" if len(gone) == world_size else "mixed" if gone else "local" if at_own_host else "peer"
            assert found.verdict == expected
            seen.add(expected)
    assert seen == {"local", "peer", "mixed", "durable"}


def test_the_older_step_is_chosen_exactly_when_only_it_is_whole() -> None:
    """With two steps of unequal spread the newest whole one wins for every subset, and the newer is explained."""
    hosts_count = 6
    newer, rank_hosts = cluster("ring", hosts_count, 2, steps=(8,))
    older, _ = cluster("ring", hosts_count, 3, steps=(7,))
    inventory = Inventory(JOB, older.copies + newer.copies, older.commits + newer.commits)
    fell_back = 0
    for count in range(hosts_count + 1):
        for chosen in combinations(range(hosts_count), count):
            lost = {f"h{host}" for host in chosen}
            found = what_if(inventory, SPANS, lost, world_size=hosts_count, rank_hosts=rank_hosts)
            whole = [
                step
                for step, replicas in ((8, 2), (7, 3))
                if all(set(row) - set(chosen) for row in holders("ring", hosts_count, replicas))
            ]
            assert (found.step.step if found.step else None) == (whole[0] if whole else None)
            if whole == [7]:
                fell_back += 1
                assert [rejected.step for rejected in found.rejected] == [StepId(1, 8)]
            if whole:
                check_bytes(found, inventory, lost)
    assert fell_back

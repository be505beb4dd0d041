"""Groups of ranks that are lost as one, as the controller has them: named, refused, placed, told (R18.8, R18.9)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memstore.client.connect import check_groups
from memstore.core.cluster.job import group_levels, group_numbers, group_runs
from memstore.core.wire.orders import Reserve
from memstore.errors import ConfigError
from memstore.testing.controller.holder import CHUNKS, DirectedHolder, DirectedRank
from memstore.testing.controller.world import JOB, ControllerWorld
from recovery.inventory import StepId

RACKS = {f"h{at}": {"rack": f"r{at % 2}"} for at in range(4)}
PIPELINES = [0, 0, 1, 1]  # by host: without them racks pair h0 with h1, and h2 with h3


def launched(
    world: ControllerWorld, pipelines: list[int] | None = None, key: str = "k", **more: object
) -> list[DirectedRank]:
    """Start one rank on each host, in these pipelines."""
    hosts = sorted(host for host, holder in world.holders.items() if holder.is_up)
    numbers = pipelines or PIPELINES
    ranks = [
        world.join(rank, len(numbers), key, host=hosts[rank % len(hosts)], groups={"pp": number}, **more)
        for rank, number in enumerate(numbers)
    ]
    assert world.run_until(lambda: all(r.answers.get("join") or r.errors.get("join") for r in ranks), 15.0)
    return ranks


def pipelines_of(world: ControllerWorld, ranks: list[DirectedRank], step: int, rank: int) -> set[int]:
    """Return the pipelines whose hosts have a copy of a rank's shard."""
    number = {each.host_id: PIPELINES[each.rank] for each in ranks}
    return {number[host] for host in world.holders_of(StepId(ranks[0].attempt, step), rank)}


def test_copies_lie_in_another_rack_and_another_pipeline() -> None:
    """So a whole pipeline may go; the status says so."""
    world = ControllerWorld(list(RACKS), labels=RACKS)
    ranks = launched(world)
    world.get(ranks)
    assert world.put_all(ranks, 1)
    for rank in range(4):
        assert pipelines_of(world, ranks, 1, rank) == {0, 1}
        assert {RACKS[h]["rack"] for h in world.holders_of(StepId(1, 1), rank)} == {"r0", "r1"}
    newest = world.status()["jobs"][0]["newest"]
    assert {row["level"]: row["tolerated"] for row in newest["survives"]} == {"rack": 1, "pp group": 1, "host": 1}
    assert not newest["warnings"]
    assert not newest["unmet"]


def test_a_successor_places_alike() -> None:
    """The groups stand in the attempt's fact."""
    world = ControllerWorld(list(RACKS), labels=RACKS)
    ranks = launched(world)
    world.get(ranks)
    assert world.put_all(ranks, 1)
    before = world.job(JOB).placement
    world.crash_controller()
    assert world.run_until(lambda: world.machine is not None and world.machine.is_settled, 30.0)
    assert world.put_all(ranks, 2)
    assert world.job(JOB).placement == before
    assert world.job(JOB).newest.groups == {"pp": tuple(PIPELINES)}  # type: ignore[union-attr]


def test_a_process_that_takes_a_ranks_place_keeps_its_group() -> None:
    """Another group is refused; with the same one the fact is written again with all groups."""
    world = ControllerWorld(list(RACKS), labels=RACKS)
    ranks = launched(world)
    world.kill_rank(ranks[3])
    other = world.join(3, 4, "k", host="h3", groups={"pp": 0})
    assert world.run_until(lambda: bool(other.errors.get("join")), 15.0)
    assert "rank 3 is in groups {'pp': 1}; who takes its place names {'pp': 0}" in other.error("join")
    again = world.join(3, 4, "k", host="h3", groups={"pp": 1})
    assert world.run_until(lambda: bool(again.answers.get("join")), 15.0)
    assert world.job(JOB).newest.groups == {"pp": tuple(PIPELINES)}  # type: ignore[union-attr]


def test_groups_that_change_with_a_launch_are_followed() -> None:
    """A recovery in place opens an attempt of its own: its ranks name the groups that they are in now."""
    world = ControllerWorld(4)
    ranks = launched(world, [0, 0, 1, 1])
    world.get(ranks)
    assert world.put_all(ranks, 1)
    for rank in ranks:
        world.kill_rank(rank)
    ranks = launched(world, [0, 1, 0, 1], key="k2")
    world.get(ranks)
    assert world.put_all(ranks, 2)
    for rank in range(4):
        assert {int(host[1]) % 2 for host in world.holders_of(StepId(2, 2), rank)} == {0, 1}
    assert world.run_until(lambda: all(len(world.holders_of(StepId(2, 2), rank)) == 2 for rank in range(4)), 60.0)


def test_ranks_that_rewind_keep_their_groups() -> None:
    """They go on in a new attempt, and are in the same pipelines there (R22)."""
    world = ControllerWorld(list(RACKS), labels=RACKS)
    ranks = launched(world)
    world.get(ranks)
    assert world.put_all(ranks, 1)
    for rank in ranks:
        world.call(rank, "rewind", nonce=rank.nonce, key=rank.key, step=1, of_attempt=None)
    assert world.run_until(lambda: all(rank.answers.get("rewind") for rank in ranks), 20.0), ranks[0].errors
    newest = world.job(JOB).newest
    assert newest is not None
    assert (newest.attempt_number, newest.groups) == (2, {"pp": tuple(PIPELINES)})


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ([{"pp": 0}, {"pp": 1}, {}], "ranks 0, 1 name pp; rank 2 names none"),
        ([{"pp": 0}, {"pp": 1, "tp": 0}, {"tp": 1}], "rank 0 names pp; rank 1 names pp, tp; rank 2 names tp"),
    ],
)
def test_ranks_that_name_other_groups_are_refused_together(named: list[dict[str, int]], said: str) -> None:
    """Each is told who named what."""
    world = ControllerWorld(3)
    ranks = [world.join(rank, 3, "k", groups=groups) for rank, groups in enumerate(named)]
    assert world.run_until(lambda: all(rank.errors.get("join") for rank in ranks), 15.0)
    for rank in ranks:
        assert f"all ranks must name the same groups in connect(groups=), or all of them none: {said}" in rank.error(
            "join"
        )


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ({"pp": -1}, r"groups\['pp'\]=-1 is out of range"),
        ({"pp": True}, r"groups\['pp'\]=True is out of range"),
        ({"pp": "3"}, r"groups\['pp'\]='3' is out of range"),
        ({"p" * 65: 0}, "groups name 'ppp.* is not allowed: use 1 to 64 letters"),
        ({"": 0}, "groups name '' is not allowed"),
        ({f"g{n}": 0 for n in range(1000)}, "groups=1000 kinds: name at most 4 kinds of groups"),
        ([("pp", 0)], "name at most 4 kinds of groups"),
    ],
)
def test_what_cannot_be_groups_is_refused_at_connect(groups: object, said: str) -> None:
    """With the name of the argument, and what it may be."""
    with pytest.raises(ConfigError, match=said):
        check_groups(groups)  # type: ignore[arg-type]


def test_no_groups_are_none() -> None:
    """Neither given nor empty."""
    assert check_groups(None) == check_groups({}) == {}


@pytest.mark.parametrize("numbers", [(), (0, 0, 0, 1, 1, 0), tuple(range(8)) * 3])
def test_runs_are_what_they_were(numbers: tuple[int, ...]) -> None:
    """A fact has runs, an attempt the numbers by rank, placement the groups by host."""
    runs = group_runs(numbers)
    assert group_numbers({"pp": runs}) == {"pp": numbers}
    hosts = [f"h{rank // 2}" for rank in range(len(numbers))]
    found = group_levels({"pp": numbers}, hosts)["pp group"]
    assert all(numbers[rank] in found[host] for rank, host in enumerate(hosts))


def test_one_group_of_all_ranks_is_told_once_and_racks_are_kept() -> None:
    """No copy can lie outside it: log and status say so, and steps are committed whole."""
    world = ControllerWorld(list(RACKS), labels=RACKS)
    ranks = launched(world, [7, 7, 7, 7])
    world.get(ranks)
    assert world.put_all(ranks, 1)
    assert world.put_all(ranks, 2)
    text = "all 4 hosts are in one pp group, so no copy can lie outside it; copies are spread over racks"
    assert sum(text in note for note in world.notes) == 1
    assert text in world.status()["jobs"][0]["newest"]["warnings"][0]
    assert not world.job(JOB).commits[StepId(1, 2)].is_degraded


def test_a_group_of_most_hosts_is_told_with_its_hosts() -> None:
    """Three of four: one has its copy outside, of the others the log says who has not."""
    world = ControllerWorld(4)
    ranks = launched(world, [0, 0, 0, 1])
    world.get(ranks)
    assert world.put_all(ranks, 1)
    told = [note for note in world.notes if "Losing that pp group as one would lose steps" in note]
    assert len(told) == 1
    assert "all its copies are in pp group 0" in told[0]


def test_one_group_for_each_rank_changes_nothing() -> None:
    """It says no more than that hosts are lost one by one."""
    plain, world = ControllerWorld(list(RACKS), labels=RACKS), ControllerWorld(list(RACKS), labels=RACKS)
    plain.launch(4, "k")
    launched(world, [0, 1, 2, 3])
    assert world.status()["jobs"][0]["newest"]["targets"] == plain.status()["jobs"][0]["newest"]["targets"]


def test_writers_of_a_shared_shard_are_of_two_pipelines() -> None:
    """Every rank holds the same: the two that copy it, and their copies, are not lost with one pipeline (R34)."""
    world = ControllerWorld(4)
    ranks = launched(world, shard=0, shards=1)
    world.get(ranks)
    assert world.put_all(ranks, 1)
    writers = world.job(JOB).newest.writers  # type: ignore[union-attr]
    assert {PIPELINES[rank] for rank in writers} == {0, 1}
    for rank in writers:
        assert pipelines_of(world, ranks, 1, rank) == {0, 1}


def test_a_shard_that_one_pipeline_shares_has_a_copy_outside_of_it() -> None:
    """All its writers are in one: the last target is that of placement."""
    world = ControllerWorld(4)
    hosts = sorted(world.holders)
    ranks = [
        world.join(rank, 4, "k", host=hosts[rank], groups={"pp": PIPELINES[rank]}, shard=PIPELINES[rank], shards=2)
        for rank in range(4)
    ]
    assert world.run_until(lambda: all(rank.answers.get("join") for rank in ranks), 15.0)
    world.get(ranks)
    assert world.put_all(ranks, 1)
    for rank in world.job(JOB).newest.writers:  # type: ignore[union-attr]
        assert pipelines_of(world, ranks, 1, rank) == {0, 1}


def test_a_parity_set_has_one_host_of_a_pipeline() -> None:
    """Nine hosts in three: sets of three, one of each (R37)."""
    world = ControllerWorld(9, parity=2)
    ranks = launched(world, [0, 0, 0, 1, 1, 1, 2, 2, 2])
    world.get(ranks)
    assert world.put_all(ranks, 1)
    sets = {each.ranks for each in world.job(JOB).newest.parity_sets.values()}  # type: ignore[union-attr]
    assert len(sets) == 3
    assert all({rank // 3 for rank in ranks} == {0, 1, 2} for ranks in sets)


def test_two_pipelines_are_too_few_for_parity_and_the_log_says_so() -> None:
    """A set of three has two hosts of one of them: it is made all the same."""
    world = ControllerWorld(4, parity=2)
    ranks = launched(world)
    world.get(ranks)
    assert world.put_all(ranks, 1)
    assert any("parity that survives the loss of one pp group" in note for note in world.notes)


# -- memory -------------------------------------------------------------------------------------------


def limited(limits: dict[str, int], groups: bool) -> tuple[ControllerWorld, list[DirectedRank]]:
    """Launch on hosts with arenas of so many slots, which refuse more."""
    world = ControllerWorld(list(limits), rules={"chunk_bytes": 1})
    assert world.machine is not None
    assert world.run_until(lambda: world.machine is not None and world.machine.is_settled, 10.0)
    for host, holder in world.holders.items():

        def claimed(order: Reserve, holder: DirectedHolder = holder, limit: int = limits[host]) -> None:
            wanted = sum(order.ranks.values()) + order.peer_slots
            holder.refuses_room = f"{wanted} slots wanted, {limit} there" if wanted > limit else ""
            holder.carry_out(order)

        holder.instead[Reserve] = claimed
    for host, state in world.machine.hosts.states.items():
        state.info = replace(state.info, limit_bytes=limits[host])
    return world, launched(world) if groups else world.launch(len(limits), "k")


VERSION = 2 * CHUNKS  # of a rank: the kept step and the one in flight


@pytest.mark.parametrize("groups", [False, True])
def test_a_host_with_less_memory_gets_fewer_copies(groups: bool) -> None:
    """h3 has room for its own versions alone: the job trains, each shard on two hosts, none of a peer on h3 (R18.9)."""
    world, ranks = limited({"h0": 3 * VERSION, "h1": 3 * VERSION, "h2": 3 * VERSION, "h3": VERSION}, groups)
    world.get(ranks)
    assert world.put_all(ranks, 1)
    held = [world.holders_of(StepId(1, 1), rank) for rank in range(4)]
    assert all(len(hosts) == 2 for hosts in held)
    assert sum("h3" in hosts for hosts in held) == 1
    assert not world.job(JOB).commits[StepId(1, 1)].is_degraded


def test_no_host_moves_where_all_have_room() -> None:
    """Arenas that differ, and are large enough, change nothing."""
    world, _ = limited({"h0": 9 * VERSION, "h1": 4 * VERSION, "h2": 2 * VERSION, "h3": 2 * VERSION}, groups=False)
    plain = ControllerWorld(4)
    plain.launch(4, "k")
    assert world.job(JOB).placement == plain.job(JOB).placement


def test_too_little_memory_in_all_is_refused_with_numbers() -> None:
    """No host has room for what h3 has not: its refusal is the answer, as it was."""
    world, ranks = limited(dict.fromkeys(("h0", "h1", "h2"), 2 * VERSION) | {"h3": VERSION}, groups=False)
    world.get(ranks)
    for rank in ranks:
        world.call(rank, "reserve", slots=CHUNKS)
    assert world.run_until(lambda: all(rank.errors.get("reserve") for rank in ranks), 20.0)
    assert f"{VERSION} there" in ranks[0].error("reserve")

"""Replication and restore over a connection that is reset, corrupted, deaf, late or slow (R11, R13, R14; F16-F21)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from stalls import put_within
from variants import later

from memstore.core.holder.puts.push import WHOLE_BYTES
from memstore.core.wire.calls import VerifyStore
from memstore.testing.clusters.processes import ProcessCluster, wait_for
from memstore.testing.faults.fault_proxy import Direction, FaultProxy
from memstore.testing.nemesis.load_meter import LoadMeter
from memstore.testing.ranks.fleet import Fleet
from memstore.testing.ranks.rank_process import RankNursery, RankProcess, together

TWO_RACKS = {"h0": {"rack": "r0", "memstore": "replica"}, "h1": {"rack": "r1", "memstore": "replica"}}
BUDGET_S = 0.2
STALL_MAX_S = BUDGET_S + 0.5  # half a second for two busy cores
CHUNK = 60_000  # only frames with a whole chunk have that much payload
RESETS = [("header", 7), ("body", 3), ("payload", 0), ("payload", 30_000), ("end", -1), ("end", 0)]
FLIPS = [("payload", 0), ("payload", 50_000), ("header", 0), ("header", 9), ("header", 16), ("header", 21), ("body", 2)]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ProcessCluster]:
    """Two hosts; h0 reaches h1 through a proxy."""
    with ProcessCluster(tmp_path, TWO_RACKS, proxied=["h1"]) as cluster:
        yield cluster


@pytest.fixture
def fleet(cluster: ProcessCluster, nursery: RankNursery) -> Fleet:
    """A job with one rank on each host."""
    return Fleet(cluster, nursery)


def commit(ranks: list[RankProcess], step: int) -> None:
    """Put one step, which is committed whole although something breaks meanwhile."""
    together(ranks, "put", step=step)
    for reply in together(ranks, "wait", step=step):
        assert (reply["level"], reply["degraded"]) == ("committed", False), reply


def damage(cluster: ProcessCluster, host: str) -> tuple[int, int]:
    """What a host says arrived damaged: (chunks, frames)."""
    stats = next(row["stats"] for row in cluster.status()["hosts"] if row["host"] == host)
    return stats.get("digest_errors", 0), stats.get("broken_frames", 0)


def restored_from_h1_alone(cluster: ProcessCluster, fleet: Fleet, ranks: list[RankProcess], step: int) -> None:
    """Without h0 every byte of rank 0 is h1's copy: it came through the proxy, and it is right."""
    assert all(found.damaged == 0 and found.chunks for found in cluster.ask(VerifyStore()).found.values())
    fleet.kill(ranks)
    cluster.lose_host("h0")
    _, got = fleet.resume(["h1", "h1"])
    assert (got["step"], got["steps_lost"]) == (step, 0)


def test_a_reset_anywhere_in_a_transfer_costs_a_retry(cluster: ProcessCluster, fleet: Fleet) -> None:
    """Resets at byte k of header, body, payload, end of a chunk, and of answers: every step is committed (F19)."""
    ranks = fleet.begin(["h0", "h1"], last_step=1)
    proxy = cluster.proxies["h1"]
    step = 1
    for part, at in RESETS:
        step += 1
        proxy.up.reset(part, at, payload_min=CHUNK)
        commit(ranks, step)
        # One that comes after the whole chunk is no longer waited for by the commit.
        done = step - 1
        wait_for(lambda n=done: proxy.up.resets_count >= n, f"reset {done}")
        assert proxy.up.resets_count == done
        assert proxy.up.waiting == 0
    for part in ("header", "body", "end"):
        step += 1
        proxy.down.reset(part)
        commit(ranks, step)
        wait_for(lambda: proxy.down.waiting == 0, "the reset of an answer, which the commit does not wait for")
    restored_from_h1_alone(cluster, fleet, ranks, step)


def test_a_bit_that_flips_on_the_way_is_never_stored(cluster: ProcessCluster, nursery: RankNursery) -> None:
    """Bits of payloads, headers, lengths and bodies flip: each is counted by its finder, and sent again (F21, R14).

    The shards are offered before their bytes travel: a small one may come a second time, from repair, and a host
    that has it passes over its bytes, and over a flip among them.
    """
    fleet = Fleet(cluster, nursery, kib=4 * WHOLE_BYTES >> 10)
    ranks = fleet.begin(["h0", "h1"], last_step=1)
    proxy = cluster.proxies["h1"]
    step = 1
    for part, at in FLIPS:
        step += 1
        proxy.up.flip(part, at, payload_min=CHUNK)
        commit(ranks, step)
        assert proxy.up.waiting == 0
    in_payload = sum(part == "payload" for part, _ in FLIPS)
    wanted = (in_payload, len(FLIPS) - in_payload)
    seen = partial(damage, cluster, "h1")
    wait_for(lambda: seen() == wanted, f"{wanted} damaged chunks and frames, there are", seen=seen)
    restored_from_h1_alone(cluster, fleet, ranks, step)


@pytest.mark.parametrize(
    "fault", ["flip payload", "reset connection", *later("flip header", "flip length", "reset payload")]
)
def test_a_restore_over_a_broken_connection_is_whole(tmp_path: Path, nursery: RankNursery, fault: str) -> None:
    """The host that lost its memory fetches through faults: every byte is right, damage is counted, no step is lost."""
    with ProcessCluster(tmp_path, TWO_RACKS, proxied=["h0", "h1"]) as cluster:
        fleet = Fleet(cluster, nursery, kib=2048)
        fleet.kill(fleet.begin(["h0", "h1"], last_step=2))
        cluster.lose_host("h0")
        refusing(cluster.proxies["h0"])  # else repair may bring the bytes before the restore asks for them
        cluster.start_holder("h0")
        cluster.wait_live("h0")
        direction = cluster.proxies["h1"].down
        break_fetch(direction, fault)
        _, got = fleet.resume(["h0", "h1"])
        assert (got["step"], got["steps_lost"], direction.waiting) == (2, 0, 0)
        wanted = {"flip payload": (1, 0), "flip header": (0, 1), "flip length": (0, 1)}.get(fault, (0, 0))
        wait_for(lambda: damage(cluster, "h0") == wanted, f"{wanted} damaged chunks and frames")


def break_fetch(direction: Direction, fault: str) -> None:
    """Ask for one fault in the next chunk that is fetched."""
    kind, part = fault.split()
    if kind == "flip":
        direction.flip("header" if part == "length" else part, 21 if part == "length" else 5, payload_min=CHUNK)  # type: ignore[arg-type]
    else:
        direction.reset("payload" if part == "payload" else "connection", 40_000, payload_min=CHUNK)


def late(proxy: FaultProxy) -> None:
    """75 ms each way, 50 ms jitter."""
    for direction in (proxy.up, proxy.down):
        direction.delay_s, direction.jitter_s, direction.rng = 0.075, 0.05, random.Random(5)


def slow(proxy: FaultProxy) -> None:
    """One megabit per second."""
    proxy.up.rate_bytes_per_s = 125_000


def unreachable(proxy: FaultProxy) -> None:
    """What h0 sends is lost."""
    proxy.up.drop = True


def mute(proxy: FaultProxy) -> None:
    """What h1 answers is lost."""
    proxy.down.drop = True


def stalled(proxy: FaultProxy) -> None:
    """Nothing moves."""
    proxy.up.stall = proxy.down.stall = True


def refusing(proxy: FaultProxy) -> None:
    """Connections are reset, old and new ones."""
    proxy.refuse = True
    proxy.reset_all()


def heal(proxy: FaultProxy) -> None:
    """A clean link again."""
    for direction in (proxy.up, proxy.down):
        direction.delay_s = direction.jitter_s = direction.rate_bytes_per_s = 0.0
        direction.drop = direction.stall = False
    proxy.refuse = False


@pytest.mark.parametrize("fault", [slow, unreachable, *later(late, mute, stalled, refusing)])
def test_a_sick_link_costs_no_put_more_than_the_budget(
    cluster: ProcessCluster, nursery: RankNursery, load_meter: LoadMeter, fault: Any
) -> None:
    """Ten puts over a late, slow, half-open, stalled or refused link; healed, commits are whole again (F16-F18)."""
    fleet = Fleet(cluster, nursery, stall_budget_s=BUDGET_S)
    ranks, _ = fleet.resume(["h0", "h1"])
    first = fleet.put_until_committed(ranks, first=0) + 1
    proxy = cluster.proxies["h1"]
    fault(proxy)
    for step in range(first, first + 10):
        put_within(ranks, load_meter, step, STALL_MAX_S)
    assert not cluster.host_events("host_dead")
    heal(proxy)
    step = fleet.put_until_committed(ranks, first=first + 10)
    wait_for(lambda: cluster.job("train")["copies"] == 2 and not cluster.job("train")["degraded"], "full redundancy")
    restored_from_h1_alone(cluster, fleet, ranks, step)


def test_commits_go_on_degraded_beside_a_peer_that_only_the_controller_reaches(
    cluster: ProcessCluster, nursery: RankNursery
) -> None:
    """A link between two live hosts stays broken: after dead_after_s every step commits, degraded, and says why."""
    fleet = Fleet(cluster, nursery, stall_budget_s=BUDGET_S)
    ranks, _ = fleet.resume(["h0", "h1"])
    step = fleet.put_until_committed(ranks, first=0)
    refusing(cluster.proxies["h1"])
    first = fleet.put_until_committed(ranks, first=step + 1) + 1
    for step in range(first, first + 5):
        together(ranks, "put", step=step)
        for reply in together(ranks, "wait", step=step, timeout_s=2.0):
            assert reply["degraded"]
            assert "cannot reach h1" in reply["reason"]
    assert not cluster.host_events("host_dead")
    heal(cluster.proxies["h1"])
    fleet.put_until_committed(ranks, first=first + 5)
    wait_for(lambda: cluster.job("train")["copies"] == 2 and not cluster.job("train")["degraded"], "full redundancy")


@pytest.mark.parametrize("in_flight", [1, 2])
def test_as_many_puts_as_are_in_flight_go_on_beside_a_peer_that_is_slow(
    tmp_path: Path, nursery: RankNursery, in_flight: int
) -> None:
    """While no copy comes to h1 they are sealed and the next one is skipped; then the newest commits (R10, R12)."""
    with ProcessCluster(tmp_path, TWO_RACKS, proxied=["h1"], detect=20.0) as cluster:
        fleet = Fleet(cluster, nursery, stall_budget_s=BUDGET_S, in_flight=in_flight)
        ranks = fleet.begin(["h0", "h1"], last_step=0)
        stalled(cluster.proxies["h1"])
        ahead = range(1, in_flight + 1)
        for step in ahead:
            together(ranks, "put", step=step)
            together(ranks, "wait", step=step, level="sealed")
        late = together(ranks, "put", step=in_flight + 1)
        assert [reply["level"] for reply in late] == ["skipped", "skipped"]
        assert all("step 1 is not committed yet" in reply["reason"] for reply in late)
        waiting = [reply["level"] for step in ahead for reply in together(ranks, "ticket", step=step)]
        assert {*waiting} <= {"sealed", "replicated"}
        heal(cluster.proxies["h1"])
        assert {reply["level"] for reply in together(ranks, "wait", step=ahead[-1])} == {"committed"}
        older = [
            reply["level"] for step in ahead[:-1] for reply in together(ranks, "settle", step=step, timeout_s=30.0)
        ]
        assert {*older} <= {"committed", "superseded"}
        fleet.kill(ranks)
        cluster.lose_host("h0")
        assert fleet.resume(["h1", "h1"])[1]["step"] == ahead[-1], "h1's copy came once it could"

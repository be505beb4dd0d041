"""What `memstore status`, `plan` and `drain` print of a job with parity (R37)."""

from __future__ import annotations

import json
import re

import pytest

from memstore.testing.controller.holder import DirectedRank
from memstore.testing.controller.world import ControllerWorld, trained
from tests.support.cli_store import Desk

CHUNK_BYTES = 64  # of a directed rank


def desk_of(patch: pytest.MonkeyPatch, world: ControllerWorld, ranks: list[DirectedRank]) -> Desk:
    """Let what is under way end, and ask through rank 0."""
    world.run(3.0)
    return Desk(patch, world, ranks[0])


def line(desk: Desk, begin: str) -> str:
    """Return the first line of `memstore status` that begins so, with single spaces."""
    lines = [" ".join(each.split()) for each in desk.run("status").stdout.splitlines()]
    return next(each for each in lines if each.startswith(begin))


def test_status_names_the_parity_of_a_job_and_of_each_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five ranks on five hosts are one set: a shard each, and rows of four others."""
    desk = desk_of(monkeypatch, *trained(5, parity=4))
    assert "parity 4+1 any 1 host off !" in line(desk, "train ")
    assert " own + parity of 4 hosts ok" in line(desk, "h3 ")
    assert "losing 2 hosts at once can lose the run" in line(desk, "! train: durable off")
    row = json.loads(desk.run("status", "--json").stdout)
    assert row["jobs"][0]["set_sizes"] == [5]
    assert row["hosts"][3]["keeps_parity_of"] == ["h0", "h1", "h2", "h4"]


def test_status_names_copies_beside_parity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five ranks on four hosts four are a set, and one has copies."""
    world, ranks = trained(4, 5, parity=4)
    desk = desk_of(monkeypatch, world, ranks)
    assert "copies, parity 3+1 any 1 host" in line(desk, "train ")


@pytest.mark.parametrize("columns", [60, 80, 100, 120])
def test_no_table_is_broken_by_parity(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """No line is longer than the screen, and each cell is on it in whole words."""
    desk = desk_of(monkeypatch, *trained(5, parity=4))
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = desk.run("status").stdout
    assert max(map(len, shown.splitlines())) <= columns
    words = shown.replace(":", " ").split()
    assert words.count("parity") == 1 + 5
    assert {"4+1", "own", "+", "hosts"} <= set(words)


def test_a_plan_counts_what_hosts_fetch_to_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost shard of four chunks is decoded at four hosts: each fetches three chunks, and sends one unless it is h0.

    There the rank is taken to start. So lost bytes are read four times over.
    """
    desk = desk_of(monkeypatch, *trained(5, parity=4))
    found = desk.run("plan", "train", "--lose", "h1").stdout
    peer = f"{(4 * 3 + 3) * CHUNK_BYTES} B peer"
    assert f"{peer} · 0 B durable · {4 * 3 * CHUNK_BYTES} B of it to hosts that decode" in found
    others = ("h0", "h2", "h3", "h4")
    fed = {(a, b): CHUNK_BYTES for a in others for b in others if a != b}
    sent = {(a, "h0"): CHUNK_BYTES for a in others if a != "h0"}
    shown = re.findall(r"^  (h\d) +(h\d) +(\d+) B ", found, re.MULTILINE)
    assert {(a, b): int(n) for a, b, n in shown} == {way: n + sent.get(way, 0) for way, n in fed.items()}
    plan = json.loads(desk.run("plan", "train", "--lose", "h1", "--json").stdout)["plans"][0]
    rows = plan["transfers"]
    assert {(a, b): n for _, tier, a, b, n in rows if tier == "decoding"} == fed
    assert {(a, b): n for _, tier, a, b, n in rows if tier == "parity" and a != b} == sent
    assert plan["bytes"]["peer"] == sum(fed.values()) + sum(sent.values())


def test_a_host_that_keeps_parity_can_go_once_the_job_has_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rank's shard is copied elsewhere, its parity has no other place: said at once, with what helps, and does."""
    world, ranks = trained(6, 5, parity=4)
    desk = desk_of(monkeypatch, world, ranks)
    given = desk.run("drain", "h1", "--within", "500")
    assert given.exit_code == 4
    why = "train step 1: 1 of 2 copies elsewhere, since it keeps parity of 4 shards, which has no other place"
    remedy = "start train again on other hosts: h1 can go after the next commit"
    assert given.stderr == f"host h1 must not go: {why}; {remedy}\n"
    shown = line(desk, "! h1: is to go in ")
    assert shown.endswith(f": {why}. Remedy: {remedy}; `memstore drain h1 --cancel` if it stays")
    for rank in ranks:
        world.kill_rank(rank)
    moved = [world.join(r, 5, "moved", host=host) for r, host in enumerate(("h0", "h5", "h2", "h3", "h4"))]
    world.run(5.0)
    world.get(moved)
    assert world.put_all(moved, 2)
    desk = desk_of(monkeypatch, world, moved)
    assert line(desk, "h1 ").endswith("draining: can go")


def test_a_host_that_keeps_parity_waits_for_durable_storage_where_there_is_any(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the step cannot be written at once, the notice is waited for; what helps is named, and lets the host go."""
    world, ranks = trained(5, last=3, pause_s=3.0, parity=4, durable="/durable", durable_every=1000)
    desk = desk_of(monkeypatch, world, ranks)
    world.durable.problem = "not mounted"
    given = desk.run("drain", "h1", "--within", "5")
    assert given.exit_code == 4
    assert "or `memstore persist train`, if no rank puts any more" in given.stderr
    assert line(desk, "h1 ").endswith(" shards to make durable")
    world.durable.problem = ""
    assert desk.run("persist", "train").exit_code == 0
    world.run(5.0)  # the storage is looked at
    assert line(desk, "h1 ").endswith("draining: can go")


def test_ranks_of_one_set_on_one_host_are_no_risk_that_repair_mends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch on four hosts of a set of five: status says that one loss is too many, on which host, and until when."""
    world, ranks = trained(5, parity=4)
    world.run(2.0)
    world.kill_host("h4")
    ranks = world.launch(5)
    world.get(ranks)
    world.run(30.0)
    desk = desk_of(monkeypatch, world, ranks)
    assert "parity 4+1, 1 of 2 ! the processes only" in line(desk, "train ")
    shown = line(desk, "! train: step 1 has 1 of 2 copies")
    assert "not rebuilt: h0: it alone has the shard of rank 0, which is in the same parity" in shown
    assert shown.endswith("Remedy: the next commit: its parity sets are of hosts that are there")
    assert world.put_all(ranks, 2)
    desk = desk_of(monkeypatch, world, ranks)
    assert "copies, parity 3+1 any 1 host" in line(desk, "train ")
    assert "copies" not in desk.run("status").stdout.partition("! train")[2]

"""Rows of `problems` that a host, a copy, a step or storage makes, each until its printed remedy is done (R18, D283).

One real controller core among fake hosts, on virtual time. Rows about training are in test_training.py.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from memstore.cli.output import ExitCode
from memstore.cli.status import check_code
from memstore.core.report.metrics import Sample, status_gauges
from memstore.core.report.problems import DEGRADED, NOTE, UNRECOVERABLE
from memstore.core.wire.orders import Reserve
from memstore.testing.controller.holder import WRITES, DirectedRank
from memstore.testing.controller.world import JOB, ControllerWorld, trained

SPARE = {"memstore": "replica"}


def rows(world: ControllerWorld, kind: str) -> list[dict[str, Any]]:
    """The problems of one kind that status shows."""
    return [row for row in world.status()["problems"] if row["kind"] == kind]


def check(world: ControllerWorld) -> ExitCode:
    """What `memstore status --check` exits with."""
    return check_code(world.served.parts.status.answer())


def printed(row: dict[str, Any], command: str) -> None:
    """Find a command in a remedy, or fail; what the test does next is what the controller is asked by it."""
    assert command in re.findall("`([^`]+)`", row["remedy"])


def ask(world: ControllerWorld, rank: DirectedRank, verb: str, **body: Any) -> None:
    """Do what a verb of the command line does, and wait for its answer."""
    rank.answers.pop(verb, None)
    world.call(rank, verb, **body)
    assert world.run_until(lambda: bool(rank.answers.get(verb)), 20.0)


def test_a_silent_host_is_suspect_then_dead_and_each_row_goes_with_its_cause() -> None:
    """New work avoids it as the remedy says; it answers and is no problem; silence for longer is its death."""
    world, ranks = trained(4, 2, durable="/durable", durable_every=1)
    world.silence("h1")
    assert world.run_until(lambda: bool(rows(world, "host_suspect")), 10.0)
    [row] = rows(world, "host_suspect")
    assert (row["about"], row["severity"], check(world)) == ("h1", DEGRADED, ExitCode.DEGRADED)
    assert row["cause"].startswith("suspect: ")
    assert row["remedy"] == "nothing to do yet: new work avoids it; silence for longer counts as its death"
    samples = status_gauges(world.served.parts.status.answer(), 0)
    assert Sample("memstore_problems", 1, ("host_suspect", DEGRADED)) in samples  # what alerts watch
    world.thaw("h1")
    assert world.run_until(lambda: not rows(world, "host_suspect"), 10.0)
    assert rows(world, "host_dead") == []
    assert world.put_all(ranks, 2)
    world.silence("h1")
    assert world.run_until(lambda: bool(rows(world, "host_dead")), 20.0)
    assert rows(world, "host_suspect") == []
    world.thaw("h1")
    assert world.run_until(lambda: not rows(world, "host_dead"), 20.0)


def test_the_copies_of_a_dead_host_are_rebuilt_and_a_replacement_gets_its_share() -> None:
    """Nothing is done by a person but to start the job and another host: then the row is a note, and goes."""
    world, _ = trained(4, 2, durable="/durable", durable_every=1)
    world.kill_host("h1")
    world.run(1.0)
    [row] = rows(world, "host_dead")
    assert (row["about"], row["severity"], row["cause"]) == ("h1", DEGRADED, "dead: connection reset")
    assert "copies are rebuilt on the other hosts; a replacement that joins gets its share" in row["remedy"]
    assert world.run_until(lambda: world.status()["jobs"][0]["short_shards"] == 0, 20.0)
    ranks = world.launch(2)
    world.get(ranks)
    assert world.put_all(ranks, 2)
    assert [row["severity"] for row in rows(world, "host_dead")] == [NOTE]
    world.return_host("h1")
    assert world.run_until(lambda: not rows(world, "host_dead"), 10.0)
    world.run(5.0)
    assert (check(world), rows(world, "few_copies")) == (ExitCode.FINE, [])


@pytest.mark.parametrize("way", ["hosts with ranks of the job", "label spare ones memstore=replica"])
def test_a_job_with_too_few_hosts_has_its_copies_once_one_is_added(way: str) -> None:
    """Both printed ways."""
    world, _ = trained(2, 2, durable="/durable", durable_every=1)
    world.kill_host("h1")
    world.run(8.0)
    [row] = rows(world, "few_copies")
    assert (row["severity"], row["about"]) == (DEGRADED, JOB)
    assert "1 of 2 copies: ranks 0, 1 on h0 only, not rebuilt: no other host may hold it" in row["cause"]
    assert row["remedy"].startswith("1 host may hold its copies, replicas=2 needs 2: add ")
    assert way in row["remedy"]
    if "label" in way:
        world.add_host("h2", SPARE)
    else:
        world.add_host("h2")
        world.run(1.0)
        ranks = world.launch(2)
        world.get(ranks)
        assert world.put_all(ranks, 2)
    assert world.run_until(lambda: not rows(world, "few_copies"), 20.0)


@pytest.mark.parametrize("way", ["a larger arena_bytes", "a lower in_flight"])
def test_versions_in_flight_that_have_no_room_are_named_until_a_launch_has_it(way: str) -> None:
    """Both printed ways; it is a note, for nothing is lost (R10)."""
    world = ControllerWorld(2, in_flight=2, durable="/durable")
    world.holders["h1"].refuses_room = "needs 24 of 20 slots"

    def make_room(order: Reserve) -> None:
        if order.versions < 4:
            world.holders["h1"].refuses_room = ""
        world.holders["h1"].carry_out(order)

    world.holders["h1"].instead[Reserve] = make_room
    ranks = world.launch(2)
    world.reserve(ranks)
    assert world.put_all(ranks, 1)
    [row] = rows(world, "in_flight")
    assert (row["severity"], row["about"], row["since_s"]) == (NOTE, JOB, None)
    assert (
        row["cause"]
        == "in_flight=2 is asked for, 1 is claimed on all hosts: no room for more on h1: needs 24 of 20 slots"
    )
    assert way in row["remedy"]
    if "arena" in way:
        world.holders["h1"].instead.pop(Reserve)
    else:
        world.config["in_flight"] = 1
    ranks = world.launch(2)
    world.get(ranks)
    assert world.put_all(ranks, 2)
    assert rows(world, "in_flight") == []


def test_a_copy_that_was_refused_is_made_once_there_is_room() -> None:
    """Repair tries again by itself, as the remedy says."""
    world, _ = trained(3, 2, durable="/durable", durable_every=1)
    world.holders["h2"].refuses_room = "its arena has 3 of 64 slots left"
    world.kill_host("h1")
    remedy = "make room where it was refused (`memstore rm`, a larger arena_bytes)"
    assert world.run_until(lambda: any(row["remedy"].startswith(remedy) for row in rows(world, "few_copies")), 30.0)
    [row] = rows(world, "few_copies")
    assert "its arena has 3 of 64 slots left" in row["cause"]
    world.holders["h2"].refuses_room = ""  # the remedy
    assert world.run_until(lambda: not rows(world, "few_copies"), 60.0)


def test_a_step_that_is_nowhere_whole_is_whole_again_with_a_host_that_holds_the_rest() -> None:
    """The worst there is, exit code 3; the host that comes back with its memory ends it."""
    world, _ = trained(3, 2)
    copies = set(world.holders_of(*newest_shard(world)))
    for host in sorted(copies):
        world.kill_host(host, keep_memory=True)
    world.run(10.0)
    [row] = rows(world, "not_whole")
    assert (row["severity"], check(world)) == (UNRECOVERABLE, ExitCode.UNRECOVERABLE)
    assert row["cause"].startswith("committed step 1 is not whole in RAM any more")
    printed(row, f"memstore plan {JOB}")
    assert "bring back a host that holds the rest" in row["remedy"]
    world.return_host(min(copies))
    assert world.run_until(lambda: not rows(world, "not_whole"), 10.0)


def newest_shard(world: ControllerWorld) -> Any:
    """The newest committed step, and rank 0."""
    return world.job().newest_committed, 0


@pytest.mark.parametrize("is_torn", [True, False])
def test_a_retired_step_is_lifted_by_verify_or_followed_by_the_next_commit(is_torn: bool) -> None:
    """As the row says for each."""
    world, ranks = trained(2, last=2, keep_steps=2, durable="/durable", durable_every=1)
    world.call(ranks[0], "retire", attempt=1, step=2, reason="the loss is NaN", is_torn=is_torn)
    world.run(1.0)
    [row] = rows(world, "step_retired")
    assert (row["severity"], row["cause"]) == (
        DEGRADED,
        "committed step 2 is retired, a get passes it over: the loss is NaN",
    )
    if is_torn:
        assert row["remedy"] == "the next commit takes its place"
        assert world.put_all(ranks, 3)
    else:
        printed(row, f"memstore verify {JOB}")
        ask(world, ranks[0], "verify", job=JOB)
        world.run(1.0)
    assert (rows(world, "step_retired"), check(world)) == ([], ExitCode.FINE)


@pytest.mark.parametrize("way", ["faster storage", "a larger durable_every"])
def test_writes_that_are_abandoned_are_a_note_until_storage_keeps_up(way: str) -> None:
    """Both printed ways; a write that ends only by the patience that it was given does not end the row."""
    world, ranks = trained(2, durable="/durable", durable_every=1, keep_steps=2)
    slow_s = [9.0]
    for holder in world.holders.values():
        late = lambda order, holder=holder: world.at(slow_s[0], lambda: holder.carry_out(order))  # noqa: E731
        holder.instead.update(dict.fromkeys(WRITES, late))
    for step in range(2, 6):
        assert world.put_all(ranks, step)
        world.run(0.5)
    [row] = rows(world, "durable_abandoned")
    assert (row["severity"], check(world)) == (NOTE, ExitCode.FINE)
    assert re.fullmatch(r"\d+ durable writes? abandoned for a newer one", row["cause"])
    assert row["remedy"] == "faster storage, or a larger durable_every"
    world.run(30.0)
    assert rows(world, "durable_abandoned"), "the last write had all the time it needed: that says nothing of the next"
    if "faster" in way:
        slow_s[0] = 0.0
    else:
        world.config = {**world.config, "durable_every": 40}
        ranks = world.launch(2)
        world.get(ranks)
    for step in range(6, 140):
        assert world.put_all(ranks, step)
        world.run(0.5)
    assert rows(world, "durable_abandoned") == []


def test_a_job_without_durable_storage_is_a_note_until_it_has_some() -> None:
    """Connected with Config(durable=...), as the remedy says."""
    world, _ = trained(2)
    [row] = rows(world, "durable_off")
    assert (row["severity"], check(world)) == (NOTE, ExitCode.FINE)
    assert row["remedy"] == 'connect with Config(durable="/a/shared/directory")'
    world.config = {**world.config, "durable": "/a/shared/directory"}
    ranks = world.launch(2)
    world.get(ranks)
    assert world.put_all(ranks, 2)
    assert rows(world, "durable_off") == []

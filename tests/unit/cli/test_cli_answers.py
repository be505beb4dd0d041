"""What the verbs make of a controller's answers: exit codes, and options that reach the question (R4, R29, R30).

The controller is the real one, in virtual time; its hosts hang, die and run out of room when a test says so.
"""

from __future__ import annotations

import json
import re

import pytest
from cli_desk import Desk

from memstore.core.wire.orders import VerifyCopies
from memstore.core.wire.reports import CopiesVerified
from memstore.testing.controller.trained import trained
from memstore.testing.controller.world import ControllerWorld


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Desk:
    """Three hosts, a job of two ranks with two committed steps, asked through the first host."""
    world, ranks = trained(3, 2, last=2)
    return Desk(monkeypatch, world, ranks[0])


@pytest.mark.parametrize(
    ("fault", "says"), [("", ""), ("hangs", "no answer"), ("dies", "no answer"), ("cannot", "arena is gone")]
)
def test_verify_is_not_fine_with_a_host_that_did_not_look(desk: Desk, fault: str, says: str) -> None:
    """It answers nothing, dies, or says that it could not: exit code 4 and its name, though no other found damage."""
    holder = desk.world.holders["h2"]
    if fault:
        holder.instead[VerifyCopies] = lambda order: (
            holder.report(CopiesVerified(call=order.call, found=None, problem=says)) if fault == "cannot" else None
        )
    if fault == "dies":
        desk.world.at(1.0, lambda: desk.world.kill_host("h2"))
    result = desk.run("verify", "--json")
    body = json.loads(result.stdout)
    assert (result.exit_code, body["ok"], body["damaged"]) == ((4, False, 0) if fault else (0, True, 0))
    assert {host: row["error"] for host, row in body["hosts"].items()} == {"h0": "", "h1": "", "h2": says}


@pytest.mark.parametrize("fate", ["dies", "stays short"])
def test_drain_is_not_fine_with_a_host_that_was_not_done_in_time(desk: Desk, fate: str) -> None:
    """It dies before all is elsewhere, or the notice is over: exit code 4, and no word that it can go."""
    for holder in desk.world.holders.values():
        holder.refuses_copies = "the network is slow"
    if fate == "dies":
        desk.world.at(3.0, lambda: desk.world.kill_host("h1"))
    result = desk.run("drain", "h1", "--within", "20")
    assert result.exit_code == 4
    assert ("h1 died before" if fate == "dies" else "must not go yet, after 20 s") in result.stderr
    assert "can go" not in result.stderr


def test_rm_takes_force_for_what_it_refuses(desk: Desk) -> None:
    """A job that is trained and has a pin stays without --force; with it the lost pin is named."""
    assert desk.run("pin", "train", "2", "best").exit_code == 0
    assert desk.run("rm", "train", "--yes").exit_code == 1
    assert "train" in desk.world.served.jobs
    result = desk.run("rm", "train", "--yes", "--force")
    assert (result.exit_code, "pin best of step 2 is gone" in result.stderr) == (0, True)
    assert "train" not in desk.world.served.jobs


@pytest.mark.parametrize("state", ["trained", "trained, with a pin", "over", "over, with a pin"])
def test_what_rm_advises_drops_the_job(desk: Desk, state: str) -> None:
    """The newest step is only in RAM.

    The command in the refusal is the whole answer, anything that else is in the way.
    """
    if "pin" in state:
        assert desk.run("pin", "train", "2", "best").exit_code == 0
    if "over" in state:
        for rank in desk.world.ranks.values():
            desk.world.call(rank, "close")
        desk.world.run(1.0)
    refused = desk.run("rm", "train")
    assert refused.exit_code == 1
    (command,) = re.findall("`memstore (.*)`", refused.stderr)
    assert ("--force" in command) == (state != "over")
    assert desk.run(*command.split()).exit_code == 0
    assert "train" not in desk.world.served.jobs


def test_a_step_is_of_the_attempt_that_is_named(desk: Desk) -> None:
    """Attempt 9 put nothing, attempt 1 did."""
    typed = ["pin", "train", "2", "best"]
    refused = desk.run(*typed, "--attempt", "9")
    assert refused.exit_code == 1
    assert "attempt 9" in refused.stderr
    assert desk.run(*typed, "--attempt", "1").exit_code == 0


def test_events_are_the_newest_ones_and_a_gap_is_reported(desk: Desk) -> None:
    """--tail N prints N; what a dead controller remembered is missing, and stderr says so."""
    rows = [json.loads(line) for line in desk.run("events", "--level", "routine", "--json").stdout.splitlines()]
    assert len(rows) > 3
    shown = desk.run("events", "--level", "routine", "--json", "--tail", "3").stdout.splitlines()
    assert [json.loads(line)["seq"] for line in shown] == [row["seq"] for row in rows[-3:]]
    assert "not remembered" not in desk.run("events", "--since", str(rows[0]["seq"])).stderr
    desk.world.crash_controller()
    desk.world.run(10.0)
    assert "events after --since are not remembered" in desk.run("events", "--since", str(rows[0]["seq"])).stderr


@pytest.mark.parametrize(
    ("ranks_count", "dies", "lose", "targets"),
    [
        (2, "", "h0", {"h1"}),
        (2, "h1", "", {"h0"}),
        (1, "", "h0", {"h1", "h2"}),
        (2, "", "h0 h1 h2", {"replacement of h0", "replacement of h1"}),
    ],
)
def test_a_plan_starts_ranks_on_hosts_that_are_there(
    monkeypatch: pytest.MonkeyPatch, ranks_count: int, dies: str, lose: str, targets: set[str]
) -> None:
    """None on a host that is lost in the question or dead: on the job's others, else the store's, else a new one."""
    world, ranks = trained(3, ranks_count, last=2, durable="/durable", durable_every=1)
    world.run(2.0)
    desk = Desk(monkeypatch, world, ranks[0])
    if dies:
        world.kill_host(dies)
        world.run(10.0)
    result = desk.run("plan", "train", *(["--lose", *lose.split()] if lose else []), "--json")
    [plan] = json.loads(result.stdout)["plans"]
    assert plan["step"] == 2
    found = {target for _, _, _, target, _ in plan["transfers"]}
    assert found <= targets
    assert found or plan["bytes"]["local"]


def test_the_worst_plan_of_all_jobs_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one job durable storage has an older step, of the one planned last the newest: exit code 4, not 0."""
    world = ControllerWorld(2, durable="/durable", durable_every="1h")
    for job, every in (("older", "1h"), ("whole", 1)):
        ranks = world.launch(2, job=job, config={**world.config, "durable_every": every})
        world.get(ranks)
        for step in (1, 2):
            assert world.put_all(ranks, step)
            world.run(2.0)
    result = Desk(monkeypatch, world, ranks[0]).run("plan", "--lose", "h0", "h1", "--json")
    assert {plan["job"]: plan["outcome"] for plan in json.loads(result.stdout)["plans"]} == {
        "older": "older",
        "whole": "whole",
    }
    assert result.exit_code == 4

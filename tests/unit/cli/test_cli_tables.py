"""What `ls`, `events` and `drain --cancel` show and leave out, of what the controller knows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import pytest
from cli_store import STEPS, Desk, cells, open_store, run, run_json

from memstore.cli.bill import chance_text
from memstore.core.wire.orders import VerifyCopies
from memstore.core.wire.reports import CopiesVerified
from memstore.testing.clusters.processes import ProcessCluster
from memstore.testing.controller.world import ControllerWorld, trained


def events_of(desk: Desk, *typed: str) -> list[dict[str, Any]]:
    """Return what `memstore events --json` prints."""
    result = desk.run("events", *typed, "--json")
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.fixture
def two_jobs(monkeypatch: pytest.MonkeyPatch) -> Desk:
    """Job "train" with a durable step, a pinned one, one that a rewind left behind; and job "other"."""
    world, _ = trained(3, 2, last=3, durable="/durable", durable_every=1, keep_steps=2)
    world.run(5.0)
    for job, fresh in (("other", False), ("train", True)):
        ranks = world.launch(2, job=job, fresh=fresh)
        world.get(ranks)
        assert world.put_all(ranks, 7)
    return Desk(monkeypatch, world, ranks[0])


def test_ls_of_one_job_draws_that_alone_and_both_lineages(two_jobs: Desk) -> None:
    """The step of the lineage has a star, what a fresh start left behind is said to be beside it."""
    assert two_jobs.run("pin", "train", "7", "best").exit_code == 0
    two_jobs.world.run(5.0)  # its durable write ends
    said = two_jobs.run("export", "train", "bets", "there", "--format", "dcp").stderr
    assert "no pin 'bets': did you mean best?" in said
    jobs = json.loads(two_jobs.run("ls", "--json").stdout)["jobs"]
    assert sorted(job["job"] for job in jobs) == ["other", "train"]
    [job] = json.loads(two_jobs.run("ls", "train", "--json").stdout)["jobs"]
    assert (job["job"], job["attempt"]) == ("train", 2)
    screen = two_jobs.run("ls", "train").stdout
    assert "other" not in screen
    newest, behind = cells(screen, "*  "), cells(screen, "| o  ")
    assert behind[3:6] == ["storage", "2/2", "512 B"]  # in no host's RAM, and all of it is there
    assert newest[1:4] == ["7", "committed, durable, pinned best", "2 of 2"]
    assert (behind[1], "durable, not in the lineage" in behind[2]) == ("3", True)


def test_ls_says_what_is_wrong_with_a_step(two_jobs: Desk) -> None:
    """A retired step with the reason, one with fewer copies with how many of how many."""
    for name in ("h1", "h2"):
        two_jobs.world.kill_host(name)
    two_jobs.world.run(10.0)
    assert cells(two_jobs.run("ls", "train").stdout, "*  ")[3] == "1 of 2"
    two_jobs.world.call(two_jobs.rank, "retire", attempt=2, step=7, reason="it diverges")
    two_jobs.world.run(1.0)
    assert "retired: it diverges" in two_jobs.run("ls", "train").stdout


def test_ls_names_how_many_steps_are_in_flight_where_they_are_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as are claimed, beside the steps that are kept."""
    world, ranks = trained(2, 2, in_flight=2)
    screen = Desk(monkeypatch, world, ranks[0]).run("ls").stdout
    assert screen.splitlines()[0] == "train · attempt 1 · 2 ranks · 2 copies · keep_steps 1 · in_flight 2"


def test_ls_of_an_empty_store_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    world, ranks = trained(2)
    desk = Desk(monkeypatch, world, ranks[0])
    assert desk.run("rm", "train", "--yes", "--force").exit_code == 0
    result = desk.run("ls")
    assert (result.exit_code, result.stdout, "holds no job yet" in result.stderr) == (0, "", True)
    assert json.loads(desk.run("ls", "--json").stdout) == {"jobs": []}


def test_events_are_of_the_job_level_and_age_that_are_asked_for(two_jobs: Desk) -> None:
    """Each filter alone; a job that no process knows is refused, not an empty account."""
    everything = events_of(two_jobs, "--level", "routine")
    kinds = {row["event"] for row in everything}
    assert {"put", "commit", "attempt"} <= kinds
    assert {row["event"] for row in events_of(two_jobs)}.isdisjoint({"put", "commit", "durable"})
    assert {row.get("job") for row in events_of(two_jobs, "other", "--level", "routine")} <= {"other", None}
    two_jobs.world.kill_host("h2")
    two_jobs.world.run(90.0)
    problems = {row["event"] for row in events_of(two_jobs, "--level", "problem")}
    assert "host_dead" in problems
    assert problems.isdisjoint({"put", "attempt", "pinned", "host_live"})
    late = two_jobs.world.launch(2, job="late")
    two_jobs.world.get(late)
    two_jobs.world.run(5.0)
    young = [row["seq"] for row in events_of(two_jobs, "--since", "1m")]
    reported = events_of(two_jobs)
    assert young == [row["seq"] for row in reported if row["wall_s"] >= reported[-1]["wall_s"] - 40.0]
    assert 0 < len(young) < len(events_of(two_jobs, "--since", "1h")) == len(reported)
    assert events_of(two_jobs, "--tail", "0") == []
    refused = two_jobs.run("events", "trian")
    assert (refused.exit_code, refused.stdout, "did you mean train?" in refused.stderr) == (1, "", True)


@pytest.mark.parametrize("is_short", [False, True])
def test_a_notice_that_is_taken_back_is_no_problem_any_more(desk_of_three: Desk, is_short: bool) -> None:
    """Also where copies were still to be made: exit code 0, and words that the host stays."""
    for holder in desk_of_three.world.holders.values():
        holder.refuses_copies = "the network is slow" if is_short else ""
    given = desk_of_three.run("drain", "h1", "--within", "20")
    assert (given.exit_code, "can go" in given.stderr) == ((4, False) if is_short else (0, True))
    began_s = desk_of_three.world.now
    back = desk_of_three.run("drain", "h1", "--cancel")
    assert desk_of_three.world.now - began_s < 30.0
    assert (back.exit_code, back.stderr) == (0, "host h1 stays\n")
    assert "is to go" not in desk_of_three.run("status").stdout
    assert json.loads(desk_of_three.run("drain", "h1", "--cancel", "--json").stdout)["drains_s"] is None


@pytest.fixture
def desk_of_three(monkeypatch: pytest.MonkeyPatch) -> Desk:
    """Three hosts, a job of two ranks."""
    world, ranks = trained(3, 2, last=2)
    return Desk(monkeypatch, world, ranks[0])


def test_a_host_that_nothing_can_take_the_place_of_must_not_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hosts, two copies: said at once, with what helps, and never that it can go."""
    world, ranks = trained(2, 2, last=2)
    result = Desk(monkeypatch, world, ranks[0]).run("drain", "h1")
    assert result.exit_code == 4
    assert "host h1 must not go: " in result.stderr
    assert "add a host" in result.stderr


def test_a_pin_is_reported_with_its_step_and_attempt_and_can_be_taken_back_once(two_jobs: Desk) -> None:
    """The newest step of the lineage is "latest", though an older attempt had others."""
    pinned = two_jobs.run("pin", "train", "latest", "best")
    assert (pinned.exit_code, pinned.stderr) == (0, "step 7 of train (attempt 2) is pinned as best\n")
    assert "pinned best" in two_jobs.run("ls", "train").stdout
    taken = two_jobs.run("unpin", "train", "best")
    assert (taken.exit_code, taken.stderr) == (0, "step 7 of train is not pinned as best any more\n")
    assert "pinned" not in two_jobs.run("ls", "train").stdout
    again = two_jobs.run("unpin", "train", "best")
    assert (again.exit_code, "best" in again.stderr) == (1, True)


@pytest.mark.parametrize("columns", [50, 80, 120])
@pytest.mark.parametrize("verb", [["status"], ["ls"], ["metrics"], ["metrics", "--list"]], ids=" ".join)
def test_no_word_is_broken_at_any_width(
    two_jobs: Desk, monkeypatch: pytest.MonkeyPatch, verb: list[str], columns: int
) -> None:
    """Every word of the wide screen is whole on the narrow one, and no line is longer than that; in a pipe none wraps.

    A row that does not fit is a list of its cells.
    """
    two_jobs.world.call(two_jobs.world.ranks["train", 0], "drain", host="h1", within_s=60.0)
    two_jobs.world.kill_host("h2")
    two_jobs.world.run(10.0)
    wide = two_jobs.run(*verb).stdout
    monkeypatch.setenv("COLUMNS", str(columns))
    narrow = two_jobs.run(*verb).stdout
    assert max(map(len, narrow.splitlines())) <= columns
    words = set(narrow.replace(":", " ").split())
    # Names of columns whose cells begin the lists, or of which none has anything to show.
    gone = wide.split()[0], "JOB", "HOST", "STEP", "ARENA", "used/reserved/claimed/limit", "-"
    said = [word for word in wide.replace(":", " ").split() if word not in gone and not word[0].isdigit()]
    assert [word for word in said if word not in words] == []
    if verb == ["status"]:
        [train] = [line for line in wide.splitlines() if line.startswith("train ")]
        assert len([line for line in wide.splitlines() if line.startswith("! ")]) >= 2
        assert "2/2" in train
        assert ("RANKS: 2/2" in narrow) == (columns == 50)


# -- plan ---------------------------------------------------------------------------------------------
# `memstore plan` on a real store: what a restart would get, now and after losing hosts.


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    """A store with a trained job; no test changes it."""
    with open_store(tmp_path_factory.mktemp("store")) as cluster:
        yield cluster


@pytest.mark.parametrize(
    ("lose", "code", "outcome", "hosts"),
    [
        (["--lose", "h1"], 0, "whole", ["h1"]),
        (["--lose", "rack=r1"], 0, "whole", ["h1", "h3"]),
        (["--lose", "h1", "h2"], 3, "lost", ["h1", "h2"]),
        (["--lose", "h1,h2"], 3, "lost", ["h1", "h2"]),
        (["--lose", "h1", "--lose", "h2"], 3, "lost", ["h1", "h2"]),
        (["--lose=h2", "h3"], 0, "whole", ["h2", "h3"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_plan_says_what_losing_hosts_costs(
    store: ProcessCluster, lose: list[str], code: int, outcome: str, hosts: list[str]
) -> None:
    """One host or a whole rack costs nothing; both holders of a shard lose the run, exit code 3."""
    body = run_json(store, "plan", "llama3-8b", *lose, code=code)
    (plan,) = body["plans"]
    assert (body["lost_hosts"], plan["outcome"]) == (hosts, outcome)
    assert plan["odds"][0] == [1, 1.0, True]
    assert plan["odds"][1] == [2, pytest.approx(2 / 3), True]
    assert plan["step"] == (STEPS - 1 if outcome == "whole" else None)


def test_a_loss_of_no_host_is_refused(store: ProcessCluster) -> None:
    """An empty word, as of a variable that is not set, would be a plan that loses nothing."""
    for word in ("", ","):
        result = run(store, "plan", "llama3-8b", "--lose", word)
        assert result.exit_code == 1
        assert "names no host" in result.stderr


def test_plan_in_words(store: ProcessCluster) -> None:
    """The first line is the answer; nothing is lost by asking."""
    result = run(store, "plan", "--lose", "h1")
    assert result.exit_code == 0
    assert result.stdout.startswith(f"llama3-8b: losing h1 now restores step {STEPS - 1} (")
    assert "0 committed steps lost" in result.stdout
    assert "rank 0 of the lost hosts is taken to start on h2: started on a new host, all" in result.stdout
    result = run(store, "plan", "--lose", "h1", "h2")
    assert result.stdout.startswith("llama3-8b: losing h1, h2 now loses the run: ")
    assert not store.host_events("host_dead")


def test_plan_without_hosts_says_what_get_would_do_now(store: ProcessCluster) -> None:
    """Without --lose the question is what a restart would get: the newest step, from this host, nothing lost."""
    result = run(store, "plan", "llama3-8b")
    assert result.exit_code == 0
    assert result.stdout.startswith(f"llama3-8b: get() now restores step {STEPS - 1} (")
    assert "0 committed steps lost" in result.stdout
    body = run_json(store, "plan", "llama3-8b")
    assert (body["lost_hosts"], [plan["outcome"] for plan in body["plans"]]) == ([], ["whole"])


@pytest.fixture
def racked(monkeypatch: pytest.MonkeyPatch) -> Desk:
    """Ten hosts in five racks; the job "train" keeps two steps and is durable."""
    labels = {f"h{n}": {"rack": f"r{n % 5}"} for n in range(10)}
    world = ControllerWorld(10, labels=labels, keep_steps=2, durable="/durable")
    ranks = world.launch(2)
    return Desk(monkeypatch, world, ranks[0])


def test_the_bill_compares_schemes_on_the_racks_of_the_store(racked: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a job's name the store's settings count; five racks take 4+1, and the row of 8+1 says what it needs."""
    monkeypatch.setenv("COLUMNS", "80")
    screen = racked.run("plan", "--bill").stdout
    assert max(map(len, screen.splitlines())) <= 80
    assert cells(screen, "2 copies") == ["2 copies *", "4x", "1x", "1", "11%", "33%", "62%", "any 1 rack"]
    assert cells(screen, "parity 4+1") == ["parity 4+1", "2.5x", "1x", "4", "44%", "100%", "100%", "any 1 rack"]
    assert cells(screen, "parity 8+1")[4:] == ["-", "-", "-", "needs 9 racks, has 5"]
    said = " ".join(screen.split())
    assert "keeps the promise of 1+p copies, any p losses, in less memory, and has worse odds beyond it" in said
    assert "k+2 is Config(parity=k, replicas=3)" in said


def test_the_bill_of_a_job_counts_its_settings(racked: Desk) -> None:
    """Two kept steps, the one in flight and the one that durable storage reads are four versions."""
    rows = {row["scheme"]: row for row in json.loads(racked.run("plan", "train", "--bill", "--json").stdout)["bill"]}
    assert (rows["2 copies"]["memory"], rows["parity 4+1"]["memory"]) == (8, 5)
    assert [name for name, row in rows.items() if row["is_configured"]] == ["2 copies"]
    assert rows["parity 4+1"]["fatal"]["2"] == pytest.approx(4 / 9)
    assert "--bill compares schemes" in racked.run("plan", "--bill", "--lose", "h1").stderr


def test_the_bill_knows_parity_that_survives_two_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    """replicas=3 with parity is k+2: the row of it is the configured one, also where the table has none of that k."""
    for parity in (4, 3):
        world = ControllerWorld(6, replicas=3, parity=parity)
        desk = Desk(monkeypatch, world, world.launch(6)[0])
        rows = json.loads(desk.run("plan", "train", "--bill", "--json").stdout)["bill"]
        assert [row["scheme"] for row in rows if row["is_configured"]] == [f"parity {parity}+2"]
        (row,) = [row for row in rows if row["is_configured"]]
        assert (row["data"], row["spare"], row["memory"]) == (parity, 2, pytest.approx(2 * (1 + 2 / parity)))


def test_the_bill_needs_no_job_and_no_dead_host(racked: Desk) -> None:
    """What a restart would get is not asked: a store without a job has a bill, of the hosts that live."""
    assert racked.run("rm", "train", "--yes", "--force").exit_code == 0
    racked.world.kill_host("h4")
    racked.world.kill_host("h9")
    racked.world.run(10.0)
    assert racked.run("plan").exit_code == 1
    result = racked.run("plan", "--bill")
    assert result.exit_code == 0, result.output
    assert "needs 5 racks, has 4" in result.stdout


@pytest.mark.parametrize(
    ("chance", "text"),
    [
        (None, "-"),
        (Fraction(0), "0"),
        (Fraction(1, 10**9), "1e-07%"),
        (Fraction(84, 10_000), "0.84%"),
        (Fraction(199, 1000), "20%"),
        (Fraction(999, 1000), "99%"),
        (Fraction(1), "100%"),
    ],
)
def test_a_chance_is_sure_only_if_it_is(chance: Fraction | None, text: str) -> None:
    """Two digits, and neither 0 nor 100 % by rounding."""
    assert chance_text(chance) == text


# -- answers ------------------------------------------------------------------------------------------
# What the verbs make of a controller's answers: exit codes, and options that reach the question (R4, R29, R30).
#
# The controller is the real one, in virtual time; its hosts hang, die and run out of room when a test says so.


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
    assert "removed with all its copies in RAM; TAKEN from rank 0 on h0 (pid " in desk.run("events", "train").stdout


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

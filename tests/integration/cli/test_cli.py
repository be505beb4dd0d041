"""The `memstore` command against a real store of processes: what is shown, JSON, exit codes, error messages."""

from __future__ import annotations

import functools
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest
from cli_store import HOSTS, STEPS, cells, open_store, run, run_json, run_remedies, train
from click.testing import CliRunner
from msgspec.structs import replace

from memstore.cli import main
from memstore.cli.events import line
from memstore.cli.options import Where
from memstore.cli.output import ExitCode
from memstore.core.report.cells import state_text
from memstore.core.report.event_kinds import PROBLEM, ROUTINE, level_of
from memstore.core.report.recorder import RecentEvents
from memstore.core.wire.calls import AskStatus, RemoveJob
from memstore.core.wire.status_rows import EventRow, HostRow, ShortStep
from memstore.errors import PeerTimeout
from memstore.shell.controller import WAITING_MAX, EventLog
from memstore.testing.clusters.processes import ProcessCluster, wait_for
from memstore.testing.fuzz.messages import blank
from memstore.testing.ranks.fleet import Fleet
from memstore.testing.ranks.rank_process import RankNursery, together


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    """A store with a trained job; no test changes it."""
    with open_store(tmp_path_factory.mktemp("store")) as cluster:
        yield cluster


# -- without a store --------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_load_neither_torch_nor_ray(option: str) -> None:
    """What a newcomer types first answers at once."""
    code = (
        "import sys; from memstore.cli import main; main([sys.argv[1]], 'memstore', standalone_mode=False); "
        "sys.exit(bool({'torch', 'ray', 'numpy'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code, option], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "memstore" in result.stdout.lower()


def test_help_names_every_verb() -> None:
    """The verbs are listed by what they are about, those of a cluster first."""
    lines = run(None, "--help").stdout.split("Commands:")[1].splitlines()
    verbs = [line.split()[0] for line in lines if line.startswith("  ") and line[2] != " "]
    order = "up down stores drain upgrade doctor status page events ls pin trust unpin persist rm plan odds fit"
    assert " ".join(verbs) == f"{order} simulate verify metrics export import salvage rehearse completion demo drill"


NEEDS_STORE = [["status"], ["events"], ["ls"], ["rm", "j"], ["plan", "--lose", "h1"], ["verify"], ["drain", "h1"]]
NEEDS_STORE += [["page"]]


@pytest.mark.parametrize("arguments", NEEDS_STORE, ids=lambda a: a[0])
def test_without_a_store_every_verb_says_what_to_run(arguments: list[str], tmp_path: Path) -> None:
    """No store: one clear line on stderr, the same as JSON on stdout, exit code 1, a traceback only with --debug."""
    result = CliRunner().invoke(main, [*arguments, "--arena-dir", str(tmp_path), "--json"])
    assert result.exit_code == 1
    error = json.loads(result.stdout)["error"]
    assert (error["kind"], f"memstore: {error['message']}\n") == ("PeerUnreachable", result.stderr)
    assert "memstore up" in result.stderr
    assert str(tmp_path) in result.stderr
    assert "Traceback" not in result.stderr
    result = CliRunner().invoke(main, [*arguments, "--arena-dir", str(tmp_path), "--debug"])
    assert "Traceback" in result.stderr
    assert result.exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["stauts"], "stauts"),
        (["status", "--frobnicate"], "--frobnicate"),
        (["status", "--store", "a/b"], "store name 'a/b'"),
        (["rm"], "JOB"),
        (["drain"], "HOST"),
        (["down", "--yes"], "--yes goes with --discard"),
        (["down", "--host", "h1"], "--host goes with --leftovers"),
        (["up", "--arena-bytes", "plenty"], "arena_bytes='plenty' is not a size"),
        (["up", "--chunk-bytes", "5000"], "multiple of 4096"),
        (["up", "--port", "70000"], "port=70000"),
        (["up", "--wait", "0"], "--wait"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_exits_with_2_and_says_what_is_wrong(arguments: list[str], says: str) -> None:
    """Usage errors name the word that is wrong, before anything is looked for."""
    result = run(None, *arguments)
    assert result.exit_code == 2
    assert says in result.stderr
    assert result.stdout == ""


def test_wrong_usage_is_json_too_where_json_is_asked_for() -> None:
    """A script that reads --json finds the kind of the error and its words."""
    error = json.loads(run(None, "down", "--yes", "--json").stdout)["error"]
    assert (error["kind"], error["message"]) == ("UsageError", "--yes goes with --discard; without it nothing is lost")


def test_ctrl_c_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verb that a person interrupts ends as shells expect it, without words."""

    def interrupted(self: Where) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Where, "status", interrupted)
    result = run(None, "status")
    assert (result.exit_code, result.output) == (130, "")


def test_up_refuses_a_durable_directory_it_cannot_write(tmp_path: Path) -> None:
    """--durable-check fails before anything is started, and names the directory."""
    result = run(None, "up", "--durable-check", str(tmp_path / "missing"))
    assert result.exit_code == 1
    assert str(tmp_path / "missing") in result.stderr


@pytest.mark.parametrize("verb", ["up", "down", "status"])
def test_a_ray_address_where_no_process_listens_is_refused_at_once(verb: str) -> None:
    """Ray would try for minutes; the command says which address and what to start."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound and not listening: no other process can take it meanwhile
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        result = run(None, verb, "--address", address)
    assert result.exit_code == 1
    assert f"no Ray cluster answers at {address}" in result.stderr


def test_a_fault_of_ours_is_one_line_that_asks_for_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unforeseen exception is exit code 1 and no traceback either, unless --debug."""

    def broken(self: Where) -> dict[str, Any]:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(Where, "status", broken)
    result = run(None, "status")
    assert result.exit_code == 1
    assert "please report it" in result.stderr
    assert "ZeroDivisionError: planted" in result.stderr
    assert "Traceback" not in result.stderr


# -- demo and drill ---------------------------------------------------------------------------


def test_drill_gets_its_arguments_and_its_exit_code_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """`memstore drill NAME --option` reaches the group in its own module, --help included."""

    @click.group()
    def drill() -> None:
        """A substitute."""

    @drill.command("kill-host")
    @click.option("--seed", type=int)
    @click.pass_context
    def kill_host(ctx: click.Context, seed: int) -> None:
        click.echo(f"seed {seed}")
        ctx.exit(3)

    module = ModuleType("memstore.drills.cli")
    module.drill = drill  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "memstore.drills.cli", module)
    result = run(None, "drill", "kill-host", "--seed", "7")
    assert (result.exit_code, result.stdout) == (3, "seed 7\n")
    assert "kill-host" in run(None, "drill", "--help").stdout
    assert run(None, "drill", "nonsense").exit_code == 2


def test_a_missing_part_is_named_with_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A demo that cannot be imported gives one line, not a traceback."""
    monkeypatch.setitem(sys.modules, "memstore.demo.cli", None)
    result = run(None, "demo")
    assert result.exit_code == 1
    assert "pip install 'ray[train]' matplotlib" in result.stderr
    assert "Traceback" not in result.stderr


# -- a healthy store --------------------------------------------------------------------------


def test_status_answers_what_would_be_lost(store: ProcessCluster) -> None:
    """First table: newest commit, copies, what survives; second: the holders of each rank's shard."""
    result = run(store, "status", "--check")
    is_quiet = "no rank has put anything beyond step" in result.stdout  # this job puts no more, for some half a minute
    assert result.exit_code == (ExitCode.STOPPED if is_quiet else ExitCode.FINE)
    lines = result.stdout.splitlines()
    assert "3 hosts on 1 machine, all live · 2 racks" in lines[0]
    job = cells(result.stdout, "llama3-8b")
    assert job[:4] == ["llama3-8b", "1", "2/2 !" if is_quiet else "2/2", str(STEPS - 1)]
    assert job[4].startswith(f"{STEPS - 1} (")
    assert job[5].startswith("0 steps / ")
    assert job[6:] == ["2 of 2", "any 1 rack, any 1 host, 2 hosts: 33% fatal", "off !"]
    assert cells(result.stdout, "h1")[-2:] == ["own + h2", "ok"]
    assert cells(result.stdout, "h3")[-2:] == ["-", "ok"]
    assert "! llama3-8b: durable off: losing 2 hosts at once can lose the run" in result.stdout


def test_status_as_json_has_what_the_screen_says(store: ProcessCluster) -> None:
    """One document with hosts, jobs and problems, so that a script need not read the screen."""
    body = run_json(store, "status")
    assert {"version", "store", "ray", "term", "hosts", "jobs", "failure_domains", "problems"} <= body.keys()
    assert [host["host"] for host in body["hosts"]] == ["h1", "h2", "h3"]
    (job,) = body["jobs"]
    assert job["survives"] == [
        {"level": "rack", "tolerated": 1, "fatal": []},
        {"level": "host", "tolerated": 1, "fatal": []},
    ]
    assert (job["committed_step"], job["copies"], job["missing_copies"]) == (STEPS - 1, 2, 0)
    assert [row["kind"] for row in body["problems"] if row["kind"] != "training_quiet"] == ["durable_off"]


def test_metrics_prints_where_the_gauges_stand(store: ProcessCluster) -> None:
    """The newest committed step of the job and the arena of each host, as numbers; the same as JSON."""
    stats = lambda: {row["host"]: row["stats"] for row in store.status()["hosts"]}  # noqa: E731
    wait_for(lambda: all(stats().values()) and stats()["h1"]["used_bytes"], "heartbeats after the puts")
    screen = run(store, "metrics").stdout
    assert cells(screen, "ray_memstore_committed_step") == [
        "ray_memstore_committed_step",
        "job_name=llama3-8b",
        str(STEPS - 1),
    ]
    rows = json.loads(run(store, "metrics", "--json").stdout)
    used = {row["tags"]["host"]: row["value"] for row in rows if row["metric"] == "ray_memstore_arena_used_bytes"}
    assert set(used) == set(HOSTS)
    assert used["h1"] > 0


def test_ls_draws_the_timeline(store: ProcessCluster) -> None:
    """The kept step with its state, copies, ranks and hosts, and the attempt it is of; the same as JSON."""
    screen = run(store, "ls", "llama3-8b").stdout
    assert screen.splitlines()[0] == "llama3-8b · attempt 1 · 2 ranks · 2 copies · keep_steps 1"
    row = cells(screen, "* ")
    assert [*row[:5], row[-1]] == ["*", str(STEPS - 1), "committed", "2 of 2", "2/2", "h1, h2"]
    assert cells(screen, "*-")[1] == "attempt 1 from nothing"
    (job,) = run_json(store, "ls")["jobs"]
    assert [step["step"] for step in job["steps"] if step["committed"]] == [STEPS - 1]
    assert [(row["attempt"], row["parent"], row["in_lineage"]) for row in job["attempts"]] == [(1, None, True)]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["ls", "lama3-8b"], "no job 'lama3-8b': did you mean llama3-8b?"),
        (["rm", "bert"], "no job 'bert': it has llama3-8b"),
        (["verify", "bert"], "no job 'bert'"),
        (["plan", "bert", "--lose", "h1"], "no job 'bert'"),
        (["plan", "--lose", "h11"], "no host 'h11': did you mean h1"),
        (["drain", "h11"], "no host 'h11': did you mean h1"),
        (["plan", "--lose", "zz"], "no host 'zz': it has h1, h2, h3"),
        (["plan", "--lose", "rack=r9"], "no host is labelled rack=r9: its values are r1, r2"),
        (["plan", "--lose", "colour=red"], "no host has that label"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_unknown_name_is_answered_with_the_known_ones(
    store: ProcessCluster, arguments: list[str], says: str
) -> None:
    """A mistyped job or host is exit code 1 and the nearest names."""
    result = run(store, *arguments)
    assert result.exit_code == 1
    assert says in result.stderr
    assert result.stdout == ""


def test_verify_of_sound_bytes(store: ProcessCluster) -> None:
    """Every host re-digests its chunks and finds them right."""
    body = run_json(store, "verify", "llama3-8b")
    assert (body["ok"], body["damaged"], body["unrecoverable"]) == (True, 0, [])
    assert body["hosts"]["h1"]["chunks"] > 0
    assert cells(run(store, "verify").stdout, "h2")[-2:] == ["0", "all of it ok"]


def test_rm_refuses_a_job_that_is_being_trained(store: ProcessCluster) -> None:
    """rm names the rank that lives, and --force; nothing is dropped."""
    result = run(store, "rm", "llama3-8b", "--yes")
    assert result.exit_code == 1
    assert "is being trained" in result.stderr
    assert "--force" in result.stderr
    job = store.job("llama3-8b")
    assert job is not None
    assert job["copies"] == 2


def test_leftovers_spares_arenas_of_running_holders(store: ProcessCluster) -> None:
    """--leftovers --discard lists live arenas, removes none of them and exits with 1."""
    body = run_json(store, "down", "--leftovers")
    assert [(row["host"], row["is_live"], row["is_removed"]) for row in body["arenas"]] == [
        (host, True, False) for host in HOSTS
    ]
    assert run(store, "down", "--leftovers", "--discard").exit_code == 1
    assert all(store.arena(host).is_dir() for host in HOSTS)
    result = run(store, "down", "--leftovers", "--host", "h9")
    assert "no arena of host 'h9'" in result.stderr


def test_watch_shows_it_again_until_interrupted(store: ProcessCluster) -> None:
    """--watch --json writes one document after the other; Ctrl-C ends it without an error."""
    command = [sys.executable, "-m", "memstore.cli", "status", "--watch", "--json", "--store", store.config.store]
    heeds = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a job in the background ignores it
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, preexec_fn=heeds) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        lines = [process.stdout.readline() for _ in range(2)]
        process.send_signal(signal.SIGINT)
        code = process.wait(timeout=120)
        assert (code, process.stderr.read()) == (0, "")
    assert [json.loads(line)["store"] for line in lines] == [store.config.store] * 2


# -- a store that things happen to ------------------------------------------------------------


def test_a_lost_host_degrades_the_store_until_it_is_repaired(tmp_path: Path) -> None:
    """A host lost is exit code 4 with the copies missing, until the job is closed; then rm, and leftovers."""
    with ProcessCluster(tmp_path, {"h1": {"rack": "r1"}, "h2": {"rack": "r2"}}) as cluster:
        [rank] = train(cluster.config, hosts=("h2",))
        cluster.lose_host("h1")
        wait_for(lambda: cluster.host_status().get("h1") == "dead", "death of h1")
        result = run(cluster, "status", "--check")
        assert result.exit_code == 4
        assert "1 of 2 !" in cells(result.stdout, "llama3-8b")
        assert "1 dead" in result.stdout.splitlines()[0]
        assert "the processes only" in cells(result.stdout, "llama3-8b")
        assert cells(result.stdout, "h1")[-1].startswith("dead ")
        assert "losing h2 now loses the run" in result.stdout
        screen = " ".join(result.stdout.split())
        assert "rank 0 on h2 only, not rebuilt: " in screen
        run_remedies(cluster)
        rank.close()
        closed = run(cluster, "status", "--check")
        assert (closed.exit_code, cells(closed.stdout, "llama3-8b")[2]) == (0, "closed")

        def hosts_measured() -> set[str]:
            rows = json.loads(run(cluster, "metrics", "--json").stdout)
            return {row["tags"]["host"] for row in rows if row["metric"] == "ray_memstore_arena_used_bytes"}

        wait_for(lambda: hosts_measured() == {"h2"}, "the first statistics of h2, and none of h1")
        refused = run(cluster, "rm", "llama3-8b")
        assert refused.exit_code == 1
        assert f"step {STEPS - 1} lives only in RAM" in refused.stderr
        assert f"`memstore rm --store {cluster.config.store} llama3-8b --yes`" in refused.stderr
        assert run_json(cluster, "status")["jobs"][0]["copies"] == 1
        body = run_json(cluster, "rm", "llama3-8b", "--yes")
        assert (body["job"], body["shards"], body["durable"]) == ("llama3-8b", 1, None)
        assert run_json(cluster, "status")["jobs"] == []
        cluster.kill_controller()
        with pytest.raises(PeerTimeout, match=r"the controller of store .* did not answer"):
            Where(cluster.config).ask(AskStatus(), timeout_s=0.3)
        cluster.kill_holder("h2")
        assert "no holder of store" in run(cluster, "status").stderr
        body = run_json(cluster, "down", "--leftovers", "--discard")
        assert [(row["host"], row["is_removed"]) for row in body["arenas"]] == [("h2", True)]
        assert not cluster.arena("h2").exists()
        assert "left nothing" in run(cluster, "down", "--leftovers").stderr


def damage(cluster: ProcessCluster, host: str) -> None:
    """Flip the first byte of every chunk of a host's arena."""
    size = cluster.config.chunk_bytes
    claimed = next(row for row in cluster.status()["hosts"] if row["host"] == host)["stats"]["claimed_bytes"]
    with (cluster.arena(host) / "arena").open("r+b") as file:
        for at in range(0, claimed, size):
            file.seek(at)
            first = file.read(1)[0]
            file.seek(at)
            file.write(bytes([first ^ 0xFF]))


def test_verify_finds_damage_and_says_whether_anything_is_lost(tmp_path: Path) -> None:
    """Damage on one host is exit code 4 and repaired from the other; on both it is exit code 3 (R30)."""
    hosts = {"h1": {"rack": "r1"}, "h2": {"rack": "r2"}}
    with ProcessCluster(tmp_path, hosts, scrub_bytes_per_s=0) as cluster:
        ranks = train(cluster.config)
        wait_for(lambda: all(h["stats"].get("claimed_bytes") for h in cluster.status()["hosts"]), "a heartbeat")
        damage(cluster, "h1")
        body = run_json(cluster, "verify", code=4)
        assert body["hosts"]["h1"]["damaged"] == body["hosts"]["h1"]["chunks"] > 0
        assert (body["hosts"]["h2"]["damaged"], body["unrecoverable"]) == (0, [])
        wait_for(lambda: (cluster.job("llama3-8b") or {})["missing_copies"] == 0, "repair of h1")
        assert run_json(cluster, "verify")["ok"] is True
        damage(cluster, "h1")
        damage(cluster, "h2")
        result = run(cluster, "verify", "llama3-8b")
        assert result.exit_code == 3
        assert f"! llama3-8b: committed step {STEPS - 1} is lost" in result.stdout
        wait_for(lambda: any(row["kind"] == "not_whole" for row in cluster.status()["problems"]), "the worst state")
        assert "plan llama3-8b" in run_remedies(cluster)
        assert run(cluster, "status", "--check").exit_code == 3
        for rank in ranks:
            rank.close()


# -- cli gone -----------------------------------------------------------------------------------------
# `ls` and `plan` after everything was restarted and bytes were lost, on real processes (R22).


GONE_HOSTS = {"h1": {"rack": "r1"}, "h2": {"rack": "r2"}}


def restart(cluster: ProcessCluster) -> None:
    """Start a controller and all holders after `kill_all`."""
    cluster.start_controller()
    for host in GONE_HOSTS:
        cluster.start_holder(host)
    cluster.wait_live(*GONE_HOSTS)


def manifests_count(cluster: ProcessCluster, host: str) -> int:
    return sum(1 for _ in (cluster.arena(host) / "manifests").iterdir())


def test_what_no_tier_has_is_one_line_after_a_restart(tmp_path: Path) -> None:
    """One arena lost: the newest step is there, all others are one line; every manifest lost: all are."""
    with ProcessCluster(tmp_path, GONE_HOSTS) as cluster:
        for rank in train(cluster.config):
            rank.close()
        wait_for(
            lambda: all(manifests_count(cluster, host) == len(GONE_HOSTS) for host in GONE_HOSTS),
            "older steps to be dropped",
        )
        cluster.kill_all()
        shutil.rmtree(cluster.arena("h1"))
        restart(cluster)
        [job] = run_json(cluster, "ls")["jobs"]
        assert [step["step"] for step in job["steps"]] == [STEPS - 1]
        assert [(span["first"], span["last"], span["count"]) for span in job["gone"]] == [(0, STEPS - 2, STEPS - 1)]
        screen = run(cluster, "ls", "llama3-8b").stdout
        assert f"steps 0 to {STEPS - 2} (attempt 1): gone, no copy in any tier" in screen
        plan = run(cluster, "plan", "llama3-8b")
        assert plan.stdout.startswith(f"llama3-8b: get() now restores step {STEPS - 1} (")
        assert "not used" not in plan.stdout

        cluster.kill_all()
        shutil.rmtree(cluster.arena("h1"))
        for manifest in (cluster.arena("h2") / "manifests").iterdir():
            manifest.unlink()
        restart(cluster)
        [job] = run_json(cluster, "ls")["jobs"]
        assert job["steps"] == []
        screen = run(cluster, "ls", "llama3-8b").stdout
        assert f"steps 0 to {STEPS - 1} (attempt 1): gone, no copy in any tier" in screen
        assert "committed" not in screen
        assert "degraded" not in screen
        plan = run(cluster, "plan", "llama3-8b")
        assert plan.exit_code == 3
        assert f"raises RecoveryError: no byte is left of the {STEPS} steps" in plan.stdout
        assert [line for line in plan.stdout.splitlines() if "not used" in line] == [
            f"  not used: steps 0 to {STEPS - 1} (attempt 1): gone, no copy in any tier"
        ]


# -- cli events ---------------------------------------------------------------------------------------
# `memstore events` on real processes: what a person reads, what a program follows, and what must never wait for it.


EVENTS_HOSTS = {"h0": {"rack": "r1"}, "h1": {"rack": "r2"}, "h2": {"rack": "r1"}}


def asked(cluster: ProcessCluster, *arguments: str) -> list[dict[str, Any]]:
    """Return what `memstore events --json` prints."""
    result = CliRunner().invoke(main, ["events", *arguments, "--json", "--store", cluster.config.store])
    assert result.exit_code == 0, result.output
    return [json.loads(text) for text in result.stdout.splitlines()]


def test_the_account_of_a_job_that_lost_a_host(
    tmp_path: Path, nursery: RankNursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Puts with the stall that ranks measured, commits, the death, the restore; the same lines in the named file."""
    log_file = tmp_path / "events.jsonl"
    monkeypatch.setenv("MEMSTORE_EVENTS", str(log_file))
    # Repair would bring the bytes to where the ranks sit now before the restore asks for them.
    with ProcessCluster(tmp_path / "store", EVENTS_HOSTS, detect=60.0, repair_bytes_per_s=8 << 20) as cluster:
        fleet = Fleet(cluster, nursery, kib=8192)
        ranks = fleet.begin(["h0", "h1", "h2"], last_step=2)
        tickets = together(ranks, "ticket", step=2)
        nbytes = sum(ticket["nbytes"] for ticket in tickets)
        rows = asked(cluster, "--level", "routine")
        put, commit = (next(r for r in rows if r["event"] == kind and r["step"] == 2) for kind in ("put", "commit"))
        assert (put["job"], put["ranks"], put["nbytes"]) == ("train", 3, nbytes)
        # A rank tells it as it submits, and its ticket counts until put returned; both are told in microseconds.
        assert 0 < put["stall_s"]["median"] <= put["stall_s"]["max"] <= tickets[put["rank"]]["stall_s"] + 1e-6
        assert (commit["copies"], commit["degraded"], commit["nbytes"]) == (2, "", nbytes)
        assert commit["seconds"]["committed"] >= put["seconds"]["sealed"] >= put["stall_s"]["max"] > 0

        last = rows[-1]["seq"]
        ranks[0].kill()
        (death,) = wait_for(
            lambda: [row for row in asked(cluster, "--since", str(last)) if row["event"] == "rank_dead"],
            "a rank's death",
        )
        assert (death["rank"], death["host"], death["attempt"], death["step"]) == (0, "h0", 1, 2)
        for rank in ranks[1:]:
            rank.kill()
        cluster.lose_host("h1")
        wait_for(lambda: cluster.host_status().get("h1") == "dead", "the death of h1")
        fleet.resume(["h0", "h2", "h2"])
        news = asked(cluster, "train", "--level", "routine", "--since", str(last))
        assert min(row["seq"] for row in news) > last
        dead = next(row for row in news if row["event"] == "host_dead")
        restore = next(row for row in news if row["event"] == "restore")
        assert (dead["host"], dead["shards"]) == ("h1", 3)  # its own, and the others', for it alone is in rack r2
        assert (restore["step"], restore["steps_lost"], restore["of_attempt"]) == (2, 0, 1)
        assert sum(restore["bytes"].values()) == nbytes
        assert restore["bytes"]["durable"] == 0

        written = wait_for(
            lambda: [r for t in log_file.read_text().splitlines() if (r := json.loads(t))["seq"] == restore["seq"]],
            "the restore in the file",
        )
        assert written == [restore]
        text = (
            CliRunner().invoke(main, ["events", "train", "--level", "routine", "--store", cluster.config.store]).stdout
        )
        assert "step 2 committed in " in text
        assert "DEAD: " in text
        assert "step 2 RESTORED by attempt 2: peer, " in text
        assert "rank 0 of attempt 1 on h0 is DEAD (pid " in text
        assert level_of(asked(cluster, "--level", "problem", "--tail", "1")[0]["event"]) == PROBLEM
        assert ROUTINE not in {level_of(row["event"]) for row in asked(cluster)}
        of_a_day = asked(cluster, "--since", "1d")
        assert asked(cluster)[: len(of_a_day)] == of_a_day  # the repair may end between the two
        assert asked(cluster, "--since", "0s") == []
        stranger = CliRunner().invoke(main, ["events", "trian", "--store", cluster.config.store])
        assert "did you mean train?" in stranger.stderr
        cluster.ask(RemoveJob(job="train", force=True))
        assert "removed" in [row["event"] for row in asked(cluster, "train", "--tail", "5")]


def test_follow_goes_on_over_a_controller_that_dies(tmp_path: Path, nursery: RankNursery) -> None:
    """What the next controller sees is printed by the same command, with numbers that go on growing (R17)."""
    with ProcessCluster(tmp_path, {"h0": {}, "h1": {}}) as cluster:
        command = [
            sys.executable,
            "-m",
            "memstore.cli",
            "events",
            "--follow",
            "--json",
            "--store",
            cluster.config.store,
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            rows: list[dict[str, Any]] = []
            assert process.stdout is not None
            reader = threading.Thread(
                target=lambda: rows.extend(json.loads(text) for text in process.stdout or ()), daemon=True
            )
            reader.start()
            try:
                wait_for(lambda: any(row["event"] == "term" for row in rows), "the first controller's line")
                cluster.kill_controller()
                cluster.start_controller()
                wait_for(lambda: sum(row["event"] == "term" for row in rows) > 1, "the second controller's line", 60.0)
            finally:
                process.kill()
                process.wait(30)
                reader.join(30)
        seqs = [row["seq"] for row in rows]
        assert seqs == sorted(set(seqs))


def test_a_kind_that_is_not_known_shows_its_fields() -> None:
    """A newer controller may have kinds that this command has no line for."""
    assert "odd {'host': 'h1'}" in line(replace(blank(EventRow), event="odd", host="h1"))


def test_a_log_that_hangs_costs_lines_never_the_controller(tmp_path: Path) -> None:
    """No process reads the pipe that the file is: the queue fills, the rest is dropped and counted (R11)."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    log, recent_events = EventLog(str(pipe)), RecentEvents(1)
    for step in range(2 * WAITING_MAX):
        recent_events.add("host_dead", 0.0, host="h1", step=step)
        began_s = time.monotonic()
        log.take(recent_events)
        assert time.monotonic() - began_s < 10.0
    assert WAITING_MAX - 1 <= log.dropped_count <= WAITING_MAX
    assert recent_events.page(0, None, 0.0).unwritten == log.dropped_count
    with pipe.open() as reader:  # a process reads at last: the writer goes on and can end
        text = reader.readline()
        assert json.loads(text)["step"] == 0
        log._waiting.queue.clear()
        log.close()
        reader.read()


def test_routine_lines_are_debug_and_the_rest_info(caplog: pytest.LogCaptureFixture) -> None:
    """A commit a step would drown a console; a death must be seen there."""
    log, recent_events = EventLog(""), RecentEvents(1)
    with caplog.at_level(logging.DEBUG, logger="memstore.events"):
        recent_events.add("commit", 0.0, job="a", step=1)
        recent_events.add("host_dead", 0.0, host="h1")
        log.take(recent_events)
        log.close()
    found = {json.loads(record.getMessage())["event"]: record.levelno for record in caplog.records}
    assert found == {"commit": logging.DEBUG, "host_dead": logging.INFO}


def test_a_file_that_cannot_be_written_is_said_once_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The controller goes on; the count is in what `memstore events` answers."""
    caplog.set_level(logging.WARNING, logger="memstore")
    log, recent_events = EventLog(str(tmp_path / "no" / "folder")), RecentEvents(1)
    for _ in range(3):
        recent_events.add("host_dead", 0.0, host="h1")
    log.take(recent_events)
    log.close()
    assert [r.levelname for r in caplog.records if "could not be written" in r.getMessage()] == ["WARNING"]
    recent_events.add("host_dead", 0.0, host="h1")
    log.take(recent_events)
    assert recent_events.unwritten_count == 3


# -- cli drain ----------------------------------------------------------------------------------------
# `memstore drain` on real processes: the host can go once it says so, and nothing is lost by it (R29).


DRAIN_HOSTS = {"h0": {"rack": "r1"}, "h1": {"rack": "r2"}, "h2": {"rack": "r1"}, "h3": {"rack": "r2"}}


def drain_run(cluster: ProcessCluster, *arguments: str, code: int = 0) -> tuple[dict[str, Any], str]:
    """Return what the command wrote to stdout, as JSON, and to stderr."""
    result = CliRunner().invoke(main, [*arguments, "--store", cluster.config.store, "--json"])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout) if result.stdout else {}, result.stderr


def test_a_drained_host_can_go_and_every_copy_is_still_there(tmp_path: Path, nursery: RankNursery) -> None:
    """Its ranks put meanwhile; the step put last has all its copies the moment the host is gone."""
    with ProcessCluster(tmp_path, DRAIN_HOSTS, detect=60.0) as cluster:  # no repair: what is there was there before
        fleet = Fleet(cluster, nursery)
        ranks = fleet.begin(["h0", "h1", "h2"], last_step=2)
        body, _ = drain_run(cluster, "drain", "h1", "--within", "30")
        assert (body["host"], body["left"]) == ("h1", 0)
        together(ranks, "train", first=3, last=4)
        assert drain_run(cluster, "drain", "h1", "--within", "30")[0]["left"] == 0
        assert any("is to go in" in row["cause"] for row in cluster.status()["problems"])
        assert {row.host: state_text(row) for row in cluster.ask(AskStatus()).hosts}["h1"] == "draining: can go"

        ranks[1].kill()
        cluster.lose_host("h1")
        wait_for(lambda: cluster.host_status()["h1"] == "dead", "the death of h1")
        job = cluster.job("train")
        assert (job["committed_step"], job["copies"], job["missing_copies"]) == (4, 2, 0)
        for rank in ranks:
            rank.kill()
        _, got = fleet.resume(["h0", "h3", "h2"])
        assert got["step"] == 4


def test_hosts_drained_one_after_another_never_end_with_no_copy_and_exit_code_0(
    tmp_path: Path, nursery: RankNursery
) -> None:
    """Two hosts, two copies: the first is informed of one copy of two at once, the last of none (exit 4, both)."""
    with ProcessCluster(tmp_path, {"h0": {}, "h1": {}}) as cluster:
        fleet = Fleet(cluster, nursery)
        ranks = fleet.begin(["h0", "h1"], last_step=2)
        first, _ = drain_run(cluster, "drain", "h0", "--within", "600", code=4)
        [row] = first["short"]
        assert (row["job"], row["step"], row["copies"], row["replicas"]) == ("train", 2, 1, 2)
        for rank in ranks:
            rank.kill()
        words = CliRunner().invoke(main, ["drain", "h1", "--within", "600", "--store", cluster.config.store])
        assert words.exit_code == 4, words.output
        assert "host h1 must not go: train step 2: 0 of 2 copies elsewhere" in words.stderr
        status = cluster.status()
        assert all("0 of 2 copies elsewhere !" in state_text(row) for row in cluster.ask(AskStatus()).hosts)
        assert [row["severity"] for row in status["problems"] if "0 of 2 copies elsewhere" in row["cause"]] == [
            "degraded",
            "degraded",
        ]
        cluster.lose_host("h0")
        wait_for(lambda: cluster.host_status()["h0"] == "dead", "the death of h0")
        assert drain_run(cluster, "drain", "h1", "--within", "600", code=4)[0]["short"][0]["copies"] == 0


def test_a_lone_host_can_go_once_its_step_is_durable(tmp_path: Path, nursery: RankNursery) -> None:
    """Exit 4 before durable storage has the step, 0 after, with the step named."""
    gate = tmp_path / "gate"
    storage = tmp_path / "durable"
    storage.mkdir()
    hosts: dict[str, dict[str, str]] = {"h0": {}}
    with ProcessCluster(tmp_path, hosts, durable_gate=gate, durable=str(storage), durable_every=1) as cluster:
        fleet = Fleet(cluster, nursery)
        fleet.begin(["h0"], last_step=2)
        assert drain_run(cluster, "drain", "h0", "--within", "1", code=4)[0]["short"][0]["copies"] == 0
        gate.touch()
        body, _ = drain_run(cluster, "drain", "h0", "--within", "60")
        assert (body["left"], [row["step"] for row in body["durable"]]) == (0, [2])


def test_hosts_that_all_go_leave_the_newest_step_on_durable_storage(tmp_path: Path, nursery: RankNursery) -> None:
    """By its schedule step 0 alone is durable; with the notices step 3 is, and both hosts can go."""
    storage = tmp_path / "durable"
    storage.mkdir()
    with ProcessCluster(tmp_path / "cluster", {"h0": {}, "h1": {}}) as cluster:
        ranks = Fleet(cluster, nursery, durable=str(storage), durable_every=1000).begin(["h0", "h1"], last_step=0)
        ranks[0].call("wait", step=0, level="durable")
        together(ranks, "train", first=1, last=3)
        for host in ("h0", "h1"):
            body, _ = drain_run(cluster, "drain", host, "--within", "60")
            assert (body["left"], [row["step"] for row in body["durable"]]) == (0, [3])
        assert sorted(marker.parent.name for marker in storage.glob("train/*/*/marker")) == ["0", "3"]


def test_a_notice_can_be_taken_back_and_strangers_and_no_time_are_refused(tmp_path: Path) -> None:
    """--cancel ends it; a notice without time, and one to an unknown host, are refused in words."""
    with ProcessCluster(tmp_path, {"h0": {}, "h1": {}}) as cluster:
        assert drain_run(cluster, "drain", "h1")[0]["drains_s"] > 100
        assert drain_run(cluster, "drain", "h1", "--cancel")[0]["drains_s"] is None
        assert "did you mean h0" in drain_run(cluster, "drain", "h00", code=1)[1]
        assert "must leave some time" in drain_run(cluster, "drain", "h1", "--within", "0", code=2)[1]


def test_the_state_of_a_host_says_what_is_left_to_copy_before_it_can_go() -> None:
    """A dead host is dead, notice or not; a live one that is to go is not "ok"."""
    short = replace(blank(ShortStep), job="train", step=9, shards=3, copies=1, replicas=2, may_come=True)
    host = replace(
        blank(HostRow),
        status="live",
        drains_s=20.0,
        drain_left=3,
        pushes=2,
        status_s=5.0,
        why="silent",
        drain_may_come=True,
        drain_short=[short],
    )
    assert state_text(host) == "draining: 3 shards to copy"
    assert state_text(replace(host, drain_may_come=False)) == "draining: train step 9: 1 of 2 copies elsewhere !"
    assert state_text(replace(host, status="dead")).endswith(": silent !")
    assert state_text(replace(host, drains_s=None, pushes=0)) == "ok"

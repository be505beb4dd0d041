"""`memstore events` on real processes: what a person reads, what a program follows, and what must never wait for it."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from memstore.cli import main
from memstore.cli.events import line
from memstore.core.report.event_kinds import PROBLEM, ROUTINE, level_of
from memstore.core.report.recorder import RecentEvents
from memstore.core.wire.calls import RemoveJob
from memstore.core.wire.status_rows import EventRow
from memstore.shell.controller.event_log import WAITING_MAX, EventLog
from memstore.testing.clusters.processes import ProcessCluster, wait_for
from memstore.testing.fuzz.message_samples import blank
from memstore.testing.ranks.fleet import Fleet
from memstore.testing.ranks.rank_process import RankNursery, together

HOSTS = {"h0": {"rack": "r1"}, "h1": {"rack": "r2"}, "h2": {"rack": "r1"}}


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
    with ProcessCluster(tmp_path / "store", HOSTS, detect=60.0, repair_bytes_per_s=8 << 20) as cluster:
        fleet = Fleet(cluster, nursery, kib=8192)
        ranks = fleet.begin(["h0", "h1", "h2"], last_step=2)
        tickets = together(ranks, "ticket", step=2)
        nbytes = sum(ticket["nbytes"] for ticket in tickets)
        rows = asked(cluster, "--level", "routine")
        put, commit = (next(r for r in rows if r["event"] == kind and r["step"] == 2) for kind in ("put", "commit"))
        slowest = max(range(3), key=lambda rank: tickets[rank]["stall_s"])
        assert (put["job"], put["ranks"], put["nbytes"]) == ("train", 3, nbytes)
        assert put["stall_s"]["max"] == pytest.approx(tickets[put["rank"]]["stall_s"], abs=0.05)
        assert put["stall_s"]["max"] >= tickets[slowest]["stall_s"] - 0.05
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

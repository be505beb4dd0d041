"""How `memstore` takes what people type: names of hosts (R1), options that contradict each other."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

import click
import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from memstore.cli import main
from memstore.cli.lifecycle import sharing_words
from memstore.cli.options import Seconds, check_host, join_ray_for_verb
from memstore.cli.output import print_json
from memstore.cli.status import writers_line
from memstore.config import SECONDS_MAX
from memstore.core.report.cells import by_cause, problem_line
from memstore.core.wire.replies import Status
from memstore.core.wire.status_rows import AttemptStatus, HostRow, JobRow, ProblemRow
from memstore.errors import ConfigError
from memstore.testing.fuzz.messages import blank


def test_a_hostname_names_its_only_host() -> None:
    """An unlabelled host's id ends in 8 characters of its boot id.

    Where two have one hostname no process is guessed.
    """
    names = ("gpu-1-0a1b2c3d", "gpu-2-00000000", "gpu-2-11111111", "gpu-1-b")
    status = replace(blank(Status), hosts=[replace(blank(HostRow), host=name) for name in names])
    assert check_host(status, "gpu-1") == "gpu-1-0a1b2c3d"
    assert check_host(status, "gpu-1-b") == "gpu-1-b"
    for unclear in ("gpu-2", "gpu", "gpu.1"):
        with pytest.raises(ConfigError, match=rf"no host '{unclear}'.*memstore status"):
            check_host(status, unclear)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("metrics --dashboard --alerts", "ask for one"),
        ("metrics --alerts --json", "ask for one"),
        ("status --watch --check", "give one of them"),
        ("down --leftovers --yes", "not for it"),
        ("down --leftovers --address 10.0.0.1:6379", "not for it"),
        (f"pin job {1 << 61} best", "STEP 2305843009213693952 is out of range"),
        ("pin job latest best --attempt -1", "attempt=-1 is out of range: it must be an int from 0 to 2**61 - 1"),
        (f"export job latest there --format dcp --rank {1 << 61}", f"rank={1 << 61} is out of range"),
        (f"events --since {1 << 61}", "is neither an event's number nor an age"),
        ("export job latest there --format dcp --rank first", "rank='first' is out of range"),
        ("up --timeout-s nan", "timeout_s=nan is no time"),
        ("up --timeout-s soon", "timeout_s='soon' is no time"),
        ("drill run --timeout-s nan", "timeout_s=nan is no time"),
        ("drill run --timeout-s -1", "-1 s is too short: use 1 s or more"),
        ("doctor --durable ckpt", "is not an absolute path"),
        ("doctor --timeout-s 0", "0 s is too short: use 1 s or more"),
        ("up --timeout-s -1", "-1 s is too short: use 0 s or more"),
        (f"drill kill-holder --embedded --durable {__file__}", "is no directory"),
    ],
)
def test_options_that_would_be_passed_over_are_refused(typed: str, said: str) -> None:
    result = CliRunner().invoke(main, typed.split())
    assert result.exit_code == 2, result.output
    assert said in " ".join(result.stderr.split())


@pytest.mark.parametrize(("typed", "seconds"), [("inf", SECONDS_MAX), ("2.5", 2.5)])
def test_an_infinite_time_is_as_long_as_the_library_waits(typed: str, seconds: float) -> None:
    """As in the library, where math.inf is a time."""
    assert Seconds(1.0).convert(typed, None, None) == seconds


@pytest.mark.parametrize("verb", ["up", "pin", "export", "import", "drill run"])
def test_the_help_names_no_range_that_is_there_for_the_wire(verb: str) -> None:
    shown = CliRunner().invoke(main, [*verb.split(), "--help"]).stdout
    assert "Usage: " in shown
    assert not re.search(r"x<=(2305843009213693951|100000000)", shown)


def test_an_export_needs_a_folder_of_a_name() -> None:
    """An empty word, as of a variable that is not set, would be the working directory."""
    result = CliRunner().invoke(main, ["export", "job", "latest", "", "--format", "dcp"])
    assert result.exit_code == 2
    assert "DIRECTORY '' names no folder" in result.stderr


def test_an_arena_folder_that_is_a_file_is_named() -> None:
    """No store can be started there; the remedy is another folder."""
    result = CliRunner().invoke(main, ["status", "--arena-dir", __file__])
    assert result.exit_code == 1
    assert f"{__file__} is no directory. Name that of its arenas: --arena-dir" in result.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_gets_its_completion_script(shell: str) -> None:
    result = CliRunner().invoke(main, ["completion", shell])
    assert result.exit_code == 0, result.output
    assert "_MEMSTORE_COMPLETE" in result.stdout


def test_bash_completes_the_verbs() -> None:
    """What the script asks for at every TAB: the words so far in, the candidates out."""
    env = {"_MEMSTORE_COMPLETE": "bash_complete", "COMP_WORDS": "memstore sta", "COMP_CWORD": "1"}
    code = "import sys; from memstore.cli import main; sys.argv[0] = 'memstore'; main(prog_name='memstore')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.split() == ["plain,status"]


@pytest.mark.parametrize("verb", ["status", "demo", "drill", "metrics"])
def test_every_verb_has_the_short_help_option(verb: str) -> None:
    assert CliRunner().invoke(main, [verb, "-h"]).stdout.startswith("Usage: ")


@pytest.mark.parametrize("typed", ["pin job newest best", "persist job 1.5", "export job -- -1 folder"])
def test_a_step_is_a_number_or_latest(typed: str) -> None:
    result = CliRunner().invoke(main, typed.split())
    assert result.exit_code == 2, result.output
    assert "is neither a number nor latest" in result.stderr


def test_problems_of_one_cause_are_one_line() -> None:
    """Six jobs without durable storage are one thing to know; what differs in cause or remedy stays apart."""
    rows = [
        ProblemRow("durable_off", "note", about=f"job{n}", cause="durable off", since_s=float(n), remedy="durable=")
        for n in range(6)
    ]
    other = ProblemRow("host_dead", "note", about="h1", cause="dead", since_s=None, remedy="a replacement")
    lines = [problem_line(row) for row in by_cause([*rows[:3], other, *rows[3:]])]
    assert lines == [
        "! job0, job1, job2 and 3 more: durable off (5.0 s ago).  Remedy: durable=",
        "! h1: dead.  Remedy: a replacement",
    ]


def test_hosts_that_ray_nodes_share_are_named_with_the_label_that_parts_them() -> None:
    words = sharing_words({"box0": 2, "box1": 1})
    assert "box1" not in words
    assert (
        "box0 serves 2 Ray nodes: for a holder each, start every node with a name, `ray start --labels host=NAME`"
        in words
    )
    assert sharing_words({"box0": 1}) == ""


def test_writers_are_named_where_some_ranks_do_not_copy() -> None:
    """One writer is "rank 0 copies"; where every rank copies there is nothing to know."""
    newest = replace(blank(AttemptStatus), world_size=4, shards=1)

    def line(**changes: Any) -> str:
        return writers_line(replace(blank(JobRow), job="train", newest=replace(newest, **changes)))

    assert line(writers=[0, 2]) == "train: ranks 0, 2 copy for 4 ranks of 1 shard\n"
    assert line(writers=[0]) == "train: rank 0 copies for 4 ranks of 1 shard\n"
    assert line(world_size=1, writers=[0]) == ""
    assert line() == ""


@pytest.mark.parametrize(
    "line", ["bogus", "status --bogus", "status extra", "drill nosuch", "drill kill-rank --bogus", "export train"]
)
def test_wrong_usage_is_a_document_wherever_it_is_noticed(line: str) -> None:
    """Also before the verb has read its options, of which --json is one."""
    result = CliRunner().invoke(main, [*line.split(), "--json"])
    assert result.exit_code == 2
    assert json.loads(result.stdout)["error"]["message"] in result.stderr


def test_what_ray_prints_is_no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line of Ray's, as of a worker that ended, would make the JSON of a verb unreadable."""
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "is_initialized", lambda: True)

    @click.command()
    def verb() -> None:
        for number in (1, 2):  # as `--watch` does
            join_ray_for_verb(None)
            print("(raylet) A worker died")  # noqa: T201  # as Ray does
            print_json({"number": number})

    result = CliRunner().invoke(verb)
    assert result.stdout == '{"number": 1}\n{"number": 2}\n'
    assert result.stderr == "(raylet) A worker died\n" * 2


def test_a_verb_that_asks_a_holder_imports_neither_torch_nor_ray() -> None:
    """They take seconds and half a gigabyte, of which `memstore status` needs nothing."""
    code = (
        "import sys, memstore.cli; from memstore.shell.rank.admin_link import Tool\n"
        "print(sorted({'torch', 'ray'} & sys.modules.keys()))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert run.stdout == "[]\n"

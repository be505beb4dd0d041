"""`memstore odds` and `memstore fit`: what they answer, of what, and what they refuse."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from msgspec.structs import replace as replaced

from memstore.cli import main
from memstore.cli.bill import Terms
from memstore.cli.odds import PlacedHosts, arena_limits, even_topology, needs_of, once_text, paste_lines
from memstore.config import GIB
from memstore.core.report.redundancy import beyond_text, survival_rows
from memstore.core.wire.status_rows import HostRow, HostStats, OddsRow
from memstore.testing.controller.world import ControllerWorld, trained
from memstore.testing.fuzz.messages import blank
from placement.bill import Scheme
from placement.odds import sampled_odds, survival_odds
from recovery.inventory import StepId
from tests.support.cli_store import Desk

ROOT = Path(__file__).resolve().parents[3]
POWER = {
    "hosts": [{"host": f"h{n}", "labels": {"rack": f"r{n // 2}", "power": f"p{n // 2 % 2}"}} for n in range(8)],
    "failure_domains": ["rack"],
}


def ask(*args: str, columns: int = 80) -> Result:
    """Run a verb on a screen of so many columns."""
    return CliRunner().invoke(main, args, env={"COLUMNS": str(columns)})


def body_of(*args: str) -> dict[str, Any]:
    """Return what a verb prints as JSON."""
    result = ask(*args, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def told(*args: str) -> str:
    """Return the words of a verb, with single spaces."""
    return " ".join(ask(*args).output.split())


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (
            "--hosts 32 --racks 4",
            "With two copies on 32 hosts in 4 racks: one host never loses a step; two at once lose",
        ),
        (
            "--hosts 32 --racks 8 --parity 4",
            "With parity 4+1 on 32 hosts in 8 racks: one host never loses a step; two at",
        ),
        (
            "--hosts 32 --replicas 3",
            "With three copies on 32 hosts: any two never lose a step; three at once lose it with",
        ),
        ("--hosts 4 --racks 4 --parity 8", "With parity 3+1 on 4 hosts in 4 racks: one host never loses a step; two"),
        (
            "--hosts 3 --replicas 1",
            "With one copy on 3 hosts: no host may be lost; one loses a step with 100 %; expected",
        ),
        ("--hosts 1 --replicas 2", "With one copy on 1 host: no host may be lost"),
    ],
)
def test_the_first_sentence_is_the_answer(words: str, answer: str) -> None:
    """Of what there can be: parity and copies of fewer hosts than are asked for have the names of what they are."""
    result = ask("odds", *words.split())
    assert result.exit_code == 0, result.output
    assert " ".join(result.stdout.split()).startswith(answer), result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_odds_are_exact_and_beside_what_is_published() -> None:
    """Sixteen pairs on 32 hosts: the fraction itself, and Gemini's bound, lower from four lost hosts on."""
    rows = body_of("odds", "--hosts", "32", "--racks", "4")["odds"]
    assert [row["exactly"] for row in rows[:3]] == ["1", "1", "30/31"]
    assert rows[4]["corollary"] < rows[4]["survives"] == pytest.approx(0.80979, abs=1e-5)


def test_a_feed_of_power_that_has_both_copies_is_seen(tmp_path: Path) -> None:
    """Two copies in racks of their own, and both on one feed: any rack may be lost, no feed of power."""
    (tmp_path / "hosts.json").write_text(json.dumps(POWER))
    causes = {row["level"]: row for row in body_of("odds", "--topology", str(tmp_path / "hosts.json"))["causes"]}
    assert {level: row["fatal_alone"] for level, row in causes.items()} == {"host": 0, "rack": 0, "power": 1}
    assert " 1 power 100% 0 - " in told("odds", "--topology", str(tmp_path / "hosts.json"))


def test_hosts_of_the_store_are_asked_about_with_its_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without --hosts; and what `status --json` prints is a topology of the same odds."""
    labels = {f"h{n}": {"rack": f"r{n % 3}"} for n in range(6)}
    world = ControllerWorld(6, labels=labels)
    ranks = world.launch(6)
    world.get(ranks)
    assert world.put_all(ranks, 1)
    world.run(3.0)
    desk = Desk(monkeypatch, world, ranks[0])
    running = json.loads(desk.run("odds", "--json").stdout)
    assert (running["scheme"], running["hosts"], running["level"]) == ("2 copies", 6, "rack")
    (tmp_path / "store.json").write_text(desk.run("status", "--json").stdout)
    assert body_of("odds", "--topology", str(tmp_path / "store.json"), "--replicas", "2") == running
    fitted = json.loads(desk.run("fit", "--params", "1e6", "--json").stdout)
    assert (fitted["scheme"], fitted["hosts"]) == ("2 copies", 6)
    assert "any 1 rack, any 1 host, 2 hosts: 20% fatal" in " ".join(desk.run("status").stdout.split())


@pytest.mark.parametrize("rates", ["stepfun", "stepfun-bursts"])
def test_bursts_that_do_not_count_are_named(rates: str) -> None:
    """What somebody gave is not dropped in silence."""
    is_said = "Bursts count as single losses here" in told("odds", "--hosts", "8", "--rates", rates)
    assert is_said == (rates == "stepfun-bursts")


def test_own_rates_count(tmp_path: Path) -> None:
    """Half as many failures of hosts are a quarter of the losses of pairs; a rack that never fails causes none."""
    year = {}
    for failures in (4, 2):
        path = tmp_path / f"{failures}.json"
        path.write_text(json.dumps({"failures_per_1000_host_days": failures, "domain_losses_per_year": {"rack": 0}}))
        year[failures] = body_of("odds", "--hosts", "32", "--racks", "4", "--rates", str(path))["causes"]
    assert year[4][0]["losses_per_year"] == pytest.approx(4 * year[2][0]["losses_per_year"], rel=1e-3)
    assert year[4][1]["events_per_year"] == 0


@pytest.mark.parametrize(
    ("words", "code", "answer"),
    [
        (
            "odds --hosts 2 --parity 4",
            1,
            "parity that survives 1 host needs 3, there are 2 hosts; a job has copies there",
        ),
        ("odds --hosts 4 --rates x", 2, "'x' is neither llama3, llama3-16k, rsc, stepfun"),
        ("odds --hosts 4 --rates HOSTS", 1, "cannot be read (ValueError: unknown: failure_domains, hosts)"),
        ("odds --topology RATES", 1, "cannot be read (KeyError: 'hosts'): it looks like {"),
        ("odds --topology TWICE", 1, "host 'a' is listed twice"),
        ("odds --topology EMPTY", 1, "there are no hosts: say how many with --hosts"),
        ("odds --topology NONSENSE", 1, "cannot be read (JSONDecodeError: "),
        ("odds --hosts 4 --topology HOSTS", 2, "give one of them"),
        ("odds --racks 4", 2, "--racks goes with --hosts"),
        ("odds --hosts 4 --racks 5", 2, "--racks 5 of --hosts 4: a rack has a host at least"),
        ("odds --hosts 4 --replicas 0", 2, "replicas"),
        ("odds --hosts 9000 --repair-s 1e8 --rates rsc", 1, "of 9,000 hosts would wait for their bytes at any time"),
        ("fit --hosts 4 --params 70e9 --nic fast", 2, "'fast' is no speed of a network: write it as 100Gbps"),
        ("fit --hosts 4 --params nan", 2, "no state that could be stored"),
        ("fit --hosts 4 --params 7e9 --process-bytes much", 1, "process_bytes='much' is not a size"),
    ],
)
def test_nonsense_is_refused_with_a_remedy(tmp_path: Path, words: str, code: int, answer: str) -> None:
    """What happened, with which values; wrong usage exits with 2."""
    files = {
        "HOSTS": json.dumps(POWER),
        "RATES": json.dumps({"failures_per_1000_host_days": 1}),
        "TWICE": json.dumps({"hosts": [{"host": "a"}] * 2}),
        "EMPTY": json.dumps({"hosts": []}),
        "NONSENSE": "[1",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    result = ask(*(str(tmp_path / word) if word in files else word for word in words.split()))
    assert result.exit_code == code, result.output
    assert answer in " ".join(result.output.split()), result.output


@pytest.mark.parametrize(
    ("per_year", "text"),
    [
        (0, "never"),
        (3.14, "3.1 times a year"),
        (250, "250 times a year"),
        (0.5, "once in 2 years"),
        (1e-9, "less than"),
    ],
)
def test_how_often_is_said_in_years(per_year: float, text: str) -> None:
    assert once_text(per_year).startswith(text)


# -- fit ----------------------------------------------------------------------------------------------


def test_the_lines_to_paste_are_those_of_the_manifests() -> None:
    """The example of deploy/kubernetes, 2 GiB put per host beside 6 GiB of processes, has the same two numbers."""
    plan = PlacedHosts.of(even_topology(4, None), Terms())
    pasted = paste_lines(plan.terms, needs_of(plan, 8 * GIB, 6 * GIB, 1e9))
    cluster = yaml.safe_load((ROOT / "deploy/kubernetes/base/raycluster.yaml").read_text())
    pod = cluster["spec"]["workerGroupSpecs"][0]["template"]["spec"]
    (container,) = pod["containers"]
    (arena,) = (volume["emptyDir"] for volume in pod["volumes"] if volume["name"] == "arena")
    assert [yaml.safe_load(line) for line in pasted if line.startswith(("limits", "emptyDir"))] == [
        {"limits": container["resources"]["limits"]},
        {"emptyDir": arena},
    ]
    assert "memstore up --arena-bytes 8GiB" in pasted


def test_fit_says_each_number_with_its_formula() -> None:
    """70e9 x 14 bytes on 32 hosts: 28.5 GiB each, of which parity 4+1 takes 2.5 times; 80 columns are enough."""
    body = body_of("fit", "--params", "70e9", "--hosts", "32", "--racks", "8", "--parity", "4")
    assert (body["arena_bytes"], body["volume_bytes"], body["pod_bytes"]) == (72 * GIB, 80 * GIB, 161 * GIB)
    assert body["redundant_s"] == pytest.approx(70e9 * 14 / 32 / (100e9 / 8 * 0.52))
    screen = ask("fit", "--params", "70e9", "--hosts", "32", "--racks", "8", "--parity", "4").stdout
    assert max(map(len, screen.splitlines())) <= 80
    assert "= 2 versions x 5/4 x 28.5 GiB, keep_steps=1" in screen
    assert "Config(parity=4, replicas=2, keep_steps=1)" in screen


def test_the_limits_of_arenas_are_those_of_hosts_that_are_there() -> None:
    """A dead host has none, nor has one that has not said it yet."""
    stats = replaced(blank(HostStats), limit_bytes=GIB)
    rows = [replaced(blank(HostRow), host=name, status="live") for name in "abc"]
    rows = [replaced(rows[0], stats=stats), rows[1], replaced(rows[2], stats=stats, status="dead")]
    assert arena_limits(rows) == {"a": GIB}


# -- the copies that are there ------------------------------------------------------------------------


def test_the_placement_is_that_of_the_store_on_these_racks() -> None:
    """Parts of 2 copies with scatter=4 have no shape: their odds are bounded, and drawn ones are not below that."""
    plan = PlacedHosts.of(even_topology(200, 4), Terms(scatter=4))
    odds = survival_odds(plan.bonds, 200, 4, states_max=0)
    assert [each.is_exact for each in odds] == [True, True, True, False, False]
    low, high = sampled_odds(plan.bonds, 200, 4, samples_count=20_000, chance=random.Random(1))
    assert low < high
    assert float(odds[4].chance) < high
    assert plan.scheme == Scheme(1, 1)


def test_status_says_the_chance_beyond_what_is_sure() -> None:
    """The fewest lost hosts that may be fatal; nothing where they all are, or none is."""
    assert (
        beyond_text([OddsRow(1, 1.0, True), OddsRow(2, 0.968, True), OddsRow(3, 0.9, True)]) == ", 2 hosts: 3.2% fatal"
    )
    assert beyond_text([OddsRow(1, 0.99, False)]) == ", 1 host: at most 1% fatal"
    assert beyond_text([OddsRow(1, 1.0, True), OddsRow(2, 0.0, True)]) == ""
    assert beyond_text([OddsRow(1, 1.0, True)]) == beyond_text([]) == ""


def test_shards_too_short_for_their_parity_set_make_the_odds_a_bound() -> None:
    """Five hosts, one with a shard of a single chunk: with which of the others it may be lost is not looked at."""
    world, _ = trained(5, parity=4)
    job, live = world.job(), world.served.hosts.live_ids()
    assert all(row.is_exact for row in survival_rows(job, live, 2))
    copies = job.copies[StepId(1, 1)][0]
    copies.update({host: each._replace(spec=each.spec._replace(chunks_count=1)) for host, each in copies.items()})
    assert not any(row.is_exact for row in survival_rows(job, live, 2))

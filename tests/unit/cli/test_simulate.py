"""`memstore simulate` on the command line: what it prints, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from memstore.cli import main
from placement.rates import PRESETS


def run(*words: str) -> Result:
    """Run a verb on a screen of 80 columns."""
    return CliRunner().invoke(main, words, env={"COLUMNS": "80"})


def simulate(*words: str) -> Result:
    """Run the verb in three short runs."""
    return run("simulate", "--runs", "3", *words)


def test_the_sentence_comes_first_and_the_tables_fit() -> None:
    """Five policies, no line of more than 80 characters, and nothing on stderr that is no terminal."""
    result = simulate("--preset", "llama3", "--hosts", "512")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0].startswith("Of 30 days on 512 hosts a job trains: memstore in place 99.")
    assert max(map(len, lines)) <= 80
    policies = ["memstore in place", "memstore restarted", "Gemini", "CheckFreq", "durable only"]
    at = next(number for number, line in enumerate(lines) if line.startswith("POLICY"))
    assert [line[:19].strip() for line in lines[at + 1 : at + 6]] == policies
    assert [line[:19].strip() for line in lines[at + 7 : at + 12]] == policies


def test_the_same_seed_prints_the_same_json() -> None:
    """Every figure that is shown, and the settings that it was made with."""
    first, second = (simulate("--preset", "stepfun-trace", "--hosts", "900", "--json", "--seed", "5") for _ in range(2))
    assert first.stdout == second.stdout
    body = json.loads(first.stdout)
    assert (body["hosts"], body["seed"], body["spares"], len(body["policies"])) == (900, 5, 15, 5)
    row = body["policies"][0]
    assert row["low"] <= row["trains"] <= row["high"]
    assert sum(row["shares"].values()) == pytest.approx(1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--gib", "nan"), "--gib is nan"),
        (("--days", "0"), "not in the range"),
        (("--parity", "1"), "--parity 1 would be copies"),
        (("--hosts", "2", "--replicas", "3"), "3 copies needs 3 hosts, there are 2"),
        (("--hosts", "64", "--hosts-per-rack", "32", "--parity", "4"), "parity 4+1 does not fit"),
        (("--preset", "stepfun-trace", "--failures", "3"), "leave out one"),
        (("--put-every", "often"), "put_every='often' is not understood"),
        (("--durable-every", "-1"), "durable_every='-1'"),
        (("--hosts", "1000000", "--days", "3650"), "at most 5,000,000: take fewer --days or --hosts"),
    ],
)
def test_what_cannot_be_simulated_is_refused_with_a_remedy(words: tuple[str, ...], said: str) -> None:
    """As wrong usage, before anything is simulated."""
    result = simulate(*words)
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())


def test_nothing_fails() -> None:
    """A rate of zero is one; all but the saves is training."""
    body = json.loads(simulate("--failures", "0", "--hosts", "64", "--json").stdout)
    assert [row["shares"]["trains"] + row["shares"]["saves"] for row in body["policies"]] == [pytest.approx(1)] * 5


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_known_to_both_commands(name: str) -> None:
    """One table of published rates."""
    assert simulate("--preset", name, "--hosts", "64", "--days", "1").exit_code == 0
    assert PRESETS[name].source in " ".join(run("odds", "--hosts", "8", "--rates", name).stdout.split())


def test_rates_of_a_file_are_those_of_odds(tmp_path: Path) -> None:
    """Bursts among them; a key that is unknown is refused."""
    (tmp_path / "rates.json").write_text('{"failures_per_1000_host_days": 40, "burst_weights": [0, 1]}')
    body = json.loads(simulate("--preset", str(tmp_path / "rates.json"), "--hosts", "100", "--json").stdout)
    assert body["policies"][0]["failures"] == pytest.approx(40 / 1000 * 100 * 30 / 2, rel=0.3)
    (tmp_path / "rates.json").write_text('{"failures": 4}')
    refused = simulate("--preset", str(tmp_path / "rates.json"))
    assert (refused.exit_code, "unknown: failures" in " ".join(refused.stderr.split())) == (2, True)


@pytest.mark.slow
def test_a_plot_is_drawn_beside_the_tables(tmp_path: Path) -> None:
    """Where matplotlib is; a kind of file that it does not draw is named, after the tables."""
    pytest.importorskip("matplotlib")
    assert simulate("--hosts", "64", "--plot", str(tmp_path / "p.png")).exit_code == 0
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    refused = simulate("--hosts", "64", "--plot", str(tmp_path / "p.txt"))
    assert (refused.exit_code, "txt" in refused.stderr, "POLICY" in refused.stdout) == (2, True, True)


def test_racks_that_burst_take_what_neighbours_keep_for_one_another() -> None:
    """Gemini's pairs are in one rack, memstore's are not."""
    words = ("--preset", "stepfun-bursts", "--bursts-in-rack", "--hosts", "256", "--days", "90", "--json")
    rows = {row["policy"]: row["unrecoverable"] for row in json.loads(simulate(*words).stdout)["policies"]}
    assert rows["memstore in place"] == rows["memstore restarted"] == 0.0 < rows["Gemini"]

"""How `memstore` takes what people type: names of hosts (R1), options that contradict each other."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from memstore.cli import main
from memstore.cli.options import check_host
from memstore.errors import ConfigError


def test_a_hostname_names_its_only_host() -> None:
    """An unlabelled host's id ends in 8 characters of its boot id; where two have one hostname nobody is guessed."""
    status = {"hosts": [{"host": name} for name in ("gpu-1-0a1b2c3d", "gpu-2-00000000", "gpu-2-11111111", "gpu-1-b")]}
    assert check_host(status, "gpu-1") == "gpu-1-0a1b2c3d"
    assert check_host(status, "gpu-1-b") == "gpu-1-b"
    for unclear in ("gpu-2", "gpu", "gpu.1"):
        with pytest.raises(ConfigError, match=rf"no host '{unclear}'.*memstore status"):
            check_host(status, unclear)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("metrics --dashboard --alerts", "ask for one at a time"),
        ("metrics --alerts --json", "ask for one at a time"),
        ("status --watch --check", "give one of them"),
        ("down --leftovers --force", "not for it"),
        ("down --leftovers --address 10.0.0.1:6379", "not for it"),
    ],
)
def test_options_that_would_be_passed_over_are_refused(typed: str, said: str) -> None:
    result = CliRunner().invoke(main, typed.split())
    assert result.exit_code == 2, result.output
    assert said in " ".join(result.stderr.split())


@pytest.mark.parametrize("typed", ["pin job newest best", "fork job 1.5 twig", "export job 1_0 folder --format torch"])
def test_a_step_is_a_number_or_latest(typed: str) -> None:
    result = CliRunner().invoke(main, typed.split())
    assert result.exit_code == 2, result.output
    assert "is neither a number nor latest" in result.stderr

"""`memstore demo`, the command behind `make demo`. Exit code 1 if a check fails."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from memstore.errors import ConfigError

if TYPE_CHECKING:
    from memstore.demo.run import Options, Outcome

# Ray reads these when it is imported; a variable that the user has set stays.
RAY_ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",  # a private cluster needs no tokens; all its processes must agree on that
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",  # the default is 2 s
}
NEEDED = ("ray.train.torch", "matplotlib")
MIN_STEPS, CONTROL_STEPS = 10, 10


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--steps", default=80, show_default=True, type=click.IntRange(MIN_STEPS, 10_000), help="Training steps.")
@click.option(
    "--kill-after", type=click.IntRange(0), help="Committed step that lets the kill happen (default: middle)."
)
@click.option("--no-restore", is_flag=True, help="Start over instead of restoring: the checks must fail.")
@click.option("--no-control", is_flag=True, help="Leave out the control run at the end.")
@click.option("--plot", default="demo.png", show_default=True, type=click.Path(dir_okay=False), help="Where to plot.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
def demo(steps: int, kill_after: int | None, no_restore: bool, no_control: bool, plot: str, as_json: bool) -> int:
    """Train a small transformer on 4 simulated hosts, kill one with its memory, and compare every loss."""
    _prepare()
    from memstore.demo.report import as_dict, draw, table
    from memstore.demo.run import Options

    kill_after = steps * 7 // 16 if kill_after is None else kill_after
    with tempfile.TemporaryDirectory(prefix="memstore-demo-") as folder:
        options = Options(
            Path(folder), steps=steps, kill_after=kill_after, control_steps=CONTROL_STEPS,
            is_restoring=not no_restore, has_control=not no_control,
        )  # fmt: skip
        outcome = _run(options)
    draw(outcome, Path(plot))
    click.echo(json.dumps(as_dict(outcome, plot)) if as_json else table(outcome, plot))
    return 0 if outcome.is_ok else 1


def _prepare() -> None:
    for name, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for module in NEEDED:
        try:
            importlib.import_module(module)
        except ImportError as exc:
            raise ConfigError(
                f"the demo needs Ray Train and matplotlib ({exc}): pip install 'ray[train]' matplotlib"
            ) from exc


def _run(options: Options) -> Outcome:
    from memstore.demo.run import run_demo

    # Ray prints to stdout about the dead host; so redirect that to a file: stdout is for the result.
    with (options.folder / "ray.txt").open("w", encoding="utf-8") as words, contextlib.redirect_stdout(words):
        return run_demo(options, lambda line: click.echo(line, err=True))

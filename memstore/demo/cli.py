"""`memstore demo`, the command behind `make demo`. Exit code 1 if a check fails."""

from __future__ import annotations

import importlib
import json
import os
import tempfile
from pathlib import Path

import click

from memstore.drills.sites.site_options import prepare_ray, quiet
from memstore.errors import ConfigError

# Ray Train reads these when it is imported; a variable that the user has set stays.
TRAIN_ENVIRONMENT = {
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",  # the default is 2 s
}
NEEDED = ("ray.train.torch", "matplotlib")
MIN_STEPS = 10


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--steps", default=80, show_default=True, type=click.IntRange(MIN_STEPS, 10_000), help="Training steps.")
@click.option(
    "--kill-after", type=click.IntRange(0), help="Committed step that lets the kill happen (default: middle)."
)
@click.option("--no-restore", is_flag=True, help="Start over instead of restoring: the checks must fail.")
@click.option("--no-in-place", is_flag=True, help="Leave out the run in which the other ranks keep their processes.")
@click.option("--no-control", is_flag=True, help="Leave out the control run at the end.")
@click.option("--plot", default="demo.png", show_default=True, type=click.Path(dir_okay=False), help="Where to plot.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
def demo(
    steps: int, kill_after: int | None, no_restore: bool, no_in_place: bool, no_control: bool, plot: str, as_json: bool
) -> int:
    """Train a small transformer on 4 simulated hosts, kill one with its memory, and compare every loss."""
    prepare_ray()
    for name, value in TRAIN_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        for module in NEEDED:
            importlib.import_module(module)
    except ImportError as exc:
        raise ConfigError(
            f"the demo needs Ray Train and matplotlib ({exc}): pip install 'ray[train]' matplotlib"
        ) from exc
    from memstore.demo.report import as_dict, draw, table
    from memstore.demo.run import DemoOptions, run_demo

    kill_after = steps * 7 // 16 if kill_after is None else kill_after
    with tempfile.TemporaryDirectory(prefix="memstore-demo-") as folder, quiet():
        options = DemoOptions(
            Path(folder),
            steps=steps,
            kill_after=kill_after,
            is_restoring=not no_restore,
            has_in_place=not no_in_place,
            has_control=not no_control,
        )
        outcome = run_demo(options, lambda line: click.echo(line, err=True))
    draw(outcome, Path(plot))
    click.echo(json.dumps(as_dict(outcome, plot)) if as_json else table(outcome, plot))
    return 0 if outcome.is_ok else 1

"""`memstore simulate`: how much of its time a job would train, by policy, in simulated time. Asks no store."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import resources
from typing import TYPE_CHECKING, Any

import click
from rich.progress import Progress

from memstore.cli.odds import rates_option, read_rates
from memstore.cli.options import json_option
from memstore.cli.output import data_console, plain_table, print_json, words_console
from memstore.errors import ConfigError, MemstoreError
from memstore.intervals import parse_every, parse_put_every
from placement.bill import Scheme
from placement.rates import DAY_S, Rates

if TYPE_CHECKING:
    from memstore.core.forecast import FailureTrace, Outlook

HOSTS_PER_SPARE = 64  # unless --spares is given
FAILURES_MAX = 5_000_000  # of one run: what fits into memory
SAMPLE = 20_000  # failures that the mean time between them, and the best interval, are taken from


def _number(name: str, default: float, words: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    kind = click.FloatRange(0, 1e5, min_open=True)
    return click.option(name, type=kind, default=default, show_default=True, metavar="NUMBER", help=words)


@click.command(short_help="How much of its time a job of many hosts would train, by policy, in simulated time.")
@rates_option("--preset", "How hosts fail")
@click.option("--hosts", type=click.IntRange(2, 1_000_000), default=2048, show_default=True, help="Hosts of the job.")
@_number("--days", 30, "Length of a run.")
@click.option("--seed", type=click.IntRange(0), default=1, show_default=True, help="The same seed, the same failures.")
@click.option("--runs", type=click.IntRange(1, 10_000), default=20, show_default=True, help="Runs, for the intervals.")
@click.option(
    "--failures", type=click.FloatRange(0, 1e5), help="Failures of 1,000 hosts a day.  [default: the preset's]"
)
@click.option("--hosts-per-rack", type=click.IntRange(0), default=8, show_default=True, help="0: hosts have no label.")
@click.option("--bursts-in-rack", is_flag=True, help="Hosts that fail together are neighbours.  [default: any hosts]")
@click.option("--spares", type=click.IntRange(0), help="Hosts that stand ready.  [default: one for 64]")
@click.option("--replicas", type=click.IntRange(1, 8), default=2, show_default=True, help="As in Config.")
@click.option("--parity", type=click.IntRange(0, 32), default=0, show_default=True, help="As in Config.")
@click.option("--put-every", default="auto", show_default=True, help="As in Config.")
@click.option("--durable-every", default="auto", show_default=True, help="As in Config.")
@_number("--step-s", 6, "Seconds of a training step.")
@_number("--gib", 2.6, "GiB of state on a host.")
@_number("--copy-gib-s", 10, "GiB/s of a copy into host memory: what a put stalls for.")
@_number("--send-gib-s", 1, "GiB/s from a host to another.")
@_number("--write-gib-s", 0.1, "GiB/s of a host to durable storage, and back.")
@click.option("--plot", type=click.Path(dir_okay=False, writable=True), help="Also draw where the time goes.")
@json_option
def simulate(as_json: bool, plot: str | None, **given: Any) -> None:
    """Compare memstore with Gemini's and CheckFreq's policies and with durable storage alone, on the same failures.

    Simulated time: no store is asked. What a recovery costs is published or measured; your step, state, bandwidths
    and failures you give.
    """
    if plot and importlib.util.find_spec("matplotlib") is None:
        raise MemstoreError("--plot needs matplotlib: pip install matplotlib, or leave it out")
    try:
        outlooks, facts = _simulated(given)
        if as_json:
            print_json({**given, **facts, "policies": [_body(each) for each in outlooks]})
        else:
            _show(outlooks, given, facts)
        if plot:
            _draw(outlooks, plot)
    except (ConfigError, ValueError) as error:
        raise click.UsageError(str(error)) from error


def _simulated(given: Mapping[str, Any]) -> tuple[list[Outlook], dict[str, Any]]:
    """Draw the failures of every run, and play every policy on them."""
    import numpy as np

    from memstore.core import forecast

    rates = _rates(given)
    site = forecast.JobHosts(given["hosts"], given["hosts_per_rack"], given["bursts_in_rack"])
    duration_s, trace = given["days"] * DAY_S, _trace() if rates.is_replay else None

    def draw(run: int) -> list[forecast.HostFailure]:
        return forecast.draw_failures(rates, site, duration_s, np.random.default_rng([given["seed"], run]), trace)

    sample = [draw(0)]
    while len(sample) < given["runs"] and sum(map(len, sample)) < SAMPLE:
        sample.append(draw(len(sample)))
    mtbf_s = len(sample) * duration_s / max(1, sum(map(len, sample)))
    costs = forecast.Costs(
        given["step_s"], *(given["gib"] / given[f"{way}_gib_s"] for way in ("copy", "send", "write"))
    )
    found = forecast.policies(
        costs,
        mtbf_s,
        put_every=parse_put_every(_whole(given["put_every"])),
        durable_every=parse_every(_whole(given["durable_every"])),
        scheme=Scheme(given["parity"] or 1, given["replicas"] - 1),
    )
    ready = -(-site.hosts // HOSTS_PER_SPARE) if given["spares"] is None else given["spares"]
    console = words_console()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        outlooks = forecast.compare(
            found,
            draw,
            runs=bar.track(range(given["runs"]), description="simulating"),
            sample=sample,
            site=site,
            duration_s=duration_s,
            spares=forecast.SpareHosts(ready, rates.host_repair_s, rates.replace_s),
            step_s=costs.step_s,
        )
    return outlooks, {"spares": ready, "mtbf_s": mtbf_s, "source": rates.source}


def _rates(given: Mapping[str, Any]) -> Rates:
    """Return how hosts fail; ValueError for what cannot be simulated."""
    strange = [name for name, value in given.items() if isinstance(value, float) and math.isnan(value)]
    if strange:
        raise ValueError(f"--{strange[0].replace('_', '-')} is nan: give a number")
    if given["put_every"] == "epoch":
        raise ValueError("--put-every epoch: a simulated job has no epochs: give the steps of one, or their time")
    if given["parity"] == 1:
        raise ValueError("--parity 1 would be copies: give 0, or 2 or more")
    rates, failures = read_rates(given["preset"]), given["failures"]
    if failures is not None:
        if rates.is_replay:
            raise ValueError(
                f"--preset {given['preset']} replays what was seen, --failures cannot change it: leave out one"
            )
        rates = replace(rates, failures_per_1000_host_days=failures)
    expected = rates.failures_per_1000_host_days / 1000 * given["hosts"] * given["days"]
    if expected > FAILURES_MAX:
        raise ValueError(f"{expected:,.0f} failures in a run, at most {FAILURES_MAX:,}: take fewer --days or --hosts")
    return rates


def _trace() -> FailureTrace:
    from memstore.core.forecast import FailureTrace

    table = json.loads(resources.files("memstore.core").joinpath("stepfun.json").read_text(encoding="utf-8"))
    return FailureTrace(table["servers"], table["days"], table["rows"])


def _whole(text: str) -> str | int:
    """Return a number of steps as a number."""
    return int(text) if text.isascii() and text.isdigit() else text


def _time(time_s: float) -> str:
    return (
        f"{time_s:.3g} s" if time_s < 120 else f"{time_s / 60:.3g} min" if time_s < 7200 else f"{time_s / 3600:.3g} h"
    )


def _show(outlooks: Sequence[Outlook], given: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Print the sentence, who trains how much, and where the time goes."""
    console = data_console()
    trains = [(f"{100 * each.trains:.1f}%", f"{100 * each.low:.1f} to {100 * each.high:.1f}") for each in outlooks]
    first, *others = (
        f"{each.policy.name} {mean} ({span})" for each, (mean, span) in zip(outlooks, trains, strict=True)
    )
    best = f" at its best interval of {_time(outlooks[-1].policy.every_s)}"
    job = f"Of {given['days']:g} days on {given['hosts']:,} hosts"
    console.print(f"{job} a job trains: {first}, {', '.join(others[:-1])}, {others[-1]}{best}.")
    table = plain_table("POLICY", ">TRAINS", ">5 TO 95%", ">INTERVAL", ">LOST STEPS", ">UNRECOVERABLE")
    for each, shares in zip(outlooks, trains, strict=True):
        unrecoverable = "-" if each.policy.scheme is None else f"{each.unrecoverable:.3g}"
        counts = (_time(each.policy.every_s), f"{each.lost_steps:,.0f}", unrecoverable)
        table.add_row(each.policy.name, *shares, *counts)
    console.print(table)
    table = plain_table("% OF TIME", *(f">{cause.upper()}" for cause in outlooks[0].shares))
    for each in outlooks:
        table.add_row(each.policy.name, *(f"{100 * share:.2f}" for share in each.shares.values()))
    console.print(table)
    console.print(
        f"{outlooks[0].failures:,.0f} failures in a run, one in {_time(facts['mtbf_s'])}: {facts['source']}. Means of "
        f"{given['runs']} runs, seed {given['seed']}. UNRECOVERABLE: times in a run that memory had no committed "
        "step any more. WAITS: for hosts, with no spare left."
    )


def _body(each: Outlook) -> dict[str, Any]:
    """Return a policy's row as --json prints it."""
    row = {name: getattr(each, name) for name in each.__dataclass_fields__ if name != "policy"}
    return {"policy": each.policy.name, "every_s": each.policy.every_s, **row}


def _draw(outlooks: Sequence[Outlook], path: str) -> None:
    """Draw a bar for each policy: where its time goes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    axes, begun = figure.subplots(), [0.0] * len(outlooks)
    for cause in outlooks[0].shares:
        widths = [100 * each.shares[cause] for each in outlooks]
        axes.barh([each.policy.name for each in outlooks], widths, left=begun, label=cause)
        begun = [left + width for left, width in zip(begun, widths, strict=True)]
    axes.invert_yaxis()
    axes.set(xlim=(0, 100), xlabel="% of time")
    axes.legend(ncols=len(outlooks[0].shares), loc="lower center", bbox_to_anchor=(0.5, 1.0))
    figure.savefig(path)


VERBS = (simulate,)

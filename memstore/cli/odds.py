"""`memstore odds` and `memstore fit`: how many copies, how much memory, for a cluster that runs or is only planned."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import Any, TypeVar

import click

from memstore.cli.bill import Terms, chance_text
from memstore.cli.options import Seconds, Where, config_or_usage, where_options
from memstore.cli.output import PlainTable, data_console, plain_table, plural, print_json, size_text
from memstore.config import GIB, Config, bytes_from_text
from memstore.core.wire.replies import Status
from memstore.core.wire.status_rows import HostRow
from memstore.errors import ConfigError
from placement.bill import Scheme
from placement.losses import Cause, causes
from placement.odds import Bond, Odds, corollary, sampled_odds, survival_odds
from placement.rates import PRESETS, Rates
from placement.topology import HOST_LEVEL, Host, Topology, spread_level

T = TypeVar("T")
COUNTS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
YEARS_MAX = 1_000_000  # longer is not worth a number
SAMPLES = 100_000  # sets of lost hosts drawn where they cannot be counted
REPAIR_S = 60.0  # where bytes and network are not known
STATE_BYTES_MAX = 1 << 60
NOTICED_S = 5.0  # a host that is silent counts as dead: docs/operate/deploy.md
# Of the network's raw speed, measured: docs/reference/results.md, "put to sealed on the peer", "get from one peer".
SEAL_SHARE, GET_SHARE = 0.52, 0.82
VOLUME_SHARE = 0.9  # of a volume is taken at most, and of a container's memory 0.9 x Ray's 0.95 (deploy/kubernetes)
POD_SHARE = 0.855


@dataclass(frozen=True)
class PlacedHosts:
    """Hosts, and what of their copies or parity may not be lost together."""

    topology: Topology
    terms: Terms
    bonds: list[Bond]
    level: str

    @property
    def hosts_count(self) -> int:
        """Return how many hosts there are."""
        return len(self.topology.hosts)

    @property
    def scheme(self) -> Scheme:
        """Return the copies, or the parity that the smallest group has: domains may be too few for what is asked."""
        asked = self.terms.scheme
        least = min((len(bond.hosts) for bond in self.bonds), default=0) - asked.spare
        return replace(asked, data=min(asked.data, least)) if asked.is_parity else asked

    @classmethod
    def of(cls, topology: Topology, terms: Terms) -> PlacedHosts:
        """Place copies, or make parity groups, as the store would on these hosts."""
        if not topology.hosts:
            raise ConfigError("there are no hosts: say how many with --hosts, or name them in a --topology FILE")
        level, spare = spread_level(topology, terms.replicas).level, terms.scheme.spare
        if not terms.scheme.is_parity:
            terms = replace(terms, replicas=min(terms.replicas, len(topology.hosts)))
        bonds = terms.scheme.bonds(topology, strategy=terms.placement, scatter=terms.scatter)
        if not bonds:
            have = plural(len(set(topology.domains(level).values())), level)
            raise ConfigError(
                f"parity that survives {plural(spare, level)} needs {2 + spare}, there are {have}; "
                f"a job has copies there, so ask about --replicas {terms.replicas} without --parity",
                field="parity",
                value=terms.parity,
            )
        return cls(topology, terms, bonds, level)


# -- what is asked ------------------------------------------------------------------------------------


def rates_option(name: str, words: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return an option that `read_rates` understands."""
    names = "|".join((*PRESETS, "FILE"))
    words += ": published figures, or yours as JSON."
    return click.option(name, default="llama3", show_default=True, metavar=names, help=words)


CLUSTER = (
    click.option("--hosts", type=click.IntRange(min=1), help="Hosts; without it those of the running store."),
    click.option("--racks", type=click.IntRange(min=1), help="Racks that --hosts are spread over evenly."),
    click.option(
        "--topology",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        metavar="FILE",
        help="The hosts and their labels, as `memstore status --json` prints them.",
    ),
    click.option("--replicas", type=int, metavar="N", help="Copies, or with --parity one more than losses survived."),
    click.option("--parity", type=int, metavar="K", help="Data hosts per parity, as in Config(parity=4)."),
    rates_option("--rates", "How often hosts, racks, switches and power fail"),
)


def cluster_options(verb: Any) -> Any:
    """Add the options that describe a cluster."""
    for option in reversed(CLUSTER):
        verb = option(verb)
    return verb


def cluster_of(
    where: Where, hosts: int | None, racks: int | None, topology: Path | None, replicas: int | None, parity: int | None
) -> tuple[PlacedHosts, Status | None]:
    """Return the cluster that the options describe, or that of the store, with the store's status."""
    given = {name: value for name, value in {"replicas": replicas, "parity": parity}.items() if value is not None}
    if hosts is not None and topology is not None:
        raise click.UsageError("--topology names the hosts, --hosts counts them: give one of them")
    if racks is not None and hosts is not None and racks > hosts:
        raise click.UsageError(f"--racks {racks} of --hosts {hosts}: a rack has a host at least")
    if racks is not None and hosts is None:
        raise click.UsageError("--racks goes with --hosts; a --topology FILE and a store say their racks themselves")
    if topology is not None:
        example = '{"hosts": [{"host": "h0", "labels": {"rack": "r0", "power": "p0"}}], "failure_domains": ["rack"]}'
        found, status = _read_json("topology", topology, _topology_of, example), None
    elif hosts is not None:
        found, status = even_topology(hosts, racks), None
    else:
        status = where.status()
        rows = (row for row in status.hosts if row.status != "dead")
        found = Topology.of((Host(r.host, r.labels, r.machine, r.is_explicit) for r in rows), status.failure_domains)
    terms = Terms.of(status.job_defaults if status is not None else {}, given)
    config_or_usage(replicas=terms.replicas, parity=terms.parity)
    return PlacedHosts.of(found, terms), status


def even_topology(hosts_count: int, racks_count: int | None) -> Topology:
    """Return hosts in racks of one size, or of two that differ by one; without racks each host is a domain.

    >>> [host.labels for host in even_topology(3, 2).hosts.values()]
    [{'rack': 'r0'}, {'rack': 'r0'}, {'rack': 'r1'}]
    """
    racks = (at * racks_count // hosts_count if racks_count else None for at in range(hosts_count))
    named = (Host(f"h{at}", {} if rack is None else {"rack": f"r{rack}"}) for at, rack in enumerate(racks))
    return Topology.of(named)


def _read_json(what: str, path: Path, make: Callable[[Any], T], example: str) -> T:
    """Return what a JSON file describes."""
    try:
        return make(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{what} {path} cannot be read ({type(error).__name__}: {error}): it looks like {example}",
            field=what,
            value=str(path),
        ) from error


def _topology_of(given: Any) -> Topology:
    hosts = (
        Host(row["host"], dict(row.get("labels") or {}), row.get("machine", ""), row.get("is_explicit", False))
        for row in given["hosts"]
    )
    return Topology.of(hosts, given.get("failure_domains", Config.failure_domains))


def read_rates(text: str) -> Rates:
    """Return a preset, or the rates in a JSON file whose keys are the fields of Rates."""
    if text in PRESETS:
        return PRESETS[text]
    if not Path(text).is_file():
        raise click.UsageError(f"{text!r} is neither {', '.join(PRESETS)} nor a file of rates")
    known = [each.name for each in fields(Rates)]

    def rates_of(given: Any) -> Rates:
        if unknown := sorted(given.keys() - set(known)):
            raise ValueError(f"unknown: {', '.join(unknown)}")
        return Rates(**{"source": text, **given})

    example = '{"failures_per_1000_host_days": 4, "domain_losses_per_year": {"rack": 0.1}}'
    return _read_json("rates", Path(text), rates_of, f"{example}, and it may have {', '.join(known)}")


# -- odds ---------------------------------------------------------------------------------------------


@click.command(short_help="How likely do lost hosts, racks or power take a step along, and how often?")
@cluster_options
@click.option("--lost", default=4, show_default=True, type=click.IntRange(1, 8), help="Rows, up to so many hosts lost.")
@click.option(
    "--repair-s",
    type=Seconds(),
    default=REPAIR_S,
    show_default=True,
    help="From a loss until all copies are there again; `memstore fit` computes it.",
)
@where_options
def odds(where: Where, rates: str, lost: int, repair_s: float, as_json: bool, **cluster: Any) -> None:
    """Say how likely the loss of hosts takes a step along: counted on the placement that the store makes of the hosts.

    Of the running store, or of --hosts in --racks, or of a --topology. A step that is lost from memory comes back from
    durable storage. `memstore plan JOB` has the odds of the copies that a job has now.
    """
    plan, _ = cluster_of(where, **cluster)
    assumed = read_rates(rates)
    found = loss_causes(plan, assumed, repair_s)
    counted = survival_odds(plan.bonds, plan.hosts_count, min(lost, plan.hosts_count))
    answer, (rows, table) = sentence(plan, counted, found), lost_rows(plan, counted)
    if as_json:
        body = {"sentence": answer, "scheme": plan.scheme.name, "hosts": plan.hosts_count, "level": plan.level}
        body |= {"odds": rows, "causes": [asdict(each) for each in found], "losses_per_year": _per_year(found)}
        print_json({**body, "repair_s": repair_s, "rates": asdict(assumed)})
        return
    console = data_console()
    console.print(f"{answer}\n")
    for cause in found[1:]:
        alone = Fraction(cause.fatal_alone)
        table.add_row(f"1 {cause.level}", chance_text(alone), share_text(1 - alone), "-")
    console.print(table)
    console.print()
    table = plain_table("CAUSE", ">THERE ARE", ">LOST A YEAR", "TAKES A STEP ALONG")
    for cause in found:
        how_often = ("" if cause.is_exact else "about ") + once_text(cause.losses_per_year)
        table.add_row(f"a {cause.level}", f"{cause.units_count:,}", f"{cause.events_per_year:,.3g}", how_often)
    console.print(table)
    console.print(
        f"Rates: {assumed.source}; a lost one is whole again after {repair_s:g} s. All fail independently of one "
        "another here. Faults that come in bursts take a step along more often: docs/guide/how-many-copies.md"
    )
    if sum(assumed.burst_weights[1:]):
        console.print(f"Bursts count as single losses here: `memstore simulate --preset {rates}` plays them.")
    if any(row["interval_95"] for row in rows):
        console.print(f"Ranges hold 95 %: {SAMPLES:,} sets of lost hosts were drawn, too many share copies to count.")


def lost_rows(plan: PlacedHosts, counted: Sequence[Odds]) -> tuple[list[dict[str, Any]], PlainTable]:
    """Return the odds of each number of hosts lost at once as --json prints them, and as a table."""
    rows, table = [], plain_table("LOST AT ONCE", ">LOSES A STEP", ">ALL SURVIVES", ">GEMINI'S BOUND")
    for lost, each in enumerate(counted):
        bound = None if plan.scheme.is_parity else corollary(plan.hosts_count, plan.terms.replicas, lost)
        loses, survives, drawn = chance_text(1 - each.chance), share_text(each.chance), None
        if not each.is_exact:
            chance = random.Random(lost)
            low, high = sampled_odds(plan.bonds, plan.hosts_count, lost, samples_count=SAMPLES, chance=chance)
            drawn = low, high = max(low, float(each.chance)), high
            loses, survives = f"{1 - high:.2%} to {1 - low:.2%}", f"{low:.4f} to {high:.4f}"
        exactly, corollary_share = str(each.chance) if each.is_exact else None, None if bound is None else float(bound)
        row = {"lost": lost, "survives": float(each.chance), "exactly": exactly, "interval_95": drawn}
        rows.append({**row, "corollary": corollary_share})
        if lost:
            table.add_row(plural(lost, "host"), loses, survives, "-" if bound is None else share_text(bound))
    return rows, table


def loss_causes(plan: PlacedHosts, rates: Rates, repair_s: float) -> list[Cause]:
    """Return the causes of loss; what is no model of them is an error of ours."""
    try:
        return causes(plan.bonds, plan.topology, rates, repair_s)
    except ValueError as error:
        raise ConfigError(f"{error}: lower --repair-s, or the rates", field="repair_s", value=repair_s) from error


def _per_year(found: Iterable[Cause]) -> float:
    return sum(each.losses_per_year for each in found)


def sentence(plan: PlacedHosts, counted: Sequence[Odds], found: Iterable[Cause]) -> str:
    """Return the answer in one sentence."""
    level = plan.level
    where = f" in {plural(len(set(plan.topology.domains(level).values())), level)}" if level != HOST_LEVEL else ""
    sure = max(n for n, each in enumerate(counted) if each.chance == 1)
    name = re.sub(r"^\d", lambda digit: COUNTS[int(digit[0])], plan.scheme.name)
    kept = f"{'any ' if sure > 1 else ''}{_word(sure)} never {'loses' if sure == 1 else 'lose'} a step"
    words = f"With {name} on {plural(plan.hosts_count, 'host')}{where}: {kept if sure else 'no host may be lost'}"
    if sure + 1 < len(counted):
        chance = chance_text(1 - counted[sure + 1].chance).replace("%", " %")
        words += f"; {_word(sure + 1)} at once lose it with {chance}" if sure else f"; one loses a step with {chance}"
    return f"{words}; expected {once_text(_per_year(found))} at these rates."


def _word(count: int) -> str:
    """Return "one host", "two" and so on."""
    return f"{COUNTS[count] if count < len(COUNTS) else count}{' host' if count == 1 else ''}"


def once_text(per_year: float) -> str:
    """Return "once in 40 years", "3.1 times a year", or "never"."""
    if per_year <= 0:
        return "never"
    number = max(per_year, 1 / per_year)
    text = f"{number:,.2g}" if number < 10 else f"{number:,.0f}"
    if number > YEARS_MAX:
        return f"less than once in {YEARS_MAX:,} years"
    return f"{text} times a year" if per_year >= 1 else f"once in {text} years"


def share_text(chance: Fraction) -> str:
    """Return a chance with as many digits as tell it from 1.

    >>> share_text(Fraction(1)), share_text(Fraction(14, 15)), share_text(1 - Fraction(1, 3_000_000))
    ('1', '0.9333', '0.99999967')
    """
    if chance in (0, 1):
        return str(chance)
    digits = 4
    while float(1 - chance) < 10 ** (1 - digits):
        digits += 1
    return f"{float(chance):.{digits}f}"


# -- fit ----------------------------------------------------------------------------------------------


class Speed(click.ParamType):  # type: ignore[type-arg]  # older click has no argument there
    """The type of a network's speed, such as "100Gbps": bytes per second."""

    name = "speed"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Read a speed."""
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([MGT])(?:bps|bit)", str(value).strip())
        if found is None or not float(found[1]):
            self.fail(f"{value!r} is no speed of a network: write it as 100Gbps", param, ctx)
        return float(found[1]) * {"M": 1e6, "G": 1e9, "T": 1e12}[found[2]] / 8


@click.command(short_help="What memory, time and settings does a model take, before there is a cluster?")
@click.option("--params", type=float, required=True, help="Parameters, such as 70e9.")
@click.option("--bytes-per-param", type=float, default=14.0, show_default=True, help="Weights and optimizer state.")
@cluster_options
@click.option("--ranks-per-host", type=click.IntRange(min=1), default=8, show_default=True, help="Processes of a host.")
@click.option("--nic", type=Speed(), default="100Gbps", show_default=True, help="A host's network for copies.")
@click.option("--process-bytes", default="8GiB", show_default=True, metavar="SIZE", help="Memory of each process.")
@where_options
def fit(
    where: Where,
    params: float,
    bytes_per_param: float,
    ranks_per_host: int,
    nic: float,
    process_bytes: str,
    rates: str,
    as_json: bool,
    **cluster: Any,
) -> None:
    """Say what a model takes: memory, seconds, expected loss, and what to paste for Docker, Kubernetes and Ray.

    Each with its formula. Of --hosts or a --topology there need be no cluster; without them it is about the hosts of
    the running store, and their memory limits. All ranks are taken to put as many bytes.
    """
    if not 0 < params * bytes_per_param < STATE_BYTES_MAX:
        raise click.UsageError(f"--params {params:g} of {bytes_per_param:g} bytes: no state that could be stored")
    plan, status = cluster_of(where, **cluster)
    processes = ranks_per_host * bytes_from_text("process_bytes", process_bytes)
    needs = needs_of(plan, params * bytes_per_param, processes, nic)
    per_year = _per_year(loss_causes(plan, read_rates(rates), needs.repair_s))
    limits = arena_limits(status.hosts) if status is not None else {}
    too_small = {host: limit for host, limit in limits.items() if limit < needs.arena_bytes}
    paste = paste_lines(plan.terms, needs)
    if as_json:
        body = {"scheme": plan.scheme.name, "hosts": plan.hosts_count, "losses_per_year": per_year}
        print_json({**body, **vars(needs), "too_small": too_small, "paste": paste})
        return
    console = data_console()
    console.print(
        f"With {plan.scheme.name} on {plural(plan.hosts_count, 'host')} each needs an arena of "
        f"{size_text(needs.arena_bytes)}; a put is redundant after {needs.redundant_s:.3g} s, "
        f"and a lost host's get takes {needs.recover_s:.3g} s. Of each host:"
    )
    for what, value, formula in need_rows(plan, needs, processes):
        console.print(f"  {what}: {value}\n      = {formula}")
    console.print(
        f"A step is lost from memory: {once_text(per_year)} (`memstore odds --repair-s {needs.repair_s:.0f}`)."
    )
    for host, limit in too_small.items():
        console.print(f"! {host} may have an arena of {size_text(limit)}: {size_text(needs.arena_bytes)} do not fit")
    console.print("\n" + "\n".join(paste))


def arena_limits(hosts: Iterable[HostRow]) -> dict[str, int]:
    """Return how large the arena of each host may be; that of a dead one is not known."""
    return {row.host: row.stats.limit_bytes for row in hosts if row.stats is not None and row.status != "dead"}


@dataclass(frozen=True)
class Needs:
    """What a state takes of each host."""

    host_bytes: float  # put there
    arena_bytes: int
    volume_bytes: int
    pod_bytes: int
    redundant_s: float
    repair_s: float
    recover_s: float


def needs_of(plan: PlacedHosts, state_bytes: float, process_bytes: int, nic: float) -> Needs:
    """Return what a state takes of each host; `need_rows` has the formulas."""
    host_bytes = state_bytes / plan.hosts_count
    arena = _whole_gib(float(plan.scheme.memory(plan.terms.versions)) * host_bytes)
    pod = max(2 * arena, _whole_gib((arena + GIB + process_bytes) / POD_SHARE))
    once_s = host_bytes / (nic * SEAL_SHARE)
    redundant_s, repair_s = plan.scheme.spare * once_s, NOTICED_S + 2 * once_s
    recover_s = NOTICED_S + host_bytes / (nic * GET_SHARE)
    return Needs(host_bytes, arena, _whole_gib(arena / VOLUME_SHARE), pod, redundant_s, repair_s, recover_s)


def need_rows(plan: PlacedHosts, needs: Needs, process_bytes: int) -> list[tuple[str, str, str]]:
    """Return what is needed, how much, and the formula."""
    terms, scheme, put = plan.terms, plan.scheme, size_text(int(needs.host_bytes))
    arena, processes = size_text(needs.arena_bytes), size_text(process_bytes)
    least_s = f"{needs.redundant_s:.3g} s"
    return [
        ("bytes put", put, "parameters x bytes / hosts"),
        ("arena", arena, f"{terms.versions} versions x {scheme.width}/{scheme.data} x {put}, {terms.text}"),
        ("/dev/shm, or a volume in memory", size_text(needs.volume_bytes), f"arena / {VOLUME_SHARE}"),
        (
            "memory limit",
            size_text(needs.pod_bytes),
            f"the larger of 2 x arena and (arena + 1 GiB + processes {processes}) / {POD_SHARE}",
        ),
        (
            "put until redundant",
            least_s,
            f"{scheme.spare} x {put} / ({SEAL_SHARE} x network); {SEAL_SHARE} was measured",
        ),
        ("puts at most every", least_s, "until redundant: what is put more often waits, or is skipped"),
        (
            "a lost host's get",
            f"{needs.recover_s:.3g} s",
            f"{NOTICED_S:g} s to notice + {put} / ({GET_SHARE} x network)",
        ),
        ("loss until redundant", f"{needs.repair_s:.3g} s", f"{NOTICED_S:g} s + 2 x {put} / ({SEAL_SHARE} x network)"),
    ]


def paste_lines(terms: Terms, needs: Needs) -> list[str]:
    """Return the lines to paste: the same sums as in deploy/kubernetes."""
    arena, volume, pod = (each // GIB for each in (needs.arena_bytes, needs.volume_bytes, needs.pod_bytes))
    parity = f"parity={terms.parity}, " if terms.parity else ""
    return [
        f"# Docker\ndocker run --shm-size={volume}g --memory={pod}g --ulimit nofile=65536 ...",
        "# Kubernetes: deploy/kubernetes/base/raycluster.yaml, of each worker",
        f"limits: {{memory: {pod}Gi}}",
        f"emptyDir: {{medium: Memory, sizeLimit: {volume}Gi}} # the volume arena",
        "# Ray, then the job",
        "ray start --address=HEAD:6379 --labels rack=RACK",
        f"memstore up --arena-bytes {arena}GiB",
        f"Config({parity}replicas={terms.replicas}, keep_steps={terms.keep_steps})",
    ]


def _whole_gib(nbytes: float) -> int:
    return ceil(nbytes / GIB) * GIB


VERBS = (odds, fit)

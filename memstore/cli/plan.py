"""`memstore plan`: a dry run of a restore, now or after losing hosts, by the planner of restores. Moves nothing."""

from __future__ import annotations

import click

from memstore.cli.bill import Terms, bill_json, bill_of, show_bill
from memstore.cli.options import Where, check_host, where_options
from memstore.cli.output import ExitCode, data_console, plain_table, plural, print_json, size_text
from memstore.cli.timeline import run_text
from memstore.core.report.cells import outcome, plan_lines
from memstore.core.wire.calls import AskPlan
from memstore.core.wire.codec import fields_of
from memstore.core.wire.replies import Plan, Status
from memstore.errors import ConfigError

SPANS_MAX = 3  # runs of steps that are gone
SOURCES_MAX = 20  # rows of the transfer table; the JSON has all that the controller sends


class LoseManyCommand(click.Command):
    """A command whose --lose takes all words up to the next option: `--lose h1 h2`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Give every further word after --lose a --lose of its own."""
        spread: list[str] = []
        previous, is_losing = "", False
        for arg in args:
            if arg.startswith("-"):
                is_losing = arg == "--lose" or arg.startswith("--lose=")
            elif is_losing and previous != "--lose":
                spread.append("--lose")
            spread.append(arg)
            previous = arg
        return super().parse_args(ctx, spread)


@click.command(cls=LoseManyCommand, short_help="Dry run: what get() would return now, or if hosts died now.")
@click.argument("job", required=False)
@click.option(
    "--lose",
    multiple=True,
    metavar="HOST...",
    help="Hosts to lose: names, or a whole failure domain such as rack=r1. Takes several.  [default: none]",
)
@click.option("--bill", is_flag=True, help="Compare what copies and parity would cost on these hosts; needs no job.")
@where_options
@click.pass_context
def plan(ctx: click.Context, where: Where, job: str | None, lose: tuple[str, ...], bill: bool, as_json: bool) -> None:
    """Say what `get()` would return now, from where, and what would be lost; with --lose, if those hosts died now.

    Exits with 0 if the newest committed step comes back, 4 if only an older one does, 3 if nothing does. With --bill:
    memory, network and odds of schemes of redundancy, with JOB's replicas, keep_steps, in_flight and durable if given.
    """
    if bill and lose:
        raise click.UsageError("--bill compares schemes, --lose asks about the copies that there are: give one of them")
    status = where.status(job)
    if bill:
        _show_bill(status, job, as_json)
        return
    names = [job] if job is not None else [row.job for row in status.jobs]
    hosts = lost_hosts(status, lose)
    if not names:
        raise ConfigError("the store holds no job yet, so there is nothing to plan for")
    running = [name for name in names if attempt_of(status, name) is not None]
    if not running:
        raise ConfigError(f"no rank has connected to {', '.join(names[:10])} since the store knows it: nothing to plan")
    plans = [where.ask(AskPlan(job=name, lose=tuple(hosts))) for name in running]
    if as_json:
        print_json({"lost_hosts": hosts, "plans": [{**fields_of(plan), "outcome": outcome(plan)} for plan in plans]})
    else:
        for row in plans:
            _show(row)
    ctx.exit(max((exit_code(row) for row in plans), key=_SEVERITY.index, default=ExitCode.FINE))


_SEVERITY = (ExitCode.FINE, ExitCode.DEGRADED, ExitCode.UNRECOVERABLE)


def attempt_of(status: Status, job: str) -> int | None:
    """Return the newest attempt of a job."""
    return next(row.attempt for row in status.jobs if row.job == job)


def lost_hosts(status: Status, words: tuple[str, ...]) -> list[str]:
    """Return the hosts that the words name: ids, or label=value for every host with that label."""
    hosts: dict[str, None] = {}
    for text in words:
        if not text.strip(","):
            raise ConfigError(f"--lose {text!r} names no host: leave it out to lose none", field="lose", value=text)
    for word in (part for text in words for part in text.split(",") if part):
        label, is_domain, value = word.partition("=")
        if not is_domain:
            hosts[check_host(status, word)] = None
            continue
        matching = [row.host for row in status.hosts if row.labels.get(label) == value]
        if not matching:
            known = sorted({row.labels[label] for row in status.hosts if label in row.labels})
            have = f"its values are {', '.join(known)}" if known else "no host has that label"
            raise ConfigError(f"no host is labelled {word}: {have}", field="lose", value=word)
        hosts.update(dict.fromkeys(matching))
    return list(hosts)


def exit_code(plan: Plan) -> ExitCode:
    """Return the exit code one job's plan calls for."""
    codes = {"lost": ExitCode.UNRECOVERABLE, "older": ExitCode.DEGRADED, "wait": ExitCode.DEGRADED}
    return codes.get(outcome(plan), ExitCode.FINE)


def odds_text(lost_count: int, chance: float, *, is_exact: bool) -> str:
    """Return "any 1 host at once: sure to keep", or "3 random hosts at once: at least 99.30% chance to keep"."""
    if chance == 1:
        return f"any {plural(lost_count, 'host')} at once: sure to keep"
    if chance == 0 and is_exact:
        return f"any {plural(lost_count, 'host')} at once: no chance to keep"
    bound = "" if is_exact else "at least "
    return f"{plural(lost_count, 'random host')} at once: {bound}{chance:.2%} chance to keep"


def _show_bill(status: Status, job: str | None, as_json: bool) -> None:
    row = next((row for row in status.jobs if row.job == job), None)
    own = {} if row is None or row.newest is None else fields_of(row.newest)
    pinned = {} if row is None else {"pinned": len({(pin.attempt, pin.step) for pin in row.pins.values()})}
    terms = Terms.of(status.job_defaults, own, pinned)
    rows = bill_of(status.hosts, status.failure_domains, terms)
    if as_json:
        print_json({"bill": bill_json(rows, terms)})
    else:
        show_bill(data_console(), rows, terms)


def _show(plan: Plan) -> None:
    console = data_console()
    answer, *lines = plan_lines(plan)
    console.print(answer)
    for line in lines:
        console.print(f"  {line}")
    for span in plan.gone[:SPANS_MAX]:
        console.print(f"  not used: {run_text(span)}")
    routes: dict[tuple[str, str | None, str], tuple[int, set[int]]] = {}
    for sent in (each for each in plan.transfers if each.source != each.target_host):
        route = "durable" if sent.tier == "durable" else "", sent.source, sent.target_host
        total, ranks = routes.get(route, (0, set()))
        routes[route] = (total + sent.nbytes, ranks | {sent.rank})
    if routes:
        table = plain_table("  FROM", "TO", ">BYTES", "RANKS")
        for (tier, source, target), (nbytes, ranks) in sorted(routes.items())[:SOURCES_MAX]:
            name = "durable storage" if tier == "durable" else source
            shown = ", ".join(map(str, sorted(ranks)[:10])) + (
                f" and {len(ranks) - 10} more" if len(ranks) > 10 else ""
            )
            table.add_row(f"  {name}", target, size_text(nbytes), shown)
        console.print(table)
    for odds in plan.odds:
        console.print(f"  now, losing {odds_text(odds.lost, odds.chance, is_exact=odds.is_exact)} every shard in RAM")


VERBS = (plan,)

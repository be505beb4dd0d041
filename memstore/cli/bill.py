"""What redundancy costs, as `memstore up` and `memstore plan --bill` print it: memory limits, and schemes compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from rich.console import Console

from memstore.cli.output import plain_table, plural, size_text
from memstore.config import Config
from memstore.core.wire.status_rows import HostRow
from placement.bill import LOST, BillRow, Scheme, bill
from placement.topology import Host, Topology

HOW = "k+1 is Config(parity=k), k+2 is Config(parity=k, replicas=3)."


@dataclass(frozen=True)
class Terms:
    """What of a job's settings costs memory, and where its copies go."""

    replicas: int = Config.replicas
    parity: int = Config.parity
    keep_steps: int = Config.keep_steps
    in_flight: int = Config.in_flight
    durable: str | None = None
    placement: Any = Config.placement
    scatter: int = Config.scatter
    pinned: int = 0  # steps that pins and trust keep, each in a version of its own

    @classmethod
    def of(cls, *settings: Mapping[str, Any]) -> Terms:
        """Return the terms of a store's defaults for jobs, or of these and what one job has instead."""
        given = {name: value for each in settings for name, value in each.items()}
        return cls(**{name: given[name] for name in cls.__dataclass_fields__ if name in given})

    @property
    def scheme(self) -> Scheme:
        """Return what is configured."""
        return Scheme(self.parity or 1, self.replicas - 1)

    @property
    def versions(self) -> int:
        """Return how many versions of a step each host has room for: those kept, in flight, being written, pinned."""
        return self.keep_steps + self.in_flight + (self.durable is not None) + self.pinned

    @property
    def text(self) -> str:
        """Return them as one would write them."""
        words = [f"keep_steps={self.keep_steps}", *([f"in_flight={self.in_flight}"] if self.in_flight > 1 else [])]
        words += ["durable"] if self.durable is not None else []
        return ", ".join([*words, *([f"{plural(self.pinned, 'step')} pinned or trusted"] if self.pinned else [])])


def limit_lines(hosts: Iterable[HostRow], terms: Terms) -> list[str]:
    """Return the arenas' limits, their reasons, and what fits: a line for each kind of host, and warnings."""
    kinds: dict[tuple[Any, ...], list[str]] = {}
    for host in hosts:
        stats = host.stats
        if host.status == "live" and stats is not None:
            fits = size_text(int(stats.limit_bytes / terms.scheme.memory(terms.versions)))
            limit = size_text(stats.limit_bytes)
            kinds.setdefault((limit, fits, stats.limit_why, stats.limit_warning), []).append(host.host)
    lines = []
    for (limit, fits, why, warning), names in kinds.items():
        who = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        words = f"replicas={terms.replicas}, {terms.text}" + (f", parity={terms.parity}" if terms.parity else "")
        lines.append(f"{who}: up to {limit} ({why}); fits a state of {fits} per host with {words}")
        lines += [f"warning: {who}: {warning}"] if warning else []
    return lines


def bill_of(hosts: Iterable[HostRow], failure_domains: Iterable[str], terms: Terms) -> list[BillRow]:
    """Return what the schemes cost on the hosts that are not dead."""
    there = (Host(row.host, row.labels, row.machine, row.is_explicit) for row in hosts if row.status != "dead")
    topology = Topology.of(there, failure_domains)
    return bill(topology, terms.scheme, versions=terms.versions, strategy=terms.placement, scatter=terms.scatter)


def show_bill(console: Console, rows: Iterable[BillRow], terms: Terms) -> None:
    """Print one row for each scheme, what the columns mean, and what a reader must know before choosing."""
    table = plain_table("SCHEME", ">MEMORY", ">SENT", ">FROM", *(f">{lost} LOST" for lost in LOST), "SURVIVES")
    for row in rows:
        name = row.scheme.name + (" *" if row.scheme == terms.scheme else "")
        odds = [chance_text(row.fatal[lost]) for lost in LOST]
        memory = f"{float(row.memory):.3g}x"
        table.add_row(name, memory, f"{row.sent}x", str(row.sources), *odds, survives_text(row))
    console.print(table)
    console.print(
        f"*: configured. MEMORY, SENT: times the bytes put, with {terms.text}. FROM: the hosts that give back a lost "
        f"one's bytes. {LOST[0]} LOST: the chance that so many random hosts, lost at once, take bytes with them."
    )
    console.print(
        "Parity k+p keeps the promise of 1+p copies, any p losses, in less memory, and has worse odds beyond it: "
        f"any p+1 hosts of a group are fatal. {HOW} Each step that is pinned or trusted takes one version more."
    )


def survives_text(row: BillRow) -> str:
    """Return "any 1 rack", or why that is not so."""
    return row.unmet or (f"any {plural(row.scheme.spare, row.level)}" if row.scheme.spare else "no loss")


def chance_text(chance: Fraction | None) -> str:
    """Return a chance in percent with two digits; it is "0" or "100%" only if it is exactly that."""
    if chance is None:
        return "-"
    if chance in (0, 1):
        return "100%" if chance else "0"
    percent = min(float(100 * chance), 99.0)
    return f"{percent:.0f}%" if percent >= 10 else f"{percent:.2g}%"


def bill_json(rows: Iterable[BillRow], terms: Terms) -> list[dict[str, Any]]:
    """Return the rows as --json prints them."""
    return [
        {
            "scheme": row.scheme.name,
            "data": row.scheme.data,
            "spare": row.scheme.spare,
            "is_configured": row.scheme == terms.scheme,
            "memory": float(row.memory),
            "sent": row.sent,
            "sources": row.sources,
            "level": row.level,
            "unmet": row.unmet,
            "fatal": {str(lost): None if chance is None else float(chance) for lost, chance in row.fatal.items()},
        }
        for row in rows
    ]

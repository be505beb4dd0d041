"""What would a scheme of redundancy cost on these hosts, and what would it survive: copies, and parity.

Copies are the parity of one data host: one formula each for memory, network and sources serves both.
Pure: no torch, ray, socket, clock, environment or file access. Read `odds.py` first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from placement.groups import Strategy
from placement.odds import Bond, bonds_of_placement, survival_odds
from placement.parity_sets import parity_groups
from placement.scatter import scattered
from placement.topology import HOST_LEVEL, Topology, spread_level

LOST = (2, 3, 4)  # hosts lost at once, of which a bill has the odds


@dataclass(frozen=True, slots=True)
class Scheme:
    """Bytes of `data` hosts that the loss of any `spare` of them and their parity hosts leaves whole.

    With one data host its parity is a copy: 1 + spare copies.
    """

    data: int
    spare: int

    @property
    def width(self) -> int:
        """Return the hosts, in domains of their own, that the scheme takes."""
        return self.data + self.spare

    @property
    def is_parity(self) -> bool:
        """Return whether it is more than copies."""
        return self.data > 1

    @property
    def name(self) -> str:
        """Return "2 copies" or "parity 4+1"."""
        return (
            f"parity {self.data}+{self.spare}" if self.is_parity else f"{self.width} cop{'ies' if self.spare else 'y'}"
        )

    def memory(self, versions: int) -> Fraction:
        """Return the memory of all hosts as a factor of the bytes put, with room for so many versions."""
        return versions * Fraction(self.width, self.data)

    def bonds(self, topology: Topology, *, strategy: Strategy = "mixed", scatter: int = 1) -> list[Bond]:
        """Return which hosts may not be lost together; none where there are too few domains for parity."""
        if self.is_parity:
            level = spread_level(topology, self.spare + 1).level
            groups = parity_groups(topology, level, self.data, self.spare)
            return [Bond(frozenset(group), self.spare) for group in groups]
        return bonds_of_placement(scattered(None, topology, replicas=self.width, strategy=strategy, scatter=scatter))


SCHEMES = tuple(Scheme(*each) for each in ((1, 1), (1, 2), (2, 1), (3, 1), (4, 1), (8, 1), (4, 2), (8, 2)))


@dataclass(frozen=True, slots=True)
class BillRow:
    """What one scheme costs on given hosts, and what it survives there."""

    scheme: Scheme
    memory: Fraction  # of all hosts, as a factor of the bytes put
    sent: int  # bytes that a host sends to others for each byte put there
    sources: int  # hosts that a lost one's bytes come back from, at most
    level: str  # of the promise: any `scheme.spare` failure domains of it may be lost
    unmet: str  # why these hosts cannot keep that promise; "": they can
    fatal: Mapping[int, Fraction | None]  # random hosts lost at once -> chance that bytes are lost; None: not known


def bill(
    topology: Topology, configured: Scheme, *, versions: int, strategy: Strategy = "mixed", scatter: int = 1
) -> list[BillRow]:
    """Return a row for each of SCHEMES and for the configured one: copies first, then by the losses that are survived.

    The promise is about the level over which as many copies would be spread: parity on two racks that only keeps hosts
    apart would lose with a rack what two copies keep.

    Args:
        topology: The hosts; none is possible.
        configured: What the job has now.
        versions: Versions of a step that each host has room for, the one in flight included.
        strategy: Of copies, as `place` takes it.
        scatter: Of copies, as `scattered` takes it.

    Complexity: that of `scattered` for each number of copies.
    """
    rows = []
    for scheme in sorted({*SCHEMES, configured}, key=lambda each: (each.is_parity, each.spare, each.data)):
        level = spread_level(topology, scheme.spare + 1).level
        domains = topology.domains(level)
        unmet, sources = _unmet(scheme, level, domains), scheme.data if scheme.is_parity else scheme.spare
        fatal: dict[int, Fraction | None] = dict.fromkeys(LOST)
        if scheme.is_parity and not unmet:
            fatal = _fatal(scheme.bonds(topology), len(domains))
        elif not unmet:
            copies = scattered(None, topology, replicas=scheme.width, strategy=strategy, scatter=scatter)
            sources = max(map(len, copies.merged().values()))
            together = {each.owner for placed in copies.placements for each in placed.unmet}
            unmet = f"{len(together)} of {len(domains)} hosts have copies in one {level}" if together else ""
            fatal = _fatal(bonds_of_placement(copies), len(domains))
        memory = scheme.memory(versions)
        rows.append(BillRow(scheme, memory, scheme.spare, sources, level, unmet, fatal))
    return rows


def _unmet(scheme: Scheme, level: str, domains: Mapping[str, str]) -> str:
    """Return which domains are missing, or of parity too large: a group has at most one host of each."""
    sizes = Counter(domains.values())
    noun = "machine" if level == HOST_LEVEL and len(sizes) < len(domains) else level
    if len(sizes) < scheme.width:
        return f"needs {scheme.width} {noun}s, has {len(sizes)}"
    most, fullest = len(domains) // scheme.width, max(sizes.values())
    return f"one {noun} has {fullest} hosts, {most} fit" if scheme.is_parity and fullest > most else ""


def _fatal(bonds: list[Bond], hosts_count: int) -> dict[int, Fraction | None]:
    """Return the chances that so many lost hosts take bytes with them; None where there are fewer, or it is a bound."""
    odds = survival_odds(bonds, hosts_count, min(hosts_count, max(LOST)))
    return {lost: 1 - odds[lost].chance if lost < len(odds) and odds[lost].is_exact else None for lost in LOST}

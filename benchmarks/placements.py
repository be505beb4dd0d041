"""How often is a step lost from memory with memstore's placement, and with others: `python -m benchmarks.placements`.

400 hosts in 50 racks of 8; every 25th host is in one pipeline, which is evicted as one. Compared are

- memstore, told of the pipelines (`connect(groups={"pp": n})`) and not told of them;
- ring: host i's copies lie on hosts i + 1 to i + m - 1, in the order of their names;
- random: on any other hosts; the mean of DRAWS draws;
- copysets: hosts are permuted P = 2 times and cut into sets of m, and an owner takes one of its P sets (Cidon et al.,
  "Copysets: Reducing the Frequency of Data Loss in Cloud Storage", USENIX ATC 2013, with a scatter width of 2 (m - 1)).

What is lost: k hosts at random, a rack, a pipeline, and the bursts of StepFun's trace (`core/forecast/stepfun.json` has
source and license), of any hosts or of neighbours. Chances are counted where that is feasible; where it is not, sets of
hosts are drawn, and the table has the range that holds 95 %.
"""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from statistics import mean

from placement import Bond, Host, Topology, bonds_of, bonds_of_placement, place, survival_odds
from placement.odds import sampled_odds
from placement.topology import with_groups

HOSTS_COUNT, RACKS_COUNT, PIPELINES_COUNT = 400, 50, 25
DRAWS, SAMPLES_COUNT = 10, 10_000
LOST = (2, 4, 8)
Range = tuple[float, float]
Targets = Mapping[str, Sequence[str]]


def cluster() -> Topology:
    """Return the hosts with their racks and pipelines."""
    names = [f"h{at:03d}" for at in range(HOSTS_COUNT)]
    racks = (Host(name, {"rack": f"r{at * RACKS_COUNT // HOSTS_COUNT:02d}"}) for at, name in enumerate(names))
    return with_groups(Topology.of(racks), {"pipeline": {n: {at % PIPELINES_COUNT} for at, n in enumerate(names)}})


def ring(hosts: Sequence[str], copies: int, rng: random.Random) -> Targets:
    """Return for each host the next ones."""
    return {host: [hosts[(at + step) % len(hosts)] for step in range(1, copies)] for at, host in enumerate(hosts)}


def at_random(hosts: Sequence[str], copies: int, rng: random.Random) -> Targets:
    """Return for each host any others."""
    return {host: rng.sample([other for other in hosts if other != host], copies - 1) for host in hosts}


def copysets(hosts: Sequence[str], copies: int, rng: random.Random) -> Targets:
    """Return for each host the others of one of the sets that it is in."""
    sets: dict[str, list[list[str]]] = defaultdict(list)
    for _ in range(2):
        order = rng.sample(hosts, len(hosts))
        cut = [order[start : start + copies] for start in range(0, len(order), copies)]
        cut[-1] = order[-copies:]  # the last one takes hosts of the one before where m does not divide their number
        for members in cut:
            for host in members:
                sets[host].append(members)
    return {host: [other for other in rng.choice(sets[host]) if other != host] for host in hosts}


def fatal_at_random(bonds: Sequence[Bond], lost: Iterable[int]) -> dict[int, Range]:
    """Return within which bounds the chance lies that so many hosts at random take a step."""
    counts = sorted(set(lost))
    found, odds = dict[int, Range](), survival_odds(bonds, HOSTS_COUNT, counts[-1])
    for count in counts:
        chance = float(1 - odds[count].chance)
        found[count] = (chance, chance)
        if not odds[count].is_exact:
            rng = random.Random(f"lost {count}")
            low, high = sampled_odds(bonds, HOSTS_COUNT, count, samples_count=SAMPLES_COUNT, chance=rng)
            found[count] = (1 - high, 1 - low)
    return found


def fatal_sets(bonds: Sequence[Bond], sets: Iterable[Iterable[str]]) -> float:
    """Return the share of sets of hosts that take a step."""
    return mean(any(bond.kills(lost) for bond in bonds) for lost in map(frozenset, sets))


def bursts() -> Counter[int]:
    """Return how many bursts of the trace took the memory of one server, of two, and so on."""
    table = resources.files("memstore.core.forecast").joinpath("stepfun.json").read_text(encoding="utf-8")
    return Counter(row[3] for row in json.loads(table)["rows"] if row[3])


def row_of(topology: Topology, drawn: Sequence[Sequence[Bond]]) -> list[Range]:
    """Return what the draws of one scheme lose on average, column by column."""
    hosts, seen = list(topology.hosts), bursts()
    domains = []
    for level in ("rack", "pipeline"):
        members: dict[str, list[str]] = defaultdict(list)
        for host, name in topology.domains(level).items():
            members[name].append(host)
        domains.append(list(members.values()))
    found = []
    for bonds in drawn:
        uniform = fatal_at_random(bonds, [*LOST, *seen])
        columns = [uniform[count] for count in LOST]
        columns += [(share, share) for share in (fatal_sets(bonds, sets) for sets in domains)]
        columns.append(
            (sum(n * uniform[k][0] for k, n in seen.items()), sum(n * uniform[k][1] for k, n in seen.items()))
        )
        near = {
            count: fatal_sets(bonds, ([hosts[(at + n) % len(hosts)] for n in range(count)] for at in range(len(hosts))))
            for count in seen
        }
        columns.append((sum(n * near[count] for count, n in seen.items()),) * 2)
        found.append(columns)
    return [(mean(each[0] for each in column), mean(each[1] for each in column)) for column in zip(*found, strict=True)]


def bonds_of_targets(targets: Targets) -> list[Bond]:
    """Return what may not be lost together."""
    return bonds_of(frozenset((owner, *held)) for owner, held in targets.items())


def text(value: Range, *, is_share: bool) -> str:
    """Return "3.2 %", or "3.1 to 3.4 %"."""
    scale, unit = (100, " %") if is_share else (1, "")
    low, high = (f"{float(f'{scale * each:.2g}'):g}" for each in value)
    return f"{low}{unit}" if low == high else f"{low} to {high}{unit}"


def main() -> None:
    """Print the table."""
    topology = cluster()
    untold, hosts = Topology.of(topology.hosts.values()), list(topology.hosts)
    lost = " | ".join(f"{count} hosts" for count in LOST)
    print(f"| a step is lost by | {lost} | 1 rack | 1 pipeline | the trace, any hosts | the trace, neighbours |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for copies in (2, 3):
        schemes = {
            "memstore, told": [bonds_of_placement(place(topology, replicas=copies))],
            "memstore, not told": [bonds_of_placement(place(untold, replicas=copies))],
        }
        for scheme, draws in ((ring, 1), (at_random, DRAWS), (copysets, DRAWS)):
            rngs = (random.Random(f"{scheme.__name__} {number}") for number in range(draws))
            name = scheme.__name__.removeprefix("at_")
            schemes[name] = [bonds_of_targets(scheme(hosts, copies, rng)) for rng in rngs]
        for name, drawn in schemes.items():
            *shares, any_hosts, near = row_of(topology, drawn)
            cells = [text(each, is_share=True) for each in shares]
            cells += [text(each, is_share=False) for each in (any_hosts, near)]
            print(f"| {copies} copies: {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()

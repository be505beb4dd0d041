"""The groups that the bill counts on are those into which hosts are divided for parity, where they can be."""

from __future__ import annotations

from hypothesis import event, given, settings
from hypothesis import strategies as st

from placement import Host, Topology
from placement.bill import Scheme, bill
from placement.parity_sets import parity_groups


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    """Return hosts in racks and zones: of any sizes, some without a label, some on one machine with others."""
    rack_sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=24))
    zones_count, unlabelled = draw(st.integers(1, 4)), draw(st.sampled_from([0, 0, 0, 1, 3]))
    machines_of = draw(st.sampled_from([1, 1, 1, 2]))  # hosts of a rack that share one
    hosts = []
    for rack, size in enumerate(rack_sizes):
        labels = {"rack": f"r{rack}"} | ({"zone": f"z{rack % zones_count}"} if zones_count > 1 else {})
        hosts += [Host(f"r{rack}-{at}", labels, f"m{rack}-{at // machines_of}") for at in range(size)]
    hosts += [Host(f"u{at}", {}, f"u{at}") for at in range(unlabelled)]
    return Topology.of(draw(st.permutations(hosts)), ("zone", "rack"))


@given(topology=topologies(), data_hosts=st.sampled_from([2, 3, 4, 8]))
@settings(deadline=None, max_examples=300)
def test_the_bill_counts_the_groups_that_there_will_be(topology: Topology, data_hosts: int) -> None:
    """As many, of the same sizes, each host in one, and no two of one failure domain of the promise in any."""
    scheme = Scheme(data_hosts, 1)
    row = next(each for each in bill(topology, scheme, versions=2) if each.scheme == scheme)
    event("possible" if not row.unmet else "not possible")
    if row.unmet:
        return
    groups, domains = parity_groups(topology, row.level, data_hosts), topology.domains(row.level)
    assert all(scheme.width <= len(group) < 2 * scheme.width for group in groups)
    assert sorted(host for group in groups for host in group) == sorted(topology.hosts)
    assert all(len({domains[host] for host in group}) == len(group) for group in groups)

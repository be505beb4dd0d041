"""What schemes of redundancy cost and survive: odds of groups by enumeration, and the rows of the bill."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from placement import Host, Topology, bonds_of_placement, place, survival_odds
from placement.bill import SCHEMES, BillRow, Scheme, bill

TWO_COPIES = Scheme(1, 1)


def racks(*sizes: int) -> Topology:
    """Return racks of so many hosts, each host a machine."""
    places = [(rack, at) for rack, size in enumerate(sizes) for at in range(size)]
    return Topology.of((Host(f"r{rack}-{at}", {"rack": f"r{rack}"}, f"m{rack}-{at}") for rack, at in places), ("rack",))


def rows_of(topology: Topology, versions: int = 2, scatter: int = 1) -> dict[str, BillRow]:
    """Return the bill by the name of the scheme, with two copies configured."""
    return {row.scheme.name: row for row in bill(topology, TWO_COPIES, versions=versions, scatter=scatter)}


# -- groups -------------------------------------------------------------------------------------------


def divisions(domains: tuple[str, ...]) -> Iterator[list[list[str]]]:
    """Yield every way to divide hosts, given by their domains, into groups."""
    if not domains:
        yield []
        return
    for rest in divisions(domains[1:]):
        yield [[domains[0]], *rest]
        for at, group in enumerate(rest):
            yield [*rest[:at], [domains[0], *group], *rest[at + 1 :]]


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    scheme=st.sampled_from([s for s in SCHEMES if s.is_parity]),
)
@settings(deadline=None, max_examples=60)
def test_parity_is_possible_exactly_where_some_division_keeps_domains_apart(sizes: list[int], scheme: Scheme) -> None:
    """By looking at all divisions of up to seven hosts into groups of at least the scheme's width."""
    assume(sum(sizes) <= 7)
    row = next(row for row in bill(racks(*sizes), scheme, versions=2) if row.scheme == scheme)
    domains = racks(*sizes).domains(row.level)
    is_possible = any(
        all(len(group) >= scheme.width and len(set(group)) == len(group) for group in division)
        for division in divisions(tuple(domains.values()))
    )
    assert (row.unmet == "") == is_possible, row


# -- rows ---------------------------------------------------------------------------------------------


def test_what_each_scheme_costs() -> None:
    """Memory with one kept step, bytes sent per byte put, hosts that a lost one comes back from."""
    found = {name: (float(row.memory), row.sent, row.sources) for name, row in rows_of(racks(*[12] * 10)).items()}
    assert found == {
        "2 copies": (4, 1, 1),
        "3 copies": (6, 2, 2),
        "parity 2+1": (3, 1, 2),
        "parity 3+1": (pytest.approx(8 / 3), 1, 3),
        "parity 4+1": (2.5, 1, 4),
        "parity 8+1": (2.25, 1, 8),
        "parity 4+2": (3, 2, 4),
        "parity 8+2": (2.5, 2, 8),
    }
    assert rows_of(racks(6, 6), versions=3)["2 copies"].memory == 6
    assert rows_of(racks(6, 6), scatter=3)["2 copies"].sources == 3


def test_ten_racks_take_every_scheme_and_two_only_copies() -> None:
    """Parity keeps the promise of its copies, about racks where they have it: else the row says what is missing."""
    wide, narrow = rows_of(racks(*[12] * 10)), rows_of(racks(4, 4))
    assert {(row.level, row.unmet) for row in wide.values()} == {("rack", "")}
    assert [name for name, row in narrow.items() if row.level == "rack" and not row.unmet] == ["2 copies"]
    assert narrow["parity 4+1"].unmet == "needs 5 racks, has 2"
    assert (narrow["parity 4+2"].level, narrow["parity 4+2"].unmet) == ("host", "")  # as three copies on two racks
    assert narrow["parity 8+2"].unmet == "needs 10 hosts, has 8"
    assert set(narrow["parity 4+1"].fatal.values()) == {None}
    assert rows_of(racks(3, 3, 2, 2))["parity 3+1"].unmet == "one rack has 3 hosts, 2 fit"


def test_parity_survives_as_much_as_its_copies_and_less_beyond() -> None:
    """One loss more than the promise: every parity has worse odds than the copies that promise the same."""
    rows = rows_of(racks(*[12] * 10))
    for row in rows.values():
        copies = rows[f"{row.scheme.spare + 1} copies"]
        assert [lost for lost, chance in row.fatal.items() if chance == 0] == list(range(2, row.scheme.spare + 1))
        if row.scheme.is_parity:
            assert all(row.fatal[lost] > chance for lost, chance in copies.fatal.items() if chance)  # type: ignore[operator]
    assert f"{float(rows['parity 8+2'].fatal[3] or 0):.4f}" == "0.0051"


def test_copies_that_cannot_be_kept_apart_have_odds_all_the_same() -> None:
    """Five of six hosts in one rack: the sixth takes two of their copies, and the row says that the others stay."""
    assert rows_of(racks(2, 1))["2 copies"].unmet == ""
    row = rows_of(racks(5, 1))["2 copies"]
    assert row.unmet == "3 of 6 hosts have copies in one rack"
    assert row.fatal[2] == 1 - survival_odds(bonds_of_placement(place(racks(5, 1), replicas=2)), 6, 2)[2].chance


def test_odds_that_cannot_be_counted_are_not_known() -> None:
    """As many lost hosts as copies are counted in any shape; more are not where too many hosts share copies."""
    fatal = rows_of(racks(150, 140), scatter=4)["2 copies"].fatal
    assert fatal[2] is not None
    assert fatal[4] is None
    assert rows_of(racks(1, 1))["2 copies"].fatal == {2: 1, 3: None, 4: None}  # of two hosts no three are lost


def test_hosts_of_one_machine_are_one_and_so_are_its_racks() -> None:
    """Without an explicit host label two hosts on one machine do not hold one another's copies."""
    crowd = Topology.of(Host(f"h{n}", {}, "m") for n in range(4))
    assert rows_of(crowd)["2 copies"].unmet == "needs 2 machines, has 1"
    joined = Topology.of((Host(f"h{n}", {"rack": f"r{n}"}, f"m{n // 2}") for n in range(6)), ("rack",))
    assert rows_of(joined)["parity 4+1"].unmet == "needs 5 racks, has 3"
    assert rows_of(Topology.of(()))["2 copies"].unmet == "needs 2 hosts, has 0"


def test_what_is_configured_has_a_row() -> None:
    """Four copies, or one, beside the schemes that are always compared."""
    names = [row.scheme.name for row in bill(racks(6, 6), Scheme(1, 3), versions=2)]
    assert names[:3] == ["2 copies", "3 copies", "4 copies"]
    alone = next(row for row in bill(racks(6, 6), Scheme(1, 0), versions=2) if row.scheme.name == "1 copy")
    assert (alone.sent, alone.sources, alone.fatal[2]) == (0, 0, 1)

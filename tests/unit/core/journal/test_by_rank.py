"""What a fact says of each rank: journals name its root digest, each host keeps a part, a controller joins them."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memstore.core.cluster.facts import TRIES_MAX, ByRank, StepCommitted, kept_by
from memstore.core.journal.fact_log import FactLog
from memstore.core.journal.records import Entry, entries_of, journal_after, paged, with_parts
from memstore.core.wire.orders import TermNumber, WriteJournal
from memstore.errors import ProtocolError

HOSTS = ("a", "b", "c", "d")
DIGEST = st.integers(0, 3).map(lambda n: f"{n:032x}")
RANKS = st.lists(st.tuples(DIGEST, st.lists(st.sampled_from(HOSTS), max_size=3, unique=True)), min_size=1, max_size=24)
Ranks = list[tuple[str, list[str]]]


def entry(ranks: Ranks, seq: int = 1) -> Entry:
    """A commit of such ranks: the digest of each, and the hosts that keep it."""
    digests = ByRank.of([digest for digest, _ in ranks], [hosts for _, hosts in ranks])
    return Entry(1, seq, StepCommitted("train", 1, seq, len(ranks), digests, "host", False, "", 0.0))


def digests_of(one: Entry) -> ByRank:
    assert isinstance(one.fact, StepCommitted)
    return one.fact.digests


@given(ranks=RANKS, here=st.sets(st.sampled_from(HOSTS)))
def test_a_successor_knows_what_the_hosts_that_are_here_keep(ranks: Ranks, here: set[str]) -> None:
    """Of every rank of which a keeper is here, whichever journals are read first; of no other."""
    made, log = entry(ranks), FactLog(term=2)
    journals = [
        log.read(host, with_parts([made], host)) for host in sorted(here, key=lambda h: random.Random(h).random())
    ]
    facts = log.adopt(journals)
    assert facts == ([made.fact] if here else [])
    for fact in facts:
        assert isinstance(fact, StepCommitted)
        known = {rank: digest for rank, (digest, hosts) in enumerate(ranks) if here.intersection(hosts)}
        assert fact.digests.values == known
        assert {rank: set(hosts) for rank, hosts in fact.digests.keepers.items()} == {
            rank: here.intersection(ranks[rank][1]) for rank in known
        }


@given(ranks=RANKS, here=st.sets(st.sampled_from(HOSTS)))
def test_readings_of_their_own_come_to_the_same(ranks: Ranks, here: set[str]) -> None:
    """Salvaged journals are read each by itself, and share no entry."""
    made = entry(ranks)
    together, apart = FactLog(term=2), FactLog(term=2)
    together.adopt([together.read(host, with_parts([made], host)) for host in sorted(here)])
    apart.adopt([entries_of(host, with_parts([made], host)) for host in sorted(here)])
    assert [digests_of(e).values for e in together.entries] == [digests_of(e).values for e in apart.entries]


@given(ranks=RANKS, others=st.lists(st.sets(DIGEST, max_size=2), min_size=24, max_size=24), data=st.data())
def test_the_root_chooses_among_what_was_found_elsewhere(
    ranks: Ranks, others: list[set[str]], data: st.DataObject
) -> None:
    """All values are known afterwards, and right, if the right ones are among them; else none is taken."""
    made = digests_of(entry(ranks))
    read = ByRank(made.count, made.root)
    read.learn("a", made.part("a"))
    before = dict(read.values)
    has_all = data.draw(st.booleans())
    options = {rank: others[rank] | ({digest} if has_all else set()) for rank, (digest, _) in enumerate(ranks)}
    tries = 1
    for rank in set(range(made.count)) - before.keys():
        tries *= len(options[rank])
    could = all(ranks[rank][0] in options[rank] for rank in set(range(made.count)) - before.keys())
    assert read.complete(options) == (could and tries <= TRIES_MAX)
    assert read.values == (made.values if could and tries <= TRIES_MAX else before)


def test_an_unknown_value_equals_none() -> None:
    """So no copy counts for a rank whose digest is unknown; but its bytes may be the right ones."""
    read = ByRank(2, b"root")
    read.learn("a", {0: "x"})
    assert list(read) == ["x", ""]
    assert (read.is_possible(0, "x"), read.is_possible(0, "y"), read.is_possible(1, "y")) == (True, False, True)
    read.learn("b", {0: "other", 7: "of no rank"})
    assert list(read) == ["x", ""]


def test_a_journal_that_is_cut_off_lacks_a_fact_rather_than_its_part() -> None:
    """Else the host would have the fact, be given no more of it, and keep nothing."""
    made = entry([("1" * 32, ["a"]), ("2" * 32, ["b"])])
    records = with_parts([made], "a")
    assert len(records) == 2
    assert entries_of("a", records[:1]) == []
    assert [digests_of(e).values for e in entries_of("a", records)] == [{0: "1" * 32}]


def test_parts_stay_and_go_with_their_facts() -> None:
    """In pages, when facts before are dropped, and when a fact is given in a shorter form, which has no ranks."""
    first, second = entry([("1" * 32, ["a"])], 1), entry([("2" * 32, ["a"])], 2)
    journal = list(with_parts([first, second], "a"))
    assert [record for page in paged(journal) for record in page] == journal
    kept = journal_after(journal, WriteJournal(keep=(TermNumber(1, 2),), records=(), seq=2))
    assert kept == list(with_parts([second], "a"))
    shorter = Entry(1, 2, StepCommitted("train", 1, 2, 0, kept_by((), ()), "host", False, "", 0.0))
    assert journal_after(journal, WriteJournal((TermNumber(1, 2),), (shorter.record,), seq=2)) == [shorter.record]


@pytest.mark.parametrize(
    "damage",
    [
        b"\xc0",
        b"\x92\x90\xc4\x01a",
        b"\x92\x91\x92\x00\x02\xc4\x10" + bytes(16),
        b"\x92\x91\x92\xff\x01\xc4\x10" + bytes(16),
    ],
)
def test_a_part_that_is_none_is_refused(damage: bytes) -> None:
    """Nothing, half a digest, one digest for two ranks, a rank below 0."""
    made = entry([("1" * 32, ["a"])])
    part, record = with_parts([made], "a")
    with pytest.raises(ProtocolError, match="memstore down --leftovers"):
        entries_of("a", [part[:17] + damage, record])

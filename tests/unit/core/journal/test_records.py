"""Journal records: equal facts are equal bytes, large ones are packed, what is damaged is refused (R14, R16)."""

from __future__ import annotations

import msgpack
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from memstore.core.cluster import facts as f
from memstore.core.journal import records as r
from memstore.errors import ProtocolError

DIGESTS = st.binary(min_size=16, max_size=16).map(bytes.hex)
RANKS = st.lists(
    st.tuples(DIGESTS | st.text(max_size=40), st.lists(st.text(max_size=8), max_size=3).map(tuple)), max_size=40
)


def commit(digests: list[str], hosts: list[tuple[str, ...]]) -> f.StepCommitted:
    """A commit of so many ranks."""
    return f.StepCommitted("train", 2, 7, len(digests), tuple(digests), tuple(hosts), "rack", True, "why", 1.5)


@given(ranks=RANKS, term=st.integers(1, 1 << 62), seq=st.integers(1, 1 << 62))
def test_a_record_gives_its_entry_back(ranks: list[tuple[str, tuple[str, ...]]], term: int, seq: int) -> None:
    """Whatever the digests are, hexadecimal or not, and whatever hosts are called."""
    entry = r.Entry(term, seq, commit([digest for digest, _ in ranks], [hosts for _, hosts in ranks]))
    again = r.entry_from_record(entry.record)
    assert again == entry
    assert again.record == r.Entry(term, seq, again.fact).record
    assert r.place_of_record(entry.record) == (term, seq)


def test_a_commit_of_many_ranks_is_little_more_than_its_digests() -> None:
    """16 bytes a rank; the names of the hosts are said again and again and cost little."""
    ranks = 4096
    digests = [xxhash.xxh3_128_hexdigest(rank.to_bytes(8)) for rank in range(ranks)]
    hosts = [(f"host-{rank // 8:05d}", f"host-{rank // 8 ^ 1:05d}") for rank in range(ranks)]
    entry = r.Entry(1, 1, commit(digests, hosts))
    assert 16 * ranks < len(entry.record) < 19 * ranks
    assert r.entry_from_record(entry.record) == entry


def test_what_is_no_record_is_refused() -> None:
    """Too short, cut off, of an unknown type, with other fields, or of no end: an error of ours, never another."""
    good = r.Entry(1, 1, commit(["ab" * 16] * 300, [("a", "b")] * 300)).record
    place = good[:16]
    bodies = (["Coup", {}], ["JobRemoved", {"nose": 1}], ["JobRemoved"], 7, ["JobRemoved", []])
    alien = [msgpack.packb(body) for body in bodies]
    for bad in (b"", place, good[:-1], place + good[17:], *(place + body for body in alien)):
        with pytest.raises(ProtocolError):
            r.entry_from_record(bad)


def test_a_record_that_unpacks_to_more_than_a_fact_may_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is made to hold what a few bytes can be blown up to."""
    record = r.Entry(1, 1, commit(["ab" * 16] * 300, [("a", "b")] * 300)).record
    monkeypatch.setattr(r, "BODY_BYTES_MAX", 4000)
    with pytest.raises(ProtocolError, match="4,000"):
        r.entry_from_record(record)


def test_an_order_rewrites_a_journal_appends_to_it_or_keeps_a_part() -> None:
    """The three kinds of journal orders (events.py)."""
    a, b, c = (r.Entry(1, seq, f.JobRemoved(f"job{seq}")).record for seq in (1, 2, 3))
    assert r.journal_after([a], {"reset": False, "records": [b, c]}) == [a, b, c]
    assert r.journal_after([a], {"reset": True, "records": [b]}) == [b]
    assert r.journal_after([a, b, c], {"keep": [[1, 3], [1, 1], [2, 2]], "short": [], "records": []}) == [a, c]

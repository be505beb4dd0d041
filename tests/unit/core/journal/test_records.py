"""Journal records: equal facts are equal bytes, large ones are packed, what is damaged is refused (R14, R16)."""

from __future__ import annotations

import lzma
import typing
from typing import Any

import msgpack
import msgspec
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from memstore.core.cluster import facts as f
from memstore.core.journal import records as r
from memstore.core.wire.orders import TermNumber, WriteJournal
from memstore.errors import ProtocolError
from memstore.testing.fuzz.messages import sample

DIGESTS = st.binary(min_size=16, max_size=16).map(bytes.hex)
RANKS = st.lists(
    st.tuples(DIGESTS | st.text(max_size=40), st.lists(st.text(max_size=8), max_size=3).map(tuple)), max_size=40
)


def commit(digests: list[str], hosts: list[tuple[str, ...]]) -> f.StepCommitted:
    """A commit of so many ranks."""
    return f.StepCommitted("train", 2, 7, len(digests), f.ByRank.of(digests, hosts), "rack", True, "why", 1.5)


@given(ranks=RANKS, term=st.integers(1, 1 << 62), seq=st.integers(1, 1 << 62))
def test_a_record_gives_its_entry_back(ranks: list[tuple[str, tuple[str, ...]]], term: int, seq: int) -> None:
    """Digests may be hexadecimal or not, and hosts may have any name."""
    entry = r.Entry(term, seq, commit([digest for digest, _ in ranks], [hosts for _, hosts in ranks]))
    again = r.entry_from_record(entry.record)
    assert again == entry
    assert again.record == r.Entry(term, seq, again.fact).record
    named = {host for _, hosts in ranks for host in hosts}
    for host in named:
        read = r.entries_of(host, [entry.record, entry.part(host)])[0].fact.digests
        assert read.values == {rank: digest for rank, (digest, hosts) in enumerate(ranks) if host in hosts}
    assert entry.part("nobody, as no name is so long") is None
    assert r.place_of_record(entry.record) == (term, seq)


@pytest.mark.parametrize("ranks", [64, 131_072])
def test_a_commit_costs_a_host_the_same_at_any_size_of_the_job(ranks: int) -> None:
    """Two copies of 8 ranks a host: their digests and the root, less than 1 KiB together."""
    digests = [xxhash.xxh3_128_hexdigest(rank.to_bytes(8)) for rank in range(ranks)]
    hosts = [(f"host-{rank // 8:05d}", f"host-{rank // 8 ^ 1:05d}") for rank in range(ranks)]
    entry = r.Entry(1, 1, commit(digests, hosts))
    part = entry.part(hosts[-1][0])
    assert part is not None
    assert 16 * 16 < len(entry.record) + len(part) < 600
    assert r.entry_from_record(entry.record) == entry


HEAD = r.Entry(1, 1, f.JobRemoved("job")).record[:17]


def test_what_is_no_record_is_refused() -> None:
    """Too short, cut off, or of no end: an error of ours, never another."""
    good = r.Entry(1, 1, commit(["ab" * 16] * 300, [("a", "b")] * 300)).record
    assert good[:17] == HEAD
    for bad in (b"", HEAD[:16], HEAD, good[:-1], HEAD + good[18:]):
        with pytest.raises(ProtocolError):
            r.entry_from_record(bad)


PINNED = {"fact": "StepPinned", "job": "a", "name": "n", "attempt": 1, "step": 2, "needs": [1, 2], "wall_s": 1.5}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        pytest.param({**PINNED, "fact": "Coup"}, "of no kind that is known here.*Coup", id="unknown fact"),
        pytest.param({**PINNED, "nose": 1}, "unknown field `nose`", id="unknown field"),
        pytest.param({k: v for k, v in PINNED.items() if k != "step"}, "missing required field `step`", id="no step"),
        pytest.param({**PINNED, "step": "2"}, r"Expected `int`, got `str` - at `\$.step`", id="text for a number"),
        pytest.param({**PINNED, "step": True}, "got `bool`", id="truth for a number"),
        pytest.param({**PINNED, "job": b"a"}, r"\$.job", id="bytes for text"),
        pytest.param({**PINNED, "needs": 5}, r"\$.needs", id="a number for a list"),
        pytest.param({**PINNED, "needs": [1, None]}, r"\$.needs\[1\]", id="none in a list"),
        pytest.param({**PINNED, "wall_s": "now"}, r"\$.wall_s", id="text for a moment"),
        pytest.param(["StepPinned", PINNED], "of no kind", id="another shape"),
        pytest.param(7, "of no kind that is known here: 7", id="no map"),
        pytest.param({**PINNED, "fact": ["StepPinned"]}, "unhashable", id="kind of another type"),
    ],
)
def test_a_fact_of_other_fields_or_types_is_refused_by_its_place(body: Any, words: str) -> None:
    """What is half understood would be decided by: the error says which field is wrong, and what to do."""
    assert r.entry_from_record(HEAD + msgpack.packb(PINNED)).fact == f.StepPinned("a", "n", 1, 2, (1, 2), 1.5)
    with pytest.raises(ProtocolError, match=rf"{words}.*memstore down --leftovers"):
        r.entry_from_record(HEAD + msgpack.packb(body))


def test_a_fact_with_a_field_twice_is_refused() -> None:
    """Two readers could see two facts."""
    packed = msgpack.packb(PINNED)
    twice = bytes([packed[0] + 1]) + packed[1:] + msgpack.packb("step") + msgpack.packb(9)
    with pytest.raises(ProtocolError, match="different keys"):
        r.entry_from_record(HEAD + twice)


@pytest.mark.parametrize("version", [1, 2, 0x92])
def test_a_record_of_another_format_is_refused_by_its_number(version: int) -> None:
    """Also one of the first format, which had no number: its body began there."""
    record = HEAD[:16] + bytes([version]) + msgpack.packb(PINNED)
    with pytest.raises(ProtocolError, match=f"format {version}, not {r.RECORD_VERSION}"):
        r.entry_from_record(record)


def test_a_record_of_more_elements_than_a_fact_may_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty lists would unfold to 60 times their bytes."""
    monkeypatch.setattr(r, "BODY_ITEMS_MAX", 1000)
    record = r.Entry(1, 1, f.SlotsReserved("job", 1, (), 1, ((1, 2),) * 500)).record
    with pytest.raises(ProtocolError, match="1,000 elements"):
        r.entry_from_record(record)


HOSTS = tuple(f"host-{number:04d}" for number in range(512))


def test_the_hosts_of_an_attempt_are_packed() -> None:
    """Their names are most of its record, which every host gets."""
    fact = sample(f.AttemptOpened, is_full=True)
    fact = msgspec.structs.replace(fact, hosts=tuple(host for host in HOSTS for _ in range(8)))
    record = r.Entry(1, 1, fact).record
    assert len(record) < 1_000
    assert r.entry_from_record(record).fact == fact


@pytest.mark.parametrize(
    ("body", "words"),
    [
        pytest.param(lzma.compress(msgpack.packb(PINNED))[:-20], "cut off", id="cut off"),
        pytest.param(lzma.compress(msgpack.packb({**PINNED, "name": "n" * 5000})), "more than 4,096 bytes", id="long"),
        pytest.param(lzma.compress(b"", filters=[{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 30}]), "", id="window"),
        pytest.param(b"\xfd7zXZ\x00" + bytes(20), "", id="no stream"),
    ],
)
def test_a_packed_fact_that_is_none_or_would_take_much_memory_is_refused(
    body: bytes, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few bytes can unfold to gigabytes, or ask for a window of them."""
    monkeypatch.setattr(r, "BODY_BYTES_MAX", 4096)
    with pytest.raises(ProtocolError, match=rf"{words}.*memstore down --leftovers"):
        r.entry_from_record(HEAD + body)


KINDS = typing.get_args(f.Fact)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("is_full", [True, False])
def test_every_fact_comes_back_equal(kind: type[msgspec.Struct], is_full: bool) -> None:
    """Of every type, with all fields set and with as few as it may have."""
    fact: Any = sample(kind, is_full=is_full)
    assert r.entry_from_record(r.Entry(1, 1, fact).record).fact == fact


def test_a_record_that_unpacks_to_more_than_a_fact_may_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process is made to hold what a few bytes can be blown up to."""
    record = r.Entry(1, 1, f.SlotsReserved("job", 1, (1,) * 5000, 1)).record
    monkeypatch.setattr(r, "BODY_BYTES_MAX", 4000)
    with pytest.raises(ProtocolError, match="4,000"):
        r.entry_from_record(record)


def test_an_order_rewrites_a_journal_appends_to_it_or_keeps_a_part() -> None:
    """By which records it keeps: all, none, or those at some places."""
    a, b, c = (r.Entry(1, seq, f.JobRemoved(f"job{seq}")).record for seq in (1, 2, 3))
    assert r.journal_after([a], WriteJournal(keep=None, records=(b, c), seq=3)) == [a, b, c]
    assert r.journal_after([a], WriteJournal(keep=(), records=(b,), seq=2)) == [b]
    places = (TermNumber(1, 3), TermNumber(1, 1), TermNumber(2, 2))
    assert r.journal_after([a, b, c], WriteJournal(keep=places, records=(), seq=3)) == [a, c]

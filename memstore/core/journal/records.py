"""Records: facts as they lie in journals and travel, the same bytes everywhere, and hosts' parts of them (R16). Pure.

    offset  0  term     u64  of the controller that recorded it
            8  seq      u64
           16  version  u8   RECORD_VERSION; with bit 6: a host's part of the fact at this place
           17  body          the fact as msgpack, by field; from PACKED_BYTES_MIN on an xz stream of that

Little endian. What a fact says of each rank (`ByRank`) stands in it as [how many, root digest]. Before the record a
host has its part: [runs of ranks, values] of what it keeps, digests as the bytes they are. A holder, which only keeps
records, needs no more than the first two fields. Everything else is decoded as the types in `cluster/facts.py`, or
refused: a journal of another format must not be half understood.
"""

from __future__ import annotations

import contextlib
import lzma
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, get_args

import msgpack
import msgspec

from memstore.core.cluster.facts import COLUMNS, ByRank, Fact, column_of
from memstore.core.format.releases import reader_of
from memstore.core.wire.codec import check_body
from memstore.core.wire.orders import WriteJournal
from memstore.errors import ProtocolError

RECORD_VERSION = 12
PACKED_BYTES_MIN = 4 << 10
"""An attempt of some hundred ranks: most of it is the names of hosts, again and again."""
BODY_BYTES_MAX = 64 << 20
"""Size limit of one unpacked fact; one of 2**20 ranks has some 50 MB."""
BODY_ITEMS_MAX = 8 << 20
"""Elements of all arrays and maps of one fact; one of 2**20 ranks with three copies has some 5 million."""
PAGE_BYTES = 8 << 20
"""Bytes of a journal in one message, which has at most twice as much: attempts of many ranks are kept."""
DIGEST_BYTES = 16
_PLACE, _HEAD = struct.Struct("<QQ"), struct.Struct("<QQB")
_PART = 0x40
_XZ = 0xFD  # the first byte of its streams, and of no msgpack map
_UNPACKING_BYTES_MAX = 32 << 20  # of the window and state; what we pack takes 9 MiB
_ENCODER = msgspec.msgpack.Encoder()
_KINDS: dict[str, type[Fact]] = {kind.__name__: kind for kind in get_args(Fact)}
_NO_FACT = (ValueError, TypeError, msgspec.MsgspecError, msgpack.UnpackException, RecursionError, lzma.LZMAError)
_PART_BODY = msgspec.msgpack.Decoder(tuple[list[tuple[int, int]], bytes | tuple[str, ...]])
_NOTED = [msgspec.msgpack.Decoder(kind) for kind in _KINDS.values()]  # before any thread decodes: see codec.Decoder


@dataclass(frozen=True)
class Entry:
    """A fact with its place in the journal: ordered by (term, seq)."""

    term: int
    seq: int
    fact: Fact

    @cached_property
    def record(self) -> bytes:
        """Return the entry as holders keep it; see the module docstring."""
        kind = type(self.fact).__name__
        values = {"fact": kind, **msgspec.structs.asdict(self.fact)}
        column = column_of(self.fact)
        if column is not None:
            values[COLUMNS[kind]] = [column.count, column.root]
        body = _ENCODER.encode(values)
        if len(body) >= PACKED_BYTES_MIN:
            body = lzma.compress(body)  # one record goes to all hosts: 15 ms for 180 KB, and a fifth of zlib's bytes
        return _HEAD.pack(self.term, self.seq, RECORD_VERSION) + body

    def part(self, host: str) -> bytes | None:
        """Return the record of what a host keeps of the fact, if it does."""
        column = column_of(self.fact)
        part = column.part(host) if column is not None else None
        if not part:
            return None
        head = _HEAD.pack(self.term, self.seq, RECORD_VERSION | _PART)
        return head + _ENCODER.encode([_runs(part), _joined(tuple(part.values()))])


def place_of_record(record: bytes) -> tuple[int, int]:
    """Return (term, seq) of a record; ProtocolError if it is none."""
    if len(record) <= _HEAD.size:
        raise ProtocolError(f"a journal record has more than {_HEAD.size} bytes, not {len(record)}")
    term, seq = _PLACE.unpack_from(record)
    return term, seq


def other_format(record: bytes) -> str:
    """Return that a record is of another format, and who reads it; "" if it is of ours, or no record."""
    version = record[_PLACE.size] if len(record) > _HEAD.size else RECORD_VERSION
    if version in (RECORD_VERSION, RECORD_VERSION | _PART):
        return ""
    return f"its records have format {version}, not {RECORD_VERSION}: {reader_of('journal', version)}"


def is_part(record: bytes) -> bool:
    """Return whether a record is a host's part of a fact, and no fact."""
    return len(record) > _HEAD.size and record[_PLACE.size] == RECORD_VERSION | _PART


def entry_from_record(record: bytes) -> Entry:
    """Return the entry of a record; ProtocolError if it is none."""
    term, seq = place_of_record(record)
    with _as_protocol_error():
        body = _body(record, RECORD_VERSION)
        entry = Entry(term, seq, _fact(_unpacked(body) if body[0] == _XZ else body))
    entry.__dict__["record"] = record  # the same object as kept elsewhere: equal facts are equal bytes
    return entry


def part_from_record(record: bytes) -> dict[int, str]:
    """Return the values of a host's part of a fact, by rank; ProtocolError if the record is none."""
    place_of_record(record)
    with _as_protocol_error():
        body = _body(record, RECORD_VERSION | _PART)
        check_body(body, items_max=BODY_ITEMS_MAX, bytes_max=BODY_BYTES_MAX)
        runs, values = _PART_BODY.decode(body)
        texts = _split(values) if isinstance(values, bytes) else values
        if any(first < 0 or count < 1 for first, count in runs) or sum(count for _, count in runs) != len(texts):
            raise ValueError(f"a part of {len(texts)} values for ranks {str(runs)[:80]}")
        return dict(zip((rank for first, count in runs for rank in range(first, first + count)), texts, strict=True))


def entries_of(host: str, records: Iterable[bytes], known: dict[tuple[int, int], Entry] | None = None) -> list[Entry]:
    """Return the facts of a host's journal in its order, with what the host keeps of them.

    Args:
        host: Whose journal it is.
        records: Of its journal; ProtocolError if one cannot be read.
        known: Entries that were read before, by place: nearly all journals have the same, so each is unpacked once and
            kept once. It grows.
    """
    known = {} if known is None else known
    entries: dict[tuple[int, int], Entry] = {}
    parts: list[tuple[tuple[int, int], bytes]] = []
    for record in records:
        place = place_of_record(record)
        if is_part(record):
            parts.append((place, record))
            continue
        entry = known.get(place)
        if entry is None or entry.record != record:
            entry = entry_from_record(record)
            known.setdefault(place, entry)
        entries[place] = entry
    for place, record in parts:
        column = column_of(entries[place].fact) if place in entries else None
        if column is not None:
            column.learn(host, part_from_record(record))
    return list(entries.values())


def with_parts(entries: Iterable[Entry], host: str) -> tuple[bytes, ...]:
    """Return the records of entries, before each the part that a host keeps of it: cut off there, it lacks both."""
    return tuple(record for entry in entries for record in (entry.part(host), entry.record) if record is not None)


@contextlib.contextmanager
def _as_protocol_error() -> Iterator[None]:
    try:
        yield
    except _NO_FACT as exc:
        raise ProtocolError(
            f"not a journal fact that this version of memstore understands ({str(exc)[:300] or repr(exc)}): use the "
            "one that left it, or remove the arena with `memstore down --leftovers --discard`"
        ) from exc


def _body(record: bytes, version: int) -> memoryview:
    if record[_PLACE.size] != version:
        raise ValueError(other_format(record) or "a part where a fact is expected, or a fact where a part is")
    return memoryview(record)[_HEAD.size :]


def _fact(body: bytes | memoryview) -> Fact:
    """Return the fact that a record's body is; ValueError or TypeError if it is none of ours."""
    check_body(body, items_max=BODY_ITEMS_MAX, bytes_max=BODY_BYTES_MAX)
    values = msgspec.msgpack.decode(body)
    if not isinstance(values, dict) or values.get("fact") not in _KINDS:
        raise ValueError(f"of no kind that is known here: {str(values)[:80]}")
    if values["fact"] in COLUMNS:
        name = COLUMNS[values["fact"]]
        values[name] = ByRank(*msgspec.convert(values.get(name), tuple[Annotated[int, msgspec.Meta(ge=0)], bytes]))
    # Of one type, not of their union: msgspec prepares a union again for every call.
    fact: Fact = msgspec.convert(values, _KINDS[values["fact"]])
    return fact


def whole_order(pages: list[bytes], order: WriteJournal) -> WriteJournal | None:
    """Return an order with the records of its former pages, which `pages` keeps until then.

    None for a page that is not the last: if the controller dies now, the journal must be what it was. All hosts may
    be replaced at once, and what was not sent yet would be nowhere (D134).
    """
    pages += order.records
    if order.has_more:
        return None
    whole = msgspec.structs.replace(order, records=tuple(pages))
    pages.clear()
    return whole


def journal_after(journal: Iterable[bytes], order: WriteJournal) -> list[bytes]:
    """Return a journal as it is once a whole order has been obeyed."""
    if not order.keep:
        return [*(journal if order.keep is None else ()), *order.records]
    wanted = {(place.term, place.number) for place in order.keep}
    new = {place_of_record(record): record for record in order.records}
    shorter, kept = new.keys() & wanted, list[bytes]()
    for record in journal:
        place = place_of_record(record)
        if place in wanted and not (place in shorter and is_part(record)):
            kept.append(new.pop(place, record))
    return [*kept, *new.values()]


def paged(records: Iterable[bytes]) -> list[tuple[bytes, ...]]:
    """Return records in pages, of which the last may be empty, for messages of bounded size."""
    pages: list[list[bytes]] = [[]]
    nbytes = 0
    for record in records:
        if nbytes + len(record) > PAGE_BYTES and pages[-1]:
            pages.append([])
            nbytes = 0
        pages[-1].append(record)
        nbytes += len(record)
    return [tuple(page) for page in pages]


def _unpacked(body: memoryview) -> bytes:
    stream = lzma.LZMADecompressor(lzma.FORMAT_XZ, _UNPACKING_BYTES_MAX)
    data = stream.decompress(body, BODY_BYTES_MAX)
    if not stream.eof:
        raise ValueError(f"a fact of more than {BODY_BYTES_MAX:,} bytes, or one that is cut off")
    return data


def _runs(ranks: Iterable[int]) -> list[tuple[int, int]]:
    """Return ranks as runs of neighbours: the first of each, and how many."""
    found: list[tuple[int, int]] = []
    first = after = 0
    for rank in ranks:
        if rank != after:
            if after > first:
                found.append((first, after - first))
            first = rank
        after = rank + 1
    return [*found, (first, after - first)] if after > first else found


def _joined(digests: tuple[str, ...]) -> bytes | tuple[str, ...]:
    """Return digests joined as bytes, if all values are digests (R14)."""
    joined = "".join(digests)
    try:
        data = bytes.fromhex(joined)
    except ValueError:
        return digests
    is_alike = data.hex() == joined and {*map(len, digests)} <= {2 * DIGEST_BYTES}
    return data if is_alike else digests


def _split(data: bytes) -> tuple[str, ...]:
    if len(data) % DIGEST_BYTES:
        raise ValueError(f"digests have {DIGEST_BYTES} bytes each, these {len(data)} together")
    return tuple(data[at : at + DIGEST_BYTES].hex() for at in range(0, len(data), DIGEST_BYTES))

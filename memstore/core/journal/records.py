"""Records: facts as they lie in journals and travel, made once and the same bytes everywhere (R16). Pure.

    offset  0  term   u64  of the controller that recorded it
            8  seq    u64
           16  body        msgpack [type, values by name]; from PACKED_BYTES_MIN on zlib's stream of that

Little endian. Digests stand in it as the bytes they are. Whoever only keeps records needs no more than the first two
fields. Unknown types are refused: a journal of a newer format must not be half understood.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import msgpack

from memstore.core.cluster.facts import FACT_TYPES, Fact
from memstore.errors import ProtocolError

PACKED_BYTES_MIN = 4 << 10
"""A commit of more than a hundred ranks or so: most of it is the names of hosts, again and again."""
BODY_BYTES_MAX = 64 << 20
"""Of one fact unpacked; one of 2**20 ranks has some 50 MB."""
PAGE_BYTES = 8 << 20
"""Of a journal in one message, which has at most twice as much: attempts of many ranks are kept for their lineage."""
DIGEST_BYTES = 16
_PLACE = struct.Struct("<QQ")
_ZLIB = 0x78  # first byte of its streams; a msgpack array of two begins with 0x92


@dataclass(frozen=True)
class Entry:
    """A fact with its place in the journal: ordered by (term, seq)."""

    term: int
    seq: int
    fact: Fact

    @cached_property
    def record(self) -> bytes:
        """The entry as holders keep it; see the module docstring."""
        values = {f.name: getattr(self.fact, f.name) for f in fields(self.fact)}
        if "digests" in values:
            values["digests"] = _joined(values["digests"])
        body: bytes = msgpack.packb([type(self.fact).__name__, values])
        if len(body) >= PACKED_BYTES_MIN:
            body = zlib.compress(body, 1)
        return _PLACE.pack(self.term, self.seq) + body


def place_of_record(record: bytes) -> tuple[int, int]:
    """Return (term, seq) of a record; ProtocolError if it is none."""
    if len(record) <= _PLACE.size:
        raise ProtocolError(f"a journal record has more than {_PLACE.size} bytes, not {len(record)}")
    term, seq = _PLACE.unpack_from(record)
    return term, seq


def entry_from_record(record: bytes) -> Entry:
    """Return the entry of a record; ProtocolError if it is none."""
    term, seq = place_of_record(record)
    try:
        body = memoryview(record)[_PLACE.size :]
        kind, values = msgpack.unpackb(_unpacked(body) if body[0] == _ZLIB else body, strict_map_key=False)
        if isinstance(values.get("digests"), bytes):
            values["digests"] = _split(values["digests"])
        entry = Entry(term, seq, FACT_TYPES[kind](**{name: _tuples(item) for name, item in values.items()}))
    except (KeyError, TypeError, ValueError, AttributeError, msgpack.UnpackException, zlib.error) as exc:
        raise ProtocolError(
            f"not a journal fact that this version of memstore understands ({exc!r}): use the one that "
            "left it, or remove the arena with `memstore down --leftovers --discard`"
        ) from exc
    entry.__dict__["record"] = record  # what is kept elsewhere too: equal facts are equal bytes
    return entry


def whole_order(pages: list[bytes], order: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return an order (`journal` in events.py) with the records of its former pages, which `pages` keeps until then.

    None for a page that is not the last: if the controller dies now, the journal must be what it was. All hosts may
    be written anew at once, and what was not sent yet would be nowhere (D134).
    """
    pages += order["records"]
    if order.get("is_page"):
        return None
    whole = {**order, "records": list(pages)}
    pages.clear()
    return whole


def journal_after(journal: list[bytes], order: Mapping[str, Any]) -> list[bytes]:
    """Return a journal as it is once a whole order has been obeyed."""
    if "keep" in order:
        before = kept_records(journal, order["keep"], order["short"])
    else:
        before = [] if order["reset"] else journal
    return [*before, *order["records"]]


def kept_records(records: Iterable[bytes], places: Iterable[Any], short: Iterable[bytes]) -> list[bytes]:
    """Return those records of a journal, in their order, whose (term, seq) is among `places`.

    Records of `short` take the place of those that are called the same.
    """
    wanted: Collection[tuple[int, int]] = {(int(term), int(seq)) for term, seq in places}
    shorter = {place_of_record(record): record for record in short}
    found = ((place_of_record(record), record) for record in records)
    return [shorter.get(place, record) for place, record in found if place in wanted]


def paged(records: Iterable[bytes]) -> list[list[bytes]]:
    """Return records in pages, of which the last may be empty, for messages of bounded size."""
    pages: list[list[bytes]] = [[]]
    nbytes = 0
    for record in records:
        if nbytes + len(record) > PAGE_BYTES and pages[-1]:
            pages.append([])
            nbytes = 0
        pages[-1].append(record)
        nbytes += len(record)
    return pages


def _unpacked(body: memoryview) -> bytes:
    stream = zlib.decompressobj()
    data = stream.decompress(body, BODY_BYTES_MAX)
    if not stream.eof:
        raise ValueError(f"a fact of more than {BODY_BYTES_MAX:,} bytes, or one that is cut off")
    return data


def _joined(digests: tuple[str, ...]) -> bytes | tuple[str, ...]:
    """Return digests as bytes one after the other, if that is what they are (R14)."""
    try:
        data = bytes.fromhex("".join(digests))
    except ValueError:
        return digests
    return data if _split(data) == digests else digests


def _split(data: bytes) -> tuple[str, ...]:
    if len(data) % DIGEST_BYTES:
        raise ValueError(f"digests have {DIGEST_BYTES} bytes each, these {len(data)} together")
    return tuple(data[at : at + DIGEST_BYTES].hex() for at in range(0, len(data), DIGEST_BYTES))


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value

"""Records: facts as they lie in journals and travel, made once and the same bytes everywhere (R16). Pure.

    offset  0  term     u64  of the controller that recorded it
            8  seq      u64
           16  version  u8   RECORD_VERSION
           17  body          the fact as msgpack, by field; from PACKED_BYTES_MIN on zlib's stream of that

Little endian. Digests stand in it as the bytes they are. A holder, which only keeps records, needs no more than the
first two fields. Everything else is decoded as the types in `cluster/facts.py`, or refused: a journal of another format
must not be half understood.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import get_args

import msgpack
import msgspec

from memstore.core.cluster.facts import Fact
from memstore.core.format.releases import reader_of
from memstore.core.wire.codec import check_body
from memstore.core.wire.orders import WriteJournal
from memstore.errors import ProtocolError

RECORD_VERSION = 10
PACKED_BYTES_MIN = 4 << 10
"""A commit of more than a hundred ranks or so: most of it is the names of hosts, again and again."""
BODY_BYTES_MAX = 64 << 20
"""Size limit of one unpacked fact; one of 2**20 ranks has some 50 MB."""
BODY_ITEMS_MAX = 8 << 20
"""Elements of all arrays and maps of one fact; one of 2**20 ranks with three copies has some 5 million."""
PAGE_BYTES = 8 << 20
"""Bytes of a journal in one message, which has at most twice as much: attempts of many ranks are kept."""
DIGEST_BYTES = 16
_PLACE, _HEAD = struct.Struct("<QQ"), struct.Struct("<QQB")
_ZLIB = 0x78  # the first byte of its streams, and of no msgpack map
_ENCODER = msgspec.msgpack.Encoder()
_KINDS: dict[str, type[Fact]] = {kind.__name__: kind for kind in get_args(Fact)}
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
        values = {"fact": type(self.fact).__name__, **msgspec.structs.asdict(self.fact)}
        if "digests" in values:
            values["digests"] = _joined(values["digests"])
        body = _ENCODER.encode(values)
        if len(body) >= PACKED_BYTES_MIN:
            body = zlib.compress(body, 1)
        return _HEAD.pack(self.term, self.seq, RECORD_VERSION) + body


def place_of_record(record: bytes) -> tuple[int, int]:
    """Return (term, seq) of a record; ProtocolError if it is none."""
    if len(record) <= _HEAD.size:
        raise ProtocolError(f"a journal record has more than {_HEAD.size} bytes, not {len(record)}")
    term, seq = _PLACE.unpack_from(record)
    return term, seq


def other_format(record: bytes) -> str:
    """Return that a record is of another format, and who reads it; "" if it is of ours, or no record."""
    version = record[_PLACE.size] if len(record) > _HEAD.size else RECORD_VERSION
    if version == RECORD_VERSION:
        return ""
    return f"its records have format {version}, not {RECORD_VERSION}: {reader_of('journal', version)}"


def entry_from_record(record: bytes) -> Entry:
    """Return the entry of a record; ProtocolError if it is none."""
    term, seq = place_of_record(record)
    version, body = record[_PLACE.size], memoryview(record)[_HEAD.size :]
    try:
        if version != RECORD_VERSION:
            raise ValueError(other_format(record))
        entry = Entry(term, seq, _fact(_unpacked(body) if body[0] == _ZLIB else body))
    except (ValueError, TypeError, msgspec.MsgspecError, msgpack.UnpackException, RecursionError, zlib.error) as exc:
        raise ProtocolError(
            f"not a journal fact that this version of memstore understands ({str(exc)[:300] or repr(exc)}): use the "
            "one that left it, or remove the arena with `memstore down --leftovers --discard`"
        ) from exc
    entry.__dict__["record"] = record  # the same object as kept elsewhere: equal facts are equal bytes
    return entry


def _fact(body: bytes | memoryview) -> Fact:
    """Return the fact that a record's body is; ValueError or TypeError if it is none of ours."""
    check_body(body, items_max=BODY_ITEMS_MAX, bytes_max=BODY_BYTES_MAX)
    values = msgspec.msgpack.decode(body)
    if not isinstance(values, dict) or values.get("fact") not in _KINDS:
        raise ValueError(f"of no kind that is known here: {str(values)[:80]}")
    if isinstance(values.get("digests"), bytes):
        values["digests"] = _split(values["digests"])
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
    found = ((place_of_record(record), record) for record in journal)
    kept = [new.pop(place, record) for place, record in found if place in wanted]
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
    stream = zlib.decompressobj()
    data = stream.decompress(body, BODY_BYTES_MAX)
    if not stream.eof:
        raise ValueError(f"a fact of more than {BODY_BYTES_MAX:,} bytes, or one that is cut off")
    return data


def _joined(digests: tuple[str, ...]) -> bytes | tuple[str, ...]:
    """Return digests joined as bytes, if all values are digests (R14)."""
    try:
        data = bytes.fromhex("".join(digests))
    except ValueError:
        return digests
    return data if _split(data) == digests else digests


def _split(data: bytes) -> tuple[str, ...]:
    if len(data) % DIGEST_BYTES:
        raise ValueError(f"digests have {DIGEST_BYTES} bytes each, these {len(data)} together")
    return tuple(data[at : at + DIGEST_BYTES].hex() for at in range(0, len(data), DIGEST_BYTES))

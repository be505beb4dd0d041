"""Frames: what is packed comes back, and nothing a stranger sends gets past the limits (R14, I20)."""

from __future__ import annotations

import struct

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memstore import errors
from memstore.core.wire import frame as wire
from memstore.core.wire.frame import Kind

calm = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


@calm
@given(st.sampled_from(Kind), st.integers(0, 2**64 - 1), st.binary(max_size=100), st.integers(0, wire.BULK_BYTES_MAX))
def test_headers_round_trip(kind: Kind, request_id: int, body: bytes, bulk_bytes: int) -> None:
    """A packed header has 32 bytes, unpacks to the same values, and its crc fits its body."""
    data = wire.pack_header(kind, request_id, body, bulk_bytes)
    header = wire.unpack_header(data)
    assert len(data) == wire.HEADER_BYTES == 32
    assert header[:4] == (kind, request_id, len(body), bulk_bytes)
    wire.check_crc(data, body)


def forged(**fields: int | bytes) -> bytes:
    """A header with chosen fields that pack_header would refuse."""
    default = {"magic": wire.MAGIC, "version": wire.VERSION, "kind": 10, "flags": 0, "id": 1, "body": 0, "bulk": 0}
    return struct.pack("<4sBBHQIQI", *{**default, **fields}.values(), 0)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"magic": b"GET "}, "not memstore"),
        ({"version": 1}, f"wire version 1, this process {wire.VERSION}"),
        ({"kind": 99}, "kind 99"),
        ({"flags": 1}, "flags 0x1"),
        ({"body": wire.BODY_BYTES_MAX + 1}, "16,777,217 bytes, the limit is 16,777,216"),
        ({"body": 2**32 - 1}, "the limit"),
        ({"bulk": wire.BULK_BYTES_MAX + 1}, "the limit is 67,108,864"),
        ({"bulk": 2**63}, "the limit"),
    ],
)
def test_bad_headers_are_refused_by_field_and_limit(fields: dict[str, int], words: str) -> None:
    """Each wrong field is named with its limit."""
    wire.unpack_header(forged())
    with pytest.raises(errors.ProtocolError, match=words):
        wire.unpack_header(forged(**fields))


def test_a_stranger_gets_handshake_kinds_small_bodies_and_no_bulk() -> None:
    """Before authentication the caps are 4 KiB and zero, and a CALL is out of order (I19)."""
    assert wire.unpack_header(forged(kind=1, body=4096), authenticated=False).kind is Kind.HELLO
    for fields in ({"kind": 10}, {"kind": 1, "body": 4097}, {"kind": 1, "bulk": 1}):
        with pytest.raises(errors.ProtocolError):
            wire.unpack_header(forged(**fields), authenticated=False)


@calm
@given(st.binary(max_size=64) | st.binary(min_size=27, max_size=27).map(lambda tail: b"MSTO\x02" + tail))
def test_any_header_bytes_give_a_header_within_limits_or_a_protocol_error(data: bytes) -> None:
    """No bytes at all make unpack_header do anything else."""
    try:
        header = wire.unpack_header(data)
    except errors.ProtocolError:
        return
    assert header.body_bytes <= wire.BODY_BYTES_MAX
    assert header.bulk_bytes <= wire.BULK_BYTES_MAX


@calm
@given(st.integers(0, 35 * 8 - 1))
def test_every_flipped_bit_of_header_or_body_is_noticed(bit: int) -> None:
    """One flipped bit anywhere is a ProtocolError from the fields or from the crc (fault F21)."""
    body = b"\x81\xa1a"
    frame = bytearray(wire.pack_header(Kind.EVENT, 5, body, 7) + body)
    frame[bit // 8] ^= 1 << bit % 8

    def receive() -> None:
        wire.unpack_header(frame[:32])
        wire.check_crc(frame[:32], frame[32:])

    with pytest.raises(errors.ProtocolError):
        receive()

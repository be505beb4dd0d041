"""Frames and bodies: what is packed comes back, and nothing a stranger sends gets past the limits (R14, I20)."""

from __future__ import annotations

import pickle
import struct
import tracemalloc

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memstore import errors
from memstore.core.wire import frame as wire
from memstore.core.wire.frame import Kind

calm = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False)
values = st.recursive(
    scalars | st.text(max_size=20) | st.binary(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5) | st.integers(0, 9), inner, max_size=4)
    ),
    max_leaves=20,
)


@calm
@given(st.sampled_from(Kind), st.integers(0, 2**64 - 1), st.binary(max_size=100), st.integers(0, wire.BULK_BYTES_MAX))
def test_headers_round_trip(kind: Kind, request_id: int, body: bytes, bulk_bytes: int) -> None:
    """A packed header has 32 bytes, unpacks to the same values, and its crc fits its body."""
    data = wire.pack_header(kind, request_id, body, bulk_bytes)
    header = wire.unpack_header(data)
    assert len(data) == wire.HEADER_BYTES == 32
    assert header[:4] == (kind, request_id, len(body), bulk_bytes)
    wire.check_crc(data, body)


@calm
@given(st.dictionaries(st.text(max_size=8), values, max_size=6))
def test_bodies_round_trip(body: dict[str, object]) -> None:
    """What pack_body accepts comes back equal."""
    assert wire.unpack_body(wire.pack_body(body)) == body


def forged(**fields: int | bytes) -> bytes:
    """A header with chosen fields that pack_header would refuse."""
    default = {"magic": wire.MAGIC, "version": wire.VERSION, "kind": 10, "flags": 0, "id": 1, "body": 0, "bulk": 0}
    return struct.pack("<4sBBHQIQI", *{**default, **fields}.values(), 0)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"magic": b"GET "}, "not memstore"),
        ({"version": 1}, "wire version 1, this process 4"),
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
    body = wire.pack_body({"a": 1})[:3]
    frame = bytearray(wire.pack_header(Kind.EVENT, 5, body, 7) + body)
    frame[bit // 8] ^= 1 << bit % 8

    def receive() -> None:
        wire.unpack_header(frame[:32])
        wire.check_crc(frame[:32], frame[32:])

    with pytest.raises(errors.ProtocolError):
        receive()


@settings(calm, max_examples=400)
@given(st.binary(max_size=300) | values.map(lambda value: msgpack.packb(value)[:-1]), st.booleans())
def test_any_body_bytes_give_a_dict_or_a_protocol_error(data: bytes, authenticated: bool) -> None:
    """No bytes at all make unpack_body do anything else."""
    try:
        body = wire.unpack_body(data, authenticated=authenticated)
    except errors.ProtocolError:
        return
    assert all(type(key) is str for key in body)


def nested(depth: int, opening: bytes = b"\x91") -> bytes:
    return b"\x81\xa1a" + opening * depth + b"\x90"


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(msgpack.packb([1]), id="not a map"),
        pytest.param(msgpack.packb({1: 2}), id="top-level key not a string"),
        pytest.param(msgpack.packb({"a": {1.5: 2}}), id="float key"),
        pytest.param(b"\x81\xa1a\x81\x90\x01", id="list as a key"),
        pytest.param(msgpack.packb({"a": msgpack.Timestamp(1)}), id="timestamp extension"),
        pytest.param(msgpack.packb({"a": msgpack.ExtType(5, b"x")}), id="extension"),
        pytest.param(b"\x81\xa1a\xc7\x00\x05", id="empty extension"),
        pytest.param(b"\x81\xa1a\xa2\xff\xfe", id="text that is not utf-8"),
        pytest.param(b"\x81\xa1a\xdd\xff\xff\xff\xff", id="array of 2**32-1"),
        pytest.param(b"\xdf\xff\xff\xff\xff", id="map of 2**32-1"),
        pytest.param(b"\x81\xa1a\xdb\xff\xff\xff\xff", id="text of 2**32-1"),
        pytest.param(b"\x81\xa1a\xc6\xff\xff\xff\xff", id="bytes of 2**32-1"),
        pytest.param(msgpack.packb({"a": 1}) + b"\x00", id="bytes after the end"),
        pytest.param(nested(wire.BODY_DEPTH_MAX), id="too deep"),
        pytest.param(nested(5000), id="far too deep"),
        pytest.param(pickle.dumps({"a": 1}), id="pickle"),
        pytest.param(b"", id="empty"),
    ],
)
def test_hostile_bodies_are_refused(data: bytes) -> None:
    """Each trick of the format is a ProtocolError (fault F33)."""
    with pytest.raises(errors.ProtocolError):
        wire.unpack_body(data)


def test_depth_within_the_limit_is_accepted() -> None:
    """The depth limit refuses what is beyond it and nothing else."""
    assert wire.unpack_body(nested(wire.BODY_DEPTH_MAX - 2))


def test_body_too_large_is_refused_on_both_ends() -> None:
    """The byte limit holds for the sender, for the receiver, and more strictly for a stranger."""
    with pytest.raises(errors.ProtocolError, match="pages"):
        wire.pack_body({"a": bytes(wire.BODY_BYTES_MAX)})
    with pytest.raises(errors.ProtocolError, match="exceeds"):
        wire.unpack_body(bytes(wire.BODY_BYTES_MAX + 1))
    with pytest.raises(errors.ProtocolError, match="exceeds"):
        wire.unpack_body(wire.pack_body({"a": bytes(5000)}), authenticated=False)


def test_a_length_beyond_the_bytes_there_are_is_refused_as_a_length() -> None:
    """An array may not announce more elements than the body has bytes."""
    with pytest.raises(errors.ProtocolError, match="max_array_len"):
        wire.unpack_body(b"\x81\xa1a\xdd\x00\x00\x00\xff")


def test_refusing_a_body_of_tiny_objects_costs_bounded_memory() -> None:
    """A stranger's 4 KiB of nested or many containers never cost more than 1 MiB (I20)."""
    many = b"\x81\xa1a\xdc\x0f\xf0" + b"\x90" * 4080
    deep = b"\x81\xa1a" + b"\xdc\x00\x40" * 900
    claim = b"\x81\xa1a\xdd\x01\x00\x00\x00"
    for data in (many, deep, claim):
        tracemalloc.start()
        try:
            with pytest.raises(errors.ProtocolError):
                wire.unpack_body(data, authenticated=False)
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()


def test_the_number_of_elements_of_all_containers_is_bounded() -> None:
    """Many small lists count like one long one."""
    lists = [[0] * 1000] * (wire.BODY_ITEMS_MAX // 1000 + 1)
    with pytest.raises(errors.ProtocolError, match="elements"):
        wire.unpack_body(wire.pack_body({"a": lists}))


@pytest.mark.parametrize("body", [{"a": object()}, {"a": 1 << 70}, {"a": "\ud800"}, {1: 2}])
def test_what_cannot_be_encoded_is_refused_by_the_sender(body: dict[str, object]) -> None:
    """A body of ours that no peer could read is an error here, not there."""
    with pytest.raises(errors.ProtocolError):
        wire.pack_body(body)

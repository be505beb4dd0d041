"""Markers and part headers: any damage is found, and a sound digest is not trusted to vouch for fields (R31)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from memstore.core.durable.markers import decode_marker, encode_marker
from memstore.core.durable.slice_format import (
    SLICE_LIMIT_BYTES,
    SliceHeader,
    decode_header,
    header_nbytes,
    slice_chunks,
    slice_range,
    slices_count,
)
from memstore.core.wire.orders import Lineage
from memstore.errors import ConfigError, IntegrityError
from memstore.testing.data.durable_steps import JOB, lineage_of
from recovery.inventory import DurableMarker, ShardSpec, StepId

HEX = st.binary(min_size=16, max_size=16).map(bytes.hex)


@st.composite
def marker_values(draw: st.DrawFn) -> DurableMarker:
    world_size = draw(st.integers(1, 6))
    specs = {}
    for rank in range(world_size):
        nbytes, chunk_bytes = draw(st.integers(0, 1 << 40)), draw(st.integers(1, 1 << 30))
        specs[rank] = ShardSpec(draw(HEX), nbytes, chunk_bytes, -(-nbytes // chunk_bytes), world_size)
    return DurableMarker(StepId(draw(st.integers(0, 1 << 40)), draw(st.integers(0, 1 << 40))), world_size, specs)


@given(marker=marker_values(), cut=st.integers(0, 10**6), flip=st.integers(0, 10**6))
def test_marker_records_round_trip_and_no_damage_passes(marker: DurableMarker, cut: int, flip: int) -> None:
    """Any marker comes back equal; any prefix and any flipped bit is an IntegrityError."""
    data = encode_marker(JOB, marker, lineage_of(marker.step.attempt))
    assert decode_marker(data).marker == marker
    at = flip % (8 * len(data))
    flipped = bytearray(data)
    flipped[at // 8] ^= 1 << at % 8
    for bad in (data[: cut % len(data)], bytes(flipped), data + b"\n"):
        with pytest.raises(IntegrityError):
            decode_marker(bad)


GOOD = (
    '{"job": "j", "attempt": 1, "step": 2, "world_size": 1, "key": "", '
    '"lineage": {"attempt": 1, "parent_attempt": null, "parent_step": null}, "parts": [["'
    + "0" * 32
    + '", 9, 4, 3, 1]]}'
)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"parent_step": null', '"parent_step": null, "more": 1'),
        ('"step": 2', '"step": -2'),
        ('"step": 2', '"step": 2.0'),
        ('"step": 2', '"step": true'),
        ('"step": 2', '"stop": 2'),
        ('"step": 2', '"step": 1' + "0" * 30),
        ('"world_size": 1', '"world_size": 0'),
        ('"world_size": 1', '"world_size": 1000000000'),
        ('"job": "j"', '"job": 1'),
        ('"key": ""', '"key": 7'),
        ('"key": ""', '"key": "../marker"'),
        ('{"attempt": 1, "par', '{"attempt": 2, "par'),
        ('{"attempt": 1, "par', '{"attempt": true, "par'),
        ('{"attempt": 1, "par', '{"attempt": 1.0, "par'),
        ('"parent_step": null', '"parent_step": "x"'),
        ("9, 4, 3, 1", "9, 4, 2, 1"),
        ("9, 4, 3, 1", "9, 0, 3, 1"),
        ("9, 4, 3, 1", "9, 4, 3, 2"),
        ("9, 4, 3, 1", "9, 4, 3"),
        ("0" * 32, "0" * 31 + "g"),
        (GOOD, "[1]"),
        (GOOD, "[" * 100000),
        (GOOD, "\udcff"),
    ],
)
def test_marker_with_a_sound_digest_and_bad_fields_is_refused(old: str, new: str) -> None:
    """The digest is not trusted to vouch for the contents: every field is checked."""

    def sealed(text: str) -> bytes:
        record = b"memstore-marker 3\n" + text.encode(errors="surrogateescape") + b"\n"
        return record + xxhash.xxh3_128_hexdigest(record).encode() + b"\n"

    assert decode_marker(sealed(GOOD)).marker.step == StepId(1, 2)
    assert old in GOOD
    with pytest.raises(IntegrityError, match="bad contents"):
        decode_marker(sealed(GOOD.replace(old, new)))


@pytest.mark.parametrize(
    ("ranks", "lineage"),
    [
        ([0, 2], lineage_of(1)),
        ([0], lineage_of(1)),
        ([], lineage_of(1)),
        ([0, 1], lineage_of(2)),
        ([0, 1], structs.replace(lineage_of(1), parent_step=-1)),
        ([0, 1], structs.replace(lineage_of(1), attempts=((1, float("nan")),))),
    ],
)
def test_incomplete_marker_is_not_encoded(ranks: list[int], lineage: Lineage) -> None:
    """A marker lists every rank's part and its lineage, or is refused before it reaches the disk (R31)."""
    specs = {rank: ShardSpec("0" * 32, 9, 4, 3, 2) for rank in ranks}
    with pytest.raises(ConfigError, match="marker of"):
        encode_marker(JOB, DurableMarker(StepId(1, 2), 2, specs), lineage)


@st.composite
def specs(draw: st.DrawFn) -> ShardSpec:
    chunk_bytes = draw(st.sampled_from([4096, 64 << 10, 4 << 20, 64 << 20]))
    nbytes = draw(st.integers(0, 700 * chunk_bytes))
    return ShardSpec(draw(HEX), nbytes, chunk_bytes if nbytes else 0, -(-nbytes // chunk_bytes), 1)


@given(specs())
def test_slices_tile_the_shard_and_are_bounded(spec: ShardSpec) -> None:
    """Every chunk is in exactly one slice, in order; a slice fits in memory, and small shards are cut as well."""
    slices = [slice_range(spec, number) for number in range(slices_count(spec))]
    assert [index for each in slices for index in each] == list(range(spec.chunks_count))
    assert len(slices) >= 1
    assert all(slices) or not spec.chunks_count
    assert slice_chunks(spec) == 1 or slice_chunks(spec) * spec.chunk_bytes <= SLICE_LIMIT_BYTES
    assert len(slices) > 1 or spec.chunks_count <= 2


def header_of(spec: ShardSpec, number: int, *, manifest_nbytes: int = 77) -> SliceHeader:
    """The header of a plain slice."""
    sizes = tuple(spec.chunk_nbytes(index) for index in slice_range(spec, number))
    return SliceHeader(number, spec, 0 if number else manifest_nbytes, sizes, (False,) * len(sizes))


@given(spec=specs(), pick=st.integers(0, 1 << 30), flip=st.integers(0, 1 << 30))
def test_slice_headers_round_trip_and_no_damage_passes(spec: ShardSpec, pick: int, flip: int) -> None:
    """A header comes back equal, its chunks tile the file; any flipped bit, cut or other size is refused."""
    number = pick % slices_count(spec)
    header = header_of(spec, number)
    data, payload_nbytes = header.encode(), sum(header.stored_nbytes)
    file_nbytes = len(data) + header.manifest_nbytes + payload_nbytes
    assert len(data) == header_nbytes(spec, number) == header.nbytes
    assert decode_header(data + b"more", spec, number, file_nbytes=file_nbytes) == header
    end = len(data) + header.manifest_nbytes
    for index in slice_range(spec, number):
        offset, nbytes, _ = header.chunk_place(index)
        assert (offset, nbytes) == (end, spec.chunk_nbytes(index))
        end += nbytes
    assert end == file_nbytes
    flipped = bytearray(data)
    flipped[flip // 8 % len(data)] ^= 1 << flip % 8
    for bad, size in ((bytes(flipped), file_nbytes), (data[: flip % len(data)], file_nbytes), (data, file_nbytes + 1)):
        with pytest.raises(IntegrityError):
            decode_header(bad, spec, number, file_nbytes=size)


@given(spec=specs())
def test_a_slice_is_not_taken_for_another(spec: ShardSpec) -> None:
    """A sound header of another slice, digest or size is refused."""
    data = header_of(spec, 0).encode()
    others = [
        ShardSpec("f" * 32, spec.nbytes, spec.chunk_bytes, spec.chunks_count, 1),
        ShardSpec(spec.digest, spec.nbytes + 1, spec.chunk_bytes or 4096, spec.chunks_count or 1, 1),
    ]
    for other in others:
        with pytest.raises(IntegrityError):
            decode_header(data, other, 0, file_nbytes=len(data) + 77 + spec.nbytes)
    with pytest.raises(IntegrityError, match="was asked of a slice"):
        header_of(spec, 0).chunk_place(spec.chunks_count)


def test_headers_that_contradict_themselves_say_so() -> None:
    """Another magic, another version, an absurd manifest and chunks of another size each get their own words."""
    spec = ShardSpec("0" * 32, 10_000, 4096, 3, 1)

    def refusal(header: SliceHeader, at: int = 0, new: bytes = b"") -> str:
        fields = bytearray(header.encode()[:-8])
        fields[at : at + len(new)] = new
        sealed = bytes(fields) + xxhash.xxh3_64_intdigest(bytes(fields)).to_bytes(8, "little")
        total = len(sealed) + header.manifest_nbytes + sum(header.stored_nbytes)
        with pytest.raises(IntegrityError) as caught:
            decode_header(sealed, spec, 0, file_nbytes=total)
        return str(caught.value)

    good = header_of(spec, 0)
    assert "not a memstore part" in refusal(good, 0, b"X")
    assert "part format 9" in refusal(good, 8, b"\x09")
    assert "the limit is" in refusal(header_of(spec, 0, manifest_nbytes=1 << 30))
    assert "slice 0 has it" in refusal(header_of(spec, 0, manifest_nbytes=0))
    assert "is said to take" in refusal(replace(good, stored_nbytes=(4096, 4095)))
    assert "is said to take" in refusal(replace(good, is_compressed=(False, True)))

"""Markers and part headers: any damage is found, and a sound digest is not trusted to vouch for fields (R31)."""

from __future__ import annotations

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from memstore.core.durable_marker import decode_marker, encode_marker
from memstore.core.durable_part import HEADER_BYTES, PartHeader, decode_header
from memstore.errors import (
    ConfigError,
    IntegrityError,
)
from memstore.testing.durable_steps import (
    JOB,
    lineage_of,
)
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
    '{"job": "j", "attempt": 1, "step": 2, "world_size": 1, '
    '"lineage": {"attempt": 1, "parent_attempt": null, "parent_step": null}, "parts": [["'
    + "0" * 32
    + '", 9, 4, 3, 1]]}'
)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"step": 2', '"step": -2'),
        ('"step": 2', '"step": 2.0'),
        ('"step": 2', '"step": true'),
        ('"step": 2', '"stop": 2'),
        ('"step": 2', '"step": 1' + "0" * 30),
        ('"world_size": 1', '"world_size": 0'),
        ('"world_size": 1', '"world_size": 1000000000'),
        ('"job": "j"', '"job": 1'),
        ('{"attempt": 1, "par', '{"attempt": 2, "par'),
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
        record = b"memstore-marker 1\n" + text.encode(errors="surrogateescape") + b"\n"
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
        ([0, 1], {}),
        ([0, 1], {**lineage_of(1), "extra": b"bytes"}),
        ([0, 1], {**lineage_of(1), "extra": float("nan")}),
    ],
)
def test_incomplete_marker_is_not_encoded(ranks: list[int], lineage: dict[str, object]) -> None:
    """A marker lists every rank's part and its lineage, or is refused before it reaches the disk (R31)."""
    specs = {rank: ShardSpec("0" * 32, 9, 4, 3, 2) for rank in ranks}
    with pytest.raises(ConfigError, match="marker of"):
        encode_marker(JOB, DurableMarker(StepId(1, 2), 2, specs), lineage)


@given(st.integers(0, 1 << 20), st.integers(1, 1 << 30), st.integers(0, 1 << 50), HEX)
def test_part_headers_round_trip_and_tile_the_file(
    manifest_nbytes: int, chunk_bytes: int, payload_nbytes: int, digest: str
) -> None:
    """A header comes back equal, and its first and last chunk end where the file says."""
    header = PartHeader(manifest_nbytes, chunk_bytes, payload_nbytes, digest)
    file_nbytes = HEADER_BYTES + manifest_nbytes + payload_nbytes
    assert decode_header(header.encode(), file_nbytes=file_nbytes) == header
    if header.chunks_count:
        assert header.chunk_range(0)[0] == HEADER_BYTES + manifest_nbytes
        assert sum(header.chunk_range(header.chunks_count - 1)) == file_nbytes
    with pytest.raises(IntegrityError):
        decode_header(header.encode(), file_nbytes=file_nbytes + 1)


def test_headers_of_other_formats_say_so() -> None:
    """Another magic, another version, an absurd manifest and chunks of nothing each get their own words."""

    def refusal(fields: bytes, file_nbytes: int) -> str:
        sealed = fields + xxhash.xxh3_64_intdigest(fields).to_bytes(8, "little")
        with pytest.raises(IntegrityError) as caught:
            decode_header(sealed, file_nbytes=file_nbytes)
        return str(caught.value)

    fields = PartHeader(1 << 30, 4, 0, "0" * 32).encode()[:-8]
    assert "not a memstore part" in refusal(b"X" + fields[1:], 0)
    assert "part format 9" in refusal(fields[:8] + b"\x09" + fields[9:], 0)
    assert "the limit is" in refusal(fields, HEADER_BYTES + (1 << 30))
    assert "chunks of 0" in refusal(PartHeader(0, 0, 5, "0" * 32).encode()[:-8], HEADER_BYTES + 5)

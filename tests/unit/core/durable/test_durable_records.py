"""Markers and part headers: any damage is found, and a sound digest is not trusted to vouch for fields (R31)."""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from memstore.config import Config
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
from memstore.core.schedule import ends_in_time, is_late, next_durable, optimal_every, retire
from memstore.core.wire.orders import Lineage
from memstore.errors import ConfigError, IntegrityError
from memstore.intervals import Every, parse_every
from memstore.testing.durable_steps import JOB, lineage_of
from recovery.inventory import DurableMarker, ShardSpec, SliceRef, SliceUse, StepId

HEX = st.binary(min_size=16, max_size=16).map(bytes.hex)


@st.composite
def marker_values(draw: st.DrawFn) -> DurableMarker:
    world_size = draw(st.integers(1, 6))
    specs = {}
    for rank in range(world_size):
        nbytes, chunk_bytes = draw(st.integers(0, 1 << 40)), draw(st.integers(1, 1 << 30))
        specs[rank] = ShardSpec(draw(HEX), nbytes, chunk_bytes, -(-nbytes // chunk_bytes), world_size)
    step = StepId(draw(st.integers(1, 1 << 40)), draw(st.integers(0, 1 << 40)))
    uses = (
        {0: tuple(draw(slice_uses(step)) for _ in range(slices_count(specs[0])))} if specs[0].nbytes < 1 << 30 else {}
    )
    return DurableMarker(step, world_size, specs, "", uses)


@st.composite
def slice_uses(draw: st.DrawFn, step: StepId) -> SliceUse:
    """A slice that reads some older ones."""
    tags = draw(st.lists(st.sampled_from(["", "0123456789abcdef"]), max_size=3))
    refs = [SliceRef(StepId(step.attempt - 1, number), f"{number:032x}", tag) for number, tag in enumerate(tags)]
    return SliceUse("fedcba9876543210" if tags else "", tuple(refs))


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
        ("]]}", ']], "uses": {"1": ["", []]}}'),
        ("]]}", ']], "uses": {"0": [",,", []]}}'),
        ("]]}", ']], "uses": {"0": [",", [[0, 1, "' + "0" * 32 + '", ""]]]}}'),
        ("]]}", ']], "uses": {"0": [",", [[1, 2, "' + "0" * 32 + '", ","]]]}}'),
        ("]]}", ']], "uses": {"0": ["../,", []]}}'),
        (GOOD, "[1]"),
        (GOOD, "[" * 100000),
        (GOOD, "\udcff"),
    ],
)
def test_marker_with_a_sound_digest_and_bad_fields_is_refused(old: str, new: str) -> None:
    """The digest is not trusted to vouch for the contents: every field is checked."""

    def sealed(text: str) -> bytes:
        record = b"memstore-marker 4\n" + text.encode(errors="surrogateescape") + b"\n"
        return record + xxhash.xxh3_128_hexdigest(record).encode() + b"\n"

    assert decode_marker(sealed(GOOD)).marker.step == StepId(1, 2)
    assert (
        decode_marker(sealed(GOOD.replace("]]}", ']], "uses": {"0": [",", []]}}'))).marker.uses[0] == (SliceUse(),) * 2
    )
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
    assert len(data) == header_nbytes(spec, number, 0) == header.nbytes
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


# -- durable schedule ---------------------------------------------------------------------------------
# When durable writes start, what they abandon, and what durable_keep lets go (R31).


STEPS = st.builds(StepId, st.integers(1, 4), st.integers(0, 200))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90s", Every(interval_s=90.0)),
        (" 30min ", Every(interval_s=1800.0)),
        ("1.5h", Every(interval_s=5400.0)),
        ("1d", Every(interval_s=86400.0)),
        ("500 steps", Every(steps=500)),
        ("1step", Every(steps=1)),
        (7, Every(steps=7)),
        ("auto", Every(is_optimal=True)),
        (None, Every()),
    ],
)
def test_spacing_is_read(text: str | int | None, expected: Every) -> None:
    """Times, step counts and None are read as documented."""
    assert parse_every(text) == expected


@pytest.mark.parametrize("value", ["", "30", "-5s", "0s", "0 steps", "1.5 steps", "5 parsecs", "9" * 400 + "s", 0, -1])
def test_bad_spacing_is_refused(value: str | int) -> None:
    """Anything else is a ConfigError that shows the value and how to write it."""
    with pytest.raises(ConfigError, match="durable_every=") as caught:
        parse_every(value)
    assert "30min" in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "package"),
    [
        ("durable_every", "often", ""),
        ("put_every", "1 day", ""),
        ("durable", "s3://bucket/ck", "obstore"),
        ("durable_compression", "auto", "zstandard"),
        ("durable_key_file", "/key", "cryptography"),
    ],
)
def test_config_refuses_what_could_only_fail_later(
    monkeypatch: pytest.MonkeyPatch, field: str, value: str, package: str
) -> None:
    """When it is made, before a store is started or a process has joined: a time, and a package that is not there."""
    if package:
        monkeypatch.setitem(sys.modules, package, None)  # as where it is not installed
    with pytest.raises(ConfigError, match=f"{field}='{value}' .*{package and 'pip install ' + package}"):
        Config(**{field: value})


@given(st.floats(1e-3, 1e5), st.floats(60.0, 1e7))
def test_the_optimal_distance_keeps_up(write_s: float, mtbf_s: float) -> None:
    """Never less than a write takes; a write twice as long comes less often, more failures make it come more often."""
    interval_s = optimal_every(write_s, mtbf_s).interval_s
    longer_s, rarer_s = optimal_every(2 * write_s, mtbf_s).interval_s, optimal_every(write_s, 2 * mtbf_s).interval_s
    assert interval_s is not None
    assert longer_s is not None
    assert rarer_s is not None
    assert interval_s >= write_s
    assert longer_s >= interval_s
    assert rarer_s >= interval_s
    assert optimal_every(None, mtbf_s) == Every(interval_s=1800.0)


@pytest.mark.parametrize("value", [True, 2.5, b"30min"])
def test_other_types_are_refused(value: object) -> None:
    """Bools, floats and bytes are not a spacing."""
    with pytest.raises(ConfigError):
        parse_every(value)  # type: ignore[arg-type]


@pytest.mark.parametrize("every", ["30min", 1000, None])
def test_first_committed_step_goes_at_once(every: str | int | None) -> None:
    """The first committed step is written without waiting for any interval."""
    got = next_durable(5.0, last_started_s=None, last_durable_step=None, committed=[StepId(1, 3)], every=every)
    assert got.start == StepId(1, 3)
    assert "first" in got.why


def test_new_attempt_writes_its_first_step_at_once() -> None:
    """A new attempt does not wait because its parent has written a step."""
    got = next_durable(
        5.0, last_started_s=None, last_durable_step=StepId(1, 100), committed=[StepId(2, 101)], every=1000
    )
    assert got.start == StepId(2, 101)


def test_nothing_committed_starts_nothing() -> None:
    """Without a committed step there is nothing to write, however long ago the last write was."""
    got = next_durable(9e9, last_started_s=0.0, last_durable_step=None, committed=[], every="1s")
    assert got.start is None


@pytest.mark.parametrize(("now", "expected"), [(1059.9, None), (1060.0, StepId(1, 9))])
def test_interval_is_kept(now: float, expected: StepId | None) -> None:
    """A newer step is written exactly when the interval since the last start has passed."""
    got = next_durable(
        now, last_started_s=1000.0, last_durable_step=StepId(1, 2), committed=[StepId(1, 9), StepId(1, 8)], every="60s"
    )
    assert got.start == expected


@pytest.mark.parametrize(("step", "is_due"), [(19, False), (20, True), (25, True)])
def test_step_distance_is_kept(step: int, is_due: bool) -> None:
    """With a number of steps, the clock does not matter."""
    got = next_durable(
        0.0, last_started_s=0.0, last_durable_step=StepId(1, 10), committed=[StepId(1, step)], every="10 steps"
    )
    assert (got.start is not None) == is_due


def test_a_write_that_gets_on_is_not_late_and_one_that_stands_still_is() -> None:
    """R31: what it has written is thrown away only if it stands still, and has had twice the last one's time."""
    assert is_late(60.0, 0.0, 0.0, None)  # nothing of it was written when the next is due, nor of any before
    assert not is_late(119.0, 0.0, 40.0, None)
    assert is_late(120.0, 0.0, 40.0, None)
    assert not is_late(120.0, 0.0, 40.0, 61.0)
    assert is_late(120.0, 0.0, 0.0, 60.0)


def test_a_write_ends_in_time_if_the_last_one_would_have() -> None:
    """Nothing is expected of the first write, nor of one that has taken longer than the last."""
    assert ends_in_time(60.0, 0.0, 90.0, 90.0)
    assert not ends_in_time(60.0, 0.0, 90.1, 90.0)
    assert not ends_in_time(60.0, 0.0, 59.9, 90.0)
    assert not ends_in_time(60.0, 0.0, None, math.inf)


def test_write_that_cannot_be_replaced_by_a_newer_step_goes_on() -> None:
    """An unfinished write is never abandoned for the same step or an older one."""
    got = next_durable(
        1e9, last_started_s=0.0, last_durable_step=None, committed=[StepId(1, 7)], every="1s", in_progress=StepId(1, 7)
    )
    assert got.start is None


def test_failed_write_is_not_started_again_for_the_same_step() -> None:
    """A full disk costs one attempt per due step, not a loop on one step."""
    got = next_durable(
        1e9,
        last_started_s=0.0,
        last_durable_step=None,
        committed=[StepId(1, 7)],
        every=1,
        last_started_step=StepId(1, 7),
    )
    assert got.start is None


def test_attempt_that_went_back_is_written() -> None:
    """After a rewind the count starts again instead of waiting to catch up with the abandoned branch (R22)."""
    got = next_durable(
        9.0, last_started_s=1.0, last_durable_step=StepId(1, 900), committed=[StepId(2, 501)], every="100 steps"
    )
    assert got.start == StepId(2, 501)


@given(
    now=st.floats(0, 1e6),
    last_started_s=st.none() | st.floats(0, 1e6),
    last_durable=st.none() | STEPS,
    committed=st.lists(STEPS, max_size=6),
    every=st.sampled_from([None, 1, 30, "10s", "1h"]),
    in_progress=st.none() | STEPS,
    abandoned=st.integers(0, 10**6),
)
def test_decision_is_always_sound(
    now: float,
    last_started_s: float | None,
    last_durable: StepId | None,
    committed: list[StepId],
    every: str | int | None,
    in_progress: StepId | None,
    abandoned: int,
) -> None:
    """Only the newest committed step starts, never one at or behind what is durable or under way."""
    got = next_durable(
        now,
        last_started_s=last_started_s,
        last_durable_step=last_durable,
        committed=committed,
        every=every,
        in_progress=in_progress,
        abandoned_in_a_row=abandoned,
    )
    assert got.why
    if got.start is not None:
        assert got.start == max(committed)
        assert all(got.start > step for step in (last_durable, in_progress) if step is not None)


@given(write_s=st.integers(1, 500), every=st.sampled_from(["10s", 10]))
def test_slow_storage_still_gets_durable_steps(write_s: int, every: str | int) -> None:
    """However slow the storage, patience doubles until writes finish: within 4 x (write + interval) one has."""
    durable: StepId | None = None
    running: StepId | None = None
    started_s, abandoned = None, 0
    for now in range(4 * (write_s + 10)):  # one committed step a second
        if running is not None and started_s is not None and now - started_s >= write_s:
            durable, running, abandoned = running, None, 0
        got = next_durable(
            float(now),
            last_started_s=started_s,
            last_durable_step=durable,
            committed=[StepId(1, now)],
            every=every,
            in_progress=running,
            abandoned_in_a_row=abandoned,
        )
        if got.start is not None and (running is None or is_late(now, started_s or 0, started_s or 0, None)):
            abandoned += running is not None
            running, started_s = got.start, float(now)
        if durable is not None:
            return
    pytest.fail(f"nothing became durable with writes of {write_s} s and durable_every={every}")


@given(steps=st.lists(STEPS, max_size=12), keep=st.integers(1, 5))
def test_retention_keeps_the_newest(steps: list[StepId], keep: int) -> None:
    """Exactly the `keep` newest stay, and what goes is named oldest first."""
    gone = retire(dict.fromkeys(steps, ""), keep)
    kept = sorted(set(steps) - set(gone))
    assert list(gone) == sorted(gone)
    assert len(kept) == min(keep, len(set(steps)))
    assert not kept or not gone or gone[-1] < kept[0]


@pytest.mark.parametrize("keep", [0, -1])
def test_keeping_nothing_is_refused(keep: int) -> None:
    """The newest durable step is never let go: keep below 1 is a ConfigError."""
    with pytest.raises(ConfigError, match="durable_keep"):
        retire({StepId(1, 1): ""}, keep)

"""Compressed and encrypted slices: the plain bytes come back or an error does, nothing is compressed in vain (R31)."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memstore.config import Config
from memstore.core.durable.paths import place_of
from memstore.core.durable.slice_format import SliceHeader, decode_header, slice_range, slices_count
from memstore.core.schedule import paced
from memstore.errors import ConfigError, IntegrityError, MemstoreError
from memstore.shell.durable.codec import GAIN_MIN, Codec, key_name, read_key
from memstore.shell.durable.directory import DirectoryFiles
from memstore.shell.durable.tier import PartsTier, open_tier
from memstore.testing.durable_steps import (
    CHUNK,
    JOB,
    chunks_of,
    markers_of,
    names_of,
    payload_of,
    read_payload,
    shard_of,
    spec_of,
    write_step,
)
from recovery.inventory import ShardSpec

zstandard = pytest.importorskip("zstandard")
pytest.importorskip("cryptography")
KEY, OTHER_KEY = bytes(range(32)), bytes(32)
CODECS = [Codec(), Codec(is_compressing=True), Codec(key=KEY), Codec(is_compressing=True, key=KEY)]
CODEC_IDS = ["plain", "compressed", "encrypted", "both"]
MIB = 1 << 20


def spec_for(payload: bytes, chunk_bytes: int = CHUNK) -> ShardSpec:
    """The spec of a shard with this payload."""
    return ShardSpec("ab" * 16, len(payload), chunk_bytes, -(-len(payload) // chunk_bytes), 1)


def sealed(codec: Codec, payload: bytes, chunk_bytes: int = CHUNK) -> list[list[bytes]]:
    """The pieces of every slice."""
    spec = spec_for(payload, chunk_bytes)
    chunks = [payload[at : at + chunk_bytes] for at in range(0, len(payload), chunk_bytes)]
    return [
        codec.seal(spec, number, b"" if number else b"the manifest", [chunks[i] for i in slice_range(spec, number)])
        for number in range(slices_count(spec))
    ]


def opened(codec: Codec, slices: list[list[bytes]], spec: ShardSpec) -> bytes:
    """The payload, read back the way the tier does."""
    out = bytearray(spec.nbytes)
    for number, pieces in enumerate(slices):
        data = b"".join(pieces)
        header = decode_header(data, spec, number, file_nbytes=len(data))
        for index in slice_range(spec, number):
            offset, nbytes, _ = header.chunk_place(index)
            start = index * spec.chunk_bytes
            view = memoryview(out)[start : start + spec.chunk_nbytes(index)]
            codec.open_chunk(header, index, data[offset : offset + nbytes], view)
    return bytes(out)


@pytest.mark.parametrize("codec", CODECS, ids=CODEC_IDS)
@settings(max_examples=40)
@given(blocks=st.lists(st.tuples(st.binary(min_size=1, max_size=9), st.integers(1, 3000)), max_size=6))
def test_any_payload_comes_back(codec: Codec, blocks: list[tuple[bytes, int]]) -> None:
    """Repeated and random runs of any length, cut into chunks: bit for bit the same."""
    payload = b"".join(block * count for block, count in blocks) or b"x"
    assert opened(codec, sealed(codec, payload), spec_for(payload)) == payload


@pytest.mark.parametrize("codec", CODECS, ids=CODEC_IDS)
def test_a_step_round_trips_on_the_tier(codec: Codec, tmp_path: Path) -> None:
    """Manifest and chunks, with and without a manifest in the slice; a reader without compression reads it too."""
    tier = PartsTier(DirectoryFiles(tmp_path), codec)
    marker = write_step(tier, 1, nbytes=40 * CHUNK + 1)
    reader = PartsTier(DirectoryFiles(tmp_path), Codec(key=codec.key))
    for rank, spec in marker.specs.items():
        assert reader.read_manifest(shard_of(1, rank), spec) == tier.read_manifest(shard_of(1, rank), spec)
        assert read_payload(reader, shard_of(1, rank), spec) == payload_of(shard_of(1, rank), 40 * CHUNK + 1)


def typed(name: str) -> bytes:
    """A MiB of values as they are in states."""
    rng = torch.Generator().manual_seed(1)
    weights = torch.randn(MIB // 2, generator=rng) * 0.02
    found = {
        "bf16": weights.bfloat16().view(torch.uint8),
        "fp32": weights[: MIB // 4].view(torch.uint8),
        "fp32 rounded to bf16": weights[: MIB // 4].bfloat16().float().view(torch.uint8),
        "int64": torch.randint(0, 50_000, (MIB // 8,), generator=rng).view(torch.uint8),
        "zeros": torch.zeros(MIB, dtype=torch.uint8),
        "noise": torch.randint(0, 256, (MIB,), generator=rng, dtype=torch.uint8),
    }
    return bytes(found[name].numpy().tobytes())


@pytest.mark.parametrize(
    ("name", "gain"),
    [("bf16", 1.35), ("fp32", 1.12), ("fp32 rounded to bf16", 2.5), ("int64", 3.5), ("zeros", 100), ("noise", 0)],
)
def test_what_pays_is_compressed_and_what_does_not_is_stored_as_it_is(name: str, gain: float) -> None:
    """Every dtype gains what its bytes allow; noise costs nothing but the look at a sample."""
    payload = typed(name)
    slices = sealed(Codec(is_compressing=True), payload, MIB)
    stored = sum(len(piece) for pieces in slices for piece in pieces)
    assert opened(Codec(), slices, spec_for(payload, MIB)) == payload
    if gain:
        assert len(payload) / stored > gain > GAIN_MIN
    else:
        assert [piece for pieces in slices for piece in pieces[2:]] == [payload]


@settings(max_examples=60)
@given(flip=st.integers(0, 1 << 30), is_compressing=st.booleans())
def test_no_flipped_bit_passes_an_encrypted_slice(flip: int, is_compressing: bool) -> None:
    """Anywhere in the file: IntegrityError, or ConfigError for another key's name. Never other bytes."""
    codec, payload = Codec(is_compressing, KEY), bytes(3 * CHUNK)
    first, *rest = sealed(codec, payload)
    data = bytearray(b"".join(first))
    data[flip // 8 % len(data)] ^= 1 << flip % 8
    header_nbytes = len(first[0])
    spec = spec_for(payload)

    def read() -> None:
        header = decode_header(bytes(data), spec, 0, file_nbytes=len(data))
        codec.open_manifest(header, bytes(data[header_nbytes : header_nbytes + header.manifest_nbytes]))
        opened(codec, [[bytes(data)], *rest], spec)

    with pytest.raises((IntegrityError, ConfigError)):
        read()


def test_pieces_cannot_change_places() -> None:
    """A chunk in another's place, or in another slice's, does not open: each is bound to where it stands."""
    codec, payload = Codec(key=KEY), bytes(4 * CHUNK)
    spec, (first, second) = spec_for(payload), sealed(codec, payload)
    head = decode_header(b"".join(first), spec, 0, file_nbytes=len(b"".join(first)))
    view = memoryview(bytearray(CHUNK))
    codec.open_chunk(head, 0, first[2], view)
    for index, piece in ((1, first[2]), (0, first[3]), (0, second[2]), (0, sealed(codec, payload)[0][2])):
        with pytest.raises(IntegrityError, match="seal"):
            codec.open_chunk(head, index, piece, view)


def test_no_key_meets_a_nonce_twice() -> None:
    """Equal chunks and equal slices, sealed again and again, never give equal bytes, nor a salt that was used."""
    codec, payload = Codec(key=KEY), bytes(8 * CHUNK)
    slices = [pieces for _ in range(50) for pieces in sealed(codec, payload)]
    bodies = [piece[:64] for pieces in slices for piece in pieces[1:] if piece]
    assert len(set(bodies)) == len(bodies)
    salts = {pieces[0][-16 - 8 - 4 * (len(pieces) - 2) : -8 - 4 * (len(pieces) - 2)] for pieces in slices}
    assert len(salts) == len(slices)
    assert not any(KEY in b"".join(pieces) for pieces in slices)


@pytest.mark.parametrize("codec", [Codec(), Codec(key=OTHER_KEY)], ids=["no key", "wrong key"])
def test_without_the_right_key_the_error_names_the_keys(codec: Codec, tmp_path: Path) -> None:
    """ConfigError with the place and both keys' names: no evidence against the bytes, and no garbage (R25)."""
    spec = write_step(PartsTier(DirectoryFiles(tmp_path), Codec(key=KEY)), 1).specs[0]
    view = memoryview(bytearray(CHUNK))
    tier = PartsTier(DirectoryFiles(tmp_path), codec, read_under=key_name(KEY).hex())
    for call in (
        lambda: tier.read_manifest(shard_of(1), spec),
        lambda: tier.read_chunk_into(shard_of(1), spec, 0, view),
    ):
        with pytest.raises(ConfigError, match=key_name(KEY).hex()) as caught:
            call()
        assert names_of(shard_of(1))[0] in str(caught.value)
        assert codec.key is None or key_name(OTHER_KEY).hex() in str(caught.value)
    assert bytes(view) == bytes(CHUNK)
    assert len(markers_of(tier, JOB)[0]) == 1  # markers are readable: they say what is there, not what is in it


@pytest.mark.parametrize("codec", [Codec(), Codec(key=OTHER_KEY)], ids=["no key", "wrong key"])
def test_what_a_step_lacks_is_found_without_its_key(codec: Codec, tmp_path: Path) -> None:
    """That it cannot be read here is no word about what is there; a slice that is gone is (R31)."""
    marker = write_step(PartsTier(DirectoryFiles(tmp_path), Codec(key=KEY)), 1)
    tier = PartsTier(DirectoryFiles(tmp_path), codec)
    assert tier.lacks(JOB, marker.step) == ""
    gone = min(tmp_path.rglob("rank-*"))
    gone.unlink()
    assert gone.name in tier.lacks(JOB, marker.step)


def test_nothing_of_an_encrypted_payload_or_manifest_is_readable(tmp_path: Path) -> None:
    """Neither names from the manifest nor values show in any file."""
    for is_compressing in (False, True):
        tier = PartsTier(DirectoryFiles(tmp_path), Codec(is_compressing, KEY))
        write_step(tier, 1 + is_compressing)
    files = [path.read_bytes() for path in tmp_path.rglob("rank-*")]
    assert len(files) == 8
    chunk = bytes(chunks_of(payload_of(shard_of(1), 4 * CHUNK))[0])
    assert not any(b"manifest of" in data or chunk[:32] in data for data in files)


def test_a_chunk_that_would_unfold_to_gigabytes_is_refused_while_it_is_small() -> None:
    """The size that a compressed frame declares must be the chunk's, before anything is allocated."""
    spec = spec_of(shard_of(1), CHUNK, 1)
    bomb = b"\x01" + zstandard.ZstdCompressor(level=1).compress(bytes(64 * MIB))
    for body in (bomb, b"\x01", b"\x03" + bomb[1:], b"\x01" + b"\x28\xb5\x2f\xfd" + b"\xff" * 40, b"\x02garbage"):
        header = SliceHeader(0, spec, 1, (len(body),), (True,))
        with pytest.raises(IntegrityError, match="compressed chunk"):
            Codec().open_chunk(header, 0, body, memoryview(bytearray(CHUNK)))


def test_keys_are_read_from_private_files_alone(tmp_path: Path) -> None:
    """32 bytes or 64 hex digits, 0600, no link; refusals repeat nothing of the file."""
    path = tmp_path / "key"
    for content in (KEY, KEY.hex().encode(), KEY.hex().encode() + b"\n"):
        path.write_bytes(content)
        path.chmod(0o600)
        assert read_key(str(path)) == KEY
    link = tmp_path / "link"
    link.symlink_to(path)
    path.chmod(0o640)
    for bad, word in ((path, "0640"), (link, "cannot be read"), (tmp_path / "none", "every host"), (tmp_path, "plain")):
        with pytest.raises(ConfigError, match=word):
            read_key(str(bad))
    path.chmod(0o600)
    for content in (b"", b"SECRET", KEY[:31], KEY + b"\n", b"zz" * 32, KEY.hex().encode() * 2):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="32 random bytes") as caught:
            read_key(str(path))
        assert "SECRET" not in str(caught.value)


def test_the_configuration_reaches_the_tier_and_is_checked(tmp_path: Path) -> None:
    """Config to tier; URLs with credentials, relative key files and unknown compressions are refused at once."""
    (tmp_path / "key").write_bytes(KEY)
    (tmp_path / "key").chmod(0o600)
    config = Config(durable=str(tmp_path), durable_compression="auto", durable_key_file=str(tmp_path / "key"))
    place = place_of(config.job_fields())
    assert place is not None
    tier = open_tier(place)
    assert isinstance(tier, PartsTier)
    assert tier.codec == Codec(True, KEY)
    assert place_of(Config().job_fields()) is None
    assert Config(durable="file:///mnt/user@host").durable == "file:///mnt/user@host"
    for fields in (
        {"durable": "s3://KEY:SECRET@bucket/x"},
        {"durable": "s3://KEY:a/SECRET@bucket/x"},
        {"durable": "az://account/c?sig=SECRET"},
        {"durable": 3},
        {"durable": "ckpt"},
        {"arena_dir": "shm"},
        {"durable_compression": "gzip"},
        {"durable_key_file": "key"},
        {"durable_bytes_per_s": -1},
    ):
        with pytest.raises(ConfigError, match=next(iter(fields))) as caught:
            Config(**fields)  # type: ignore[arg-type]
        assert "SECRET" not in str(caught.value)


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(1, 1000)), min_size=1, max_size=30), st.integers(1, 500))
def test_the_cap_holds_on_average_and_wastes_nothing(writes: list[tuple[float, int]], rate: int) -> None:
    """Writes begin in order; before each no more was begun than the rate allows; without backlog nothing waits."""
    now, free_s, begun = 0.0, 0.0, list[tuple[float, int]]()
    for gap_s, nbytes in writes:
        now += gap_s
        assert paced(now, free_s, nbytes, 0)[0] == now
        start_s, free_s = paced(now, free_s, nbytes, rate)
        assert start_s == now or start_s == pytest.approx(begun[-1][0] + begun[-1][1] / rate)
        begun.append((start_s, nbytes))
    for (first, _), (last, _) in itertools.combinations(begun, 2):
        sent = sum(nbytes for start_s, nbytes in begun if first <= start_s < last)
        assert sent <= rate * (last - first) * (1 + 1e-9) + 1e-6


def test_damage_in_storage_is_an_error_of_ours_for_every_codec(tmp_path: Path) -> None:
    """Random bytes in a file's place: a MemstoreError, with every codec."""
    rng = np.random.default_rng(3)
    for step, codec in enumerate(CODECS):
        tier = PartsTier(DirectoryFiles(tmp_path), codec)
        spec = write_step(tier, step).specs[0]
        (path,) = Path(tmp_path, JOB, "1", str(step)).glob(names_of(shard_of(step))[0] + "*")
        path.write_bytes(rng.bytes(path.stat().st_size))
        with pytest.raises(MemstoreError):
            tier.read_manifest(shard_of(step), spec)

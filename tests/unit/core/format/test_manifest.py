"""Manifests and layouts: deterministic bytes, and no bytes that can harm the process that decodes them (R14)."""

from __future__ import annotations

import dataclasses

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memstore.config import check_name
from memstore.core.format import layout as layouts
from memstore.core.format.layout import decode_layout, encode_layout
from memstore.core.format.manifest import (
    PARITY_FORMAT,
    Chunk,
    Manifest,
    chunk_digest,
    chunk_sizes,
    decode_manifest,
    encode_manifest,
    encode_summands,
    shard_digest,
    spec_of,
    summand_manifest,
)
from memstore.core.format.object_tree import NESTING_MAX, Tag
from memstore.errors import ConfigError, ManifestMismatch, MemstoreError, ProtocolError
from recovery.inventory import ShardId


def manifest(nbytes: int = 10, **changes: object) -> Manifest:
    chunks = tuple(Chunk(chunk_digest(bytes([i])), n) for i, n in enumerate(chunk_sizes(nbytes, 4)))
    made = Manifest(ShardId("job", 1, 2, 0), 3, b"layout", nbytes, 4, chunks)
    return dataclasses.replace(made, **changes)


def row(**changes: object) -> bytes:
    fields: dict[str, object] = {"format": 1, "job": "job", "attempt": 1, "step": 2, "rank": 0, "world_size": 3}
    fields |= {"nbytes": 10, "chunk_bytes": 4, "layout": b"layout", "digests": bytes(48)}
    return msgpack.packb(list((fields | changes).values()))


@pytest.mark.parametrize(("nbytes", "chunks"), [(0, 0), (1, 1), (8, 2), (10, 3)])
def test_manifest_round_trip(nbytes: int, chunks: int) -> None:
    """A manifest comes back equal, whether its last chunk is full, short or absent."""
    made = manifest(nbytes)
    assert len(made.chunks) == chunks
    assert decode_manifest(encode_manifest(made)) == made


def test_equal_manifests_have_one_digest() -> None:
    """The shard's digest depends on every field and on nothing else."""
    digest = shard_digest(encode_manifest(manifest()))
    assert digest == shard_digest(encode_manifest(manifest()))
    assert len(digest) == 32
    others = [
        manifest(shard=ShardId("job", 1, 3, 0)),
        manifest(layout=b"x"),
        manifest(world_size=4),
        manifest(nbytes=9),
    ]
    assert len({digest, *(shard_digest(encode_manifest(other)) for other in others)}) == 5


def test_spec_follows_the_manifest() -> None:
    """Planners see sizes that add up to the shard."""
    spec = spec_of(manifest(), "ab")
    assert (spec.digest, spec.nbytes, spec.chunks_count, spec.world_size) == ("ab", 10, 3, 3)
    assert [spec.chunk_nbytes(i) for i in range(3)] == [4, 4, 2]


@pytest.mark.parametrize(
    "changes",
    [
        {"chunks": ()},
        {"chunks": (Chunk(bytes(16), 4), Chunk(bytes(16), 2), Chunk(bytes(16), 4))},
        {"chunks": (Chunk(bytes(15), 4), Chunk(bytes(16), 4), Chunk(bytes(16), 2))},
        {"shard": ShardId("../job", 1, 2, 0)},
        {"shard": ShardId("job", 1, 2, 3)},
        {"shard": ShardId("job", -1, 2, 0)},
        {"format": PARITY_FORMAT},
        {"chunk_bytes": 0},
        {"layout": bytes((64 << 20) + 1)},
    ],
)
def test_contradicting_manifest_is_not_encoded(changes: dict[str, object]) -> None:
    """No rank gets a manifest that could not be decoded."""
    with pytest.raises(ManifestMismatch):
        encode_manifest(manifest(**changes))


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"format": 2}, ManifestMismatch),
        ({"format": True}, ProtocolError),
        ({"job": "a/b"}, ManifestMismatch),
        ({"job": b"job"}, ProtocolError),
        ({"rank": 3}, ManifestMismatch),
        ({"step": -1}, ManifestMismatch),
        ({"nbytes": 1 << 63}, ManifestMismatch),
        ({"nbytes": 1 << 61, "chunk_bytes": 1}, ManifestMismatch),
        ({"chunk_bytes": 1 << 40}, ManifestMismatch),
        ({"digests": bytes(47)}, ManifestMismatch),
        ({"digests": bytes(64)}, ManifestMismatch),
        ({"extra": 1}, ProtocolError),
    ],
)
def test_hostile_manifest_is_refused(changes: dict[str, object], error: type[Exception]) -> None:
    """Wrong types and contradicting numbers are named, before anything is sized by them."""
    with pytest.raises(error):
        decode_manifest(row(**changes))


PARITY = {"shard": ShardId("job", 1, 2, 0, is_parity=True), "format": PARITY_FORMAT}


def test_a_manifest_of_parity_names_the_shards_in_it() -> None:
    """Unequal shards, one of them empty: their manifests come back as they were, and the spec lists them (R37)."""
    shards = {rank: encode_manifest(manifest(n, shard=ShardId("job", 1, 2, rank))) for rank, n in ((2, 0), (1, 9))}
    made = manifest(10, layout=encode_summands(shards, spare=2), **PARITY)
    found = decode_manifest(encode_manifest(made))
    assert found == made
    assert [summand_manifest(found, rank) for rank in (1, 2, 5)] == [shards[1], shards[2], None]
    summands = [(each.rank, each.digest, each.nbytes) for each in spec_of(found, "d").summands]
    assert summands == [(1, shard_digest(shards[1]), 9), (2, shard_digest(shards[2]), 0)]
    assert spec_of(found, "d").spare == 2
    nothing = manifest(0, layout=encode_summands({2: shards[2]}, spare=1), **PARITY)
    spec = spec_of(decode_manifest(encode_manifest(nothing)), "d")
    assert (spec.chunks_count, spec.spare) == (0, 1)
    assert spec_of(manifest(10), "d").spare == 0


def summands_layout(spare: int) -> bytes:
    """The layout of parity of one good shard."""
    return encode_summands({1: encode_manifest(manifest(9, shard=ShardId("job", 1, 2, 1)))}, spare)


@pytest.mark.parametrize(
    "layout",
    [
        b"",
        b"junk",
        encode_summands({1: b"junk"}, spare=1),
        msgpack.packb([1, [[1, 2]]]),
        msgpack.packb([[1, b""]]),
        summands_layout(spare=0),
        summands_layout(spare=3),
    ],
)
def test_parity_of_what_is_no_shard_is_an_error_of_ours(layout: bytes) -> None:
    """A holder that adopts one drops it, and goes on (R6)."""
    made = decode_manifest(encode_manifest(manifest(10, layout=layout, **PARITY)))
    with pytest.raises(MemstoreError):
        spec_of(made, "d")


def test_a_shard_is_not_taken_for_parity() -> None:
    """The format says which it is; one that contradicts the shard is not encoded."""
    for changes in ({"format": PARITY_FORMAT}, {"shard": PARITY["shard"]}):
        with pytest.raises(ManifestMismatch):
            encode_manifest(manifest(**changes))


@given(st.binary(max_size=64), st.integers(0, 90), st.integers(0, 255))
@settings(max_examples=300, deadline=None)
def test_damaged_manifest_is_an_error_of_ours(noise: bytes, at: int, value: int) -> None:
    """Noise, a flipped byte and a cut end never surface as anything but an error of the tree."""
    damaged = bytearray(row())
    damaged[at % len(damaged)] = value
    for data in (noise, bytes(damaged), row()[: at % len(damaged)]):
        try:
            decode_manifest(data)
        except (ProtocolError, ManifestMismatch):
            continue


@pytest.mark.parametrize("name", ["a", "llama3-8b", "A.b_c", "0" * 64])
def test_good_names(name: str) -> None:
    """Letters, digits, dot, underscore and dash, up to 64 of them."""
    assert check_name("job", name) == name


@pytest.mark.parametrize("name", ["", ".", "-a", "a/b", "a\n", "a b", "é", "0" * 65, None])
def test_bad_names(name: str) -> None:
    """A name that could leave its folder or a message's line is refused."""
    with pytest.raises(ConfigError, match=r"store name .* not allowed"):
        check_name("store", name)


TENSOR = [0, 0, "float32", [4], None, 0, None]


def packed(
    extents: object = ((0, 16),), tensors: object = (TENSOR,), tree: object = None, nbytes: object = 16
) -> bytes:
    return msgpack.packb([layouts.FORMAT, nbytes, extents, tensors, [], tree])


def test_good_layout_is_accepted() -> None:
    """The base that the hostile cases below change in one place is itself fine."""
    decoded = decode_layout(packed(tree=[Tag.TENSOR, 0]))
    assert decoded.tensors[0].strides == (4,)
    assert decode_layout(encode_layout(0, [], [], [], [Tag.LIST, None, [1, None]])).tree.children == (1, None)


@pytest.mark.parametrize(
    "tensor",
    [
        [1, 0, "float32", [4], None, 0, None],
        [0, 0, "float32", [5], None, 0, None],
        [0, 4, "float32", [4], None, 0, None],
        [0, -4, "float32", [4], None, 0, None],
        [0, 2, "float32", [2], None, 0, None],
        [0, 0, "float32", [2], [-4], 0, None],
        [0, 0, "float32", [2], [6], 0, None],
        [0, 0, "float32", [2, 2], [4], 0, None],
        [0, 0, "float32", [1 << 61, 1 << 61], [0, 0], 0, None],
        [0, 0, "float32", [0], None, 0, None],
        [None, 0, "float32", [4], None, 0, None],
        [0, 0, "quint8", [4], None, 0, None],
        [0, 0, "__class__", [4], None, 0, None],
        [0, 0, "|O8", [2], None, 1, None],
        [0, 0, "<f8", [2], [-8], 1, None],
        [0, 0, ["struct", 4, [["a", 1, "<f4"]]], [2], None, 1, None],
        [0, 0, ["sub", "<f4", [1 << 30, 1 << 30]], [1], None, 1, None],
        [0, 0, "float32", [4], None, 64, None],
        [0, 0, "float32", [4], None, 0, 7],
        [0, 0, "float32", [1] * 65, None, 0, None],
        [True, 0, "float32", [4], None, 0, None],
        [0, 0, "float32", [4.0], None, 0, None],
        [],
    ],
)
def test_tensor_outside_its_bytes_is_refused(tensor: list[object]) -> None:
    """No shape, stride, offset or dtype reaches a byte outside the tensor's extent."""
    with pytest.raises(ProtocolError):
        decode_layout(packed(tensors=[tensor]))


@pytest.mark.parametrize(
    ("extents", "nbytes"),
    [
        ([[0, 17]], 16),
        ([[8, 16]], 16),
        ([[0, 8], [4, 8]], 16),
        ([[0, 0]], 16),
        ([[-1, 8]], 16),
        ([[0, 1 << 63]], 1 << 63),
    ],
)
def test_extents_stay_inside_the_stream(extents: object, nbytes: int) -> None:
    """Extents neither overlap nor pass the end, so that no reader allocates more than the stream holds."""
    with pytest.raises(ProtocolError):
        decode_layout(packed(extents, [], None, nbytes))


@pytest.mark.parametrize(
    "tree",
    [
        [99, None],
        [Tag.TENSOR, 1],
        [Tag.TENSOR, -1],
        [Tag.ARRAY, 0],
        [Tag.TENSOR, 0, [1]],
        [Tag.DICT, None, [1]],
        [Tag.BYTES, 0],
        [Tag.COMPLEX, b"short"],
        [Tag.SCALAR, ["<f8", b"1234"]],
        [Tag.SCALAR, ["|O8", b"12345678"]],
        [Tag.DATACLASS, ["m:C", ["a", "a"]], [1, 2]],
        [Tag.DATACLASS, ["m:C", ["a"]], []],
        [Tag.SUBCLASS, ["m:C", []], []],
        [Tag.DTENSOR, [[0], [1], None, [["Replicate"]], [1], [1]], []],
        ["1", None],
        [],
        [1, 2, 3, 4],
        {"a": 1},
        b"raw",
    ],
)
def test_malformed_tree_is_refused(tree: object) -> None:
    """A node is of a known tag, has the data and children of that tag, and names what exists."""
    with pytest.raises(ProtocolError):
        decode_layout(packed(tree=tree))


def test_nesting_has_a_limit() -> None:
    """A tower of containers is refused before it exhausts the interpreter's stack."""
    for depth, is_fine in ((NESTING_MAX, True), (NESTING_MAX + 2, False)):
        tree: object = None
        for _ in range(depth):
            tree = [Tag.LIST, None, [tree]]
        if is_fine:
            decode_layout(packed(tree=tree))
        else:
            with pytest.raises(ProtocolError):
                decode_layout(packed(tree=tree))
    with pytest.raises(ProtocolError):
        decode_layout(b"\x91" * 100_000)


@given(st.binary(max_size=80), st.integers(0, 200), st.integers(0, 255))
@settings(max_examples=300, deadline=None)
def test_damaged_layout_is_an_error_of_ours(noise: bytes, at: int, value: int) -> None:
    """Noise and flipped bytes give a layout or a ProtocolError, never anything else."""
    damaged = bytearray(packed(tree=[Tag.DICT, None, ["a", [Tag.TENSOR, 0]]]))
    damaged[at % len(damaged)] = value
    for data in (noise, bytes(damaged)):
        try:
            decode_layout(data)
        except ProtocolError:
            continue

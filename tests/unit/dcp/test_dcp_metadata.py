"""DCP's Metadata as bytes: exact, bounded, and refused by name where there is no encoding."""

from __future__ import annotations

import math
import tracemalloc
import zlib
from typing import Any

import msgpack
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from memstore.client.dcp.metadata import FORMAT, Place, SavedLayout, decode_metadata, encode_metadata, estimate_bytes
from memstore.errors import ProtocolError, UnsupportedState
from memstore.shell.codec.encode import plan_state
from memstore.shell.tensors.memory import DTYPES

COUNT = st.integers(0, (1 << 40) - 1)
NAMES = st.text(st.characters(codec="utf-8"), max_size=20)
PATHS = st.lists(st.one_of(NAMES, st.integers(-5, 5)), max_size=4).map(tuple)


def places(nbytes: st.SearchStrategy[int]) -> st.SearchStrategy[Place]:
    return st.builds(Place, st.integers(0, 1 << 20), COUNT, nbytes)


@st.composite
def metadatas(draw: st.DrawFn) -> Metadata:
    """Everything a planner may leave.

    Tensors in chunks, objects, items no rank wrote, written ones no process lists.
    """
    entries: dict[str, Any] = {}
    stored: dict[MetadataIndex, Place] = {}
    for name in draw(st.lists(NAMES, max_size=5, unique=True)):
        if draw(st.booleans()):
            entries[name] = BytesStorageMetadata()
            if draw(st.booleans()):
                stored[MetadataIndex(name)] = draw(places(COUNT))
            continue
        dims = draw(st.integers(0, 4))
        shapes = st.lists(st.integers(0, 1 << 7), min_size=dims, max_size=dims)
        properties = TensorProperties(
            draw(st.sampled_from(list(DTYPES.values()))),
            torch.strided,
            draw(st.booleans()),
            draw(st.sampled_from([torch.contiguous_format, torch.channels_last, torch.preserve_format])),
            draw(st.booleans()),
        )
        chunks = []
        for offsets in draw(st.lists(shapes, max_size=4, unique_by=tuple)):
            sizes = draw(shapes)
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            if draw(st.booleans()):
                nbytes = math.prod(sizes) * properties.dtype.itemsize
                stored[MetadataIndex(name, offsets)] = draw(places(st.just(nbytes)))
        entries[name] = TensorStorageMetadata(properties, torch.Size(draw(shapes)), chunks)
    if draw(st.booleans()):
        stored[MetadataIndex(f"stray{len(entries)}", draw(st.one_of(st.none(), st.just([3, 0]))))] = Place(1, 2, 3)
    planner = draw(st.one_of(st.none(), st.dictionaries(NAMES, PATHS, max_size=5)))
    return Metadata(entries, planner, stored, version=draw(st.one_of(st.none(), NAMES)))


@given(metadatas())
@settings(max_examples=60)
def test_metadata_comes_back_equal(metadata: Metadata) -> None:
    """All that a planner says of a state is read as it was written, field by field, every number and type."""
    assert decode_metadata(encode_metadata(metadata)) == metadata


def test_equal_chunks_are_stored_within_the_inflation_limit() -> None:
    """What compresses better than a reader would believe is stored plainly, so that every reader takes it."""
    entry = TensorStorageMetadata(
        TensorProperties(), torch.Size([1]), [ChunkStorageMetadata(torch.Size([0]), torch.Size([1]))] * 20_000
    )
    metadata = Metadata({"weight": entry}, None, {})
    assert decode_metadata(encode_metadata(metadata)) == metadata


@given(metadatas(), st.data())
@settings(max_examples=40)
def test_damaged_bytes_are_a_protocol_error_or_other_metadata(metadata: Metadata, data: st.DataObject) -> None:
    """No damage of what is inside, or of the envelope, raises anything else."""
    packed = bytearray(zlib.decompress(encode_metadata(metadata)))
    for at in data.draw(st.lists(st.integers(0, len(packed) - 1), max_size=3)):
        packed[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(packed)))
    for hostile in (zlib.compress(packed), zlib.compress(packed[:cut]), bytes(packed[:cut])):
        try:
            assert isinstance(decode_metadata(hostile), Metadata)
        except ProtocolError:
            pass


def row(**changes: Any) -> list[Any]:
    parts = {
        "form": FORMAT,
        "version": None,
        "entries": [["w", tensor(), None]],
        "planner": plan_state(None).layout,
        "stream": b"",
        "strays": [],
    }
    return list({**parts, **changes}.values())


def tensor(dtype: str = "float32", nbytes: int = 16) -> list[Any]:
    return [dtype, False, "contiguous", False, [4], [[[0], [4], [0, 0, nbytes]]]]


@pytest.mark.parametrize(
    "hostile",
    [
        row(form=FORMAT + 1),
        row(entries=[["w", tensor(dtype="float99"), None]]),
        row(entries=[["w", tensor(nbytes=17), None]]),
        row(entries=[["w", None, [0, -1, 4]]]),
        row(entries=[["w", None, [0, 0, True]]]),
        row(entries=[["w", None, [0, 0, 1 << 63]]]),
        row(entries=[[7, None, None]]),
        row(entries={"w": 1}),
        row(version=7),
        row(strays=[["w", "offsets", [0, 0, 0]]]),
        row(planner=b"no layout"),
        row()[:5],
        {},
    ],
)
def test_nonsense_is_refused(hostile: Any) -> None:
    """Values of the wrong kind, size or sign are refused; the row they were made from is not."""
    assert decode_metadata(zlib.compress(msgpack.packb(row()))).state_dict_metadata["w"].size == torch.Size([4])
    with pytest.raises(ProtocolError):
        decode_metadata(zlib.compress(msgpack.packb(hostile)))


def test_a_bomb_is_refused_in_bounded_memory() -> None:
    """A few stored bytes cannot make a reader take hundreds of megabytes."""
    bomb = zlib.compress(msgpack.packb([None] * (1 << 25)), 9)  # 32 MiB of msgpack, 256 MiB of list
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match="inflates to more than"):
            decode_metadata(bomb)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(bomb) < 1 << 16
    assert peak_bytes < 16 << 20


@pytest.mark.parametrize(
    ("entry", "named"),
    [
        (TensorStorageMetadata(TensorProperties(dtype=torch.quint8), torch.Size([2]), []), "torch.quint8"),
        (TensorStorageMetadata(TensorProperties(layout=torch.sparse_coo), torch.Size([2]), []), "torch.sparse_coo"),
    ],
)
def test_what_has_no_encoding_is_refused_by_name(entry: TensorStorageMetadata, named: str) -> None:
    """A dtype or layout that could not be read again names the tensor and itself."""
    with pytest.raises(UnsupportedState, match=f"'model.weight'.*{named}"):
        encode_metadata(Metadata({"model.weight": entry}, None, {}))


def test_planner_data_without_an_encoding_is_refused() -> None:
    """A planner of the user's own may leave anything; what needs pickle is refused and named."""

    class Mine:
        pass

    with pytest.raises(UnsupportedState, match="Mine"):
        encode_metadata(Metadata({}, {"weight": Mine()}, {}))


@given(st.one_of(st.none(), st.tuples(st.integers(0, 100), st.integers(0, 100))), st.booleans(), st.integers(200, 300))
def test_the_layout_of_a_saved_shard_says_where_its_metadata_is(
    place: tuple[int, int] | None, is_global: bool, nbytes: int
) -> None:
    """What a writer says of its shard is what a reader finds; a layout of a put is no such shard."""
    saved = SavedLayout(place, is_global)
    assert SavedLayout.decode(saved.encode(nbytes)) == saved
    assert SavedLayout.decode(plan_state({"weight": torch.ones(3)}).layout) is None
    assert SavedLayout.decode(plan_state({"epoch": 3}).layout) is None


def test_metadata_outside_its_shard_is_refused() -> None:
    """A range that ends behind the shard is never asked for."""
    with pytest.raises(ProtocolError, match="ends behind the shard"):
        SavedLayout.decode(SavedLayout((90, 20), True).encode(100))


@pytest.mark.parametrize("world_size", [1, 8, 256])
def test_the_estimate_covers_what_a_model_takes(world_size: int) -> None:
    """Room for the metadata is taken before it is known: the guess is enough for a sharded transformer."""
    entries: dict[str, Any] = {}
    stored = {}
    rows = 4096
    for layer in range(32):
        for part in ("attention.wq", "attention.wk", "feed_forward.w1", "norm"):
            name = f"model.layers.{layer}.{part}.weight"
            chunks = []
            for rank in range(world_size):
                offsets, sizes = torch.Size([rank * rows // world_size, 0]), torch.Size([rows // world_size, 4096])
                chunks.append(ChunkStorageMetadata(offsets, sizes))
                stored[MetadataIndex(name, offsets)] = Place(rank, layer << 24, math.prod(sizes) * 4)
            entries[name] = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([rows, 4096]), chunks)
    planner = {name: tuple(name.split(".")) for name in entries}
    data = encode_metadata(Metadata(entries, planner, stored))
    assert len(data) <= estimate_bytes(dict.fromkeys(entries, 2), world_size)

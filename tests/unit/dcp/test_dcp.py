"""What a DCP save stores: its Metadata as bytes, and the bytes of all tensors in one stream (R11)."""

from __future__ import annotations

import contextlib
import copy
import math
import tracemalloc
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgpack
import numpy as np
import pytest
import torch
import torch.distributed as dist
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from memstore.client.dcp.metadata import FORMAT, Place, SavedLayout, decode_metadata, encode_metadata, estimate_bytes
from memstore.client.dcp.staging import ALIGNMENT_BYTES, LARGE_BYTES, copy_sources, stage_state
from memstore.errors import ProtocolError, UnsupportedState
from memstore.shell.codec.encode import plan_state
from memstore.shell.tensors.memory import DTYPES
from memstore.shell.tensors.slot_stream import SlotStream

# -- dcp metadata -------------------------------------------------------------------------------------
# DCP's Metadata as bytes: exact, bounded, and refused by name where there is no encoding.


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
        with contextlib.suppress(ProtocolError):  # the one error that damage may be; anything else fails the test
            assert isinstance(decode_metadata(hostile), Metadata)


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


# -- dcp staging --------------------------------------------------------------------------------------
# A staged state: every tensor's bytes in one stream, and placeholder tensors that say where (R11).


CHUNK_BYTES = 4096


class Moments(NamedTuple):
    mean: Any
    square: Any


def staged(state: Any) -> tuple[Any, bytes]:
    """Stage into slots full of rubbish; return the state with placeholders and its stream."""
    placeholders = stage_state(state)
    views = [memoryview(bytearray(b"\xaa" * CHUNK_BYTES)) for _ in range(-(-placeholders.nbytes // CHUNK_BYTES))]
    copy_sources(placeholders.placed, SlotStream(views, CHUNK_BYTES, placeholders.nbytes), placeholders.nbytes)
    return placeholders.state, b"".join(views)[: placeholders.nbytes]


def filled(placeholders: torch.Tensor, stream: bytes) -> torch.Tensor:
    """Return the tensor that a placeholder stands for."""
    assert placeholders.is_meta
    assert placeholders.is_contiguous()
    start = int(placeholders.storage_offset())
    assert start % ALIGNMENT_BYTES == 0
    data = bytearray(stream[start : start + placeholders.numel() * placeholders.element_size()])
    flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return torch.empty(0, dtype=placeholders.dtype).set_(flat.untyped_storage(), 0, tuple(placeholders.shape))


def raw(tensor: torch.Tensor) -> bytes:
    """Return a tensor's elements in row-major order."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.flatten().view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def check(one: torch.Tensor, placeholders: torch.Tensor, stream: bytes) -> None:
    assert (one.shape, one.dtype) == (placeholders.shape, placeholders.dtype)
    assert raw(one) == raw(filled(placeholders, stream))


STAGED_DTYPES = (
    torch.bool,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.int64,
    torch.float16,
    torch.uint16,
)


@pytest.mark.parametrize("dtype", STAGED_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (7,), (5, 3), (600, 70)], ids=str)
def test_every_dtype_and_shape_lands_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """0-d, empty, small and large tensors of every width, NaN payloads included, lie where the placeholder says."""
    count = int(np.prod(shape)) * dtype.itemsize
    data = torch.from_numpy(np.random.default_rng(3).integers(0, 2 if dtype is torch.bool else 256, count, np.uint8))
    tensor = (
        torch.empty(0, dtype=dtype).set_(data.untyped_storage(), 0, shape) if count else torch.empty(shape).to(dtype)
    )
    placeholders, stream = staged({"first": torch.ones(3), "tensor": tensor})
    check(tensor, placeholders["tensor"], stream)


def test_views_are_gathered_and_hold_only_their_own_bytes() -> None:
    """Transposed, strided, expanded, conjugated and sliced tensors are staged as the elements they show."""
    base = torch.randn(400, 300)
    wave = torch.randn(50, 3, dtype=torch.complex64)
    state = {
        "t": base.t(),
        "step": base[::2, 1::3],
        "flip": base.flip(0),
        "wide": torch.ones(1, 5).expand(100, 5),
        "row": base[7],
        "conj": wave.conj(),
        "neg": wave.conj().imag,
        "parameter": torch.nn.Parameter(base[:3]),
        "channels": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    }
    placeholders, stream = staged(state)
    for name, tensor in state.items():
        check(tensor, placeholders[name], stream)
    assert (
        len(stream) < 2 * base.nbytes + sum(t.numel() * t.element_size() for t in (state["step"], state["flip"])) + 8192
    )


def test_tied_tensors_are_copied_once() -> None:
    """The same tensor, a view of all of it and a Parameter over it take their bytes once."""
    weight = torch.randn(300, 100)
    state = {"head": weight, "again": weight, "view": weight.view(100, 300), "bits": weight.view(torch.int32)}
    placeholders, stream = staged(state)
    assert len(stream) == weight.nbytes
    for name, tensor in state.items():
        check(tensor, placeholders[name], stream)


def test_containers_keep_their_shape_and_objects_are_copied() -> None:
    """Containers are rebuilt around placeholder tensors; the rest is what it was at staging."""
    weight, history = torch.arange(4), {"losses": [1.0, 2.0]}
    state = {
        "list": [weight, (torch.zeros(2), "text"), [[torch.ones(1)]]],
        "named": Moments(torch.ones(3), 7),
        "ordered": OrderedDict(b=torch.ones(2), a=[]),
        "none": None,
        3: torch.full((2,), 5),
        "plain": history,
        "array": np.arange(3),
    }
    before = copy.deepcopy(history)
    placeholders, stream = staged(state)
    history["losses"].append(3.0)
    state["array"][:] = 0

    assert placeholders["plain"] == before
    assert placeholders["array"].tolist() == [0, 1, 2]
    assert list(placeholders) == list(state)
    assert list(placeholders["ordered"]) == ["b", "a"]
    assert isinstance(placeholders["named"], Moments)
    assert (placeholders["named"].square, placeholders["list"][1][1]) == (7, "text")
    check(weight, placeholders["list"][0], stream)
    check(torch.zeros(2), placeholders["list"][1][0], stream)
    check(torch.ones(1), placeholders["list"][2][0][0], stream)
    check(state[3], placeholders[3], stream)


def test_large_tensors_come_first_and_gaps_are_zero() -> None:
    """Equal states give equal streams, also in dirty slots, and small tensors do not move large ones."""
    large = {f"large{i}": torch.full((LARGE_BYTES // 4 + i,), float(i)) for i in range(3)}
    small = {f"small{i}": torch.full((i + 1,), i, dtype=torch.uint8) for i in range(5)}
    one, stream = staged({**small, **large})
    other, again = staged({**large, **small, "more": torch.ones(1)})
    assert stream == again[: len(stream)]
    assert {n: int(one[n].storage_offset()) for n in large} == {n: int(other[n].storage_offset()) for n in large}
    assert stream.count(b"\xaa" * 8) == 0


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (torch.sparse_coo_tensor([[0]], [1.0], (2,), check_invariants=True), "sparse"),
        (torch.empty(2, device="meta"), "meta"),
        (torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), "nested"),
    ],
    ids=["sparse", "meta", "nested"],
)
def test_what_cannot_be_staged_is_refused_by_path(tensor: torch.Tensor, why: str) -> None:
    """A tensor without plain bytes is refused, with the path to it, before anything is copied."""
    with pytest.raises(UnsupportedState, match=rf"model\.layers\.1\.weight: .*{why}.*Nothing was copied"):
        stage_state({"model": {"layers": [torch.ones(1), {"weight": tensor}]}})


@given(st.lists(st.integers(0, 40_000), max_size=12), st.integers(0, 1 << 30))
@settings(max_examples=40)
def test_any_mix_of_sizes_is_placed_without_overlap(sizes: list[int], seed: int) -> None:
    """However sizes fall on slot borders, every tensor is whole in the stream."""
    generator = torch.Generator().manual_seed(seed)
    state = {str(i): torch.randint(0, 256, (n,), generator=generator, dtype=torch.uint8) for i, n in enumerate(sizes)}
    placeholders, stream = staged(state)
    for name, tensor in state.items():
        check(tensor, placeholders[name], stream)


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_a_dtensor_keeps_its_mesh_placements_and_global_shape() -> None:
    """DCP's planner sees of a placeholder DTensor what it saw of the tensor; only the local part is in the stream."""
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    tensor = distribute_tensor(torch.randn(6, 4), mesh, [Shard(0), Replicate()])
    placeholders, stream = staged({"weight": tensor})
    found = placeholders["weight"]
    assert isinstance(found, DTensor)
    assert (found.device_mesh, found.placements, found.shape) == (mesh, tensor.placements, tensor.shape)
    check(tensor.to_local(), found.to_local(), stream)

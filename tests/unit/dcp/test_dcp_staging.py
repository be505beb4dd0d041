"""A staged state: every tensor's bytes in one stream, and placeholder tensors that say where (R11)."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from memstore.client.dcp.staging import ALIGNMENT_BYTES, LARGE_BYTES, copy_sources, stage_state
from memstore.errors import UnsupportedState
from memstore.shell.tensors.slot_stream import SlotStream

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


DTYPES = (torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int64, torch.float16, torch.uint16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
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

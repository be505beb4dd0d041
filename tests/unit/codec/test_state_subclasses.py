"""Tensor subclasses that are made of tensors are built again by their class, where a get has no live one to fill."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as whole_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.two_tensor import TwoTensor

import memstore
from memstore.errors import ConfigError, ManifestMismatch, UnsupportedState
from memstore.shell.codec.decode import check_into, decode_state
from memstore.shell.codec.encode import copy_into, plan_state
from memstore.shell.tensors import subclasses


def stored(state: object, chunk_bytes: int = 4096) -> tuple[bytes, list[memoryview], int]:
    plan = plan_state(state)
    views = [memoryview(bytearray(chunk_bytes)) for _ in range(0, plan.nbytes, chunk_bytes)]
    copy_into(plan, views, chunk_bytes)
    return plan.layout, views, chunk_bytes


class Halves(torch.Tensor):
    """A tensor of packed numbers, a scale and a context, as of low-bit optimizers; its class reads the scale."""

    packed: torch.Tensor
    scale: torch.Tensor
    label: Any

    @staticmethod
    def __new__(cls, packed: torch.Tensor, scale: torch.Tensor, label: Any) -> Halves:
        made: Halves = torch.Tensor._make_wrapper_subclass(cls, packed.shape, dtype=torch.float32)  # type: ignore[attr-defined]
        return made

    def __init__(self, packed: torch.Tensor, scale: torch.Tensor, label: Any) -> None:
        self.packed, self.scale, self.label = packed, scale, label
        self.factor = float(scale)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["packed", "scale"], {"label": self.label, "all": list(range(100))}

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Any], context: Any, size: Any, strides: Any) -> Halves:
        assert context["all"] == list(range(100))
        if context["label"] == "bad":
            raise AssertionError("an older version")
        return Halves(inner["packed"], inner["scale"], context["label"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Halves(args[0].packed, args[0].scale, args[0].label)
        raise NotImplementedError(func)


def halves(label: str = "x", factor: float = 0.5) -> Halves:
    return Halves(torch.arange(6, dtype=torch.int8), torch.tensor(factor), label)


class Slow(torch.optim.Optimizer):
    """An optimizer whose state is low-bit."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for number, param in enumerate(group["params"]):
                self.state[param] = {"moment": halves(factor=number + 0.5), "step": 3}


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module, imported as a user's own is, with the class in it."""
    module = ModuleType("their_tensors")
    monkeypatch.setitem(sys.modules, "their_tensors", module)
    module.Halves = Halves  # type: ignore[attr-defined]
    monkeypatch.setattr(Halves, "__module__", "their_tensors")
    return module


def test_without_into_it_comes_back_equal() -> None:
    """Its parts are there, and verified, before its class sees them."""
    got = decode_state(*stored([halves(), torch.nn.Parameter(halves("p"), requires_grad=False)]))
    assert [type(each) for each in got] == [Halves, Halves]
    assert got[0].packed.tolist() == list(range(6))
    assert (got[0].factor, got[0].label, got[1].label) == (0.5, "x", "p")
    assert [isinstance(each, torch.nn.Parameter) for each in got] == [False, True]
    two: Any = decode_state(*stored({"t": TwoTensor(torch.ones(2, 3).t(), torch.zeros(2, 3).t())}))["t"]  # type: ignore[no-untyped-call]
    assert (two.shape, two.stride(), two.b.sum()) == ((3, 2), (1, 3), 0)


@pytest.mark.parametrize("has_stepped", [False, True])
def test_a_fresh_optimizer_takes_low_bit_state(has_stepped: bool) -> None:
    """It has no tensors to fill before its first step; one that has stepped is filled in place."""

    def make() -> Slow:
        return Slow([torch.nn.Parameter(torch.zeros(6)) for _ in range(2)])

    optimizer, fresh = make(), make()
    optimizer.step()
    if has_stepped:
        fresh.step()
    decode_state(*stored({"opt": optimizer}), into={"opt": fresh})
    states = [fresh.state[param] for param in fresh.param_groups[0]["params"]]
    assert [(type(each["moment"]), float(each["moment"].scale)) for each in states] == [(Halves, 0.5), (Halves, 1.5)]


def test_a_class_is_found_by_name_where_it_is_imported_and_nothing_is_imported(elsewhere: ModuleType) -> None:
    """A module's __getattr__, which may import, is not asked."""
    state = stored({"opt": [halves()]})

    def imports(name: str) -> Any:
        raise AssertionError(f"{name} was asked for by name")

    elsewhere.__getattr__ = imports  # type: ignore[method-assign]
    assert type(decode_state(*state)["opt"][0]) is Halves
    del elsewhere.Halves
    with pytest.raises(UnsupportedState, match=r"their_tensors:Halves.*import it before get\(\), or .*register"):
        decode_state(*state)
    optimizer, fresh = Slow([torch.nn.Parameter(torch.zeros(6))]), Slow([torch.nn.Parameter(torch.zeros(6))])
    optimizer.step()
    with pytest.raises(ManifestMismatch, match=r"\['o'\]\['state'\]\[0\]\['moment'\].*their_tensors:Halves.*import"):
        check_into(stored({"o": optimizer})[0], {"o": fresh})


def test_a_registered_class_comes_back_wherever_it_was_defined(
    elsewhere: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a function, too."""
    del elsewhere.Halves
    monkeypatch.setattr(subclasses, "_BY_NAME", {})
    memstore.register(Halves)
    assert type(decode_state(*stored([halves()]))[0]) is Halves
    with pytest.raises(ConfigError, match="__tensor_unflatten__"):
        memstore.register(torch.nn.Parameter)


@pytest.mark.parametrize(
    "name", [b"builtins:exec__!!!", b"torch:Tensor!!!!!!", b"os.path:join!!!!!!", b"no.such:Thing!!!!!"]
)
def test_what_a_layout_names_is_a_tensor_subclass_or_refused(name: bytes, elsewhere: ModuleType) -> None:
    """No other object is called, whatever the stored name."""
    layout, views, chunk_bytes = stored([halves()])
    assert layout.count(b"their_tensors:Halves") == 1
    wanted = name.replace(b"!", b"")
    start = layout.index(b"their_tensors:Halves")
    assert layout[start - 1] == 0xA0 + 20  # msgpack's length of the text
    changed = layout[: start - 1] + bytes([0xA0 + len(wanted)]) + wanted + layout[start + 20 :]
    with pytest.raises(UnsupportedState, match=wanted.decode()):
        decode_state(changed, views, chunk_bytes)


def test_a_class_that_refuses_the_parts_is_named() -> None:
    """It may be of another version."""
    with pytest.raises(ManifestMismatch, match=r"Halves.*an older version"):
        decode_state(*stored([halves("bad")]))


@pytest.mark.filterwarnings("ignore:.*prototype")
def test_jagged_tensors_come_back() -> None:
    """Alone, and filled in place."""
    rows = [torch.randn(3, 4), torch.randn(5, 4)]
    jagged = torch.nested.nested_tensor(rows, layout=torch.jagged)
    live = torch.nested.nested_tensor([torch.zeros(3, 4), torch.zeros(5, 4)], layout=torch.jagged)
    decode_state(*stored({"t": jagged}), into={"t": live})
    for got in (decode_state(*stored({"t": jagged}))["t"], live):
        assert all(map(torch.equal, got.unbind(), rows))


def test_torchao_optimizers_go_on_in_a_fresh_process_as_they_would_have() -> None:
    """8 bits, 4 bits and fp8 under a plain optimizer: the losses after a restore are those of the unbroken run."""
    optim = pytest.importorskip("torchao.optim")

    def make(kind: Any, seed: int) -> tuple[torch.nn.Module, Any]:
        torch.manual_seed(seed)
        model = torch.nn.Linear(256, 64)
        return model, kind(model.parameters(), lr=1e-3)

    def train(model: torch.nn.Module, optimizer: Any, steps: int) -> list[float]:
        losses = []
        for number in range(steps):
            torch.manual_seed(number)
            loss = model(torch.randn(8, 256)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    for kind in (optim.AdamW8bit, optim.AdamW4bit, optim.AdamWFp8):
        model, optimizer = make(kind, 0)
        train(model, optimizer, 3)
        state = stored({"model": model, "optimizer": optimizer})
        other, fresh = make(kind, 1)
        decode_state(*state, into={"model": other, "optimizer": fresh})
        assert train(other, fresh, 4) == train(model, optimizer, 4)


# -- state dtensor ------------------------------------------------------------------------------------
# Sharded states: every rank stores its local part, and gets it back only onto the same mesh and placements.


def sharded_stored(state: object, chunk_bytes: int = 256) -> tuple[bytes, list[memoryview], int]:
    plan = plan_state(state)
    views = [memoryview(bytearray(chunk_bytes)) for _ in range(0, plan.nbytes, chunk_bytes)]
    copy_into(plan, views, chunk_bytes)
    return plan.layout, views, chunk_bytes


def distribute_tensor(full: torch.Tensor, mesh: Any, placements: list[Any]) -> DTensor:
    return whole_tensor(full, mesh, placements, src_data_rank=None)


@pytest.fixture
def mesh() -> Iterator[Any]:
    """A mesh of one rank without sockets: its collectives do nothing, so tests look at local tensors."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    dist.destroy_process_group()


def test_dtensor_fills_its_local_part(mesh: Any) -> None:
    """The live DTensor stays the object and takes the stored shard."""
    full = torch.randn(4, 3)
    target = distribute_tensor(torch.zeros(4, 3), mesh, [Shard(0)])
    got = decode_state(*sharded_stored({"w": distribute_tensor(full, mesh, [Shard(0)])}), into={"w": target})
    assert got["w"] is target
    assert torch.equal(target.to_local(), full)


def test_a_plan_asks_a_mesh_for_its_ranks_once(mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch computes them at every look; a model has a thousand DTensors on one mesh."""
    state = [distribute_tensor(torch.ones(4), mesh, [Shard(0)]) for _ in range(8)]
    real, looks = type(mesh).mesh, []

    def looked(self: Any) -> Any:
        looks.append(self)
        return real.fget(self)

    fresh = init_device_mesh("cpu", (1,), mesh_dim_names=("other",))
    state += [distribute_tensor(torch.ones(4), fresh, [Shard(0)]) for _ in range(8)]
    monkeypatch.setattr(type(mesh), "mesh", property(looked))
    plan_state(state)
    assert sum(each is fresh for each in looks) == 1
    plan_state(state)
    assert sum(each is fresh for each in looks) == 1


def test_dtensor_needs_into(mesh: Any) -> None:
    """A shard never comes back silently as a plain tensor."""
    with pytest.raises(ManifestMismatch, match="into="):
        decode_state(*sharded_stored([distribute_tensor(torch.ones(4), mesh, [Shard(0)])]))


def test_other_placement_shape_or_mesh_is_refused(mesh: Any) -> None:
    """Equal local shapes under other placements are another tensor."""
    state = [distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])]
    unnamed = init_device_mesh("cpu", (1,))
    targets = {
        "placements": distribute_tensor(torch.zeros(4, 4), mesh, [Shard(1)]),
        r"placements.*Replicate": distribute_tensor(torch.zeros(4, 4), mesh, [Replicate()]),
        "mesh names": distribute_tensor(torch.zeros(4, 4), unnamed, [Shard(0)]),
        "shape": distribute_tensor(torch.zeros(4, 5), mesh, [Shard(0)]),
        "dtensor": torch.zeros(4, 4),
    }
    for what, target in targets.items():
        with pytest.raises(ManifestMismatch, match=what):
            decode_state(*sharded_stored(state), into=[target])


def optimizer_state(mesh: Any, seed: int, steps: int) -> tuple[torch.nn.Linear, torch.optim.Adam]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 4, bias=False)
    model.weight = torch.nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    for _ in range(steps):
        model.weight.grad = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
        optimizer.step()
    return model, optimizer


def test_fresh_optimizer_gets_dtensors(mesh: Any) -> None:
    """Moments that have no place yet come back sharded, on the mesh of the parameters."""
    model, optimizer = optimizer_state(mesh, 0, 2)
    other, fresh = optimizer_state(mesh, 1, 0)
    decode_state(*sharded_stored({"m": model, "o": optimizer}), into={"o": fresh, "m": other})
    moment = fresh.state_dict()["state"][0]["exp_avg"]
    assert isinstance(moment, DTensor)
    assert moment.placements == (Shard(0),)
    assert torch.equal(moment.to_local(), optimizer.state_dict()["state"][0]["exp_avg"].to_local())
    assert torch.equal(other.weight.to_local(), model.weight.to_local())
    plain = torch.optim.Adam([torch.nn.Parameter(torch.zeros(4, 4))])
    with pytest.raises(ManifestMismatch, match="no device mesh"):
        decode_state(*sharded_stored(optimizer), into=plain)


def _rank(rank: int, meeting: str, results: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        full = torch.arange(15.0).view(5, 3)  # uneven: three rows here, two there
        state = {"w": distribute_tensor(full, mesh, [Shard(0)]), "r": distribute_tensor(full, mesh, [Replicate()])}
        target = {
            key: DTensor.from_local(
                torch.zeros_like(value.to_local()), mesh, value.placements, shape=value.shape, stride=value.stride()
            )
            for key, value in state.items()
        }
        layout, views, chunk_bytes = sharded_stored(state)
        decode_state(layout, views, chunk_bytes, into=target)
        same = torch.equal(target["w"].full_tensor(), full) and torch.equal(target["r"].to_local(), full)
        results.put((rank, same, plan_state(state["r"]).layout, plan_state(state).nbytes))
    finally:
        dist.destroy_process_group()


def test_two_ranks_keep_their_own_shards(tmp_path: Path) -> None:
    """On two real ranks each stores its rows only, and replicated tensors give equal layouts."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [context.Process(target=_rank, args=(rank, str(tmp_path / "meeting"), results)) for rank in range(2)]
    for process in ranks:
        process.start()
    try:
        answers = sorted(results.get(timeout=120) for _ in ranks)
    finally:
        for process in ranks:
            process.join(timeout=120)
            if process.is_alive():
                process.kill()
                process.join(timeout=120)
        results.close()
    assert [same for _, same, _, _ in answers] == [True, True]
    assert answers[0][2] == answers[1][2]
    assert [nbytes for *_, nbytes in answers] == [48 + 60, 32 + 60]  # 9 and 6 floats, aligned to 16; then 15

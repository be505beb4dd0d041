"""Committed steps as files of stock libraries: loaded by those libraries and compared bit for bit (R7, R14)."""

from __future__ import annotations

import json
import math
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from memstore.cli import main
from memstore.client.connect import connect
from memstore.client.dcp.reader import DcpReader
from memstore.client.reader import reader
from memstore.client.store import Store
from memstore.exchange.exporting import write_dcp
from memstore.testing.clusters.processes import ProcessCluster, wait_for

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


# -- exchange steps -----------------------------------------------------------------------------------
# Steps of several ranks, made in one process for tests of export and import: put, sharded, or saved through DCP.
#
# Every rank is a thread with a store of its own. DTensors are made without any communication.


WAIT_S = 60.0
STEP = 7


def as_ranks(
    cluster: ProcessCluster, job: str, count: int, work: Callable[[Store, int], Any], **options: Any
) -> list[Any]:
    """Run `work(store, rank)` on every rank of a new attempt of the job, each on a thread; `options` are connect's."""

    def run(rank: int) -> Any:
        with connect(job, rank=rank, world_size=count, config=cluster.config, **options) as store:
            return work(store, rank)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def put(cluster: ProcessCluster, job: str, states: list[Any], step: int = STEP) -> None:
    """Commit one step of as many ranks as there are states."""
    as_ranks(cluster, job, len(states), lambda store, rank: store.put(step, states[rank]).wait("committed", WAIT_S))


def save(cluster: ProcessCluster, job: str, states: list[Any]) -> None:
    """Commit one step through DCP's planner and our writer; this process plays DCP's collectives."""
    planners = [DefaultSavePlanner() for _ in states]
    for rank, (planner, state) in enumerate(zip(planners, states, strict=True)):
        planner.set_up_planner(state, None, rank == 0)
    plans, metadata = planners[0].create_global_plan([planner.create_local_plan() for planner in planners])
    results: list[Any] = [None] * len(states)
    barrier = threading.Barrier(len(states))

    def work(store: Store, rank: int) -> None:
        writer = store.dcp_writer(STEP, wait=None)
        writer.set_up_storage_writer(rank == 0)
        writer.prepare_global_plan(plans)
        results[rank] = writer.write_data(planners[rank].finish_plan(plans[rank]), planners[rank]).wait()
        barrier.wait(WAIT_S)
        if rank == 0:
            writer.finish(metadata, results)
        assert writer.ticket is not None
        writer.ticket.wait("committed", WAIT_S)

    as_ranks(cluster, job, len(states), work)


def sharded(full: dict[str, torch.Tensor], rank: int, shape: tuple[int, ...], placements: list[Any]) -> dict[str, Any]:
    """Return a rank's DTensors of global tensors, on a mesh of this shape."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=math.prod(shape))
    try:
        mesh = init_device_mesh("cpu", shape)
        return {
            name: distribute_tensor(tensor.contiguous(), mesh, placements, src_data_rank=None)
            for name, tensor in full.items()
        }
    finally:
        dist.destroy_process_group()


def bits(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor, row by row."""
    flat = tensor.detach().resolve_conj().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def odd_tensors(seed: int) -> dict[str, torch.Tensor]:
    """Return tensors of many kinds; NaNs with payloads among them."""
    made = torch.Generator().manual_seed(seed)
    nans = torch.randint(-(1 << 31), (1 << 31) - 1, (300, 7), dtype=torch.int32, generator=made).view(torch.float32)
    return {
        "nans": nans,
        "large": torch.randn(70_001, generator=made),  # crosses chunks
        "turned": torch.randn(33, 50, generator=made).t(),
        "half": torch.randn(9, 9, generator=made).bfloat16(),
        "eight": torch.randint(0, 255, (64,), dtype=torch.uint8, generator=made).view(torch.float8_e4m3fn),
        "count": torch.tensor(12, dtype=torch.int64),
        "none": torch.empty(0, 3),
        "imaginary": torch.randn(4, 4, dtype=torch.complex64, generator=made).conj(),
    }


# -- exchange -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    """Two hosts; the ranks of all tests sit on the first, which the tests' environment names."""
    labels = {"memstore": "replica"}
    with ProcessCluster(tmp_path_factory.mktemp("store"), {"h1": labels, "h2": labels}, arena_bytes=192 << 20) as found:
        yield found


@pytest.fixture(autouse=True)
def _on_h1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMSTORE_HOST", "h1")


def export(cluster: ProcessCluster, job: str, target: Path, *options: str, step: str = "7") -> dict[str, Any]:
    """Run `memstore export`; return its JSON."""
    command = ["export", job, step, str(target), *options, "--json", "--store", cluster.config.store]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    note: dict[str, Any] = json.loads(result.stdout)
    assert json.loads((target / "memstore.json").read_text()).items() <= note.items()
    return note


def refused(cluster: ProcessCluster, job: str, target: Path, *options: str, step: str = "7") -> str:
    """Run an export that must fail and leave nothing; return what it said."""
    before = sorted(target.parent.iterdir())
    command = ["export", job, step, str(target), *options, "--store", cluster.config.store]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 1, result.output
    assert sorted(target.parent.iterdir()) == before
    return result.stderr


def test_of_two_attempts_with_one_step_number_the_named_one_is_written(cluster: ProcessCluster, tmp_path: Path) -> None:
    """--attempt takes the step that a fresh start left behind; without it the step is the lineage's."""
    put(cluster, "attempts", [{"w": torch.zeros(4)}])
    with reader("attempts", config=cluster.config) as source:
        source.pin(7, "first")

    def again(store: Store, rank: int) -> None:
        store.put(7, {"w": torch.ones(4)}).wait("committed", WAIT_S)

    as_ranks(cluster, "attempts", 1, again, fresh=True)
    for attempt, value, options in ((1, 0.0, ["--attempt", "1"]), (2, 1.0, ["--attempt", "2"]), (2, 1.0, [])):
        target = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
        assert export(cluster, "attempts", target, "--format", "dcp", *options)["attempt"] == attempt
        got = {"w": torch.full((4,), 9.0)}
        dcp.load(got, checkpoint_id=target, no_dist=True)
        assert torch.equal(got["w"], torch.full((4,), value))
    assert "attempt 9" in refused(cluster, "attempts", tmp_path / "none", "--format", "dcp", "--attempt", "9")


def test_a_step_of_shards_is_refused_and_says_how_to_read_it(cluster: ProcessCluster, tmp_path: Path) -> None:
    """No format knows of a shared state that only some ranks' shards hold; nothing is left behind (R34)."""

    def work(store: Store, rank: int) -> None:
        store.put(7, {"w": torch.ones(4)}, rank_state={"rank": rank}).wait("committed", WAIT_S)

    as_ranks(cluster, "shards", 2, work, shard_rank=0, shard_count=1)
    for options in (["--format", "dcp"], ["--format", "safetensors"], ["--format", "dcp", "--rank", "1"]):
        said = refused(cluster, "shards", tmp_path / "out", *options)
        assert "step 7 was put with connect(shard_rank=, shard_count=), and such a step cannot be exported" in said
        assert "memstore.reader('shards').get(7, rank=r)" in said
    with reader("shards", config=cluster.config) as source:
        got = source.get(7, rank=1)
    assert torch.equal(got.state["w"], torch.ones(4))
    assert got.rank_state == {"rank": 1}


@pytest.mark.parametrize(
    ("shape", "placements"),
    [
        ((1,), [Shard(0)]),
        ((2,), [Shard(0)]),
        ((4,), [Shard(1)]),
        ((2, 2), [Shard(0), Shard(1)]),
        ((2, 2), [Replicate(), Shard(0)]),
    ],
)
def test_dtensors_become_one_global_tensor_that_stock_dcp_loads(
    cluster: ProcessCluster, tmp_path: Path, shape: tuple[int, ...], placements: list[Any]
) -> None:
    """dcp.load fills plain tensors, and DTensors of another mesh, with the very bits of what was distributed."""
    full = {"w": odd_tensors(3)["nans"], "uneven": torch.randn(5, 6), "big": torch.randn(128, 300)}
    count = math.prod(shape)
    job = f"mesh{count}-{len(shape)}-{placements[0].is_shard()}"
    states = [{"model": sharded(full, r, shape, placements), "step": 7, "seed": r} for r in range(count)]
    put(cluster, job, states)
    note = export(cluster, job, tmp_path / "out", "--format", "dcp")
    assert note["per_rank"] == ([f"rank{r:05d}.seed" for r in range(1, count)])

    state: dict[str, Any] = {"model": {name: torch.zeros_like(t) for name, t in full.items()}, "step": 0}
    dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    assert state["step"] == 7
    for name, tensor in full.items():
        assert bits(state["model"][name]) == bits(tensor), name

    other = sharded({name: torch.zeros_like(t) for name, t in full.items()}, 1, (3,), [Shard(0)])
    dcp.load({"model": other}, checkpoint_id=tmp_path / "out", no_dist=True)
    wanted = sharded(full, 1, (3,), [Shard(0)])
    for name in full:
        assert bits(other[name].to_local()) == bits(wanted[name].to_local()), name


def test_what_ranks_share_stands_once_and_what_differs_once_per_rank(cluster: ProcessCluster, tmp_path: Path) -> None:
    """Equal tensors and objects stand once, whichever ranks have them; others by rank; dcp.load reads both."""
    shared = torch.randn(40_000)

    def state(rank: int) -> dict[str, Any]:
        own = {"rng": torch.full((40_000,), float(rank)), "nan": float("nan"), "zero": -0.0 if rank else 0.0}
        return {"early": own, "shared": shared, "list": [1, {"t": torch.ones(3)}], f"only{rank}": torch.ones(2)}

    put(cluster, "shared", [state(rank) for rank in range(2)])
    note = export(cluster, "shared", tmp_path / "out", "--format", "dcp")
    assert note["per_rank"] == ["rank00001.early.rng", "rank00001.early.zero"]
    names = dcp.FileSystemReader(tmp_path / "out").read_metadata().state_dict_metadata
    assert set(names) == {
        *note["per_rank"],
        "early.rng",
        "early.zero",
        "early.nan",
        "shared",
        "list.0",
        "list.1.t",
        "only0",
        "only1",
    }
    got: dict[str, Any] = {"shared": torch.zeros(40_000), "rank00001": {"early": {"rng": torch.zeros(40_000)}}}
    got |= {"list": [0, {"t": torch.zeros(3)}]}
    dcp.load(got, checkpoint_id=tmp_path / "out", no_dist=True)
    assert bits(got["shared"]) == bits(shared)
    assert torch.equal(got["rank00001"]["early"]["rng"], torch.ones(40_000))
    assert got["list"] == [1, {"t": pytest.approx(torch.ones(3))}]

    one = export(cluster, "shared", tmp_path / "one", "--format", "dcp", "--rank", "1")
    assert one["per_rank"] == []
    got = {"early": {"rng": torch.zeros(40_000)}}
    dcp.load(got, checkpoint_id=tmp_path / "one", no_dist=True)
    assert torch.equal(got["early"]["rng"], torch.ones(40_000))


def test_a_name_of_the_state_that_means_another_rank_too_is_refused(cluster: ProcessCluster, tmp_path: Path) -> None:
    """Nothing is written over what the state has under the name that a differing leaf of rank 1 gets."""
    own = {"rank00001": {"x": torch.zeros(3)}}
    put(cluster, "taken", [{**own, "x": torch.full((3,), float(rank))} for rank in range(2)])
    said = refused(cluster, "taken", tmp_path / "out", "--format", "dcp")
    assert "'rank00001.x' is a name of the state, and of what rank 1 has: rename it" in said


@pytest.mark.parametrize(
    ("shape", "placements"), [((1,), [Shard(0)]), ((2,), [Shard(0)]), ((2, 2), [Replicate(), Shard(1)])]
)
def test_a_step_saved_through_dcp_becomes_a_stock_dcp_directory(
    cluster: ProcessCluster, tmp_path: Path, shape: tuple[int, ...], placements: list[Any]
) -> None:
    """The metadata is the step's own, and every tensor and object of it loads, whole or onto another mesh."""
    full = {"w": odd_tensors(5)["nans"], "uneven": torch.randn(5, 6), "big": torch.randn(128, 300)}
    plain = odd_tensors(6)
    count = math.prod(shape)
    job = f"saved{count}-{len(shape)}"
    states = [{"model": sharded(full, r, shape, placements), "odd": plain, "step": 7} for r in range(count)]
    save(cluster, job, states)
    note = export(cluster, job, tmp_path / "out", "--format", "dcp", step="latest")
    assert (note["step"], note["put_by"], note["world_size"]) == (7, "dcp", count)

    state: dict[str, Any] = {
        "model": {name: torch.zeros_like(t) for name, t in full.items()},
        "odd": {name: torch.zeros_like(t.contiguous()) for name, t in plain.items()},
        "step": 0,
    }
    dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    assert state["step"] == 7
    for name, tensor in [*full.items(), *plain.items()]:
        assert bits((state["model"] if name in full else state["odd"])[name]) == bits(tensor), name
    other = sharded({name: torch.zeros_like(t) for name, t in full.items()}, 1, (3,), [Shard(0)])
    dcp.load({"model": other}, checkpoint_id=tmp_path / "out", no_dist=True)
    wanted = sharded(full, 1, (3,), [Shard(0)])
    assert all(bits(other[name].to_local()) == bits(wanted[name].to_local()) for name in full)


def test_safetensors_hold_the_global_tensors_and_name_what_is_left_out(
    cluster: ProcessCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Put together from the ranks' parts, cut into files of bounded size with an index; read by the stock library."""
    stock = pytest.importorskip("safetensors.torch")
    full = {"a": torch.randn(300, 40), "b": odd_tensors(3)["nans"], "c": torch.randn(300, 40)}
    rest = {"odd": odd_tensors(4), "wide": torch.ones(2, dtype=torch.complex128), "step": 7}
    rest |= {"": torch.ones(1), "__metadata__": torch.ones(1)}
    states: list[Any] = [{"model": sharded(full, r, (2,), [Shard(0)]), **rest} for r in range(2)]
    put(cluster, "weights", states)
    note = export(cluster, "weights", tmp_path / "all", "--format", "safetensors")
    assert note["left_out"] == ["", "__metadata__", "step", "wide"]
    got = stock.load_file(tmp_path / "all" / "model.safetensors")
    assert set(got) == {*(f"model.{name}" for name in full), *(f"odd.{name}" for name in odd_tensors(4))}
    for name, tensor in full.items():
        assert bits(got[f"model.{name}"]) == bits(tensor)
    for name, tensor in odd_tensors(4).items():
        assert (bits(got[f"odd.{name}"]), got[f"odd.{name}"].shape) == (bits(tensor), tensor.shape)

    monkeypatch.setattr("memstore.exchange.exporting.FILE_BYTES", 50_000)
    options = ("--format", "safetensors", "--prefix", "model.")
    note = export(cluster, "weights", tmp_path / "cut", *options)
    assert note["files"] == 3
    assert "odd.half" in note["left_out"]
    index = json.loads((tmp_path / "cut" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in full.values())
    assert set(index["weight_map"]) == set(full)
    for name, file in index["weight_map"].items():
        assert bits(stock.load_file(tmp_path / "cut" / file)[name]) == bits(full[name])
    assert "no tensor" in refused(cluster, "weights", tmp_path / "no", *options[:3], "absent.")


STOPPED = """
import signal
import sys

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts the tests in the background ignores it
import memstore.exchange.exporting as exporting
from memstore.client.reader import reader
from memstore.cli import main

real = exporting.write_dcp

def write(*given):
    note = real(*given)
    print("written", flush=True)
    sys.stdin.read()
    return note

exporting.write_dcp = write
main(sys.argv[1:])
"""


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_an_export_that_is_ended_leaves_no_target(cluster: ProcessCluster, tmp_path: Path, sig: signal.Signals) -> None:
    """Everything was written and nothing renamed: no target; what a kill left is named, with how to remove it."""
    put(cluster, f"ended{sig}", [{"w": torch.ones(100_000)}])
    target = tmp_path / "out"
    command = ["export", f"ended{sig}", "7", str(target), "--format", "dcp", "--store", cluster.config.store]
    process = subprocess.Popen(
        [sys.executable, "-c", STOPPED, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=cluster.env("h1")
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"written\n"
    process.send_signal(sig)
    process.communicate(timeout=120)
    assert process.returncode != 0
    left = list(tmp_path.iterdir())
    assert [path.name for path in left] == ([".out.partial"] if sig is signal.SIGKILL else [])
    if left:
        said = refused(cluster, f"ended{sig}", target, "--format", "dcp")
        assert f"{left[0]} exists: another export writes it, or was killed, and then `rm -r {left[0]}`" in said
        shutil.rmtree(left[0])
    export(cluster, f"ended{sig}", target, "--format", "dcp")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert "exists" in refused(cluster, f"ended{sig}", target, "--format", "dcp")


def test_training_goes_on_and_drops_other_steps_meanwhile(
    cluster: ProcessCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step that is read is leased: two newer commits come, retention drops what is older, the export is whole."""
    weights = {step: torch.full((50_000,), float(step)) for step in (7, 8, 9)}

    def train(store: Store, rank: int) -> None:
        store.put(7, {"w": weights[7]}).wait("committed", WAIT_S)

        def write(*given: Any) -> Any:
            for step in (8, 9):
                store.put(step, {"w": weights[step]}).wait("committed", WAIT_S)
            wait_for(lambda: [s.step for s in store.steps()] == [9, 7], "step 8 to be dropped")
            return write_dcp(*given)

        monkeypatch.setattr("memstore.exchange.exporting.write_dcp", write)
        monkeypatch.setattr("signal.signal", lambda *_: None)  # ranks are threads here
        assert export(cluster, "goes-on", tmp_path / "out", "--format", "dcp")["not_kept"] == ""

    as_ranks(cluster, "goes-on", 1, train)
    state = {"w": torch.zeros(50_000)}
    dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    assert torch.equal(state["w"], weights[7])


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system: needs root")
@pytest.mark.parametrize("as_format", ["dcp", "safetensors"])
def test_a_full_disk_leaves_nothing(cluster: ProcessCluster, tmp_path: Path, as_format: str) -> None:
    """The error says that there is no room, and the small disk is empty again."""
    if as_format == "safetensors":
        pytest.importorskip("safetensors")
    put(cluster, f"full-{as_format}", [{"w": torch.randn(800_000)}])
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], check=False).returncode:
        pytest.skip("this machine lets no process mount a tmpfs")
    try:
        said = refused(cluster, f"full-{as_format}", disk / "out", "--format", as_format)
        assert f"{disk / 'out'} cannot be written: " in said, said
        assert "No space left on device" in said, said
        assert "Name a new folder in a place that this user may write, on a file system with room" in said, said
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_what_cannot_be_exported_is_refused_by_name(cluster: ProcessCluster, tmp_path: Path) -> None:
    """Nonsense input: an error that says what is wrong, and nothing on disk."""
    states: list[Any] = [{"model": sharded({"w": torch.randn(6, 4)}, r, (2,), [Shard(0)])} for r in range(2)]
    put(cluster, "parts", states)
    assert "12 of 24 elements" in refused(cluster, "parts", tmp_path / "out", "--format", "dcp", "--rank", "1")
    assert "no committed step 8" in refused(cluster, "parts", tmp_path / "out", "--format", "dcp", step="8")
    assert "step 7 has no rank 2" in refused(cluster, "parts", tmp_path / "out", "--format", "dcp", "--rank", "2")
    assert "is of format safetensors" in refused(cluster, "parts", tmp_path / "out", "--format", "dcp", "--prefix", "m")
    assert "no job" in refused(cluster, "part", tmp_path / "out", "--format", "dcp")
    put(cluster, "unnamed", [[torch.ones(3)]])
    assert "not a dict" in refused(cluster, "unnamed", tmp_path / "out", "--format", "dcp")
    put(cluster, "twice", [{"a.b": torch.ones(3), "a": {"b": torch.ones(2)}}])
    assert "two entries of the state have one name, joined by dots" in refused(
        cluster, "twice", tmp_path / "out", "--format", "dcp"
    )
    command = ["export", "parts", "7", str(tmp_path / "absent" / "out"), "--format", "dcp"]
    result = CliRunner().invoke(main, [*command, "--store", cluster.config.store])
    assert "No such file or directory. Name a new folder in a place that this user may write" in result.stderr
    result = CliRunner().invoke(main, ["export", "parts", "7", str(tmp_path / "out"), "--format", "torch"])
    assert result.exit_code == 2
    assert "format_utils dcp_to_torch DIRECTORY FILE" in result.stderr


def test_a_place_that_takes_no_folder_is_named_with_the_reason_and_the_remedy(
    cluster: ProcessCluster, tmp_path: Path
) -> None:
    """The file system refuses the folder: more than its bare words is said."""
    put(cluster, "placed", [{"w": torch.ones(3)}])
    for target, why in ((Path("/proc/out"), "No such file or directory"), (tmp_path / ("n" * 300), "too long")):
        command = ["export", "placed", "7", str(target), "--format", "dcp", "--store", cluster.config.store]
        result = CliRunner().invoke(main, command)
        assert result.exit_code == 1, result.output
        assert f"{target} cannot be written: " in result.stderr
        assert why in result.stderr
        assert "Name a new folder in a place that this user may write" in result.stderr


def test_a_file_where_the_parent_should_be_is_named(cluster: ProcessCluster, tmp_path: Path) -> None:
    """No folder can be made in it."""
    put(cluster, "filed", [{"w": torch.ones(3)}])
    (tmp_path / "file").write_text("x")
    command = ["export", "filed", "7", str(tmp_path / "file" / "out"), "--format", "dcp"]
    said = CliRunner().invoke(main, [*command, "--store", cluster.config.store]).stderr
    assert f"{tmp_path / 'file' / 'out'} cannot be written: Not a directory" in said


# -- import -------------------------------------------------------------------------------------------
# Files of stock libraries as a step of a new job: restored and compared bit for bit, and refused when they are bad.


@pytest.fixture(scope="module")
def import_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    """Two hosts, both of which take copies."""
    labels = {"memstore": "replica"}
    hosts = {"h1": labels, "h2": labels}
    with ProcessCluster(tmp_path_factory.mktemp("store"), hosts, arena_bytes=192 << 20) as found:
        yield found


def run(import_cluster: ProcessCluster, verb: str, *words: str, code: int = 0) -> dict[str, Any]:
    """Run a verb; return its JSON."""
    result = CliRunner().invoke(main, [verb, *words, "--json", "--store", import_cluster.config.store])
    assert result.exit_code == code, result.output
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def import_refused(import_cluster: ProcessCluster, job: str, folder: Path, *options: str) -> str:
    """Run an import that must fail and leave no job; return what it said."""
    result = CliRunner().invoke(main, ["import", job, str(folder), *options, "--store", import_cluster.config.store])
    assert result.exit_code == 1, result.output
    assert "internal error" not in result.stderr
    assert import_cluster.job(job) is None
    return result.stderr


def reader_steps(import_cluster: ProcessCluster, job: str) -> list[int]:
    """The committed steps of a job."""
    with reader(job, config=import_cluster.config) as source:
        return [info.step for info in source.steps() if info.committed]


def load(import_cluster: ProcessCluster, job: str, state: dict[str, Any], step: int) -> None:
    """Fill a state by stock dcp.load out of the store."""
    with reader(job, config=import_cluster.config) as source:
        dcp.load(state, storage_reader=DcpReader(source.ranges(), step), no_dist=True)


def test_a_removed_job_is_imported_again(import_cluster: ProcessCluster, tmp_path: Path) -> None:
    """Its attempts go on from those of before; it is as new all the same."""
    put(import_cluster, "origin", [{"x": torch.ones(10)}] * 2)
    run(import_cluster, "export", "origin", "7", str(tmp_path / "out"), "--format", "dcp")
    run(import_cluster, "import", "once-more", str(tmp_path / "out"))
    run(import_cluster, "rm", "once-more", "--yes")
    run(import_cluster, "import", "once-more", str(tmp_path / "out"))
    assert reader_steps(import_cluster, "once-more") == [7]
    assert (
        "exists"
        in CliRunner()
        .invoke(main, ["import", "once-more", str(tmp_path / "out"), "--store", import_cluster.config.store])
        .stderr
    )


def test_a_removed_job_of_durable_steps_exists_where_they_are(import_cluster: ProcessCluster, tmp_path: Path) -> None:
    """`memstore rm` keeps its steps there: to run it first would not help."""
    put(import_cluster, "origin-durable", [{"x": torch.ones(10)}])
    run(import_cluster, "export", "origin-durable", "7", str(tmp_path / "out"), "--format", "dcp")
    words = ["import", "kept", str(tmp_path / "out"), "--durable", str(tmp_path / "durable")]
    (tmp_path / "durable").mkdir()
    run(import_cluster, *words)
    run(import_cluster, "rm", "kept", "--yes")
    said = CliRunner().invoke(main, [*words, "--store", import_cluster.config.store]).stderr
    assert "with another --durable if durable storage has its steps" in said


@pytest.mark.parametrize(
    ("shape", "placements"), [((1,), [Shard(0)]), ((2,), [Shard(0)]), ((2, 2), [Replicate(), Shard(1)])]
)
def test_a_dcp_directory_comes_back_as_a_dcp_step(
    import_cluster: ProcessCluster, tmp_path: Path, shape: tuple[int, ...], placements: list[Any]
) -> None:
    """put, export, import, dcp.load whole and onto another mesh, export again: equal bits."""
    full = {"w": odd_tensors(3)["nans"], "uneven": torch.randn(5, 6), "big": torch.randn(128, 300)}
    odd, count = odd_tensors(4), math.prod(shape)
    states = [{"model": sharded(full, r, shape, placements), "odd": odd, "note": {"a": "b"}} for r in range(count)]
    put(import_cluster, f"sharded{count}", states)
    run(import_cluster, "export", f"sharded{count}", "7", str(tmp_path / "out"), "--format", "dcp")
    job = f"again{count}"
    made = run(import_cluster, "import", job, str(tmp_path / "out"), "--step", "40")
    assert (made["step"], made["level"], made["degraded"]) == (40, "committed", "")

    got: dict[str, Any] = {"model": {name: torch.zeros_like(t) for name, t in full.items()}, "note": {"a": ""}}
    got["odd"] = {name: torch.zeros_like(t.contiguous()) for name, t in odd.items()}
    load(import_cluster, job, got, 40)
    assert got["note"] == {"a": "b"}
    assert all(bits(got["model"][name]) == bits(t) for name, t in full.items())
    assert all(bits(got["odd"][name]) == bits(t) for name, t in odd.items())
    other = sharded({name: torch.zeros_like(t) for name, t in full.items()}, 1, (3,), [Shard(0)])
    load(import_cluster, job, {"model": other}, 40)
    wanted = sharded(full, 1, (3,), [Shard(0)])
    assert all(bits(other[name].to_local()) == bits(wanted[name].to_local()) for name in full)

    with connect(job, rank=0, world_size=1, config=import_cluster.config) as store:  # training goes on from it
        again = {"model": {name: torch.zeros_like(t) for name, t in full.items()}}
        dcp.load(again, storage_reader=store.dcp_reader(), no_dist=True)
        assert all(bits(again["model"][name]) == bits(t) for name, t in full.items())
        store.put(41, {**got, "more": torch.zeros(300_000)}).wait("committed", WAIT_S)
    run(import_cluster, "import", f"{job}-b", str(tmp_path / "out"))
    run(import_cluster, "export", f"{job}-b", "latest", str(tmp_path / "second"), "--format", "dcp")
    second = {"model": {name: torch.zeros_like(t) for name, t in full.items()}}
    dcp.load(second, checkpoint_id=tmp_path / "second", no_dist=True)
    assert all(bits(second["model"][name]) == bits(t) for name, t in full.items())


class Planted:
    """Unpickled by a process that trusts a file, it leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def test_bad_files_are_refused_before_there_is_a_job(import_cluster: ProcessCluster, tmp_path: Path) -> None:
    """Torn, missing, foreign and hostile files: an error that says which, no job, and no code of theirs is run."""
    mark, state = tmp_path / "mark", {"w": torch.randn(30_000), "step": 3}

    def folder(name: str) -> Path:
        (tmp_path / name).mkdir()
        return tmp_path / name

    dcp.save(state, checkpoint_id=tmp_path / "torn", no_dist=True)
    torn = next((tmp_path / "torn").glob("*.distcp"))
    whole = torn.read_bytes()
    torn.write_bytes(whole[: len(whole) // 2])
    assert "ends behind" in import_refused(import_cluster, "bad", tmp_path / "torn")
    torn.unlink()
    assert "No such file" in import_refused(import_cluster, "bad", tmp_path / "torn")
    torn.write_bytes(b"\x5a" * len(whole))
    assert "cannot be read" in import_refused(import_cluster, "bad", tmp_path / "torn")

    for content in (b"", b"nonsense", pickle.dumps({"a": 1}), pickle.dumps(Planted(mark))):
        (tmp_path / "torn" / ".metadata").write_bytes(content)
        assert "is not the metadata of a whole DCP directory" in import_refused(
            import_cluster, "bad", tmp_path / "torn"
        )
    (folder("files") / "rank_00000.pt").write_bytes(b"nonsense")
    assert "each rank loads by itself, with torch.load, and puts" in import_refused(
        import_cluster, "bad", tmp_path / "files"
    )
    (folder("tensors") / "a.safetensors").write_bytes(b"\xff" * 100)
    assert "HuggingFaceStorageReader(" in import_refused(import_cluster, "bad", tmp_path / "tensors")
    dcp.save(state, checkpoint_id=folder("noted"), no_dist=True)
    (tmp_path / "noted" / "memstore.json").mkdir()
    assert "memstore.json says no step: give --step" in import_refused(import_cluster, "bad", tmp_path / "noted")
    assert not mark.exists()
    assert "is it the right folder" in import_refused(import_cluster, "bad", folder("empty"))
    with connect("bad", rank=0, world_size=1, config=import_cluster.config) as store:
        assert store.get() is None  # none of it ever was a job


def test_an_import_with_too_few_copies_says_so(import_cluster: ProcessCluster, tmp_path: Path) -> None:
    """Three copies on two hosts: exit is 4 (R18)."""
    dcp.save({"w": torch.ones(1000)}, checkpoint_id=tmp_path / "in", no_dist=True)
    made = run(import_cluster, "import", "thin", str(tmp_path / "in"), "--replicas", "3", code=4)
    assert "2 of 3" in made["degraded"]
    assert reader_steps(import_cluster, "thin") == [0]


def test_a_launcher_s_processes_are_sent_to_dcp(
    import_cluster: ProcessCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several would make one job several times; the remedy is what each rank of the job itself does."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    dcp.save({"w": torch.ones(1000)}, checkpoint_id=tmp_path / "in", no_dist=True)
    assert "dcp.save(storage_writer=store.dcp_writer(step))" in import_refused(
        import_cluster, "several", tmp_path / "in"
    )

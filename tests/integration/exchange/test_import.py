"""Files of stock libraries as a step of a new job: restored and compared bit for bit, and refused when they are bad."""

from __future__ import annotations

import json
import math
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from torch.distributed.tensor import Replicate, Shard

from memstore.cli import main
from memstore.client.connect import connect
from memstore.client.dcp.reader import DcpReader
from memstore.client.reader import reader
from memstore.testing.clusters.processes import ProcessCluster
from memstore.testing.data.exchange_steps import WAIT_S, bits, odd_tensors, put, sharded

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    """Two hosts, both of which take copies."""
    labels = {"memstore": "replica"}
    hosts = {"h1": labels, "h2": labels}
    with ProcessCluster(tmp_path_factory.mktemp("store"), hosts, arena_bytes=192 << 20) as found:
        yield found


@pytest.fixture(autouse=True)
def _on_h1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMSTORE_HOST", "h1")


def run(cluster: ProcessCluster, verb: str, *words: str, code: int = 0) -> dict[str, Any]:
    """Run a verb; return its JSON."""
    result = CliRunner().invoke(main, [verb, *words, "--json", "--store", cluster.config.store])
    assert result.exit_code == code, result.output
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def refused(cluster: ProcessCluster, job: str, folder: Path, *options: str) -> str:
    """Run an import that must fail and leave no job; return what it said."""
    result = CliRunner().invoke(main, ["import", job, str(folder), *options, "--store", cluster.config.store])
    assert result.exit_code == 1, result.output
    assert "internal error" not in result.stderr
    assert cluster.job(job) is None
    return result.stderr


def reader_steps(cluster: ProcessCluster, job: str) -> list[int]:
    """The committed steps of a job."""
    with reader(job, config=cluster.config) as source:
        return [info.step for info in source.steps() if info.committed]


def load(cluster: ProcessCluster, job: str, state: dict[str, Any], step: int) -> None:
    """Fill a state by stock dcp.load out of the store."""
    with reader(job, config=cluster.config) as source:
        dcp.load(state, storage_reader=DcpReader(source.ranges(), step), no_dist=True)


def test_a_removed_job_is_imported_again(cluster: ProcessCluster, tmp_path: Path) -> None:
    """Its attempts go on from those of before; it is as new all the same."""
    put(cluster, "origin", [{"x": torch.ones(10)}] * 2)
    run(cluster, "export", "origin", "7", str(tmp_path / "out"), "--format", "dcp")
    run(cluster, "import", "once-more", str(tmp_path / "out"))
    run(cluster, "rm", "once-more", "--yes")
    run(cluster, "import", "once-more", str(tmp_path / "out"))
    assert reader_steps(cluster, "once-more") == [7]
    assert (
        "exists"
        in CliRunner()
        .invoke(main, ["import", "once-more", str(tmp_path / "out"), "--store", cluster.config.store])
        .stderr
    )


def test_a_removed_job_of_durable_steps_exists_where_they_are(cluster: ProcessCluster, tmp_path: Path) -> None:
    """`memstore rm` keeps its steps there: to run it first would not help."""
    put(cluster, "origin-durable", [{"x": torch.ones(10)}])
    run(cluster, "export", "origin-durable", "7", str(tmp_path / "out"), "--format", "dcp")
    words = ["import", "kept", str(tmp_path / "out"), "--durable", str(tmp_path / "durable")]
    (tmp_path / "durable").mkdir()
    run(cluster, *words)
    run(cluster, "rm", "kept", "--yes")
    said = CliRunner().invoke(main, [*words, "--store", cluster.config.store]).stderr
    assert "with another --durable if durable storage has its steps" in said


@pytest.mark.parametrize(
    ("shape", "placements"), [((1,), [Shard(0)]), ((2,), [Shard(0)]), ((2, 2), [Replicate(), Shard(1)])]
)
def test_a_dcp_directory_comes_back_as_a_dcp_step(
    cluster: ProcessCluster, tmp_path: Path, shape: tuple[int, ...], placements: list[Any]
) -> None:
    """put, export, import, dcp.load whole and onto another mesh, export again: equal bits."""
    full = {"w": odd_tensors(3)["nans"], "uneven": torch.randn(5, 6), "big": torch.randn(128, 300)}
    odd, count = odd_tensors(4), math.prod(shape)
    states = [{"model": sharded(full, r, shape, placements), "odd": odd, "note": {"a": "b"}} for r in range(count)]
    put(cluster, f"sharded{count}", states)
    run(cluster, "export", f"sharded{count}", "7", str(tmp_path / "out"), "--format", "dcp")
    job = f"again{count}"
    made = run(cluster, "import", job, str(tmp_path / "out"), "--step", "40")
    assert (made["step"], made["level"], made["degraded"]) == (40, "committed", "")

    got: dict[str, Any] = {"model": {name: torch.zeros_like(t) for name, t in full.items()}, "note": {"a": ""}}
    got["odd"] = {name: torch.zeros_like(t.contiguous()) for name, t in odd.items()}
    load(cluster, job, got, 40)
    assert got["note"] == {"a": "b"}
    assert all(bits(got["model"][name]) == bits(t) for name, t in full.items())
    assert all(bits(got["odd"][name]) == bits(t) for name, t in odd.items())
    other = sharded({name: torch.zeros_like(t) for name, t in full.items()}, 1, (3,), [Shard(0)])
    load(cluster, job, {"model": other}, 40)
    wanted = sharded(full, 1, (3,), [Shard(0)])
    assert all(bits(other[name].to_local()) == bits(wanted[name].to_local()) for name in full)

    with connect(job, rank=0, world_size=1, config=cluster.config) as store:  # training goes on from it
        again = {"model": {name: torch.zeros_like(t) for name, t in full.items()}}
        dcp.load(again, storage_reader=store.dcp_reader(), no_dist=True)
        assert all(bits(again["model"][name]) == bits(t) for name, t in full.items())
        store.put(41, {**got, "more": torch.zeros(300_000)}).wait("committed", WAIT_S)
    run(cluster, "import", f"{job}-b", str(tmp_path / "out"))
    run(cluster, "export", f"{job}-b", "latest", str(tmp_path / "second"), "--format", "dcp")
    second = {"model": {name: torch.zeros_like(t) for name, t in full.items()}}
    dcp.load(second, checkpoint_id=tmp_path / "second", no_dist=True)
    assert all(bits(second["model"][name]) == bits(t) for name, t in full.items())


class Planted:
    """Unpickled by a process that trusts a file, it leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def test_bad_files_are_refused_before_there_is_a_job(cluster: ProcessCluster, tmp_path: Path) -> None:
    """Torn, missing, foreign and hostile files: an error that says which, no job, and no code of theirs is run."""
    mark, state = tmp_path / "mark", {"w": torch.randn(30_000), "step": 3}

    def folder(name: str) -> Path:
        (tmp_path / name).mkdir()
        return tmp_path / name

    dcp.save(state, checkpoint_id=tmp_path / "torn", no_dist=True)
    torn = next((tmp_path / "torn").glob("*.distcp"))
    whole = torn.read_bytes()
    torn.write_bytes(whole[: len(whole) // 2])
    assert "ends behind" in refused(cluster, "bad", tmp_path / "torn")
    torn.unlink()
    assert "No such file" in refused(cluster, "bad", tmp_path / "torn")
    torn.write_bytes(b"\x5a" * len(whole))
    assert "cannot be read" in refused(cluster, "bad", tmp_path / "torn")

    for content in (b"", b"nonsense", pickle.dumps({"a": 1}), pickle.dumps(Planted(mark))):
        (tmp_path / "torn" / ".metadata").write_bytes(content)
        assert "is not the metadata of a whole DCP directory" in refused(cluster, "bad", tmp_path / "torn")
    (folder("files") / "rank_00000.pt").write_bytes(b"nonsense")
    assert "each rank loads by itself, with torch.load, and puts" in refused(cluster, "bad", tmp_path / "files")
    (folder("tensors") / "a.safetensors").write_bytes(b"\xff" * 100)
    assert "HuggingFaceStorageReader(" in refused(cluster, "bad", tmp_path / "tensors")
    dcp.save(state, checkpoint_id=folder("noted"), no_dist=True)
    (tmp_path / "noted" / "memstore.json").mkdir()
    assert "memstore.json says no step: give --step" in refused(cluster, "bad", tmp_path / "noted")
    assert not mark.exists()
    assert "is it the right folder" in refused(cluster, "bad", folder("empty"))
    with connect("bad", rank=0, world_size=1, config=cluster.config) as store:
        assert store.get() is None  # none of it ever was a job


def test_an_import_with_too_few_copies_says_so(cluster: ProcessCluster, tmp_path: Path) -> None:
    """Three copies on two hosts: exit is 4 (R18)."""
    dcp.save({"w": torch.ones(1000)}, checkpoint_id=tmp_path / "in", no_dist=True)
    made = run(cluster, "import", "thin", str(tmp_path / "in"), "--replicas", "3", code=4)
    assert "2 of 3" in made["degraded"]
    assert reader_steps(cluster, "thin") == [0]


def test_a_launcher_s_processes_are_sent_to_dcp(
    cluster: ProcessCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several would make one job several times; the remedy is what each rank of the job itself does."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    dcp.save({"w": torch.ones(1000)}, checkpoint_id=tmp_path / "in", no_dist=True)
    assert "dcp.save(storage_writer=store.dcp_writer(step))" in refused(cluster, "several", tmp_path / "in")

"""Files of stock libraries as a step of a new job: restored and compared bit for bit, and refused when they are bad."""

from __future__ import annotations

import json
import math
import os
import pickle
import subprocess
import sys
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
from memstore.testing.data.exchange_steps import WAIT_S, as_ranks, bits, odd_tensors, put, sharded

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


@pytest.mark.parametrize("count", [1, 2, 4])
def test_rank_files_come_back_as_a_put_step(cluster: ProcessCluster, tmp_path: Path, count: int) -> None:
    """Export and import of torch files: every rank gets what it put, with the usual copies."""
    states = [{"model": odd_tensors(rank), "step": 7, "rank": rank} for rank in range(count)]
    put(cluster, f"from{count}", states)
    run(cluster, "export", f"from{count}", "7", str(tmp_path / "out"), "--format", "torch")
    made = run(cluster, "import", f"to{count}", str(tmp_path / "out"))
    assert (made["step"], made["world_size"], made["degraded"]) == (7, count, "")
    for rank, got in enumerate(as_ranks(cluster, f"to{count}", count, lambda store, rank: store.get())):
        assert (got.step, got.state["rank"]) == (7, rank)
        assert all(bits(got.state["model"][name]) == bits(t) for name, t in states[rank]["model"].items())
    assert len(reader_steps(cluster, f"to{count}")) == 1  # and what follows leaves it alone
    assert "exists" in CliRunner().invoke(
        main, ["import", f"to{count}", str(tmp_path / "out"), "--store", cluster.config.store]
    ).stderr  # fmt: skip


def test_a_removed_job_is_imported_again(cluster: ProcessCluster, tmp_path: Path) -> None:
    """Its attempts go on from those of before; it is as new all the same."""
    put(cluster, "origin", [{"x": torch.ones(10)}] * 2)
    run(cluster, "export", "origin", "7", str(tmp_path / "out"), "--format", "torch")
    run(cluster, "import", "once-more", str(tmp_path / "out"))
    run(cluster, "rm", "once-more", "--yes")
    run(cluster, "import", "once-more", str(tmp_path / "out"))
    assert reader_steps(cluster, "once-more") == [7]
    assert "exists" in CliRunner().invoke(
        main, ["import", "once-more", str(tmp_path / "out"), "--store", cluster.config.store]
    ).stderr  # fmt: skip


def test_a_removed_job_of_durable_steps_exists_where_they_are(cluster: ProcessCluster, tmp_path: Path) -> None:
    """`memstore rm` keeps its steps there: to run it first would not help."""
    put(cluster, "origin-durable", [{"x": torch.ones(10)}])
    run(cluster, "export", "origin-durable", "7", str(tmp_path / "out"), "--format", "torch")
    words = ["import", "kept", str(tmp_path / "out"), "--durable", str(tmp_path / "durable")]
    (tmp_path / "durable").mkdir()
    run(cluster, *words)
    run(cluster, "rm", "kept", "--yes")
    said = CliRunner().invoke(main, [*words, "--store", cluster.config.store]).stderr
    assert f"its steps are in {tmp_path / 'durable'}: import under another name, or with another --durable" in said


@pytest.mark.parametrize(
    ("shape", "placements", "ranks"),
    [((1,), [Shard(0)], 1), ((2,), [Shard(0)], 4), ((2, 2), [Replicate(), Shard(1)], 2)],
)
def test_a_dcp_directory_comes_back_as_a_dcp_step(
    cluster: ProcessCluster, tmp_path: Path, shape: tuple[int, ...], placements: list[Any], ranks: int
) -> None:
    """put, export, import with another world size, dcp.load whole and onto another mesh, export again: equal bits."""
    full = {"w": odd_tensors(3)["nans"], "uneven": torch.randn(5, 6), "big": torch.randn(128, 300)}
    odd, count = odd_tensors(4), math.prod(shape)
    states = [{"model": sharded(full, r, shape, placements), "odd": odd, "note": {"a": "b"}} for r in range(count)]
    put(cluster, f"sharded{count}", states)
    run(cluster, "export", f"sharded{count}", "7", str(tmp_path / "out"), "--format", "dcp")
    job = f"again{count}"
    made = run(cluster, "import", job, str(tmp_path / "out"), "--step", "40", "--ranks", str(ranks))
    assert (made["step"], made["world_size"], made["made_by"], made["degraded"]) == (40, ranks, "dcp", "")

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
    run(cluster, "import", f"{job}-b", str(tmp_path / "out"), "--ranks", str(ranks))
    run(cluster, "export", f"{job}-b", "latest", str(tmp_path / "second"), "--format", "dcp")
    second = {"model": {name: torch.zeros_like(t) for name, t in full.items()}}
    dcp.load(second, checkpoint_id=tmp_path / "second", no_dist=True)
    assert all(bits(second["model"][name]) == bits(t) for name, t in full.items())


def test_safetensors_come_back_as_a_dcp_step(cluster: ProcessCluster, tmp_path: Path) -> None:
    """Files with an index, written by the stock library or by export, under a prefix; dcp.load fills a model's dict."""
    stock = pytest.importorskip("safetensors.torch")
    tensors = {name: t for name, t in odd_tensors(9).items() if not t.is_conj()}
    put(cluster, "weights", [{"model": tensors}])
    options = ("--format", "safetensors", "--prefix", "model.", "--file-bytes", "20KB")
    assert run(cluster, "export", "weights", "7", str(tmp_path / "cut"), *options)["files"] > 1
    (tmp_path / "one").mkdir()
    stock.save_file({name: t.contiguous() for name, t in tensors.items()}, tmp_path / "one" / "any.safetensors")
    for folder, step in (("cut", 7), ("one", 0)):
        made = run(cluster, "import", f"weights-{folder}", str(tmp_path / folder), "--prefix", "model.", "--ranks", "2")
        assert made["step"] == step
        got = {"model": {name: torch.zeros_like(t.contiguous()) for name, t in tensors.items()}}
        load(cluster, f"weights-{folder}", got, step)
        assert all(bits(got["model"][name]) == bits(t) for name, t in tensors.items())


def test_processes_on_two_hosts_share_the_ranks(cluster: ProcessCluster, tmp_path: Path) -> None:
    """With RANK and WORLD_SIZE each process holds its share of one step on its own host."""
    state = {"w": torch.randn(100_000), "v": torch.randn(50_000), "step": 3}
    dcp.save(state, checkpoint_id=tmp_path / "in", no_dist=True)
    command = [sys.executable, "-m", "memstore.cli", "import", "two", str(tmp_path / "in"), "--json"]
    processes = [
        subprocess.Popen(
            [*command, "--store", cluster.config.store], stdout=subprocess.PIPE,
            env={**cluster.env(host), "RANK": str(rank), "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "import"},
        )
        for rank, host in enumerate(["h1", "h2"])
    ]  # fmt: skip
    made = [json.loads(process.communicate(timeout=100)[0]) for process in processes]
    assert [(m["ranks"], m["world_size"], m["degraded"]) for m in made] == [([0], 2, ""), ([1], 2, "")]
    got = {"w": torch.zeros(100_000), "v": torch.zeros(50_000), "step": 0}
    load(cluster, "two", got, 0)
    assert got["step"] == 3
    assert bits(got["w"]) == bits(state["w"])
    assert bits(got["v"]) == bits(state["v"])


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
    assert "cannot be read" in refused(cluster, "bad", tmp_path / "files")
    torch.save({"x": Planted(mark)}, tmp_path / "files" / "rank_00000.pt")
    assert "--allow-pickle" in refused(cluster, "bad", tmp_path / "files")
    torch.save(state, tmp_path / "files" / "rank_00000.pt")
    torch.save(state, tmp_path / "files" / "rank_00002.pt")
    assert "one file for every rank" in refused(cluster, "bad", tmp_path / "files")
    (folder("nested") / "rank_00000.pt").mkdir()
    assert "rank_00000.pt cannot be read: Is a directory. It must be" in refused(cluster, "bad", tmp_path / "nested")
    (folder("noted") / "memstore.json").mkdir()
    torch.save(state, tmp_path / "noted" / "rank_00000.pt")
    assert "memstore.json says no step: give --step" in refused(cluster, "bad", tmp_path / "noted")
    assert "where rank_00000.pt to rank_00000.pt belong" in refused(cluster, "bad", folder("none"), "--format", "torch")
    assert not mark.exists()

    pytest.importorskip("safetensors")
    (folder("tensors") / "a.safetensors").write_bytes(b"\xff" * 100)
    assert "not a whole safetensors file" in refused(cluster, "bad", tmp_path / "tensors")
    (tmp_path / "tensors" / "model.safetensors.index.json").write_text('{"weight_map": {"w": "../a.safetensors"}}')
    assert "are not in" in refused(cluster, "bad", tmp_path / "tensors")
    (tmp_path / "tensors" / "model.safetensors.index.json").unlink()
    (tmp_path / "tensors" / "model.safetensors.index.json").mkdir()
    assert "is no index of safetensors files" in refused(cluster, "bad", tmp_path / "tensors")
    assert "is it the right folder" in refused(cluster, "bad", folder("empty"))
    with connect("bad", rank=0, world_size=1, config=cluster.config) as store:
        assert store.get() is None  # none of it ever was a job


@pytest.mark.timeout(240)
def test_an_import_with_too_few_copies_says_so(
    cluster: ProcessCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three copies on two hosts: no repair can bring the third, so none is waited for; exit is 4 (R18)."""
    monkeypatch.setattr("memstore.exchange.importing.REPAIR_S", 3600.0)
    dcp.save({"w": torch.ones(1000)}, checkpoint_id=tmp_path / "in", no_dist=True)
    made = run(cluster, "import", "thin", str(tmp_path / "in"), "--replicas", "3", code=4)
    assert "2 of 3" in made["degraded"]
    assert reader_steps(cluster, "thin") == [0]

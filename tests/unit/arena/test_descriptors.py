"""A holder that runs out of file descriptors says so while it lasts, and serves again as soon as there are some."""

from __future__ import annotations

import resource
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any

import pytest
import torch

from memstore.client.connect import connect
from memstore.core.report.problems import DEGRADED
from memstore.testing.clusters.processes import ProcessCluster, wait_for

WAIT_S = 60.0
SPARE = 30  # enough for a rank, its copies and its host's peers


def short_rows(cluster: ProcessCluster) -> list[dict[str, Any]]:
    return [row for row in cluster.status()["problems"] if row["kind"] == "descriptors"]


def lowest_free(pid: int) -> int:
    """Return the number that the next descriptor of a process has: with this limit it opens none."""
    taken = {int(each.name) for each in Path(f"/proc/{pid}/fd").iterdir()}
    return next(number for number in range(1 << 20) if number not in taken)


def processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


@pytest.mark.parametrize("way", ["others leave", "the printed remedy"])
def test_a_holder_without_descriptors_is_a_problem_that_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Ranks wait while it is full, at no cost to it, and connect once it is not; the remedy works on it as it runs."""
    monkeypatch.setenv("MEMSTORE_HOST", "h1")
    with ProcessCluster(tmp_path, {"h1": {}, "h2": {}}) as cluster, ThreadPoolExecutor(1) as pool:
        holder = cluster.holders["h1"]
        assert not short_rows(cluster)
        hard = resource.prlimit(holder.pid, resource.RLIMIT_NOFILE)[1]
        limit = len(list(Path(f"/proc/{holder.pid}/fd").iterdir())) + SPARE
        resource.prlimit(holder.pid, resource.RLIMIT_NOFILE, (limit, hard))
        idle = []
        for _ in range(2 * SPARE):  # more than it can accept
            idle.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            idle[-1].connect(str(cluster.arena("h1") / "holder.sock"))
        (row,) = wait_for(lambda: short_rows(cluster), "the problem", WAIT_S)
        assert (row["severity"], row["about"]) == (DEGRADED, "h1")
        assert f" of {limit} file descriptors" in row["cause"]
        before_s = processor_s(holder.pid)
        later = pool.submit(connect, "later", rank=0, world_size=1, config=cluster.config)
        with pytest.raises(FutureTimeout):
            later.result(2.0)
        assert processor_s(holder.pid) - before_s < 1.0
        if way == "others leave":
            for one in idle:
                one.close()
        else:
            subprocess.run(row["remedy"].split("`")[1].split(), check=True)
        with later.result(WAIT_S) as store:
            wait_for(lambda: not short_rows(cluster), "no problem any more", WAIT_S)
            state = {"a": torch.ones(4)}
            store.put(1, state).wait("committed", WAIT_S)
            with connect("first", rank=0, world_size=1, config=cluster.config) as other:
                resource.prlimit(holder.pid, resource.RLIMIT_NOFILE, (lowest_free(holder.pid), hard))
                put = pool.submit(other.put, 1, state)
                with pytest.raises(FutureTimeout):  # a first put waits for them, and is not said to be too large
                    put.result(2.0)
                resource.prlimit(holder.pid, resource.RLIMIT_NOFILE, (hard, hard))
                put.result(WAIT_S).wait("committed", WAIT_S)
        assert holder.poll() is None
        for one in idle:
            one.close()

"""How tests start an example: the guide's command in a store of their own, watched, killed, its output read."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from repository import ROOT

from memstore.testing.clusters.embedded import EmbeddedCluster
from memstore.testing.clusters.processes import wait_for
from memstore.testing.faults.processes import descendants, kill, wait_gone, with_start_times

EXAMPLES = ROOT / "examples"
GUIDE = (ROOT / "docs/guide/frameworks.md").read_text(encoding="utf-8")
DEADLINE_S = 240.0


def environment(cluster: EmbeddedCluster, tmp_path: Path) -> dict[str, str]:
    own = {
        "RAY_ADDRESS": cluster.address,
        "HOME": str(tmp_path),
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
        "RAY_DEDUP_LOGS": "0",
    }
    return {**os.environ, **own, "PYTHONUNBUFFERED": "1"}


def first_steps(output: str) -> set[int]:
    return {int(step) for step in re.findall(r"rank \d+: first step (\d+)", output)}


def losses(output: str) -> dict[tuple[int, int], str]:
    found = re.findall(r"rank (\d+): step (\d+) loss ([0-9.]+)", output)
    return {(int(rank), int(step)): loss for rank, step, loss in found}


def kill_all(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to a launcher and everything below it, then wait until all of it is gone."""
    victims = with_start_times(descendants([process.pid]))
    kill(victims)
    process.wait(timeout=120)
    wait_gone(victims, 60)


def newest_committed(cluster: EmbeddedCluster, job: str) -> int:
    """The newest committed step, -1 for none."""
    step = (cluster.job(job) or {}).get("committed_step")
    return -1 if step is None else int(step)


def wait_committed(cluster: EmbeddedCluster, job: str, step: int, process: subprocess.Popen[bytes]) -> int:
    """Wait until a step is committed; return the newest one."""
    committed = -1

    def look() -> bool:
        nonlocal committed
        committed = newest_committed(cluster, job)
        ended = f"the ranks ended with {process.returncode} before step {step} was committed"
        assert committed >= step or process.poll() is None, ended
        return committed >= step

    wait_for(look, f"step {step} to be committed", DEADLINE_S)
    return committed


def command_of(example: str, cluster: EmbeddedCluster, job: str, *options: str) -> list[str]:
    """Return the command that the guide prints for an example, in this store."""
    [line] = re.findall(rf"^((?:python|torchrun) .*examples/{example}\b.*?)(?: +#.*)?$", GUIDE, re.MULTILINE)
    launcher, *words = line.split()
    start = ["-m", "torch.distributed.run"] if launcher == "torchrun" else []
    return [sys.executable, *start, *words, "--store", cluster.config.store, "--job", job, *options]


def run(command: list[str], env: dict[str, str]) -> str:
    """What the command prints; it must succeed."""
    done = subprocess.run(
        command, env=env, cwd=EXAMPLES.parent, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def run_ranks(command: list[str], env: dict[str, str], count: int, folder: Path) -> str:
    """Run a command once a rank, at two free ports; return what all of them print. One that is killed is no failure."""
    own = {**env, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_two_free_ports()), "WORLD_SIZE": str(count)}
    logs = [folder / f"rank-{rank}.log" for rank in range(count)]
    processes = []
    try:
        for rank, log in enumerate(logs):
            with log.open("wb") as output:
                processes.append(subprocess.Popen(command, env={**own, "RANK": str(rank)}, stdout=output))
        for process in processes:
            assert process.wait(DEADLINE_S) in (0, -signal.SIGKILL)
    finally:
        kill(with_start_times(descendants([process.pid for process in processes])))
    return "".join(log.read_text() for log in logs)


def _two_free_ports() -> int:
    """Return a port that is free, as the next one is."""
    while True:
        with suppress(OSError), socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            second.bind(("127.0.0.1", port + 1))
            return port

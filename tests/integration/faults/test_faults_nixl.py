"""A sender's holder dies while its peer reads from its arena through NIXL: no byte is wrong, and no slot is lost."""

from __future__ import annotations

import importlib.util
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from memstore.core.arena.slot_table import SlotState
from memstore.core.wire.calls import VerifyStore
from memstore.shell.arena.slot_headers import HEADER_NBYTES, RECORD_DTYPE, SLOTS_NAME
from memstore.testing.clusters.processes import ProcessCluster, wait_for
from memstore.testing.ranks.fleet import Fleet
from memstore.testing.ranks.rank_process import RankNursery, together

TWO_RACKS = {"h0": {"rack": "r0", "memstore": "replica"}, "h1": {"rack": "r1", "memstore": "replica"}}
HAS_NIXL = any(importlib.util.find_spec(name) for name in ("nixl_cu12", "nixl_cu13"))


def agents_of(holder: int) -> dict[str, int]:
    """Return the pids of a holder's agents by what they do: "reads" and "serves"."""
    found = {}
    for task in Path(f"/proc/{holder}/task").iterdir():
        for pid in (task / "children").read_text().split():
            command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            if "memstore.shell.transport.nixl_agent" in command:
                found[command[3]] = int(pid)
    return found


def receiving_count(cluster: ProcessCluster, host: str) -> int:
    """Return how many slots of a host are being received into, as its table of them has it."""
    table = np.fromfile(cluster.arena(host) / SLOTS_NAME, RECORD_DTYPE, offset=HEADER_NBYTES)
    return int((table["state"] == SlotState.RECEIVING).sum())


def stats_of(cluster: ProcessCluster, host: str) -> dict[str, int]:
    """Return what a holder counts, as of its last heartbeat."""
    return next(row["stats"] for row in cluster.host_rows() if row["host"] == host)


@pytest.mark.skipif(not HAS_NIXL, reason="nixl is not installed (pip install nixl)")
@pytest.mark.parametrize("stopped", ["the agent that is read", "holder and agents"])
def test_a_holder_that_is_killed_in_the_middle_of_a_read(
    tmp_path: Path, nursery: RankNursery, monkeypatch: pytest.MonkeyPatch, stopped: str
) -> None:
    """Its successor gets the arena although its agents were stopped, the step commits, and the peer's copy is right."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    with ProcessCluster(tmp_path, TWO_RACKS, arena_bytes=512 << 20, transport="nixl") as cluster:
        fleet = Fleet(cluster, nursery, kib=8 << 10, stall_budget_s=30)  # what is small travels with its request
        ranks = fleet.begin(["h0", "h1"], last_step=2)
        holder = cluster.holders["h0"].pid
        agents = agents_of(holder)
        os.kill(agents["serves"], signal.SIGSTOP)
        ranks[0].call("put", step=3)
        wait_for(lambda: receiving_count(cluster, "h1") > 0, "slots for what h1 reads")
        if stopped == "holder and agents":
            os.kill(agents["reads"], signal.SIGSTOP)
            os.kill(holder, signal.SIGSTOP)
        cluster.kill_holder("h0")
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in agents.values()), "its agents to be gone")
        cluster.start_holder("h0")
        ranks[1].call("put", step=3)
        assert together(ranks, "wait", step=3)[0]["level"] == "committed"
        wait_for(lambda: stats_of(cluster, "h1")["withheld_bytes"] == 0, "the slots of the read that was given up")
        assert "was given up" in (cluster.folder / "holder-h1.log").read_text()
        verify = cluster.ask(VerifyStore()).found
        assert all(answer.damaged == 0 and answer.chunks > 0 for answer in verify.values())
        together(ranks, "train", first=4, last=5)
        fleet.kill(ranks)
        cluster.lose_host("h0")
        cluster.start_holder("h0")
        cluster.wait_live("h0", "h1")
        _, got = fleet.resume(["h0", "h1"])
        assert (got["step"], got["steps_lost"]) == (5, 0)

"""Saved on four ranks through DCP, a host lost, loaded on other numbers of ranks: as stock DCP does (R22, R27)."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from repository import SUPPORT
from variants import later

from memstore.testing.clusters.processes import ProcessCluster, wait_for
from memstore.testing.ranks.dcp_ranks import DcpFleet, run
from memstore.testing.ranks.rank_process import RankNursery

PROGRAM = SUPPORT.joinpath("dcp_programs.py")
TRAINING = SUPPORT.joinpath("sharded_training.py")
HOSTS = ("h1", "h2", "h3", "h4")
RANK_HOSTS = {2: "h1 h2", 3: "h1 h2 h3", 4: "h1 h2 h3 h4", 6: "h1 h2 h3 h1 h2 h3", 8: "h1 h2 h3 h1 h2 h3 h1 h2"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, dcp_nursery: RankNursery) -> Iterator[tuple[DcpFleet, Path]]:
    """One step of four ranks on four hosts, one host lost with its memory; and the same in stock DCP's files."""
    folder = tmp_path_factory.mktemp("dcp")
    with ProcessCluster(folder / "cluster", {host: {} for host in HOSTS}) as cluster:
        fleet = DcpFleet(cluster, dcp_nursery, PROGRAM, folder)
        ranks = fleet.launch(HOSTS)
        replies = run(ranks, "save", step=1, stock=str(folder / "stock"))
        assert {reply["level"] for reply in replies} == {"committed"}
        fleet.leave(ranks)
        cluster.lose_host("h4")
        yield fleet, folder / "stock"
        dcp_nursery.kill_all()


@pytest.mark.parametrize("world_size", [3, 8, *later(2, 6)])
def test_what_is_loaded_is_what_stock_dcp_loads(saved: tuple[DcpFleet, Path], world_size: int) -> None:
    """DTensors of every placement, FSDP2 and FSDP2 x TP models, AdamW state by name: equal bit for bit everywhere."""
    fleet, stock = saved
    ranks = fleet.launch(RANK_HOSTS[world_size].split())
    replies = run(ranks, "compare", seed=7, stock=str(stock))
    fleet.leave(ranks)
    assert [reply["differing"] for reply in replies] == [[]] * world_size
    assert {reply["step"] for reply in replies} == {1}
    changed = set().union(*(reply["changed"] for reply in replies))
    assert {".placed.few", ".placed.uneven", ".fsdp_tp.optim.state.1.up.weight.exp_avg_sq"} < changed
    assert len(changed) > 65  # all but what is empty, or the same for every seed


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_a_named_optimizer_is_loaded_by_other_ranks(
    saved: tuple[DcpFleet, Path], dcp_nursery: RankNursery, tmp_path: Path, optimizer: str
) -> None:
    """Its state of what is frozen too, none of what had none, in other groups; DCP alone would leave it out (D270)."""
    fleet = DcpFleet(saved[0].cluster, dcp_nursery, TRAINING, tmp_path, job=f"named-{optimizer}")
    ranks = fleet.launch(["h1", "h2"])
    one = run(ranks, "save", step=1, optimizer=optimizer)
    fleet.leave(ranks)
    ranks = fleet.launch(["h1", "h2", "h3"])
    for groups in (1, 2):
        for reply in run(ranks, "load", groups=groups, optimizer=optimizer):
            assert (reply["digest"], reply["count"]) == (one[0]["digest"], 4)
            assert "ManifestMismatch: the optimizer's group of 'body.weight' was stored with" in reply["error"]
            assert "load_dcp(states, reader)" in reply["error"]
    fleet.leave(ranks)


def test_sharded_training_goes_on_bit_for_bit(
    saved: tuple[DcpFleet, Path], dcp_nursery: RankNursery, tmp_path: Path
) -> None:
    """Frozen at the restore and thawed, a head without state yet, a put before the first step; FSDP2 and FSDP1."""
    fleet = DcpFleet(saved[0].cluster, dcp_nursery, TRAINING, tmp_path, job="sharded")
    ranks = fleet.launch(["h1", "h2"])
    kinds = [("FSDP2", row) for row in ("frozen", "without state yet", "before the first step")]
    kinds += [("FSDP1", "before the first step"), ("FSDP1", "trained"), ("FSDP1, flat", "trained")]
    rows = itertools.product(kinds, ("AdamW", "SGD"), ("itself", "by name"))
    for step, ((kind, row), optimizer, form) in enumerate(rows):
        replies = run(ranks, "restored", kind=kind, optimizer=optimizer, form=form, step=step, row=row)
        assert replies == [{"is_equal": True, "left": []}] * 2, (kind, row, optimizer, form)
    for reply in run(ranks, "refused", step=99):
        assert reply["is_equal"]
        assert "UnsupportedState: state['model']['body.weight'] is a torch.distributed._shard" in reply["error"]
        assert "dcp.save(state, storage_writer=store.dcp_writer(step))" in reply["error"]
    fleet.leave(ranks)


def test_training_goes_on_with_any_number_of_ranks(tmp_path: Path, dcp_nursery: RankNursery) -> None:
    """2 ranks save, 8 go on, then 3, then 2: every launch adopts the last step, and has room for its own (R10, R27)."""
    with ProcessCluster(tmp_path / "cluster", {host: {} for host in HOSTS[:3]}) as cluster:
        fleet = DcpFleet(cluster, dcp_nursery, PROGRAM, tmp_path)
        ranks = fleet.launch(["h1", "h2"])
        run(ranks, "save", step=1, what="placed")
        fleet.leave(ranks)
        for step, world_size in ((2, 8), (3, 3), (4, 2)):
            ranks = fleet.launch(RANK_HOSTS[world_size].split())
            for reply in run(ranks, "shift", seed=step - 1, step=step):
                assert reply["level"] == "committed"
                assert reply["before"] == {"step": step - 1, "differing": []}
                assert reply["after"] == {"step": step, "differing": []}
            fleet.leave(ranks)
        dcp_nursery.kill_all()


def test_a_step_cut_off_in_mid_replication_is_passed_over_on_all_ranks(
    tmp_path: Path, dcp_nursery: RankNursery
) -> None:
    """The newest step's copies are not whole: three ranks all load the one before, whole and right (R24)."""
    with ProcessCluster(tmp_path / "cluster", {host: {} for host in HOSTS}) as cluster:
        fleet = DcpFleet(cluster, dcp_nursery, PROGRAM, tmp_path, keep_steps=2)
        ranks = fleet.launch(HOSTS)
        run(ranks, "save", step=1, what="placed")
        cluster.signal_holder("h2", signal.SIGSTOP)
        run(ranks, "save", step=2, what="placed", wait=None)
        holds = [host for host in HOSTS if host != "h2"]
        wait_for(lambda: any(len(cluster.inventory(h)["manifests"]) > 2 for h in holds), "copies of step 2")
        fleet.kill(ranks)
        cluster.lose_host("h2")
        ranks = fleet.launch(["h1", "h3", "h4"])
        replies = run(ranks, "check", seed=1)
        fleet.leave(ranks)
        dcp_nursery.kill_all()
    assert replies == [{"step": 1, "differing": []}] * 3

"""DCP saves of four ranks on four hosts: in threads, in part, when one fails; and who follows them."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dcp_programs import full
from repository import SUPPORT
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan
from variants import later

from memstore.client.dcp.reader import DcpReader, load
from memstore.client.reader import Reader
from memstore.core.arena.slot_table import SlotState
from memstore.core.format.manifest import decode_manifest
from memstore.errors import LeaseLost, ManifestMismatch, NoNewerStep, StepDropped
from memstore.shell.arena.slot_headers import HEADER_NBYTES, RECORD_DTYPE
from memstore.shell.rank.admin_link import Tool
from memstore.testing.clusters.processes import ProcessCluster, wait_for
from memstore.testing.ranks.dcp_ranks import DcpFleet, outcomes, run
from memstore.testing.ranks.rank_process import RankFailed, RankNursery, RankProcess

PROGRAM = SUPPORT.joinpath("dcp_programs.py")
HOSTS = ("h1", "h2", "h3", "h4")
JOBS = itertools.count()
CHUNK_BYTES = 64 << 10


class Site:
    """Four ranks of one job; `steps` counts up, also if the step before was skipped."""

    def __init__(self, cluster: ProcessCluster, nursery: RankNursery, folder: Path, **job_fields: Any) -> None:
        self.cluster = cluster
        self.fleet = DcpFleet(cluster, nursery, PROGRAM, folder, job=f"job{next(JOBS)}", **job_fields)
        self.ranks: list[RankProcess] = self.fleet.launch(HOSTS)
        run(self.ranks, "agree")
        self.steps = itertools.count(1)

    def save(self, name: str = "save", **arguments: Any) -> int:
        """Save the next step, which goes well."""
        step = next(self.steps)
        replies = run(self.ranks, name, step=step, **arguments)
        assert {reply.get("level", "committed") for reply in replies} == {"committed"}
        return step

    def save_fails(self, name: str, **arguments: Any) -> list[str]:
        """Save the next step, which fails on every rank; return what each raised."""
        found = outcomes(self.ranks, name, step=next(self.steps), **arguments)
        return [str(failed) for failed in found if isinstance(failed, RankFailed)]

    def check(self, step: int, what: str = "placed") -> None:
        """Every rank loads the step as it was."""
        replies = run(self.ranks, "check", seed=step, step=step, what=what)
        assert replies == [{"step": step, "differing": []}] * len(HOSTS)

    def check_no_leak(self) -> None:
        """The ranks leave; then every slot of every host is free, or holds what a manifest names."""
        self.fleet.leave(self.ranks)
        for host in HOSTS:
            wait_for(lambda h=host: _is_clean(self.cluster, h), f"nothing but stored chunks on {host}")  # type: ignore[misc]


def _is_clean(cluster: ProcessCluster, host: str) -> bool:
    folder = cluster.arena(host)
    table = np.fromfile(folder / "slots", RECORD_DTYPE, offset=HEADER_NBYTES)
    used = table[table["state"] != SlotState.FREE]
    manifests = [data for name, data in cluster.manifests(host).items() if not name.startswith(".")]
    named = {chunk.digest for data in manifests for chunk in decode_manifest(data).chunks}
    return set(used["state"].tolist()) <= {SlotState.SEALED} and set(used["digest"].tolist()) == named


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    hosts: dict[str, dict[str, str]] = {host: {} for host in HOSTS}
    with ProcessCluster(tmp_path_factory.mktemp("dcp") / "cluster", hosts) as made:
        yield made


@pytest.fixture
def site(cluster: ProcessCluster, dcp_nursery: RankNursery, tmp_path: Path) -> Iterator[Site]:
    yield Site(cluster, dcp_nursery, tmp_path, stall_budget_s=2.0)
    dcp_nursery.kill_all()


def test_async_save_in_a_thread_copies_the_state_as_it_was(site: Site) -> None:
    """Training overwrites the state while it is saved: each load brings the state of the save's begin (R11)."""
    for _ in range(3):
        step = site.save(what="placed", how="thread")
    site.check(step)
    site.check_no_leak()


@pytest.mark.parametrize("is_staged_elsewhere", [False, True])
def test_async_save_in_a_process_is_refused(site: Site, is_staged_elsewhere: bool) -> None:
    """By name, with the way that works, and before anything is staged: the step is not even begun."""
    failures = site.save_fails("save_in_process", is_staged_elsewhere=is_staged_elsewhere)
    assert len(failures) == len(HOSTS)
    assert all("ConfigError" in text and "pass AsyncCheckpointerType.THREAD" in text for text in failures), failures
    step = site.save(what="placed", how="thread")
    site.check(step)
    site.check_no_leak()


@pytest.mark.parametrize("how", ["sync", "thread"])
def test_equal_tensors_are_stored_once(site: Site, how: str) -> None:
    """DCP's planner gives each replicated tensor to one rank; the others' staged copies take no slots."""
    step = site.save(what="replicas", how=how)
    site.check(step, "replicas")
    job = site.cluster.job(site.fleet.job)
    assert job is not None
    files = [data for h in HOSTS for name, data in site.cluster.manifests(h).items() if not name.startswith(".")]
    shards = {manifest.shard: manifest for manifest in map(decode_manifest, files)}
    stored = sum(m.nbytes for shard, m in shards.items() if (shard.job, shard.step) == (site.fleet.job, step))
    whole = 8 * 500 * 100 * 4
    assert whole <= stored < whole + (len(HOSTS) + 8) * CHUNK_BYTES  # staged ones lie on borders of chunks


def test_a_part_of_a_state_moves_a_part_of_the_chunks(site: Site) -> None:
    """Two small tensors out of a large state: only the chunks in which they lie are brought here (R27)."""
    step = site.save(what="placed")
    whole = run(site.ranks, "load_parts", seed=step, step=step, names=["large", "shard0", "hsdp"])
    parts = run(site.ranks, "load_parts", seed=step, step=step, names=["shard0", "hsdp"])
    assert [reply["differing"] for reply in (*whole, *parts)] == [[]] * 8
    assert all(0 < reply["nbytes"] <= 4 * CHUNK_BYTES for reply in parts)  # the metadata's, too
    assert all(reply["nbytes"] > 250_000 for reply in whole)


@pytest.mark.parametrize(
    ("bad_rank", "is_async"),
    [
        (0, False),
        (2, True),
        pytest.param(0, True, marks=pytest.mark.long),
        pytest.param(2, False, marks=pytest.mark.long),
    ],
)
def test_a_save_that_fails_on_one_rank_fails_on_all(site: Site, bad_rank: int, is_async: bool) -> None:
    """All ranks see CheckpointException with the cause; the step is not committed; the next saves work (R12)."""
    before = site.save(what="placed")
    for _ in range(3):
        failures = site.save_fails("save_faulty", bad_rank=bad_rank, is_async=is_async)
        assert len(failures) == len(HOSTS)
        assert all("CheckpointException" in text and "the planner failed" in text for text in failures)
    site.check(before)
    step = site.save(what="placed", how="thread")
    site.check(step)
    site.check_no_leak()


def test_a_rank_without_room_or_with_nonsense_fails_the_save_on_all(site: Site) -> None:
    """No free slots within the stall budget, and a tensor that cannot be stored: an error on all ranks; saves go on."""
    site.save(what="placed")
    failures = site.save_fails("save_without_room", bad_rank=1)
    assert len(failures) == len(HOSTS)
    assert all("no free slots within 2 s: no older step of this rank waits for a commit" in text for text in failures)
    failures = site.save_fails("save_unsupported", bad_rank=3)
    assert len(failures) == len(HOSTS)
    step = site.save("put_plain")
    assert step == 4
    site.check(site.save(what="placed"))
    site.check_no_leak()


def test_saves_that_do_not_wait(site: Site) -> None:
    """wait=None ends before the commit; two saves at once, over groups of their own, both end well."""
    site.check(site.save("save_without_wait"))
    first = next(site.steps)
    replies = run(site.ranks, "save_twice", first=first)
    assert {reply["levels"][-1] for reply in replies} == {"committed"}
    assert next(site.steps) == first + 1
    site.check(first + 1)
    site.check_no_leak()


@pytest.mark.parametrize("options", [{"use_collectives": False}, {"no_dist": True}], ids=["no collectives", "no dist"])
def test_ranks_that_save_for_themselves_load_what_they_saved(site: Site, options: dict[str, bool]) -> None:
    """Without a plan of all ranks every rank's own metadata is read again, never another's."""
    step = site.save("save_alone", **options)
    loading = {name: value for name, value in options.items() if name == "no_dist"}
    replies = run(site.ranks, "load_alone", step=step, **loading)
    assert [reply["differing"] for reply in replies] == [[]] * len(HOSTS)


def test_a_group_of_some_ranks_saves_while_the_others_put(site: Site) -> None:
    """The coordinator is not rank 0; every rank of the job can load what the group saved."""
    replies = run(site.ranks, "save_in_group", step=next(site.steps), members=[1, 3])
    assert [reply["differing"] for reply in replies] == [[]] * len(HOSTS)


@pytest.mark.parametrize("members", [[1, 3], [0], [2]], ids=str)
def test_some_ranks_that_would_wait_for_the_others_are_refused_as_they_plan(site: Site, members: list[int]) -> None:
    """On all ranks of the group, with both numbers; the next save of all is as ever."""
    failures = site.save_fails("save_in_group_and_wait", members=members)
    assert len(failures) == len(members)
    assert all(f"{len(members)} of the 4 ranks" in text and "wait=None" in text for text in failures)
    site.check(site.save(what="placed"))


@pytest.mark.parametrize("how", ["sync", "thread"])
def test_a_save_that_outgrows_its_room_waits_for_more(site: Site, how: str) -> None:
    """Where a put would skip its step: a save that waits for its commit has no way to report it."""
    first = next(site.steps)
    replies = run(site.ranks, "save_and_outgrow", step=first, how=how)
    assert replies == [{"level": "committed", "reason": ""}] * len(HOSTS)


def test_objects_have_room_though_they_become_bytes_behind_training(site: Site) -> None:
    """What staging cannot copy is counted there: every save has room for it, and so has the next."""
    for _ in range(3):
        step = site.save(what="mostly_objects", how="thread")
    site.check(step, "mostly_objects")
    site.check_no_leak()


def test_a_save_that_takes_more_than_was_counted_leaves_the_next_its_room(site: Site) -> None:
    """It takes the room of the next version, which no commit gives back: as much is claimed for it."""
    for _ in range(3):
        site.save(what="growing_objects", how="thread")
    site.check_no_leak()


# -- followers (R36) ------------------------------------------------------------------------------


def loaded(reader: Reader, step: int | None = None) -> tuple[int, bool]:
    """Load a part of what was saved into this process alone; say which step it is, and whether it is as it was."""
    state: dict[str, Any] = {"large": torch.zeros(600, 501), "nested": {"plain": torch.zeros(13, 3), "step": -1}}
    found = reader.load(state, step)
    same = torch.equal(state["large"], full(found + 9, 600, 501))
    same = same and torch.equal(state["nested"]["plain"], full(found + 10, 13, 3))
    return found, same and state["nested"]["step"] == found


@pytest.fixture
def reader(cluster: ProcessCluster) -> Iterator[Reader]:
    """Of the job that `site` has yet to begin."""
    with Reader(f"job{next(JOBS) + 1}", Tool(cluster.arena("h1")), cluster.config) as found:
        yield found


def test_a_follower_comes_first_and_loads_what_it_leased_among_saves(
    reader: Reader, cluster: ProcessCluster, dcp_nursery: RankNursery, tmp_path: Path
) -> None:
    """keep_steps=1: a step is whole for as long as it is leased, and goes after that; the newest comes by itself."""
    assert reader.latest_step() is None
    with pytest.raises(NoNewerStep, match="no step of job"):
        reader.wait_newer(None, timeout_s=0.1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(reader.wait_newer, None, 120.0)
        site = Site(cluster, dcp_nursery, tmp_path)
        first = site.save(what="placed")
        assert (waiting.result(), reader.latest_step()) == (first, first)
    with reader.lease() as leased:
        for _ in range(3):
            newest = site.save(what="placed")
        assert (leased.step, leased.why_not_kept) == (first, "")
        assert loaded(reader, first) == (first, True)
    assert reader.wait_newer(first, 10.0) == newest
    assert loaded(reader) == (newest, True)
    site.check(site.save(what="placed"))
    with pytest.raises(StepDropped, match="any more"):  # torch's CheckpointException is no Exception
        loaded(reader, first)
    site.save("put_plain")
    with pytest.raises(ManifestMismatch, match=r"get it with store\.get"):
        loaded(reader)
    site.check_no_leak()
    dcp_nursery.kill_all()


class Slow(DefaultLoadPlanner):
    """Lets training go on in the middle of a load."""

    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__()
        self.work = work

    def create_local_plan(self) -> LoadPlan:
        self.work()
        return super().create_local_plan()


def test_a_lease_ends_with_its_time_and_with_its_process(reader: Reader, site: Site, cluster: ProcessCluster) -> None:
    """A load that outlives it is LeaseLost and has no other step's bytes; a reader that is killed keeps nothing."""

    def train() -> None:
        for _ in range(2):
            site.save(what="placed")

    def await_end() -> None:
        wait_for(lambda: step not in {info.step for info in reader.steps()}, "the end of the lease")

    step = site.save(what="placed")

    slow = DcpReader(reader.ranges(), None, lease=lambda number, attempt: reader.lease(number, limit_s=0.01))
    state = {"large": torch.zeros(600, 501)}
    with pytest.raises(LeaseLost, match=rf"step {step} of job .* limit_s=0.01 is over"):
        load(state, slow, process_group=None, planner=Slow(lambda: (train(), await_end())))
    assert not state["large"].any()
    with pytest.raises(RuntimeError, match="Missing key"):
        reader.load({"unknown": torch.zeros(1)})
    step = site.save(what="placed")
    program = "import memstore, sys; config = memstore.Config(store=sys.argv[2], arena_dir=sys.argv[3]); "
    program += "leased = memstore.reader(sys.argv[1], config=config).lease(); print(leased.step, flush=True); input()"
    config = cluster.config
    with subprocess.Popen(
        [sys.executable, "-c", program, site.fleet.job, config.store, config.arena_dir],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "MEMSTORE_HOST": "h1"},
    ) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) == step
        train()
        assert loaded(reader, step) == (step, True)
        process.kill()
    await_end()


def test_processes_that_follow_together_load_one_step(
    cluster: ProcessCluster, dcp_nursery: RankNursery, tmp_path: Path
) -> None:
    """Four ranks saved; two load, one of which leased another step: both take the coordinator's, bit for bit."""
    site = Site(cluster, dcp_nursery, tmp_path, keep_steps=2)
    steps = [site.save(what="placed") for _ in range(2)]
    followers = DcpFleet(cluster, dcp_nursery, PROGRAM, tmp_path, job=f"job{next(JOBS)}").launch(["h2", "h3"])
    assert run(followers, "follow", job=site.fleet.job, step=steps[1]) == [{"step": 2, "differing": []}] * 2
    dcp_nursery.kill_all()


# -- dcp reshard --------------------------------------------------------------------------------------
# Saved on four ranks through DCP, a host lost, loaded on other numbers of ranks: as stock DCP does (R22, R27).


TRAINING = SUPPORT.joinpath("sharded_training.py")
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

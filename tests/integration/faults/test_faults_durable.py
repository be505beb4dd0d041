"""The durable tier: used for what RAM lost, never waited for by a put (R31)."""

from __future__ import annotations

import re
import resource
import shutil
import time
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner
from stalls import put_within

from memstore.admin.cluster import refuse_last_copies
from memstore.cli import main
from memstore.core.durable.increments import needed_names
from memstore.core.durable.markers import decode_marker
from memstore.core.wire.calls import RemoveJob
from memstore.errors import CapacityError
from memstore.testing.clusters.processes import ProcessCluster, wait_for
from memstore.testing.nemesis.load_meter import LoadMeter
from memstore.testing.ranks.fleet import Fleet
from memstore.testing.ranks.rank_process import RankFailed, RankNursery, together

WRITE_S = 6.0  # that the first write is held, where the length of a write matters
TWO_RACKS = {"h0": {"rack": "r0", "memstore": "replica"}, "h1": {"rack": "r1", "memstore": "replica"}}


def test_all_memory_lost_is_restored_from_durable_storage(tmp_path: Path, nursery: RankNursery) -> None:
    """The first committed step is on disk at once, with its marker; both hosts lose their memory, and it comes back."""
    durable = tmp_path / "durable"
    durable.mkdir()
    with ProcessCluster(tmp_path / "cluster", TWO_RACKS, recovery_grace_s=0.5) as cluster:
        fleet = Fleet(cluster, nursery, durable=str(durable), durable_every=1000)
        ranks = fleet.begin(["h0", "h1"], last_step=0)
        assert ranks[0].call("wait", step=0, level="durable")["level"] == "durable"
        assert [path.name for path in durable.rglob("marker")] == ["marker"]
        together(ranks, "train", first=1, last=3)
        fleet.kill(ranks)
        for host in ("h0", "h1"):
            cluster.lose_host(host)
            cluster.start_holder(host)
        cluster.wait_live("h0", "h1")
        ranks, got = fleet.resume(["h0", "h1"])
        assert (got["step"], got["verdict"]) == (0, "durable")
        assert got["bytes_by_tier"]["peer"] == got["bytes_by_tier"]["local"] == 0
        together(ranks, "train", first=1, last=2)


def test_durable_storage_alone_knows_the_job(tmp_path: Path, nursery: RankNursery) -> None:
    """No holder, journal or controller of the old store is left: the marker alone makes get return its step (R23)."""
    durable = tmp_path / "durable"
    durable.mkdir()
    with ProcessCluster(tmp_path / "one", TWO_RACKS) as cluster:
        fleet = Fleet(cluster, nursery, durable=str(durable), durable_every=1000)
        ranks = fleet.begin(["h0", "h1"], last_step=0)
        ranks[0].call("wait", step=0, level="durable")
        fleet.kill(ranks)
    with ProcessCluster(tmp_path / "two", TWO_RACKS) as cluster:
        fleet = Fleet(cluster, nursery, durable=str(durable), durable_every=1000)
        ranks, got = fleet.resume(["h0", "h1"])
        assert (got["step"], got["verdict"]) == (0, "durable")
        together(ranks, "train", first=1, last=2)


def test_increments_are_restored_and_a_lost_base_is_refused_by_name(tmp_path: Path, nursery: RankNursery) -> None:
    """Step 0 left retention; what newer steps read of it stays. A person removes a file of it: the log says which."""
    durable = tmp_path / "durable"
    durable.mkdir()
    fields = {"durable": str(durable), "durable_every": 1, "durable_keep": 1, "kib": 2048}
    with ProcessCluster(tmp_path / "one", TWO_RACKS) as cluster:
        fleet = Fleet(cluster, nursery, **fields)
        ranks = fleet.begin(["h0", "h1"], last_step=0)
        ranks[0].call("wait", step=0, level="durable")
        whole = sum(path.stat().st_size for path in durable.rglob("rank-*"))
        for step in range(1, 4):
            together(ranks, "train", first=step, last=step)
            ranks[0].call("wait", step=step, level="durable")
        wait_for(lambda: len(list(durable.rglob("marker"))) == 1, "the removal of older steps")
        fleet.kill(ranks)
    [marker] = durable.rglob("marker")
    assert marker.parent.name == "3"
    assert sum(path.stat().st_size for path in marker.parent.glob("rank-*")) < 0.95 * whole
    older, names = min(needed_names([decode_marker(marker.read_bytes()).marker]).items())
    lost = durable / "train" / "1" / str(older.step) / min(names)
    with ProcessCluster(tmp_path / "two", TWO_RACKS) as cluster:
        ranks, got = Fleet(cluster, nursery, **fields).resume(["h0", "h1"])
        assert (got["step"], got["verdict"]) == (3, "durable")
        Fleet(cluster, nursery, **fields).kill(ranks)
    lost.unlink()
    with ProcessCluster(tmp_path / "three", TWO_RACKS) as cluster:
        ranks = Fleet(cluster, nursery, **fields).launch(["h0", "h1"])
        for rank in ranks:
            rank.begin("get")
        for rank in ranks:
            with pytest.raises(RankFailed, match="chunks damaged or missing at durable"):
                rank.finish()
        logs = "".join(path.read_text() for path in (tmp_path / "three").rglob("holder-*.log"))
        assert re.search(
            rf"/train/1/3 reads step {older.step} \(attempt 1\): .*{lost.name}.* put that step's files back", logs
        )


def test_a_crash_in_the_middle_of_two_writes_at_once_leaves_the_step_before(
    tmp_path: Path, nursery: RankNursery
) -> None:
    """A write begins beside one that is expected to end, and all memory is lost before either has (R31)."""
    durable, gate = tmp_path / "durable", tmp_path / "gate"
    durable.mkdir()
    fields = {"durable": str(durable), "durable_every": 1, "keep_steps": 4, "kib": 64}

    def is_held(step: int) -> bool:
        return len(list(tmp_path.glob(f"gate.waits-{step}-*"))) >= 2

    with ProcessCluster(tmp_path / "cluster", TWO_RACKS, durable_gate=gate, recovery_grace_s=0.5) as cluster:
        fleet = Fleet(cluster, nursery, **fields)
        ranks = fleet.begin(["h0", "h1"], last_step=0)
        wait_for(lambda: is_held(0), "the first write to begin")
        began_s = time.monotonic()
        wait_for(lambda: time.monotonic() - began_s > WRITE_S, "the time that the next writes may be expected to take")
        gate.touch()
        ranks[0].call("wait", step=0, level="durable")
        gate.unlink()
        for step in (1, 2):
            together(ranks, "train", first=step, last=step)
            wait_for(partial(is_held, step), "a write before the gate, the second one beside the first")
        assert [path.parent.name for path in durable.rglob("marker")] == ["0"]
        fleet.kill(ranks)
        for host in ("h0", "h1"):
            cluster.lose_host(host)
        gate.touch()
        for host in ("h0", "h1"):
            cluster.start_holder(host)
        cluster.wait_live("h0", "h1")
        ranks, got = fleet.resume(["h0", "h1"])
        assert (got["step"], got["verdict"]) == (0, "durable")
        together(ranks, "train", first=1, last=1)
        assert ranks[0].call("wait", step=1, level="durable")["level"] == "durable"


def test_a_removed_job_comes_back_from_durable_storage_and_stays(tmp_path: Path, nursery: RankNursery) -> None:
    """Its step has the number of the removed attempt; the next launch gets it, the one after that from RAM (R31)."""
    durable = tmp_path / "durable"
    durable.mkdir()
    with ProcessCluster(tmp_path / "cluster", TWO_RACKS, recovery_grace_s=0.5) as cluster:
        fleet = Fleet(cluster, nursery, durable=str(durable), durable_every=1000)
        ranks = fleet.begin(["h0", "h1"], last_step=0)
        ranks[0].call("wait", step=0, level="durable")
        fleet.kill(ranks)
        cluster.ask(RemoveJob(job="train", force=True))
        for verdict in ("durable", "local"):
            ranks, got = fleet.resume(["h0", "h1"])
            assert (got["step"], got["verdict"]) == (0, verdict)
            fleet.kill(ranks)


def test_a_durable_directory_that_is_none_is_refused_at_connect(tmp_path: Path, nursery: RankNursery) -> None:
    """The durable path lies below a file: connect says which path, for whether the job has history is unknown (R23)."""
    (tmp_path / "file").write_text("not a directory")
    with ProcessCluster(tmp_path / "cluster", TWO_RACKS) as cluster:
        fleet = Fleet(cluster, nursery, durable=str(tmp_path / "file" / "durable"))
        refused = fleet.spawn(["h0"])[0].fails("connect", **fleet.connect_command(0, 1))
        assert refused.error == "RecoveryError"
        assert str(tmp_path / "file" / "durable") in refused.message


def test_a_directory_that_breaks_shows_in_status_and_touches_nothing(
    tmp_path: Path, nursery: RankNursery, load_meter: LoadMeter
) -> None:
    """The durable directory goes away under a running job: puts commit all the same, status names the problem (R31)."""
    durable = tmp_path / "durable"
    durable.mkdir()
    with ProcessCluster(tmp_path / "cluster", TWO_RACKS) as cluster:
        fleet = Fleet(cluster, nursery, durable=str(durable), durable_every=1)
        ranks, _ = fleet.resume(["h0", "h1"])
        durable.rmdir()
        durable.write_text("not a directory")
        for step in range(4):
            put_within(ranks, load_meter, step, 5.0)
            together(ranks, "wait", step=step)
        wait_for(lambda: cluster.job("train")["durable_problem"], "the problem in status")
        assert str(durable) in cluster.job("train")["durable_problem"]


def test_a_full_directory_shows_in_status_and_commits_go_on(tmp_path: Path, nursery: RankNursery) -> None:
    """Writes begin to fail after the first durable step: commits go on in RAM, status says what failed (R31)."""
    durable = tmp_path / "durable"
    durable.mkdir()
    with ProcessCluster(tmp_path / "cluster", TWO_RACKS) as cluster:
        fleet = Fleet(cluster, nursery, durable=str(durable), durable_every=1)
        ranks = fleet.begin(["h0", "h1"], last_step=0)
        ranks[0].call("wait", step=0, level="durable")
        for process in cluster.holders.values():  # a file may not grow beyond this any more: journals fit, parts do not
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (64 << 10, 64 << 10))
        for step in range(1, 4):
            together(ranks, "train", first=step, last=step)
        wait_for(lambda: cluster.job("train")["durable_problem"], "the problem in status")
        assert cluster.job("train")["durable_step"] == 0
        assert cluster.job("train")["committed_step"] == 3


def test_stuck_storage_is_never_waited_for(tmp_path: Path, nursery: RankNursery, load_meter: LoadMeter) -> None:
    """Writes hang until they are let go: puts and commits go on meanwhile, and the durable step comes after (R31)."""
    durable, gate = tmp_path / "durable", tmp_path / "gate"
    durable.mkdir()
    with ProcessCluster(tmp_path / "cluster", TWO_RACKS, durable_gate=gate) as cluster:
        fleet = Fleet(cluster, nursery, durable=str(durable), durable_every=1000)
        ranks = fleet.begin(["h0", "h1"], last_step=0)
        wait_for(lambda: len(list(tmp_path.glob("gate.waits-*"))) == 2, "both hosts to stand before the gate")
        for step in range(1, 6):
            put_within(ranks, load_meter, step, 1.0)
            together(ranks, "wait", step=step)
        assert cluster.job("train")["durable_step"] is None
        gate.touch()
        wait_for(lambda: cluster.job("train")["durable_step"] is not None, "a durable step")


def test_a_compressed_and_encrypted_step_comes_back_with_its_key_only(tmp_path: Path, nursery: RankNursery) -> None:
    """Every process is gone; without the key get says which one is needed, with it every byte is there (R23, R25)."""
    durable, keys = tmp_path / "durable", [tmp_path / "key", tmp_path / "other"]
    durable.mkdir()
    for number, key in enumerate(keys):
        key.write_bytes(bytes([number]) * 32)
        key.chmod(0o600)
    fields = {"durable": str(durable), "durable_every": 1000, "durable_compression": "auto", "kib": 2048}
    with ProcessCluster(tmp_path / "one", TWO_RACKS) as cluster:
        fleet = Fleet(cluster, nursery, durable_key_file=str(keys[0]), durable_bytes_per_s=32 << 20, **fields)
        ranks = fleet.begin(["h0", "h1"], last_step=0)
        ranks[0].call("wait", step=0, level="durable")
        fleet.kill(ranks)
    with ProcessCluster(tmp_path / "two", TWO_RACKS) as cluster:
        wrong = Fleet(cluster, nursery, durable_key_file=str(keys[1]), **fields)
        ranks = wrong.launch(["h0", "h1"])
        for rank in ranks:
            rank.begin("get")
        for rank in ranks:
            with pytest.raises(RankFailed, match="it is under key"):
                rank.finish()
        wrong.kill(ranks)
        fleet = Fleet(cluster, nursery, durable_key_file=str(keys[0]), **fields)
        _, got = fleet.resume(["h0", "h1"])
        assert (got["step"], got["verdict"]) == (0, "durable")


def test_the_cap_on_what_a_host_writes_is_kept(tmp_path: Path, nursery: RankNursery) -> None:
    """Two hosts write at 1 MiB/s each what two ranks put: that takes its time, and commits do not wait."""
    durable = tmp_path / "durable"
    durable.mkdir()
    with ProcessCluster(tmp_path / "cluster", TWO_RACKS) as cluster:
        fleet = Fleet(cluster, nursery, durable=str(durable), durable_every=1000, durable_bytes_per_s=1 << 20, kib=2048)
        ranks, _ = fleet.resume(["h0", "h1"])
        together(ranks, "put", step=0)
        together(ranks, "wait", step=0)
        assert cluster.job("train")["durable_step"] is None
        ranks[0].call("wait", step=0, level="durable")
        events = cluster.events("train")
        at_s = {event["event"]: event["wall_s"] for event in events if event.get("step") == 0}
        took_s = at_s["durable"] - at_s["commit"]
        nbytes = sum(path.stat().st_size for path in durable.rglob("rank-*"))
        assert took_s > 0.7 * nbytes / 2 / (1 << 20)  # a host's last slice may begin, and need not end, within its rate


def test_a_closed_job_keeps_its_ram_when_the_durable_folder_was_emptied(tmp_path: Path, nursery: RankNursery) -> None:
    """job_ttl_s is over and the files are gone: the step is found missing, stays in RAM, and is written again (R19)."""
    durable = tmp_path / "durable"
    durable.mkdir()
    with ProcessCluster(tmp_path / "cluster", TWO_RACKS, recovery_grace_s=0.5) as cluster:
        fleet = Fleet(cluster, nursery, durable=str(durable), durable_every=1000, job_ttl_s=3.0)
        ranks = fleet.begin(["h0", "h1"], last_step=0)
        assert ranks[0].call("wait", step=0, level="durable")["level"] == "durable"
        together(ranks, "close")
        shutil.rmtree(durable / "train")

        def events() -> list[str]:
            return [event["event"] for event in cluster.events("train")]

        wait_for(lambda: "not_expired" in events() or "removed" in events(), "the end of job_ttl_s")
        assert "removed" not in events()
        wait_for(lambda: list(durable.rglob("marker")), "the step's second write")


def test_the_last_copies_are_freed_only_for_a_step_that_is_on_the_storage_now(
    tmp_path: Path, nursery: RankNursery
) -> None:
    """A slice was removed under a job that is durable: rm and `down --discard` refuse, and do it once it is back."""
    durable = tmp_path / "durable"
    durable.mkdir()
    with ProcessCluster(tmp_path / "cluster", TWO_RACKS) as cluster:
        fleet = Fleet(cluster, nursery, durable=str(durable), durable_every=1000)
        ranks = fleet.begin(["h0", "h1"], last_step=0)
        assert ranks[0].call("wait", step=0, level="durable")["level"] == "durable"
        together(ranks, "close")
        refuse_last_copies(cluster.config)
        part = min(durable.rglob("rank-1.*"))
        part.unlink()
        result = CliRunner().invoke(main, ["rm", "train", "--store", cluster.config.store])
        assert result.exit_code == 1
        assert part.name in result.output
        assert "train --yes`" in result.output
        assert cluster.job("train")["copies"] == 2
        wait_for(part.exists, "the slice to be written again")
        wait_for(lambda: cluster.job("train")["durable_seen_s"] is not None, "the step to be whole there")
        durable.rename(tmp_path / "away")
        with pytest.raises(CapacityError, match=r"step 0 cannot be read on durable storage: .*/durable"):
            refuse_last_copies(cluster.config)
        (tmp_path / "away").rename(durable)
        refuse_last_copies(cluster.config)
        result = CliRunner().invoke(main, ["rm", "train", "--store", cluster.config.store])
        assert result.exit_code == 0, result.output

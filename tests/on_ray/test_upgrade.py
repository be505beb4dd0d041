"""`memstore upgrade`: holders and controller are replaced one by one under a training that goes on (R40)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import pytest
import ray
from click.testing import CliRunner

import memstore
from memstore.admin import upgrade as rolling
from memstore.cli import main
from memstore.core.format.releases import FORMATS, Build
from memstore.errors import MemstoreError
from memstore.shell.on_ray.actors import NAMESPACE, RayMembership, controller_name
from memstore.testing.clusters.embedded import EmbeddedCluster
from memstore.testing.nemesis.checks import LATE_FACTOR
from memstore.testing.nemesis.load_meter import LoadMeter
from memstore.testing.ranks.rank_process import RankNursery, RankProcess, together

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]
JOB = "train"


@pytest.fixture(scope="module")
def cluster() -> Iterator[EmbeddedCluster]:
    """Start three hosts in racks of their own."""
    with EmbeddedCluster({f"h{number}": {"rack": f"r{number}"} for number in (1, 2, 3)}) as cluster:
        yield cluster


def launch(cluster: EmbeddedCluster, nursery: RankNursery, **options: Any) -> list[RankProcess]:
    """Start and connect a rank on each host."""
    ranks = [
        nursery.start(rank, {"MEMSTORE_HOST": host, "TORCHELASTIC_RUN_ID": "run"})
        for rank, host in enumerate(cluster.labels)
    ]
    config = {**asdict(cluster.config), "connect_timeout_s": 60.0}
    for rank in ranks:
        rank.begin("connect", job=JOB, rank=rank.rank, world_size=3, config=config, seed=1, nbytes=1 << 20, **options)
    for rank in ranks:
        rank.finish()
    return ranks


def run(cluster: EmbeddedCluster, *options: str, code: int = 0) -> dict[str, Any]:
    """Run `memstore upgrade` in this process."""
    result = CliRunner().invoke(main, ["upgrade", "--store", cluster.config.store, "--json", *options])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def processes(cluster: EmbeddedCluster) -> dict[str, int]:
    """Return the pid of every holder and of the controller."""
    actor = ray.get_actor(controller_name(cluster.config.store), namespace=NAMESPACE)
    holders = {host: int(row["pid"]) for host, row in RayMembership(cluster.config.store).hosts().items()}
    return {**holders, "controller": ray.get(actor.describe.remote())["pid"]}


def newest_committed(cluster: EmbeddedCluster) -> int:
    """Return the newest committed step; -1 while no controller answers."""
    try:
        job = cluster.job(JOB)
    except (MemstoreError, OSError):
        return -1
    return job["newest"]["committed_step"] if job is not None and job["newest"] is not None else -1


def test_a_training_goes_on_while_everything_is_replaced(
    cluster: EmbeddedCluster, nursery: RankNursery, load_meter: LoadMeter
) -> None:
    """Each process is another one; a put waits at most `stall_budget_s`, and the newest committed step never goes."""
    ranks, before = launch(cluster, nursery), processes(cluster)
    assert {reply["step"] for reply in together(ranks, "get")} == {None}
    together(ranks, "train", first=0, last=0)
    rows: list[dict[str, Any]] = []
    seen: list[int] = []
    step = 0
    with ThreadPoolExecutor(1) as thread:
        upgrade = thread.submit(run, cluster, "--restart")
        while not upgrade.done():
            step += 1
            rows += [
                row for reply in together(ranks, "puts", first=step, last=step, pause_s=1.0) for row in reply["rows"]
            ]
            seen.append(newest_committed(cluster))
    assert upgrade.result()["restarted"] == ["h1", "h2", "h3", rolling.CONTROLLER]
    after = processes(cluster)
    assert all(before[name] != after[name] for name in before)
    assert [row["error"] for row in rows if row["error"]] == []
    known = [one for one in seen if one >= 0]
    assert known == sorted(known), "a committed step was there, and then an older one was the newest"
    for row in rows:
        late_s = load_meter.late_s(row["began_s"], row["ended_s"])
        assert row["stall_s"] < cluster.config.stall_budget_s + 0.5 + LATE_FACTOR * late_s, row
    last = step + 1
    together(ranks, "train", first=last, last=last)
    for rank in ranks:
        rank.kill()
    ranks = launch(cluster, nursery)
    assert {reply["step"] for reply in together(ranks, "get")} == {last}
    together(ranks, "close")


def test_what_runs_the_installed_version_stays(cluster: EmbeddedCluster) -> None:
    """Without --restart nothing is to be done; --check touches nothing; a host that is not there is named."""
    before = processes(cluster)
    assert run(cluster)["restarted"] == []
    assert run(cluster, "--check", "--restart", "--host", "h2")["planned"] == ["h2"]
    words = run(cluster, "--host", "h9", code=1)["error"]["message"]
    assert words == "no host h9 runs a holder: h1, h2, h3 do"
    assert processes(cluster) == before


def test_another_wire_version_is_refused_before_anything_is_touched(
    cluster: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks keep the code that they began with: the remedy says what ends first."""
    before, real = processes(cluster), rolling._installed
    monkeypatch.setattr(
        rolling,
        "_installed",
        lambda nodes: {h: Build("0.3.0", {**b.formats, "wire": 99}) for h, b in real(nodes).items()},
    )
    words = run(cluster, code=1)["error"]["message"]
    assert f"memstore 0.3.0 is installed on h1, 0.2.0 runs there: wire format {FORMATS['wire']} becomes 99" in words
    assert f"then `memstore down --store {cluster.config.store}`" in words
    assert processes(cluster) == before


def test_a_restart_awaits_one_that_has_begun(cluster: EmbeddedCluster) -> None:
    """Two are asked for at once: one holder after the other, as where its supervisor was starting one."""
    before = processes(cluster)
    actor = ray.get_actor(controller_name(cluster.config.store), namespace=NAMESPACE)
    ray.get([actor.restart_holder.remote("h1") for _ in range(2)], timeout=2 * rolling.RESTART_S)
    after = processes(cluster)
    assert [host for host in before if after[host] != before[host]] == ["h1"]


def test_down_finds_the_holders_that_a_former_controller_started(cluster: EmbeddedCluster) -> None:
    """The controller was replaced: the arenas are released all the same."""
    run(cluster, "--restart")
    result = CliRunner().invoke(main, ["down", "--discard", "--yes", "--store", cluster.config.store, "--json"])
    memstore.start(cluster.config)  # for the other tests
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["kept"] == []

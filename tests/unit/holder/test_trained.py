"""Steps that are trained and never put count as lost where the store has learned of them (R33)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memstore.core.wire.messages import HostBeat
from memstore.testing.clusters.processes import ProcessCluster, wait_for
from memstore.testing.controller.holder import DirectedRank
from memstore.testing.controller.world import ControllerWorld, trained
from memstore.testing.ranks.fleet import Fleet
from memstore.testing.ranks.rank_process import RankNursery, together


def report(world: ControllerWorld, host: str, step: int, attempt: int = 1) -> None:
    """A heartbeat that says which step a host's ranks train."""
    world._handle(
        HostBeat(host, clock_s=world._sessions[host].clock_s, trained={"train": (attempt, step), "other": (1, 99)})
    )


def ask(world: ControllerWorld, rank: DirectedRank, verb: str, **body: Any) -> dict[str, Any]:
    """A question to the controller."""
    count = len(rank.answers.get(verb, ()))
    world.call(rank, verb, **body)
    assert world.run_until(lambda: len(rank.answers.get(verb, ())) > count)
    return dict(rank.answers[verb][-1])


def restored(world: ControllerWorld, ranks: int) -> dict[str, Any]:
    """What the next launch's get answers."""
    return dict(world.get(world.launch(ranks))[0])


def test_the_highest_that_any_host_received_counts_also_after_that_host_is_lost() -> None:
    """Step 1 is restored; status and plan say before what get says afterwards."""
    world, ranks = trained(3, 3)
    report(world, "h0", 7)
    report(world, "h1", 9)
    report(world, "h2", 8)
    assert ask(world, ranks[0], "status")["jobs"][0]["training_step"] == 9
    assert ask(world, ranks[0], "plan", lose=[])["steps_lost"] == 8
    world.kill_host("h1")
    world.run(8.0)
    assert restored(world, 3)["steps_lost"] == 8


def test_of_an_attempt_that_is_not_known_nothing_is_counted() -> None:
    """What a host says of a job or an attempt that is not there changes nothing."""
    world, ranks = trained(2, 2)
    report(world, "h0", 50, attempt=7)
    assert ask(world, ranks[0], "status")["jobs"][0]["training_step"] == 1
    assert restored(world, 2)["steps_lost"] == 0


def test_a_job_that_puts_every_tenth_step_is_reported_what_it_trains_again(
    tmp_path: Path, nursery: RankNursery
) -> None:
    """Its holder alone learns which step should_put() names, at most once a second, and outlives the ranks."""
    with ProcessCluster(tmp_path, {"h0": {}, "h1": {}}) as cluster:
        fleet = Fleet(cluster, nursery, put_every=10)
        ranks = fleet.begin(["h0", "h1"], last_step=0)
        for step in range(1, 9):
            assert not any(reply["due"] for reply in together(ranks, "due", step=step))

        def is_known() -> bool:
            together(ranks, "due", step=8)
            job = cluster.job("train")
            return job is not None and job["training_step"] == 8

        wait_for(is_known, "step 8 at the controller")
        fleet.kill(ranks)
        _, got = fleet.resume(["h0", "h1"])
        assert (got["step"], got["steps_lost"]) == (0, 8)

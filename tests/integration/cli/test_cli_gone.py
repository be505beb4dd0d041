"""`ls` and `plan` after everything was restarted and bytes were lost, on real processes (R22)."""

from __future__ import annotations

import shutil
from pathlib import Path

from cli_store import STEPS, run, run_json, train

from memstore.testing.clusters.processes import ProcessCluster, wait_for

HOSTS = {"h1": {"rack": "r1"}, "h2": {"rack": "r2"}}


def restart(cluster: ProcessCluster) -> None:
    """Start a controller and all holders after `kill_all`."""
    cluster.start_controller()
    for host in HOSTS:
        cluster.start_holder(host)
    cluster.wait_live(*HOSTS)


def manifests_count(cluster: ProcessCluster, host: str) -> int:
    return sum(1 for _ in (cluster.arena(host) / "manifests").iterdir())


def test_what_no_tier_has_is_one_line_after_a_restart(tmp_path: Path) -> None:
    """One arena lost: the newest step is there, all others are one line; every manifest lost: all are."""
    with ProcessCluster(tmp_path, HOSTS) as cluster:
        for rank in train(cluster.config):
            rank.close()
        wait_for(
            lambda: all(manifests_count(cluster, host) == len(HOSTS) for host in HOSTS), "older steps to be dropped"
        )
        cluster.kill_all()
        shutil.rmtree(cluster.arena("h1"))
        restart(cluster)
        [job] = run_json(cluster, "ls")["jobs"]
        assert [step["step"] for step in job["steps"]] == [STEPS - 1]
        assert [(span["first"], span["last"], span["count"]) for span in job["gone"]] == [(0, STEPS - 2, STEPS - 1)]
        screen = run(cluster, "ls", "llama3-8b").stdout
        assert f"steps 0 to {STEPS - 2} (attempt 1): gone, no copy in any tier" in screen
        plan = run(cluster, "plan", "llama3-8b")
        assert plan.stdout.startswith(f"llama3-8b: get() now restores step {STEPS - 1} (")
        assert "not used" not in plan.stdout

        cluster.kill_all()
        shutil.rmtree(cluster.arena("h1"))
        for manifest in (cluster.arena("h2") / "manifests").iterdir():
            manifest.unlink()
        restart(cluster)
        [job] = run_json(cluster, "ls")["jobs"]
        assert job["steps"] == []
        screen = run(cluster, "ls", "llama3-8b").stdout
        assert f"steps 0 to {STEPS - 1} (attempt 1): gone, no copy in any tier" in screen
        assert "committed" not in screen
        assert "degraded" not in screen
        plan = run(cluster, "plan", "llama3-8b")
        assert plan.exit_code == 3
        assert f"raises RecoveryError: no byte is left of the {STEPS} steps" in plan.stdout
        assert [line for line in plan.stdout.splitlines() if "not used" in line] == [
            f"  not used: steps 0 to {STEPS - 1} (attempt 1): gone, no copy in any tier"
        ]

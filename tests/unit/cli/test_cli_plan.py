"""`memstore plan` on a real store: what a restart would get, now and after losing hosts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cli_store import STEPS, open_store, run, run_json

from memstore.testing.clusters.processes import ProcessCluster


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    """A store with a trained job; no test changes it."""
    with open_store(tmp_path_factory.mktemp("store")) as cluster:
        yield cluster


@pytest.mark.parametrize(
    ("lose", "code", "outcome", "hosts"),
    [
        (["--lose", "h1"], 0, "whole", ["h1"]),
        (["--lose", "rack=r1"], 0, "whole", ["h1", "h3"]),
        (["--lose", "h1", "h2"], 3, "lost", ["h1", "h2"]),
        (["--lose", "h1,h2"], 3, "lost", ["h1", "h2"]),
        (["--lose", "h1", "--lose", "h2"], 3, "lost", ["h1", "h2"]),
        (["--lose=h2", "h3"], 0, "whole", ["h2", "h3"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_plan_says_what_losing_hosts_costs(
    store: ProcessCluster, lose: list[str], code: int, outcome: str, hosts: list[str]
) -> None:
    """One host or a whole rack costs nothing; both holders of a shard lose the run, exit code 3."""
    body = run_json(store, "plan", "llama3-8b", *lose, code=code)
    (plan,) = body["plans"]
    assert (body["lost_hosts"], plan["outcome"]) == (hosts, outcome)
    assert plan["odds"][0] == [1, 1.0, True]
    assert plan["odds"][1] == [2, pytest.approx(2 / 3), True]
    assert plan["step"] == (STEPS - 1 if outcome == "whole" else None)


def test_a_loss_of_no_host_is_refused(store: ProcessCluster) -> None:
    """An empty word, as of a variable that is not set, would be a plan that loses nothing."""
    for word in ("", ","):
        result = run(store, "plan", "llama3-8b", "--lose", word)
        assert result.exit_code == 1
        assert "names no host" in result.stderr


def test_plan_in_words(store: ProcessCluster) -> None:
    """The first line is the answer; nothing is lost by asking."""
    result = run(store, "plan", "--lose", "h1")
    assert result.exit_code == 0
    assert result.stdout.startswith(f"llama3-8b: losing h1 now restores step {STEPS - 1} (")
    assert "0 committed steps lost" in result.stdout
    assert "rank 0 of the lost hosts is taken to start on h2: started on a new host, all" in result.stdout
    result = run(store, "plan", "--lose", "h1", "h2")
    assert result.stdout.startswith("llama3-8b: losing h1, h2 now loses the run: ")
    assert not store.host_events("host_dead")


def test_plan_without_hosts_says_what_get_would_do_now(store: ProcessCluster) -> None:
    """Without --lose the question is what a restart would get: the newest step, from this host, nothing lost."""
    result = run(store, "plan", "llama3-8b")
    assert result.exit_code == 0
    assert result.stdout.startswith(f"llama3-8b: get() now restores step {STEPS - 1} (")
    assert "0 committed steps lost" in result.stdout
    body = run_json(store, "plan", "llama3-8b")
    assert (body["lost_hosts"], [plan["outcome"] for plan in body["plans"]]) == ([], ["whole"])
